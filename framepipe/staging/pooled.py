"""One exact-size page-locked slab, carved into slots once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framepipe.frame import FrameSpec
from framepipe.registry import register
from framepipe.staging._copying import CopyingStager, carve

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("pooled")
@dataclass(kw_only=True)
class Pooled(CopyingStager):
    """A preallocated page-locked ring: one allocation, then none. Right for streams; the default on a GPU.

    It costs its start, 0.36 ms a MB, and a copy on the host, which one thread does at 10 to 12.5 GB/s: less than the
    bus (52.7 GB/s and more), so `fillers` and `copy_threads` decide how fast it is. In a bare loop of one thread it is
    8611, 3951 and 965 frames/s of 720p, 1080p and 2160p; `framepipe bench` found 3047 to 3181 of 1080p that no cache
    holds. Measured on H200s.
    """

    pinned = True

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.ring: Sequence[Slot] = ()
        self.slab: Any = None
        self.capacity = 0

    def fits(self, spec: FrameSpec) -> bool:
        return spec.nbytes <= self.capacity

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        if spec.nbytes <= self.capacity:
            return False
        self.ring = ring
        self._free()
        with self.timed("allocate"):
            self.slab = self.allocate(self.slots * self.batch * spec.nbytes)
        self.capacity = spec.nbytes
        for slot, memory in zip(ring, carve(self.slab, self.slots, self.batch, spec.nbytes), strict=True):
            slot.memory = memory
            self.device.regions(list(memory), f"slot {slot.index}, picture")
        return True

    def close(self) -> None:
        super().close()
        self._free()

    def _free(self) -> None:
        for slot in self.ring:
            slot.memory, slot.rooms = None, {}  # first: they hold the memory that is given back
        if self.slab is not None:
            with self.timed("release"):
                self.release(self.slab)
                self.slab = None
