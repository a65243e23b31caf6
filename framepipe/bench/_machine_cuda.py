"""What a GPU is, and how fast its bus carries pinned memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

import cupy as cp
import numpy as np

from framepipe.device.current import current

_NBYTES = 256 << 20
_TIMES = 5


def examine(number: int) -> dict[str, Any]:
    """Name, versions, memory and measured bus of CUDA device ``number``; makes a context on it."""
    with current(number):
        free, total = cp.cuda.runtime.memGetInfo()
        name = cp.cuda.runtime.getDeviceProperties(number)["name"]
        return {
            "name": name.decode(errors="replace") if isinstance(name, bytes) else str(name),
            "cuda": _version(cp.cuda.runtime.runtimeGetVersion()),
            "cuda_of_driver": _version(cp.cuda.runtime.driverGetVersion()),
            "cupy": cp.__version__,
            "memory_bytes": int(total),
            "free_bytes": int(free),
            "bus_bytes_per_s": bus_bytes_per_s(),
        }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def bus_bytes_per_s(nbytes: int = _NBYTES) -> float | None:
    """Bytes a second of uploads from pinned memory, the median of a few; None where there is no memory for it."""
    try:
        memory = cp.cuda.PinnedMemory(nbytes, 0)
        device, stream = cp.empty(nbytes, cp.uint8), cp.cuda.Stream(non_blocking=True)
    except (cp.cuda.memory.OutOfMemoryError, cp.cuda.runtime.CUDARuntimeError):
        return None
    host = np.frombuffer(cp.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
    host[:] = 1  # pages that were never written to are one page of zeroes
    rates = []
    for _ in range(_TIMES + 1):
        began_s = time.perf_counter()
        cp.cuda.runtime.memcpyAsync(device.data.ptr, host.ctypes.data, nbytes, 1, stream.ptr)
        stream.synchronize()
        rates.append(nbytes / (time.perf_counter() - began_s))
    return round(statistics.median(rates[1:]))
