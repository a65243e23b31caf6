"""The contract of a staging strategy: how planes get from the decoder's memory to a device view."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec, Planes
from framepipe.registry import Component

if TYPE_CHECKING:
    import av

    from framepipe.device.base import Device, Event, Stream
    from framepipe.ring import Slot


@dataclass(kw_only=True, frozen=True)
class StagingOptions:
    """The ``staging:`` block.

    ``strategy`` is a name of `framepipe list staging`, or ``auto``. ``slots`` is the number of host slots of
    ``batch`` pictures each, ``depth`` how many batches may be in flight on the device. A batch that has waited
    ``batch_timeout_s`` seconds goes on partial. ``fillers`` threads copy planes into slots; with ``auto`` the decoding
    threads do where there are several sources, each a picture behind one that it decoded, and one filler sees to what
    is left; one source has a filler for every six of its decoding threads. ``copy_threads`` copy each large picture
    together, in slices. ``measure`` takes the time of every copy, allocation and release, for the report.
    """

    strategy: str = "auto"
    slots: int | Literal["auto"] = "auto"
    depth: int = 2
    batch: int = 1
    batch_timeout_s: float = 0.04
    fillers: int | Literal["auto"] = "auto"
    copy_threads: int = 1
    measure: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{key} is {value}; it must be at least 1"
            for key in ("slots", "depth", "batch", "fillers", "copy_threads")
            if (value := getattr(self, key)) != "auto" and value < 1
        ]
        if self.batch_timeout_s < 0:
            problems.append(f"batch_timeout_s is {self.batch_timeout_s}; it cannot be negative")
        if problems:
            raise ConfigError("; ".join(problems), problems)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a strategy takes on the host: ``blocks`` of ``nbytes`` at a time, ``pinned`` or ``pageable``.

    ``taken`` is what a block takes of the system, more where its allocator rounds up, None where that does not say.
    ``per_batch`` means that a block is made for every batch.
    """

    kind: Literal["pinned", "pageable"]
    blocks: int
    nbytes: int
    taken: int | None
    per_batch: bool = False


class Stager(Component):
    """Base of the staging strategies. One object a pipeline; `plan` is called again when the spec changes.

    ``holds_frames`` is True where the decoder's own frames travel and slots have no memory.
    """

    kind = "staging"
    holds_frames: bool = False

    pinned: bool = False
    """True where all slots are page-locked for the whole run."""

    host_readable: bool = True
    """False where reading a slot on the host is so slow that a stage or sink which would is refused."""

    shares_memory: bool = False
    """True where stages read the slot's own memory, so that it is free only behind the last of them."""

    copy_threads: int = 1
    """How many threads copy together for each thread that fills; set by the pipeline before `open`."""
    timings: dict[str, list[float]] | None = None
    """Seconds of every ``copy``, ``allocate``, ``release`` and ``upload`` where they are measured; see `timed`.

    Of pictures that are copied together each has its share.
    """

    def timed(self, what: str, count: int = 1) -> AbstractContextManager[Any]:
        """A context whose time is noted under ``what``, in ``count`` equal parts, if times are measured. Any thread."""
        return _NOTHING if self.timings is None else _timed(self.timings[what], count)

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        """Why this strategy cannot work on this machine with a device of that kind; None where it can."""
        return None

    @classmethod
    def host_memory(cls, spec: FrameSpec, slots: int, batch: int, *, host_shared: bool) -> HostMemory | None:
        """What slots for pictures of ``spec`` take where nothing is refused, on a device that is the host or is not.

        None for no memory of its own, and where a strategy does not tell.
        """
        return None

    @classmethod
    def has_halves(cls, *, host_shared: bool) -> bool:
        """Whether uploads go to ``depth`` blocks of a batch each in device memory."""
        return False

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        """Take the device and the numbers to allocate for."""
        self.device = device
        self.slots = slots
        self.batch = batch
        self.depth = depth

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        """On a filler thread, with every slot idle: make host memory for pictures of ``spec``.

        True if anything was allocated anew.
        """
        return False

    def plan_device(self, spec: FrameSpec) -> None:
        """On the runner, with nothing in flight: make device memory for pictures of ``spec``."""

    def fits(self, spec: FrameSpec) -> bool:
        """Whether `plan` was called for pictures as large as ``spec``; if so no slot needs to be idle."""
        return True

    def fill(self, frames: Sequence[av.VideoFrame], at: int, slot: Slot, spec: FrameSpec) -> None:
        """On any thread that fills, with the slot's fence done: take pictures of the slot over, from ``at`` on.

        Several threads may do so with different pictures of a slot at the same time.
        """
        raise NotImplementedError

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        """On the runner: enqueue the copy of ``slot`` to half ``half`` on ``stream``; record ``copied`` behind it.

        ``copied`` is the fence after which the host side is free.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give all memory back; every stream is idle."""


TIMINGS = ("copy", "allocate", "release", "upload")
"""What `Stager.timings` holds."""
_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _timed(durations: list[float], count: int) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        durations += [(time.perf_counter() - began) / count] * count
