"""The planes of a decoded picture into a slot: one call of FFmpeg's own copy a picture, without the interpreter lock.

Letting go of that lock and getting it back may take as long as a copy of half a megabyte, so a picture is one call and
not one a plane. ``av_image_copy`` (libavutil/imgutils.h) is in the library that PyAV has loaded already.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from framepipe.frame import FrameSpec, plane_view

_Pointers = ctypes.c_void_p * 4
_Lines = ctypes.c_int * 4
_SMALL = 1 << 18
"""Bytes of a picture that is copied with the interpreter lock held: the copy takes less than getting it back."""

_LARGE = 1 << 20
"""Bytes of a picture from which on copying in strips pays: waking a thread takes as long as copying 300 kB."""

_STRIP = 3 << 18
"""Bytes that a strip has: with more threads each is woken, and the others wait for it, for too little (measured on 16
CPUs: 1280x720 is copied fastest by 2 to 3 threads, 1920x1080 by 4, 3840x2160 by 8 and more)."""


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

    def put(self, i: int, frame: Any, together: CopyThreads | None = None) -> None:
        """Copy the planes of ``frame``, an `av.VideoFrame` of this spec, to picture ``i``.

        Where ``together`` is given a large picture is copied in strips by those threads and the calling one.
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
        source = _Pointers(*[plane.buffer_ptr for plane in planes])
        if together is None or self.spec.nbytes < _LARGE:
            self._copy(self._to[i], self._pitches, source, lines, self._format, self.spec.width, self.spec.height)
            return
        strips = self._strips(min(together.count, -(-self.spec.nbytes // _STRIP)))
        together.run([partial(self._strip, i, source, sizes, lines, *rows) for rows in strips])

    def _strip(
        self, i: int, source: Any, sizes: tuple[int, ...], lines: Any, first: int, rows: int, ups: tuple[int, ...]
    ) -> None:
        """Copy ``rows`` rows from row ``first`` on; ``ups`` shift rows of the picture to those of each plane."""
        to, pitches = self._to[i], self._pitches
        above = _Pointers(*[(to[k] or 0) + (first >> up) * pitches[k] for k, up in enumerate(ups)])
        below = _Pointers(*[(source[k] or 0) + (first >> up) * sizes[k] for k, up in enumerate(ups)])
        self._copy(above, pitches, below, lines, self._format, self.spec.width, rows)

    def _strips(self, count: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """About equal strips of whole chroma rows: first row, rows, and the planes' shifts."""
        ups = tuple(plane.h_shift for plane in self.spec.format.planes)
        unit = 1 << max(ups)
        each = -(-self.spec.height // (count * unit)) * unit
        return [(at, min(each, self.spec.height - at), ups) for at in range(0, self.spec.height, each)]

    def _fits(self, sizes: tuple[int, ...]) -> bool:
        """Whether FFmpeg's planes are those of the spec, with rows as long as they must be."""
        layouts = self.spec.planes
        if self._format < 0 or len(sizes) != len(layouts):
            return False
        itemsize = self.spec.format.itemsize
        return all(size >= plane.row_samples * itemsize for size, plane in zip(sizes, layouts, strict=True))


class CopyThreads:
    """Threads that copy strips of one picture side by side with whoever asks for it; ``count`` with that one."""

    def __init__(self, count: int, name: str = "framepipe-copy") -> None:
        self.count = count
        self._jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        for number in range(count - 1):
            thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                self.close()
                raise
            self._threads.append(thread)

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Do every part and return when all are done. Any thread; raises the first error of one."""
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for part in parts[1:]:
            self._jobs.put((part, done))
        error: BaseException | None = None
        try:
            parts[0]()
        except BaseException as own:
            error = own
        for _ in parts[1:]:  # memory that they write to may not be given back before
            error = done.get() or error
        if error is not None:
            raise error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            part, done = job
            error: BaseException | None = None
            try:
                part()
            except BaseException as failed:
                error = failed
            done.put(error)
            del job, part, done  # a thread that waits keeps nobody's memory
        self._jobs.put(None)

    def close(self) -> None:
        """End the threads; nobody is in `run` any more. Idempotent."""
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()


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
