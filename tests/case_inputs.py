"""Inputs of the case tests: clips of exact codes, made with PyAV and NumPy, and what they must look like as RGB.

A picture is one solid colour, given as codes of its components, with its number in eight blocks of 8x8 at the top left
as `conftest.picture` has them. Layouts and formulas are written down here once more, so that a mistake in the package's
own tables is seen.
"""

from __future__ import annotations

import gc
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from conftest import descriptors, number_of, ours
from test_pipeline import balance

from framepipe.frame import Frame
from framepipe.pipeline import Pipeline
from framepipe.report import RunReport
from framepipe.sources.file import File
from framepipe.stages.rgb import Rgb

LIMITED, FULL = 1, 2  # AVColorRange
BT709, FCC, BT470BG, SMPTE170M, SMPTE240M, BT2020 = 1, 4, 5, 6, 7, 9  # AVColorSpace
PQ, HLG = 16, 18  # AVColorTransferCharacteristic
WEIGHTS = {
    BT709: (0.2126, 0.0722),
    FCC: (0.30, 0.11),
    BT470BG: (0.299, 0.114),
    SMPTE170M: (0.299, 0.114),
    SMPTE240M: (0.212, 0.087),
    BT2020: (0.2627, 0.0593),
}
"""Kr and Kb of ITU-T H.273, table 4."""

GREY = (126, 128, 128)
RED_601 = (81, 90, 240)
RED_709 = (63, 102, 240)
INTERLACED_ENCODING = (1 << 29) | (1 << 18)  # AV_CODEC_FLAG_INTERLACED_ME and _DCT


@pytest.fixture(scope="module", autouse=True)
def a_module_leaves_nothing_behind() -> Iterator[None]:
    """No thread of ours, no descriptor more than before; once a module, since collecting takes longer than a test."""
    gc.collect()
    before = descriptors()
    yield
    gc.collect()
    assert not ours()
    assert descriptors() <= before


def needs(encoder: str) -> None:
    """Skip the test where this FFmpeg lacks the encoder."""
    try:
        av.codec.Codec(encoder, "w")
    except ValueError:
        pytest.skip(f"this FFmpeg has no encoder {encoder}")


# -- pictures ----------------------------------------------------------------------------------------------------------


def letters(pix_fmt: str) -> list[str]:
    """The components in each plane, in the order in which they lie there (``0`` is unused)."""
    if pix_fmt.startswith(("nv21", "nv42")):
        return ["Y", "VU"]
    if pix_fmt.startswith(("nv", "p0", "p2", "p4")):
        return ["Y", "UV"]
    if pix_fmt.startswith("yuv"):
        return list("YUVA" if pix_fmt.startswith("yuva") else "YUV")
    if pix_fmt.startswith("gbr"):
        return list("GBRA" if pix_fmt.startswith("gbra") else "GBR")
    if pix_fmt.startswith("ya"):
        return ["YA"]
    if pix_fmt.startswith("gray"):
        return ["Y"]
    packed = pix_fmt if pix_fmt in ("rgb0", "bgr0", "0rgb", "0bgr") else re.sub(r"\d+(le)?$", "", pix_fmt)
    return [packed.upper()]


def bits_of(pix_fmt: str) -> int:
    """Valid bits of a sample."""
    return max(component.bits for component in av.VideoFormat(pix_fmt).components)


def shift_of(pix_fmt: str) -> int:
    """How far samples stand above bit 0: to the top in what hardware decoders give."""
    return 16 - bits_of(pix_fmt) if pix_fmt.startswith(("p0", "p2", "p4")) else 0


def planes_of(frame: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Each component of a frame by its letter, as a writable (rows, columns) view of its memory."""
    name = frame.format.name
    dtype = np.uint8 if bits_of(name) == 8 else np.uint16
    for plane, group in zip(frame.planes, letters(name), strict=True):
        rows = np.frombuffer(plane, dtype)
        rows = rows[: plane.height * plane.line_size // dtype().itemsize].reshape(plane.height, -1)
        for at, letter in enumerate(group):
            yield letter, rows[:, at : plane.width * len(group) : len(group)]


def solid(codes: Sequence[int], number: int = 0, *, size: tuple[int, int] = (96, 64), pix_fmt: str = "yuv420p") -> Any:
    """A picture of one colour: ``codes`` are of Y, U, V or R, G, B, or Y alone, and then of alpha."""
    frame = av.VideoFrame(*size, pix_fmt)
    names = "RGBA" if "R" in "".join(letters(pix_fmt)) else "YUVA" if len(codes) > 2 else "YA"
    value = dict(zip(names, codes, strict=False))
    bits, shift = bits_of(pix_fmt), shift_of(pix_fmt)
    full = "R" in value
    black, white = (0, (1 << bits) - 1) if full else (16 << bits - 8, 235 << bits - 8)
    for letter, view in planes_of(frame):
        view[:] = value.get(letter, 0) << shift
        for bit in range(min(8, size[0] // 8) if letter in "YRGB" and letter in value else 0):
            view[:8, bit * 8 : bit * 8 + 8] = (white if number >> (7 - bit) & 1 else black) << shift
    return frame


def tagged(frame: Any, tags: dict[str, int]) -> Any:
    """The frame with ``colorspace``, ``color_range``, ``color_trc`` or ``color_primaries``."""
    for name, value in tags.items():
        setattr(frame, name, value)
    return frame


def rgb(codes: Sequence[float], colorspace: int = SMPTE170M, *, full: bool = False, bits: int = 8) -> tuple[int, ...]:
    """The standard's formula for one Y, U, V, in float64, rounded and clipped to codes."""
    planes = [np.full((1, 1), code, np.float64) for code in codes]
    return tuple(int(code) for code in formula(*planes, colorspace, full=full, bits=bits)[0, 0])


def formula(y: np.ndarray, u: np.ndarray, v: np.ndarray, colorspace: int, *, full: bool, bits: int = 8) -> np.ndarray:
    """RGB codes as float64 for planes of equal size."""
    top, step = (1 << bits) - 1, 1 << bits - 8
    luma = y / top if full else (y - 16 * step) / (219 * step)
    unit = top if full else 224 * step
    cb, cr = (u - 128.0 * step) / unit, (v - 128.0 * step) / unit
    kr, kb = WEIGHTS[colorspace]
    red, blue = luma + 2 * (1 - kr) * cr, luma + 2 * (1 - kb) * cb
    green = (luma - kr * red - kb * blue) / (1 - kr - kb)
    return np.clip(np.floor(np.stack([red, green, blue], -1) * 255 + 0.5), 0, 255)


# -- files -------------------------------------------------------------------------------------------------------------

_OPTIONS: dict[str, dict[str, str]] = {
    "libx264": {"preset": "ultrafast", "qp": "1", "x264-params": "threads=1:scenecut=0"},
    "libx265": {"preset": "ultrafast", "x265-params": "pools=none:frame-threads=1:qp=1:log-level=none"},
    "libvpx-vp9": {"lossless": "1", "cpu-used": "8", "deadline": "realtime"},
    "libvpx": {"qmin": "0", "qmax": "4", "crf": "4", "deadline": "realtime", "cpu-used": "8"},
    "mpeg2video": {"qmin": "1", "qmax": "2"},
    "mpeg4": {"qmin": "1", "qmax": "1"},
    "mjpeg": {"qmin": "1", "qmax": "1", "q:v": "1"},
}
_WITHOUT_GOP = ("gif", "apng", "png", "ffv1", "rawvideo", "mjpeg", "prores_ks", "wrapped_avframe", "qtrle")


def encode(
    path: Path,
    frames: Iterable[Any],
    codec: str = "libx264",
    *,
    rate: Fraction | int = 25,
    pts: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    durations: Sequence[int] | None = None,
    tags: dict[str, int] | None = None,
    options: dict[str, str] | None = None,
    container: str | None = None,
    container_options: dict[str, str] | None = None,
    gop: int = 12,
    bframes: int = 0,
    flags: int = 0,
    aspect: Fraction | None = None,
    turned: tuple[int, bool, bool] | None = None,
) -> Path:
    """Frames into a file; ``pts`` in ``time_base``, ``turned`` is (degrees, hflip, vflip) of the display matrix."""
    needs(codec)
    frames = list(frames)
    base = time_base or 1 / Fraction(rate)
    with av.open(str(path), "w", format=container, options=container_options or {}) as out:
        stream = out.add_stream(
            codec, rate=rate, options={"threads": "1", **_OPTIONS.get(codec, {}), **(options or {})}
        )
        stream.width, stream.height, stream.pix_fmt = frames[0].width, frames[0].height, frames[0].format.name
        context = stream.codec_context
        context.time_base = base
        if codec not in _WITHOUT_GOP:
            context.gop_size, context.max_b_frames = gop, bframes
        context.flags |= flags
        if aspect is not None:
            context.sample_aspect_ratio = aspect
        if turned is not None:
            stream.set_display_rotation(turned[0], hflip=turned[1], vflip=turned[2])
        tagged(context, tags or {})
        for i, frame in enumerate(frames):
            tagged(frame, tags or {})
            frame.pts, frame.time_base = i if pts is None else pts[i], base
            if durations is not None:
                frame.duration = durations[i]
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def numbered(count: int, *, size: tuple[int, int] = (96, 64), pix_fmt: str = "yuv420p", first: int = 0) -> list[Any]:
    """Grey pictures that say their numbers."""
    step = 1 << bits_of(pix_fmt) - 8
    return [solid([c * step for c in GREY], first + i, size=size, pix_fmt=pix_fmt) for i in range(count)]


def tone(out: Any, *, seconds: float = 1.0, start: float = 0.0) -> list[Any]:
    """Packets of an AAC stream added to an output container."""
    stream = out.add_stream("aac", rate=48000, layout="mono")
    packets: list[Any] = []
    for at in range(0, int(seconds * 48000), 1024):
        wave = 0.2 * np.sin(np.arange(at, at + 1024) * 2 * np.pi * 440 / 48000)
        frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None], "fltp", "mono")
        frame.sample_rate, frame.time_base, frame.pts = 48000, Fraction(1, 48000), at + int(start * 48000)
        packets += stream.encode(frame)
    return packets + stream.encode()


def sound(path: Path) -> Path:
    """A file with sound alone."""
    with av.open(str(path), "w") as out:
        for packet in tone(out):
            out.mux(packet)
    return path


def remuxed(source: Path, target: Path, *, shift: int = 0, container: str | None = None) -> Path:
    """The packets of a file in another one, ``shift`` ticks of its time base later."""
    with av.open(str(source)) as read, av.open(str(target), "w", format=container) as out:
        stream = out.add_stream_from_template(read.streams.video[0])
        for packet in read.demux(video=0):
            if packet.dts is not None:
                packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                packet.stream = stream
                out.mux(packet)
    return target


def with_cover(path: Path) -> Path:
    """An MP4 or M4A with a cover picture added as iTunes does, in place."""
    data = path.read_bytes()
    at = data.rfind(b"moov") - 4
    size = int.from_bytes(data[at : at + 4], "big")
    moov = data[at + 8 : at + size]
    old = moov.find(b"udta") - 4
    if old >= 0:
        moov = moov[:old] + moov[old + int.from_bytes(moov[old : old + 4], "big") :]
    cover = _atom(b"covr", _atom(b"data", struct.pack(">II", 14, 0), png(32, 24)))
    handler = _atom(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    tags = _atom(b"udta", _atom(b"meta", bytes(4), handler, _atom(b"ilst", cover)))
    path.write_bytes(data[:at] + _atom(b"moov", moov, tags) + data[at + size :])
    return path


def _atom(kind: bytes, *body: bytes) -> bytes:
    content = b"".join(body)
    return struct.pack(">I", 8 + len(content)) + kind + content


def png(width: int, height: int, color: tuple[int, ...] = (0, 0, 255)) -> bytes:
    """A PNG of one colour: three codes, or four with alpha."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2 if len(color) == 3 else 6, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(color) * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def retimed(source: Path, target: Path, times: Sequence[int]) -> Path:
    """A Matroska file of one cluster with other block times: no muxer of FFmpeg's writes such as go back."""
    data = bytearray(source.read_bytes())
    with av.open(str(source)) as read:
        packets = [(bytes(p), p.pts) for p in read.demux(video=0) if p.size]
    at = 0
    for (content, _), time in zip(packets, times, strict=True):
        at = data.index(content, at)
        data[at - 3 : at - 1] = struct.pack(">h", time)  # a block's time and flags stand before what it holds
        at += len(content)
    target.write_bytes(data)
    return target


def gif(path: Path, colours: Sequence[tuple[int, int, int]], times: Sequence[int]) -> Path:
    """An animated GIF; ``times`` in hundredths of a second."""
    frames = [solid(c, i, size=(64, 48), pix_fmt="rgb24").reformat(format="bgr8") for i, c in enumerate(colours)]
    return encode(path, frames, "gif", rate=100, time_base=Fraction(1, 100), pts=times, container_options={"loop": "0"})


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a pipeline of one source and the exact conversion to RGB gave: frames without their memory, host arrays."""

    frames: list[Frame] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    tensors: list[dict[str, np.ndarray]] = field(default_factory=list)
    report: RunReport = field(default_factory=RunReport)

    @property
    def numbers(self) -> list[int]:
        """The numbers in the pictures."""
        return [number_of(picture) for picture in self.pictures]

    @property
    def times(self) -> list[float]:
        """Times in seconds, to the microsecond."""
        return [round(frame.time_s, 6) for frame in self.frames]

    @property
    def colours(self) -> list[tuple[int, ...]]:
        """The colour at the bottom right of each picture."""
        return [tuple(int(code) for code in picture[-1, -1]) for picture in self.pictures]

    @property
    def source(self) -> dict[str, Any]:
        """The source's part of the report."""
        return self.report.sources[0]

    @property
    def counters(self) -> dict[str, int]:
        """What the report counts of the source by name."""
        found: dict[str, int] = self.source["counters"]
        return found

    def warns(self, *words: str) -> bool:
        """Whether one warning of the source has all of ``words``."""
        return sum(all(word in warning for word in words) for warning in self.source["warnings"]) == 1


def see(uri: Any, *, device: str = "cpu", stages: Sequence[Any] | None = None, batch: int = 1, **source: Any) -> Seen:
    """Run a file (or a source) through ``stages`` (`Rgb`, exact) to the end, and keep everything."""
    seen = Seen()
    given = File(uri=str(uri), **source) if isinstance(uri, str | Path) else uri
    chain = [Rgb(accuracy="exact")] if stages is None else stages
    with Pipeline([given], chain, device=device, threads=2, staging={"batch": batch}) as pipeline:
        for frame in pipeline:
            seen.frames.append(frame)
            if frame.image is not None:
                seen.pictures.append(frame.numpy().copy())
            seen.tensors.append({name: frame.to_host(array).copy() for name, array in frame.tensors.items()})
            frame.release()
        assert pipeline.report is not None
        seen.report = pipeline.report
    balance(seen.report)
    return seen


def near(found: Sequence[int], right: Sequence[int], within: int = 1) -> bool:
    """Whether each code is within so many of the right one."""
    return all(abs(a - b) <= within for a, b in zip(found, right, strict=True))
