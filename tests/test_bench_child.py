"""What happens in a child process of a bench, and how such a process is started, waited for and ended."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import make_clip

from framepipe.bench import _launch, _measure, _pictures, cell
from framepipe.bench._launch import environment, launch
from framepipe.bench._measure import Clock, duration, memory, settle
from framepipe.bench.cells import Choice, size_input
from framepipe.bench.inputs import find
from framepipe.bench.options import Options
from framepipe.bench.runner import Bench
from framepipe.errors import ConfigError, FramepipeError, SourceError
from framepipe.frame import Frame, FrameSpec, Item, frame_planes
from framepipe.pipeline import Pipeline
from framepipe.stager import StagingOptions

STAGING = {"strategy": "pooled", "batch": 2, "depth": 2, "slots": 4, "fillers": 1, "copy_threads": 1}


def request(do: str, clip: Path | None = None, mode: str = "staging", **changes: Any) -> dict[str, Any]:
    given = {"kind": "clip", "uri": str(clip), "width": 96, "height": 64, "pix_fmt": "yuv420p"}
    return {
        "do": do, "mode": mode, "input": given, "staging": STAGING, "device": "cpu", "device_index": None,
        "warmup": 16, "frames": 20, "least_s": 0.0, "distinct": 70, "keep_sinks": False, "allow_code": False,
        "path": [], "folder": None, "parity_frames": 12, "strategies": [], **changes,
    }  # fmt: skip


def changing(folder: Path) -> Path:
    """Twelve pictures of one size, then twelve of another."""
    parts = [make_clip(folder / f"{n}.ts", 12, width=w, codec="mpeg2video") for n, w in enumerate((96, 128))]
    whole = folder / "changing.ts"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    return whole


# -- pictures --


def test_pictures_of_a_clip_are_distinct_memory_beyond_its_end_too(clip):
    frames = _pictures.of_clip(str(clip), 130)
    assert len(frames) == 130
    assert len({plane.buffer_ptr for frame in frames for plane in frame.planes}) == 390
    assert [frame.pts for frame in frames] == list(range(130)) and len({frame.time_base for frame in frames}) == 1
    spec = FrameSpec.of(frames[0])
    for number in (60, 75, 129):
        assert FrameSpec.of(frames[number]) == spec
        pairs = zip(frame_planes(frames[number], spec), frame_planes(frames[number % 60], spec), strict=True)
        assert all(np.array_equal(copied, own) for copied, own in pairs)


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "nv12", "yuv420p10le", "p010le", "rgb24", "gray", "yuva420p"])
def test_pictures_of_a_size_differ_and_are_the_same_every_time(pix_fmt):
    first, second = (_pictures.of_size(50, 34, pix_fmt, 3) for _ in range(2))
    spec = FrameSpec.of(first[0])
    contents = [b"".join(plane.tobytes() for plane in frame_planes(frame, spec)) for frame in first + second]
    assert contents[:3] == contents[3:] and len(set(contents)) == 3
    if spec.format.bits > 8:
        top = ((1 << spec.format.bits) - 1) << spec.format.shift
        assert all(not (plane & ~np.uint16(top)).any() for frame in first for plane in frame_planes(frame, spec))


def test_so_many_pictures_as_the_cache_cannot_hold_and_memory_can():
    assert _pictures.distinct(1000, 1 << 20, 1 << 40) == 2098
    assert _pictures.distinct(1000, 1 << 20, 400_000) == 100
    assert _pictures.distinct(100, 1 << 30, 1 << 40) == 8192
    assert _pictures.distinct(1 << 30, 1 << 20, 1 << 20) == 16


def test_the_cache_is_the_last_level_of_the_processors_at_hand(tmp_path):
    for number, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, (level, size) in enumerate((("1", "32K"), ("2", "1M"), ("3", "16M"))):
            folder = tmp_path / f"cpu{number}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n", encoding="utf-8")
    assert _pictures.cache_nbytes(tmp_path / "nothing") == _pictures.UNKNOWN_CACHE
    if hasattr(psutil.Process(), "cpu_affinity") and set(psutil.Process().cpu_affinity()) & {0, 1, 2, 3}:
        groups = {number // 2 for number in psutil.Process().cpu_affinity() if number < 4}
        assert _pictures.cache_nbytes(tmp_path) == len(groups) * (16 << 20)


def test_a_clip_without_pictures_or_of_two_sizes_is_refused(tmp_path):
    with pytest.raises(_pictures.SizeChangedError, match="from 96x64 yuv420p to 128x64 yuv420p"):
        _pictures.of_clip(str(changing(tmp_path)), 30)
    with pytest.raises((SourceError, OSError)):
        _pictures.of_clip(str(tmp_path / "none.mp4"), 1)


# -- the clock --


def frame(index: int, *, width: int = 64, source: str = "a") -> Frame:
    return Frame(Item(source, index, index, None, index / 25), FrameSpec(width, 48, "yuv420p"))


def clock_of(times: list[float], **options: Any) -> tuple[Clock, list[int]]:
    """A clock whose readings are ``times``, and where it stopped."""
    readings = iter(times)
    stopped: list[int] = []
    made = Clock(**{"warmup": 2, "frames": 4, "batch": 2, "least_s": 0.0, **options},
                 clock=lambda: next(readings), cpu=lambda: 0.0)  # fmt: skip
    made.stop = lambda: stopped.append(made.frames)
    return made, stopped


def test_the_clock_counts_behind_the_warm_up():
    clock, stopped = clock_of([1.0, 10.0, 10.5, 11.0, 11.5, 12.0])
    for index in range(9):  # what comes behind the stop is not counted
        clock(frame(index))
    assert (clock.first_s, clock.frames, clock.seconds, stopped) == (1.0, 4, 2.0, [4])
    assert clock.nbytes == 4 * FrameSpec(64, 48, "yuv420p").nbytes


def test_the_clock_goes_on_until_it_has_lasted_and_ends_behind_a_batch():
    clock, stopped = clock_of([1.0, 10.0, *(10 + 0.1 * n for n in range(1, 20))], least_s=0.45)
    for index in range(20):
        clock(frame(index))
    assert stopped == [6], "at 0.5 s five are counted, and a batch is two"


def test_the_clock_tells_a_change_of_size_but_not_sources_of_several():
    clock, _ = clock_of([float(n) for n in range(20)])
    clock(frame(0))
    clock(frame(0, width=128, source="b"))
    clock(frame(1))
    with pytest.raises(_pictures.SizeChangedError, match="64x48 yuv420p to 32x48 yuv420p at picture 2"):
        clock(frame(2, width=32))


# -- memory --


def test_what_is_given_back_is_waited_for_and_the_rest_is_not():
    falling = iter([{"cuda.free": 0, "process.rss": 900 << 20}, {"cuda.free": 50 << 20, "process.rss": 900 << 20},
                    {"cuda.free": 99 << 20, "process.rss": 900 << 20}])  # fmt: skip
    now = iter([0.0, 0.0, 0.5, 1.0])
    after, back_s = settle(lambda: next(falling), {"cuda.free": 100 << 20, "process.rss": 100 << 20},
                           lambda: next(now), lambda s: None)  # fmt: skip
    assert after["cuda.free"] == 0 and back_s == {"cuda.free": 1.0, "process.rss": None}


def test_memory_that_is_not_given_back_is_not_waited_for_for_ever():
    now = iter(range(100))
    _, back_s = settle(lambda: {"nvml.process_used": 500 << 20}, {"nvml.process_used": 0},
                           lambda: next(now), lambda s: None)  # fmt: skip
    assert back_s == {"nvml.process_used": None} and next(now) < 10


def test_an_unknown_reading_has_no_row():
    found = memory({"cuda.free": None, "procfs.rss": {"least": 1, "most": 3}}, {"procfs.rss": 1}, {"procfs.rss": 2},
                   {"procfs.rss": None})  # fmt: skip
    assert found == {"procfs.rss": {"rest": 1, "peak": 3, "least": 1, "after_close": 2, "back_s": None}}
    assert duration(None) is None and duration({"count": 0}) is None


# -- requests --


@pytest.mark.parametrize("mode", ["staging", "pipeline"])
@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("strategy", ["pooled", "direct", "per_frame"])
def test_every_strategy_delivers_what_the_reference_says(clip, mode, strategy, device):
    asked = request("parity", clip, mode, staging={**STAGING, "strategy": strategy}, device=device)
    found = cell.answer(asked)["hashes"]
    assert found == cell.answer({**asked, "do": "reference"})["hashes"]
    assert len(found) == len(set(found)) == 12


def test_parity_goes_round_a_short_clip_and_sizes_have_a_reference(clip):
    found = cell.answer(request("parity", clip, "pipeline", parity_frames=70))["hashes"]
    assert len(found) == 70 and found[:10] == found[60:]
    given = {"kind": "size", "uri": None, "width": 50, "height": 34, "pix_fmt": "yuv420p"}
    asked = request("parity", input=given)
    assert cell.answer(asked) == cell.answer({**asked, "do": "reference"})


@pytest.mark.parametrize("mode", ["staging", "pipeline"])
def test_a_repeat_has_every_figure(clip, mode):
    found = cell.answer(request("measure", clip, mode, frames=200 if mode == "staging" else 20))
    json.dumps(found, allow_nan=False)
    assert found["frames"] == (200 if mode == "staging" else 20), "beyond the end of what is in memory"
    assert found["fps"] == pytest.approx(found["frames"] / found["seconds"], rel=0.01)
    nbytes = FrameSpec(96, 64, "yuv420p").nbytes
    assert found["bytes_per_s"] == pytest.approx(nbytes * found["fps"], rel=0.01)
    assert found["copy_ms"]["count"] >= 36 and found["copy_ms"]["p50"] <= found["copy_ms"]["max"]
    assert found["start_s"] > 0 and found["cpu_s"] >= 0
    assert [label for _, label in found["timeline"]["marks"]] == ["open", "first frame", "warm", "counted", "closed"]
    rows = found["timeline"]["t_s"]
    assert all(len(column) == len(rows) for column in found["timeline"]["columns"].values())
    assert "process.rss" in found["memory"] and "cuda" in found["missing"]
    assert found["warnings"] == [] and found["ready_bytes"] == 70 * nbytes


def test_a_pipeline_of_ones_own_is_run_without_its_sinks_or_with_them(clip, tmp_path, monkeypatch):
    own = tmp_path / "own.yaml"
    own.write_text("version: 1\nsources: [a.mp4]\nstages: [motion]\nsinks: [{jsonl: {path: out.jsonl}}]\n", "utf-8")
    make_clip(tmp_path / "a.mp4", 40)
    given = {"kind": "pipeline", "uri": str(own), "width": None, "height": None, "pix_fmt": None}
    asked = request("measure", mode="pipeline", input=given)
    monkeypatch.chdir(tmp_path)
    assert cell.answer(asked)["frames"] == 20
    assert not (tmp_path / "out.jsonl").exists()
    folder = tmp_path / "thrown"
    folder.mkdir()
    assert cell.answer({**asked, "keep_sinks": True, "folder": str(folder)})["frames"] == 20
    assert (folder / "out.jsonl").exists() and not (tmp_path / "out.jsonl").exists()
    monkeypatch.chdir(tmp_path)
    parity = {**asked, "do": "parity", "parity_frames": 10}
    found = cell.answer(parity)["hashes"]
    assert len(found) == 10
    assert found == cell.answer({**parity, "staging": {**STAGING, "strategy": "direct"}})["hashes"]


def test_a_change_of_size_in_mid_clip_is_told(tmp_path):
    asked = request("measure", changing(tmp_path), "pipeline", warmup=4)
    with pytest.raises(_pictures.SizeChangedError, match="mid-clip, from 96x64 yuv420p to 128x64"):
        cell.answer(asked)
    with pytest.raises(_pictures.SizeChangedError, match="mid-clip"):
        cell.answer({**asked, "mode": "staging"})


def test_an_input_that_ends_too_soon_says_what_is_needed(clip, monkeypatch):
    monkeypatch.setattr(_measure._work, "ENDLESS", 1)
    with pytest.raises(FramepipeError, match="ended after 0 frames behind the warm-up; 120 are needed"):
        cell.answer(request("measure", clip, "pipeline", warmup=100))


def test_the_machine_tells_what_strategies_there_are():
    found = cell.answer(request("machine"))
    json.dumps(found, allow_nan=False)
    assert found["device"]["kind"] == "cpu" and found["device"]["shared"] and found["gpu"] is None
    assert found["strategies"]["pooled"] is None and found["strategies"]["cupy_pool"]
    assert "process.rss" in found["sensors"] and found["cache_bytes"] > 0
    with pytest.raises(ConfigError, match="unknown staging strategy 'poled'; did you mean 'pooled'"):
        cell.answer(request("machine", strategies=["poled"]))
    with pytest.raises(ConfigError, match="allow that with --allow-code"):
        cell.answer(request("machine", strategies=["os:path"]))
    with pytest.raises(ConfigError, match="no registered staging strategy"):
        cell.answer(request("machine", strategies=["os:path"], allow_code=True))


def test_every_number_of_a_cell_is_an_option_of_staging():
    StagingOptions(**STAGING, measure=True)


def test_an_answer_is_one_last_line(clip, monkeypatch, capsys):
    def asking(**changes: Any) -> tuple[int, dict[str, Any]]:
        text = json.dumps({**request("machine"), "parent": psutil.Process().pid, **changes})
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        monkeypatch.setattr(cell, "_watch_parent", lambda number: None)
        print("a component's own words", end="")
        code = cell.main()
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    code, answer = asking()
    assert code == 0 and answer["result"]["cpus"] >= 1
    code, answer = asking(device="gpu")
    assert code == 2 and answer["error"]["type"] == "ConfigError" and "unknown device" in answer["error"]["text"]
    code, answer = asking(do="nothing")
    assert (code, answer["error"]) == (1, {"text": "KeyError: 'nothing'", "type": "KeyError", "exit_code": 1})


# -- processes --


@pytest.fixture
def child(monkeypatch):
    def use(script: str) -> None:
        monkeypatch.setattr(_launch, "COMMAND", (sys.executable, "-I", "-c", textwrap.dedent(script)))

    return use


def never() -> bool:
    return False


def test_a_result_is_the_last_line_and_the_request_is_standard_input(child):
    child("""
        import json, sys
        asked = json.load(sys.stdin)
        print("noise {")
        print(json.dumps({"result": {"do": asked["do"], "parent": asked["parent"]}}))
    """)
    outcome = launch({"do": "x"}, never, 30)
    assert outcome.result == {"do": "x", "parent": psutil.Process().pid} and not outcome.stopped


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "import sys; sys.stderr.write('one\\n\\nout of luck\\n'); sys.exit(7)",
            "ended with status 7: one | out of luck",
        ),
        ("print('[1]')", "ended with status 0"),
        ("import os; print('{\"result\": {}}', flush=True); os._exit(9)", "ended with status 9 after its result"),
    ],
)
def test_a_child_without_a_result_says_how_it_ended(child, script, reason):
    child(script)
    outcome = launch({}, never, 30)
    assert outcome.result is None and outcome.reason.endswith(reason)


def test_an_error_that_is_told_keeps_its_kind(child):
    child(
        """
        print('{"error": {"text": "no GPU", "type": "DeviceUnavailableError", "exit_code": 2}}')
        raise SystemExit(2)
        """
    )
    outcome = launch({}, never, 30)
    assert (outcome.reason, outcome.kind, outcome.exit_code) == ("no GPU", "DeviceUnavailableError", 2)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("name", "hint"), [("SIGKILL", ", as happens where memory runs out"), ("SIGSEGV", "")])
def test_a_crash_names_the_signal(child, name, hint):
    child(f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert launch({}, never, 30).reason == f"the process was ended by {name}{hint}"


STUBBORN = """
    import signal, threading
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("script", ["import threading; threading.Event().wait(60)", STUBBORN])
def test_a_child_is_ended_when_the_bench_is_stopped(child, monkeypatch, script):
    monkeypatch.setattr(_launch, "_GRACE_S", 0.2)
    child(script)
    seen: list[int] = []

    def stopping() -> bool:
        seen.extend(process.pid for process in psutil.Process().children() if process.pid not in seen)
        return True

    outcome = launch({}, stopping, 30)
    assert outcome.stopped and outcome.result is None
    assert seen and not any(psutil.pid_exists(pid) for pid in seen)


def test_a_child_that_hangs_is_ended(child):
    child("import threading; threading.Event().wait(60)")
    assert launch({}, never, 0.1).reason == "no result within 0.1 s"


@pytest.mark.parametrize("gone", [True, False])
def test_a_child_whose_parent_has_gone_ends(gone):
    with subprocess.Popen([sys.executable, "-I", "-c", ""]) as earlier:
        earlier.wait()
    number = earlier.pid if gone else psutil.Process().pid
    script = f"""
        import sys, threading
        from framepipe.bench import cell
        cell._LOOK_S = 0.01
        cell._watch_parent({number})
        print("here", flush=True)
        sys.stdin.read() if {not gone} else threading.Event().wait(60)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], input="", capture_output=True, text=True,
                          env=environment(os.environ), timeout=60, check=False)  # fmt: skip
    assert done.returncode == (1 if gone else 0), done.stderr


def test_a_child_finds_what_its_parent_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = environment({"PYTHONPATH": "here", "OTHER": "x"})
    assert found["OTHER"] == "x"
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "here")


FLIP = '''
"""A strategy that turns one byte of each picture."""
from dataclasses import dataclass
from framepipe.registry import register
from framepipe.staging.pooled import Pooled

@register("flip")
@dataclass(kw_only=True)
class Flip(Pooled):
    def fill(self, frames, at, slot, spec):
        super().fill(frames, at, slot, spec)
        slot.memory[at : at + len(frames), 5] ^= 1
'''


def test_the_parity_gate_stops_a_strategy_that_turns_a_byte(clip, tmp_path, monkeypatch):
    """The whole way, in processes: this is what the gate is for."""
    (tmp_path / "flipping.py").write_text(FLIP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    choice = Choice(modes=("staging",), batch=(1,), fillers=("auto",), copy_threads=(1,))
    options = Options(inputs=find([str(clip)]), strategies=("pooled", "flipping:Flip"), choice=choice, device="cpu",
                      frames=20, repeat=1, least_s=0.0, allow_code=True)  # fmt: skip
    asked: list[str] = []

    def counted(request: Any, *more: Any) -> Any:
        asked.append(f"{request['do']} {request.get('staging', {}).get('strategy')}")
        return launch(request, *more)

    found = Bench(options, launch=counted).run()
    right, wrong = found["cells"]
    assert right["status"] == "ok" and len(right["runs"]) == 1
    assert wrong["status"] == "refused" and wrong["reason"].startswith("its outputs are wrong: 24 of 24 pictures")
    assert "measure flipping:Flip" not in asked and len(asked) == 5


def test_an_input_has_its_facts(clip, tmp_path):
    (given,) = find([str(clip)])
    assert (given.name, given.width, given.height, given.pix_fmt) == ("a", 96, 64, "yuv420p")
    assert given.facts[0]["frames"] == 60 and len(given.facts[0]["sha256"]) == 64 and given.facts[0]["codec"] == "h264"
    one, two, size = find([str(clip), str(clip)], [(1920, 1080)])
    assert (one.name, two.name, size.name) == ("a", "a-2", "1080p") and size == size_input(1920, 1080)
    (motion,) = find(["motion"])
    assert motion.kind == "pipeline" and motion.name == "motion" and motion.facts[0]["name"] == "shapes.mp4"
    with pytest.raises(SourceError, match="no such file"):
        find([str(tmp_path / "none.mp4")])
    with pytest.raises(ConfigError, match="reads its clip many times"):
        find(["-"])


def test_what_a_process_makes_once_is_there_before_memory_is_read(clip, monkeypatch):
    """Kernels that CUDA loaded (6 MB, for good) once counted as memory that a strategy does not give back."""
    order: list[str] = []
    read, run = _measure.read_sensors, Pipeline.run

    def reading(sensors: Any) -> Any:
        order.append("read")
        return read(sensors)

    def running(self: Pipeline) -> Any:
        order.append("run")
        return run(self)

    monkeypatch.setattr(_measure, "read_sensors", reading)
    monkeypatch.setattr(Pipeline, "run", running)
    assert cell.answer(request("measure", clip))["frames"] == 20
    assert order[:4] == ["run", "read", "read", "run"] and order.count("run") == 2
