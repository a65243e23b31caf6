"""`framepipe.bench.runner` with children that are functions: what runs in which order, and what becomes of it."""

from __future__ import annotations

import csv
import io
import itertools
import json
from typing import Any

import pytest

from framepipe.bench import output, record, table
from framepipe.bench._gate import Room
from framepipe.bench._launch import Outcome
from framepipe.bench.cells import AXES, Choice, Input, plan, size_input, slug
from framepipe.bench.options import Options
from framepipe.bench.runner import Bench
from framepipe.errors import ConfigError, OutputExistsError

CLIP = Input(name="clip", kind="clip", uri="/clip.mp4", width=64, height=48, pix_fmt="yuv420p", nbytes=4608,
             facts=({"name": "clip.mp4", "sha256": "00"},))  # fmt: skip
OWN = Input(name="own", kind="pipeline", uri="/own.yaml", nbytes=4608, staging={"batch": 8, "batch_timeout_s": 0.5})
ONE = Choice(modes=("staging",), batch=(1,), fillers=("auto",), copy_threads=(1,), depth=(2,), slots=("auto",))
"""One axis alone: the strategies."""
MACHINE: dict[str, Any] = {
    "device": {"kind": "cpu", "number": 0, "name": "x", "why": "auto: there is no GPU", "shared": True},
    "gpu": None,
    "strategies": {"pooled": None, "direct": None, "pageable": None, "mapped": "it needs a GPU"},
    "sensors": {"procfs.rss": "/proc/self/status: VmRSS"},
    "missing": {},
    "versions": {"av": "18.1"},
    "cpus": 2,
    "cache_bytes": 1 << 20,
}


def measured(fps: float, **changes: Any) -> dict[str, Any]:
    """One entry of ``runs``."""
    duration = {"count": 200, "p50": 0.1, "p95": 0.2, "p99": 0.3, "max": 0.4}
    return {
        "frames": 200, "seconds": 200 / fps, "fps": fps, "bytes_per_s": round(fps * 4608), "cpu_s": 0.1,
        "start_s": 0.02, "copy_ms": duration, "allocate_ms": None, "release_ms": None, "upload_ms": None,
        "pinned_bytes_asked": 100, "pinned_bytes_taken": 128, "pinned_allocations": 1, "pageable_bytes": 0,
        "memory": {}, "missing": {}, "timeline": {"t_s": [], "columns": {}, "marks": []}, "bottleneck": "staging",
        "warnings": [], **changes,
    }  # fmt: skip


def asked_for(machine: dict[str, Any], names: list[str]) -> dict[str, Any]:
    strategies = machine["strategies"]
    return {**machine, "strategies": {name: strategies[name] for name in names or strategies}}


class Children:
    """Stands for `launch`: answers as told and remembers every request. ``now`` is the clock, a second a child."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.stop_after: int | None = None
        self.now = 0.0

    @property
    def stopping(self) -> bool:
        return self.stop_after is not None and len(self.asked) >= self.stop_after

    def __call__(self, request: Any, stopping: Any, timeout_s: float) -> Outcome:
        do = request["do"]
        name = request["staging"]["strategy"] if "staging" in request else ""
        self.asked.append((do, name))
        self.requests.append(request)
        self.now += 1.0
        if stopping():
            return Outcome(stopped=True)
        answer = self.answers.get(f"{do}_{name}", self.answers.get(do))
        if isinstance(answer, Outcome):
            return answer
        if callable(answer):
            return Outcome(answer(request))
        if do == "machine":
            return Outcome(asked_for(answer or MACHINE, request["strategies"]))
        if do == "measure":
            return Outcome(answer or measured(1000.0))
        return Outcome(answer or {"hashes": [f"{n}" for n in range(request["parity_frames"])]})

    def count(self, do: str) -> int:
        return sum(each == do for each, _ in self.asked)


def bench(children: Children, inputs: Any = (CLIP,), choice: Choice = ONE, **options: Any) -> Bench:
    more = {key: options.pop(key) for key in ("previous", "progress", "save") if key in options}
    return Bench(
        Options(inputs=tuple(inputs), choice=choice, **options),
        launch=children,
        stopping=lambda: children.stopping,
        clock=lambda: children.now,
        room=lambda: Room(8 << 30),
        **more,
    )


def cells_of(found: Any) -> dict[str, Any]:
    return {cell["axes"]["strategy"]: cell for cell in found["cells"]}


# -- the plan --


def test_one_axis_at_a_time_is_varied():
    cells = plan([CLIP], ["pooled", "direct"], Choice(), device="cuda:0", shared=False, cpus=4)
    staging = [cell for cell in cells if cell.axes.mode == "staging"]
    assert [cell.varies for cell in staging[:2]] == [(), ("strategy",)]
    assert all(len(cell.varies) == 1 for cell in staging[1:])
    swept = {name: [getattr(cell.axes, name) for cell in staging if cell.varies == (name,)] for name in AXES}
    assert swept == {"batch": [4, 16], "depth": [1, 3], "slots": [], "fillers": [1, 2, 4], "copy_threads": [2, 4]}
    assert all(cell.axes.strategy == "pooled" for cell in staging if cell.varies not in ((), ("strategy",)))
    pipeline = [cell for cell in cells if cell.axes.mode == "pipeline"]
    assert [cell.axes.strategy for cell in pipeline] == ["pooled", "direct"], "few cells by default"
    assert len({cell.id for cell in cells}) == len(cells)


def test_what_is_asked_for_is_varied_everywhere_and_beyond_the_cpus():
    choice = Choice(batch=(4, 8), fillers=("auto", 9))
    cells = plan([CLIP, size_input(1920, 1080)], ["direct"], choice, device="cpu", shared=True, cpus=2)
    for mode, name in (("staging", "clip"), ("pipeline", "clip"), ("staging", "1080p")):
        own = [cell for cell in cells if (cell.axes.mode, cell.axes.input) == (mode, name)]
        assert own[0].axes.batch == 4 and own[0].varies == (), "the base is among what is asked for"
        assert [cell.axes.batch for cell in own if cell.varies == ("batch",)] == [8]
        assert [cell.axes.fillers for cell in own if cell.varies == ("fillers",)] == [9]
    assert ("pipeline", "1080p") not in {cell.group for cell in cells}, "there is nothing to decode"


def test_a_pipelines_own_staging_is_its_base():
    (cell,) = plan([OWN], ["pooled"], Choice(copy_threads=(1,), fillers=("auto",), batch=(8,)),
                   device="cpu", shared=True, cpus=2)  # fmt: skip
    assert cell.axes.batch == 8 and cell.axes.mode == "pipeline"


def test_names_of_inputs_can_stand_in_an_id():
    assert slug("my clip (1).mp4") == "my-clip-1-.mp4"
    assert slug("…") == "input"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frames": 1}, "frames is 1"),
        ({"repeat": 0}, "repeat is 0"),
        ({"warmup": 0}, "warmup is 0"),
        ({"inputs": ()}, "nothing to measure"),
    ],
)
def test_options_that_cannot_be(options, text):
    with pytest.raises(ConfigError, match=text):
        Options(**{"inputs": (CLIP,), **options})


# -- the order --


def test_parity_comes_before_any_timing_and_every_second_round_is_reversed():
    children = Children()
    found = bench(children, repeat=3).run()
    assert found["complete"]
    does = [do for do, _ in children.asked]
    assert does == ["machine", "reference", *["parity"] * 3, *["measure"] * 9]
    rounds = [[name for _, name in children.asked[5 + n : 8 + n]] for n in (0, 3, 6)]
    assert rounds[0] == ["pooled", "direct", "pageable"] == rounds[1][::-1] == rounds[2]
    assert {cell["status"] for cell in found["cells"]} == {"ok", "unavailable"}


def test_warm_up_and_frames_are_whole_batches_and_fill_every_slot_twice():
    children = Children()
    bench(children, choice=Choice(modes=("staging",), batch=(3,), slots=(7,), fillers=(1,), copy_threads=(1,)),
          strategies=("pooled",), frames=200, warmup=32).run()  # fmt: skip
    request = children.requests[-1]
    assert (request["warmup"], request["frames"]) == (42, 201)
    assert request["staging"] == {"strategy": "pooled", "batch": 3, "depth": 2, "slots": 7, "fillers": 1,
                                  "copy_threads": 1}  # fmt: skip
    assert request["distinct"] * CLIP.nbytes >= 2 * MACHINE["cache_bytes"]


def test_a_pipelines_batch_timeout_and_device_travel():
    children = Children()
    bench(children, [Input(**{**vars(OWN), "device": "cpu"})], Choice(), keep_sinks=True).run()
    assert children.requests[0]["device"] == "cpu"
    request = children.requests[-1]
    assert request["staging"]["batch_timeout_s"] == 0.5
    assert request["folder"] and request["keep_sinks"]
    assert children.count("reference") == 0, "nobody knows what a person's own pipeline delivers"


def test_the_time_left_goes_down_to_nothing():
    steps: list[Any] = []
    children = Children()
    bench(children, repeat=2, progress=steps.append).run()
    known = [step for step in steps if step.left_s is not None]
    assert known[0].left_s == 9.0, "a second a child: three for parity, six to measure"
    assert [step.left_s for step in known] == sorted((step.left_s for step in known), reverse=True)
    assert known[-1].left_s == 1.0 and {step.total for step in known} == {11}


def test_what_is_refused_or_failed_takes_no_time():
    steps: list[Any] = []
    children = Children(parity_direct={"hashes": ["wrong"]}, measure_pooled=Outcome(reason="crashed"))
    bench(children, repeat=3, progress=steps.append).run()
    assert children.count("measure") == 4
    assert (steps[-1].done, steps[-1].total) == (len(children.asked) - 1, len(children.asked))


# -- the gates --


def test_a_strategy_that_is_not_here_is_a_row_with_the_reason():
    children = Children()
    found = bench(children).run()
    mapped = cells_of(found)["mapped"]
    assert (mapped["status"], mapped["reason"], mapped["runs"]) == ("unavailable", "it needs a GPU", [])
    assert "mapped" not in {name for _, name in children.asked}
    assert "not here: mapped (it needs a GPU)" in list(table.closing(found))


def test_wrong_outputs_are_never_timed():
    def flipped(request: Any) -> dict[str, Any]:
        return {"hashes": ["0", "1", "x", *map(str, range(3, request["parity_frames"]))]}

    children = Children(parity_direct=flipped)
    found = bench(children).run()
    direct = cells_of(found)["direct"]
    assert direct["status"] == "refused" and "picture 2" in direct["reason"] and "1 of" in direct["reason"]
    assert ("measure", "direct") not in children.asked
    assert cells_of(found)["pooled"]["status"] == "ok"
    assert cells_of(found)["pooled"]["hash"] == cells_of(found)["pageable"]["hash"] != direct["hash"]
    assert table.failed(found)


def test_pictures_that_are_missing_are_wrong_too():
    found = bench(Children(parity_direct={"hashes": ["0", "1"]})).run()
    assert "2 pictures came instead of" in cells_of(found)["direct"]["reason"]


def test_of_a_persons_own_pipeline_what_most_deliver_is_right():
    found = bench(Children(parity_pooled={"hashes": ["other"]}), [OWN], Choice(batch=(8,), fillers=(1,))).run()
    assert cells_of(found)["pooled"]["status"] == "refused"
    assert cells_of(found)["direct"]["status"] == cells_of(found)["pageable"]["status"] == "ok"


def test_without_a_reference_nothing_is_measured():
    children = Children(reference=Outcome(reason="clip.mp4: no picture could be decoded"))
    found = bench(children).run()
    assert children.count("measure") == children.count("parity") == 0
    assert {cell["status"] for cell in found["cells"]} == {"failed", "unavailable"}
    assert "no picture" in cells_of(found)["pooled"]["reason"]


def test_too_little_memory_is_said_before_trying():
    children = Children()
    one = bench(children, [size_input(3840, 2160)], Choice(slots=(4, 4000)), strategies=("pooled",))
    found = one.run()
    refused = [cell for cell in found["cells"] if cell["status"] == "refused"]
    assert [cell["axes"]["slots"] for cell in refused] == [4000]
    assert "4000 slots of 1" in refused[0]["reason"] and "of the 8.6 GB that are free" in refused[0]["reason"]
    assert all(request["staging"]["slots"] != 4000 for request in children.requests[1:])
    assert not table.failed(found)


def test_device_memory_is_reckoned_with():
    gpu = {"name": "GPU", "free_bytes": 100 << 20, "cuda": "12.9"}
    device = {"kind": "cuda", "number": 1, "name": "GPU", "why": "asked for", "shared": False}
    children = Children(machine={**MACHINE, "gpu": gpu, "device": device})
    choice = Choice(batch=(1, 16), depth=(2,), slots=("auto",), fillers=(1,), copy_threads=(1,))
    found = bench(children, [size_input(1920, 1080)], choice, strategies=("pooled",)).run()
    refused = [cell for cell in found["cells"] if cell["status"] == "refused"]
    assert [cell["axes"]["batch"] for cell in refused] == [16]
    assert "of device memory" in refused[0]["reason"]
    assert children.requests[-1]["device"] == "cuda:1" and children.requests[-1]["device_index"] == 1
    assert found["notes"] == []


# -- what goes wrong --


def test_a_cell_that_crashes_is_a_row_and_the_others_go_on():
    answers = iter([{**measured(900.0)}, None])

    def second_time(request: Any) -> dict[str, Any]:
        found = next(answers)
        if found is None:
            raise _CrashError
        return found

    children = _Crashing(measure_direct=second_time)
    found = bench(children, repeat=3).run()
    direct = cells_of(found)["direct"]
    assert direct["status"] == "failed" and "SIGSEGV" in direct["reason"]
    assert len(direct["runs"]) == 1 and direct["summary"]["fps"] is None
    assert children.asked.count(("measure", "direct")) == 2, "not a third time"
    assert cells_of(found)["pooled"]["status"] == "ok" and found["complete"]
    assert table.failed(found)


class _CrashError(Exception):
    pass


class _Crashing(Children):
    def __call__(self, request: Any, stopping: Any, timeout_s: float) -> Outcome:
        try:
            return super().__call__(request, stopping, timeout_s)
        except _CrashError:
            return Outcome(reason="the process was ended by SIGSEGV")


def test_a_size_that_changes_in_mid_clip_is_told_once_and_shows_no_rate():
    changed = Outcome(reason="the size changes in mid-clip, from a to b", kind="SizeChangedError")
    children = Children(measure_pooled=changed)
    found = bench(children, repeat=2).run()
    assert children.count("measure") == 1, "it is the clip's doing, so that the others are not tried"
    for name in ("pooled", "direct", "pageable"):
        cell = cells_of(found)[name]
        assert (cell["status"], cell["reason"]) == ("refused", changed.reason)
        assert cell["summary"]["fps"] is None


def test_a_machine_that_cannot_be_used_ends_the_bench():
    children = Children(machine=Outcome(reason="device 'cuda' was asked for, but there is none", exit_code=2))
    with pytest.raises(ConfigError, match="'cuda' was asked for"):
        bench(children, device="cuda").run()


def test_stopping_at_once_leaves_nothing():
    children = Children()
    children.stop_after = 0
    one = bench(children)
    assert one.run() is None and children.asked == []


# -- stopping and going on --


def stopped_after(count: int, **options: Any) -> tuple[dict[str, Any], Children]:
    children = Children(**options)
    children.stop_after = count
    saved: list[Any] = []
    found = bench(children, repeat=2, save=lambda now: saved.append(json.loads(json.dumps(now)))).run()
    assert saved[-1] == found
    return found, children


@pytest.mark.parametrize("count", range(2, 11))
def test_what_is_measured_is_kept_and_the_rest_can_follow(count):
    before, children = stopped_after(count)
    assert not before["complete"]
    assert sum(len(cell["runs"]) for cell in before["cells"]) == max(0, count - 6)
    assert any("--resume" in line for line in table.closing(before))
    later = Children()
    steps: list[Any] = []
    after = bench(later, repeat=2, previous=json.loads(json.dumps(before)), progress=steps.append).run()
    assert steps[-1].total == len(later.asked)
    assert after["complete"] and {cell["status"] for cell in after["cells"]} == {"ok", "unavailable"}
    assert all(len(cell["runs"]) == 2 for cell in after["cells"] if cell["status"] == "ok")
    assert children.count("measure") - 1 * (count > 5) + later.count("measure") == 6, "nothing is measured twice"
    assert after["provenance"]["seconds"] > before["provenance"]["seconds"]


def test_a_complete_bench_is_not_measured_again():
    before = bench(Children()).run()
    children = Children()
    after = bench(children, previous=before).run()
    assert [do for do, _ in children.asked] == ["machine"] and after["complete"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"frames": 10}, "parameters.frames was 300 and is 10"),
        ({"strategies": ("pooled",), "machine": {**MACHINE, "strategies": {"pooled": None}}}, "cells are not the same"),
        ({"machine": {**MACHINE, "versions": {"av": "19.0"}}}, "versions was"),
        ({"machine": {**MACHINE, "cpus": 3}}, "cpus was 2 and is 3"),
        ({"inputs": [Input(**{**vars(CLIP), "facts": ({"sha256": "11"},)})]}, "clips are not the same"),
    ],
)
def test_another_bench_is_not_gone_on_with(changes, text):
    before, _ = stopped_after(8)
    changes = dict(changes)
    children = Children(machine=changes.pop("machine", MACHINE))
    saved: list[Any] = []
    with pytest.raises(ConfigError, match=text):
        bench(children, **{"repeat": 2, **changes}, previous=before, save=saved.append).run()
    assert saved == [], "the record that is there stays as it is"


# -- the record --


def test_summaries_are_of_the_repeats():
    rates = itertools.cycle([1000.0, 1200.0, 900.0])
    found = bench(Children(measure=lambda request: measured(next(rates))), strategies=("pooled",),
                  ).run()  # fmt: skip
    summary = cells_of(found)["pooled"]["summary"]
    assert summary["fps"]["min"] <= summary["fps"]["median"] <= summary["fps"]["max"]
    assert summary["copy_ms"] == {"p50": 0.1, "p95": 0.2, "p99": 0.3, "max": 0.4}
    assert summary["allocate_ms"] is None and summary["vram_peak_bytes"] is None
    assert summary["cpu_s_per_1000"] == pytest.approx(0.5)
    assert summary["pinned_bytes_taken"] == 128


def test_video_memory_is_what_was_free_less_the_least():
    memory = {"cuda.free": {"rest": 1000, "peak": 1000, "least": 400, "after_close": 990, "back_s": 0.1}}
    assert record.vram_peak(measured(1.0, memory=memory)) == 600
    memory["cuda.free"]["rest"] = None
    assert record.vram_peak(measured(1.0, memory=memory)) is None


def test_the_first_note_says_that_there_is_no_gpu():
    found = bench(Children()).run()
    assert found["notes"][0].startswith("no GPU was used (there is no GPU): strategies ran on cpu")
    json.dumps(found, allow_nan=False)
    assert found["provenance"]["gpu"] is None and found["provenance"]["clips"] == [dict(CLIP.facts[0])]


# -- table and files --


def test_the_best_is_marked_and_noise_is_called_noise():
    rates = {
        "pooled": itertools.cycle([995.0, 1005.0, 985.0]),
        "direct": itertools.cycle([500.0, 510.0, 490.0]),
        "pageable": itertools.cycle([1000.0, 1010.0, 990.0]),
    }
    found = bench(Children(measure=lambda r: measured(next(rates[r["staging"]["strategy"]])))).run()
    (group,) = table.groups(found)
    assert group.title == "staging: clip 64x48 yuv420p on cpu (ready in memory to the device)"
    lines = {row.texts[0]: row for row in group.rows}
    assert [row.texts[0] for row in group.rows] == ["pageable", "pooled", "direct"], "the fastest first"
    assert lines["pageable"].best and lines["pageable"].texts[-1] == "best" and not lines["pooled"].best
    assert lines["pooled"].texts[-1] == "within noise of the best"
    assert lines["direct"].texts[-1] == "0.50 of the best"
    assert lines["direct"].texts[1:3] == ("500.0", "490.0 to 510.0")
    assert all(len(row.texts) == len(table.COLUMNS) for row in group.rows)


def test_an_axis_stands_beside_its_base():
    choice = Choice(modes=("staging",), batch=(1, 4), fillers=("auto",), copy_threads=(1,))
    found = bench(Children(measure=lambda r: measured(1000.0 * r["staging"]["batch"])), choice=choice,
                  strategies=("pooled",)).run()  # fmt: skip
    (group,) = table.groups(found)
    assert ("pooled, batch 4", "4.00 of batch 1") in {(row.texts[0], row.texts[-1]) for row in group.rows}


def test_a_warning_of_many_runs_is_said_once():
    warned = measured(1000.0, warnings=["page-locking was refused"])
    found = bench(Children(measure=warned), strategies=("pooled", "direct")).run()
    told = [line for line in table.closing(found) if line.startswith("warning")]
    assert len(told) == 1 and "and 1 more: page-locking was refused" in told[0]


def test_files_are_written_and_only_a_benchs_are_replaced(tmp_path):
    found = bench(Children(), strategies=("pooled",)).run()
    folder = tmp_path / "out"
    output.check(folder)
    written = output.write(folder, found)
    assert [path.name for path in written] == ["bench.json", "bench.csv", "bench.html"]
    assert output.read(folder) == json.loads(json.dumps(found))
    assert not list(folder.glob(".*"))
    output.check(folder)  # an earlier bench's may be replaced
    (folder / "bench.json").write_text('{"schema": "framepipe.run/1"}', encoding="utf-8")
    with pytest.raises(OutputExistsError, match="no record of a bench"):
        output.check(folder)
    (folder / "bench.json").unlink()
    with pytest.raises(OutputExistsError, match=r"bench\.csv, bench\.html exists without"):
        output.check(folder)
    with pytest.raises(ConfigError, match="no bench to go on with"):
        output.read(tmp_path)


def test_the_csv_has_a_row_a_cell_and_nothing_for_what_is_unknown():
    found = bench(Children()).run()
    rows = list(csv.DictReader(io.StringIO(output.table(found))))
    assert [row["id"] for row in rows] == [cell["id"] for cell in found["cells"]]
    pooled, mapped = rows[0], rows[-1]
    assert pooled["fps_median"] == "1000.0" and pooled["copy_p99_ms"] == "0.3" and pooled["vram_peak_bytes"] == ""
    assert mapped["status"] == "unavailable" and mapped["fps_median"] == "" and mapped["reason"] == "it needs a GPU"
