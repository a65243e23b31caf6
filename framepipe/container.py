"""Containers: opening, choosing the stream, packets, decoders and seeking."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error

from framepipe.errors import SourceError, SourceNotFoundError
from framepipe.reading import PatientFile, Reader, Stopped
from framepipe.redact import redact
from framepipe.retake import copy_of
from framepipe.source import Stream
from framepipe.streams import alpha_decoder, choose, coded_aspect, open_input, sample_aspect

# Text in files need not be UTF-8; from PyAV 19 on it replaces what is not, before it raised.
_OPEN: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
_PROBED = 100
"""Packets behind a key frame that are enough to see a picture."""


def may_stall(uri: str) -> bool:
    """Whether a read of ``uri`` may wait for ever: standard input, a FIFO or device, or something on a network."""
    if uri == "-":
        return True
    if is_url(uri):
        return not uri.startswith("file:")
    try:
        return not stat.S_ISREG(os.stat(uri).st_mode) and not os.path.isdir(uri)
    except (OSError, ValueError):
        return False


def is_url(uri: str) -> bool:
    """Whether ``uri`` begins with a scheme; ``C:`` is a drive, and an existing file is a file."""
    scheme, found, _ = uri.partition(":")
    if not found or len(scheme) < 2 or not scheme.replace("+", "").isalnum():
        return False
    return "://" in uri or not os.path.exists(uri)


class ContainerStream(Stream):
    """One video stream of an opened container. One thread at a time may use it."""

    def __init__(
        self,
        uri: str,
        stopping: Callable[[], bool],
        *,
        label: str = "",
        stream: int | None = None,
        timeout_s: float = 10.0,
        options: dict[str, str] | None = None,
    ) -> None:
        self.uri = redact(label or uri)
        self._target = uri
        self._stopping = stopping
        self._timeout_s = timeout_s
        self._options = options or {}
        self._files: list[PatientFile] = []
        self._reader: Reader | None = None
        self._others: list[Any] = []
        self.may_stall = may_stall(uri)
        self.container: Any = None
        try:
            self.container = self._open()
            self.stream = choose(self.container, self.uri, stream)
        except BaseException:
            self.close()
            raise
        self._index = self.stream.index
        rate = self.stream.average_rate or self.stream.base_rate
        self.rate = Fraction(rate.numerator, rate.denominator) if rate and rate.denominator else None
        base = self.stream.time_base
        self.time_base = Fraction(base.numerator, base.denominator) if base else None
        self.path = Path(uri) if not is_url(uri) and uri != "-" and not self.may_stall else None
        self.has_audio = bool(self.container.streams.audio)
        self.expected = self.stream.frames or None
        self.expected_end_s = _announced_s(self.container, self.stream)
        self.sample_aspect, self.coded_aspect = sample_aspect(self.stream), coded_aspect(self.stream)
        self._decoder = alpha_decoder(self.stream)
        if self._decoder is not None and self._decoder not in av.codecs_available:
            self.warnings = (f"has alpha, which was lost: this FFmpeg has no decoder {self._decoder}",)
            self._decoder = None
        self.demux_error: Exception | None = None
        self.packets_read = 0

    # -- opening ------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        if self._target != "-" and not is_url(self._target) and os.path.isdir(self._target):
            raise SourceError(f"{self.uri}: is a folder; name a file in it, or a pattern such as {self.uri}/*.mp4")
        target: Any = self._target
        options = dict(_OPEN)
        if self._options:
            options["options"] = dict(self._options)
        if self._target == "-" or (self.may_stall and not is_url(self._target)):
            target = self._patient()
        elif self.may_stall:
            return self._open_remote({**options, "timeout": self._timeout_s})
        elif not os.path.isabs(self._target):
            # FFmpeg would read "a:b.mp4" as a protocol and "-x.mp4" as an option in places.
            target = os.path.abspath(self._target)
        try:
            return open_input(target, options)
        except FileNotFoundError as error:
            raise SourceNotFoundError(f"{self.uri}: no such file") from error
        except av.error.InvalidDataError as error:
            raise SourceError(f"{self.uri}: {self._why_unreadable()}") from error
        except (av.error.FFmpegError, OSError, ValueError, UnicodeDecodeError) as error:
            raise SourceError(f"{self.uri}: cannot be opened ({_reason(error)})") from error

    def _open_remote(self, options: dict[str, Any]) -> Any:
        self._reader = Reader(
            lambda: av.open(self._target, "r", **options), self._stopping, self._timeout_s, _host(self.uri)
        )
        try:
            return self._reader.open()
        except Exception as error:
            reason = self._why_not(error, "be opened")
        # Not while the other one is handled: what PyAV raises holds the whole address, credentials and all.
        raise SourceError(f"{self.uri}: {reason}")

    def _why_not(self, error: Exception, doing: str) -> str:
        if isinstance(error, Stopped):
            return "was not waited for, since the pipeline stops"
        if type(error) is TimeoutError:  # the system's own, for a host that is not there, is a child of it
            return f"nothing came for {self._timeout_s:g} s; timeout_s bounds how long is waited"
        if isinstance(error, av.error.InvalidDataError):
            return "is no video that FFmpeg knows"
        if isinstance(error, av.error.ProtocolNotFoundError):
            return f"cannot be opened: this FFmpeg knows no {self._target.partition(':')[0]}"
        return f"cannot {doing} ({redact(_reason(error))})"

    def _patient(self) -> PatientFile:
        if self._target == "-":
            try:
                fd = sys.stdin.fileno()
            except (AttributeError, OSError, ValueError):
                raise SourceError("-: there is no standard input to read; name a file") from None
            file = PatientFile(fd, "<stdin>", self._stopping, owns_fd=False)
        else:
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not wait for its writer
            fd = os.open(self._target, flags)
            os.set_blocking(fd, True)
            file = PatientFile(fd, self._target, self._stopping, owns_fd=True)
        self._files.append(file)
        return file

    def _why_unreadable(self) -> str:
        if self._files:
            return "is no video that FFmpeg knows" if self._files[-1].nbytes else "ended before anything came"
        try:
            size = os.path.getsize(self._target)
        except OSError:
            return "is no video that FFmpeg knows"
        if size == 0:
            return "the file is empty"
        return "is no video that FFmpeg knows, or its index is missing (a recording that was cut off?)"

    # -- packets ------------------------------------------------------------------------------------------------

    def packets(self) -> Iterator[Any]:
        """Packets of the stream in file order, without the flush packet.

        An error of the demuxer ends them and is kept in ``demux_error``.
        """
        reader = self._reader
        try:
            for packet in self.container.demux(self.stream) if reader is None else reader.packets(self.stream):
                if packet.size == 0 and packet.pts is None and packet.dts is None:
                    return
                self.packets_read += 1
                yield packet
        except (av.error.EOFError, Stopped):
            return
        except (av.error.FFmpegError, OSError) as error:
            # What PyAV raises for an address holds all of it.
            self.demux_error = error if reader is None else SourceError(self._why_not(error, "be read on"))

    def decoder(self, threads: int = 1) -> Any:
        """A codec context for this stream: its own the first time, then one of a further open container.

        ``threads`` > 1 asks for frame threads. What may stall cannot be opened twice: there it is a copy of the first.
        """
        if self.stream is not None and not getattr(self, "_lent", False):
            self._lent = True
            context = self.stream.codec_context
        elif self.may_stall:
            context = copy_of(self.stream.codec_context)
        elif self._decoder is None:
            other = self._open()
            self._others.append(other)
            context = other.streams[self._index].codec_context
        if self._decoder is not None:
            context = av.CodecContext.create(self._decoder, "r")
        context.thread_type = "FRAME" if threads > 1 else "NONE"
        context.thread_count = threads
        return context

    def seek(self, time_s: float) -> bool:
        """Go to the key frame at or before ``time_s``; False (and back at the beginning) where that cannot be done."""
        if self.time_base is None or self.may_stall or self.stream.start_time is None:
            return False
        target = int(time_s / self.time_base)
        if target <= self.stream.start_time:
            return True
        for back in (0.0, 10.0, 60.0):
            at = int((time_s - back) / self.time_base)
            try:
                self.container.seek(at, stream=self.stream, backward=True)
            except (av.error.FFmpegError, OSError):
                break
            first = next((p for p in self.packets() if p.is_keyframe), None)
            self.demux_error = None  # damage met here is met again, if it matters
            if first is not None and first.pts is not None and first.pts <= target and self._clean(at):
                self.container.seek(at, stream=self.stream, backward=True)
                return True
        self.reopen()
        return False

    def _clean(self, at: int) -> bool:
        """Whether the picture of the key frame that a seek to ``at`` finds is the first that can be decoded there.

        Where it is not, the key frame is none (intra refresh), and what comes first would be spoiled.
        """
        probe = self._open()
        try:
            stream = probe.streams[self._index]
            stream.codec_context.thread_type = "NONE"
            probe.seek(at, stream=stream, backward=True)
            key_pts = None
            for packet in itertools.islice(probe.demux(stream), _PROBED):
                if key_pts is None:
                    key_pts = packet.pts if packet.is_keyframe else None
                for frame in stream.codec_context.decode(packet if packet.size else None):
                    if frame.pts is not None and key_pts is not None and frame.pts >= key_pts:
                        return bool(frame.pts == key_pts)
            return False
        except (av.error.FFmpegError, OSError):
            return False
        finally:
            probe.close()

    def reopen(self) -> None:
        """Begin again at the first packet, with a fresh container."""
        self.container.close()
        for file in self._files:
            file.close()
        self._files.clear()
        self.container = self._open()
        self.stream = self.container.streams[self._index]
        self._lent = False
        self.packets_read = 0

    def close(self) -> None:
        self.stream = None
        for container in (*self._others, self.container if self._reader is None else None):
            if container is not None:
                container.close()
        if self._reader is not None:
            self._reader.close()
        self._others.clear()
        for file in self._files:
            file.close()
        self._files.clear()


def _host(uri: str) -> str:
    """What names an address in the name of a thread."""
    return uri.partition("://")[2].rpartition("@")[2].partition("/")[0] or "input"


def _announced_s(container: Any, stream: Any) -> float | None:
    """The end of the pictures as Matroska says it, of the stream or of a file without others; None of other kinds.

    Most containers have no count of their packets, and most of those make the duration up from what is there.
    """
    if "matroska" not in container.format.name:
        return None
    try:
        hours, minutes, seconds = str(stream.metadata["DURATION"]).split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except (KeyError, ValueError):
        return container.duration / 1e6 if container.duration and len(container.streams) == 1 else None


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
