"""Windows (WDDM), as Microsoft documents it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from framepipe.memory_models.base import MemoryModel, whole
from framepipe.units import Bytes, format_bytes

_LEAST_BUDGET = 64 << 20


@dataclass(kw_only=True, eq=False)
class WddmBudget(MemoryModel):
    """WDDM as documented: page-locked memory is charged to the non-local segment, whose budget is half of the RAM.

    Of ``ram`` bytes half, 64 MiB at least, are for all programs together, so that ``others`` are bytes of this segment
    here; each allocation counts in whole ``granularity`` bytes. Video memory proper, the local segment, is untouched.
    After a pin that was refused all later ones are too, as users report, until the process ends (``poison``).

    Sources: Microsoft's windows-driver-docs, "Calculating graphics memory" (TotalSystemMemoryAvailableForGraphics) and
    "GPU segments" (pages of 4 or 64 KiB). Not modelled: budgets that the system moves, and reports, unexplained, that
    less can be page-locked where much video memory is in use.
    """

    ram: Bytes = 32 * 10**9
    granularity: Bytes = 64 << 10
    poison: bool = True

    name: ClassVar[str] = "wddm-budget"
    ground: ClassVar[str] = "Microsoft's documents, and users' reports of pins that fail after a failed one"
    words: ClassVar[Mapping[str, str]] = {
        "free": "video memory (local segment) that nobody uses",
        "total": "video memory (local segment)",
        "pinned": "page-locked by the pipeline",
        "local_usage": "local segment in use by this process",
        "local_budget": "local segment that there is for it",
        "non_local_usage": "non-local segment in use by this process",
        "non_local_budget": "non-local segment that there is for it, without what other programs use",
    }

    def __post_init__(self) -> None:
        self._check(self.granularity > 0, "granularity is 0; it must be at least a byte")
        self._charged = 0
        self._poisoned = False
        super().__post_init__()

    def _free(self) -> int:
        return self._unused()

    def _budget(self) -> int:
        return max(0, max(self.ram // 2, _LEAST_BUDGET) - self._others())

    def _refusal(self, nbytes: int) -> str | None:
        if self._poisoned:
            return "a pin was refused before, after which all are until the process ends"
        wanted, left = whole(nbytes, self.granularity), self._budget() - self._charged
        if wanted <= left:
            return None
        return f"{format_bytes(wanted)} of the non-local segment wanted, {format_bytes(max(0, left))} left"

    def _refused(self) -> None:
        self._poisoned = self.poison

    def _charge(self, nbytes: int) -> None:
        self._charged += whole(nbytes, self.granularity)

    def _release(self, nbytes: int) -> None:
        self._charged -= whole(nbytes, self.granularity)

    def _readings(self) -> dict[str, int]:
        return {
            **super()._readings(),
            "local_usage": self.resident + self.allocated,
            "local_budget": self.total,
            "non_local_usage": self._charged,
            "non_local_budget": self._budget(),
        }
