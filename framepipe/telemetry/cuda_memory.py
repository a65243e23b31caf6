"""Device memory as CUDA sees it, through CuPy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import cupy as cp

from framepipe.device.current import current
from framepipe.telemetry.adapter import Adapter
from framepipe.telemetry.base import Sensor


class CudaMemory(Sensor):
    """``cudaMemGetInfo``: free and total bytes of the device, whoever uses it.

    Free is "according to the OS" (CUDA Runtime API): under WDDM that has been reported to include shared memory. The
    call makes the process's context on the device where there is none yet, which takes some hundred MB of it, and
    CuPy holds the GIL for its few microseconds.
    """

    name = "cuda"
    source = "cudaMemGetInfo"
    readings = MappingProxyType({"free": "cudaMemGetInfo free", "total": "cudaMemGetInfo total"})

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self._number = adapter.index

    def _read(self) -> Mapping[str, int | str]:
        with current(self._number):
            free, total = cp.cuda.runtime.memGetInfo()
        return {"free": int(free), "total": int(total)}
