"""Distinct pictures ready in memory: what staging alone is measured with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from framepipe.errors import FramepipeError, SourceError
from framepipe.frame import FrameSpec, PlaneLayout

_CACHE = Path("/sys/devices/system/cpu")
UNKNOWN_CACHE = 64 << 20
"""Bytes of last-level cache to reckon with where nobody tells."""
_FEWEST, _MOST = 16, 8192
_TIME_BASE = Fraction(1, 25)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class SizeChangedError(FramepipeError, ValueError):
    """A clip whose pictures change their size or format, so that one rate would be an average over two things."""


def cache_nbytes(root: Path = _CACHE) -> int:
    """Bytes of last-level cache of the processors that this process may use, together."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    found: dict[tuple[int, str], int] = {}
    for number in sorted(allowed):
        for cache in root.glob(f"cpu{number}/cache/index*"):
            try:
                level, size, shared = (
                    (cache / name).read_text(encoding="utf-8").strip() for name in ("level", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            if level.isdigit() and size[:-1].isdigit() and size[-1] in _UNITS:
                found[int(level), shared] = int(size[:-1]) * _UNITS[size[-1]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or UNKNOWN_CACHE


def distinct(nbytes: int, cache: int, available: int) -> int:
    """How many pictures of ``nbytes`` are together twice the ``cache``, within a quarter of the memory available.

    Of very small pictures fewer do: what is done about each of them costs more than fetching it.
    """
    wanted = min(_MOST, -(-2 * cache // nbytes))
    return max(_FEWEST, min(wanted, available // 4 // nbytes))


def of_clip(uri: str, count: int) -> list[av.VideoFrame]:
    """``count`` pictures of a clip as its decoder made them, planes and strides; beyond its end, copies of them.

    Raises `SizeChangedError` and `SourceError`.
    """
    frames: list[av.VideoFrame] = []
    for frame in _decoded(uri):
        if frames and _size(frame) != _size(frames[0]):
            raise SizeChangedError(f"the size changes in mid-clip, from {_size(frames[0])} to {_size(frame)}")
        frames.append(_timed(frame, len(frames)))
        if len(frames) == count:
            return frames
    if not frames:
        raise SourceError(f"{uri}: no picture could be decoded")
    spec = FrameSpec.of(frames[0])
    own = len(frames)
    frames += [_copy(frames[number % own], spec, number) for number in range(own, count)]
    return frames


def of_size(width: int, height: int, pix_fmt: str, count: int) -> list[av.VideoFrame]:
    """``count`` pictures of seeded noise, all different, the same every time."""
    spec = FrameSpec(width, height, pix_fmt)
    noise = np.random.default_rng(0).integers(0, 256, spec.nbytes + count, np.uint8)
    frames = []
    for number in range(count):
        frame = av.VideoFrame(width, height, pix_fmt)
        for view, layout in zip(_rows(frame, spec), spec.planes, strict=True):
            part = noise[number + layout.offset :][: view.size]
            view[:] = part.reshape(view.shape)
            _within(view, spec)
        frames.append(_timed(frame, number))
    return frames


def _within(view: np.ndarray, spec: FrameSpec) -> None:
    """Leave no code beyond what the format's bits can hold."""
    fmt = spec.format
    if fmt.bits > 8:
        samples = view.view(fmt.dtype)
        samples &= np.array(((1 << fmt.bits) - 1) << fmt.shift, samples.dtype)


def _decoded(uri: str) -> Iterator[av.VideoFrame]:
    with av.open(uri) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        yield from container.decode(stream)


def _timed(frame: av.VideoFrame, number: int) -> av.VideoFrame:
    frame.pts, frame.time_base = number, _TIME_BASE
    return frame


def _size(frame: Any) -> str:
    return f"{frame.width}x{frame.height} {frame.format.name}"


def _copy(frame: av.VideoFrame, spec: FrameSpec, number: int) -> av.VideoFrame:
    own = av.VideoFrame(frame.width, frame.height, frame.format.name)
    own.colorspace, own.color_range, own.color_trc = frame.colorspace, frame.color_range, frame.color_trc
    for target, source in zip(_rows(own, spec), _rows(frame, spec), strict=True):
        np.copyto(target, source)
    return _timed(own, number)


def _rows(frame: av.VideoFrame, spec: FrameSpec) -> list[np.ndarray]:
    """The rows of every plane as bytes, without FFmpeg's padding; written to only where nobody else has seen them."""
    return [_plane(plane, layout, spec) for plane, layout in zip(frame.planes, spec.planes, strict=False)]


def _plane(plane: Any, layout: PlaneLayout, spec: FrameSpec) -> np.ndarray:
    line = plane.line_size
    samples = np.frombuffer(memoryview(plane), np.uint8, line * layout.height)
    return samples.reshape(layout.height, line)[:, : layout.row_samples * spec.format.itemsize]
