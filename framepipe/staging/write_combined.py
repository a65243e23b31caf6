"""One page-locked slab that bypasses the caches of the processor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from framepipe.device.host import WRITE_COMBINED
from framepipe.registry import register
from framepipe.staging.pooled import Pooled


@register("write_combined")
@dataclass(kw_only=True)
class WriteCombined(Pooled):
    """The ring in memory that is written past the caches, and must never be read on the host.

    It may help where a bus snoops caches, or where the cache is wanted for something else. Measured on one H200: as
    fast as `pooled`, both the bus (52.7 to 55.4 GB/s) and staging of 1080p from one thread (3425-3442 frames/s against
    3409-3496). A read by the host is slower by orders of magnitude, so a stage or sink that would is refused before
    the run.
    """

    host_readable = False

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind == "cpu":
            return "write-combined memory comes from CUDA, and on the CPU every stage would read it, very slowly"
        return None

    def allocate(self, nbytes: int) -> np.ndarray:
        return self.device.host_empty(nbytes, pinned=True, flags=WRITE_COMBINED, owner=self.owner)
