"""Page-locked memory allocated for every batch and freed after its copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framepipe.frame import FrameSpec
from framepipe.registry import register
from framepipe.staging._copying import CopyingStager

if TYPE_CHECKING:
    from framepipe.ring import Slot


@register("per_frame")
@dataclass(kw_only=True)
class PerFrame(CopyingStager):
    """What people write first: pin, copy, upload, free, for every batch. It stalls the machine; here to be measured."""

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        self.ring = ring
        self.pinning = {slot.index: threading.Lock() for slot in ring}  # each guards its slot's memory and pinned_for
        self.pinned_for: dict[int, int] = {}
        return False

    def fill(self, frame: Any, i: int, slot: Slot, spec: FrameSpec) -> None:
        with self.pinning[slot.index]:
            if self.pinned_for.get(slot.index) != slot.ticket:
                self.pinned_for[slot.index] = slot.ticket
                self._free(slot)  # its fence was waited for: the copy out of it is done
                with self.timed("allocate"):
                    block = self.device.host_empty(self.batch * spec.nbytes, pinned=True)
                slot.memory = block.reshape(self.batch, spec.nbytes)
                del block  # the last reference is the slot's, or nothing would be freed when it is given back
                self.device.regions(list(slot.memory), f"slot {slot.index}, picture")
        super().fill(frame, i, slot, spec)

    def close(self) -> None:
        super().close()
        for slot in getattr(self, "ring", ()):
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.memory is not None:
            with self.timed("release"):
                block, slot.memory, slot.rooms = slot.memory.reshape(-1), None, {}
                self.device.host_free(block)
                del block
