"""A thread that reads sensors all along and keeps what it saw."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from framepipe.telemetry.base import Missing, Sensor, describe
from framepipe.telemetry.timeline import Timeline

MIN_HZ, MAX_HZ = 1, 50


class Sampler:
    """Reads sensors ``hz`` times a second in a thread of its own, and counts what that costs.

    Memory is bounded by ``capacity`` rows, an even number: when they are full, every second one is dropped and the rate
    is halved. A sensor that raises is ended with a reason, the others go on. Nothing waits for the sampler but `join`;
    its price to others is the time that reading takes with the GIL held, which is part of ``cost``. The sensors stay
    the caller's, who closes them after `join`. Single use; as a context manager it starts and joins.

    ``clock`` gives seconds that never go back, ``wait`` sleeps for as many as it is given and returns True once the
    sampler has been told to stop; both are for tests.
    """

    def __init__(
        self,
        sensors: Iterable[Sensor],
        hz: float = 10,
        *,
        capacity: int = 4096,
        clock: Callable[[], float] = time.perf_counter,  # time.monotonic has steps of 16 ms on Windows before 3.13
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        if not MIN_HZ <= hz <= MAX_HZ:
            raise ValueError(f"a sampler reads {MIN_HZ} to {MAX_HZ} times a second, not {hz:g}")
        self._stop = threading.Event()
        self._recorder = _Recorder(list(sensors), hz, capacity, clock, wait or self._stop.wait)
        # The thread holds the recorder and never this object, so that a forgotten sampler is collected and ends it.
        self._thread = threading.Thread(target=self._recorder.run, name="framepipe-telemetry", daemon=True)
        self._started = False
        weakref.finalize(self, self._stop.set)

    @property
    def started_s(self) -> float | None:
        """The clock at the start, from which ``t_s`` counts; None before."""
        return self._recorder.started_s

    def start(self) -> None:
        """Take the first row here and the others in the thread; RuntimeError if it was started before."""
        if self._started:
            raise RuntimeError("a sampler starts once")
        self._started = True
        self._recorder.begin()
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to take a last row and end. Idempotent; does not wait."""
        self._stop.set()

    def join(self, timeout_s: float = 5.0) -> bool:
        """Wait until the thread has ended; False if it has not within ``timeout_s``, since a driver may hang."""
        if self._started:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def sample(self) -> None:
        """Take a row now, in the calling thread, besides those of the thread."""
        self._recorder.sample()

    def mark(self, label: str) -> None:
        """Remember that something of this name happened now; it costs nothing and waits for nobody."""
        self._recorder.mark(label)

    def timeline(self) -> dict[str, Any]:
        """What was seen so far, as plain JSON values; any thread, at any time.

        ``t_s`` are seconds since the start and ``columns`` bytes by ``sensor.reading``, null where there was no number;
        ``extremes`` are least and most, of rows dropped since as well; ``sources`` says what each column was read from
        and ``missing`` why a sensor or a column has nulls. ``marks`` are pairs of seconds and label. ``cost`` counts
        ``rows`` read, times that were ``late`` and left out, and the seconds spent ``reading_s``, of ``elapsed_s`` and
        by each of ``sensors``, waiting for the GIL included; ``cpu_s`` are those of the processor. ``hz`` is what was
        asked for and ``hz_now`` what it came to.
        """
        return self._recorder.as_json()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join()


class _Recorder:
    """What the thread works on: sensors, rows and the account of time."""

    def __init__(
        self,
        sensors: list[Sensor],
        hz: float,
        capacity: int,
        clock: Callable[[], float],
        wait: Callable[[float], bool],
    ) -> None:
        names = [sensor.name for sensor in sensors]
        if len(set(names)) < len(names):
            raise ValueError(f"two sensors have one name: {', '.join(names)}")
        self._hz = hz
        self._clock, self._wait = clock, wait
        self._sources = {f"{s.name}.{key}": f"{s.source}: {what}" for s in sensors for key, what in s.readings.items()}
        self._rows = Timeline(self._sources, capacity)
        self._marks: list[tuple[float, str]] = []
        self.started_s: float | None = None
        # One row at a time, whoever takes it; guards all below. `as_json` copies without it, so as not to wait.
        self._lock = threading.Lock()
        self._alive = [sensor for sensor in sensors if not isinstance(sensor, Missing)]
        self._missing = {sensor.name: sensor.reason for sensor in sensors if isinstance(sensor, Missing)}
        self._spent_s = {sensor.name: 0.0 for sensor in self._alive}
        self._period_s = 1 / hz
        self._taken = self._late = 0
        self._last_s = self._cpu_s = 0.0

    def begin(self) -> None:
        self.started_s = self._clock()
        self.sample()

    def run(self) -> None:
        """The thread: rows at even distances until it is told to stop, and one then."""
        due_s = (self.started_s or 0.0) + self._period_s
        while not self._wait(max(0.0, due_s - self._clock())):
            self.sample()
            due_s += self._period_s
            behind_s = self._clock() - due_s
            if behind_s > 0:  # rows whose time has passed are left out: taking them in a rush would help nobody
                missed = int(behind_s / self._period_s) + 1
                self._late += missed
                due_s += missed * self._period_s
        self.sample()

    def sample(self) -> None:
        with self._lock:
            began_s, cpu_s = self._clock(), time.thread_time()
            row: dict[str, int | None] = {}
            for sensor in list(self._alive):
                row.update(self._read(sensor))
            self._cpu_s += time.thread_time() - cpu_s
            self._taken += 1
            self._last_s = self._since_start(self._clock())
            if self._rows.add(self._since_start(began_s), row):
                self._period_s *= 2

    def _read(self, sensor: Sensor) -> dict[str, int | None]:
        began_s = self._clock()
        try:
            found = sensor.read()
            self._missing.update({f"{sensor.name}.{key}": why for key, why in sensor.reasons.items()})
            return {f"{sensor.name}.{key}": nbytes for key, nbytes in found.items()}
        except Exception as error:
            self._alive.remove(sensor)
            self._missing[sensor.name] = f"ended: {describe(error)}"
            return {}
        finally:
            self._spent_s[sensor.name] += self._clock() - began_s

    def mark(self, label: str) -> None:
        self._marks.append((self._since_start(self._clock()), label))

    def _since_start(self, time_s: float) -> float:
        return time_s - (time_s if self.started_s is None else self.started_s)

    def as_json(self) -> dict[str, Any]:
        spent_s = dict(self._spent_s)
        return {
            **self._rows.as_json(),
            "sources": dict(self._sources),
            "missing": dict(self._missing),
            "marks": [[round(time_s, 6), label] for time_s, label in list(self._marks)],
            "cost": {
                "hz": self._hz,
                "hz_now": 1 / self._period_s,
                "rows": self._taken,
                "late": self._late,
                "reading_s": round(sum(spent_s.values()), 6),
                "cpu_s": round(self._cpu_s, 6),
                "elapsed_s": round(self._last_s, 6),
                "sensors": {name: round(seconds, 6) for name, seconds in spent_s.items()},
            },
        }
