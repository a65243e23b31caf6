"""What CUDA's errors mean to a pipeline."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import cupy as cp

from framepipe.errors import DeviceError

P = ParamSpec("P")
R = TypeVar("R")

CUDA_ERRORS: tuple[type[Exception], ...] = (cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError)
"""What a call of the runtime raises, and what one of the driver does: CuPy launches kernels through the latter."""
OUT_OF_MEMORY = 2
PIN_REFUSED = (1, 2, 208, 801)
"""InvalidValue, MemoryAllocation, AlreadyMapped, NotSupported: what a refused pin has been seen to return."""
_PIN_REFUSED_TEXT = re.compile(
    r"CUDA_ERROR_(INVALID_VALUE|OUT_OF_MEMORY|ALREADY_MAPPED|NOT_SUPPORTED)"
    r"|CUDA error: (invalid argument|out of memory|resource already mapped|operation not supported)"
)
"""The same where a library raises errors of its own, without a code: cuda.core names them, PyTorch describes them."""
LOST = (214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719)
"""Errors after which a context is lost, by the reference of the CUDA runtime: uncorrectable ECC and NVLink errors,
illegal address, launch time-out and failure, and their like. 701, too many resources for a launch, is none of them."""


def is_lost(error: BaseException) -> bool:
    """Whether nothing more runs in the context that raised ``error``."""
    return getattr(error, "status", None) in LOST


def is_refused(error: BaseException) -> bool:
    """Whether an error of CUDA, of cuda.core or of PyTorch means that so much is not page-locked."""
    if isinstance(error, CUDA_ERRORS):
        return getattr(error, "status", None) in PIN_REFUSED
    return bool(_PIN_REFUSED_TEXT.search(str(error)))


def explain(error: BaseException) -> BaseException:
    """A `DeviceError` for an error of CUDA; any other as it is."""
    if not isinstance(error, CUDA_ERRORS):
        return error
    if is_lost(error):
        return DeviceError(
            f"the GPU context is lost ({error}): nothing more can run on the GPU in this process; start a new one. "
            "CUDA tells late, so an earlier launch may be the cause: set CUDA_LAUNCH_BLOCKING=1 in the environment to "
            "find it"
        )
    return DeviceError(f"CUDA failed: {error}")


def explained(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator: what CUDA raises in ``method`` comes out as `explain` tells it."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except CUDA_ERRORS as error:
            raise explain(error) from error

    return call
