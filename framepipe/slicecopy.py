"""A picture copied by several threads in one call, without the interpreter lock: FFmpeg's scaler, not scaling.

Threads of Python would take turns at that lock for every strip, which takes longer than to copy it. ``sws_scale_frame``
(libswscale/swscale.h) divides a picture into slices of rows for threads of its own, and copies where format and size
stay what they are.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from functools import cache, lru_cache
from typing import Any

import av
import numpy as np

from framepipe import ffmpeg
from framepipe.frame import FrameSpec, plane_view

_PLANES = 8
_SIZES = 4
"""Formats and sizes for which threads are kept: sources of a pipeline may have different ones."""


class _Head(ctypes.Structure):
    """How an AVFrame (libavutil/frame.h) begins; fields are only ever added behind these."""

    _fields_ = (
        ("data", ctypes.c_void_p * _PLANES),
        ("linesize", ctypes.c_int * _PLANES),
        ("extended_data", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
        ("nb_samples", ctypes.c_int),
        ("format", ctypes.c_int),
    )


class SliceCopy:
    """Threads that copy pictures of one format and size, one at a time. `close` ends them.

    Raises RuntimeError where FFmpeg has no memory or no threads for it.
    """

    def __init__(self, spec: FrameSpec, threads: int) -> None:
        found = _library()
        assert found is not None
        self._scaler, self._util = found
        self._context = ctypes.c_void_p(self._scaler.sws_alloc_context())
        self._frames = [ctypes.c_void_p(self._util.av_frame_alloc()) for _ in range(2)]
        if not (self._context.value and all(frame.value for frame in self._frames)):
            self.close()
            raise RuntimeError("FFmpeg has no memory for a copier")
        self._util.av_opt_set_int(self._context, b"threads", threads, 0)
        self._heads = [_Head.from_address(frame.value or 0) for frame in self._frames]
        for head in self._heads:
            head.width, head.height = spec.width, spec.height
            head.format = self._util.av_get_pix_fmt(spec.pix_fmt.encode())
        self._planes = len(spec.planes)

    def copy(self, to: Any, pitches: Any, source: Any, lines: Any) -> bool:
        """Copy a picture: addresses of planes, and bytes from row to row; False where FFmpeg refuses."""
        for head, data, linesize in zip(self._heads, (to, source), (pitches, lines), strict=True):
            for plane in range(self._planes):
                head.data[plane], head.linesize[plane] = data[plane], linesize[plane]
        return bool(self._scaler.sws_scale_frame(self._context, *self._frames) >= 0)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._context.value:
            self._scaler.sws_free_context(ctypes.byref(self._context))
        for frame in self._frames:
            if frame.value:
                self._util.av_frame_free(ctypes.byref(frame))


class SliceCopies:
    """Copiers of any format and size, each with up to ``count`` threads; any number of threads may copy."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()  # guards what is idle, and whether it is over
        self._idle: OrderedDict[FrameSpec, list[SliceCopy]] = OrderedDict()
        self._closed = False

    def copy(self, spec: FrameSpec, to: Any, pitches: Any, source: Any, lines: Any) -> bool:
        """Copy a picture as `SliceCopy.copy` does; False where it was not, since slices bring nothing or fail."""
        threads = threads_for(spec, self.count)
        if threads < 2:
            return False
        with self._lock:
            idle = self._idle.get(spec)
            copier = idle.pop() if idle else None
        if copier is None:
            copier = SliceCopy(spec, threads)
        try:
            return copier.copy(to, pitches, source, lines)
        finally:
            self._put_back(spec, copier)

    def _put_back(self, spec: FrameSpec, copier: SliceCopy) -> None:
        over = [copier]
        with self._lock:
            if not self._closed:
                self._idle.setdefault(spec, []).append(copier)
                self._idle.move_to_end(spec)
                over = self._idle.popitem(last=False)[1] if len(self._idle) > _SIZES else []
        for each in over:
            each.close()

    def close(self) -> None:
        """End all threads; those at work end when they are done. Idempotent."""
        with self._lock:
            self._closed = True
            over = [copier for idle in self._idle.values() for copier in idle]
            self._idle.clear()
        for each in over:
            each.close()


@lru_cache(maxsize=64)
def threads_for(spec: FrameSpec, count: int) -> int:
    """With how many threads, up to ``count``, pictures of ``spec`` come whole; 0 where slices cannot copy them.

    A slice may have an odd number of rows, and then a plane with half as many rows loses one (seen in libswscale 9.5
    and 10.1). How slices are cut is FFmpeg's own business, so it is tried. Where rows have gaps between them it copies
    these, too, and of the last row what is behind the picture: not for us.
    """
    if spec.has_gaps or _library() is None or len(spec.planes) > 4:
        return 0
    picture = _pattern(spec)
    for threads in range(count, 1, -1):
        copier = SliceCopy(spec, threads)
        try:
            if _comes_whole(copier, picture, spec):
                return threads
        finally:
            copier.close()
    return 0


def _pattern(spec: FrameSpec) -> av.VideoFrame:
    """A picture in which no byte is 0, and rows near each other differ."""
    frame = av.VideoFrame(spec.width, spec.height, spec.pix_fmt)
    for plane in frame.planes:
        plane.update(np.resize(np.arange(1, 252, dtype=np.uint8), plane.buffer_size).tobytes())
    return frame


def _comes_whole(copier: SliceCopy, picture: av.VideoFrame, spec: FrameSpec) -> bool:
    memory = np.zeros((1, spec.nbytes), np.uint8)
    at, planes = memory.ctypes.data, picture.planes
    to, source = [at + layout.offset for layout in spec.planes], [plane.buffer_ptr for plane in planes]
    if not copier.copy(to, [layout.pitch for layout in spec.planes], source, [plane.line_size for plane in planes]):
        return False
    found = zip(spec.views(memory), planes, spec.planes, strict=False)
    return all(np.array_equal(view[0], plane_view(plane, layout, spec)) for view, plane, layout in found)


@cache
def _library() -> tuple[Any, Any] | None:
    """libswscale and libavutil with what is used of them; None where that is not found, or AVFrames begin otherwise."""
    from av.video import frame, reformatter

    scaling = ("sws_alloc_context", "sws_free_context", "sws_scale_frame")
    paths = (
        ffmpeg.path_of(reformatter, "swscale", scaling),
        ffmpeg.path_of(frame, "avutil", ("av_frame_alloc", "av_frame_free", "av_opt_set_int", "av_get_pix_fmt")),
    )
    if None in paths:
        return None
    scaler, util = (ctypes.CDLL(path) for path in paths)
    pointer = ctypes.c_void_p
    scaler.sws_alloc_context.restype = util.av_frame_alloc.restype = pointer
    scaler.sws_alloc_context.argtypes = util.av_frame_alloc.argtypes = []
    scaler.sws_free_context.restype = util.av_frame_free.restype = None
    scaler.sws_free_context.argtypes = util.av_frame_free.argtypes = [pointer]
    scaler.sws_scale_frame.argtypes = [pointer, pointer, pointer]
    util.av_opt_set_int.argtypes = [pointer, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
    util.av_get_pix_fmt.argtypes = [ctypes.c_char_p]
    return (scaler, util) if _begins_as_expected(util) else None


def _begins_as_expected(util: Any) -> bool:
    made = ctypes.c_void_p(util.av_frame_alloc())
    if not made.value:
        return False
    head = _Head.from_address(made.value)
    fresh = head.extended_data == made.value and (head.width, head.height, head.format) == (0, 0, -1)
    util.av_frame_free(ctypes.byref(made))
    return fresh
