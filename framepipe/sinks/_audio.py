"""The sound of a source's file, as packets: read a second time beside the pictures, never decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.stream import Discard

_RUN_UP_S = 2
"""How long before ``start`` reading begins: seeking lands on key frames, and late in some containers."""

_HAIR = Fraction(1, 1_000_000)


class AudioTrack:
    """The packets of a file's sound with ``start <= time < end`` (seconds, as in ``time_s``; None is open).

    For one thread, which also closes. Raises FFmpeg's errors at open; later ones end the track and are told
    to ``warn``.
    """

    def __init__(self, path: Path, start: float | None, end: float | None, warn: Callable[[str], None]) -> None:
        # A packet at 1/10 s is not before 0.1, whose binary value is a hair above it.
        self._start = None if start is None else Fraction(start) - _HAIR
        self._end = None if end is None else Fraction(end) - _HAIR
        self._path = path
        self._warn = warn
        # An absolute path is never taken for a URL, whatever colons are in it.
        self._container: Any = av.open(str(path.absolute()))
        self._packets: Iterator[Any] | None = None
        try:
            self.stream: Any = self._container.streams.best("audio")
            if self.stream is None or self.stream.codec_context is None:
                raise ValueError("no sound that can be copied")
            for other in self._container.streams:
                if other is not self.stream:
                    other.discard = Discard.all
            self._packets = self._read()
            self._next = next(self._packets, None)
        except BaseException:
            self.close()
            raise

    def until(self, time: Fraction | None) -> Iterator[Any]:
        """The next packets that begin before ``time``, or all that are left."""
        while self._next is not None and (time is None or packet_time(self._next) < time):
            yield self._next
            self._next = self._advance()

    def close(self) -> None:
        """Idempotent. The reader is dropped before its container."""
        self._next = self._packets = self.stream = None
        container, self._container = self._container, None
        if container is not None:
            container.close()

    def _advance(self) -> Any:
        try:
            return next(self._packets, None) if self._packets is not None else None
        except (av.FFmpegError, OSError) as error:
            self._warn(f"{self._path}: sound ends early: {error}")
            return None

    def _read(self) -> Iterator[Any]:
        packets = self._from_start()
        for packet in packets:
            time = packet_time(packet)
            if self._end is not None and time >= self._end:
                return
            if self._start is None or time >= self._start:
                yield packet

    def _from_start(self) -> Iterator[Any]:
        """Packets from some time before ``start``, or from the first where seeking does not get there."""
        if self._start is not None and self._start > _RUN_UP_S:
            try:
                self._container.seek(int((self._start - _RUN_UP_S) * av.time_base))
                first = next(self._timed(), None)
            except av.FFmpegError:
                first = None
            if first is None or packet_time(first) > self._start:
                self._container.seek(0)
            else:
                yield first
        yield from self._timed()

    def _timed(self) -> Iterator[Any]:
        for packet in self._container.demux(self.stream):
            if packet.pts is not None and packet.dts is not None:
                yield packet


def packet_time(packet: Any) -> Fraction:
    """When a packet begins, in seconds."""
    base = packet.time_base
    return Fraction(packet.pts * base.numerator, base.denominator)
