"""How large the cold tier may be: it grows where it is used up and memory is there, shrinks where it idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framepipe.guard.options import ColdOptions, Mark
from framepipe.guard.policy import scarcest
from framepipe.guard.readings import Reading


@dataclass(frozen=True, slots=True)
class Resize:
    """Grow the tier by ``nbytes`` (> 0), or give back what nobody uses of it (< 0: so much is unused); and ``why``."""

    nbytes: int
    why: str


class Growth:
    """Decisions about the size of a pool from its use and from what is free. One `decide` a reading; arithmetic only.

    Growing needs both: the pool used up for a while, and room for the growth above the low mark. A rule that grows
    *because* little is free adds to what it reacts to. After either decision ``cooldown_s`` passes before the next,
    and readings are counted anew.
    """

    def __init__(self, options: ColdOptions, low: Mark) -> None:
        self._options = options
        self._low = low
        self._busy = self._idle = 0
        self._decided_s: float | None = None

    def restart(self) -> None:
        """Count readings anew: something else was done about memory meanwhile."""
        self._busy = self._idle = 0

    def decide(self, t_s: float, readings: Sequence[Reading], nbytes: int, in_use: int) -> Resize | None:
        """What to do with a pool of ``nbytes``, ``in_use`` of them held; None for nothing."""
        options = self._options
        percent = 100 * in_use / nbytes if nbytes > 0 else None
        self._busy = self._busy + 1 if percent is not None and percent > options.busy_percent else 0
        self._idle = self._idle + 1 if percent is not None and percent < options.idle_percent else 0
        if self._decided_s is not None and t_s - self._decided_s < options.cooldown_s:
            return None
        found = None
        if self._busy >= options.busy_samples:
            found = self._grow(readings, nbytes, percent or 0.0)
        elif self._idle >= options.idle_samples:
            found = Resize(in_use - nbytes, f"{percent or 0.0:.0f}% in use for {self._idle} readings")
        if found is not None:
            self._decided_s = t_s
            self.restart()
        return found

    def _grow(self, readings: Sequence[Reading], nbytes: int, percent: float) -> Resize | None:
        step = min(int(nbytes * self._options.step_percent / 100), self._options.cap - nbytes)
        after = [Reading(reading.source, reading.free - step, reading.total) for reading in readings]
        tightest = scarcest(after, self._low)
        if step <= 0 or tightest is None or tightest.free < (self._low.of(tightest.total) or 0):
            return None
        return Resize(step, f"{percent:.0f}% in use for {self._busy} readings, {self._low} stays free")
