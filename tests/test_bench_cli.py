"""``framepipe bench`` on the command line; the children are those of test_bench but for the tests marked slow."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import framepipe, make_clip
from test_bench import Children

from framepipe import _cli_bench, cli
from framepipe.bench import runner
from framepipe.bench._launch import Outcome
from framepipe.bench.options import Step
from framepipe.errors import ConfigError

ROOT = str(Path(framepipe.__file__).parents[1])
FEW = ["--mode", "staging", "--batch", "1", "--fillers", "auto", "--copy-threads", "1", "--repeat", "2"]


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path, clip):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())


@pytest.fixture
def children(monkeypatch) -> Children:
    made = Children()
    monkeypatch.setattr(runner, "Bench", functools.partial(runner.Bench, launch=made))
    return made


def record(folder: str = "d") -> Any:
    return json.loads(Path(folder, "bench.json").read_text(encoding="utf-8"))


def test_a_bench_ends_with_a_table_and_three_files(children, capsys):
    assert cli.main(["bench", "a.mp4", "--staging", "pooled,direct,mapped", "--out", "d", *FEW]) == 0
    out, err = capsys.readouterr()
    assert "staging: a 96x64 yuv420p on cpu" in out
    assert "* pooled" in out and "within noise of the best" in out and "1000" in out
    assert "note: no GPU was used" in err and "not here: mapped (it needs a GPU)" in err
    assert sorted(path.name for path in Path("d").iterdir()) == ["bench.csv", "bench.html", "bench.json"]
    found = record()
    assert found["complete"] and found["provenance"]["parameters"]["repeat"] == 2
    assert found["provenance"]["clips"][0]["name"] == "a.mp4" and found["provenance"]["command"].startswith("framepipe")
    assert [request["device"] for request in children.requests] == ["auto", *["cpu"] * 7]


def test_json_is_all_there_is_on_standard_output(children, capsys):
    assert cli.main(["bench", "--size", "64x48", "--json", "--out", "d", *FEW]) == 0
    assert json.loads(capsys.readouterr().out) == record()


def test_several_clips_sizes_and_a_shipped_pipeline(children, capsys):
    assert cli.main(["bench", "a.mp4", "motion", "--size", "64x48,1920x1080", "--out", "d", "--repeat", "1"]) == 0
    groups = {(cell["axes"]["mode"], cell["axes"]["input"]) for cell in record()["cells"]}
    assert groups == {("staging", "a"), ("pipeline", "a"), ("pipeline", "motion"), ("staging", "64x48"),
                      ("staging", "1080p")}  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "there is nothing to measure"),
        (["a.mp4", "--batch", "1,x"], "--batch 1,x: expected numbers from 1, separated by commas; 'x' is none"),
        (["a.mp4", "--batch", "0"], "'0' is none"),
        (["a.mp4", "--depth", "auto"], "'auto' is none"),
        (["a.mp4", "--mode", "stage"], "'stage' is neither of staging and pipeline"),
        (["--size", "64"], "--size 64: expected WIDTHxHEIGHT"),
        (["--size", "64x8"], "expected WIDTHxHEIGHT of 16 pixels or more"),
        (["none.yaml"], "none.yaml: no such file"),
        (["--size", "64x48", "--mode", "pipeline"], "no input can be used in the modes"),
        (["a.mp4", "--resume"], "no bench to go on with"),
    ],
)
def test_wrong_usage_is_status_2(children, capsys, argv, text):
    assert cli.main(["bench", *argv, "--out", "d"]) == 2
    assert text in capsys.readouterr().err
    assert not Path("d", "bench.json").exists()


def test_a_clip_that_is_not_there_is_status_1(children, capsys):
    assert cli.main(["bench", "none.mp4", "--out", "d"]) == 1
    assert "none.mp4: no such file" in capsys.readouterr().err


def test_files_of_others_stay(children, capsys):
    Path("bench.json").write_text('{"mine": 1}', encoding="utf-8")
    assert cli.main(["bench", "a.mp4", "--out", "."]) == 2
    assert Path("bench.json").read_text(encoding="utf-8") == '{"mine": 1}' and not children.asked


def test_a_strategy_that_fails_is_status_3_and_nothing_at_all_is_1(children, capsys):
    children.answers["measure_direct"] = Outcome(reason="the process was ended by SIGSEGV")
    assert cli.main(["bench", "a.mp4", "--staging", "pooled,direct", "--out", "d", *FEW]) == 3
    assert "failed: the process was ended by SIGSEGV" in capsys.readouterr().out
    assert cli.main(["bench", "a.mp4", "--staging", "mapped", "--out", "d", *FEW]) == 1


class Interrupted(Children):
    """Sends the signal in the middle of a child, as Ctrl-C does."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__()
        self.number, self.at = number, at

    def __call__(self, request: Any, stopping: Any, timeout_s: float) -> Outcome:
        if len(self.asked) == self.at:
            signal.raise_signal(self.number)
        return super().__call__(request, stopping, timeout_s)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_measured_and_resume_goes_on(monkeypatch, capsys, number, code):
    argv = ["bench", "a.mp4", "--staging", "pooled,direct", "--out", "d", *FEW]
    monkeypatch.setattr(runner, "Bench", functools.partial(runner.Bench, launch=Interrupted(number, 6)))
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert "interrupted: not every repeat was made" in err and "pooled" in out
    before = record()
    assert not before["complete"] and sum(len(cell["runs"]) for cell in before["cells"]) == 2
    assert {"bench.csv", "bench.html"} <= {path.name for path in Path("d").iterdir()}

    later = Children()
    monkeypatch.setattr(runner, "Bench", functools.partial(runner.Bench, launch=later))
    assert cli.main([*argv, "--resume"]) == 0
    assert record()["complete"] and [do for do, _ in later.asked] == ["machine", "measure", "measure"]

    assert cli.main([*argv, "--resume", "--frames", "7"]) == 2
    assert "parameters.frames was 300 and is 7" in capsys.readouterr().err
    assert record()["complete"], "it stays as it is"


def test_an_interrupt_before_anything_is_known_leaves_no_file(monkeypatch):
    monkeypatch.setattr(runner, "Bench", functools.partial(runner.Bench, launch=Interrupted(signal.SIGINT, 0)))
    assert cli.main(["bench", "a.mp4", "--out", "d", *FEW]) == 130
    assert not list(Path("d").iterdir())


def test_a_record_that_cannot_be_written_is_an_error(children, monkeypatch, capsys):
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert cli.main(["bench", "a.mp4", "--staging", "pooled", "--out", "d", *FEW]) == 1
    assert "--out d: cannot be written: Permission denied (is it open in another program?)" in capsys.readouterr().err


def test_lists_are_read_in_order_and_once():
    assert _cli_bench.numbers("4, 1,4", "batch") == (4, 1)
    assert _cli_bench.numbers("auto,2", "slots", auto=True) == ("auto", 2)
    assert _cli_bench.numbers(None, "batch") is None and _cli_bench.words("a,,b") == ("a", "b")
    assert _cli_bench.sizes(["1920X1080", "64x48,1920x1080"]) == [(1920, 1080), (64, 48)]
    with pytest.raises(ConfigError):
        _cli_bench.modes("both")


def test_lines_come_every_few_seconds_with_the_time_left(capsys):
    now = [0.0]
    lines = _cli_bench.Lines(clock=lambda: now[0])
    for second in range(11):
        now[0] = float(second)
        lines.step(Step(second, 20, 61.0, f"child {second}"))
    assert capsys.readouterr().err.splitlines() == [
        f"framepipe: {n}/20, about 1:01 left: child {n}" for n in (0, 5, 10)
    ]


def test_a_bar_shows_steps_and_leaves(capsys):
    bar = _cli_bench.Bar()
    with bar:
        bar.step(Step(1, 4, None, "[red]child"))
        bar.stopping = True
        bar.step(Step(2, 4, 3.0, "child"))
    assert bar._progress.finished is False and bar._progress.tasks[0].fields["what"] == "stopping"


# -- for real --


def framepipe_bench(*argv: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "framepipe", "bench", *argv], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_real_bench_of_a_clip(tmp_path):
    with framepipe_bench("a.mp4", "--staging", "pooled,direct", "--frames", "20", "--device", "cpu", *FEW,
                         "--out", "d") as process:  # fmt: skip
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = record()
    assert found["complete"] and {cell["status"] for cell in found["cells"]} == {"ok"}
    assert len({cell["hash"] for cell in found["cells"]}) == 1
    assert all(run["frames"] >= 20 for cell in found["cells"] for run in cell["runs"])
    assert "pooled" in out and "direct" in out


@pytest.mark.slow
def test_a_strategy_of_another_package_reaches_the_children(tmp_path, monkeypatch):
    package = tmp_path / "site"
    (package / "flipping-1.dist-info").mkdir(parents=True)
    (package / "flipping-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flipping\nVersion: 1\n")
    (package / "flipping-1.dist-info" / "entry_points.txt").write_text("[framepipe.staging]\nflip = flipping:Flip\n")
    from test_bench_child import FLIP

    (package / "flipping.py").write_text(FLIP, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), ROOT])}
    done = subprocess.run(
        [sys.executable, "-m", "framepipe", "bench", "a.mp4", "--staging", "pooled,flip", "--frames", "20", *FEW,
         "--out", "d", "--device", "cpu"], env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    status = {cell["axes"]["strategy"]: cell["status"] for cell in record()["cells"]}
    assert status == {"pooled": "ok", "flip": "refused"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_the_child_that_runs_and_resume_completes(tmp_path):
    make_clip(tmp_path / "long.mp4", 100)
    argv = ["long.mp4", "--staging", "pooled,direct", "--frames", "50", "--device", "cpu", *FEW, "--out", "d"]
    with framepipe_bench(*argv, start_new_session=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        own = psutil.Process(process.pid)
        # The file is saved every few seconds, and a child is at work nearly all the time.
        below: list[psutil.Process] = []
        while process.poll() is None and len(below) < 4:
            below += [each for each in own.children() if each not in below]
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        watchdog.cancel()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not [each for each in below if each.is_running()]
    assert not record()["complete"]
    with framepipe_bench(*argv, "--resume") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert record()["complete"]
