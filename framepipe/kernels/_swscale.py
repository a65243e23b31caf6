"""Planes to RGB, fast: FFmpeg's swscale inside a libavfilter graph.

swscale has hand-written loops from planar 4:2:0 and 4:2:2 to RGB that repeat chroma as the exact definition does
and are at most 3 codes off it. The graph takes its output frames from a pool of its own, so that in steady state
no memory is touched for the first time, and a frame that somebody holds is not reused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import av
import av.filter
import numpy as np

from framepipe.frame import FrameSpec, Planes

# Every other format goes through swscale's general path, which overflows on samples outside the nominal range,
# filters chroma or is no faster than the exact kernel; odd heights do too, and odd widths cannot be wrapped.
_FORMATS = frozenset({"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "nv12"})
_MATRIX = {"bt601": "smpte170m", "bt709": "bt709", "bt2020": "bt2020", "smpte240m": "smpte240m", "fcc": "fcc"}
# How a picture comes upright, by whether it is mirrored and its rotation.
_TURN: dict[tuple[bool, int], tuple[tuple[str, str | None], ...]] = {
    (False, 0): (),
    (False, 90): (("transpose", "cclock"),),
    (False, 180): (("hflip", None), ("vflip", None)),
    (False, 270): (("transpose", "clock"),),
    (True, 0): (("hflip", None),),
    (True, 90): (("transpose", "cclock_flip"),),
    (True, 180): (("vflip", None),),
    (True, 270): (("transpose", "clock_flip"),),
}
_KEPT = 4


def fast_path(spec: FrameSpec) -> bool:
    """Whether `fast_rgb` takes pictures of ``spec``; for all others "fast" is the exact kernel."""
    mislabelled = spec.pix_fmt.startswith("yuvj") and not spec.full_range  # FFmpeg knows these as full range only
    return spec.pix_fmt in _FORMATS and not (spec.width % 2 or spec.height % 2 or mislabelled)


def fast_rgb(planes: Planes, i: int) -> np.ndarray[Any, Any]:
    """Upright RGB of picture ``i``: a (height, width, 3) uint8 view of a frame of libavfilter's, which it keeps.

    Rows may be padded. The decoder's frame is only referenced, never written to, and may be read by other threads
    meanwhile.
    """
    return _converter(planes.spec).convert(_frame(planes, i))


class _Converter:
    """A configured graph for one spec and one thread."""

    def __init__(self, spec: FrameSpec) -> None:
        self._size = spec.upright_size
        self._graph = av.filter.Graph()
        self._graph.threads = 1  # the pipeline's threads are the decoder's
        source = self._graph.add(
            "buffer",
            video_size=f"{spec.width}x{spec.height}",
            pix_fmt=spec.pix_fmt,
            time_base="1/1000",
            pixel_aspect="1/1",
        )
        chain = [source]
        matrix, extent = _MATRIX[spec.matrix], "full" if spec.full_range else "limited"
        colour = {"flags": "neighbor", "in_color_matrix": matrix, "in_range": extent}
        if spec.pix_fmt == "nv12":
            # Only planar formats have the fast loop. Taking U and V apart changes no sample as long as colour in
            # and colour out are the same, whatever the frame's own tags say.
            split = self._graph.add("scale", out_color_matrix=matrix, out_range=extent, **colour)
            chain += [split, self._graph.add("format", pix_fmts="yuv420p")]
        chain += [
            self._graph.add("scale", out_range="full", **colour),
            self._graph.add("format", pix_fmts="rgb24"),
        ]
        chain += [self._graph.add(name, argument) for name, argument in _TURN[spec.mirrored, spec.rotation]]
        sink = self._graph.add("buffersink")
        self._graph.link_nodes(*chain, sink)
        self._graph.configure()
        self._source, self._sink = source, sink

    def convert(self, frame: av.VideoFrame) -> np.ndarray[Any, Any]:
        self._source.push(frame)
        converted: Any = self._sink.pull()
        plane = converted.planes[0]
        width, height = self._size
        rows: np.ndarray[Any, Any] = np.frombuffer(plane, np.uint8, plane.line_size * height)
        rows = rows.reshape(height, plane.line_size)
        return rows[:, : width * 3].reshape(height, width, 3)


class _Converters(threading.local):
    """The graphs of one thread, most recently used last: a graph is no thread's business but its maker's."""

    def __init__(self) -> None:
        self.by_spec: OrderedDict[FrameSpec, _Converter] = OrderedDict()


_converters = _Converters()


def _converter(spec: FrameSpec) -> _Converter:
    kept = _converters.by_spec
    converter = kept.pop(spec, None)
    if converter is None:
        converter = _Converter(spec)
        if len(kept) >= _KEPT:
            kept.popitem(last=False)
    kept[spec] = converter
    return converter


def _frame(planes: Planes, i: int) -> av.VideoFrame:
    """Picture ``i`` as a frame: the decoder's, or one around its planes in the slab, without a copy."""
    if planes.frames is not None:
        return planes.frames[i]
    spec = planes.spec
    return av.VideoFrame.from_dlpack(planes.picture(i), spec.pix_fmt, spec.width, spec.height)
