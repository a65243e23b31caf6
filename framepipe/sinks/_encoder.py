"""Video encoders by FFmpeg's names: is it there, does it fit the container, what are its options and time base."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import av
from av.format import ContainerFormat

from framepipe.errors import ConfigError
from framepipe.sinks._colour import Colour

Size = tuple[int, int]

_FAMILY = {
    "libx264": "h264", "libx264rgb": "h264", "libopenh264": "h264", "libx265": "hevc", "libkvazaar": "hevc",
    "libvpx": "vp8", "libvpx-vp9": "vp9", "libaom-av1": "av1", "librav1e": "av1", "libsvtav1": "av1",
    "libxvid": "mpeg4",
}  # fmt: skip
_MOV = frozenset({"mov", "mp4", "ipod", "3gp", "3g2", "f4v", "ismv", "psp"})
_ODD = frozenset({"vp8", "vp9", "av1", "mpeg4", "mjpeg", "ffv1", "mpeg1video", "mpeg2video", "prores", "flv1"})
"""Codecs that take sizes which subsampled chroma does not divide; H.264 and H.265 cannot say such a size."""
_VARIABLE_FPS = 0x0400  # AVFMT_VARIABLE_FPS
_FINE = Fraction(1, 10_000)
_FINEST = Fraction(1, 1_000_000)
_NO_TIME_BASE = Fraction(1, 90_000)
_MPEG4_MAX = 65_535  # MPEG-4 part 2 has 16 bits for the ticks of a second


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How pictures are encoded; the fields are those of the ``video`` sink."""

    suffix: str
    codec: str = "libx264"
    pix_fmt: str = "yuv420p"
    crf: float | None = None
    bitrate: int | None = None
    preset: str | None = None
    options: Mapping[str, str]
    faststart: bool = False
    threads: int = 2

    def check(self) -> None:
        """Raises `ConfigError` where FFmpeg lacks the encoder, or container, format and options do not fit."""
        encoder = find_encoder(self.codec)
        formats = [fmt.name for fmt in encoder.video_formats or ()]
        if formats and self.pix_fmt not in formats:
            raise ConfigError(f"video: {self.codec} takes no pix_fmt {self.pix_fmt!r}; it takes {', '.join(formats)}")
        with av.open(f"name{self.suffix}", "w", format=self.container.name) as probe:  # nothing is written
            try:
                probe.add_stream(self.codec)
            except ValueError:
                raise ConfigError(f"video: a {self.suffix} file cannot hold {self.codec}") from None
        if self.faststart and not is_mov(self.container):
            raise ConfigError(f"video: faststart is for .mp4 and .mov, not {self.suffix}")
        self._check_options()

    @cached_property
    def container(self) -> ContainerFormat:
        """The container of the file's suffix."""
        try:
            with av.open(f"name{self.suffix}", "w") as probe:
                found = probe.format
        except ValueError:
            raise ConfigError(
                f"video: no container is known for {self.suffix!r}; .mp4, .mkv, .mov, .webm are"
            ) from None
        if found.no_file:
            raise ConfigError(f"video: {self.suffix} is no single video file; .mp4, .mkv, .mov, .webm are")
        return found

    def encoder_options(self) -> dict[str, str]:
        """Options of the encoder alone."""
        options = {key: str(value) for key, value in self.options.items()}
        if self.preset is not None:
            options["preset"] = self.preset
        if self.crf is not None:
            options["crf"] = f"{self.crf:g}"
        if self.codec == "libx265":  # it has threads of its own for every core, and talks
            given = options.get("x265-params")
            options["x265-params"] = f"pools={self.threads}:log-level=error" + (f":{given}" if given else "")
        if not _keeps_decode_times(self.container):
            options.setdefault("bf", "0")
        return options

    def muxer_options(self, time_base: Fraction) -> dict[str, str]:
        """Options of the container: an MP4 keeps its first time in the movie's time scale, mostly milliseconds."""
        if not is_mov(self.container):
            return {}
        options = {"movie_timescale": str(time_base.denominator)}
        return {**options, "movflags": "+faststart"} if self.faststart else options

    def configure(self, context: Any, size: Size, rate: Fraction, time_base: Fraction) -> Colour:
        """Set up an encoder context that is not open yet; the colour it is tagged with."""
        context.width, context.height = size
        context.pix_fmt = self.pix_fmt
        context.framerate, context.time_base = rate, time_base
        context.thread_count = self.threads
        context.thread_type = "FRAME"  # PyAV's SLICE makes x264 cut pictures into slices, at a cost in quality
        context.bit_rate = self.bitrate or 0  # 0: by quality, which is high for codecs without crf too
        colour = Colour.of(self.pix_fmt, size[1], full_range=self.codec == "mjpeg")
        colour.tag(context)
        return colour

    def padding(self, size: Size) -> Size:
        """(columns, rows) missing to a size that the codec can say."""
        if av.codec.Codec(self.codec, "w").canonical_name in _ODD:
            return (0, 0)
        fmt = av.VideoFormat(self.pix_fmt, 16, 16)
        across, down = 16 // (fmt.chroma_width(16) or 16), 16 // (fmt.chroma_height(16) or 16)
        return (-size[0] % across, -size[1] % down)

    def timing(self, source: Fraction | None, rate: Fraction) -> tuple[Fraction, Fraction]:
        """(time base of the encoder, frame rate it is told) for a source's own time base, or None."""
        encoder = av.codec.Codec(self.codec, "w")
        container = self.container
        if encoder.frame_rates:
            known = [Fraction(each.numerator, each.denominator) for each in encoder.frame_rates]
            rate = min(known, key=lambda each: abs(each - rate))
        if encoder.frame_rates or not (is_mov(container) or container.flags & _VARIABLE_FPS):
            return 1 / rate, rate
        base = Fraction(1, source.denominator) if source else _NO_TIME_BASE
        while base > _FINE:  # so that moving a repeated time by a tick moves it by next to nothing
            base /= 2
        if base < _FINEST:
            base = _FINEST
        if encoder.canonical_name == "mpeg4" and base.denominator > _MPEG4_MAX:
            whole = rate.numerator if rate.numerator <= _MPEG4_MAX else 45_000
            base = Fraction(1, whole * (_MPEG4_MAX // whole))
        return base, rate

    def _check_options(self) -> None:
        asked = self.options or self.preset is not None or self.crf is not None
        if not asked or self._trial({}) is None:  # None: it does not open at the trial's size anyway
            return
        left = self._trial(self.encoder_options())
        if left is None:
            given = ", ".join(f"{key}={value}" for key, value in self.encoder_options().items())
            raise ConfigError(f"video: {self.codec} refuses these options: {given}")
        for name in left:
            known = av.CodecContext.create(self.codec, "w").supported_options
            near = difflib.get_close_matches(name, [each.name for each in (*known.private, *known.generic)], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"video: {self.codec} has no option {name!r}{hint}")

    def _trial(self, options: dict[str, str]) -> list[str] | None:
        """Names that the encoder did not know, or None where it does not open."""
        context = av.CodecContext.create(self.codec, "w")
        self.configure(context, (320, 240), Fraction(25), Fraction(1, 25))
        context.options = options
        try:
            context.open()
        except (av.FFmpegError, ValueError):
            return None
        return list(context.options)


def find_encoder(name: str) -> av.codec.Codec:
    """FFmpeg's encoder ``name``. Raises `ConfigError` listing those that this FFmpeg has for the same codec."""
    try:
        found = av.codec.Codec(name, "w")
    except ValueError:
        family = _FAMILY.get(name, name.split("_")[0])
        others = ", ".join(_encoders(family))
        there = f"; for {family} it has {others}" if others else ""
        raise ConfigError(f"video: this FFmpeg has no encoder {name!r}{there}") from None
    if found.type != "video":
        raise ConfigError(f"video: {name!r} is an encoder for {found.type}")
    return found


def _encoders(family: str) -> list[str]:
    found = []
    for name in sorted(av.codecs_available):
        try:
            encoder = av.codec.Codec(name, "w")
        except ValueError:
            continue
        if encoder.canonical_name == family and encoder.name == name:
            found.append(name)
    return found


def is_mov(container: ContainerFormat) -> bool:
    """MP4 and its relatives: an index at the end, times in edit lists."""
    return container.name in _MOV


def keeps_start(container: ContainerFormat) -> bool:
    """AVI holds no times at all: sound and pictures both begin with the file."""
    return container.name != "avi"


def _keeps_decode_times(container: ContainerFormat) -> bool:
    # These shift every time where B-frames begin with a decode time below zero.
    return container.name not in ("mpegts", "avi", "flv")
