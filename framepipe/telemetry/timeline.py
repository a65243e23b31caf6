"""Readings over time in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any


class Timeline:
    """Rows of numbers with their times; one too many, and every second row before it is dropped.

    Least and most of each column are of all rows, dropped ones included. At most ``capacity`` rows are kept: 2 or
    more, and an even number, so that rows at even distances stay so. Any thread may use it.
    """

    def __init__(self, columns: Iterable[str], capacity: int) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"a timeline keeps an even number of rows, 2 or more, not {capacity}")
        self.capacity = capacity
        self._lock = threading.Lock()  # guards the three below
        self._times: list[float] = []
        self._columns: dict[str, list[int | None]] = {column: [] for column in columns}
        self._extremes: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._times)

    def add(self, time_s: float, row: Mapping[str, int | None]) -> bool:
        """Add a row; a column that ``row`` does not have gets None. True if others were dropped to make room for it."""
        with self._lock:
            full = len(self._times) == self.capacity
            if full:
                del self._times[1::2]
                for numbers in self._columns.values():
                    del numbers[1::2]
            self._times.append(time_s)
            for column, numbers in self._columns.items():
                number = row.get(column)
                numbers.append(number)
                if number is not None:
                    least, most = self._extremes.get(column, (number, number))
                    self._extremes[column] = min(least, number), max(most, number)
            return full

    def as_json(self) -> dict[str, Any]:
        """``t_s``, ``columns`` and ``extremes`` (least and most, or null) as plain values."""
        with self._lock:
            extremes = {
                column: {"least": seen[0], "most": seen[1]} if (seen := self._extremes.get(column)) else None
                for column in self._columns
            }
            return {
                "t_s": [round(time_s, 6) for time_s in self._times],
                "columns": {column: list(numbers) for column, numbers in self._columns.items()},
                "extremes": extremes,
            }
