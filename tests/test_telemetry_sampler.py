"""The timeline and the thread that fills it; time is the test's."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from itertools import pairwise

import pytest
from conftest import ours

from framepipe.telemetry.base import Missing, Sensor
from framepipe.telemetry.sampler import Sampler
from framepipe.telemetry.timeline import Timeline


class Clock:
    """Time that passes only while somebody waits or reads; ``ticks`` waits end by themselves, the next says stop."""

    def __init__(self, ticks: int = 0) -> None:
        self.now = 100.0
        self.ticks = ticks
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        self.ticks -= 1
        return self.ticks < 0


class Counting(Sensor):
    """Reads 1000, 1001, …; ``cost_s`` of the clock each, and None with a reason at the places in ``gaps``."""

    source = "a count"
    readings = {"used": "count"}  # noqa: RUF012

    def __init__(self, name: str, clock: Clock, cost_s: float = 0.0, gaps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.name = name
        self.clock, self.cost_s, self.gaps = clock, cost_s, gaps
        self.count = 0

    def _read(self) -> dict[str, int | str]:
        self.clock.now += self.cost_s
        self.count += 1
        return {"used": "a gap" if self.count in self.gaps else 999 + self.count}


class Breaking(Counting):
    """Breaks the contract at its third reading, and would go on after that."""

    breaks = 0

    def read(self) -> dict[str, int | None]:
        if self.count == 2 and not self.breaks:
            self.breaks += 1
            raise OSError("the driver is gone")
        return super().read()


def run(sampler: Sampler) -> dict:
    """The sampler's whole life, and its timeline, which is plain JSON."""
    with sampler:
        assert sampler.join(30)
    timeline = sampler.timeline()
    assert json.loads(json.dumps(timeline, allow_nan=False)) == timeline
    assert not ours()
    return timeline


def test_rows_are_taken_at_even_distances_and_the_last_when_told_to_stop():
    clock = Clock(ticks=3)
    timeline = run(Sampler([Counting("a", clock)], 10, clock=clock, wait=clock.wait))
    assert timeline["t_s"] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert timeline["columns"] == {"a.used": [1000, 1001, 1002, 1003, 1004]}
    assert timeline["extremes"] == {"a.used": {"least": 1000, "most": 1004}}
    assert timeline["sources"] == {"a.used": "a count: count"}
    assert timeline["missing"] == {}
    assert clock.waits == pytest.approx([0.1] * 4)


def test_what_reading_costs_is_counted_and_taken_off_the_wait():
    clock = Clock(ticks=2)
    sensors = [Counting("a", clock, 0.01), Counting("b", clock, 0.03)]
    timeline = run(Sampler(sensors, 10, clock=clock, wait=clock.wait))
    assert timeline["t_s"] == [0.0, 0.1, 0.2, 0.3]
    assert clock.waits == pytest.approx([0.06] * 3)
    cost = timeline["cost"]
    assert cost["sensors"] == {"a": pytest.approx(0.04), "b": pytest.approx(0.12)}
    assert cost["reading_s"] == pytest.approx(0.16)
    assert cost["elapsed_s"] == pytest.approx(0.34)
    assert cost["cpu_s"] >= 0
    assert (cost["rows"], cost["late"], cost["hz"], cost["hz_now"]) == (4, 0, 10, 10)


def test_a_sensor_slower_than_the_rate_makes_rows_late_and_no_rush():
    clock = Clock(ticks=2)
    timeline = run(Sampler([Counting("a", clock, 0.26)], 10, clock=clock, wait=clock.wait))
    # The row of 0.1 is taken at 0.26 and ends at 0.52: those of 0.2 to 0.5 are left out, and later 0.7 and 0.8.
    assert timeline["t_s"] == [0.0, 0.26, 0.6, 0.9]
    assert timeline["cost"]["late"] == 6
    assert clock.waits == pytest.approx([0.0, 0.08, 0.04])


def test_when_full_every_second_row_goes_and_the_rate_is_halved():
    clock = Clock(ticks=40)
    sampler = Sampler([Counting("a", clock, gaps=(1,))], 10, capacity=8, clock=clock, wait=clock.wait)
    timeline = run(sampler)
    times = timeline["t_s"]
    assert len(times) <= 8
    assert timeline["cost"]["rows"] == 42
    distance = 1 / timeline["cost"]["hz_now"]
    assert distance > 0.1
    assert [b - a for a, b in pairwise(times)] == pytest.approx([distance] * (len(times) - 1))
    assert times[0] == 0.0
    assert len(timeline["columns"]["a.used"]) == len(times)
    assert timeline["extremes"]["a.used"]["most"] == 1041  # though its row may have gone


def test_a_sensor_that_breaks_ends_with_a_reason_and_nothing_else_does():
    clock = Clock(ticks=4)
    sensors = [Breaking("bad", clock), Counting("good", clock), Missing("nvml", "it is not installed")]
    timeline = run(Sampler(sensors, 10, clock=clock, wait=clock.wait))
    assert timeline["columns"]["bad.used"] == [1000, 1001, None, None, None, None]
    assert timeline["columns"]["good.used"] == list(range(1000, 1006))
    assert timeline["missing"] == {"bad": "ended: OSError: the driver is gone", "nvml": "it is not installed"}
    assert (sensors[0].count, sensors[0].breaks) == (2, 1)
    assert set(timeline["columns"]) == {"bad.used", "good.used"}


def test_a_gap_has_its_reason_and_the_column_goes_on():
    clock = Clock(ticks=1)
    timeline = run(Sampler([Counting("a", clock, gaps=(2,))], 10, clock=clock, wait=clock.wait))
    assert timeline["columns"]["a.used"] == [1000, None, 1002]
    assert timeline["missing"] == {"a.used": "a gap"}


def test_marks_and_rows_of_the_caller():
    clock = Clock()
    sampler = Sampler([Counting("a", clock)], 10, clock=clock, wait=clock.wait)
    assert sampler.started_s is None
    with sampler:
        assert sampler.join(30)
    assert sampler.started_s == 100.0
    clock.now = 107.5
    sampler.mark("closed")
    sampler.sample()
    timeline = sampler.timeline()
    assert timeline["marks"] == [[7.5, "closed"]]
    assert timeline["t_s"] == [0.0, 0.1, 7.5]


def test_the_real_clock_and_thread(nothing_left):
    """Nothing is expected of the time: one row at the start, one at the end."""
    thread_names = []

    class Here(Counting):
        def _read(self) -> dict[str, int | str]:
            thread_names.append(threading.current_thread().name)
            return super()._read()

    clock = Clock()
    with Sampler([Here("a", clock)], 50) as sampler:
        pass
    timeline = sampler.timeline()
    assert len(timeline["t_s"]) >= 2
    assert timeline["t_s"] == sorted(timeline["t_s"])
    assert thread_names[0] == threading.current_thread().name
    assert set(thread_names[1:]) == {"framepipe-telemetry"}


def test_stopping_is_a_word_that_does_not_wait_and_may_be_said_twice(nothing_left):
    hold, entered = threading.Event(), threading.Event()

    class Hanging(Counting):
        def _read(self) -> dict[str, int | str]:
            if self.count:  # the first reading is the caller's
                entered.set()
                hold.wait(30)
            return super()._read()

    sampler = Sampler([Hanging("a", Clock())], 50)
    sampler.start()
    assert entered.wait(30)
    sampler.stop()
    sampler.stop()
    sampler.mark("still served")
    assert len(sampler.timeline()["t_s"]) == 1
    assert not sampler.join(0)
    hold.set()
    assert sampler.join(30)


def test_a_sampler_lives_once():
    sampler = Sampler([], 1)
    assert sampler.join(0)
    with sampler:
        with pytest.raises(RuntimeError, match="starts once"):
            sampler.start()
    assert sampler.timeline()["columns"] == {}


def test_a_forgotten_sampler_ends(nothing_left):
    sampler = Sampler([Counting("a", Clock())], 50)
    sampler.start()
    thread = sampler._thread
    gone = weakref.ref(sampler)
    del sampler
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("hz", [0, 0.9, 51, -1, float("nan")])
def test_the_rate_has_bounds(hz):
    with pytest.raises(ValueError, match="1 to 50 times a second"):
        Sampler([], hz)


def test_two_sensors_of_one_name_would_share_a_column():
    with pytest.raises(ValueError, match="two sensors have one name: a, a"):
        Sampler([Counting("a", Clock()), Counting("a", Clock())])


# -- the timeline alone --


def test_a_timeline_keeps_even_rows():
    rows = Timeline(["x"], 4)
    assert [rows.add(float(i), {"x": 10 - i}) for i in range(6)] == [False, False, False, False, True, False]
    assert rows.as_json() == {
        "t_s": [0.0, 2.0, 4.0, 5.0],
        "columns": {"x": [10, 8, 6, 5]},
        "extremes": {"x": {"least": 5, "most": 10}},
    }
    assert len(rows) == 4
    assert rows.add(6.0, {"x": 99})
    assert rows.as_json()["columns"]["x"] == [10, 6, 99]


def test_a_column_without_numbers_has_no_extremes():
    rows = Timeline(["x", "y"], 10)
    rows.add(0.0, {"x": 3})
    assert rows.as_json()["extremes"] == {"x": {"least": 3, "most": 3}, "y": None}
    assert rows.as_json()["columns"]["y"] == [None]


@pytest.mark.parametrize("capacity", [-2, 0, 1, 7])
def test_a_timeline_needs_room(capacity):
    with pytest.raises(ValueError, match="2 or more"):
        Timeline([], capacity)
