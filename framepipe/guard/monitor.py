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
_LEAST_WAIT_S = 1e-3
_MOST_WAIT_S = 3600.0
"""Systems have a limit to how long a thread may wait in one go; Windows' is 49 days."""


class Controls(Protocol):
    """What a guard may do to a run, and what it asks of it. Any thread.

    Nothing of it waits for the run, but memory that is given back is waited for, and may halt the device for a moment.
    """

    depth: int
    """How many batches may be in flight in a run that nobody guards."""

    def pinned(self) -> tuple[int, int]:
        """Bytes page-locked now, and in all since the start."""

    def cold(self) -> tuple[int, int]:
        """Bytes of the cold tier, and how many of them somebody holds."""

    def give_back(self) -> int:
        """Give what nobody uses of the cold tier back to the system; how many bytes."""

    def give_back_device(self) -> int:
        """Give what the device keeps for results to come back to the system; how many bytes."""

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
    what it raises is raised there. ``clock`` gives seconds that never go back, ``wait`` sleeps for as many as it is
    given and returns True once the guard has been told to stop; both are for tests.
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
        self._first_s: float | None = None  # this and the next by the machine's clock, as is what it costs
        self._ended_s: float | None = None
        self._least: tuple[float, Record] | None = None
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
            if self._wait(min(max(_LEAST_WAIT_S, self._due_s - self._clock()), _MOST_WAIT_S)):
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
        self._ended_s = time.perf_counter() if self._ended_s is None else self._ended_s
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
        self._first_s = wall_s if self._first_s is None else self._first_s
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
        if reading is not None:
            self._keep_least(reading, record)
        for decision in decisions:
            self._tell(reading, decision.event, f"{decision.why}: {self._carry_out(reading, decision)}")
        self._resize(now_s, reading, readings, calm=not decisions and self._policy.level == "ok")
        self._reading_s += time.perf_counter() - wall_s
        self._cpu_s += time.thread_time() - cpu_s

    def _keep_least(self, reading: Reading, record: Record) -> None:
        mark = self.options.low.of(reading.total)
        if mark:  # nearest to its own mark: counts have different totals
            near = reading.free / mark
            if self._least is None or near < self._least[0]:
                self._least = near, record

    def _carry_out(self, reading: Reading | None, decision: Decision) -> str:
        controls = self._controls
        match decision.do:
            case "give_back":
                cold, device = controls.give_back(), controls.give_back_device()
                beside = f" and {format_bytes(device)} of results" if device else ""
                return f"{format_bytes(cold)} of cold memory{beside} given back"
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
        return "nothing is left to do" if decision.event in ("low", "critical") else "the episode is over"

    def _resize(self, now_s: float, reading: Reading | None, readings: Sequence[Reading], *, calm: bool) -> None:
        if self._growth is None:
            return
        if not calm:
            self._growth.restart()
            return
        resize = self._growth.decide(now_s, readings, *self._controls.cold())
        if resize is None:
            return
        # Blocks are whole and some are reserved, so that nothing may come of it: over and over, and not worth a line.
        if resize.nbytes > 0:
            if made := self._controls.grow(resize.nbytes):
                self._tell(reading, "grow", f"{resize.why}: {format_bytes(made)} of cold memory made")
        elif freed := self._controls.give_back():
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
        """``guard`` of the report: options, what was least, what was decided, and what watching cost.

        ``cost`` is measured, callbacks and what was done included, even where all the other times are modelled.
        """
        options, least = self.options, self._least[1] if self._least else None
        return {
            "file": str(options.file) if options.file is not None else None,
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
                "elapsed_s": round(self._elapsed_s(), 4),
            },
        }

    def _elapsed_s(self) -> float:
        ended_s = time.perf_counter() if self._ended_s is None else self._ended_s
        return 0.0 if self._first_s is None else ended_s - self._first_s


def _free(reading: Reading | None) -> str:
    if reading is None:
        return "free memory unknown"
    of = f" of {format_bytes(reading.total)}" if reading.total is not None else ""
    return f"{format_bytes(reading.free)}{of} free ({reading.source})"
