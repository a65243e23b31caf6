"""The parts of `framepipe.probe`: children, counters that settle, lines through readings, baselines, Windows."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from framepipe import hardware
from framepipe.errors import ConfigError, DeviceUnavailableError, OutputExistsError
from framepipe.probe import baselines, children, fit, machine, record, windows
from framepipe.probe._host_blocks import BLOCKS, Block, Locked, Pageable, RefusedError
from framepipe.probe._pool import Pooled, Unpooled
from framepipe.probe.bandwidth import baseline
from framepipe.probe.counters import Clock, Counters, Patience, back_s, decides, difference, settle
from framepipe.probe.kinds import KINDS, chosen
from framepipe.probe.machine import RESERVE_NBYTES, Available, Machine, available, cpu_identity, too_large
from framepipe.telemetry.adapter import Luid
from framepipe.telemetry.base import Missing, Sensor
from framepipe.telemetry.pdh import Instance, PdhMemory

MB = 1_000_000


class Scripted(Sensor):
    """A sensor whose readings come from a function."""

    def __init__(self, name, read, source="a script"):
        super().__init__()
        self.name, self.source, self._function = name, source, read
        self.readings = {key: f"field {key}" for key in read()}

    def _read(self):
        return self._function()


class FakeClock(Clock):
    """Time that passes only while somebody sleeps; ``at`` calls functions when it has come to their time."""

    def __init__(self):
        object.__setattr__(self, "time_s", 128.0)

    def now(self):
        return self.time_s

    def sleep(self, seconds):
        assert seconds > 0
        object.__setattr__(self, "time_s", self.time_s + seconds)


# -- children --


def python(code):
    return (sys.executable, "-c", f"import sys, json, os\n{code}")


ANSWER = "request = json.loads(sys.stdin.readline())\nprint(json.dumps({'result': {'status': 'ok', **request}}))"


def test_a_child_answers(nothing_left):
    assert children.run({"nbytes": 5}, 30, argv=python(ANSWER)) == {"status": "ok", "nbytes": 5}


def test_events_are_heard_and_noise_is_not(nothing_left):
    code = "print('noise'); print('[1]'); print('{\"event\": {\"pid\": 1}}', flush=True)\n" + ANSWER
    heard = []
    assert children.run({}, 30, argv=python(code), hear=heard.append)["status"] == "ok"
    assert heard == [{"pid": 1}]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit('no memory')", r"the child process ended with status 1: no memory"),
        ("sys.stdin.readline(); print('{}')", r"the child process ended with status 0$"),
        ("os._exit(7)", r"ended with status 7$"),
    ],
)
def test_a_child_without_an_answer_failed(code, reason, nothing_left):
    found = children.run({}, 30, argv=python(code))
    assert found["status"] == "failed"
    assert re.search(reason, found["reason"]), found["reason"]


def test_more_than_a_pipe_holds_on_both_outputs(nothing_left):
    code = "sys.stderr.write('x' * 99 + '\\n'); print('y' * 1_000_000); sys.stderr.write('z\\n' * 500_000)\n" + ANSWER
    assert children.run({}, 30, argv=python(code))["status"] == "ok"


WAIT = "print(json.dumps({'event': os.getpid()}), flush=True)\nsys.stdin.readline(); sys.stdin.read()"


def alive(pid):
    import psutil

    return psutil.pid_exists(pid)


def test_a_child_that_takes_too_long_is_ended(nothing_left):
    pids = []
    found = children.run({}, 2.0, argv=python(WAIT), hear=pids.append)
    assert found == {"status": "failed", "reason": "took longer than 2 s and was ended"}
    assert pids
    assert not alive(pids[0])


def test_stopping_ends_the_child(nothing_left):
    stop, pids = threading.Event(), []

    def hear(pid):
        pids.append(pid)
        stop.set()

    found = children.run({}, 60, argv=python(WAIT), stopped=stop.is_set, hear=hear)
    assert found == {"status": "unfinished", "reason": "interrupted"}
    assert not alive(pids[0])


def test_an_exception_ends_the_child_too(nothing_left):
    pids = []

    def hear(pid):
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        children.run({}, 60, argv=python(WAIT), hear=hear)
    assert not alive(pids[0])


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_child_that_does_not_listen_is_killed(nothing_left, monkeypatch):
    monkeypatch.setattr(children, "_GRACE_S", 0.2)
    stop, pids = threading.Event(), []
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    children.run({}, 60, argv=python(code), stopped=stop.is_set, hear=lambda pid: (pids.append(pid), stop.set()))
    assert not alive(pids[0])


def test_the_real_child_says_what_went_wrong(nothing_left):
    found = children.run({"probe": "churn", "kind": "pageable"}, 60)
    assert found["status"] == "failed"
    assert found["reason"].startswith("KeyError")


def test_the_real_child_ends_with_its_parent():
    import subprocess

    with subprocess.Popen(
        children.ARGV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=children._environment()
    ) as child:
        patience = {"eps_nbytes": 1, "window_s": 0.0, "timeout_s": 0.0, "interval_s": 0.1}
        request = {"probe": "pinned", "kind": "pageable", "device": None, "nbytes": 4096, "patience": patience}
        child.stdin.write(json.dumps({**request, "hold_s": 600}).encode() + b"\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["event"]["holding_s"] == 600
        child.stdin.close()
        assert child.wait(30) == 1


def test_a_module_in_the_working_folder_is_not_taken(tmp_path, monkeypatch, nothing_left):
    (tmp_path / "json.py").write_text("raise SystemExit('mine')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert children.run({"probe": "machine", "device": 0}, 120)["status"] in ("ok", "unavailable")


# -- blocks --


def test_blocks_are_there_until_they_are_freed():
    for kind in ("control", "pageable"):
        block = BLOCKS[kind](1 << 16)
        assert block.nbytes == 1 << 16
        assert (block.address is None) == (kind == "control")
        block.free()
    assert Pageable(1 << 16).steps_s.keys() == {"map", "touch"}


@pytest.mark.skipif(sys.platform == "win32", reason="mlock")
def test_a_refused_lock_has_its_code_and_the_limit(monkeypatch):
    import errno
    import resource

    from framepipe import pagelock

    def mlock(address, nbytes):
        import ctypes

        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pagelock.ctypes, "CDLL", lambda *args, **kwargs: SimpleNamespace(mlock=mlock))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(pagelock, "_may_lock_all", lambda: False)
    with pytest.raises(RefusedError, match=r"mlock: .* ENOMEM .*RLIMIT_MEMLOCK is 65536 bytes") as caught:
        Locked(1 << 20)
    assert (caught.value.code, caught.value.name) == (errno.ENOMEM, "ENOMEM")


class Counted(Block):
    """A block of no memory that counts how many there are."""

    alive = 0

    def __init__(self, nbytes):
        super().__init__(nbytes)
        Counted.alive += 1

    def free(self):
        Counted.alive -= 1


def test_a_pool_gives_exact_sizes_again_and_stays_within_its_budget():
    Counted.alive = 0
    pool = Pooled(Counted, 100)
    a, b = pool.take(40), pool.take(30)
    pool.give(a)
    pool.give(b)
    assert pool.take(30) is b  # exact: 40 would have been large enough as well
    assert pool.made == 2
    c = pool.take(50)  # 40 + 30 + 50 is too much: what is kept goes, what is in use stays
    assert (pool.nbytes, pool.freed, Counted.alive) == (80, 1, 2)
    pool.give(b)
    pool.give(c)
    pool.close()
    assert (pool.nbytes, Counted.alive) == (0, 0)


def test_without_a_pool_every_block_is_made_and_freed():
    Counted.alive = 0
    source = Unpooled(Counted)
    for _ in range(3):
        source.give(source.take(40))
    assert (source.made, source.freed, Counted.alive) == (3, 3, 0)


# -- counters --


def test_a_row_has_every_column_with_its_source_and_a_reason_where_there_is_none():
    def read():
        return {"free": 5, "lost": "a reason"}

    counters = Counters([("", Scripted("cuda", read)), ("cuda:1 ", Scripted("nvml", read)), ("", Missing("pdh", "no"))])
    assert counters.read() == {"cuda.free": 5, "cuda.lost": None, "cuda:1 nvml.free": 5, "cuda:1 nvml.lost": None}
    assert counters.sources["cuda:1 nvml.free"] == "a script: field free"
    assert counters.missing == {"cuda.lost": "a reason", "cuda:1 nvml.lost": "a reason", "pdh": "no"}
    counters.close()
    assert counters.read()["cuda.free"] is None


def test_windows_counters_of_every_adapter_are_columns():
    first, other = Luid(0, 1), Luid(0, 2)
    numbers = {
        "adapter_shared": {Instance(None, first, 0): 10, Instance(None, other, 0): 20},
        "process_local": {Instance(77, first, 0): 1, Instance(78, first, 0): 2, Instance(77, other, 0): 3},
    }

    class Pdh(PdhMemory):
        def __init__(self):
            Sensor.__init__(self)
            self.name, self.source = "pdh", "counters"

        def _collect(self):
            return numbers

        def _read(self):
            return {}

        def _close(self):
            pass

    counters = Counters([("", Pdh())], pid=77)
    row = {column: number for column, number in counters.read().items() if "[" in column}
    assert row == {
        f"pdh[{first} 0].adapter_shared": 10,
        f"pdh[{other} 0].adapter_shared": 20,
        f"pdh[{first} 0].process_local": 1,
        f"pdh[{other} 0].process_local": 3,
    }
    assert all(column in counters.sources for column in row)
    counters.close()


PATIENCE = Patience(eps_nbytes=10, window_s=0.5, timeout_s=5.0, interval_s=0.125)


def test_settling_takes_the_window_and_no_more():
    clock = FakeClock()
    settled = settle(lambda: {"a": 1, "b": None}, PATIENCE, clock=clock)
    assert settled.seconds == 0.5
    assert (settled.moved, settled.away) == ([], [])


def test_settling_waits_for_the_last_movement():
    clock = FakeClock()

    def read():
        return {"a": min(round((clock.now() - 128) * 8), 16) * 11}

    settled = settle(read, PATIENCE, clock=clock)
    assert settled.seconds == 2.5
    assert settled.row == {"a": 176}


def test_what_never_settles_is_named_at_the_time_out():
    clock = FakeClock()
    noise = itertools.count(step=100)
    settled = settle(lambda: {"a": next(noise), "b": 5}, PATIENCE, clock=clock)
    assert settled.seconds == 5.0
    assert settled.moved == ["a"]


def test_within_eps_is_still():
    clock = FakeClock()
    wobble = iter([0, 10] * 100)
    assert settle(lambda: {"a": next(wobble)}, PATIENCE, clock=clock).seconds == 0.5


def test_memory_that_comes_back_late_is_waited_for_though_it_holds_still():
    clock = FakeClock()
    target = {"a": 1000, "b": 7}

    def read():
        return {"a": 1000 if clock.now() >= 131 else 0, "b": 7}

    settled = settle(read, PATIENCE, target=target, clock=clock)
    assert settled.row["a"] == 1000
    assert back_s(settled.rows, target, "a", 10) == 3.0
    assert back_s(settled.rows, target, "b", 10) == 0
    lost = settle(lambda: {"a": 0, "b": 7}, PATIENCE, target=target, clock=clock)
    assert (lost.moved, lost.away) == ([], ["a"])
    assert back_s(lost.rows, target, "a", 10) is None


def test_limits_and_what_others_share_do_not_decide():
    assert decides("cuda.free")
    assert not any(map(decides, ("cuda.total", "cgroup.current", "cgroup.limit", "wddm.local_budget")))
    clock = FakeClock()
    noise = itertools.count(step=100)
    assert settle(lambda: {"cgroup.current": next(noise)}, PATIENCE, clock=clock).seconds == 0.5


def test_the_curve_is_thinned_and_leaves_out_what_is_constant():
    clock = FakeClock()
    noise = itertools.count(step=100)
    curve = settle(lambda: {"a": next(noise), "b": 5}, Patience(1, 1.0, 100.0, 0.01), clock=clock).curve()
    assert curve["columns"].keys() == {"a"}
    assert 100 < len(curve["t_s"]) == len(curve["columns"]["a"]) <= 200


def test_a_difference_with_an_unknown_is_unknown():
    assert difference({"a": 5, "b": None, "c": 1}, {"a": 2, "b": 1}) == {"a": 3, "b": None, "c": None}


# -- lines and percentiles --


@pytest.mark.parametrize(
    ("degrees", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042), (58, 2.002)],
)
def test_students_quantile_is_that_of_the_tables(degrees, t):
    assert fit.t_quantile(0.95, degrees) == pytest.approx(t, abs=5e-4)


def test_the_slope_and_its_interval():
    """By hand: slope 1.7, residuals 0.2 -0.5 0.6 -0.5 0.2, standard error of the slope sqrt(0.94/3/10)."""
    line = fit.slope([0, 1, 2, 3, 4], [1 + 0.2, 2.7 - 0.5, 4.4 + 0.6, 6.1 - 0.5, 7.8 + 0.2])
    assert line.per_s == pytest.approx(1.7)
    half = 3.18245 * math.sqrt((0.04 + 0.25 + 0.36 + 0.25 + 0.04) / 3 / 10)
    assert (line.low, line.high) == (pytest.approx(1.7 - half, abs=1e-4), pytest.approx(1.7 + half, abs=1e-4))


def test_no_slope_from_too_little():
    assert fit.slope([0, 1], [1, 2]) is None
    assert fit.slope([1, 1, 1], [1, 2, 3]) is None


def test_percentiles_are_values_that_occurred():
    found = fit.percentiles_ms([i / 1000 for i in range(100, 0, -1)])
    wanted = {"count": 100, "p50_ms": 50, "p95_ms": 95, "p99_ms": 99, "max_ms": 100}
    assert found == {key: pytest.approx(number) for key, number in wanted.items()}
    assert fit.percentiles_ms([]) is None


# -- machine --


def memory(nbytes, total=10**11):
    return SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=nbytes, total=total))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups")
def test_the_lesser_of_system_and_control_group_is_available():
    def group():
        return Scripted("cgroup", lambda: {"current": 3 * MB, "limit": 10 * MB}, source="/group")

    assert available(group, memory(5 * MB)).nbytes == 5 * MB
    small = available(group, memory(50 * MB))
    assert small.nbytes == 7 * MB
    assert small.words == "7.0 MB of 10.0 MB is left in the control group (/group)"
    no_limit = available(lambda: Scripted("cgroup", lambda: {"current": 3, "limit": "none"}), memory(50 * MB))
    assert no_limit.nbytes == 50 * MB


def test_too_large_says_the_numbers():
    has = Available(RESERVE_NBYTES + 100, "so much")
    assert too_large(100, has) is None
    assert too_large(101, has) == "101 B wanted beside a reserve of 268.4 MB, and so much"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)",
    ],
)
def test_the_kernel_tells_the_drivers_version(line, tmp_path):
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc 12.2.0\n", encoding="utf-8")
    assert hardware.kernel_driver(tmp_path / "version") == "580.95.05"
    assert hardware.kernel_driver(tmp_path / "none") is None


def test_which_device_is_examined():
    asked = []

    def run(request, timeout_s):
        asked.append(request["device"])
        if request["device"] == 3:
            return {"status": "ok", "gpu": {"name": "G"}}
        return {"status": "unavailable", "gpu": None, "reason": "there is none"}

    there = machine.examine("cuda:3", run)
    assert (there.device, there.gpu) == (3, {"name": "G"})
    assert there.about["windows"]["displays"]["reason"] == "only Windows has it" or sys.platform == "win32"
    auto = machine.examine("auto", run)
    assert (auto.device, auto.reason) == (None, "there is none")
    assert machine.examine("cpu", run).device is None
    assert asked == [3, 0]
    with pytest.raises(DeviceUnavailableError, match="'cuda' was asked for, but there is none"):
        machine.examine("cuda", run)
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:N"):
        machine.examine("gpu", run)


# -- Windows --


class Winreg:
    HKEY_LOCAL_MACHINE = "HKLM"

    def __init__(self, value):
        self.value = value

    def OpenKey(self, hive, path):
        import contextlib

        assert (hive, path) == ("HKLM", r"SYSTEM\CurrentControlSet\Control\GraphicsDrivers")
        return contextlib.nullcontext("key")

    def QueryValueEx(self, key, name):
        assert (key, name) == ("key", "HwSchMode")
        if isinstance(self.value, Exception):
            raise self.value
        return self.value, 4


class User32:
    @staticmethod
    def GetSystemMetrics(number):
        return {80: 3, 4096: 1}[number]


@pytest.mark.parametrize(
    ("value", "wanted", "reason"),
    [
        (2, "on", None),
        (1, "off", None),
        (7, "unknown value 7", None),
        (FileNotFoundError(), None, "the registry has no such value: Windows' default holds"),
        (PermissionError(13, "denied"), None, "PermissionError: [Errno 13] denied"),
    ],
)
def test_windows_settings(value, wanted, reason):
    found = windows.settings("win32", User32, Winreg(value))
    assert found["displays"] == {"value": 3, "source": "GetSystemMetrics(SM_CMONITORS)", "reason": None}
    assert found["remote_desktop"]["value"] is True
    assert (found["hardware_scheduling"]["value"], found["hardware_scheduling"]["reason"]) == (wanted, reason)


def test_elsewhere_windows_settings_are_unknown():
    for reading in windows.settings("linux").values():
        assert (reading["value"], reading["reason"]) == (None, "only Windows has it")
        assert reading["source"]


# -- records and baselines --


def test_kinds_are_named():
    assert chosen(None, list(KINDS), ["control"]) == ["control"]
    assert chosen(["mlock", "mlock", "control"], list(KINDS), []) == ["mlock", "control"]
    with pytest.raises(ConfigError, match="there is no kind 'pinned'; there are control, default"):
        chosen(["pinned"], list(KINDS), [])


def test_a_record_is_json_without_what_is_not_finite(tmp_path):
    found = record.new("churn", Machine(None, "why"), {"a": 1}, "framepipe probe churn")
    found["cells"] = [{"x": math.nan, "y": (1, math.inf)}]
    json_path, csv_path = record.write(found, [{"a": 1, "b": None}, {"c": "x,y"}], tmp_path)
    there = json.loads(json_path.read_text(encoding="utf-8"))
    assert (there["schema"], there["probe"], there["complete"]) == ("framepipe.probe/1", "churn", True)
    assert there["notes"] == ["no GPU was probed: why"]
    assert there["cells"] == [{"x": None, "y": [1, None]}]
    assert csv_path.read_text(encoding="utf-8") == 'a,b,c\n1,,\n,,"x,y"\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["probe-churn.csv", "probe-churn.json"]


def test_files_that_exist_are_replaced_only_if_asked(tmp_path):
    folder = tmp_path / "new"
    record.claim(folder, "churn", overwrite=False)
    (folder / "probe-churn.csv").touch()
    with pytest.raises(OutputExistsError, match=r"probe-churn.csv: exists"):
        record.claim(folder, "churn", overwrite=False)
    record.claim(folder, "churn", overwrite=True)
    with pytest.raises(ConfigError, match="--out"):
        record.claim(folder / "probe-churn.csv", "pinned", overwrite=False)


@pytest.mark.parametrize(
    ("system", "environment", "wanted"),
    [
        ("linux", {}, "home/.local/share"),
        ("linux", {"XDG_DATA_HOME": os.path.abspath("/data")}, os.path.abspath("/data")),
        ("linux", {"XDG_DATA_HOME": "relative"}, "home/.local/share"),
        ("darwin", {"XDG_DATA_HOME": os.path.abspath("/data")}, "home/Library/Application Support"),
        ("win32", {"LOCALAPPDATA": "local"}, "local"),
        ("win32", {}, "home/AppData/Local"),
    ],
)
def test_where_the_baseline_is(system, environment, wanted):
    assert baselines.default_path(system, environment, Path("home")) == Path(wanted) / "framepipe" / "baseline.json"


GPU = {"name": "G", "uuid": "u-1", "driver": "580.1"}


def bandwidth_record(gpu=None, rate=10.0):
    def row(median, **more):
        return {**more, "nbytes": 64, "bytes_per_s": {"median": median, "min": 1.0, "max": 99.0}}

    cells = [{"kind": "host_copy", "status": "ok", "rows": [row(rate, threads=1), row(rate / 2, threads=2)]}]
    if gpu:
        rows = [row(50.0, direction="to_device"), row(40.0, direction="to_host")]
        cells.append({"kind": "default", "status": "ok", "rows": rows})
        cells.append({"kind": "mapped", "status": "failed", "rows": [row(55.0, direction="to_device")]})
    return {"provenance": {"started": "2026-01-01", "gpu": gpu, "cpu": "C", "versions": {}}, "cells": cells}


def test_the_baseline_is_the_fastest_median_of_each_direction(tmp_path):
    path = tmp_path / "deep" / "baseline.json"
    assert baseline(path) is None
    baselines.save(path, bandwidth_record())
    baselines.save(path, bandwidth_record(GPU, 20.0))
    on_gpu = baseline(path, key="gpu u-1 driver 580.1")
    assert on_gpu["ceiling"] == {"to_device_bytes_per_s": 55, "to_host_bytes_per_s": 40, "host_copy_bytes_per_s": 20}
    on_cpu = baseline(path, key=cpu_identity())
    assert on_cpu["ceiling"]["host_copy_bytes_per_s"] == 10
    assert on_cpu["ceiling"]["to_device_bytes_per_s"] is None
    assert baseline(path, key="gpu u-1 driver 590.0") is None


def test_this_machine_finds_its_own_baseline(tmp_path, monkeypatch):
    from framepipe.telemetry.base import SensorUnavailableError

    def no_gpu(device):
        raise SensorUnavailableError("none")

    monkeypatch.setattr(machine, "find_adapter", no_gpu)
    monkeypatch.setattr(baselines, "default_path", lambda: tmp_path / "b.json")
    baselines.save(tmp_path / "b.json", bandwidth_record())
    assert baseline()["cpu"] == "C"
    monkeypatch.setattr(machine, "find_adapter", lambda device: SimpleNamespace(uuid="u-1"))
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
    assert baseline() is None
    baselines.save(tmp_path / "b.json", bandwidth_record(GPU))
    assert baseline()["gpu"] == GPU


def test_nothing_measured_keeps_the_old_baseline(tmp_path):
    empty = {**bandwidth_record(), "cells": [{"kind": "host_copy", "status": "failed", "rows": []}]}
    assert baselines.save(tmp_path / "b.json", empty) is None
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "framepipe.run/1"}', '{"schema": "framepipe.baseline/1"}'])
def test_another_file_is_no_baseline_and_stays(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="baseline"):
        baselines.save(path, bandwidth_record())
    assert path.read_text(encoding="utf-8") == text
