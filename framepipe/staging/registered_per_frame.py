"""Memory that is there already, registered for every batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from framepipe.frame import FrameSpec
from framepipe.memory import mapping, whole_pages
from framepipe.registry import register
from framepipe.staging.per_frame import PerFrame

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("registered_per_frame")
@dataclass(kw_only=True)
class RegisteredPerFrame(PerFrame):
    """Slots of ordinary memory, registered with CUDA for every batch and unregistered after its copy; to be measured.

    What is done with buffers that belong to somebody else. Their pages are there, so that registering alone is paid:
    measured on one H200, one thread, 2828, 1573 and 427 frames/s of 720p, 1080p and 2160p, against 8611, 3951 and
    965 with `pooled` and 1028, 674 and 134 with `per_frame`.
    """

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind == "cpu":
            return "memory is registered with a GPU; what the system alone locks is locked_per_frame"
        return None

    @classmethod
    def takes(cls, nbytes: int) -> int | None:
        return whole_pages(nbytes)

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.blocks: dict[int, np.ndarray] = {}

    def renew(self, slot: Slot, spec: FrameSpec) -> None:
        nbytes = self.batch * spec.nbytes
        block = self.blocks.get(slot.index)
        if block is not None and slot.memory is not None:
            with self.timed("release"):
                self.release(block)
        if block is None or block.nbytes < nbytes:
            slot.memory = None  # first: it holds what is given back
            block = self.blocks[slot.index] = mapping(nbytes)
        if slot.memory is None or slot.memory.shape[1] != spec.nbytes:
            slot.memory, slot.rooms = block[:nbytes].reshape(self.batch, spec.nbytes), {}
        with self.timed("allocate"):
            self.device.host_register(block, owner=self.owner)
        self.device.regions(list(slot.memory), f"slot {slot.index}, picture")

    def release(self, block: np.ndarray) -> None:
        self.device.host_unregister(block)

    def free(self, slot: Slot) -> None:
        block = self.blocks.pop(slot.index, None)
        if block is not None:
            with self.timed("release"):
                self.release(block)
            slot.memory, slot.rooms = None, {}
