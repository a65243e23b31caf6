"""The three probes: with children, clocks and sensors played by the test, and with a few real children."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
from test_probe import Counted, FakeClock, Scripted, alive

from framepipe import cli
from framepipe.errors import ConfigError
from framepipe.probe import _churn_cell, _host_copies, _pinned_cell, bandwidth, children, churn, pinned
from framepipe.probe._host_blocks import Block, RefusedError
from framepipe.probe.counters import Counters, Patience
from framepipe.probe.machine import RESERVE_NBYTES, Available, Machine

MB = 1_000_000
CPU = Machine(None, "there is no GPU", {"cpu": "C", "gpu": None, "started": "now", "versions": {}})
GPU = Machine(0, None, {"cpu": "C", "gpu": {"name": "G", "uuid": "u", "driver": "1"}, "versions": {}})
PLENTY = Available(10**12, "plenty")
PATIENCE = Patience(eps_nbytes=1000, window_s=0.5, timeout_s=8.0, interval_s=0.125)


def options(**more):
    return {"memory": lambda: PLENTY, **more}


def refuse(nbytes):
    raise RefusedError("cudaHostAlloc", 2, "cudaErrorMemoryAllocation", "out of memory")


# -- pinned: one cell --


class Ledger:
    """Memory that a counter of free bytes shows: at once when taken, and ``late_s`` after it was given."""

    def __init__(self, clock, late_s=0.0, share=1.0):
        self.clock, self.late_s, self.share = clock, late_s, share
        self.nbytes, self.due_s = 0, 0.0

    def free(self):
        shown = self.nbytes if self.clock.now() >= self.due_s else self.before
        return 10**9 - int(shown * self.share)

    def make(self, nbytes):
        ledger = self

        class Held(Block):
            def free(self):
                ledger.before, ledger.nbytes = ledger.nbytes, 0
                ledger.due_s = ledger.clock.now() + ledger.late_s

        self.nbytes = nbytes
        return Held(nbytes)

    def counters(self):
        return Counters([("", Scripted("cuda", lambda: {"free": self.free(), "total": 10**9}))])


def request(**more):
    return {"nbytes": 5 * MB, "patience": asdict(PATIENCE), "hold_s": 0.0, **more}


def test_a_cell_reads_before_during_and_after_until_all_is_back():
    clock = FakeClock()
    ledger = Ledger(clock, late_s=3.0)
    found = _pinned_cell.measure(request(), print, ledger.counters(), ledger.make, clock)
    assert (found["status"], found["reason"], found["error"]) == ("ok", None, None)
    assert found["deltas"] == {"cuda.free": -5 * MB, "cuda.total": 0}
    assert found["left"] == {"cuda.free": 0, "cuda.total": 0}
    assert found["back_s"] == {"cuda.free": 3.0}
    assert found["recovery_s"] == 3.0
    assert found["waits"]["before"] == {"seconds": 0.5, "still_moving": [], "not_back": []}
    assert found["curve"]["columns"]["cuda.free"][0] == 10**9 - 5 * MB


def test_a_cell_whose_memory_does_not_come_back_says_so():
    clock = FakeClock()
    ledger = Ledger(clock, late_s=3600.0)
    found = _pinned_cell.measure(request(), print, ledger.counters(), ledger.make, clock)
    assert (found["recovery_s"], found["back_s"]) == (None, {"cuda.free": None})
    assert found["left"]["cuda.free"] == -5 * MB
    assert found["waits"]["after"] == {"seconds": 8.0, "still_moving": [], "not_back": ["cuda.free"]}


def test_the_time_until_back_counts_from_the_beginning_of_the_release():
    clock = FakeClock()
    ledger = Ledger(clock, late_s=1.0)

    class Slow(Block):
        def free(self):
            clock.sleep(2.0)
            held.free()

    held = ledger.make(5 * MB)
    ledger.nbytes = 0

    def make(nbytes):
        ledger.nbytes = nbytes
        return Slow(nbytes)

    found = _pinned_cell.measure(request(), print, ledger.counters(), make, clock)
    assert (found["free_s"], found["recovery_s"]) == (2.0, 3.0)


def test_a_cell_is_held_for_as_long_as_asked_and_says_where():
    clock = FakeClock()
    ledger, told = Ledger(clock), []
    _pinned_cell.measure(request(hold_s=60.0), told.append, ledger.counters(), ledger.make, clock)
    assert told == [{"holding_s": 60.0, "pid": os.getpid()}]
    assert clock.now() == 128 + 0.5 + 0.5 + 60 + 0.5


def test_a_refusal_is_measured_with_its_code_and_name():
    clock = FakeClock()
    found = _pinned_cell.measure(request(hold_s=60.0), print, Ledger(clock).counters(), refuse, clock)
    assert found["status"] == "failed"
    assert found["reason"] == "cudaHostAlloc: 2 cudaErrorMemoryAllocation (out of memory)"
    assert (found["error"]["code"], found["error"]["name"]) == (2, "cudaErrorMemoryAllocation")
    assert found["deltas"]["cuda.free"] == 0
    assert (found["free_s"], found["recovery_s"]) == (None, None)


def test_what_was_not_even_tried_is_refused():
    def make(nbytes):
        raise RefusedError("cudaMalloc", None, "not tried", "5 wanted, 4 free")

    clock = FakeClock()
    found = _pinned_cell.measure(request(), print, Ledger(clock).counters(), make, clock)
    assert (found["status"], found["reason"]) == ("refused", "cudaMalloc: not tried (5 wanted, 4 free)")


# -- pinned: the matrix --


def cell(asked, deltas):
    zero = dict.fromkeys(deltas, 0)
    readings = {"before": zero, "held": deltas, "after": zero}
    times = {"steps_s": {"allocate": 0.25, "touch": 0.5}, "free_s": 0.125, "recovery_s": 1.5}
    known = {"deltas": deltas, "left": zero, "readings": readings, "sources": {"cuda.free": "cudaMemGetInfo: free"}}
    return {"status": "ok", "reason": None, **known, **times}


def play(asked, timeout_s):
    deltas = {"cuda.free": -3 if asked["kind"] == "control" else -3 - asked["nbytes"] // 100, "procfs.rss_shmem": None}
    return cell(asked, deltas)


def test_every_size_has_its_control_first_and_deltas_are_less_that():
    asked = []

    def run(request, timeout_s):
        asked.append((request["nbytes"], request["kind"], request["device"]))
        return play(request, timeout_s)

    found = pinned.probe(GPU, run, sizes=[500, 1000], kinds=["default", "control", "device"], **options())
    assert asked == [(n, kind, 0) for n in (500, 1000) for kind in ("control", "default", "device")]
    by = {(each["kind"], each["nbytes"]): each for each in found["cells"]}
    assert by["default", 1000]["deltas"]["cuda.free"] == -13
    assert by["default", 1000]["net"] == {"cuda.free": -10, "procfs.rss_shmem": None}
    assert "net" not in by["control", 1000]
    row = next(row for row in pinned.rows(found) if row["kind"] == "device" and row["requested"] == 500)
    assert (row["free"], row["rss_shmem"], row["free_after"]) == (-5, None, 0)
    assert (row["allocate_s"], row["free_s"], row["recovery_s"]) == (0.75, 0.125, 1.5)
    assert next(row for row in pinned.rows(found))["free"] == -3
    assert found["complete"]


def test_without_a_gpu_its_kinds_are_rows_that_say_why():
    found = pinned.probe(CPU, play, sizes=[500], **options())
    status = {each["kind"]: (each["status"], each["reason"]) for each in found["cells"]}
    assert {kind for kind, (said, _) in status.items() if said == "ok"} == {"control", "pageable", "mlock"}
    assert status["default"] == status["device"] == ("unavailable", "needs a GPU: there is no GPU")
    assert found["notes"] == ["no GPU was probed: there is no GPU"]
    assert len(list(pinned.csv_rows(found))) == len(found["cells"])


def test_a_size_beyond_host_memory_is_not_tried():
    tried = []

    def run(request, timeout_s):
        tried.append((request["kind"], request["nbytes"]))
        return play(request, timeout_s)

    has = Available(RESERVE_NBYTES + 600, "so much is left")
    kinds = ["default", "device", "pageable"]
    found = pinned.probe(GPU, run, sizes=[500, 1000], kinds=kinds, memory=lambda: has)
    assert tried == [*((kind, 500) for kind in ("control", *kinds)), ("control", 1000), ("device", 1000)]
    refused = [each for each in found["cells"] if each["status"] == "refused"]
    assert [(each["kind"], each["nbytes"]) for each in refused] == [("default", 1000), ("pageable", 1000)]
    assert refused[0]["reason"] == "not tried: 1.0 kB wanted beside a reserve of 268.4 MB, and so much is left"


def test_an_interruption_keeps_what_was_finished():
    def run(request, timeout_s):
        unfinished = {"status": "unfinished", "reason": "interrupted"}
        return unfinished if request["kind"] == "default" else play(request, timeout_s)

    found = pinned.probe(GPU, run, sizes=[500, 1000], **options())
    assert [each["status"] for each in found["cells"]] == ["ok", "unfinished"]
    assert not found["complete"]


def test_only_what_can_be_is_planned():
    with pytest.raises(ConfigError, match="there is no kind 'pinned'"):
        pinned.probe(GPU, play, kinds=["pinned"])
    with pytest.raises(ConfigError, match="at least one byte"):
        pinned.probe(GPU, play, sizes=[0])


# -- churn --


def churning(make, *, seconds=16.0, pooled=False, per_s=8.0, read=lambda: {"used": 0}, **more):
    clock = FakeClock()
    counters = Counters([("", Scripted("s", lambda: read()))])
    asked = {"seconds": seconds, "per_s": per_s, "seed": 1, "pooled": pooled}
    return _churn_cell.measure(asked, counters, make, clock=clock, **more)


def test_blocks_are_taken_at_the_rate_and_all_given_back():
    Counted.alive = 0
    found = churning(Counted)
    assert (found["status"], found["errors"]) == ("ok", {})
    assert (found["takes"], found["takes_per_s"]) == (128, 8.0)
    assert found["gives"] == found["frees"] == 128 - 16  # those held at the end are no part of the rates
    assert found["take"]["count"] == 128
    assert Counted.alive == 0


def test_a_pool_allocates_what_it_needs_and_no_more():
    Counted.alive = 0
    unpooled, pooled = churning(Counted), churning(Counted, pooled=True)
    assert (unpooled["allocations"], pooled["takes"]) == (128, 128)
    assert 16 <= pooled["allocations"] < 80
    assert pooled["frees"] == 0
    assert Counted.alive == 0
    assert unpooled["sizes"] == pooled["sizes"]


def test_a_pool_within_a_small_budget_still_serves():
    budget = 8 << 20
    held = []

    class Sized(Counted):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            held.append(nbytes)
            assert sum(held) <= budget

        def free(self):
            super().free()
            held.remove(self.nbytes)

    found = churning(Sized, pooled=True, seconds=64.0, budget=budget)
    assert found["allocations"] < found["takes"] / 2
    assert held == []


def test_sizes_are_of_the_seed_and_within_their_bounds():
    import random

    sizes = _churn_cell.draw_sizes(random.Random(1), _churn_cell.BUDGET_NBYTES)
    assert sizes == _churn_cell.draw_sizes(random.Random(1), _churn_cell.BUDGET_NBYTES)
    assert sizes != _churn_cell.draw_sizes(random.Random(2), _churn_cell.BUDGET_NBYTES)
    assert all(64 << 10 <= size <= 8 << 20 and size % 4096 == 0 for size in sizes)
    assert max(sizes) > 4 << 20


def test_what_accumulates_has_a_slope_and_what_does_not_has_none():
    leak = {"bytes": 0}

    class Leaking(Counted):
        def free(self):
            super().free()
            leak["bytes"] += 1000

    found = churning(Leaking, seconds=64.0, read=lambda: {"used": leak["bytes"], "free": 7, "lost": "no"})
    slope = found["slopes"]["s.used"]
    assert slope["low"] <= slope["per_s"] <= slope["high"]
    assert slope["per_s"] == pytest.approx(8000, rel=0.02)
    assert (found["slopes"]["s.free"]["low"], found["slopes"]["s.free"]["high"]) == (0, 0)
    assert "s.lost" not in found["slopes"]
    assert found["missing"] == {"s.lost": "no"}
    assert found["left"]["s.used"] == 64 * 8 * 1000


def test_the_first_tenth_of_the_time_is_no_part_of_the_slope():
    samples = [(float(second), {"a": 10**6 if second < 2 else 5 * second}) for second in range(20)]
    assert _churn_cell.slopes(samples, 20.0)["a"]["per_s"] == pytest.approx(5)
    assert _churn_cell.slopes(samples[:2], 20.0) == {}


def test_errors_are_counted_by_code_and_end_a_cell_that_only_fails():
    found = churning(refuse)
    assert found["errors"] == {"cudaHostAlloc: 2 cudaErrorMemoryAllocation": 10}
    assert (found["status"], found["takes"], found["take"]) == ("failed", 0, None)
    assert found["reason"].startswith("10 refusals in a row: cudaHostAlloc: 2")
    calls = iter(range(10**6))
    some = churning(lambda nbytes: refuse(nbytes) if next(calls) % 5 == 0 else Counted(nbytes))
    assert some["status"] == "ok"
    assert some["errors"] == {"cudaHostAlloc: 2 cudaErrorMemoryAllocation": 26}


def test_the_cells_of_churn_and_what_moves_beside_the_control():
    def run(request, timeout_s):
        steep = {"per_s": 9.0, "low": 8.0, "high": 10.0, "count": 50}
        flat = {"per_s": 0.1, "low": -1.0, "high": 1.2, "count": 50}
        line = flat if request["kind"] == "control" or request["pooled"] else steep
        return {"status": "ok", "reason": None, "takes_per_s": 5.0, "take": {"p50_ms": 1.0}, "slopes": {"a": line}}

    found = churn.probe(GPU, run, seconds=2.0, **options())
    names = [each["kind"] for each in found["cells"]]
    assert names == ["control", "default", "default-pooled", "registered", "registered-pooled"]
    moving = list(churn.moving(found))
    assert [(line["kind"], line["column"], line["control"]["high"]) for line in moving] == [
        ("default", "a", 1.2),
        ("registered", "a", 1.2),
    ]
    row = next(churn.csv_rows(found))
    assert (row["take_p50_ms"], row["a low"]) == (1.0, -1.0)
    with pytest.raises(ConfigError, match="takes some time"):
        churn.probe(GPU, run, seconds=0)


# -- bandwidth --


def test_the_cells_of_bandwidth():
    asked = []

    def run(request, timeout_s):
        asked.append(request)
        return {"status": "ok", "reason": None, "rows": []}

    found = bandwidth.probe(GPU, run, threads=[1, 10**6], **options())
    assert [request["kind"] for request in asked] == list(bandwidth.NAMES)
    assert {request["device"] for request in asked} == {0}
    assert asked[-1]["threads"] == [1]
    assert "more than 1 threads left out" in found["notes"][0]
    on_cpu = bandwidth.probe(CPU, run, threads=[1], **options())
    ok = [each["kind"] for each in on_cpu["cells"] if each["status"] == "ok"]
    assert ok == ["host_copy"]
    with pytest.raises(ConfigError, match="multiple of 16"):
        bandwidth.probe(GPU, run, sizes=[100])


def test_host_copies_copy_every_block_of_every_thread(monkeypatch):
    copied = []

    def memmove(target, source, nbytes):
        copied.append((target, source, nbytes))

    # Two ticks a pass; the first pass of each row, which is not counted, takes a hundred times as long.
    ticks = itertools.accumulate(itertools.cycle([0, 100, 0, 1, 0, 1, 0, 1]))
    monkeypatch.setattr(_host_copies.ctypes, "memmove", memmove)
    rows = list(_host_copies.measure([4096, 16384], [1, 2], 3, region=16384, clock=lambda: next(ticks)))
    assert [(row["nbytes"], row["threads"]) for row in rows] == [(4096, 1), (4096, 2), (16384, 1)]
    assert {rate for row in rows for rate in row["bytes_per_s"].values()} == {16384}
    assert len(copied) == 4 * (4 + 4 + 1)
    targets, sources, _ = (set(column) for column in zip(*copied, strict=True))
    assert len(targets) == len(sources) == 4
    assert not targets & sources


def test_an_older_baseline_is_shown_beside_the_new_one():
    old = {"measured": "yesterday", "ceiling": {"to_device_bytes_per_s": 5e9, "host_copy_bytes_per_s": None}}
    new = {"ceiling": {"to_device_bytes_per_s": 6e9, "to_host_bytes_per_s": None, "host_copy_bytes_per_s": 7e9}}
    assert list(bandwidth.against(old, new)) == [
        "host to device: 6.0 GB/s (was 5.0 GB/s, yesterday)",
        "host to host: 7.0 GB/s",
    ]
    assert list(bandwidth.against(old, None)) == []


# -- real children, without a GPU --


def test_a_real_pageable_block_shows_in_the_resident_set(nothing_left):
    asked = {"probe": "pinned", "kind": "pageable", "device": None, "nbytes": 64 << 20, "hold_s": 0.0}
    patience = Patience(eps_nbytes=4 << 20, window_s=0.1, timeout_s=5.0, interval_s=0.02)
    found = children.run({**asked, "patience": asdict(patience)}, 60)
    assert found["status"] == "ok", found
    assert abs(found["deltas"]["process.rss"] - (64 << 20)) < 4 << 20
    assert found["recovery_s"] is not None
    assert found["missing"]["cuda"] == "no CUDA device was named"


@pytest.mark.parametrize("kind", ["control", "pageable", "mlock"])
@pytest.mark.skipif(sys.platform == "win32", reason="mlock")
def test_real_churn(kind, nothing_left):
    asked = {"probe": "churn", "kind": kind, "pooled": True, "device": None, "seconds": 0.2, "per_s": 0, "seed": 1}
    found = children.run(asked, 60)
    if kind == "mlock" and found["status"] == "unavailable":
        pytest.skip(found["reason"])
    assert found["status"] == "ok", found
    assert found["takes"] >= found["allocations"] > 0
    assert "process.rss" in found["slopes"]


def test_real_host_copies(nothing_left):
    asked = {"probe": "bandwidth", "kind": "host_copy", "device": None, "sizes": [4096], "threads": [1, 2]}
    found = children.run({**asked, "repeats": 2, "region": 65536}, 60)
    assert [(row["threads"], row["nbytes"]) for row in found["rows"]] == [(1, 4096), (2, 4096)]
    assert all(row["bytes_per_s"]["min"] > 0 for row in found["rows"])


# -- the command line --


def test_pinned_from_the_command_line(tmp_path, capsys, nothing_left):
    argv = ["probe", "pinned", "--device", "cpu", "--sizes", "1,2MiB", "--kinds", "pageable,default", "--settle", "0.2"]
    assert cli.main([*argv, "--out", str(tmp_path / "d")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("no GPU was probed: device cpu was asked for\n")
    assert "RSS: process.rss (psutil.Process().memory_info(): rss)" in out
    assert "default of 1.0 MB, 2.1 MB: unavailable: needs a GPU: device cpu was asked for" in out
    assert "probe pinned 6/6 default 2.1 MB" in err
    found = json.loads((tmp_path / "d" / "probe-pinned.json").read_text(encoding="utf-8"))
    assert [(each["kind"], each["nbytes"]) for each in found["cells"]] == [
        (kind, nbytes) for nbytes in (MB, 2 << 20) for kind in ("control", "pageable", "default")
    ]
    with (tmp_path / "d" / "probe-pinned.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "ok", "unavailable"] * 2
    assert int(rows[1]["rss"]) == found["cells"][1]["net"]["process.rss"]
    assert cli.main([*argv, "--out", str(tmp_path / "d")]) == 2
    assert "exists; --overwrite replaces it" in capsys.readouterr().err


def test_json_goes_to_standard_output_alone(capsys, monkeypatch):
    monkeypatch.setattr(children, "run", lambda request, timeout_s, **more: play(request, timeout_s))
    assert cli.main(["probe", "pinned", "--device", "cpu", "--sizes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["probe"]) == ("framepipe.probe/1", "pinned")
    assert found["provenance"]["command"].startswith("framepipe")


def test_churn_from_the_command_line(capsys, monkeypatch):
    asked = []

    def run(request, timeout_s, **more):
        asked.append(request)
        line = {"per_s": 9e6, "low": 8e6, "high": 1e7, "count": 50}
        rates = {"takes_per_s": 5.0, "allocations_per_s": 4.0, "frees_per_s": 3.0, "errors": {"mlock: 12 ENOMEM": 2}}
        return {"status": "ok", "reason": None, "take": {"p50_ms": 1.5}, "slopes": {"process.rss": line}, **rates}

    monkeypatch.setattr(children, "run", run)
    argv = ["probe", "churn", "--device", "cpu", "--minutes", "0.5", "--rate", "7", "--seed", "3", "--kinds", "mlock"]
    assert cli.main(argv) == 0
    assert [(request["seconds"], request["per_s"], request["seed"]) for request in asked] == [(30, 7, 3)] * 2
    out = capsys.readouterr().out
    assert "2 x mlock: 12 ENOMEM" in out
    assert "+9.0 MB" in out
    assert "says nothing about why" in out


def test_bandwidth_keeps_a_whole_measurement_as_the_baseline(tmp_path, capsys, monkeypatch):
    def run(request, timeout_s, **more):
        rate = {"median": 7e9, "min": 6e9, "max": 8e9}
        return {"status": "ok", "reason": None, "rows": [{"threads": 1, "nbytes": 65536, "bytes_per_s": rate}]}

    monkeypatch.setattr(children, "run", run)
    path = tmp_path / "data" / "baseline.json"
    argv = ["probe", "bandwidth", "--device", "cpu", "--baseline", str(path)]
    for only in (["--no-save"], ["--kinds", "host_copy"], ["--sizes", "64KiB"]):
        assert cli.main([*argv, *only]) == 0
        assert not path.exists()
    assert cli.main(argv) == 0
    assert "host to host: 7.0 GB/s\n" in capsys.readouterr().out
    assert bandwidth.baseline(path, key=bandwidth.baselines.cpu_identity())["ceiling"]["host_copy_bytes_per_s"] == 7e9
    assert cli.main([*argv, "--kinds", "host_copy", "--save"]) == 0
    assert "host to host: 7.0 GB/s (was 7.0 GB/s, 2" in capsys.readouterr().out
    path.write_text("{}", encoding="utf-8")
    assert cli.main(argv) == 2


def test_half_a_measurement_is_no_baseline(tmp_path, capsys, monkeypatch):
    rows = [{"threads": 1, "nbytes": 65536, "bytes_per_s": {"median": 7e9, "min": 6e9, "max": 8e9}}]
    unfinished = {"status": "unfinished", "reason": "interrupted", "rows": rows}
    monkeypatch.setattr(children, "run", lambda request, timeout_s, **more: unfinished)
    argv = ["probe", "bandwidth", "--device", "cpu", "--baseline", str(tmp_path / "b.json"), "--save"]
    assert cli.main(argv) == 1
    assert not (tmp_path / "b.json").exists()
    assert "host_copy: unfinished: interrupted" in capsys.readouterr().out


def test_what_was_measured_is_shown_though_it_cannot_be_written(tmp_path, capsys, monkeypatch):
    from framepipe.probe import record

    def write(*args):
        raise PermissionError(13, "Permission denied", "x.json")

    monkeypatch.setattr(children, "run", lambda request, timeout_s, **more: play(request, timeout_s))
    monkeypatch.setattr(record, "write", write)
    assert cli.main(["probe", "pinned", "--device", "cpu", "--sizes", "1", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "cuda.free (cudaMemGetInfo: free)" in out
    assert "framepipe: error: cannot be written: [Errno 13] Permission denied: 'x.json'" in err


def test_a_record_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    failed = {"status": "failed", "reason": f"cannot open {tmp_path / 'lib.so'}: no such file"}
    monkeypatch.setattr(children, "run", lambda request, timeout_s, **more: failed)
    argv = ["probe", "pinned", "--device", "cpu", "--sizes", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["framepipe", *argv])
    assert cli.main(argv) == 1
    found = json.loads((tmp_path / "probe-pinned.json").read_text(encoding="utf-8"))
    assert found["provenance"]["command"].endswith(f"--sizes 1 --out …/{tmp_path.name}")
    assert found["cells"][0]["reason"] == "cannot open …/lib.so: no such file"
    for path in tmp_path.iterdir():
        assert str(tmp_path.parent) not in path.read_text(encoding="utf-8")


def test_nothing_measured_is_no_success(capsys, monkeypatch):
    failed = {"status": "failed", "reason": "the child process ended with status 1"}
    monkeypatch.setattr(children, "run", lambda request, timeout_s, **more: failed)
    assert cli.main(["probe", "pinned", "--device", "cpu", "--sizes", "1"]) == 1
    assert "control, pageable, mlock of 1.0 MB: failed: the child process ended" in capsys.readouterr().out


def test_the_help_names_every_kind(capsys):
    for command, kinds in (("pinned", pinned.KINDS), ("bandwidth", bandwidth.NAMES)):
        assert cli.main(["probe", command, "--help"]) == 0
        named = capsys.readouterr().out.split("Kinds:")[1].split(".")[0].split(",")
        assert [name.strip() for name in named] == list(kinds)
    assert cli.main(["probe"]) == 2
    assert "\n  churn " in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--sizes", "many"], ["--kinds", "pinned"], ["--device", "gpu"], ["--sizes", ""]])
def test_wrong_usage(argv, capsys):
    assert cli.main(["probe", "pinned", *argv]) == 2
    assert "framepipe: error:" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_finished_cells_and_ends_the_child(tmp_path):
    argv = ["probe", "pinned", "--device", "cpu", "--sizes", "1", "--kinds", "pageable", "--settle", "0.2"]
    command = [sys.executable, "-m", "framepipe", *argv, "--hold", "600", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=children._environment()
    ) as process:
        line = next(line for line in process.stderr if "held for 600 s by process" in line)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not alive(int(line.rsplit(maxsplit=1)[1]))
    found = json.loads((tmp_path / "probe-pinned.json").read_text(encoding="utf-8"))
    assert not found["complete"]
    assert [(each["kind"], each["status"]) for each in found["cells"]] == [
        ("control", "ok"),
        ("pageable", "unfinished"),
    ]
