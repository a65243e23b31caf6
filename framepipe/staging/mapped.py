"""Kernels read the page-locked slots themselves, over the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.device.base import Event, Stream
from framepipe.device.host import MAPPED
from framepipe.frame import FrameSpec, Planes
from framepipe.registry import register
from framepipe.staging.pooled import Pooled

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("mapped")
@dataclass(kw_only=True)
class Mapped(Pooled):
    """No upload: the first stages read the ring in host memory over the bus, and it takes no device memory.

    Right where exactly one stage reads the planes, once, and in order: each reading crosses the bus again. A slot is
    free only behind the last of them, so more slots are in use than with `pooled`. Measured on one H200: a kernel reads
    51 GB/s this way, and the copy engine does 52.7 to 55.4. ``upload.bytes`` of the report stays 0. Where the system
    refuses to page-lock, the ring is pageable and is copied, since no kernel can read it.
    """

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind == "cpu":
            return "it needs a GPU; on the CPU stages read the slots in any case, which is pooled"
        return None

    @classmethod
    def has_halves(cls, *, host_shared: bool) -> bool:
        return False

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.views: dict[tuple[int, int, int], Any] = {}

    def allocate(self, nbytes: int) -> np.ndarray:
        return self.device.host_empty(nbytes, pinned=True, flags=MAPPED, owner=self.owner)

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        new = super().plan(spec, ring)
        self.shares_memory = self.device.is_locked(self.slab)
        return new

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        if not self.shares_memory:
            return super().upload(slot, spec, half, stream, copied)
        n = len(slot.items)
        key = (slot.index, spec.nbytes, n)
        if key not in self.views:
            assert slot.memory is not None
            self.views[key] = self.device.device_view(slot.memory)[:n, : spec.nbytes]
        return Planes(spec, n, slab=self.views[key])

    def _free(self) -> None:
        self.views.clear()
        super()._free()
