"""The contract of a device: memory, copies, streams and events.

Order is visible: streams and events are explicit arguments, and nothing here waits but what says so
(`Event.synchronize`, `Stream.synchronize`). The same pipeline code runs on every device; on ``cpu`` the ordering
calls do nothing because everything is done when it returns, on ``simulated`` they are checked.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from framepipe.device.host import HostAllocator
from framepipe.errors import DeviceMemoryError
from framepipe.units import format_bytes

_SLICE_S = 0.1


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


class Timer(ABC):
    """How long a device takes between two points of a stream."""

    @abstractmethod
    def start(self, stream: Stream) -> None:
        """Mark the first point, behind the work enqueued so far."""

    @abstractmethod
    def stop(self, stream: Stream) -> None:
        """Mark the second one."""

    @abstractmethod
    def seconds(self) -> float:
        """The time between them; both must have been passed."""


class Device(HostAllocator, ABC):
    """A place where pictures are processed, owned by one pipeline.

    ``xp`` is numpy or cupy, ``kernels`` the module with the functions of `framepipe.kernels` for it. Host memory is
    that of `framepipe.device.host.HostAllocator`.
    """

    kind: str
    name: str
    xp: ModuleType
    default_staging: str = "pooled"
    default_accuracy: str = "exact"
    memory_limit_nbytes: int | None = None
    """The most device memory that this pipeline may hold (`limit_memory`), or None."""

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

    def timer(self) -> Timer | None:
        """A new timer, or None where the host's clock says it all (or nothing)."""
        return None

    def device_view(self, block: np.ndarray) -> Any:
        """Page-locked host memory as stages see it, without a copy: an array of ``xp``, for as long as the block."""
        return block

    @abstractmethod
    def fixed(self, nbytes: int) -> Any:
        """An exact-size uint8 device array that lives until the device is closed or `fixed_free`."""

    @abstractmethod
    def fixed_free(self, block: Any) -> None:
        """Give back an array of `fixed`; no stream may still use it."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> Any:
        """Output memory for work on ``stream``, recycled by lease: reused only behind the last holder's work."""

    def limit_memory(self, nbytes: int) -> None:
        """Hold no more than ``nbytes`` of device memory; going beyond raises `DeviceMemoryError`. Before its first use.

        Where nothing counts device memory this is only a warning.
        """
        self.warnings.append(f"device_memory has no effect on {self.kind}, which has no memory of its own to limit")

    def trim(self) -> None:
        """Let go of recycled memory that nobody holds: pictures of another size are coming."""

    def give_back(self) -> int:
        """Give the device's memory that is kept to be used again back to the system; bytes of it. Any thread.

        Behind whoever used it last; what is wanted later is made again.
        """
        return 0

    def part(self, array: Any, i: int) -> Any:
        """``array[i]`` as a frame gets it: memory whose holders are waited for one by one before it is used again."""
        return array[i]

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which memory that is dropped counts as used by ``stream`` until then."""
        return nullcontext()

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

    def bound(self) -> AbstractContextManager[None]:
        """Make this device current in the calling thread, and no other one; threads of the pipeline begin with it."""
        return nullcontext()

    def current(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make this device, its allocator and ``stream`` current in the calling thread."""
        return nullcontext()

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Get done what would keep the first frames waiting; ``tell`` hears, once, what takes long (`patiently`)."""

    def host_access(self, array: np.ndarray, *, write: bool) -> None:
        """Say that the calling thread now reads or writes host memory which streams copy from or to."""

    def regions(self, parts: Sequence[np.ndarray], label: str) -> None:
        """Say that these parts of a host block are used apart from each other (slots of a slab)."""

    def stamp(self) -> Any:
        """What the calling thread has seen finished; handed with a slot or batch to the next thread's `observe`."""
        return None

    def observe(self, stamp: Any) -> None:
        """Take over what another thread had seen when it made ``stamp``."""

    def flush(self, stream: Stream) -> None:
        """Push queued launches to the hardware (WDDM holds them back until something does)."""

    def describe(self) -> dict[str, Any]:
        """What a report says of it, as JSON values: ``kind``, ``name``, and ``model`` where its memory is modelled."""
        return {"kind": self.kind, "name": self.name}

    def advance(self, pictures: int) -> None:
        """Say that so many pictures are launched: modelled time goes on by as long as they are shown."""

    def modelled_s(self) -> float | None:
        """The time in seconds where it is modelled; None where it is the machine's."""
        return None

    def watch(self) -> None:
        """Take a reading of device memory, for the least that was free; costs microseconds."""

    def vram(self) -> list[dict[str, Any]]:
        """Readings of device memory in bytes, each with its source; empty where there is none.

        ``free`` is the last one, ``free_start``, ``free_least`` and ``free_end`` (None until `close`) are of the run.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Wait for every stream, then give all memory back. Idempotent; goes on after an error."""


def memory_error(
    wanted: int | None, held: int, free: int | None, limit: int | None = None, limit_name: str = "device_memory"
) -> DeviceMemoryError:
    """The error for ``wanted`` bytes that cannot be had, or that ``limit`` forbids; None is not known."""
    if limit is None:
        text = "device memory is exhausted: "
    elif limit_name == "device_memory":
        text = f"this pipeline's own limit is reached, device_memory: {limit} ({format_bytes(limit)}): "
    else:
        text = f"the limit set by {limit_name} is reached ({format_bytes(limit)}): "
    parts = ["CUDA itself wanted some" if wanted is None else f"{wanted} bytes wanted ({format_bytes(wanted)})"]
    parts.append(f"{held} held by this pipeline ({format_bytes(held)})")
    if free is not None:
        parts.append(f"{free} free on the device ({format_bytes(free)})")
    helps = "a smaller staging batch or depth, smaller pictures and holding fewer frames need less"
    return DeviceMemoryError(f"{text}{', '.join(parts)}; {helps}")


def patiently(work: Callable[[], Any], tell: Callable[[str], None], words: str, after_s: float = 0.5) -> None:
    """Do ``work``, and ``tell`` the ``words`` if it is not done after ``after_s`` seconds.

    The work has a thread of its own, so that the caller waits in short slices and hears signals; ``tell`` is called by
    the caller's. Raises what the work raises, and returns when it has ended.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="framepipe-prepare", daemon=True)
    thread.start()
    try:
        thread.join(after_s)
        if thread.is_alive():
            tell(words)
    finally:
        while thread.is_alive():
            thread.join(_SLICE_S)
    if errors:
        raise errors[0]
