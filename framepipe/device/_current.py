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


@contextmanager
def current(number: int) -> Iterator[None]:
    """GPU ``number`` in the calling thread, with its primary context, and then what was there before."""
    driver = _driver()
    if driver is None or driver.cuCtxPushCurrent_v2(_context(number)):
        with importlib.import_module("cupy").cuda.Device(number):  # or raises what is wrong
            yield
        return
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def _driver() -> Any:
    """The driver's library, or None where it has another name than usual."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


@cache
def _context(number: int) -> ctypes.c_void_p:
    """The primary context, the one that CuPy and the runtime use; kept until the process ends, like everybody's."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver = _driver()
    if not driver.cuDeviceGet(ctypes.byref(device), number):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    return context  # NULL where that failed: it cannot be pushed
