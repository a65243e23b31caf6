"""Pictures encoded into video files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av

from framepipe.errors import ConfigError
from framepipe.frame import Frame
from framepipe.registry import register
from framepipe.sink import Sink, SinkContext, SourceInfo
from framepipe.sinks._audio import AudioTrack
from framepipe.sinks._colour import picture
from framepipe.sinks._encoder import Encoding
from framepipe.sinks._names import OutputNames
from framepipe.sinks._output import Outputs, finish_all
from framepipe.sinks._video_writer import VideoWriter

_GUESSED_RATE = Fraction(25)


@register("video")
@dataclass(kw_only=True)
class Video(Sink):
    """A video file a source, in the container of the suffix of ``path`` (``{source}`` where there are several).

    The pictures' own times are kept, constant or not (Matroska and WebM count milliseconds, AVI frames of one
    rate from 0). ``times: zero`` begins every file at 0; ``auto`` does so for the parts that ``rotate_s`` makes.
    A time that repeats or goes back is written a tick after the last. A picture of another size, or whose pixels have
    another shape, begins a new part (``name_0001.mp4``). Where the codec takes only even sizes the last column or row
    is repeated once. A file is ``name.part.mp4`` until it is whole, which it is after an error or Ctrl-C too, up to
    there.

    ``codec``, ``preset`` and ``options`` are FFmpeg's. ``crf`` or ``bitrate`` (bits a second, ``4M``) sets the
    quality. ``threads`` bounds the encoder's threads for each source: two, since decoding uses the cores already.
    ``faststart`` puts the index of an MP4 first, for the web. ``audio: copy`` copies the sound of the source's
    file. RGB becomes BT.709 from 720 lines and BT.601 below, limited range, and is tagged so; so are pixels that are
    not square.
    """

    path: str
    codec: str = "libx264"
    crf: float | None = None
    bitrate: int | str | None = None
    preset: str | None = None
    pix_fmt: str = "yuv420p"
    options: Mapping[str, Any] = field(default_factory=dict)
    faststart: bool = False
    threads: int = 2
    audio: Literal["none", "copy"] = "none"
    times: Literal["auto", "source", "zero"] = "auto"
    rotate_s: float | None = None

    reads = frozenset({"image"})

    def __post_init__(self) -> None:
        if self.crf is not None and self.bitrate is not None:
            raise ConfigError("video: crf and bitrate exclude each other")
        if self.threads < 1:
            raise ConfigError(f"video: threads must be at least 1, not {self.threads}")
        if self.rotate_s is not None and self.rotate_s <= 0:
            raise ConfigError("video: rotate_s takes seconds above 0")
        for name, allowed in (("audio", ("none", "copy")), ("times", ("auto", "source", "zero"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"video: {name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        self._names = OutputNames(self.path, "video", shared=False)
        self._encoding = Encoding(
            suffix=Path(self.path).suffix,
            codec=self.codec,
            pix_fmt=self.pix_fmt,
            crf=self.crf,
            bitrate=_bits(self.bitrate),
            preset=self.preset,
            options=self.options,
            faststart=self.faststart,
            threads=self.threads,
        )
        self._outputs = Outputs(self._names, self._writer, self.rotate_s)
        self._context = SinkContext({})
        self._sounds: dict[str, AudioTrack | None] = {}
        self._told: set[str] = set()
        self._frames = self._moved = 0

    def paths(self, sources: list[str]) -> list[Path]:
        return self._names.paths(sources)

    def open(self, context: SinkContext) -> None:
        self._context = context
        self._encoding.check()

    def write(self, frame: Frame) -> None:
        image = picture(frame, "video")
        size, time = (image.shape[1], image.shape[0]), _time(frame)
        before = self._outputs.current(frame.source)
        if before is not None:
            before.copy_sound(time)
        writer = self._outputs.get(frame.source, frame.time_s, frame)
        if (writer.size, writer.aspect) != (size, frame.pixel_aspect):
            self._warn(
                f"change {frame.source}",
                f"video: pictures of {frame.source!r} change from {_told(writer.size, writer.aspect)} to "
                f"{_told(size, frame.pixel_aspect)} at {frame.time_s:.3f} s: a new part begins at every change",
            )
            writer = self._outputs.renew(frame.source, frame.time_s, frame)
        moved = writer.moved
        writer.write(image, time)
        self._moved += writer.moved - moved
        self._frames += 1

    def end(self, source: str) -> None:
        writer = self._outputs.current(source)
        rest = [] if writer is None else [lambda: writer.copy_sound(None)]
        finish_all([*rest, lambda: self._outputs.end(source), lambda: self._silence(source)])

    def close(self) -> None:
        silence = [lambda source=source: self._silence(source) for source in list(self._sounds)]
        finish_all([self._outputs.close, *silence])

    def state(self) -> dict[str, Any]:
        paths = [str(path) for path in self._outputs.paths]
        return {"paths": paths, "frames": self._frames, "moved_times": self._moved}

    def _writer(self, path: Path, source: str, frame: Frame | None) -> VideoWriter:
        assert frame is not None
        info = self._context.sources.get(source, SourceInfo(source, ""))
        height, width = frame.image.shape[:2]
        if source not in self._sounds:
            self._sounds[source] = self._sound(info)
        rate = _GUESSED_RATE
        if info.rate and 0 < info.rate <= 1000:  # averages such as 3628800/502589 are more than encoders take
            rate = Fraction(info.rate.numerator, info.rate.denominator).limit_denominator(1001)
        return VideoWriter(
            path,
            self._context,
            self._encoding,
            (width, height),
            first=_time(frame),
            time_base=frame.time_base,
            rate=rate,
            sound=self._sounds[source],
            aspect=frame.pixel_aspect,
            from_zero=self.times == "zero" or (self.times == "auto" and self.rotate_s is not None),
            warn=lambda kind, text: self._warn(f"{kind} {source}", f"video: {text}"),
        )

    def _sound(self, info: SourceInfo) -> AudioTrack | None:
        if not info.has_audio:
            return None
        if self.audio == "none":
            self._warn(info.name, f"video: the sound of {info.name!r} is left out; audio: copy keeps it")
            return None
        if info.path is None:
            self._warn(info.name, f"video: the sound of {info.name!r} is left out: the source is no file")
            return None
        try:
            return AudioTrack(info.path, info.start, info.end, lambda text: self._warn(text, f"video: {text}"))
        except (av.FFmpegError, OSError, ValueError) as error:
            self._warn(info.name, f"video: the sound of {info.name!r} is left out: {error}")
            return None

    def _silence(self, source: str) -> None:
        sound = self._sounds.pop(source, None)
        if sound is not None:
            sound.close()

    def _warn(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._context.warnings.append(text)


def _time(frame: Frame) -> Fraction:
    """The exact time, unless the pipeline moved it (a loop, a reconnect): then ``time_s`` says it."""
    if frame.pts is not None and frame.time_base:
        base = frame.time_base
        exact = Fraction(frame.pts * base.numerator, base.denominator)
        if abs(exact - Fraction(frame.time_s)) < Fraction(1, 1_000_000):
            return exact
    return Fraction(frame.time_s)


def _bits(rate: int | str | None) -> int | None:
    """Bits a second, from a number or from ``800k`` or ``4M``."""
    if rate is None:
        return None
    text = str(rate).strip()
    scale = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        bits = round(float(text[:-1] if scale > 1 else text) * scale)
    except ValueError:
        bits = 0
    if bits <= 0:
        raise ConfigError(f"video: bitrate takes bits a second, as 4000000 or 4M, not {rate!r}")
    return bits


def _told(size: tuple[int, int], aspect: Fraction) -> str:
    pixels = "" if aspect == 1 else f" of pixels {aspect.numerator}:{aspect.denominator}"
    return f"{size[0]}x{size[1]}{pixels}"
