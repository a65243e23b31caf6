"""When the pictures of a source show, and what is odd about its time stamps."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

JUMP_S = 10.0
"""A step forward of more than this, and of more than ten pictures, is a jump."""


class Clock:
    """Turns the time stamps of one source, picture after picture in the order of delivery, into seconds.

    A time stamp is never changed. Where there is none the time is a picture after the one before, by the rate, from
    0 on. ``odd`` counts pictures by what their time stamp is: ``estimated`` (there was none), ``repeated`` (that of
    the picture before), ``backward`` (before that), ``jumping`` (see `JUMP_S`) and ``negative``.
    """

    def __init__(self) -> None:
        self.odd: Counter[str] = Counter()
        self._last: int | None = None
        self._jump = 0
        self._anchor_s = 0.0
        self._since = -1  # pictures without a time stamp behind the anchor

    def time_s(self, pts: int | None, base: Fraction, rate: Fraction) -> float:
        """The time in seconds of the next picture, whose time stamp, if it has one, is ``pts`` times ``base``."""
        if pts is None:
            self._since += 1
            self.odd["estimated"] += 1
            return self._anchor_s + self._since * rate.denominator / rate.numerator
        last = self._last
        if last is None:
            self._jump = int(max(Fraction(JUMP_S), 10 / rate) / base)
        elif pts <= last:
            self.odd["repeated" if pts == last else "backward"] += 1
        elif pts - last > self._jump:
            self.odd["jumping"] += 1
        if pts < 0:
            self.odd["negative"] += 1
        self._last = pts
        self._anchor_s, self._since = pts * base.numerator / base.denominator, 0
        return self._anchor_s
