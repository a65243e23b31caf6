"""The streams of a container: which is taken, what there is, and what only a stream's header knows of its pictures."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error

from framepipe.errors import SourceError

_ATTACHED_PIC = 0x0400  # AV_DISPOSITION_ATTACHED_PIC: a cover, not video
_ROUNDING = 0.02  # containers that keep a size to show instead of an aspect
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


def open_input(target: Any, options: dict[str, Any]) -> Any:
    """`av.open` for reading. Raises what that raises."""
    try:
        return av.open(target, "r", **options)
    except av.error.EOFError:
        # FFmpeg takes a transport stream of so few packets for something else and then meets its end.
        if not isinstance(target, str) or not _begins_as_transport_stream(target):
            raise
    return av.open(target, "r", format="mpegts", **options)


def _begins_as_transport_stream(path: str) -> bool:
    with Path(path).open("rb") as file:
        head = file.read(3 * 188)
    return len(head) == 3 * 188 and head[::188] == b"GGG"


def choose(container: Any, uri: str, wanted: int | None) -> Any:
    """The first video stream, or the one whose index among all streams is ``wanted``; a cover only if wanted.

    Raises `SourceError` naming ``uri`` and the streams that there are.
    """
    videos = [s for s in container.streams.video if not _is_cover(s)]
    if wanted is None:
        found = videos[0] if videos else None
    else:
        found = next((s for s in container.streams.video if s.index == wanted), None)
    if found is None:
        streams = ", ".join(describe(s) for s in container.streams) or "no streams"
        if wanted is None:
            raise SourceError(f"{uri}: has no video stream; found {streams}")
        indices = ", ".join(str(s.index) for s in videos) or "none"
        raise SourceError(f"{uri}: has no video stream {wanted}; its video streams are {indices} (found {streams})")
    if found.codec_context is None:
        raise SourceError(f"{uri}: stream {found.index} has a codec that this FFmpeg cannot decode")
    return found


def describe(stream: Any) -> str:
    """Index, kind and codec."""
    context = stream.codec_context
    name = context.name if context is not None else "unknown codec"
    return f"{stream.index}: {stream.type} {name}{' (cover picture)' if _is_cover(stream) else ''}"


def _is_cover(stream: Any) -> bool:
    return bool(int(stream.disposition) & _ATTACHED_PIC)


def sample_aspect(stream: Any) -> tuple[int, int]:
    """How wide and how high a pixel is, as the container has it or else the codec; square where neither says so."""
    return _pair(stream.sample_aspect_ratio)


def coded_aspect(stream: Any) -> tuple[int, int] | None:
    """What the codec says of it, before anything is decoded; None where the container says something else.

    Then the container is right, whatever the codec says further on.
    """
    coded, stated = _pair(stream.codec_context.sample_aspect_ratio), sample_aspect(stream)
    return coded if abs(Fraction(*coded) / Fraction(*stated) - 1) < _ROUNDING else None


def _pair(aspect: Any) -> tuple[int, int]:
    if not aspect or aspect.numerator <= 0 or aspect.denominator <= 0:
        return 1, 1
    return Fraction(aspect.numerator, aspect.denominator).as_integer_ratio()


class PixelAspects:
    """How wide and how high the pixels of a decoder's pictures are: a stream may change it at a key frame.

    No frame says it here. The decoder does, of the packet that it has decoded last: frame threads decode as many at a
    time as they are, and the picture may be given out later than pictures of packets before it. Without time stamps
    the next key frame that is given out is taken for the one, which may be too early where several are on their way.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._coded = getattr(stream, "coded_aspect", None)
        self._sent: deque[int | None] = deque()
        """Time stamps of the packets that are being decoded."""
        self._at_first = True
        """The very first packet is one of these."""
        self._looks = 1
        """For so many packets more the decoder may tell something new: as long as one with a key frame is with it."""
        self._told: Any = None
        self._last = self._coded
        self._coming: deque[tuple[int | None, tuple[int, int]]] = deque()
        """Aspects, and the time stamps, if known, of the pictures that have them first."""
        self._begun = False
        self._now: tuple[int, int] | None = self._coded

    def decoded(self, decoder: Any, packet: Any) -> bool:
        """Look what came of a packet, or of a flush (None), before its pictures go on.

        False where some of these have another aspect than the others, and it is not known which.
        """
        if self._coded is None:
            return True
        if packet is not None:
            threads = max(1, decoder.thread_count)
            self._sent.append(packet.pts)
            while len(self._sent) > threads:
                self._sent.popleft()
                self._at_first = False
            if packet.is_keyframe:
                self._looks = threads + 1
            elif not self._looks:
                return True  # to ask makes a Fraction
            self._looks -= 1
        told = decoder.sample_aspect_ratio
        if told == self._told:
            return True
        self._told = told
        before, self._last = self._last, _pair(told)
        if self._last == before:
            return True
        if packet is None:
            self._coming.append((None, self._last))
            return False
        if self._at_first:
            self._now = self._last
        else:
            self._coming.append((self._sent[0], self._last))
        return True

    def of(self, frame: Any) -> tuple[int, int]:
        """That of the next picture that the decoder gave out."""
        if self._begun and not self._coming:
            return self._shown()
        first, self._begun = not self._begun, True
        while self._coming and frame.key_frame:
            start, aspect = self._coming[0]
            timed = start is not None and frame.pts is not None
            if frame.pts < start if timed else first:
                break
            self._coming.popleft()
            self._now = aspect
            if not timed:
                break  # the next is for another picture
        return self._shown()

    def _shown(self) -> tuple[int, int]:
        return self._stream.sample_aspect if self._now is None or self._now == self._coded else self._now


def alpha_decoder(stream: Any) -> str | None:
    """The decoder to take where alpha stands beside the pictures, as with VP8 and VP9, else None.

    FFmpeg's own decoders of these drop it without a word. The decoder may be missing from this FFmpeg.
    """
    name = _ALPHA_DECODERS.get(stream.codec_context.name)
    return name if name is not None and stream.metadata.get("alpha_mode") == "1" else None


class Sequences:
    """Tells where a stream of MPEG-1 or MPEG-2 video goes on with pictures of another kind.

    Their decoder drops the picture that it holds back when a sequence header has another size, aspect or chroma, so it
    must be flushed before. Others give theirs out by themselves.
    """

    def __init__(self) -> None:
        self._head: bytes | None = None

    @staticmethod
    def of(decoder: Any) -> Sequences | None:
        """A watch for the stream of a decoder that needs one."""
        return Sequences() if getattr(decoder, "name", "") in ("mpeg1video", "mpeg2video") else None

    def change(self, packet: Any) -> bool:
        """Whether ``packet`` begins with a sequence header that differs from the one before."""
        if not packet.is_keyframe:
            return False
        data = bytes(memoryview(packet)[:256])
        at = data.find(b"\0\0\1\xb3")
        if at < 0:
            return False
        more = data.find(b"\0\0\1\xb5", at)  # ISO/IEC 13818-2, 6.2.2.1 and 6.2.2.3
        head = data[at + 4 : at + 8] + (data[more + 4 : more + 7] if more >= 0 else b"")
        before, self._head = self._head, head
        return before is not None and head != before
