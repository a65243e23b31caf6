"""On the CPU: memory that the system locks for every batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from framepipe.memory import mapping, whole_pages
from framepipe.registry import register
from framepipe.staging.per_frame import PerFrame


@register("locked_per_frame")
@dataclass(kw_only=True)
class LockedPerFrame(PerFrame):
    """Memory mapped and locked by the system for every batch and given back after it, on the CPU; to be measured.

    `per_frame` is the same unlocked there. Measured (Linux, two CPUs): 1.2 to 2.8 ms a frame, against 0.06 of a ring,
    and as much unlocked: what costs is to get pages from the system.
    """

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind == "cpu":
            return None
        return (
            "CUDA does not know of memory that the system alone has locked, and copies it as pageable; use "
            "registered_per_frame"
        )

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
