"""The guard's logic: marks, readings, what is decided at them and how often, growth, waiting. No thread, no clock."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from framepipe.errors import ConfigError
from framepipe.guard.growth import Growth
from framepipe.guard.monitor import Guard, Record
from framepipe.guard.options import ACTIONS, ColdOptions, GuardOptions, Mark, make_guard, parse_mark
from framepipe.guard.policy import Policy, scarcest
from framepipe.guard.readings import DeviceMemory, Reading, SystemMemory
from framepipe.guard.waiting import Clock, Patience, settle, wait_for_headroom
from framepipe.telemetry.base import Missing, Sensor
from framepipe.telemetry.cgroup import CgroupMemory

GB = 10**9


# -- marks and options --


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("15%", Mark(percent=15)),
        (" 2.5 % ", Mark(percent=2.5)),
        ("1GB", Mark(nbytes=GB)),
        ("512MiB", Mark(nbytes=512 << 20)),
        (2 * GB, Mark(nbytes=2 * GB)),
    ],
)
def test_a_mark_is_a_share_or_a_size(text, mark):
    assert parse_mark(text) == mark
    assert parse_mark(mark) is mark


@pytest.mark.parametrize("text", ["0%", "100%", "120%", "-5%", "much", "", "15", 15, 15.0, True, "15 GBs"])
def test_what_is_no_mark_is_refused(text):
    with pytest.raises(ValueError, match="share"):
        parse_mark(text)


def test_a_mark_in_bytes():
    assert Mark(percent=15).of(12 * GB) == 1_800_000_000
    assert Mark(percent=15).of(None) is None
    assert Mark(nbytes=GB).of(None) == GB
    assert (str(Mark(percent=15)), str(Mark(nbytes=GB))) == ("15%", "1.0 GB")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"low": "5%", "critical": "15%"}, "critical is 15%; it must be less than low, 5%"),
        ({"low": "1GB", "critical": "1GB"}, "critical is 1.0 GB"),
        ({"low": "much"}, "guard.low: expected a share"),
        ({"interval_s": 0}, "interval_s is 0; it must be at least 0.05"),
        ({"cooldown_s": 0.5}, "cooldown_s is 0.5; it must be at least 1"),
        ({"hysteresis_percent": -1}, "hysteresis_percent is -1"),
        ({"on_low": ["give_bak"]}, "did you mean 'give_back'"),
        ({"on_critical": ["warn", "warn"]}, "on_critical names an action twice"),
        ({"on_lo": []}, "guard has no 'on_lo'; did you mean 'on_low'"),
        ({"cold": {"step_percent": 80}}, "50 at most"),
        ({"cold": {"busy": 1}}, "guard.cold has no 'busy'"),
        ({"cold": {"cap": "lots"}}, "guard.cold.cap: expected a number of bytes"),
        ({"cold": {"idle_percent": 95}}, "the first must be less"),
        ({"interval_s": float("nan")}, "interval_s is nan; expected a number"),
        ({"interval_s": "1"}, "interval_s is '1'; expected a number"),
        ({"calm_samples": 2.5}, "calm_samples is 2.5; expected a whole number"),
        ({"cold": {"busy_samples": True}}, "busy_samples is True; expected a whole number"),
        ({"cold": {"cooldown_s": float("inf")}}, "cooldown_s is inf; expected a number"),
        ({"cold": 3}, "guard.cold is 3; expected True"),
        ({"on_low": "warn"}, "on_low is 'warn'; expected a list of give_back, "),
        ({"on_critical": None}, "on_critical is None; expected a list"),
        ({"file": 3}, "guard.file is 3; expected a path"),
        ({"low": None}, "guard.low: expected a share"),
        ("yes", "guard is 'yes'; expected True, False, a mapping or GuardOptions"),
    ],
)
def test_options_that_make_no_sense_are_refused(given, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make_guard(given)


def test_options_as_they_may_be_given():
    assert make_guard(None) is None
    assert make_guard(False) is None
    assert make_guard(True) == GuardOptions()
    made = make_guard({"low": "1GB", "critical": "5%", "on_low": ["stop"], "cold": {"cap": "64MB"}, "file": "g.jsonl"})
    assert made == GuardOptions(
        low=Mark(nbytes=GB),
        critical=Mark(percent=5),
        on_low=("stop",),
        cold=ColdOptions(cap=64_000_000),
        file=Path("g.jsonl"),
    )
    assert make_guard(made) is made
    assert make_guard({"cold": True}).cold == ColdOptions()
    assert (GuardOptions().low, GuardOptions().critical_mark) == (Mark(percent=15), Mark(percent=5))
    assert make_guard({"low": "3GB"}).critical_mark == Mark(nbytes=GB)
    assert make_guard({"critical": None, "cold": None, "file": None}) == GuardOptions()
    for marks in ({"low": "15%"}, {"low": None}, {"critical": 0.05}):
        with pytest.raises(ConfigError, match="expected a Mark"):
            GuardOptions(**marks)


# -- readings --


class Fixed(Sensor):
    """A sensor that says what it is told."""

    def __init__(self, name, source, **numbers):
        super().__init__()
        self.name, self.source, self.numbers = name, source, numbers
        self.readings = dict.fromkeys(numbers, "a number")

    def _read(self):
        return self.numbers


def read(*sensors):
    memory = SystemMemory(sensors=sensors)
    return memory.read(), memory


def test_every_count_is_a_reading_of_its_own():
    found, memory = read(
        Fixed("cuda", "cudaMemGetInfo", free=3 * GB, total=12 * GB),
        Fixed("nvml", "NVML", free=2 * GB, total=12 * GB, used=9 * GB),
        Fixed("wddm", "D3DKMT", local_budget=11 * GB, local_usage=10 * GB, non_local_budget=16 * GB,
              non_local_usage=4 * GB),
        Fixed("cgroup", "/sys/fs/cgroup", limit=8 * GB, current=2 * GB),
    )  # fmt: skip
    assert found == [
        Reading("cudaMemGetInfo free", 3 * GB, 12 * GB),
        Reading("NVML free", 2 * GB, 12 * GB),
        Reading("D3DKMT local budget", 1 * GB, 11 * GB),
        Reading("D3DKMT non-local budget", 12 * GB, 16 * GB),
        Reading("limit of the control group /sys/fs/cgroup", 6 * GB, 8 * GB),
    ]
    assert memory.missing == {}
    memory.close()
    memory.close()
    assert memory.read() == []
    assert set(memory.missing.values()) == {"the sensor is closed"}


def test_more_used_than_a_budget_allows_leaves_nothing():
    found, _ = read(Fixed("wddm", "W", local_budget=GB, local_usage=2 * GB, non_local_budget=None, non_local_usage=0))
    assert found == [Reading("W local budget", 0, GB)]


@pytest.mark.parametrize("numbers", [{"free": 13, "total": 12}, {"free": -1, "total": 12}, {"free": 0, "total": 0}])
def test_numbers_that_make_no_sense_are_missing_and_not_believed(numbers):
    found, memory = read(Fixed("cuda", "C", **numbers), Missing("nvml", "pynvml is not installed"))
    assert found == []
    assert memory.missing == {"cuda": "its numbers make no sense", "nvml": "pynvml is not installed"}


def test_pages_of_files_do_not_count_against_a_container(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text("900\n", encoding="utf-8")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 300\nactive_file 100\n", encoding="utf-8")
    proc = tmp_path / "cgroup"
    proc.write_text("0::/\n", encoding="utf-8")
    sensor = CgroupMemory(proc=proc, root=tmp_path)
    found, _ = read(sensor)
    assert [(reading.free, reading.total) for reading in found] == [(500, 1000)]
    (tmp_path / "memory.stat").unlink()
    assert [reading.free for reading in SystemMemory(sensors=[sensor]).read()] == [100]


def test_version_1_counts_the_groups_below_too(tmp_path):
    for name, text in (("memory.limit_in_bytes", "1000"), ("memory.usage_in_bytes", "900")):
        (tmp_path / "memory").mkdir(exist_ok=True)
        (tmp_path / "memory" / name).write_text(text, encoding="utf-8")
    stat = "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n"
    (tmp_path / "memory" / "memory.stat").write_text(stat, encoding="utf-8")
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/\n", encoding="utf-8")
    assert CgroupMemory(proc=proc, root=tmp_path).page_cache() == 70


def test_the_machine_itself_has_some_ram():
    memory = SystemMemory()
    found = {reading.source: reading for reading in memory.read()}
    memory.close()
    assert 0 < found["RAM available"].free < found["RAM available"].total
    assert memory.missing["cuda"] == "no CUDA device was named"


class Told:
    """A device whose counters say what they are told."""

    def __init__(self, *rows):
        self.rows = list(rows)

    def vram(self):
        if self.rows and isinstance(self.rows[0], Exception):
            raise self.rows[0]
        return self.rows


def test_a_device_tells_free_memory_and_budgets():
    memory = DeviceMemory(
        Told({"source": "model m", "free": 5, "total": 10, "local_usage": 5, "local_budget": 10,
              "non_local_usage": 7, "non_local_budget": 6})
    )  # fmt: skip
    assert memory.read() == [
        Reading("model m", 5, 10),
        Reading("model m local budget", 5, 10),
        Reading("model m non-local budget", 0, 6),
    ]
    assert memory.missing == {}
    nothing = DeviceMemory(Told())
    assert (nothing.read(), nothing.missing) == ([], {"device": "it counts no memory of its own"})
    broken = DeviceMemory(Told(RuntimeError("driver is gone")))
    assert (broken.read(), broken.missing) == ([], {"device": "RuntimeError: driver is gone"})
    broken = DeviceMemory(Told({"free": 5}))
    assert (broken.read(), broken.missing) == ([], {"device": "KeyError: 'source'"})
    odd = DeviceMemory(Told({"source": "s", "free": 5, "total": 4}))
    assert (odd.read(), odd.missing) == ([], {"device": "its numbers make no sense"})


def test_ram_that_cannot_be_read_is_missing(monkeypatch):
    def broken():
        raise OSError("no /proc/meminfo")

    monkeypatch.setattr("psutil.virtual_memory", broken)
    memory = SystemMemory()
    memory.read()
    memory.close()
    assert memory.missing["ram"] == "OSError: no /proc/meminfo"


def test_the_count_nearest_to_its_own_mark_decides():
    container, gpu = Reading("container", 2 * GB, 4 * GB), Reading("GPU", 10 * GB, 140 * GB)
    assert scarcest([container, gpu], Mark(percent=15)) is gpu  # 7 % against 50 %
    assert scarcest([container, gpu], Mark(nbytes=GB)) is container
    assert scarcest([Reading("unknown", 1)], Mark(percent=15)) is None
    assert scarcest([], Mark(nbytes=GB)) is None


# -- the policy --

OPTIONS = GuardOptions(on_low=("give_back", "warn"), on_critical=("depth", "pageable", "stop"), cooldown_s=10)


def gpu(free, total=100):
    return [Reading("GPU", free, total)]


def did(policy, *steps):
    """What is decided at (time, free) of each step, as (event, action)."""
    return [[(each.event, each.do) for each in policy.decide(t_s, gpu(free))[1]] for t_s, free in steps]


LOW = [("low", "give_back"), ("low", "warn")]
CRITICAL = [("critical", "depth"), ("critical", "pageable"), ("critical", "stop")]
BACK = [("recovered", None)]


def test_each_action_once_an_episode():
    policy = Policy(OPTIONS, depth=3)
    assert did(policy, (0, 50), (1, 14), (2, 13), (3, 4), (4, 1), (5, 0)) == [[], LOW, [], CRITICAL, [], []]
    assert (policy.level, policy.depth, policy.episodes) == ("critical", 2, 1)


def test_one_reading_may_pass_both_marks():
    assert did(Policy(OPTIONS, depth=2), (0, 1)) == [LOW + CRITICAL]


def test_noise_about_the_mark_is_one_episode():
    policy = Policy(OPTIONS, depth=2)
    steps = [(t_s, 14.9 if t_s % 2 else 15.1) for t_s in range(200)]
    assert sum(len(decided) for decided in did(policy, *steps)) == len(LOW)
    # The band above the mark is 20 % of it, in three readings on end.
    assert did(policy, (200, 18), (201, 17), (202, 18), (203, 18), (204, 18)) == [[], [], [], [], BACK]


def test_the_same_mark_acts_again_only_after_a_pause_that_grows():
    policy = Policy(replace(OPTIONS, calm_samples=1), depth=2)
    begun = []
    for t_s in range(2000):
        low, recovered = (("low", "warn") in decided for decided in did(policy, (t_s, 10), (t_s, 90)))
        assert not recovered
        begun += [t_s] * low
    assert begun[:5] == [0, 10, 30, 70, 150]
    assert policy.decide(10_000, gpu(10))[1]  # long after, as at first


def test_a_pause_grows_to_an_hour():
    policy = Policy(replace(OPTIONS, calm_samples=1, cooldown_s=1000), depth=2)
    begun = [t_s for t_s in range(0, 50_000, 100) if did(policy, (t_s, 10), (t_s, 90))[0]]
    assert begun[:6] == [0, 1000, 3000, 6600, 10200, 13800]


def test_low_within_its_pause_does_not_keep_critical_from_acting():
    policy = Policy(replace(OPTIONS, calm_samples=1), depth=2)
    assert did(policy, (0, 10), (1, 90), (2, 10), (3, 1)) == [LOW, BACK, [], CRITICAL]
    # The episode goes on; what was not done in it yet is, once low's own pause is over.
    assert did(policy, (10, 1), (11, 1)) == [LOW, []]


def test_what_is_for_good_is_done_once():
    policy = Policy(replace(OPTIONS, calm_samples=1), depth=3)
    assert did(policy, (0, 1), (1, 90), (1000, 1)) == [LOW + CRITICAL, BACK, [*LOW, ("critical", "depth")]]


def test_depth_goes_down_by_one_an_episode_and_up_again_in_calm():
    policy = Policy(replace(OPTIONS, on_critical=("depth",), calm_samples=1), depth=3)
    assert did(policy, (0, 1)) == [[*LOW, ("critical", "depth")]]
    assert policy.depth == 2
    assert did(policy, (1, 90), (10, 90), (11, 90), (30, 90)) == [BACK, [], [("depth_back", "raise_depth")], []]
    assert policy.depth == 3


def test_depth_is_never_below_one():
    policy = Policy(replace(OPTIONS, on_critical=("depth",), calm_samples=1), depth=1)
    # An episode without anything to do shows in the records all the same.
    assert did(policy, (0, 1)) == [[*LOW, ("critical", None)]]
    assert policy.depth == 1


def test_depth_stays_low_while_memory_is():
    policy = Policy(replace(OPTIONS, on_critical=("depth",), calm_samples=1), depth=2)
    did(policy, (0, 1), (1, 90))
    assert did(policy, (12, 14)) == [[*LOW]]
    assert did(policy, (13, 14), (30, 14), (31, 90), (40, 90), (41, 90)) == [
        [], [], BACK, [], [("depth_back", "raise_depth")],
    ]  # fmt: skip


def test_calm_begins_anew_when_memory_is_low_within_the_pause():
    policy = Policy(replace(OPTIONS, on_critical=("depth",), calm_samples=1), depth=2)
    did(policy, (0, 1), (1, 90))
    assert did(policy, (5, 10), (11, 90), (14, 90)) == [[], [], []]
    _, decisions = policy.decide(15, gpu(90))
    assert [(each.event, each.why) for each in decisions] == [("depth_back", "above 15% for 10 s")]


def test_calm_is_above_both_marks_whichever_is_higher():
    mixed = replace(OPTIONS, low=Mark(percent=15), critical=Mark(nbytes=40), on_critical=("depth",), calm_samples=1)
    policy = Policy(mixed, depth=2)
    assert did(policy, (0, 30), (1, 90)) == [[("critical", "depth")], BACK]
    assert did(policy, (9, 30), (12, 90), (19, 90)) == [[], [], [("depth_back", "raise_depth")]]


def test_depth_is_not_raised_while_nothing_is_known():
    policy = Policy(replace(OPTIONS, on_critical=("depth",), calm_samples=1), depth=2)
    did(policy, (0, 1), (1, 90))
    assert policy.decide(20, [Reading("unknown", 5)]) == (None, [])
    assert did(policy, (21, 90)) == [[("depth_back", "raise_depth")]]


def test_depth_that_brings_memory_down_is_raised_ever_later():
    """What the guard does itself must not go round and round, however far apart the marks' own pauses let it be."""
    options = replace(OPTIONS, on_low=(), on_critical=("depth",), calm_samples=1, cooldown_s=10)
    policy = Policy(options, depth=2)
    raised, brim_s = [], 0.0
    for t_s in range(20_000):
        # The batch more that is in flight is missed half a minute later, longer than any pause is remembered.
        _, decisions = policy.decide(t_s, gpu(1 if policy.depth == 2 and t_s >= brim_s else 90))
        if any(each.event == "depth_back" for each in decisions):
            raised.append(t_s)
            brim_s = t_s + 30
    gaps = [later - earlier for earlier, later in itertools.pairwise(raised)]
    assert gaps[:5] == [51, 71, 111, 191, 351]
    assert len(raised) < 14


def test_without_a_reading_nothing_is_decided():
    policy = Policy(OPTIONS, depth=2)
    did(policy, (0, 10))
    assert policy.decide(1, []) == (None, [])
    assert policy.decide(2, [Reading("unknown", 5)]) == (None, [])
    assert did(policy, (3, 90), (4, 90), (5, 90)) == [[], [], BACK]  # three on end, those without a mark not counted


def test_a_mark_near_the_total_can_be_left():
    policy = Policy(replace(OPTIONS, low=Mark(percent=90), calm_samples=1), depth=2)
    assert did(policy, (0, 89), (1, 91), (2, 96)) == [LOW, [], BACK]


counts = st.lists(st.tuples(st.integers(0, 120), st.sampled_from([None, 100, 120])), max_size=3)
steps = st.lists(st.tuples(st.floats(0.05, 100), counts), max_size=150)
actions = st.lists(st.sampled_from(ACTIONS), unique=True).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    steps=steps,
    on_low=actions,
    on_critical=actions,
    depth=st.integers(1, 4),
    calm=st.integers(1, 3),
    in_bytes=st.booleans(),
)
@example(
    steps=[(0.05, [(free, 100)]) for free in (0, 100) * 75], on_low=("warn", "depth"), on_critical=("give_back",),
    depth=2, calm=1, in_bytes=False,
)  # fmt: skip
def test_decisions_are_bounded_under_any_readings(steps, on_low, on_critical, depth, calm, in_bytes):
    low = Mark(nbytes=15) if in_bytes else Mark(percent=15)
    options = GuardOptions(low=low, on_low=on_low, on_critical=on_critical, calm_samples=calm, cooldown_s=10)
    policy = Policy(options, depth)
    now_s, entered, in_episode, for_good, lowered, raised = 0.0, [], set(), set(), 0, 0
    decided = 0
    for pause_s, numbers in steps:
        now_s += pause_s
        readings = [Reading(f"count {i}", min(free, total or free), total) for i, (free, total) in enumerate(numbers)]
        before = policy.level
        _, decisions = policy.decide(now_s, readings)
        decided += len(decisions)
        if before == "ok" and policy.level != "ok":
            entered.append(now_s)
            in_episode = set()
        for decision in decisions:
            assert readings
            if decision.event in ("low", "critical"):
                assert decision.do not in in_episode - {None}
                in_episode.add(decision.do)
                assert decision.do not in for_good
                for_good |= {decision.do} & {"pageable", "stop"}
                lowered += decision.do == "depth"
            elif decision.event == "depth_back":
                assert policy.level == "ok"
                raised += 1
        assert policy.depth == depth - lowered + raised
        assert 1 <= policy.depth <= depth
    # Each of the two marks begins an episode at most once in its pause, and does what it names at most once then.
    each = 1 + now_s / options.cooldown_s
    assert len(entered) <= 2 * each
    assert decided <= each * (max(1, len(on_low)) + max(1, len(on_critical)) + 2) + raised


# -- growth of the cold tier --

COLD = ColdOptions(busy_samples=3, idle_samples=4, cooldown_s=10, cap=1000)


def test_growth_needs_a_used_up_pool_and_room():
    growth = Growth(COLD, Mark(percent=15))
    assert [growth.decide(t_s, gpu(900, 1000), 100, 95) for t_s in range(2)] == [None, None]
    grown = growth.decide(2, gpu(900, 1000), 100, 95)
    assert grown.nbytes == 50
    assert grown.why == "95% in use for 3 readings, 15% stays free"


@pytest.mark.parametrize(
    ("free", "nbytes", "in_use", "expected"),
    [
        (900, 100, 90, None),  # not above 90 %
        (200, 100, 95, 50),  # 150 of 1000 stay free: 15 %
        (199, 100, 95, None),
        (900, 800, 790, 200),  # up to the cap
        (900, 1000, 990, None),
        (900, 0, 0, None),  # an empty pool has no use
    ],
)
def test_growth_stops_at_the_mark_and_the_cap(free, nbytes, in_use, expected):
    growth = Growth(COLD, Mark(percent=15))
    found = [growth.decide(t_s, gpu(free, 1000), nbytes, in_use) for t_s in range(3)][-1]
    assert (found and found.nbytes) == expected


def test_growth_needs_readings_on_end_and_a_pause():
    growth = Growth(COLD, Mark(percent=15))
    uses = [95, 95, 50, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95]
    found = [growth.decide(t_s, gpu(900, 1000), 100, use) is not None for t_s, use in enumerate(uses)]
    assert [t_s for t_s, grown in enumerate(found) if grown] == [5, 15]


def test_growth_needs_a_reading():
    growth = Growth(COLD, Mark(percent=15))
    assert [growth.decide(t_s, [], 100, 100) for t_s in range(5)] == [None] * 5


def test_an_idle_pool_shrinks():
    growth = Growth(COLD, Mark(percent=15))
    found = [growth.decide(t_s, gpu(900, 1000), 100, 10) for t_s in range(4)]
    assert found[:3] == [None] * 3
    assert (found[3].nbytes, found[3].why) == (-90, "10% in use for 4 readings")


class Literal:
    """The rule as an article has it: more than 90 % in use and free memory BELOW the mark, then half as much again."""

    def __init__(self, low):
        self.low = low

    def decide(self, t_s, readings, nbytes, in_use):
        below = any(reading.free < self.low.of(reading.total) for reading in readings)
        return nbytes // 2 if below and in_use > 0.9 * nbytes else 0


def a_minute(grow, resident):
    """A pool of 100 that is always used up, charged to 1000 of video memory. The least that was free, how it grew."""
    nbytes, least, sizes = 100, 1000, []
    for t_s in range(60):
        free = 1000 - resident - nbytes
        least = min(least, free)
        if free < 0:
            break
        nbytes += grow(t_s, gpu(free, 1000), nbytes)
        sizes.append(nbytes)
    return least, sizes


@pytest.mark.parametrize("resident", [100, 500, 700, 790])
def test_ours_leaves_the_mark_free_where_the_literal_rule_runs_memory_out(resident):
    growth = Growth(COLD, Mark(percent=15))

    def ours(t_s, readings, nbytes):
        found = growth.decide(t_s, readings, nbytes, nbytes)
        return found.nbytes if found else 0

    least, _ = a_minute(ours, resident)
    assert least >= min(150, 900 - resident)

    literal = Literal(Mark(percent=15))
    least, sizes = a_minute(lambda t_s, readings, nbytes: literal.decide(t_s, readings, nbytes, nbytes), resident)
    if 1000 - resident - 100 < 150:  # it grows because little is free, and so takes all there is
        assert least < 0
    else:  # and not where there is plenty
        assert set(sizes) == {100}


# -- waiting --


class FakeClock(Clock):
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        super().__init__(self.time, self.wait)
        self.slept = []

    def time(self):
        return sum(self.slept)

    def wait(self, seconds):
        self.slept.append(seconds)


class Later:
    """Memory that is free by ``free(seconds)``."""

    def __init__(self, clock, free):
        self.clock, self.free, self.missing = clock, free, {}

    def read(self):
        return [Reading("count", free) for free in self.free(self.clock.time())]


def test_headroom_that_is_there_is_not_waited_for():
    clock = FakeClock()
    found = wait_for_headroom(Later(clock, lambda t_s: [5, 7]), 5, clock=clock)
    assert (found.reached, found.seconds, clock.slept) == (True, 0, [])
    assert found.readings == (Reading("count", 5), Reading("count", 7))
    assert str(found) == "5 bytes free after 0.00 s: 5 (count), 7 (count)"


def test_headroom_is_waited_for_at_growing_pauses():
    clock = FakeClock()
    found = wait_for_headroom(Later(clock, lambda t_s: [9, 9 if t_s >= 3 else 1]), 5, 60, clock=clock)
    assert clock.slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert found.reached
    assert found.seconds == pytest.approx(3.55)


def test_headroom_that_never_comes_times_out_exactly():
    clock = FakeClock()
    found = wait_for_headroom(Later(clock, lambda t_s: [1]), 5, 2.0, clock=clock)
    assert not found.reached
    assert found.seconds == pytest.approx(2.0)
    assert str(found) == "5 bytes not free within 2.00 s: 1 (count)"
    assert len(clock.slept) == 6


def test_headroom_is_waited_for_by_the_counts_that_matter():
    found = wait_for_headroom(Later(FakeClock(), lambda t_s: [9, 1]), 5, decides=lambda reading: reading.free > 1)
    assert (found.reached, len(found.readings)) == (True, 1)


def test_headroom_that_nobody_counts_is_not_there():
    clock = FakeClock()
    found = wait_for_headroom(Later(clock, lambda t_s: []), 1, 1.0, clock=clock)
    assert (found.reached, found.readings) == (False, ())


def test_counters_settle_at_growing_pauses_within_the_window():
    clock = FakeClock()
    patience = Patience(eps_nbytes=2, window_s=2.0, timeout_s=60, interval_s=0.1, factor=2.0)
    found = settle(lambda: {"a": max(0, int(100 - 20 * clock.time())), "b": None}, patience, clock=clock)
    assert found.calm
    assert clock.slept[:4] == [0.1, 0.2, 0.4, 0.5]  # four times a window at least
    assert found.row == {"a": 0, "b": None}
    assert 5 + 2.0 - 0.6 <= found.seconds <= 5 + 2.0 + 0.6


def test_counters_that_never_settle_time_out_and_are_named():
    clock = FakeClock()
    found = settle(lambda: {"a": int(1e9 * clock.time()), "b": 1}, Patience(timeout_s=3.0, factor=2.0), clock=clock)
    assert (found.calm, found.moved, found.seconds) == (False, ["a"], 3.0)


# -- the monitor --


@dataclass
class Hands:
    """Controls that only note what they are told."""

    depth: int = 2
    done: list = field(default_factory=list)
    cold_now: tuple = (100, 50)
    kept: int = 0
    cold_moves: int = 1

    def pinned(self):
        return 5_000_000, 70_000_000

    def cold(self):
        return self.cold_now

    def give_back(self):
        self.done.append("give_back")
        return 1_000_000 * self.cold_moves

    def give_back_device(self):
        return self.kept

    def grow(self, nbytes):
        self.done.append(f"grow {nbytes}")
        return nbytes * self.cold_moves

    def set_depth(self, depth):
        self.done.append(f"depth {depth}")

    def stop_page_locking(self, why):
        self.done.append(f"pageable: {why}")

    def warn(self, text):
        self.done.append(f"warn: {text}")

    def stop(self):
        self.done.append("stop")


class Script:
    """Memory that is free as a list says, a reading each; its last one goes on."""

    def __init__(self, *frees, total=100):
        self.frees, self.total, self.closed = list(frees), total, 0
        self.missing = {"nvml": "not installed"}

    def read(self):
        free = self.frees.pop(0) if len(self.frees) > 1 else self.frees[0]
        return [] if free is None else [Reading("GPU", free, self.total)]

    def close(self):
        self.closed += 1


class Ticking:
    """A clock that a guard's wait moves on, for ``seconds``."""

    def __init__(self, seconds, costs_s=0.0):
        self.now_s, self.end_s, self.costs_s = 100.0, 100.0 + seconds, costs_s
        self.waits = []

    def clock(self):
        return self.now_s

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now_s += seconds
        return self.now_s > self.end_s


def guarded(options, memory, hands=None, seconds=10.0, **more):
    time = Ticking(seconds)
    hands = hands or Hands()
    guard = Guard(options, lambda: memory, hands, clock=time.clock, wait=time.wait, **more)
    guard.open()
    try:
        guard.run()
    finally:
        guard.close()
    return guard, hands, time


def test_a_guard_reads_every_second_and_does_what_it_is_told(caplog):
    caplog.set_level("INFO", logger="framepipe.guard")
    options = GuardOptions(on_critical=("depth", "pageable", "warn", "stop"), cooldown_s=4)
    seen = []
    guard, hands, time = guarded(options, Script(50, 14, 4, 90), callback=seen.append)
    assert time.waits == [1.0] * 11
    assert hands.done == [
        "give_back",
        "warn: memory was low: 14 B of 100 B free (GPU), below 15%",
        "depth 1",
        "pageable: the guard stopped page-locking: memory is below 5%",
        "stop",
        "depth 2",
    ]
    assert [record.event for record in seen] == ["low"] * 2 + ["critical"] * 3 + ["recovered", "depth_back"]
    assert [record.t_s for record in seen] == [1, 1, 2, 2, 2, 5, 9]
    assert seen[0].line() == (
        "guard: low: below 15%: 1.0 MB of cold memory given back; 14 B of 100 B free (GPU), "
        "page-locked 5.0 MB now, 70.0 MB in all, cold tier 50% in use, depth 2"
    )
    assert [record.getMessage() for record in caplog.records] == [record.line() for record in seen]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 5 + ["INFO"] * 2
    assert list(guard.news()) == [record.line() for record in seen]
    assert list(guard.news()) == []
    told = guard.report()
    assert json.loads(json.dumps(told)) == told
    assert (told["samples"], told["decisions"], told["episodes"], told["level"]) == (11, 7, 1, "ok")
    assert told["least"] == {"t_s": 2, "free": 4, "total": 100, "source": "GPU"}
    assert (told["depth_least"], told["page_locking"]) == (1, False)
    assert told["missing"] == {"nvml": "not installed"}
    assert told["events"][2]["text"] == "below 5%: 1 of 2 batches in flight from now on"
    assert told["events"][5]["text"] == "above 15% again: the episode is over"
    assert told["file"] is None
    assert told["cost"]["reading_s"] > 0


def test_what_watching_costs_is_measured_though_time_is_modelled(monkeypatch):
    walls, cpus = itertools.count(0, 0.25), itertools.count(0, 0.125)
    clocks = SimpleNamespace(perf_counter=lambda: next(walls), thread_time=lambda: next(cpus))
    monkeypatch.setattr("framepipe.guard.monitor.time", clocks)
    guard, _, _ = guarded(GuardOptions(), Script(50), seconds=3)
    # Four readings, each between two looks at either clock, and one look at the end.
    assert guard.report()["cost"] == {"reading_s": 1.0, "cpu_s": 0.5, "elapsed_s": 2.0}
    assert guard.report()["cost"]["elapsed_s"] == 2.0


def test_warn_is_one_action_whichever_mark_names_it():
    _, hands, _ = guarded(GuardOptions(), Script(1))
    assert [each for each in hands.done if each.startswith("warn")] == [
        "warn: memory was low: 1 B of 100 B free (GPU), below 15%"
    ]


def test_what_is_given_back_is_told_by_kind():
    guard, _, _ = guarded(GuardOptions(), Script(10), Hands(kept=3_000_000), seconds=0)
    assert guard.report()["events"][0]["text"] == "below 15%: 1.0 MB of cold memory and 3.0 MB of results given back"


@pytest.mark.parametrize("low", [Mark(percent=15), Mark(nbytes=2 * GB)])
def test_the_least_is_what_was_nearest_to_its_own_mark(low):
    readings = [[Reading("GPU", 30 * GB, 140 * GB)], [Reading("container", 3 * GB, 4 * GB)], [Reading("?", 5 * GB)]]
    readings += [[Reading("GPU", 130 * GB, 140 * GB)]]

    class Several(Script):
        def read(self):
            return readings.pop(0)

    guard, _, _ = guarded(GuardOptions(low=low, critical=Mark(nbytes=1 << 20)), Several(1), seconds=3)
    assert guard.report()["least"]["source"] == ("GPU" if low.percent else "container")


def test_no_wait_is_longer_than_systems_allow():
    guard, _, time = guarded(GuardOptions(interval_s=1e300), Script(50), seconds=10_000)
    assert time.waits == [3600.0] * 3
    assert guard.report()["samples"] == 1


def test_every_reading_is_a_line_of_the_file(tmp_path):
    path = tmp_path / "new" / "guard.jsonl"
    guard, _, _ = guarded(GuardOptions(file=path, on_low=("give_back",)), Script(50, 14, None, 50), seconds=3)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["t_s"], row["free"], row["event"], row["level"]) for row in rows] == [
        (0, 50, None, "ok"), (1, 14, None, "low"), (1, 14, "low", "low"), (2, None, None, "low"), (3, 50, None, "low"),
    ]  # fmt: skip
    assert set(rows[0]) == set(Record.__dataclass_fields__)
    assert (rows[0]["pinned"], rows[0]["pinned_total"], rows[0]["cold_use"]) == (5_000_000, 70_000_000, 0.5)
    assert guard.report()["samples_unknown"] == 1


def test_a_file_that_cannot_be_written_ends_the_file_and_not_the_guard(tmp_path):
    memory = Script(50)
    guard = Guard(GuardOptions(file=tmp_path / "g.jsonl"), lambda: memory, hands := Hands(), clock=lambda: 0.0)
    guard.open()

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            self.file.close()

    guard._file = Full(guard._file)
    guard.sample()
    guard.sample()
    guard.close()
    assert hands.done == [f"warn: guard: {tmp_path / 'g.jsonl'}: cannot be written any more: No space left on device"]
    assert guard.report()["samples"] == 2


def test_events_are_bounded():
    options = GuardOptions(keep=3, cooldown_s=1, calm_samples=1, on_low=("warn",), interval_s=10)
    guard, _, _ = guarded(options, Script(*[10, 90] * 50), seconds=980)
    told = guard.report()
    assert told["decisions"] > 20
    assert len(told["events"]) == 3 == len(list(guard.news()))


def test_the_cold_tier_grows_and_shrinks_by_the_guard():
    hands = Hands(cold_now=(100, 95))
    cold = ColdOptions(busy_samples=2, idle_samples=2, cooldown_s=1)
    guard, _, _ = guarded(GuardOptions(cold=cold), Script(90, total=200), hands, seconds=1)
    assert hands.done == ["grow 50"]
    assert guard.report()["events"][0]["event"] == "grow"
    hands = Hands(cold_now=(100, 5))
    guard, _, _ = guarded(GuardOptions(cold=cold), Script(90), hands, seconds=1)
    assert hands.done == ["give_back"]
    assert guard.report()["events"][0]["text"] == "5% in use for 2 readings: 1.0 MB of cold memory given back"


def test_the_cold_tier_does_not_grow_while_memory_is_low():
    hands = Hands(cold_now=(2, 2))
    cold = ColdOptions(busy_samples=1, cooldown_s=0)
    guarded(GuardOptions(cold=cold, on_low=()), Script(14, 16), hands, seconds=2)
    assert hands.done == []


def test_growth_counts_readings_anew_behind_an_episode():
    hands = Hands(cold_now=(100, 95))
    options = GuardOptions(cold=ColdOptions(busy_samples=3, cooldown_s=0), on_low=(), calm_samples=1)
    guarded(options, Script(90, 90, 10, 90, 90, 90, 90, total=200), hands, seconds=5)
    assert hands.done == []
    guarded(options, Script(90, 90, 10, 90, 90, 90, 90, total=200), hands, seconds=6)
    assert hands.done == ["grow 50"]


@pytest.mark.parametrize("in_use", [95, 5])
def test_growth_that_comes_to_nothing_is_not_told(in_use):
    """Blocks are whole and reserved ones stay: a line a minute for a day would say so."""
    hands = Hands(cold_now=(100, in_use), cold_moves=0)
    cold = ColdOptions(busy_samples=2, idle_samples=2, cooldown_s=1)
    guard, _, _ = guarded(GuardOptions(cold=cold), Script(90, total=200), hands, seconds=10)
    assert len(hands.done) == 5
    assert guard.report()["decisions"] == 0


def test_a_late_guard_takes_no_readings_in_a_rush():
    time = Ticking(10)

    class Slow(Script):
        def read(self):
            time.now_s += 2.5
            return super().read()

    guard = Guard(GuardOptions(), lambda: Slow(50), Hands(), clock=time.clock, wait=time.wait)
    guard.run()
    assert guard.report()["samples"] == 3
    assert time.waits == [1.0] * 3


def test_a_guard_may_be_ticked_by_whoever_has_the_time():
    now = [0.0]
    memory = Script(50)
    guard = Guard(GuardOptions(interval_s=1.0), lambda: memory, Hands(), clock=lambda: now[0])
    for _ in range(100):
        guard.tick()
        now[0] += 1 / 30
    assert guard.report()["samples"] == 4
    guard.stop()
    guard.tick()
    assert guard.report()["samples"] == 4
    guard.close()
    guard.close()
    assert memory.closed == 1


def test_what_a_callback_raises_ends_the_guard():
    def fail(record):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        guarded(GuardOptions(), Script(1), callback=fail)
