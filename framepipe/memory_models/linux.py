"""Linux, as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from framepipe.memory_models.base import MemoryModel
from framepipe.units import Bytes

_GIB = 1 << 30


@dataclass(kw_only=True, eq=False)
class Linux(MemoryModel):
    """Linux as measured on one H200: page-locked memory takes its page tables of video memory, and no more.

    ``tables`` bytes for a GiB that is page-locked (2 MiB were measured for one, 8 for four), in whole ``step`` bytes
    (below 256 MB nothing was seen). What is freed is back at once.
    """

    tables: Bytes = 2 << 20
    step: Bytes = 2 << 20

    name: ClassVar[str] = "linux"
    ground: ClassVar[str] = "measured on one H200 under Linux"
    words: ClassVar[Mapping[str, str]] = {
        "free": "video memory that nobody uses",
        "total": "video memory",
        "pinned": "page-locked by the pipeline",
    }

    def __post_init__(self) -> None:
        self._check(self.step > 0, "step is 0; it must be at least a byte")
        super().__post_init__()

    def _cost(self, pinned: int) -> int:
        return pinned * self.tables // _GIB // self.step * self.step

    def _free(self) -> int:
        return max(0, self._unused() - self._others() - self._cost(self.pinned))

    def _refusal(self, nbytes: int) -> str | None:
        return self._too_much(self._cost(self.pinned + nbytes) - self._cost(self.pinned), self._free())
