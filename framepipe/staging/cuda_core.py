"""Page-locked memory from a pool of the driver's, for every batch, through cuda.core."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.registry import register
from framepipe.staging.per_frame import PerFrame

if TYPE_CHECKING:
    from framepipe.device.base import Device


@register("cuda_core")
@dataclass(kw_only=True)
class CudaCore(PerFrame):
    """``PinnedMemoryResource`` of NVIDIA's cuda.core: a stream-ordered pool of the driver's, as it comes.

    Taken for every batch and given back after its copy. The pool gives unused memory back to the system whenever a
    stream is waited for, unless told otherwise, and it costs that: 1905-2056 frames/s of 1080p in one thread against
    3409-3496 with `pooled` (measured on one H200). ``memory.pinned_bytes_taken`` of the report is what the pool held.
    """

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind != "cuda":
            return "it is a pool of the CUDA driver, which needs a GPU"
        try:
            core: Any = importlib.import_module("cuda.core")
        except ImportError as error:
            return f"cuda.core cannot be imported ({error}); it is the package cuda-core"
        if not hasattr(core, "PinnedMemoryResource"):
            return "the cuda-core that is installed has no PinnedMemoryResource"
        try:
            supported = core.Device(0).properties.host_memory_pools_supported
        except Exception as error:  # of the driver's, in classes of its own
            return f"cuda.core cannot ask the driver for pools of host memory: {error}"
        return None if supported else "the driver has no pools of host memory"

    @classmethod
    def takes(cls, nbytes: int) -> int | None:
        return None

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        core: Any = importlib.import_module("cuda.core")
        self.taking = threading.Lock()  # guards buffers and reserved
        self.buffers: dict[int, Any] = {}
        self.reserved = 0
        with device.bound():
            gpu = core.Device(getattr(device, "number", 0))
            gpu.set_current()
            self.stream = gpu.create_stream()
            self.pool = core.PinnedMemoryResource(core.PinnedMemoryResourceOptions())

    def allocate(self, nbytes: int) -> np.ndarray:
        return self.device.host_made(nbytes, lambda: (self._from_pool(nbytes), 0), owner=self.owner)

    def release(self, block: np.ndarray) -> None:
        super().release(block)
        with self.taking:
            buffer = self.buffers.pop(block.ctypes.data, None)
            if buffer is not None:
                buffer.close(self.stream)
                self._count()

    def close(self) -> None:
        super().close()
        if not self.pool.is_closed:
            self.stream.sync()
            self.pool.close()
            self.stream.close()
            self.device.ledger.take("pinned", -self.reserved)
            self.reserved = 0

    def _from_pool(self, nbytes: int) -> np.ndarray:
        with self.device.bound(), self.taking:
            buffer = self.pool.allocate(nbytes, stream=self.stream)
            self.stream.sync()  # the host may use it once the stream has come to it
            block = np.asarray(_Memory(int(buffer.handle), nbytes))
            self.buffers[block.ctypes.data] = buffer
            self._count()
        return block

    def _count(self) -> None:
        """Lock held: enter what the pool has taken of the system since."""
        reserved = int(self.pool.attributes.reserved_mem_current)
        self.device.ledger.take("pinned", reserved - self.reserved)
        self.reserved = reserved


class _Memory:
    """Host memory at an address as NumPy takes it; whoever made it keeps it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
