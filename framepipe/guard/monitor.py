"""The guard itself: reads, decides, carries out, and notes each decision with its numbers."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from framepipe.guard.growth import Growth
from framepipe.guard.options import GuardOptions
from framepipe.guard.policy import Decision, Level, Policy
from framepipe.guard.readings import Memory, Reading
from framepipe.units import format_bytes

_log = logging.getLogger("framepipe.guard")
_LEAST_INTERVAL_S = 1e-3


class Controls(Protocol):
    """What a guard may do to a run, and what it asks of it. Any thread; nothing of it waits for the device."""

    depth: int
    """How many batches may be in flight in a run that nobody guards."""

    def pinned(self) -> tuple[int, int]:
        """Bytes page-locked now, and in all since the start."""

    def cold(self) -> tuple[int, int]:
        """Bytes of the cold tier, and how many of them somebody holds."""

    def give_back(self) -> int:
        """Give what nobody uses of the cold tier back to the system; how many bytes."""

    def grow(self, nbytes: int) -> int:
        """Let the cold tier grow by up to ``nbytes``; by how many it did."""

    def set_depth(self, depth: int) -> None:
        """Have ``depth`` batches in flight at most from now on."""

    def stop_page_locking(self, why: str) -> None:
        """Page-lock nothing more in this run."""

    def warn(self, text: str) -> None:
        """Put a warning into the report."""

    def stop(self) -> None:
        """End the run in good order."""


@dataclass(frozen=True, slots=True)
class Record:
    """One reading, or one decision: then it has an ``event`` and a ``text`` of what was done and why.

    ``t_s`` are seconds since the guard began, modelled ones where memory is modelled. ``free`` of ``total`` bytes are
    those of ``source``, the count that decided (None where there is none); ``level`` is the mark that memory is held to
    be below. ``pinned`` bytes are page-locked now, ``pinned_total`` were in all. ``cold_use`` is the share of the cold
    tier that is in use, None of an empty one; ``depth`` how many batches may be in flight.
    """

    t_s: float
    level: Level
    free: int | None
    total: int | None
    source: str | None
    pinned: int
    pinned_total: int
    cold_use: float | None
    depth: int
    event: str | None = None
    text: str | None = None

    def line(self) -> str:
        """A decision in one line with its numbers."""
        reading = None if self.free is None else Reading(self.source or "", self.free, self.total)
        cold = "" if self.cold_use is None else f", cold tier {self.cold_use:.0%} in use"
        pinned = f"page-locked {format_bytes(self.pinned)} now, {format_bytes(self.pinned_total)} in all"
        return f"guard: {self.event}: {self.text}; {_free(reading)}, {pinned}{cold}, depth {self.depth}"


class Guard:
    """Watches memory as `GuardOptions` say. `run` is the body of its thread, or `tick` is called as time passes.

    ``open_memory`` makes what is read, in the thread that reads; ``callback`` gets every decision's `Record` in it, and
    what it raises ends the run. ``clock`` gives seconds that never go back, ``wait`` sleeps for as many as it is given
    and returns True once the guard has been told to stop; both are for tests.
    """

    def __init__(
        self,
        options: GuardOptions,
        open_memory: Callable[[], Memory],
        controls: Controls,
        *,
        callback: Callable[[Record], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.options = options
        self._open_memory = open_memory
        self._controls = controls
        self._callback = callback
        self._clock = clock
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._policy = Policy(options, controls.depth)
        self._growth = Growth(options.cold, options.low) if options.cold is not None else None
        self._memory: Memory | None = None
        self._missing: dict[str, str] = {}
        self._file: TextIO | None = None
        self._began_s: float | None = None
        self._due_s = 0.0
        self._last_s = 0.0
        self._unread: deque[str] = deque(maxlen=options.keep)
        self._events: deque[Record] = deque(maxlen=options.keep)
        self._decisions = self._samples = self._unknown = 0
        self._reading_s = self._cpu_s = 0.0
        self._least: Record | None = None
        self._least_depth = controls.depth
        self._page_locking = True

    # -- its life -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the file of ``options.file``, replacing one. Raises OSError."""
        if self.options.file is not None:
            self.options.file.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.options.file.open("w", encoding="utf-8", newline="\n")

    def run(self) -> None:
        """The body of a thread: a reading now and then every ``interval_s``, until `stop`."""
        while True:
            self.tick()
            if self._wait(max(_LEAST_INTERVAL_S, self._due_s - self._clock())):
                return

    def tick(self) -> None:
        """Take a reading if one is due by the clock; one thread at a time."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = self._due_s = now_s
        if now_s < self._due_s or self._stop.is_set():
            return
        self.sample()
        self._due_s += self.options.interval_s
        if self._due_s <= self._clock():  # late: readings whose time has passed are left out, not taken in a rush
            self._due_s = self._clock() + self.options.interval_s

    def stop(self) -> None:
        """Tell `run` to return. Idempotent; does not wait."""
        self._stop.set()

    def close(self) -> None:
        """Close the sensors and the file, once nobody reads any more. Idempotent."""
        self._stop.set()
        memory, self._memory = self._memory, None
        file, self._file = self._file, None
        try:
            if memory is not None:
                memory.close()
        finally:
            if file is not None:
                file.close()

    # -- a reading ------------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Read, decide, carry out and note, now."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        if self._memory is None:
            self._memory = self._open_memory()
        readings = list(self._memory.read())
        self._missing = dict(self._memory.missing)
        self._last_s = now_s - self._began_s
        reading, decisions = self._policy.decide(now_s, readings)
        self._samples += 1
        self._unknown += reading is None
        record = self._note(reading)
        if reading is not None and (self._least is None or _share(record) < _share(self._least)):
            self._least = record
        for decision in decisions:
            self._tell(reading, decision.event, f"{decision.why}: {self._carry_out(reading, decision)}")
        if not decisions and self._policy.level == "ok":
            self._resize(now_s, reading, readings)
        self._reading_s += time.perf_counter() - wall_s
        self._cpu_s += time.thread_time() - cpu_s

    def _carry_out(self, reading: Reading | None, decision: Decision) -> str:
        controls = self._controls
        match decision.do:
            case "give_back":
                return f"{format_bytes(controls.give_back())} of cold memory given back"
            case "depth" | "raise_depth":
                controls.set_depth(self._policy.depth)
                self._least_depth = min(self._least_depth, self._policy.depth)
                return f"{self._policy.depth} of {self._policy.full_depth} batches in flight from now on"
            case "pageable":
                self._page_locking = False
                controls.stop_page_locking(f"the guard stopped page-locking: memory is {decision.why}")
                return "nothing more is page-locked in this run"
            case "warn":
                controls.warn(f"memory was {decision.event}: {_free(reading)}, {decision.why}")
                return "warned"
            case "stop":
                controls.stop()
                return "the run is ended"
        return "nothing is left to do" if decision.event in ("low", "critical") else "as before"

    def _resize(self, now_s: float, reading: Reading | None, readings: Sequence[Reading]) -> None:
        if self._growth is None:
            return
        resize = self._growth.decide(now_s, readings, *self._controls.cold())
        if resize is None:
            return
        if resize.nbytes > 0:
            made = self._controls.grow(resize.nbytes)
            self._tell(reading, "grow", f"{resize.why}: {format_bytes(made)} of cold memory made")
        else:
            freed = self._controls.give_back()
            self._tell(reading, "shrink", f"{resize.why}: {format_bytes(freed)} of cold memory given back")

    # -- what it tells --------------------------------------------------------------------------------------------

    def _note(self, reading: Reading | None, event: str | None = None, text: str | None = None) -> Record:
        pinned, pinned_total = self._controls.pinned()
        nbytes, in_use = self._controls.cold()
        record = Record(
            round(self._last_s, 4),
            self._policy.level,
            None if reading is None else reading.free,
            None if reading is None else reading.total,
            None if reading is None else reading.source,
            pinned,
            pinned_total,
            round(in_use / nbytes, 4) if nbytes else None,
            self._policy.depth,
            event,
            text,
        )
        if self._file is not None:
            self._write(self._file, record)
        return record

    def _write(self, file: TextIO, record: Record) -> None:
        try:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
        except OSError as error:  # a full disk is no reason to stop watching
            self._file = None
            self._controls.warn(f"guard: {self.options.file}: cannot be written any more: {error.strerror}")
            try:
                file.close()
            except OSError:
                return

    def _tell(self, reading: Reading | None, event: str, text: str) -> None:
        record = self._note(reading, event, text)
        self._decisions += 1
        self._events.append(record)
        line = record.line()
        self._unread.append(line)
        _log.log(logging.WARNING if event in ("low", "critical") else logging.INFO, "%s", line)
        if self._callback is not None:
            self._callback(record)

    def news(self) -> Iterator[str]:
        """The lines of decisions since the last call, for whoever shows them; one thread at a time."""
        while self._unread:
            yield self._unread.popleft()

    def report(self) -> dict[str, Any]:
        """``guard`` of the report: options, what was least, what was decided, and what watching cost."""
        options, least = self.options, self._least
        return {
            "low": str(options.low),
            "critical": str(options.critical_mark),
            "interval_s": options.interval_s,
            "samples": self._samples,
            "samples_unknown": self._unknown,
            "missing": self._missing,
            "least": {key: getattr(least, key) for key in ("t_s", "free", "total", "source")} if least else None,
            "level": self._policy.level,
            "episodes": self._policy.episodes,
            "decisions": self._decisions,
            "depth_least": self._least_depth,
            "page_locking": self._page_locking,
            "events": [asdict(record) for record in list(self._events)],
            "cost": {
                "reading_s": round(self._reading_s, 6),
                "cpu_s": round(self._cpu_s, 6),
                "elapsed_s": round(self._last_s, 4),
            },
        }


def _free(reading: Reading | None) -> str:
    if reading is None:
        return "free memory unknown"
    of = f" of {format_bytes(reading.total)}" if reading.total is not None else ""
    return f"{format_bytes(reading.free)}{of} free ({reading.source})"


def _share(record: Record) -> float:
    if record.free is None:
        return 1.0
    return record.free / record.total if record.total else float(record.free)
