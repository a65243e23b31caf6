"""The contract of a device: memory, copies, streams and events.

Order is visible: streams and events are explicit arguments, and nothing here waits but what says so
(`Event.synchronize`, `Stream.synchronize`). The same pipeline code runs on every device; on ``cpu`` the ordering
calls do nothing because everything is done when it returns, on ``simulated`` they are checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from framepipe.memory import Ledger


class Event(ABC):
    """A point in a stream. Recording it again moves it."""

    name: str

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Mark the work enqueued on ``stream`` so far."""

    @abstractmethod
    def done(self) -> bool:
        """Whether that work is finished (True before the first record). Never waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread, without spinning, until that work is finished.

        Raises what went wrong on the device.
        """


class Stream(ABC):
    """A queue of work that runs in order. ``ptr`` is the raw handle (0 where there is none)."""

    name: str
    ptr: int = 0

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work on this stream run after ``event``; the host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all work on this stream is finished."""


class Device(ABC):
    """A place where pictures are processed, owned by one pipeline.

    ``xp`` is numpy or cupy, ``kernels`` the module with the functions of `framepipe.kernels` for it, ``ledger``
    the account of all memory taken through it.
    """

    kind: str
    name: str
    xp: ModuleType
    default_staging: str = "pooled"
    default_accuracy: str = "exact"
    host_shared: bool = True
    """True where host and device memory are the same, so that no upload or read-back is needed."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.warnings: list[str] = []
        """What the user should know, shown once and in the report."""

    @property
    @abstractmethod
    def kernels(self) -> ModuleType:
        """The kernels of this device: the functions of `framepipe.kernels.cpu`."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A new stream, ordered with no other but by events."""

    @abstractmethod
    def event(self, name: str) -> Event:
        """A new event, finished until it is recorded."""

    @abstractmethod
    def host_empty(self, nbytes: int, *, pinned: bool) -> np.ndarray:
        """An exact-size uint8 host block, page-locked where ``pinned``; give it back with `host_free`."""

    @abstractmethod
    def host_free(self, block: np.ndarray) -> None:
        """Give back a block of `host_empty`; no stream may still use it."""

    @abstractmethod
    def fixed(self, nbytes: int) -> Any:
        """An exact-size uint8 device array that lives until the device is closed or `fixed_free`."""

    @abstractmethod
    def fixed_free(self, block: Any) -> None:
        """Give back an array of `fixed`; no stream may still use it."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> Any:
        """Output memory for work on ``stream``, recycled by lease: reused only behind the last holder's work."""

    def trim(self) -> None:  # noqa: B027
        """Let go of recycled memory that nobody holds: pictures of another size are coming."""

    def part(self, array: Any, i: int) -> Any:
        """``array[i]`` as a frame gets it: memory whose holders are waited for one by one before it is used again."""
        return array[i]

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which memory that is dropped counts as used by ``stream`` until then."""
        return nullcontext()

    @abstractmethod
    def host_output(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Host memory that results are read back to, page-locked on a GPU, recycled when its last holder drops it."""

    @abstractmethod
    def upload(self, dst: Any, src: np.ndarray, stream: Stream) -> None:
        """Copy host to device behind the work on ``stream``; ``src`` must stay as it is until that is done."""

    @abstractmethod
    def download(self, dst: np.ndarray, src: Any, stream: Stream) -> None:
        """Copy device to host behind the work on ``stream``; ``dst`` is complete when that is done."""

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray:
        """A complete array as numpy, in the calling thread, at once; for the memory of frames, even after `close`."""

    @abstractmethod
    def enqueue(
        self, stream: Stream, work: Callable[[], None], reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        """Run ``work`` with ``stream`` current: at once (it enqueues kernels), or deferred on ``simulated``.

        ``reads`` and ``writes`` are the arrays it touches, checked on ``simulated``.
        """

    def current(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make this device, its allocator and ``stream`` current in the calling thread."""
        return nullcontext()

    def host_access(self, array: np.ndarray, *, write: bool) -> None:  # noqa: B027
        """Say that the calling thread now reads or writes host memory which streams copy from or to."""

    def regions(self, parts: Sequence[np.ndarray], label: str) -> None:  # noqa: B027
        """Say that these parts of a host block are used apart from each other (slots of a slab)."""

    def stamp(self) -> Any:
        """What the calling thread has seen finished; handed with a slot or batch to the next thread's `observe`."""
        return None

    def observe(self, stamp: Any) -> None:  # noqa: B027
        """Take over what another thread had seen when it made ``stamp``."""

    def flush(self, stream: Stream) -> None:  # noqa: B027
        """Push queued launches to the hardware (WDDM holds them back until something does)."""

    def watch(self) -> None:  # noqa: B027
        """Take a reading of device memory, for the least that was free; costs microseconds."""

    def vram(self) -> list[dict[str, Any]]:
        """Readings of device memory in bytes, each with its source; empty where there is none."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Wait for every stream, then give all memory back. Idempotent; goes on after an error."""
