"""The decoder's own frames travel; nothing is copied on the host by us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.device.base import Event, Stream
from framepipe.frame import FrameSpec, Planes, frame_planes
from framepipe.registry import register
from framepipe.stager import HostMemory
from framepipe.staging._copying import CopyingStager

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("direct")
@dataclass(kw_only=True)
class Direct(CopyingStager):
    """No copy of ours. On the CPU, where it is the default, stages read the decoder's memory and it costs nothing.

    On a GPU every plane is uploaded straight from the decoder's pageable memory: the driver copies it through a
    buffer of its own, and the runner waits for that. In a bare loop of one thread this beats a ring (11748, 4872 and
    1212 frames/s of 720p, 1080p and 2160p, against 8611, 3951 and 965); in a pipeline, where nothing overlaps it, it
    does not: `framepipe bench` found 1030 to 1385 frames/s of ready 1080p and 932 to 937 of a file, against 3047 to
    3181 and 1116 to 1468 with `pooled`. Measured on H200s. The frames are read-only to everybody, since the decoder
    predicts later pictures from them.
    """

    holds_frames = True

    @classmethod
    def host_memory(cls, spec: FrameSpec, slots: int, batch: int, *, host_shared: bool) -> HostMemory | None:
        return None

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.kept: dict[int, Sequence[Any]] = {}

    def fill(self, frames: Sequence[Any], at: int, slot: Slot, spec: FrameSpec) -> None:
        slot.frames[at : at + len(frames)] = frames

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        n = len(slot.items)
        frames = slot.frames[:n]
        if self.shares_memory:
            return Planes(spec, n, frames=frames)
        block = self.target(half, spec.nbytes, n)
        used: list[Any] = list(frames)
        for i, frame in enumerate(frames):
            for plane, layout in zip(frame_planes(frame, spec), spec.planes, strict=True):
                rows = plane.reshape(layout.height, layout.row_samples).view("uint8")
                if rows.strides[0] < 0:  # upside down in memory, which a copy engine knows nothing of
                    rows = np.ascontiguousarray(rows)
                    used.append(rows)
                end = layout.offset + layout.pitch * layout.height
                target = block[i, layout.offset : end].reshape(layout.height, layout.pitch)[:, : rows.shape[1]]
                self.device.upload(target, rows, stream)
        copied.record(stream)
        self.kept[slot.index] = used  # until the slot is used again, behind its fence
        return Planes(spec, n, slab=block)

    def close(self) -> None:
        super().close()
        self.kept.clear()
