"""Waiting for memory: until enough is free, until counters hold still. With back-off and a time-out, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framepipe.guard.readings import Memory, Reading

Row = Mapping[str, int | None]
_CURVE_ROWS = 200


@dataclass(frozen=True)
class Clock:
    """``now`` in seconds and ``sleep`` for some; tests have their own."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep


REAL = Clock()


class _Backoff:
    """Pauses, each ``factor`` times as long as the one before, up to ``most_s`` and never beyond the deadline."""

    def __init__(self, clock: Clock, timeout_s: float, first_s: float, factor: float, most_s: float) -> None:
        self._clock = clock
        self.began_s = clock.now()
        self._timeout_s = timeout_s
        self._next_s = first_s
        self._factor, self._most_s = factor, most_s

    @property
    def passed_s(self) -> float:
        return self._clock.now() - self.began_s

    def pause(self) -> bool:
        """Wait for the next pause; False, at once, if the time is over."""
        left_s = self._timeout_s - self.passed_s
        if left_s <= 0:
            return False
        self._clock.sleep(min(self._next_s, left_s))
        self._next_s = min(self._next_s * self._factor, self._most_s)
        return True


# -- until enough is free --


@dataclass(frozen=True)
class Headroom:
    """How waiting ended: ``reached`` after ``seconds``, or timed out; ``readings`` are the last ones."""

    reached: bool
    seconds: float
    target_nbytes: int
    readings: tuple[Reading, ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{reading.free} ({reading.source})" for reading in self.readings) or "nothing is known"
        what = "free after" if self.reached else "not free within"
        return f"{self.target_nbytes} bytes {what} {self.seconds:.2f} s: {counts}"


def wait_for_headroom(
    memory: Memory,
    target_nbytes: int,
    timeout_s: float = 10.0,
    *,
    first_s: float = 0.05,
    factor: float = 2.0,
    most_s: float = 1.0,
    decides: Callable[[Reading], bool] = lambda reading: True,
    clock: Clock = REAL,
) -> Headroom:
    """Wait until ``target_nbytes`` are free by every count of ``memory``, for ``timeout_s`` seconds at most.

    Or by every count that ``decides`` picks: a host may have less RAM than is awaited of its GPU.
    Freed memory may come back late; instead of a sleep of some length this reads again and again, at pauses that double
    from ``first_s`` up to ``most_s``. Without any count nothing is known to be free: that times out. Never raises.
    """
    backoff = _Backoff(clock, timeout_s, first_s, factor, most_s)
    while True:
        readings = tuple(reading for reading in memory.read() if decides(reading))
        reached = bool(readings) and all(reading.free >= target_nbytes for reading in readings)
        if reached or not backoff.pause():
            return Headroom(reached, backoff.passed_s, target_nbytes, readings)


# -- until counters hold still --


@dataclass(frozen=True, slots=True)
class Patience:
    """Counters hold still once each has stayed within ``eps_nbytes`` for ``window_s``; after ``timeout_s`` no matter.

    They are read after ``interval_s``, and then after ``factor`` times as long each time (1 keeps the distance even, as
    a curve wants it), but four times a window at least.
    """

    eps_nbytes: int = 1 << 20
    window_s: float = 0.5
    timeout_s: float = 10.0
    interval_s: float = 0.05
    factor: float = 1.0


@dataclass(frozen=True)
class Settled:
    """The last ``row``; columns that still ``moved``, or are ``away`` from the target; all rows with their times."""

    row: Row
    seconds: float
    moved: list[str]
    away: list[str]
    rows: list[tuple[float, Row]]

    @property
    def calm(self) -> bool:
        """Whether everything came to rest before the time-out."""
        return not self.moved and not self.away

    def as_json(self) -> dict[str, Any]:
        """Plain values, without the rows."""
        return {"seconds": round(self.seconds, 3), "still_moving": self.moved, "not_back": self.away}

    def curve(self) -> dict[str, Any]:
        """``t_s`` and ``columns`` of at most `_CURVE_ROWS` rows; the columns that moved, constant ones left out."""
        rows = self.rows[:: -(-len(self.rows) // _CURVE_ROWS) or 1]
        columns = {column: [row.get(column) for _, row in rows] for column in self.row}
        return {
            "t_s": [round(time_s, 4) for time_s, _ in rows],
            "columns": {column: numbers for column, numbers in columns.items() if len(set(numbers)) > 1},
        }


def settle(
    read: Callable[[], Row],
    patience: Patience = Patience(factor=2.0),  # frozen
    *,
    target: Row | None = None,
    began_s: float | None = None,
    decides: Callable[[str], bool] = lambda column: True,
    clock: Clock = REAL,
) -> Settled:
    """Read until all columns that ``decides`` picks hold still and, with a ``target``, are back within ``eps_nbytes``.

    ``read`` gives bytes by column, None where there is no number. Times count from ``began_s``, by default now. Never
    raises; what did not come to rest is named in the result.
    """
    backoff = _Backoff(
        clock, patience.timeout_s, patience.interval_s, patience.factor, max(patience.window_s / 4, patience.interval_s)
    )
    zero_s = backoff.began_s if began_s is None else began_s
    rows: list[tuple[float, Row]] = []
    while True:
        now_s = clock.now()
        rows.append((now_s - zero_s, read()))
        deciding = [column for column in rows[-1][1] if decides(column)]
        latest = [row for time_s, row in rows if time_s >= now_s - zero_s - patience.window_s]
        moved = [column for column in deciding if _span(column, latest) > patience.eps_nbytes]
        away = [
            column for column in deciding if far(rows[-1][1][column], (target or {}).get(column), patience.eps_nbytes)
        ]
        calm = now_s - backoff.began_s >= patience.window_s and not moved and not away
        if calm or not backoff.pause():
            return Settled(rows[-1][1], now_s - zero_s, moved, away, rows)


def _span(column: str, rows: Sequence[Row]) -> int:
    numbers = [number for row in rows if (number := row.get(column)) is not None]
    return max(numbers) - min(numbers) if numbers else 0


def far(number: int | None, wanted: int | None, eps_nbytes: int) -> bool:
    """Whether two numbers are known to differ by more than ``eps_nbytes``."""
    return number is not None and wanted is not None and abs(number - wanted) > eps_nbytes
