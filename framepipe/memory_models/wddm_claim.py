"""Windows (WDDM), as an article claims it to be."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from framepipe.memory_models.base import MemoryModel, whole
from framepipe.units import Bytes, Seconds, format_bytes


@dataclass(kw_only=True, eq=False)
class WddmClaim(MemoryModel):
    """WDDM as an article claims it, unproven: a share of what is page-locked is missing from free video memory.

    ``share`` is that of each allocation in whole ``granularity`` bytes (20 to 25 % are claimed; the middle here), and
    ``metadata`` bytes come on top for each (claimed, without a figure; a granule here). What is freed is back
    ``return_least_s`` to ``return_most_s`` seconds later, evenly spread, by ``seed`` the same every time (2 to 5 s are
    claimed). A pin whose part does not fit into what is free is refused.

    No document of Microsoft or NVIDIA supports it; page tables explain 0.2 % (``linux``). It is here to show what the
    claim would mean, and to test what watches memory. ``framepipe probe pinned`` measures how it is.
    """

    share: float = 0.225
    granularity: Bytes = 64 << 10
    metadata: Bytes = 64 << 10
    return_least_s: Seconds = 2.0
    return_most_s: Seconds = 5.0
    seed: int = 0

    name: ClassVar[str] = "wddm-claim"
    ground: ClassVar[str] = "an article's claim, unproven"
    words: ClassVar[Mapping[str, str]] = {
        "free": "video memory that nobody uses",
        "total": "video memory",
        "pinned": "page-locked by the pipeline",
        "charged": "video memory that page-locked memory is said to take, freed but not yet back included",
        "returning": "the part of it that is freed and not yet back",
    }

    def __post_init__(self) -> None:
        self._check(0 <= self.share <= 1, f"share is {self.share:g}; it is a part, from 0 to 1")
        self._check(self.granularity > 0, "granularity is 0; it must be at least a byte")
        early, late = self.return_least_s, self.return_most_s
        self._check(0 <= early <= late, f"return_least_s is {early:g} and return_most_s {late:g}; 0 to the least to it")
        self._charged = self._returning = 0
        self._due: list[tuple[float, int]] = []
        self._random = random.Random(self.seed)
        super().__post_init__()

    def cost(self, nbytes: int) -> int:
        """What one allocation of ``nbytes`` takes of video memory."""
        return round(self.share * whole(nbytes, self.granularity)) + self.metadata

    def _free(self) -> int:
        return max(0, self._unused() - self._others() - self._charged)

    def _refusal(self, nbytes: int) -> str | None:
        why = self._too_much(self.cost(nbytes), self._free())
        return f"{why}, {format_bytes(self._returning)} freed and not yet back" if why and self._returning else why

    def _charge(self, nbytes: int) -> None:
        self._charged += self.cost(nbytes)

    def _release(self, nbytes: int) -> None:
        back_s = self.now_s + self._random.uniform(self.return_least_s, self.return_most_s)
        heapq.heappush(self._due, (back_s, self.cost(nbytes)))
        self._returning += self.cost(nbytes)
        self._passed()

    def _passed(self) -> None:
        while self._due and self._due[0][0] <= self.now_s:
            nbytes = heapq.heappop(self._due)[1]
            self._charged -= nbytes
            self._returning -= nbytes

    def _readings(self) -> dict[str, int]:
        return {**super()._readings(), "charged": self._charged, "returning": self._returning}
