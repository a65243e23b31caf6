"""Threads, shutdown and memory: everything ends, nothing grows, no picture is lost unknown.

Rows B66 to B77. Faults of every kind, interrupts and random runs have modules of their own; here is one test a row.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from case_inputs import a_module_leaves_nothing_behind  # noqa: F401 (a fixture)
from conftest import framepipe, number_of
from test_cases_damage import flipped, fuzz
from test_faults import Boom, Recorder
from test_interrupt import SCENE, SINKS, ended, running, until_lines, whole
from test_interrupt import pipeline as write_pipeline
from test_pipeline import balance
from test_stress import within

from framepipe import decode as decode_pool
from framepipe.decoding import Decoding
from framepipe.device import select
from framepipe.errors import DeviceUnavailableError, FramepipeError, SinkError, StageError
from framepipe.frame import Batch
from framepipe.pipeline import Pipeline
from framepipe.sources.file import File
from framepipe.sources.synthetic import Synthetic
from framepipe.stage import Flow, Stage
from framepipe.testing import FrameList, pattern_frames

pytestmark = pytest.mark.usefixtures("a_module_leaves_nothing_behind")
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
ROOT = str(Path(framepipe.__file__).parents[1])


def os_threads() -> int:
    return psutil.Process().num_threads()


def back_at(base: int) -> None:
    """Threads that were told to end need a moment to be gone from the system's list."""
    deadline = time.monotonic() + 10
    while os_threads() > base:
        assert time.monotonic() < deadline, (os_threads(), base, threading.enumerate())
        gc.collect()
        threading.Event().wait(0.01)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own to its end; one that hangs fails the test."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((ROOT, str(Path(__file__).parent)))},
        capture_output=True, text=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip


def stamped(count: int) -> list[Any]:
    frames = pattern_frames(count, 64, 32)
    for pts, frame in enumerate(frames):
        frame.pts = pts
    return frames


# -- B66: a part raises ------------------------------------------------------------------------------------------------


class Fails(Stage):
    """Raises at picture 5."""

    type_name = "fails"
    reads = frozenset({"planes"})
    writes = frozenset({"meta"})

    def plan(self, flow: Flow) -> Flow:
        return flow

    def launch(self, batch: Batch) -> None:
        if any(item.index == 5 for item in batch.items):
            raise Boom("stage")


class FailsToRead(FrameList):
    """Raises at picture 5."""

    def open(self, stopping: Any) -> Any:
        stream = super().open(stopping)
        plain = stream.frames

        def frames() -> Iterator[Any]:
            for number, frame in enumerate(plain()):
                if number == 5:
                    raise Boom("source")
                yield frame

        stream.frames = frames
        return stream


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("where", ["source", "stage", "sink"])
def test_b66_a_part_raises_while_every_queue_is_full(where, device):
    """Nobody takes frames at that moment; the error comes out all the same, with its place."""
    source = (FailsToRead if where == "source" else FrameList)(name="s", frames=stamped(40))
    sink = Recorder(where="write" if where == "sink" else "", at=5)
    pipeline = Pipeline([source], [Fails()] if where == "stage" else [], [sink], device=device, queue=1)
    error: FramepipeError | None = None
    taken = []
    try:
        for frame in pipeline:
            taken.append(frame.index)
            if len(taken) == 1:  # by now all is full, and the fault is on its way
                threading.Event().wait(0.05)
            del frame  # its memory is its own
    except FramepipeError as failed:
        error = failed
    within(10, pipeline.close)
    balance(pipeline.report)
    assert taken == [0, 1, 2, 3, 4] and sink.seen == taken and sink.closed == 1
    if where == "source":
        assert error is None and pipeline.report.exit == "incomplete"
        assert "Boom" in pipeline.report.sources[0]["error"] or "source" in pipeline.report.sources[0]["error"]
    else:
        assert isinstance(error, {"stage": StageError, "sink": SinkError}[where])
        assert error.where == {where: "fails" if where == "stage" else "recorder", "source": "s", "index": 5, "pts": 5}
        assert isinstance(error.__cause__, Boom)
    if device == "cpu" or where == "source":  # the simulated device keeps an error, and that what a stage had in hand
        ledger = pipeline._engine.device.ledger
        assert not any(ledger.bytes.values()), ledger.bytes


# -- B67: interrupts ---------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_b67_an_endless_run_is_interrupted(tmp_path, monkeypatch, number):
    """Every other moment, and the second Ctrl-C, are in `test_interrupt`."""
    monkeypatch.chdir(tmp_path)
    write_pipeline(SCENE % "", SINKS)
    with running() as process:
        until_lines(process, count=5)
        process.send_signal(number)
        code, err = ended(process)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number] and b"Traceback" not in err
    assert whole() >= 5


# -- B68 to B71: threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["frame", "segments", "linear"])
def test_b68_threads_are_back_at_their_number(clip, decode):
    base = os_threads()
    for _ in range(5):
        with Pipeline([File(uri=str(clip), decode=decode)], device="cpu", threads=3) as pipeline:
            next(iter(pipeline))
    back_at(base)


def test_b68_forgotten_pipelines_end_their_threads(clip):
    base = os_threads()
    for _ in range(5):
        pipeline = Pipeline([File(uri=str(clip), decode="frame")], device="cpu", threads=3)
        next(iter(pipeline))
        with pytest.warns(ResourceWarning, match="never closed"):
            del pipeline
            gc.collect()
    back_at(base)


def test_b69_closed_under_a_running_reader(clip):
    """From another thread, at any moment; PyAV's own containers end the process by a signal then."""
    told = python(
        "import sys, threading\n"
        "from framepipe.pipeline import Pipeline\n"
        "from framepipe.sources.file import File\n"
        "for number in range(30):\n"
        "    decode = ('frame', 'segments', 'linear')[number % 3]\n"
        "    source = File(uri=sys.argv[1], decode=decode, loop=50)\n"
        "    pipeline = Pipeline([source], [], [], device='cpu', threads=2)\n"
        "    closer = threading.Timer(0.001 * number, pipeline.close)\n"
        "    frames = iter(pipeline)\n"
        "    next(frames)\n"
        "    closer.start()\n"
        "    for frame in frames: frame.spec\n"
        "    closer.join()\n"
        "    pipeline.close()\n"
        "print('whole')\n",
        str(clip),
    )
    assert (told.returncode, told.stdout.strip()) == (0, "whole"), told


@pytest.mark.parametrize("decode", ["frame", "segments", "linear"])
def test_b70_a_decoder_is_one_threads_at_a_time(clip, monkeypatch, decode):
    plain = Decoding._decode
    at_work: dict[int, int] = {}
    decoders = set()

    def watched(self: Any, feed: Any, unit: Any, packet: Any) -> None:
        key, mine = id(unit.decoder), threading.get_ident()
        decoders.add(key)
        assert at_work.setdefault(key, mine) == mine, "two threads in one decoder"
        try:
            plain(self, feed, unit, packet)
        finally:
            at_work.pop(key, None)

    monkeypatch.setattr(Decoding, "_decode", watched)
    with Pipeline([File(uri=str(clip), decode=decode, loop=5)], [], ["discard"], device="cpu", threads=4) as pipeline:
        assert pipeline.run().frames["delivered"] == 300
    assert len(decoders) > 1 or decode != "segments"


@pytest.mark.parametrize(("sources", "decode"), [(8, "auto"), (1, "segments"), (1, "linear"), (1, "frame")])
def test_b71_no_more_threads_than_the_budget(clip, sources, decode):
    """Two decode, whatever there is to decode; filler, runner and sink make three. Frame threads replace workers."""
    base, most = os_threads(), 0

    def look(frame: Any) -> None:
        nonlocal most
        most = max(most, os_threads())

    loop = 1 if decode == "frame" else 3  # the threads of a round before end with it, and do nothing meanwhile
    inputs = [File(uri=str(clip), name=str(number), decode=decode, loop=loop) for number in range(sources)]
    with Pipeline(inputs, ["rgb"], [look], device="cpu", threads=2) as pipeline:
        assert pipeline.run().frames["delivered"] == 60 * loop * sources
    frame_threads = 2 if decode == "frame" else 0
    assert most - base <= 2 + 3 + frame_threads


def test_b72_damaged_files_in_frame_threads_and_a_chatty_log(tmp_path):
    """FFmpeg's log is left as it is; where a program has set a level, the run ends all the same."""
    fuzz.make_files(tmp_path)
    path = flipped(tmp_path, tmp_path, 12, 3)
    for level in ("None", "av.logging.ERROR", "av.logging.VERBOSE"):
        told = python(
            "import sys, av\n"
            f"level = {level}\n"
            "if level is not None: av.logging.set_level(level)\n"
            "from framepipe.pipeline import Pipeline\n"
            "from framepipe.sources.file import File\n"
            "for _ in range(5):\n"
            "    source = File(uri=sys.argv[1], decode='frame')\n"
            "    with Pipeline([source], [], ['discard'], device='cpu', threads=4) as pipeline: pipeline.run()\n"
            "assert av.logging.get_level() == level, av.logging.get_level()\n"
            "print(pipeline.report.exit)\n",
            str(path),
        )
        assert (told.returncode, told.stdout.strip()) == (0, "incomplete"), told


# -- B73, B74: slow consumers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["frame", "segments", "linear"])
def test_b73_a_slow_consumer_holds_up_the_decoder(clip, decode):
    """Every picture comes, and none of the queues is ever longer than its bound."""
    seen: list[int] = []
    longest = 0

    def slow(frame: Any) -> None:
        nonlocal longest
        seen.append(number_of(frame.numpy()))
        threading.Event().wait(0.001)
        feed = pipeline._feeds[0]
        heads = list(feed.units)[:1]
        longest = max(longest, *(len(unit.out) - feed.limit for unit in heads), 0)
        ahead = sum(len(unit.out) for unit in list(feed.units)[1:]) * feed.frame_nbytes
        assert ahead <= pipeline._ahead + 2 * 60 * feed.frame_nbytes

    pipeline = Pipeline([File(uri=str(clip), decode=decode, loop=4)], [], [slow], device="cpu", threads=2)
    with pipeline:
        report = pipeline.run()
    balance(report)
    assert seen == list(range(60)) * 4 and not report.frames["dropped"] and report.exit == "complete"
    assert longest <= 0


class Rushing(FrameList):
    """Gives its first picture, and all others once that has reached the sink."""

    def open(self, stopping: Any) -> Any:
        stream = super().open(stopping)
        plain = stream.frames

        def frames() -> Iterator[Any]:
            for number, frame in enumerate(plain()):
                if number == 1:
                    self.first.wait(20)
                yield frame
            self.last.set()

        stream.frames = frames
        return stream

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first, self.last = threading.Event(), threading.Event()


def dropping(drop: str, count: int = 300, **staging: Any) -> tuple[Any, list[int], int]:
    """Report, indices that came, and the bound of the queue, of a source that is through before its sink goes on."""
    seen: list[int] = []
    source = Rushing(name="s", frames=stamped(count), drop=drop)

    def slow(frame: Any) -> None:
        seen.append(frame.index)
        source.first.set()
        if drop != "never":
            assert source.last.wait(20), "the decoder waits"

    pipeline = Pipeline([source], [], [slow], device="cpu", staging=staging)
    with pipeline:
        report = within(30, pipeline.run)
    balance(report)
    assert report.exit == "complete" and report.frames["decoded"] == count
    return report, seen, pipeline._feeds[0].limit


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("strategy", ["direct", "pooled"])
@pytest.mark.parametrize("drop", ["oldest", "latest"])
def test_b74_what_is_dropped_is_counted(drop, strategy, batch):
    """The decoder goes on while nobody takes anything; behind what was on its way comes the end of the queue."""
    report, seen, limit = dropping(drop, strategy=strategy, batch=batch)
    assert report.frames["dropped"] == report.sources[0]["dropped"] == {drop: 300 - len(seen)}
    kept = 1 if drop == "latest" else limit
    assert seen[0] == 0 and seen == sorted(set(seen)), "an index is the picture's own"
    assert seen[-kept:] == list(range(300 - kept, 300))
    assert 1 <= len(seen) - kept <= 40 * batch


def test_b74_nothing_is_dropped_unless_asked():
    report, seen, _ = dropping("never")
    assert seen == list(range(300)) and not report.frames["dropped"]


@pytest.mark.parametrize("decode", ["auto", "segments", "frame", "linear"])
def test_b74_a_file_drops_when_asked(clip, decode):
    """Its times stay its own. Segments, which are held until it is their turn, would make it wait."""
    times: list[float] = []

    def slow(frame: Any) -> None:
        assert number_of(frame.numpy()) == frame.index % 60
        times.append(frame.time_s)
        threading.Event().wait(0.002)

    source = File(uri=str(clip), decode=decode, drop="latest", loop=3)
    with Pipeline([source], [], [slow], device="cpu", threads=2) as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.frames["decoded"] == 180 and report.frames["dropped"] == {"latest": 180 - len(times)}
    assert times == sorted(times) and times[-1] == pytest.approx(179 / 25)
    assert report.sources[0]["decode"] != "segments"


def test_b74_one_that_drops_beside_one_that_does_not(clip):
    counts = {"live": 0, "file": 0}

    def slow(frame: Any) -> None:
        counts[frame.source] += 1
        threading.Event().wait(0.001)

    live = Synthetic(name="live", width=64, height=48, shapes=1, frames=400, drop="latest")
    with Pipeline([live, File(uri=str(clip), name="file")], [], [slow], device="cpu", threads=1) as pipeline:
        report = pipeline.run()
    balance(report)
    assert counts["file"] == 60 and report.sources[1]["dropped"] == {}
    assert report.sources[0]["decoded"] == 400
    assert report.sources[0]["dropped"].get("latest", 0) == 400 - counts["live"]


def test_b74_a_stop_leaves_balanced_books():
    for drop in ("oldest", "latest"):
        source = Synthetic(width=64, height=48, shapes=1, frames=None, drop=drop)
        pipeline = Pipeline([source], [], [], device="cpu", queue=1)
        with pipeline:
            for number, _ in enumerate(pipeline):
                if number == 20:
                    threading.Event().wait(0.02)
                    pipeline.stop()
        balance(pipeline.report)
        assert pipeline.report.exit == "stopped"


def test_b74_a_policy_that_is_none():
    with pytest.raises(FramepipeError, match="drop is 'newest'; it must be never, oldest or latest"):
        File(uri="a.mp4", drop="newest")


# -- B75, B76: memory --------------------------------------------------------------------------------------------------


def test_b75_fifty_files_in_a_loop(clip):
    """Neither memory nor threads grow."""
    process, base, after_ten = psutil.Process(), os_threads(), 0
    for number in range(50):
        if number == 10:
            gc.collect()
            after_ten = process.memory_info().rss
        with Pipeline([clip], ["rgb"], ["discard"], device="cpu", threads=2) as pipeline:
            pipeline.run()
    gc.collect()
    assert process.memory_info().rss - after_ten < 10 << 20
    back_at(base)


def test_b75_forty_frames_alive_have_no_threads_of_their_own(clip):
    with Pipeline([File(uri=str(clip), end=1.7)], ["rgb"], [], device="cpu", threads=2) as pipeline:
        held, base = [], 0
        for frame in pipeline:
            held.append(frame)
            base = base or os_threads()
            assert frame.image.shape == (64, 96, 3)
            assert os_threads() <= base
    assert len(held) >= 40


class Scribbles(Stage):
    """Draws into the planes that it was given, or tries to; ``done`` counts pictures."""

    done = 0

    type_name = "scribbles"
    reads = frozenset({"planes"})
    writes = frozenset({"meta"})

    def plan(self, flow: Flow) -> Flow:
        return flow

    def launch(self, batch: Batch) -> None:
        for number in range(len(batch)):
            for plane in batch.planes.picture(number):
                with contextlib.suppress(ValueError):  # read-only
                    plane[...] = 0
            self.done += 1


@pytest.mark.parametrize("strategy", ["direct", "pooled", "pageable", "per_frame"])
@pytest.mark.parametrize("decode", ["linear", "frame"])
def test_b76_drawing_into_a_decoded_picture_damages_no_later_one(clip, monkeypatch, strategy, decode):
    """Later pictures are predicted from it: it is read-only, or a copy."""
    seen: list[int] = []
    stage = Scribbles()
    plain = Decoding._put

    def put(self: Any, feed: Any, unit: Any, frame: Any) -> None:
        seen.append(number_of(frame.to_ndarray(format="gray")))
        plain(self, feed, unit, frame)
        deadline = time.monotonic() + 10
        while stage.done < len(seen):  # the next one is decoded behind the stage
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)

    monkeypatch.setattr(Decoding, "_put", put)
    monkeypatch.setattr(decode_pool, "_ANNOUNCE_S", 0.0)
    source = File(uri=str(clip), decode=decode)
    with Pipeline([source], [stage], ["discard"], device="cpu", staging=strategy, threads=2) as pipeline:
        pipeline.run()
    assert seen == list(range(60))


# -- B77: forks --------------------------------------------------------------------------------------------------------


@posix
def test_b77_a_pipeline_does_not_survive_a_fork(clip):
    """It says what to do instead of waiting for threads that stayed behind; one of the child's own runs."""
    told = python(
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "from framepipe.errors import FramepipeError\n"
        "from framepipe.pipeline import Pipeline\n"
        "from framepipe.sources.file import File\n"
        "pipeline = Pipeline([File(uri=sys.argv[1], loop=1000)], device='cpu')\n"
        "frames = iter(pipeline)\n"
        "next(frames)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        for frame in frames: pass\n"
        "    except FramepipeError as error:\n"
        "        assert 'spawn' in str(error), error\n"
        "        pipeline.close()\n"
        "        with Pipeline([sys.argv[1]], [], ['discard'], device='cpu') as own:\n"
        "            print(own.run().frames['delivered'], flush=True)\n"
        "        sys.exit(7)\n"
        "    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "next(frames)\n"
        "pipeline.close()\n"
        "print('whole')\n",
        str(clip),
    )
    assert (told.returncode, told.stdout.split()) == (0, ["60", "whole"]), told


@posix
def test_b77_behind_a_fork_a_gpu_says_to_spawn(monkeypatch):
    """Whether its parent had used one through us, or CUDA itself says that it does not begin."""
    monkeypatch.setattr(select, "_behind_fork", True)
    for name in ("cuda", "cuda:1", "auto"):
        with pytest.raises(DeviceUnavailableError, match="spawn"):
            select.choose(name)
    assert select.choose("cpu").kind == "cpu"
    words = select._perhaps_forked(RuntimeError("cudaErrorInitializationError: initialization error"))
    assert "spawn" in words and not select._perhaps_forked(RuntimeError("cudaErrorNoDevice"))


@posix
@pytest.mark.parametrize("found", [False, True])
def test_b77_a_child_knows_whether_its_parent_had_found_a_gpu(found):
    told = python(
        "import os, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "from functools import cache\n"
        "from framepipe.device import select\n"
        f"select.why_not = cache(lambda number=0: '' if {found} else 'there is none')\n"
        "select.choose('auto')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(int(select._behind_fork))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert told.stdout.strip() == str(int(found)), told


def test_b77_importing_makes_no_cuda_context():
    told = python("import sys, framepipe.pipeline, framepipe.device.select; print('cupy' in sys.modules)")
    assert told.stdout.strip() == "False", told
