"""Ordinary memory, page-locked in one piece once it is there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from framepipe.memory import mapping, whole_pages
from framepipe.registry import register
from framepipe.staging.pooled import Pooled


@register("registered")
@dataclass(kw_only=True)
class Registered(Pooled):
    """The ring as a mapping of the system's, touched by several threads and then registered with CUDA in one piece.

    Right where the start counts: CUDA's own page-locked memory costs 0.36 ms a MB to make, and registering pages that
    are there 0.03 to 0.05 (measured on one H200); to get the pages is what costs, and that part runs in threads.
    Copies run as from `pooled` (52.7 GB/s). The slab has pages and one registration of its own, since a copy that
    spans registered and other memory fails.
    """

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind == "cpu":
            return "memory is registered with a GPU; what the system alone locks is locked"
        return None

    @classmethod
    def takes(cls, nbytes: int) -> int | None:
        return whole_pages(nbytes)

    def allocate(self, nbytes: int) -> np.ndarray:
        block = mapping(nbytes)
        self.device.host_register(block, owner=self.owner)
        return block

    def release(self, block: np.ndarray) -> None:
        self.device.host_unregister(block)
