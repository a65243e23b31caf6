"""Pictures as files."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from framepipe.errors import ConfigError
from framepipe.frame import Frame
from framepipe.registry import register
from framepipe.sink import Sink, SinkContext
from framepipe.sinks._colour import Colour, Converter, picture
from framepipe.sinks._names import OutputNames
from framepipe.sinks._output import PartFile, sink_error

_CODECS = {".png": "png", ".jpg": "mjpeg", ".jpeg": "mjpeg"}


@register("images")
@dataclass(kw_only=True)
class Images(Sink):
    """A file a picture, PNG or JPEG by the suffix of ``path``.

    ``path`` needs ``{index}`` (number of the frame in its source, as ``{index:06d}``), and ``{source}`` where
    there are several. ``quality`` is for JPEG, 1 to 100 about as other programs count it; ``full_chroma`` keeps
    the colour of every pixel (4:4:4) instead of one in four (4:2:0). JPEG is BT.601 full range, as JFIF has it.
    """

    path: str
    quality: int = 90
    full_chroma: bool = False

    reads = frozenset({"image"})

    def __post_init__(self) -> None:
        self._names = OutputNames(self.path, "images", shared=False)
        suffix = Path(self.path).suffix.lower()
        if suffix not in _CODECS:
            raise ConfigError(f"images: path {str(self.path)!r} must end in {', '.join(_CODECS)}")
        if "index" not in self._names.template.fields:
            raise ConfigError(f"images: path {str(self.path)!r} needs {{index}}, or every picture would be one file")
        if not 1 <= self.quality <= 100:
            raise ConfigError(f"images: quality must be from 1 to 100, not {self.quality}")
        self._codec = _CODECS[suffix]
        self._context = SinkContext({})
        self._encoders: dict[tuple[int, int], _Encoder] = {}
        self._frames = 0
        self._folders: dict[str, None] = {}

    def paths(self, sources: list[str]) -> list[Path]:
        self._names.require_source(sources)
        return []

    def open(self, context: SinkContext) -> None:
        self._context = context

    def write(self, frame: Frame) -> None:
        image = picture(frame, "images")
        size = (image.shape[1], image.shape[0])
        if size not in self._encoders:
            self._encoders[size] = _Encoder(self._codec, size, self.quality, self.full_chroma)
        self._write(self._names.numbered(frame.source, frame.index, frame.time_s), self._encoders[size].encode(image))
        self._frames += 1

    def close(self) -> None:
        self._encoders.clear()

    def state(self) -> dict[str, Any]:
        return {"paths": list(self._folders), "frames": self._frames}

    def _write(self, path: Path, data: bytes) -> None:
        file = PartFile(path, self._context)
        try:
            file.write(data)
        except OSError as error:
            file.discard()
            raise sink_error(error, path, "the unfinished picture was removed") from error
        file.commit()
        self._folders[str(path.parent)] = None


class _Encoder:
    """An encoder for pictures of one size."""

    def __init__(self, codec: str, size: tuple[int, int], quality: int, full_chroma: bool) -> None:
        pix_fmt = "rgb24" if codec == "png" else "yuvj444p" if full_chroma else "yuvj420p"
        # A JPEG is BT.601 whatever its height: the file has no place to say otherwise.
        colour = Colour.of(pix_fmt, 0)
        self._convert = Converter(size, pix_fmt, colour)
        context = av.CodecContext.create(codec, "w")
        assert isinstance(context, av.VideoCodecContext)
        context.width, context.height = size
        context.pix_fmt = pix_fmt
        context.time_base = Fraction(1, 25)
        context.thread_count = 1  # frame threads would hold pictures back
        if codec == "mjpeg":
            colour.tag(context)
            context.qmin = context.qmax = _quantiser(quality)
        self._encoder = context
        self._count = 0

    def encode(self, image: np.ndarray) -> bytes:
        frame = self._convert(image)
        frame.pts = self._count
        frame.time_base = self._encoder.time_base
        self._count += 1
        return b"".join(bytes(packet) for packet in self._encoder.encode(frame))


def _quantiser(quality: int) -> int:
    """FFmpeg's scale (1 best, 31 worst) for the usual one.

    The IJG's tables are scaled by 200 - 2q percent (5000 / q below 50), FFmpeg's by an eighth a step.
    """
    percent = 5000 / quality if quality < 50 else 200 - 2 * quality
    return min(31, max(1, round(8 * percent / 100)))
