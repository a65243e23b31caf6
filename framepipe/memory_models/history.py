"""Rows of readings over modelled time, bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class History:
    """Readings at even distances of modelled time, ``capacity`` rows at most.

    When they are full every second one is dropped and the distance doubled. ``due_s`` is when the next one is to be
    added. Not locked: whoever owns it is.
    """

    def __init__(self, every_s: float = 0.25, capacity: int = 600) -> None:
        self.every_s = every_s
        self._capacity = capacity
        self._next = 0  # in distances from the start, so that no rounding adds up
        self._rows: list[tuple[float, dict[str, int]]] = []
        self._marks: dict[str, float] = {}

    @property
    def due_s(self) -> float:
        """The time of the next row."""
        return self._next * self.every_s

    def add(self, time_s: float, readings: Mapping[str, int]) -> None:
        """Add the row that is due."""
        if len(self._rows) == self._capacity:
            del self._rows[1::2]
            self.every_s *= 2
            self._next = -(-self._next // 2)
            if time_s < self.due_s:
                return  # between two rows now
        self._rows.append((time_s, dict(readings)))
        self._next += 1

    def mark(self, time_s: float, label: str) -> None:
        """Remember when something of this name happened first."""
        self._marks.setdefault(label, time_s)

    def as_json(self, now_s: float, now: Mapping[str, int]) -> dict[str, Any]:
        """``t_s``, ``columns`` by reading, and ``marks`` as pairs of seconds and label; ``now`` is the last row."""
        rows = [row for row in self._rows if row[0] < now_s] + [(now_s, dict(now))]
        return {
            "t_s": [round(time_s, 4) for time_s, _ in rows],
            "columns": {key: [readings[key] for _, readings in rows] for key in now},
            "marks": [[round(time_s, 3), label] for label, time_s in self._marks.items()],
        }
