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
    """A preallocated page-locked ring: one allocation, then none. Right for streams; the default on a GPU."""

    pinned = True

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.slab: Any = None
        self.capacity = 0

    def fits(self, spec: FrameSpec) -> bool:
        return spec.nbytes <= self.capacity

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        if spec.nbytes <= self.capacity:
            return False
        self._free()
        for slot in ring:
            slot.memory, slot.rooms = None, {}
        with self.timed("allocate"):
            self.slab = self.device.host_empty(self.slots * self.batch * spec.nbytes, pinned=self.pinned)
        self.capacity = spec.nbytes
        for slot, memory in zip(ring, carve(self.slab, self.slots, self.batch, spec.nbytes), strict=True):
            slot.memory = memory
            self.device.regions(list(memory), f"slot {slot.index}, picture")
        return True

    def close(self) -> None:
        super().close()
        self._free()

    def _free(self) -> None:
        if self.slab is not None:
            with self.timed("release"):
                self.device.host_free(self.slab)
                self.slab = None
