"""Streams, events and timers of CUDA, through CuPy's. Waiting threads sleep; spinning would cost a core each."""

from __future__ import annotations

import contextlib
import sys

import cupy as cp

from framepipe.device._cuda_errors import CUDA_ERRORS, explained
from framepipe.device.base import Event, Stream, Timer
from framepipe.device.current import current


class _Owner:
    """Has objects of CuPy's that GPU ``number`` was current for, and destroys them so, in whatever thread that happens.

    For a thread without a context the runtime may make one, on the first GPU, to destroy what belongs to another.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(*CUDA_ERRORS), current(self._number):
                vars(self).clear()


class CudaEvent(_Owner, Event):
    """A CUDA event with blocking synchronisation and without timing."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(number)
        self.name = name
        self._event = cp.cuda.Event(block=True, disable_timing=True)
        self._recorded = False

    @explained
    def record(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._event.record(stream.raw)
        self._recorded = True

    @explained
    def done(self) -> bool:
        return not self._recorded or bool(self._event.done)

    @explained
    def synchronize(self) -> None:
        if self._recorded:
            self._event.synchronize()


class CudaTimer(_Owner, Timer):
    """Two timing events (resolution about half a microsecond, by CUDA's documentation)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._first, self._last = cp.cuda.Event(), cp.cuda.Event()

    @explained
    def start(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._first.record(stream.raw)

    @explained
    def stop(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._last.record(stream.raw)

    @explained
    def seconds(self) -> float:
        return float(cp.cuda.get_elapsed_time(self._first, self._last)) / 1e3


class CudaStream(_Owner, Stream):
    """A non-blocking CUDA stream; ``raw`` is CuPy's object, ``ptr`` the handle for other libraries."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(number)
        self.name = name
        self.raw = cp.cuda.Stream(non_blocking=True)
        self.ptr = self.raw.ptr

    @explained
    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        # Asked first: to ask is cheaper, and lets go of the interpreter lock no more than it takes it.
        if event._recorded and not event._event.done:
            self.raw.wait_event(event._event)

    @explained
    def synchronize(self) -> None:
        # An event, because cudaStreamSynchronize spins unless the whole device is set to block.
        event = cp.cuda.Event(block=True, disable_timing=True)
        event.record(self.raw)
        event.synchronize()
