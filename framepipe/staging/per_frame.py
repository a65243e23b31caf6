"""Page-locked memory allocated for every batch and freed after its copy."""

from __future__ import annotations

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
        return False

    def fill(self, frames: Sequence[Any], slot: Slot, spec: FrameSpec) -> None:
        self._free(slot)  # its fence was waited for: the copy out of it is done
        block = self.device.host_empty(self.batch * spec.nbytes, pinned=True)
        slot.memory = block.reshape(self.batch, spec.nbytes)
        slot.views = {}
        super().fill(frames, slot, spec)

    def close(self) -> None:
        super().close()
        for slot in getattr(self, "ring", ()):
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.memory is not None:
            block, slot.memory, slot.views = slot.memory.reshape(-1), None, {}
            self.device.host_free(block)
