"""The planes of a decoded picture into a slot: one call of FFmpeg's own copy a picture, without the interpreter lock.

Letting go of that lock and getting it back may take as long as a copy of half a megabyte, so a picture is one call and
not one a plane: ``av_image_copy`` (libavutil/imgutils.h).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from framepipe import ffmpeg
from framepipe.frame import FrameSpec, plane_view
from framepipe.slicecopy import SliceCopies

_Pointers = ctypes.c_void_p * 4
_Lines = ctypes.c_int * 4
_SMALL = 1 << 18
"""Bytes of a picture that is copied with the interpreter lock held: the copy takes less than getting it back."""

LARGE = 1 << 20
"""Bytes from which on several threads copy a picture: to wake one takes as long as copying 300 kB."""


class PlaneCopy:
    """Room for pictures of one spec in ``memory``, a (batch, ≥ nbytes) uint8 array; `put` fills it.

    Bytes between the end of a row and the next one are left as they are. Any number of threads may put different
    pictures at the same time.
    """

    def __init__(self, memory: np.ndarray, spec: FrameSpec) -> None:
        self.spec = spec
        self.views = spec.views(memory)
        at, apart = memory.ctypes.data, memory.strides[0]
        self._to = [_Pointers(*(at + i * apart + plane.offset for plane in spec.planes)) for i in range(len(memory))]
        self._pitches = _Lines(*(plane.pitch for plane in spec.planes))
        self._lines: dict[tuple[int, ...], Any] = {}
        found = _library()
        if found is not None and len(spec.planes) <= 4:
            whole = found[0] if spec.nbytes <= _SMALL else found[1]
            self._copy, self._format = whole, _format(spec.pix_fmt)
        else:
            self._copy, self._format = None, -1

    def put(self, i: int, frame: Any, slices: SliceCopies | None = None) -> None:
        """Copy the planes of ``frame``, an `av.VideoFrame` of this spec, to picture ``i``.

        Where ``slices`` are given their threads copy a large picture.
        """
        planes = frame.planes
        sizes = tuple([plane.line_size for plane in planes])
        lines = self._lines.get(sizes)
        if lines is None:
            lines = self._lines[sizes] = _Lines(*sizes) if self._fits(sizes) else False
        if lines is False:
            for plane, layout, view in zip(planes, self.spec.planes, self.views, strict=False):
                np.copyto(view[i], plane_view(plane, layout, self.spec))
            return
        to, source = self._to[i], _Pointers(*[plane.buffer_ptr for plane in planes])
        large = self.spec.nbytes >= LARGE
        if slices is not None and large and slices.copy(self.spec, to, self._pitches, source, lines):
            return
        self._copy(to, self._pitches, source, lines, self._format, self.spec.width, self.spec.height)

    def _fits(self, sizes: tuple[int, ...]) -> bool:
        """Whether FFmpeg's planes are those of the spec, with rows as long as they must be."""
        layouts = self.spec.planes
        if self._format < 0 or len(sizes) != len(layouts):
            return False
        itemsize = self.spec.format.itemsize
        return all(size >= plane.row_samples * itemsize for size, plane in zip(sizes, layouts, strict=True))


@cache
def _library() -> tuple[Any, Any, Any] | None:
    """``av_image_copy`` holding the interpreter lock and not, and ``av_get_pix_fmt``; None where they are not found."""
    from av.video import frame

    path = ffmpeg.path_of(frame, "avutil", ("av_image_copy", "av_get_pix_fmt"))
    if path is None:
        return None
    held, free = ctypes.PyDLL(path), ctypes.CDLL(path)
    for copy in (held.av_image_copy, free.av_image_copy):
        copy.restype = None
        copy.argtypes = [_Pointers, _Lines, _Pointers, _Lines, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    held.av_get_pix_fmt.argtypes = [ctypes.c_char_p]
    return held.av_image_copy, free.av_image_copy, held.av_get_pix_fmt


@cache
def _format(name: str) -> int:
    """FFmpeg's number of a pixel format; below 0 where there is none."""
    found = _library()
    return int(found[2](name.encode())) if found is not None else -1
