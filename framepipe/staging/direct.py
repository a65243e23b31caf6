"""The decoder's own frames travel; nothing is copied on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framepipe.device.base import Event, Stream
from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec, Planes
from framepipe.registry import register
from framepipe.stager import Stager

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("direct")
@dataclass(kw_only=True)
class Direct(Stager):
    """No copy: stages read the decoder's memory. Costs nothing on the CPU, where it is the default.

    The frames are read-only to everybody, since the decoder predicts later pictures from them.
    """

    holds_frames = True
    shares_memory = True

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        if not device.host_shared:
            raise ConfigError(
                f"staging 'direct' on {device.kind!r} is not there yet; pooled, per_frame and pageable are"
            )
        super().open(device, slots, batch, depth)

    def fill(self, frames: Sequence[Any], slot: Slot, spec: FrameSpec) -> None:
        slot.frames = frames

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        return Planes(spec, len(slot.items), frames=slot.frames)
