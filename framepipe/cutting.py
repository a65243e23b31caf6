"""Packets cut at key frames into segments that can be decoded side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MIN_SEGMENT = 16
"""Packets of the shortest segment: shorter ones (all-intra codecs) are joined, since taking one up has a price."""


@dataclass(slots=True)
class Segment:
    """Packets from one key frame to the next.

    ``leading`` are the pts of pictures that follow the key frame in the file and precede it on the screen: they
    need the segment before. ``tail`` are the next segment's key frame and leading packets, to be decoded behind
    this segment for their sake, and ``tail_pts`` the pts of that key frame.
    """

    packets: list[Any]
    key_pts: int | None = None
    leading: frozenset[int] = frozenset()
    tail: list[Any] = field(default_factory=list)
    tail_pts: int | None = None
    last: bool = False


class Cutter:
    """Cuts a stream's packets into `Segment` where decoding can begin anew without changing a picture.

    A cut needs a key frame with a pts above every pts before it; whether the decoder really starts clean there is
    seen only from its first picture, which the decode pool checks.
    """

    def __init__(self, packets: Iterator[Any], min_packets: int = MIN_SEGMENT) -> None:
        self.top_pts: int | None = None
        """The greatest pts seen so far."""
        self._packets = self._noted(packets)
        self._min = min_packets
        self._pending: list[Any] = []  # the next segment's key frame and leading packets, plus one packet behind
        self._leading = 0
        self._key_pts: int | None = None
        self.ended = False

    def next(self, limit: int | None = None) -> Segment | None:
        """The next segment, or None at the end. One longer than ``limit`` packets is given up: see `rest`."""
        if self.ended:
            return None
        packets, self._pending = self._pending, []
        key_pts = self._key_pts
        leading = frozenset(p.pts for p in packets[1 : 1 + self._leading])
        clean = all(p.pts is not None for p in packets)
        top = max((p.pts for p in packets), default=None) if clean else None
        for packet in self._packets:
            if (
                packet.is_keyframe
                and clean
                and len(packets) >= self._min
                and packet.pts is not None
                and top is not None
                and packet.pts > top
            ):
                tail = self._look_ahead(packet)
                return Segment(packets, key_pts, leading, tail, packet.pts)
            if packet.pts is None:
                clean = False  # order cannot be told without pts: no cut in this segment any more
            else:
                top = packet.pts if top is None else max(top, packet.pts)
            packets.append(packet)
            if limit is not None and len(packets) > limit:
                self._pending = packets
                return Segment([], key_pts)
        self.ended = True
        return Segment(packets, key_pts, leading, last=True) if packets else None

    def _noted(self, packets: Iterator[Any]) -> Iterator[Any]:
        for packet in packets:
            if packet.pts is not None and (self.top_pts is None or packet.pts > self.top_pts):
                self.top_pts = packet.pts
            yield packet

    def rest(self) -> Iterator[Any]:
        """Every packet not handed out yet, in file order (to go on linearly)."""
        pending, self._pending = self._pending, []
        yield from pending
        yield from self._packets

    def _look_ahead(self, key: Any) -> list[Any]:
        """Read the key frame's leading packets; returns what the segment before must decode for their sake."""
        self._pending, self._leading, self._key_pts = [key], 0, key.pts
        for packet in self._packets:
            self._pending.append(packet)
            if packet.pts is None or packet.pts >= key.pts:
                break
            self._leading += 1
        return self._pending[: 1 + self._leading] if self._leading else []
