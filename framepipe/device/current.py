"""Making a GPU current for a while without touching another one.

CuPy goes back by ``cudaSetDevice``, which makes the context of the device that it sets (since CUDA 12): some hundred MB
on the first GPU, although nobody uses it. The driver's stack of contexts goes back to none where there was none.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_NAME = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@contextmanager
def current(number: int) -> Iterator[None]:
    """GPU ``number`` in the calling thread, with its primary context, and then what was there before."""
    stack = _stack()
    if stack is None or stack[0](_context(number)):
        with importlib.import_module("cupy").cuda.Device(number):  # or raises what is wrong
            yield
        return
    try:
        yield
    finally:
        stack[1](ctypes.byref(ctypes.c_void_p()))


@cache
def _stack() -> tuple[Any, Any] | None:
    """How to push a context and to pop it.

    With the interpreter lock held: both touch what is the thread's own and take no time, and every frame that is let go
    needs them, so that letting go of the lock would cost it two waits for getting it back.
    """
    if _driver() is None:
        return None
    quick = ctypes.PyDLL(_NAME)
    return quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2


def driver_is_there() -> bool:
    """Whether there is a driver; CUDA is not begun, which a process could not fork behind."""
    return _library() is not None


def _library() -> Any:
    try:
        return ctypes.CDLL(_NAME)
    except OSError:
        return None


@cache
def _driver() -> Any:
    """The driver's library, or None where it has another name than usual."""
    driver = _library()
    return None if driver is None or driver.cuInit(0) else driver


@cache
def _context(number: int) -> ctypes.c_void_p:
    """The primary context, the one that CuPy and the runtime use; kept until the process ends, like everybody's."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver = _driver()
    if not driver.cuDeviceGet(ctypes.byref(device), number):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    return context  # NULL where that failed: it cannot be pushed
