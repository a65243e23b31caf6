"""The planes of a decoded picture into a slot: one call of FFmpeg's own copy a picture, without the interpreter lock.

Letting go of that lock and getting it back may take as long as a copy of half a megabyte, so a picture is one call and
not one a plane. ``av_image_copy`` (libavutil/imgutils.h) is in the library that PyAV has loaded already.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from framepipe.frame import FrameSpec, plane_view

_Pointers = ctypes.c_void_p * 4
_Lines = ctypes.c_int * 4
_SMALL = 1 << 18
"""Bytes of a picture that is copied with the interpreter lock held: the copy takes less than getting it back."""


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

    def put(self, i: int, frame: Any) -> None:
        """Copy the planes of ``frame``, an `av.VideoFrame` of this spec, to picture ``i``."""
        planes = frame.planes
        sizes = tuple([plane.line_size for plane in planes])
        lines = self._lines.get(sizes)
        if lines is None:
            lines = self._lines[sizes] = _Lines(*sizes) if self._fits(sizes) else False
        if lines is False:
            for plane, layout, view in zip(planes, self.spec.planes, self.views, strict=False):
                np.copyto(view[i], plane_view(plane, layout, self.spec))
            return
        source = _Pointers(*[plane.buffer_ptr for plane in planes])
        self._copy(self._to[i], self._pitches, source, lines, self._format, self.spec.width, self.spec.height)

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

    # A module's own handle finds what it is linked with; on Windows a library is named, and PyAV's has a hash in it.
    beside = Path(frame.__file__).parents[2] / "av.libs"
    for path in (frame.__file__, *sorted(map(str, beside.glob("avutil-*.dll")))):
        try:
            held, free = ctypes.PyDLL(path), ctypes.CDLL(path)
            copies = [library.av_image_copy for library in (held, free)]
            find = held.av_get_pix_fmt
        except (OSError, AttributeError):
            continue
        for copy in copies:
            copy.restype = None
            copy.argtypes = [_Pointers, _Lines, _Pointers, _Lines, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        find.argtypes = [ctypes.c_char_p]
        return copies[0], copies[1], find
    return None


@cache
def _format(name: str) -> int:
    """FFmpeg's number of a pixel format; below 0 where there is none."""
    found = _library()
    return int(found[2](name.encode())) if found is not None else -1
