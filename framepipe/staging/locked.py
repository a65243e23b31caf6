"""On the CPU: one slab that the system keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from framepipe.memory import mapping, whole_pages
from framepipe.registry import register
from framepipe.staging.pooled import Pooled


@register("locked")
@dataclass(kw_only=True)
class Locked(Pooled):
    """The ring locked by the system (``mlock``, ``VirtualLock``), on the CPU; `pooled` is the same unlocked there.

    It cannot be swapped out, and buys nothing else: no copy gets faster by it. Locking costs 10 to 25 % more than the
    touching of the pages that it does as well (measured, Linux, two CPUs). A limit of 8 MiB is usual
    (``ulimit -l``); beyond it the run goes on unlocked and says so.
    """

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind == "cpu":
            return None
        return "CUDA does not know of memory that the system alone locks, and copies it as pageable; use registered"

    @classmethod
    def locks(cls, *, host_shared: bool) -> bool:
        return True

    @classmethod
    def takes(cls, nbytes: int) -> int | None:
        return whole_pages(nbytes)

    def allocate(self, nbytes: int) -> np.ndarray:
        block = mapping(nbytes, touch=False)  # locking brings the pages in
        self.device.host_register(block, owner=self.owner)
        return block

    def release(self, block: np.ndarray) -> None:
        self.device.host_unregister(block)
