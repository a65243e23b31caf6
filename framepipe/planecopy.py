"""The planes of decoded pictures into a slot: few calls of FFmpeg's own copies, without the interpreter lock.

Letting go of that lock and getting it back may take as long as a copy of half a megabyte, and where several threads
copy it was a fifth of their time. So a picture is one call and not one a plane: ``av_image_copy``
(libavutil/imgutils.h). And several pictures are one call where their rows are as long as those of the slot, without
gaps: ``av_samples_copy`` (libavutil/samplefmt.h) copies any number of equally long blocks from anywhere to anywhere, to
it the channels of a sound. A plane is some such blocks: those of yuv420p are 4, 1 and 1.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from framepipe import ffmpeg
from framepipe.frame import FrameSpec, plane_view
from framepipe.slicecopy import SliceCopies

_FUNCTIONS = ("av_image_copy", "av_samples_copy", "av_get_pix_fmt", "av_get_sample_fmt")
_Pointers = ctypes.c_void_p * 4
_Lines = ctypes.c_int * 4
_SMALL = 1 << 18
"""Bytes that are copied with the interpreter lock held: the copy takes less than getting it back."""
_BLOCKS = 32
"""Of at most so many blocks is a picture that is copied together with others: their addresses are Python's work."""

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
        pictures = [at + i * apart for i in range(len(memory))]
        self._to = [_Pointers(*(picture + plane.offset for plane in spec.planes)) for picture in pictures]
        self._own = tuple(plane.pitch for plane in spec.planes)
        self._pitches = _Lines(*self._own)
        self._lines: dict[tuple[int, ...], Any] = {}
        self._library = _library() if len(spec.planes) <= 4 else None
        self._format = _format(spec.pix_fmt) if self._library is not None else -1
        several = self._library is not None and len(pictures) > 1
        self._block_nbytes, self._starts = _blocks(spec) if several else (0, [])
        own = [plane.offset + j for plane, starts in zip(spec.planes, self._starts, strict=False) for j in starts]
        self._targets = _pointers(len(own) * len(pictures))(*(picture + j for picture in pictures for j in own))
        self._apart = len(own) * ctypes.sizeof(ctypes.c_void_p)  # from one picture's targets to the next one's

    def put(self, at: int, frames: Sequence[Any], slices: SliceCopies | None = None) -> None:
        """Copy the planes of ``frames``, `av.VideoFrame`s of this spec, to the pictures from ``at`` on.

        Where ``slices`` are given their threads copy large pictures, one at a time.
        """
        sliced = slices if self.spec.nbytes >= LARGE else None
        if sliced is None and len(frames) > 1 and self._put_together(at, frames):
            return
        for i, frame in enumerate(frames, at):
            self._put(i, frame, sliced)

    def _put_together(self, at: int, frames: Sequence[Any]) -> bool:
        """Copy several pictures in one call; False where that cannot be done."""
        library = self._library
        if library is None or not self._block_nbytes:
            return False
        source: list[int] = []
        for frame in frames:
            planes = frame.planes
            if tuple([plane.line_size for plane in planes]) != self._own:
                return False
            for plane, starts in zip(planes, self._starts, strict=True):
                address = plane.buffer_ptr
                source += [address + start for start in starts]
        to = ctypes.byref(self._targets, at * self._apart)
        copy = library.samples_held if len(frames) * self.spec.nbytes <= _SMALL else library.samples
        copy(to, _pointers(len(source))(*source), 0, 0, self._block_nbytes, len(source), library.bytes_apart)
        return True

    def _put(self, i: int, frame: Any, slices: SliceCopies | None) -> None:
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
        if slices is not None and slices.copy(self.spec, to, self._pitches, source, lines):
            return
        assert self._library is not None  # else no lines fit
        copy = self._library.image_held if self.spec.nbytes <= _SMALL else self._library.image
        copy(to, self._pitches, source, lines, self._format, self.spec.width, self.spec.height)

    def _fits(self, sizes: tuple[int, ...]) -> bool:
        """Whether FFmpeg's planes are those of the spec, with rows as long as they must be."""
        layouts = self.spec.planes
        if self._format < 0 or len(sizes) != len(layouts):
            return False
        itemsize = self.spec.format.itemsize
        return all(size >= plane.row_samples * itemsize for size, plane in zip(sizes, layouts, strict=True))


class _Library:
    """What is used of libavutil; ``held`` keeps the interpreter lock. Raises OSError, AttributeError."""

    def __init__(self, path: str) -> None:
        held, free = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.image_held, self.image = held.av_image_copy, free.av_image_copy
        self.samples_held, self.samples = held.av_samples_copy, free.av_samples_copy
        self.number_of = held.av_get_pix_fmt
        number = ctypes.c_int
        for copy in (self.image_held, self.image):
            copy.restype = None
            copy.argtypes = [_Pointers, _Lines, _Pointers, _Lines, number, number, number]
        for copy in (self.samples_held, self.samples):
            copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, number, number, number, number, number]
        self.number_of.argtypes = held.av_get_sample_fmt.argtypes = [ctypes.c_char_p]
        self.bytes_apart = held.av_get_sample_fmt(b"u8p")
        """FFmpeg's number of sound whose channels are bytes in blocks of their own."""


@cache
def _library() -> _Library | None:
    """The library that PyAV brings; None where it is not found."""
    from av.video import frame

    path = ffmpeg.path_of(frame, "avutil", _FUNCTIONS)
    return None if path is None else _Library(path)


@cache
def _format(name: str) -> int:
    """FFmpeg's number of a pixel format; below 0 where there is none."""
    found = _library()
    return int(found.number_of(name.encode())) if found is not None else -1


@cache
def _pointers(count: int) -> Any:
    return ctypes.c_void_p * count


@lru_cache(maxsize=64)
def _blocks(spec: FrameSpec) -> tuple[int, list[range]]:
    """Bytes of the equal blocks that a picture is, and by plane where they begin; 0 where it is not worth while."""
    if spec.has_gaps:
        return 0, []
    sizes = [plane.pitch * plane.height for plane in spec.planes]
    nbytes = math.gcd(*sizes)
    return (nbytes, [range(0, size, nbytes) for size in sizes]) if sum(sizes) <= _BLOCKS * nbytes else (0, [])
