"""A device that does nothing early and forgives nothing: the fake that every ordering rule is tested on.

Work is kept until somebody waits for it, then run on the host with NumPy. A vector clock for each stream and each
host thread tells which accesses are ordered by events, waits and hand-overs; two conflicting ones that are not
raise `HazardError` when the second is enqueued, whatever the timing of the run. What is freed is poisoned.
(The test for unordered accesses is that of FastTrack, Flanagan and Freund 2009, with full clocks for simplicity.)
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from framepipe.device.base import Device, Event, Stream, memory_error
from framepipe.errors import ClosedError, HazardError
from framepipe.memory import PAGE, RecyclingPool, aligned_empty

POISON = 0xA5
_STREAM = "stream "
Clock = dict[str, int]


def _merge(into: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if time > into.get(agent, 0):
            into[agent] = time


class _Region:
    """A stretch of memory and who touched it last: the last write, and the reads since, as agent → its time."""

    __slots__ = ("end", "label", "reads", "start", "write")

    def __init__(self, start: int, nbytes: int, label: str) -> None:
        self.start, self.end, self.label = start, start + nbytes, label
        self.write: tuple[str, int] | None = None
        self.reads: Clock = {}

    def access(self, agent: str, clock: Clock, *, write: bool) -> None:
        """Check an access by ``agent``, whose ``clock`` says what it has seen, and note it."""
        conflicts = [] if self.write is None else [("written", *self.write)]
        if write:
            conflicts += [("read", other, time) for other, time in self.reads.items()]
        for verb, other, time in conflicts:
            if other != agent and clock.get(other, 0) < time:
                raise HazardError(
                    f"{self.label} is {'written' if write else 'read'} by {agent} while it may still be "
                    f"{verb} by {other}: no event orders the two"
                )
        if write:
            self.write, self.reads = (agent, clock[agent]), {}
        else:
            self.reads[agent] = clock[agent]

    def give_back(self, clock: Clock) -> None:
        """Check that no stream still uses it; threads are joined, of which clocks know nothing."""
        conflicts = [] if self.write is None else [("written", *self.write)]
        conflicts += [("read", other, time) for other, time in self.reads.items()]
        for verb, other, time in conflicts:
            if other.startswith(_STREAM) and clock.get(other, 0) < time:
                raise HazardError(f"{self.label} is given back while it may still be {verb} by {other}")


class SimulatedEvent(Event):
    """Remembers how far its stream had got, and what that stream had seen."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._stream: SimulatedStream | None = None
        self._position = 0
        self._clock: Clock = {}

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        with self._device.lock:
            self._stream, self._position = stream, stream.enqueued
            self._clock = dict(stream.clock)

    def done(self) -> bool:
        with self._device.lock:
            done = self._stream is None or self._stream.executed >= self._position
            if done:
                _merge(self._device.host_clock(), self._clock)  # to be told so is to know it
            return done

    def synchronize(self) -> None:
        with self._device.lock:
            if self._stream is not None:
                self._stream.run_to(self._position)
            _merge(self._device.host_clock(), self._clock)


class SimulatedStream(Stream):
    """A queue of deferred work and the clock of what it has seen."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name = name
        self.agent = f"{_STREAM}{name!r}"
        self.clock: Clock = {self.agent: 0}
        self.enqueued = 0
        self.executed = 0
        self.error: BaseException | None = None
        self._device = device
        self._queue: deque[Callable[[], None]] = deque()

    def put(self, work: Callable[[], None]) -> None:
        """Lock held: defer ``work``. The stream has seen what the enqueueing thread had seen."""
        _merge(self.clock, self._device.host_clock())
        self.clock[self.agent] += 1
        self.enqueued += 1
        self._queue.append(work)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._device.lock:
            source, position = event._stream, event._position
            self.put((lambda: source.run_to(position)) if source is not None else (lambda: None))
            _merge(self.clock, event._clock)

    def synchronize(self) -> None:
        with self._device.lock:
            self.run_to(self.enqueued)
            _merge(self._device.host_clock(), self.clock)

    def run_to(self, position: int) -> None:
        """Lock held: run what is deferred up to ``position``. A failure is sticky, as on a GPU."""
        while self.executed < position and self.error is None:
            work = self._queue.popleft()
            self.executed += 1
            try:
                work()
            except BaseException as error:
                self.error = error
                self._queue.clear()
        if self.error is not None:
            raise self.error


class SimulatedDevice(Device):
    """NumPy behind the ordering rules of a GPU; ``pooled`` and ``exact`` by default."""

    kind = "simulated"
    name = "simulated device (NumPy, deferred)"
    xp = np
    host_shared = False

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()  # guards clocks, queues and regions
        self.streams: list[SimulatedStream] = []
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._starts: list[int] = []
        self._regions: list[_Region] = []
        self._pool = RecyclingPool(self._output, self._output_free, self._note_drop)
        self._dropped: dict[int, Clock] = {}
        """By address, what whoever dropped a block had seen."""
        self._closed = False

    @property
    def kernels(self) -> ModuleType:
        return importlib.import_module("framepipe.kernels.cpu")

    # -- clocks -------------------------------------------------------------------------------------------------

    def host_clock(self) -> Clock:
        """The calling thread's clock."""
        clock: Clock | None = getattr(self._local, "clock", None)
        if clock is None:
            # Numbered by us: the system gives a thread's number to the next one when it ends.
            self._local.agent = f"thread {threading.current_thread().name!r} #{next(self._numbers)}"
            clock = self._local.clock = {self._local.agent: 1}
        return clock

    def stamp(self) -> Clock:
        with self.lock:
            clock = self.host_clock()
            seen = dict(clock)
            clock[self._local.agent] += 1
            return seen

    def observe(self, stamp: Any) -> None:
        if stamp is not None:
            with self.lock:
                _merge(self.host_clock(), stamp)

    def host_access(self, array: np.ndarray, *, write: bool) -> None:
        with self.lock:
            clock = self.host_clock()
            for region in self._touched(array):
                region.access(self._local.agent, clock, write=write)

    # -- streams ------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(self, name)
        self.streams.append(stream)
        return stream

    def event(self, name: str) -> SimulatedEvent:
        return SimulatedEvent(self, name)

    def enqueue(
        self, stream: Stream, work: Callable[[], None], reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        assert isinstance(stream, SimulatedStream)
        with self.lock:
            if self._closed:
                raise ClosedError("the simulated device is closed")
            stream.put(work)
            for arrays, write in ((reads, False), (writes, True)):
                for array in arrays:
                    for region in self._touched(array):
                        region.access(stream.agent, stream.clock, write=write)

    def upload(self, dst: Any, src: np.ndarray, stream: Stream) -> None:
        self.enqueue(stream, lambda: np.copyto(dst, src), reads=(src,), writes=(dst,))

    def download(self, dst: np.ndarray, src: Any, stream: Stream) -> None:
        self.enqueue(stream, lambda: np.copyto(dst, src), reads=(src,), writes=(dst,))

    def to_host(self, array: Any) -> np.ndarray:
        self.host_access(array, write=False)
        return np.array(array)

    # -- memory -------------------------------------------------------------------------------------------------

    def limit_memory(self, nbytes: int) -> None:
        self.memory_limit_nbytes = nbytes

    def keep_within_limit(self, nbytes: int, kind: str) -> None:
        """Make room for ``nbytes`` more, or raise."""
        limit = self.memory_limit_nbytes
        if limit is None or kind != "device":
            return
        if self.ledger.bytes.get(kind, 0) + nbytes > limit:
            with self.lock:
                self._pool.give_back()
        if (held := self.ledger.bytes.get(kind, 0)) + nbytes > limit:
            raise memory_error(nbytes, held, None, limit)

    def _pin(self, nbytes: int, flags: int, align: int | None) -> tuple[np.ndarray, int]:
        return self._tracked(nbytes, "pinned", align), nbytes

    def _plain(self, nbytes: int, align: int | None) -> np.ndarray:
        return self._tracked(nbytes, "pageable", align)

    def host_free(self, block: np.ndarray) -> None:
        self._poison(block)
        super().host_free(block)

    def _register(self, block: np.ndarray) -> None:
        with self.lock:
            self.track(block, "pinned memory")

    def _unregister(self, block: np.ndarray) -> None:
        self._poison(block)  # what comes next fills it again

    def fixed(self, nbytes: int) -> np.ndarray:
        self.keep_within_limit(nbytes, "device")
        self.ledger.add("device", nbytes)
        return self._tracked(nbytes, "device")

    def fixed_free(self, block: np.ndarray) -> None:
        self._poison(block)
        self.ledger.add("device", -block.nbytes)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> np.ndarray:
        assert isinstance(stream, SimulatedStream)
        with self.lock:
            array = self._pool.empty(shape, dtype)
            _merge(stream.clock, self._leased(array, "device"))  # reused behind whatever its last holder had seen
            return array

    def give_back(self) -> int:
        with self.lock:
            return self._pool.give_back()

    def trim(self) -> None:
        with self.lock:
            self._pool.give_back()
            self.cold.give_back()

    def host_output(self, shape: tuple[int, ...], dtype: Any, owner: str = "host_output") -> np.ndarray:
        with self.lock:
            array = super().host_output(shape, dtype, owner)
            _merge(self.host_clock(), self._leased(array, "pinned"))
            return array

    def _leased(self, array: np.ndarray, kind: str) -> Clock:
        """Lock held: watch an array of a pool; what is to be seen before it is used."""
        self.track(array.reshape(-1), f"{kind} output")
        return self._dropped.pop(array.ctypes.data, {})

    def _note_drop(self, block: np.ndarray) -> None:
        # Without the lock: the collector may drop memory in a thread that has another lock, such as the ledger's, which
        # whoever has this one waits for. Nobody else has the block now, and the clock is the thread's own.
        self._dropped[block.ctypes.data] = dict(self.host_clock())
        block[:] = POISON

    def _cold_free(self, block: np.ndarray) -> None:
        with self.lock:  # whoever dropped it answers for what streams did with it
            self.untrack(block.ctypes.data, block.nbytes)
            self._dropped.pop(block.ctypes.data, None)
        super()._cold_free(block)

    def _output(self, nbytes: int, owner: str) -> np.ndarray:
        self.keep_within_limit(nbytes, "device")
        self.ledger.add("device", nbytes)
        return aligned_empty(nbytes)

    def _output_free(self, block: np.ndarray) -> None:
        with self.lock:
            self._dropped.pop(block.ctypes.data, None)
        self.ledger.add("device", -block.nbytes)

    def regions(self, parts: Sequence[np.ndarray], label: str) -> None:
        with self.lock:
            for number, part in enumerate(parts):
                self.track(part, f"{label} {number}")

    def track(self, block: np.ndarray, label: str) -> None:
        """Lock held: watch a stretch of memory from now on (what was known of it is replaced)."""
        start, nbytes = block.ctypes.data, block.nbytes
        self.untrack(start, nbytes)
        at = bisect.bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._regions.insert(at, _Region(start, nbytes, label))

    def untrack(self, start: int, nbytes: int) -> None:
        """Lock held: forget what lies within."""
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._starts, start + nbytes)
        del self._starts[first:last], self._regions[first:last]

    def _touched(self, array: Any) -> list[_Region]:
        if isinstance(array, list | tuple):
            return [region for part in array for region in self._touched(part)]
        start, end = np.lib.array_utils.byte_bounds(array)
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        last = bisect.bisect_left(self._starts, end)
        return [region for region in self._regions[first:last] if region.end > start]

    def _tracked(self, nbytes: int, kind: str, align: int | None = None) -> np.ndarray:
        block = aligned_empty(nbytes, align or PAGE)
        block[:] = POISON
        with self.lock:
            self.track(block, f"{kind} memory")
        return block

    def _poison(self, block: np.ndarray) -> None:
        with self.lock:
            clock = self.host_clock()
            for region in self._touched(block):
                region.give_back(clock)
            self.untrack(block.ctypes.data, block.nbytes)
        block[:] = POISON

    def close(self) -> None:
        with self.lock:
            for stream in self.streams:
                try:
                    stream.synchronize()
                except BaseException:
                    continue  # reported to whoever waited for it; closing goes on
            self._closed = True
        self._pool.close()
        self.cold.close()
