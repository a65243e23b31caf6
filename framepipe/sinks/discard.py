"""No results at all: how fast is the rest?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from framepipe.frame import Frame
from framepipe.registry import register
from framepipe.sink import Sink


@register("discard")
@dataclass(kw_only=True)
class Discard(Sink):
    """Counts pictures and drops them.

    ``read`` names what is to be made all the same (``image``, or a tensor), so that the cost of making it can
    be measured; it stays on the device.
    """

    read: str | None = None

    reads = frozenset()
    host = False

    def __post_init__(self) -> None:
        self.reads = frozenset({self.read}) if self.read else frozenset()
        self._frames = 0

    def write(self, frame: Frame) -> None:
        self._frames += 1

    def state(self) -> dict[str, Any]:
        return {"paths": [], "frames": self._frames}
