"""`framepipe compare`: what is noise, what is not, and what the exit status says of it."""

from __future__ import annotations

import copy
import itertools
import json
import random
from statistics import median

import pytest
from bench_records import record, run_report, without_result
from hypothesis import given
from hypothesis import strategies as st

from framepipe import cli
from framepipe.bench.compare import BETTER, FIRST_ONLY, NOISE, SECOND_ONLY, WORSE, compare, load
from framepipe.bench.noise import differs, rank_sum_p
from framepipe.errors import ConfigError


def slowed(made, strategy, share):
    """The record with every rate of a strategy multiplied."""
    made = copy.deepcopy(made)
    for cell in made["cells"]:
        if cell["axes"]["strategy"] == strategy:
            for run in cell["runs"]:
                run["fps"] *= share
    return made


def verdicts(found, measure="fps"):
    return {row.id: row.verdict for row in found.rows if row.measure == measure}


# -- the rule --


def test_ranges_apart_and_medians_apart():
    assert differs([100, 101, 102], [90, 91, 92])
    assert differs([90, 91, 92], [100, 101, 102])
    assert not differs([100, 101, 102], [98, 98.5, 99]), "apart, but by less than 3 %"
    assert differs([100, 101, 102], [97.5, 98, 98.5], tolerance=0.02)
    assert not differs([100, 110, 120], [80, 90, 101]), "the ranges overlap, and three are few"
    assert not differs([100, 105, 110], [85, 90, 96]), "4 apart: three each come so by chance"
    assert differs([100, 105, 110], [83, 88, 94]), "6 apart, and the wider range is 11"
    assert not differs([100, 104], [98.5, 96, 93]), "two, too"


def test_ranks_decide_where_there_are_enough_repeats():
    first = [100, 101, 102, 103, 104, 105]
    second = [90, 91, 92, 93, 94, 100.5]
    assert max(second) > min(first)
    assert differs(first, second)
    few, many = first[:4], [*second, 89, 88, 87]
    assert rank_sum_p(few, many) < 0.05
    assert not differs(few, many), "four repeats are too few"
    assert not differs([100, 90, 104, 93, 108], [96, 92, 101, 89, 99]), "p is far above 0.05"


def test_one_repeat_leaves_the_tolerance():
    assert differs([100], [96])
    assert not differs([100], [98])
    assert not differs([], [1.0])
    assert not differs([1.0], [])
    assert differs([0.0], [5.0])
    assert not differs([0.0], [0.0])


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        # Deals at least as far out, counted by hand: 1 of 252, 1 + 1 + 2 of 252, 1 + 1 of 210; twice, for two sides.
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([1, 2, 3, 4, 7], [5, 6, 8, 9, 10], 8 / 252),
        ([1, 2, 3, 5], [4, 6, 7, 8, 9, 10], 4 / 210),
        ([1, 2], [1, 2], 1.0),
        ([7, 7, 7], [7, 7, 7], 1.0),
    ],
)
def test_p_is_exact(first, second, p):
    assert rank_sum_p(first, second) == pytest.approx(p)
    assert rank_sum_p(second, first) == pytest.approx(p)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_p_is_what_dealing_all_ways_gives(first, second):
    """By brute force: how often a deal of the pooled values is as far out as the one seen, ties and all."""
    pool = [*first, *second]

    def won(indices):
        ours, theirs = [pool[i] for i in indices], [pool[i] for i in range(len(pool)) if i not in indices]
        return sum((a > b) + (a == b) / 2 for a, b in itertools.product(ours, theirs))

    deals = [won(each) for each in itertools.combinations(range(len(pool)), len(first))]
    seen = won(tuple(range(len(first))))
    tails = sum(each <= seen for each in deals), sum(each >= seen for each in deals)
    assert rank_sum_p(first, second) == pytest.approx(min(1.0, 2 * min(tails) / len(deals)))


@pytest.mark.parametrize(("repeats", "deviation"), [(3, 8), (5, 2)])
def test_noise_is_rarely_called_a_difference(repeats, deviation):
    """Repeats of one distribution, many times over: 3 % apart and beyond its noise is for few of them."""
    rng = random.Random(3)
    pairs = [[[rng.gauss(100, deviation) for _ in range(repeats)] for _ in range(2)] for _ in range(1000)]
    wrong = sum(differs(first, second) for first, second in pairs)
    assert 0 < wrong < 0.03 * len(pairs)
    assert all(abs(median(a) - median(b)) > 3 * 0.9 for a, b in pairs if differs(a, b))


# -- benches --


def test_the_same_bench_again_is_noise():
    found = compare(record(seed=1), record(seed=2))
    assert found.kind == "bench"
    assert set(verdicts(found).values()) == {NOISE}
    assert set(verdicts(found, "pinned_bytes_taken").values()) == {NOISE}
    assert found.provenance == ()


def test_a_planted_slowdown_is_found_and_nothing_else():
    found = compare(record(seed=1), slowed(record(seed=2), "mapped", 0.9))
    worse = {row.id for row in found.rows if row.verdict == WORSE}
    assert worse == {row.id for row in found.rows if row.id.startswith("mapped-") and row.measure == "fps"}
    assert len(worse) == 3
    back = compare(slowed(record(seed=2), "mapped", 0.9), record(seed=1))
    assert {row.id for row in back.rows if row.verdict == BETTER} == worse
    (row,) = (row for row in found.rows if row.verdict == WORSE and "2160p" in row.id)
    assert row.ratio == pytest.approx(row.second / row.first) == pytest.approx(0.9, rel=0.03)


def test_the_tolerance_is_taken():
    slower = slowed(record(seed=2), "mapped", 0.9)
    assert set(verdicts(compare(record(seed=1), slower, tolerance=0.2)).values()) == {NOISE}


def test_more_memory_is_worse():
    more = record(seed=1)
    for run in more["cells"][0]["runs"]:
        run["pinned_bytes_taken"] *= 2
    more["cells"][1]["summary"]["vram_peak_bytes"] //= 2
    found = compare(record(seed=1), more)
    changed = {(row.id, row.measure, row.verdict) for row in found.rows if row.verdict != NOISE}
    first, second = (cell["id"] for cell in more["cells"][:2])
    assert changed == {(first, "pinned_bytes_taken", WORSE), (second, "vram_peak_bytes", BETTER)}


def test_cells_of_one_side():
    first, second = record(), record()
    gone, failed, absent = (first["cells"][i]["id"] for i in (0, 1, 2))
    del second["cells"][0]
    second["cells"][0] = {**without_result("x", "failed", "no memory"), "id": failed}
    second["cells"][1] = {**without_result("x", "unavailable", "no driver"), "id": absent}
    rows = {row.id: row for row in compare(first, second).rows if row.measure == "fps"}
    assert (rows[gone].verdict, rows[gone].reason) == (FIRST_ONLY, None)
    assert (rows[failed].verdict, rows[failed].reason) == (WORSE, "failed: no memory")
    assert (rows[absent].verdict, rows[absent].reason) == (FIRST_ONLY, "unavailable: no driver")
    back = {row.id: row for row in compare(second, first).rows if row.measure == "fps"}
    assert [back[name].verdict for name in (gone, failed, absent)] == [SECOND_ONLY, BETTER, SECOND_ONLY]
    neither = [cell["id"] for cell in first["cells"] if cell["status"] in ("unavailable", "refused")]
    assert neither
    assert not set(neither) & rows.keys()


def test_what_was_not_the_same_is_told():
    second = record()
    second["provenance"]["gpu"]["driver"] = "590.1"
    second["provenance"]["clips"][0]["sha256"] = "cd34" * 16
    second["provenance"]["parameters"]["frames"] = 900
    second["provenance"]["versions"]["numpy"] = "2.4.0"
    second["provenance"] |= {"seconds": 1.0, "started": "2032-01-01", "load": [9.0], "command": "another"}
    second["cells"][0]["hash"] = "0" * 64
    found = {name: (first, then) for name, first, then in compare(record(), second).provenance}
    assert found == {
        "gpu.driver": ("570.86.15", "590.1"), "clips.0.sha256": ("ab12" * 16, "cd34" * 16),
        "parameters.frames": (600, 900), "versions.numpy": ("2.3.1", "2.4.0"),
        f"outputs of {second['cells'][0]['id']}": ("5f1c" * 16, "0" * 64),
    }  # fmt: skip


# -- run reports --


def test_run_reports_are_compared_by_the_tolerance():
    first = run_report()
    second = run_report(fps=150.0, memory={"pinned_bytes": 0, "rss_peak_bytes": 91 * 10**6})
    second["stages"]["motion"]["p50_ms"] = 1.5
    second["stages"]["draw"] = {"count": 1, "p50_ms": 1.0, "p95_ms": None, "p99_ms": None, "max_ms": None}
    found = compare(first, second)
    assert found.kind == "run"
    assert {(row.id, row.measure): row.verdict for row in found.rows} == {
        ("run", "fps"): WORSE, ("stage motion", "p50_ms"): BETTER, ("stage motion", "p95_ms"): NOISE,
        ("stage draw", "p50_ms"): SECOND_ONLY, ("memory", "pinned_bytes"): NOISE, ("memory", "rss_peak_bytes"): NOISE,
    }  # fmt: skip


def test_times_of_staging_are_measures_and_no_parameters():
    first, second = ({"strategy": "pooled", "copy_ms": {"p50_ms": p50}} for p50 in (1.0, 2.0))
    found = compare(run_report(staging=first), run_report(staging=second))
    assert found.provenance == ()
    assert [(row.id, row.measure) for row in found.rows if row.verdict == WORSE] == [("staging", "copy p50_ms")]


def test_a_run_that_failed_is_worse():
    found = compare(run_report(), run_report(exit="failed"))
    assert [(row.measure, row.reason) for row in found.rows if row.verdict == WORSE] == [
        ("exit", "complete, then failed")
    ]
    assert compare(run_report(exit="failed"), run_report()).count(WORSE) == 0


def test_what_runs_were_made_with():
    second = run_report(device={"kind": "cuda", "name": "A GPU", "why": "asked for"}, versions={"framepipe": "0.2.0"})
    second["sources"][0]["uri"] = "b.mp4"
    names = [name for name, _, _ in compare(run_report(), second).provenance]
    assert names == ["device.kind", "device.name", "versions.framepipe", "sources.0"]


# -- the command --


@pytest.fixture
def saved(tmp_path):
    def save(name, made):
        path = tmp_path / name
        path.write_text(json.dumps(made), encoding="utf-8")
        return str(path)

    return save


def test_exit_0_where_nothing_is_worse(saved, capsys):
    a, b = saved("a.json", record(seed=1)), saved("b.json", record(seed=2))
    assert cli.main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "not the same" not in out
    assert "0 worse" in out
    assert "within noise" in out
    assert "tolerance 3 %; repeats decide what is noise" in out


def test_exit_0_where_something_is_better(saved):
    assert cli.main(["compare", saved("a.json", slowed(record(), "mapped", 0.8)), saved("b.json", record())]) == 0


def test_exit_1_where_something_is_worse(saved, capsys):
    second = slowed(record(seed=2), "mapped", 0.8)
    second["provenance"]["gpu"]["driver"] = "590.1"
    assert cli.main(["compare", saved("a.json", record(seed=1)), saved("b.json", second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["not the same:", "  gpu.driver  570.86.15 -> 590.1"]
    assert lines[3].startswith("worse"), "the worst news is first"
    assert "mapped-" in lines[3]
    assert "fps -> " in lines[3]
    assert " %)" in lines[3]
    assert lines[-2].startswith("3 worse, ")


def test_as_json(saved, capsys):
    a, b = saved("a.json", record(seed=1)), saved("b.json", slowed(record(seed=2), "mapped", 0.8))
    assert cli.main(["compare", a, b, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "framepipe.compare/1"
    assert told["counts"][WORSE] == 3
    assert len(told["rows"]) == sum(told["counts"].values())
    assert set(told["rows"][0]) == {"id", "measure", "first", "second", "ratio", "verdict", "reason"}


def test_the_tolerance_of_the_command_line(saved):
    a, b = saved("a.json", run_report()), saved("b.json", run_report(fps=180.0))
    assert cli.main(["compare", a, b]) == 1
    assert cli.main(["compare", a, b, "--tolerance", "0.2"]) == 0
    assert cli.main(["compare", a, b, "--tolerance", "-1"]) == 2
    assert cli.main(["compare", a, b, "--tolerance", "nan"]) == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json", "is not JSON"),
        ("[]", "neither a bench"),
        ("{}", "it has no schema"),
        ('{"schema": "framepipe.bench/9"}', "its schema is 'framepipe.bench/9'"),
        (json.dumps(run_report()), "framepipe.run/1 cannot be compared: give two records of one kind"),
        ('{"schema": "framepipe.bench/1", "cells": []}', "nothing in common"),
        ('{"schema": "framepipe.bench/1", "cells": [{}]}', "not as its schema says"),
        ('{"schema": "framepipe.bench/1"}', "not as its schema says"),
        (None, "cannot be read"),
    ],
)
def test_exit_2_where_nothing_can_be_compared(saved, tmp_path, capsys, content, why):
    path = tmp_path / "b.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert cli.main(["compare", saved("a.json", record()), str(path)]) == 2
    told = capsys.readouterr()
    assert why in told.err
    assert told.out == ""


def test_two_empty_run_reports_are_not_comparable():
    with pytest.raises(ConfigError, match="nothing in common"):
        compare({"schema": "framepipe.run/1"}, {"schema": "framepipe.run/1"})


def test_a_file_with_a_mark_at_its_start_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(run_report()), encoding="utf-8-sig")
    assert load(path)["fps"] == 200.0
