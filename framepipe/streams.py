"""The streams of a container: which is taken, what there is, and what only a stream's header knows of its pictures."""

from __future__ import annotations

from typing import Any

from framepipe.errors import SourceError

_ATTACHED_PIC = 0x0400  # AV_DISPOSITION_ATTACHED_PIC: a cover, not video
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


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
    aspect = stream.sample_aspect_ratio
    if not aspect or aspect.numerator <= 0 or aspect.denominator <= 0:
        return 1, 1
    return aspect.numerator, aspect.denominator


def alpha_decoder(stream: Any) -> str | None:
    """The decoder to take where alpha stands beside the pictures, as with VP8 and VP9, else None.

    FFmpeg's own decoders of these drop it without a word. The decoder may be missing from this FFmpeg.
    """
    name = _ALPHA_DECODERS.get(stream.codec_context.name)
    return name if name is not None and stream.metadata.get("alpha_mode") == "1" else None
