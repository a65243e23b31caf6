"""Output memory of a GPU under leases: used again only behind the work of everybody who held it."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from framepipe.device._cuda_errors import CUDA_ERRORS
from framepipe.device.current import current

if TYPE_CHECKING:
    from framepipe.device._cuda_streams import CudaStream
    from framepipe.device.cuda import CudaDevice


class Block:
    """A block of output memory and the events of whoever used it last."""

    __slots__ = ("behind", "memory", "nbytes")

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        self.behind: list[Any] = []

    def end(self) -> None:
        """Wait for whoever used it last, and let go of the memory and of their events, whoever else has the block."""
        behind, self.behind = self.behind, []
        memory, self.memory = self.memory, None
        for event in behind:
            event.synchronize()
        del memory  # the pool hands it out again without asking


class Lease:
    """Keeps a block from being used again while an array over it lives; any thread may drop the last one."""

    __slots__ = ("block", "outputs")

    def __init__(self, outputs: Outputs, block: Block) -> None:
        self.outputs, self.block = outputs, block

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.outputs.give(self.block)


class Share:
    """One picture's part of a lease: notes the stream on which its holder dropped it."""

    __slots__ = ("lease",)

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.lease.outputs.mark(self.lease.block)


class Outputs:
    """Device memory of exact sizes that comes back by lease. Never blocks: with every block held it makes a new one."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free: dict[int, deque[Block]] = {}
        self._closed = False
        self.made = 0

    def lease(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: CudaStream) -> Any:
        nbytes = dtype.itemsize
        for side in shape:
            nbytes *= side
        nbytes = max(nbytes, 1)
        free = self._free.setdefault(nbytes, deque())
        try:
            # The longest unused first: most likely nobody has to be waited for.
            block = free.popleft()
        except IndexError:
            block = Block(self._device.malloc(nbytes), nbytes)
            self._device.ledger.add("device", nbytes)
            self.made += 1
        for event in block.behind:
            stream.raw.wait_event(event)
        block.behind = []
        memory = cp.cuda.UnownedMemory(block.memory.ptr, nbytes, Lease(self, block), self._device.number)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))

    def mark(self, block: Block) -> None:
        """The calling thread's current stream is the last user so far."""
        try:
            with current(self._device.number):
                event = cp.cuda.Event(block=False, disable_timing=True)
                event.record(cp.cuda.get_current_stream())
        except CUDA_ERRORS:
            return  # the context is lost, and nothing will be used again
        block.behind.append(event)

    def give(self, block: Block) -> None:
        self.mark(block)
        self._free[block.nbytes].append(block)
        if self._closed:  # looked at last: another thread may close just now
            self.trim()
            self._device.free_unused()

    def trim(self) -> None:
        """Let go of every block that nobody holds, behind whoever used it last. Any thread."""
        with current(self._device.number):
            for free in list(self._free.values()):
                while free:
                    try:
                        block = free.popleft()
                    except IndexError:  # pragma: no cover - another thread took it
                        break
                    with contextlib.suppress(*CUDA_ERRORS):  # once the context is lost the pool hands nothing out
                        block.end()
                    self._device.ledger.add("device", -block.nbytes)

    def close(self) -> None:
        self._closed = True
        self.trim()
