"""Page-locked memory allocated for every batch and freed after its copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from framepipe.frame import FrameSpec
from framepipe.registry import register
from framepipe.staging._copying import CopyingStager

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("per_frame")
@dataclass(kw_only=True)
class PerFrame(CopyingStager):
    """What people write first: pin, copy, upload, free, for every batch. It stalls the machine; here to be measured.

    To page-lock the 3 MB of a 1080p picture takes 0.76 ms, and a quarter of that to give it back: 1028, 674 and 134
    frames/s of 720p, 1080p and 2160p, 5.9 to 8.4 times slower than `pooled`. Measured on one H200, one thread.
    """

    holds = "frame"

    per_batch = True

    @classmethod
    def locks(cls, *, host_shared: bool) -> bool:
        return not host_shared

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.ring: Sequence[Slot] = ()

    def allocate(self, nbytes: int) -> np.ndarray:
        return self.device.host_empty(nbytes, pinned=True, owner=self.owner)

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        self.ring = ring
        self.pinning = {slot.index: threading.Lock() for slot in ring}  # each guards its slot's memory and pinned_for
        self.pinned_for: dict[int, int] = {}
        return False

    def ready(self, slot: Slot, spec: FrameSpec) -> None:
        with self.pinning[slot.index]:
            if self.pinned_for.get(slot.index) != slot.ticket:
                self.pinned_for[slot.index] = slot.ticket
                self.renew(slot, spec)  # its fence was waited for: the copy out of it is done

    def renew(self, slot: Slot, spec: FrameSpec) -> None:
        """Give ``slot`` memory for the next batch; nobody uses what it has."""
        self.free(slot)
        with self.timed("allocate"):
            block = self.allocate(self.batch * spec.nbytes)
        slot.memory = block.reshape(self.batch, spec.nbytes)
        self.device.regions(list(slot.memory), f"slot {slot.index}, picture")

    def free(self, slot: Slot) -> None:
        """Take its memory from ``slot``."""
        if slot.memory is not None:
            with self.timed("release"):
                block, slot.memory, slot.rooms = slot.memory.reshape(-1), None, {}
                self.release(block)
                del block  # the last reference: now it goes

    def close(self) -> None:
        super().close()
        for slot in self.ring:
            self.free(slot)
