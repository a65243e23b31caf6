"""What the copying strategies share: slots with memory on the host, halves on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.device.base import Event, Stream
from framepipe.frame import FrameSpec, Planes
from framepipe.stager import Stager, copy_planes

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


class CopyingStager(Stager):
    """Planes are copied into a slot's memory, and from there to one of ``depth`` fixed device halves.

    Where host and device share memory no half exists and stages read the slot itself.
    """

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.shares_memory = device.host_shared
        self.halves: list[Any] = [None] * depth
        self.half_nbytes = 0

    def views(self, slot: Slot, spec: FrameSpec) -> tuple[Any, ...]:
        """Plane views of the slot's memory, made once for each spec."""
        views = slot.views.get(spec)
        if views is None:
            assert slot.memory is not None
            views = slot.views[spec] = spec.views(slot.memory)
        return views

    def fill(self, frames: Sequence[Any], slot: Slot, spec: FrameSpec) -> None:
        assert slot.memory is not None
        self.device.host_access(slot.memory, write=True)
        views = self.views(slot, spec)
        for i, frame in enumerate(frames):
            copy_planes(frame, slot.memory, views, i, spec)

    def plan_device(self, spec: FrameSpec) -> None:
        """Make the halves large enough; nothing is in flight."""
        need = spec.nbytes * self.batch
        if self.device.host_shared or need <= self.half_nbytes:
            return
        for i, half in enumerate(self.halves):
            if half is not None:
                self.device.fixed_free(half)
            self.halves[i] = self.device.fixed(need)
        self.half_nbytes = need

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        assert slot.memory is not None
        n = len(slot.items)
        if self.device.host_shared:
            return Planes(spec, n, slab=slot.memory[:n])
        source = slot.memory[:n, : spec.nbytes]
        target = self.halves[half][: self.batch * spec.nbytes].reshape(self.batch, spec.nbytes)[:n]
        self.device.upload(target, source, stream)
        copied.record(stream)
        return Planes(spec, n, slab=target)

    def close(self) -> None:
        for half in self.halves:
            if half is not None:
                self.device.fixed_free(half)
        self.halves = []


def carve(block: np.ndarray, slots: int, batch: int, nbytes: int) -> list[np.ndarray]:
    """``slots`` arrays of (batch, nbytes) one behind another in ``block``."""
    parts = block[: slots * batch * nbytes].reshape(slots, batch, nbytes)
    return [parts[i] for i in range(slots)]
