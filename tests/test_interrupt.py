"""Ctrl-C and SIGTERM at any moment: the process ends within seconds, and what it has written is whole.

Every run is a child process with a hard limit of time. Before framepipe has taken the signals over, the process may
end as any Python program does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import av
import pytest
from conftest import framepipe, make_clip

from framepipe import _cli_run, cli

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
ROOT = str(Path(framepipe.__file__).parents[1])
OURS = os.fsencode(Path(framepipe.__file__).parent)
ENDS_WITHIN_S = 3.0
NUMBERS = {signal.SIGINT: 130, signal.SIGTERM: 143}
SIGNALS = list(NUMBERS)


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def running(*argv: str, stdin: int | None = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """``framepipe run p.yaml`` in a process of its own, killed where it outlives the test or a minute."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "framepipe", "run", "p.yaml", "--device", "cpu", "--report", "r.json", *argv],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def pipeline(sources: str, sinks: str) -> None:
    Path("p.yaml").write_text(f"version: 1\nsources: [{sources}]\nsinks: [{sinks}]\n", encoding="utf-8")


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Status and stderr of a process that ends in time."""
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < ENDS_WITHIN_S
    return process.returncode, err


def whole(lines: str = "o.jsonl", video: str = "o.mp4") -> int:
    """The results on disk are whole, whatever their number; how many lines there are."""
    assert not [name for name in os.listdir() if ".part" in name]
    count = 0
    if os.path.exists(lines):
        text = Path(lines).read_text(encoding="utf-8")
        assert not text or text.endswith("\n")
        assert [json.loads(line)["index"] for line in text.splitlines()] == list(range(len(text.splitlines())))
        count = len(text.splitlines())
    pictures = 0
    if os.path.exists(video):
        with av.open(video) as container:
            pictures = sum(1 for _ in container.decode(video=0))
    assert pictures == count
    if os.path.exists(lines):  # a run that began has its report
        report = json.loads(Path("r.json").read_text(encoding="utf-8"))
        assert report["frames"]["delivered"] == count
    return count


SCENE = "{synthetic: {width: 64, height: 48, shapes: 1, frames: %s}}"
SINKS = "{jsonl: {path: o.jsonl}}, {video: {path: o.mp4}}"
Moment = tuple[str, float, signal.Signals]


def moments(count: int, seed: int) -> list[Moment]:
    """Where and when to interrupt: while starting, while running, or around the end."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        where = ("starting", "running", "finishing")[number % 3]
        longest = {"starting": 0.6, "running": 0.5, "finishing": 0.3}[where]
        found.append((where, round(rng.uniform(0, longest), 4), SIGNALS[number // 3 % 2]))
    return found


def interrupt_at(where: str, delay_s: float, number: signal.Signals) -> None:
    pipeline(SCENE % ("300" if where == "finishing" else ""), SINKS)
    with running() as process:
        if where != "starting":
            until_lines(process)
        pause(delay_s)
        if process.poll() is None:
            process.send_signal(number)
        code, err = ended(process)
    handled = code in (0, NUMBERS[number])
    # While the interpreter starts it has ways of its own: by the signal, or with 1 and what of its own did not load.
    python = code == -number or (code == 1 and b"KeyboardInterrupt" in err and OURS not in err)
    assert handled or (where != "running" and python), (code, err)
    if where == "running":
        assert code == NUMBERS[number], (code, err)
        assert b"Traceback" not in err
    assert whole() or where == "starting"
    if code == 0 or (code == -number and os.path.exists("r.json")):
        assert where == "finishing" and json.loads(Path("r.json").read_text())["exit"] == "complete"


def until_lines(process: subprocess.Popen[bytes], path: str = "o.jsonl", count: int = 1) -> None:
    """Wait until there are results."""
    while process.poll() is None:
        if os.path.exists(path) and Path(path).read_bytes().count(b"\n") >= count:
            return
        pause(0.005)
    raise AssertionError((process.returncode, process.stderr.read() if process.stderr else b""))


def label(moment: Moment) -> str:
    return f"{moment[0]}-{moment[1]}-{moment[2].name}"


FEW = [
    ("starting", 0.25, signal.SIGTERM),
    ("running", 0.1, signal.SIGTERM),
    ("running", 0.05, signal.SIGINT),
    ("finishing", 0.02, signal.SIGINT),
]


@pytest.mark.parametrize("moment", FEW, ids=label)
def test_interrupted(moment):
    interrupt_at(*moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments(36, seed=5), ids=label)
def test_interrupted_at_many_moments(moment):
    interrupt_at(*moment)


def test_a_second_ctrl_c_kills_at_once():
    """Even while a sink never returns."""
    Path("stuck.py").write_text(
        "import threading\nfrom dataclasses import dataclass\nfrom framepipe.sink import Sink\n"
        "@dataclass(kw_only=True)\nclass Stuck(Sink):\n    def write(self, frame):\n"
        "        open('entered', 'w').close()\n        threading.Event().wait()\n",
        encoding="utf-8",
    )
    pipeline(SCENE % "", "'stuck:Stuck'")
    with running("--allow-code") as process:
        while not os.path.exists("entered"):
            assert process.poll() is None, process.stderr.read()
            pause(0.005)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 130


# -- inputs that stall -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stream(tmp_path_factory) -> bytes:
    """100 pictures as a transport stream."""
    return make_clip(tmp_path_factory.mktemp("stream") / "s.ts", 100, gop=10).read_bytes()


def lines(path: str = "o.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def until_stalled(process: subprocess.Popen[bytes], path: str = "o.jsonl") -> None:
    """Wait until half of the stream is through, and the reader waits for more."""
    until_lines(process, path, 40)
    pause(0.2)


def test_standard_input_that_ends(stream):
    pipeline("'-'", "{jsonl: {path: o.jsonl}}")
    with running(stdin=subprocess.PIPE) as process:
        process.stdin.write(stream[: len(stream) // 2])
        process.stdin.flush()
        until_lines(process)
        process.stdin.write(stream[len(stream) // 2 :])
        process.stdin.close()
        process.stdin = None
        code, err = ended(process)
    assert code == 0, err
    assert [line["index"] for line in lines()] == list(range(100))
    assert {line["source"] for line in lines()} == {"stdin"}


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_standard_input_that_stalls(stream, number):
    pipeline("'-'", "{jsonl: {path: o.jsonl}}")
    with running(stdin=subprocess.PIPE) as process:
        process.stdin.write(stream[: len(stream) // 2])
        process.stdin.flush()
        until_stalled(process)
        process.send_signal(number)
        stdin, process.stdin = process.stdin, None
        code, err = ended(process)
        stdin.close()
    assert code == NUMBERS[number], err
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert report["exit"] == "stopped" and report["frames"]["delivered"] == len(lines())


@pytest.mark.parametrize("writer", [True, False], ids=["stalls", "no-writer"])
def test_a_fifo_beside_a_good_source(stream, clip, writer):
    """The good one's results are all delivered; Ctrl-C ends the wait for the other one."""
    os.mkfifo("pipe.ts")
    pipeline(f"pipe.ts, '{clip}'", "{jsonl: {path: 'o_{source}.jsonl'}}")
    with running() as process:
        if writer:
            fd = os.open("pipe.ts", os.O_RDWR)  # does not wait for the reader
            os.write(fd, stream[: len(stream) // 2])
            until_stalled(process, "o_pipe.jsonl")
        until_lines(process, "o_a.jsonl", 60)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code, err = ended(process)
        if writer:
            os.close(fd)
    assert code == 130, err
    assert [line["index"] for line in lines("o_a.jsonl")] == list(range(60))
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert [source["status"] for source in report["sources"]] == ["stopped", "complete"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_the_report_is_written(monkeypatch, number):
    """The run was complete: it has its report, and says so."""

    def report(file, document):
        signal.raise_signal(number)
        write(file, document)

    write = _cli_run.ReportFile.write
    monkeypatch.setattr(_cli_run.ReportFile, "write", report)
    pipeline(SCENE % "5", "discard")
    assert cli.main(["run", "p.yaml", "-q", "--device", "cpu", "--report", "r.json"]) == 0
    assert json.loads(Path("r.json").read_text(encoding="utf-8"))["exit"] == "complete"
    assert sorted(os.listdir()) == ["p.yaml", "r.json"]
