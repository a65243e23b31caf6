"""Bad input, through the command line: one line that names the input and what would help, and an exit status.

An input problem that leaves nothing delivered is 1, a wrong request 2, damage with something delivered 3.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from conftest import framepipe, make_clip
from test_pipeline import balance

from framepipe import cli
from framepipe.report import RunReport

pytestmark = pytest.mark.usefixtures("nothing_left")
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
ROOT = str(Path(framepipe.__file__).parents[1])


@dataclass(frozen=True)
class Told:
    """What a run of the command line left: exit status, stdout, lines on stderr."""

    code: int
    out: str
    err: list[str]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """``run(*sources, sinks=…, options…)`` in an empty working folder, on the CPU."""
    monkeypatch.chdir(tmp_path)
    pipeline = tmp_path.parent / f"{tmp_path.name}.yaml"
    pipeline.write_text("version: 1\nsources: [nothing.mp4]\nsinks: [discard]\n", encoding="utf-8")

    def call(
        *sources: str | Path, sinks: str | None = None, options: tuple[str, ...] = (), device: str = "cpu"
    ) -> Told:
        argv = ["run", str(pipeline), "--device", device, *options]
        for source in sources:
            argv += ["--source", str(source)]
        if sinks is not None:
            argv += ["--set", f"sinks=[{sinks}]"]
        code = cli.main(argv)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Told(code, out, err.splitlines())

    return call


def one_line(told: Told, code: int, *words: str) -> None:
    """The status, and one line of an error that holds every one of ``words``."""
    assert told.code == code, told
    assert len(told.err) == 1, told.err
    assert told.err[0].startswith("framepipe: error: ")
    assert "This is a bug" not in told.err[0]
    for word in words:
        assert word in told.err[0]
    assert told.out == ""


def make_sound(path: Path) -> Path:
    """Half a second of silence, and no picture."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=48000, layout="mono")
        for i in range(24):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 48000, i * 1024
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_missing(run):
    one_line(run("gone/nope.mp4"), 1, "nope.mp4", "no such file")
    one_line(run(), 1, "nothing.mp4", "no such file")
    one_line(run(""), 2, "the name of an input is empty")


def test_empty(run):
    Path("none.mp4").write_bytes(b"")
    one_line(run("none.mp4"), 1, "none.mp4", "the file is empty")


def test_text(run):
    Path("notes.mp4").write_text("no video at all\n" * 100, encoding="utf-8")
    one_line(run("notes.mp4"), 1, "notes.mp4", "no video that FFmpeg knows")


def test_no_video(run, tmp_path):
    make_sound(tmp_path / "song.m4a")
    one_line(run("song.m4a"), 1, "song.m4a", "no video stream", "audio")


def test_a_folder_with_nothing_usable(run):
    Path("films").mkdir()
    Path("films/readme.txt").write_text("soon", encoding="utf-8")
    one_line(run("films"), 1, "films", "holds no video and no picture", "*.mp4")


def test_a_pattern_that_matches_nothing(run):
    one_line(run("films/*.mp4"), 1, "films/*.mp4", "no file matches")


@pytest.mark.parametrize("other", ["films", "none-*.mp4", "nope.mp4"])
def test_what_is_not_there_does_not_end_the_others(run, clip, other):
    Path("films").mkdir()
    told = run(other, clip, options=("--report", "report.json"))
    assert told.code == 3
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert [(source["status"], source["uri"]) for source in report["sources"]] == [
        ("failed", other), ("complete", str(clip))
    ]  # fmt: skip
    assert other in report["sources"][0]["error"]


def test_a_stream_that_is_not_there(run, clip):
    told = run(options=("--set", f"sources=[{{uri: '{clip.as_posix()}', stream: 7}}]"))
    one_line(told, 1, "a.mp4", "no video stream 7", "video streams are 0")


@pytest.mark.skipif(sys.platform == "win32" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_unreadable(run, clip):
    Path("locked.mp4").write_bytes(clip.read_bytes())
    Path("locked.mp4").chmod(0)
    one_line(run("locked.mp4"), 1, "locked.mp4", "Permission denied")


def test_debug_shows_the_traceback(clip, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("version: 1\nsources: [nope.mp4]\nsinks: [discard]\n", encoding="utf-8")
    assert cli.main(["run", "p.yaml", "--device", "cpu", "--debug"]) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("bad", ["nope.mp4", "empty.mp4", "text.mp4"])
def test_one_bad_input_beside_a_good_one(run, clip, bad):
    Path("empty.mp4").touch()
    Path("text.mp4").write_text("no video at all\n" * 100, encoding="utf-8")
    told = run(bad, clip, sinks="{jsonl: {path: o.jsonl}}", options=("--report", "r.json"))
    assert told.code == 3
    assert told.err[0].startswith("incomplete: 60 frames of 2 sources")
    assert sum(bad in line for line in told.err) == 1, "what is wrong with it is said once"
    assert len(Path("o.jsonl").read_text(encoding="utf-8").splitlines()) == 60
    assert books("r.json")["exit"] == "incomplete"
    quiet = run(bad, clip, options=("-q",))
    assert quiet.code == 3
    assert len(quiet.err) == 1 and bad in quiet.err[0], "an error is no chat"


def test_two_bad_inputs_are_both_told(run):
    told = run("one.mp4", "two.mp4")
    assert told.code == 1
    assert [line.count(".mp4: no such file") for line in told.err] == [1, 1]


def test_standard_input_that_is_not_there_or_holds_nothing(run, monkeypatch):
    one_line(run("-"), 1, "-: there is no standard input")
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        one_line(run("-"), 1, "-: ended before anything came")


def test_standard_input_is_one_source_s(run):
    one_line(run("-", "-"), 2, "standard input (-)")


HARD = ["with space.mp4", "käse.mp4", "日本語.mp4", "🎬.mp4", "100%d.mp4", "%04d.mp4", "-x.mp4", "it's.mp4", "[a]*.mp4",
        "{source}.mp4", "$HOME.mp4", "#a.mp4", "a,b.mp4", "file.mp4", "..mp4"]  # fmt: skip
HARD += [] if sys.platform == "win32" else ['quo"te.mp4', "a:b.mp4", "http:c.mp4", "rtsp:.mp4", "back\\slash.mp4"]


def test_hard_file_names(run, clip):
    """Every one works by itself from the command line, and all of them from YAML and as a folder."""
    for name in HARD:
        Path(name).write_bytes(clip.read_bytes())
    for name in HARD:
        told = run(name, options=("-q", "--report", "r.json", "--set", "sources[0].end=0.2"))
        assert (told.code, told.err) == (0, []), name
    Path("r.json").unlink()
    sinks = "{video: {path: 'out/{source}.mp4'}}, {jsonl: {path: 'out/{source}.jsonl'}}"
    told = run(".", sinks=sinks, options=("-q", "--report", "out/r.json"))
    assert (told.code, told.err) == (0, [])
    assert len(list(Path("out").glob("*.mp4"))) == len(list(Path("out").glob("*.jsonl"))) == len(HARD)
    assert [source["delivered"] for source in books("out/r.json")["sources"]] == [60] * len(HARD)


def test_hard_file_names_in_yaml(clip, tmp_path, monkeypatch, capfd):
    """Relative to the YAML file, not to the working folder."""
    inputs = tmp_path / "films"
    inputs.mkdir()
    names = [name for name in HARD if "$" not in name]
    for name in names:
        (inputs / name).write_bytes(clip.read_bytes())
    document = {"version": 1, "sources": [{"uri": name, "end": 0.2} for name in names], "sinks": ["discard"]}
    (inputs / "p.yaml").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "films/p.yaml", "--device", "cpu"]) == 0, capfd.readouterr().err


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", ["{jsonl: {path: o.x}}", "{video: {path: o.mp4}}", "{parquet: {path: o.x}}"])
def test_an_output_that_exists(run, clip, sink):
    for name in ("o.x", "o.mp4"):
        Path(name).write_bytes(b"precious")
    if "parquet" in sink:
        pytest.importorskip("pyarrow")
    one_line(run(clip, sinks=sink), 2, "o.", "exists", "--overwrite")
    assert Path("o.x").read_bytes() == Path("o.mp4").read_bytes() == b"precious"
    assert run(clip, sinks=sink, options=("--overwrite", "-q")).code == 0
    assert sorted(os.listdir()) == ["o.mp4", "o.x"]


@pytest.mark.parametrize(
    ("sink", "path", "code", "reason"),
    [
        ("jsonl", "o.jsonl", 2, "is a file, not a folder"),
        ("video", "{source}.mp4", 2, "is a file, not a folder"),
        ("video", "{start}.mp4", 1, "cannot make its folder"),  # a name known with its first picture alone
        ("images", "{index}.png", 1, "cannot make its folder"),
    ],
)
def test_an_output_in_a_folder_that_cannot_be_made(run, clip, sink, path, code, reason):
    Path("file").write_bytes(b"precious")
    one_line(run(clip, sinks=f"{{{sink}: {{path: 'file/sub/{path}'}}}}", options=("-q",)), code, "file", reason)
    assert os.listdir() == ["file"] and Path("file").read_bytes() == b"precious"


@posix
@pytest.mark.parametrize("sink", ["jsonl", "video"])
def test_an_output_in_a_folder_that_may_not_be_written_to(run, clip, sink, monkeypatch):
    """Asked of the system beforehand (which refuses root nothing)."""
    Path("locked").mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and allowed(path, mode))
    told = run(clip, sinks=f"{{{sink}: {{path: locked/sub/o.mp4}}}}")
    one_line(told, 2, "locked/sub/o.mp4", "may not write to")


@posix
def test_a_pipe_is_written_to_and_never_replaced(run, clip):
    """Nor is a device, which root could lose by it."""
    os.mkfifo("pipe.mp4")
    fd = os.open("pipe.mp4", os.O_RDWR | os.O_NONBLOCK)
    one_line(run(clip, sinks="{video: {path: pipe.mp4}}", options=("-q",)), 1, "pipe.mp4", "must be a file")
    for overwrite in ([], ["--overwrite"]):
        assert run(clip, options=("-q", "--report", "pipe.mp4", *overwrite)).code == 0
        assert json.loads(os.read(fd, 65536))["exit"] == "complete"
    os.close(fd)
    assert Path("pipe.mp4").is_fifo()
    assert os.listdir() == ["pipe.mp4"]


@pytest.mark.parametrize("name", ["in.mp4", "o.jsonl", "o_0.jsonl", "./o.jsonl"])
def test_a_report_never_replaces_an_input_or_a_result(run, clip, name):
    Path("in.mp4").write_bytes(clip.read_bytes())
    sinks = "{jsonl: {path: o.jsonl}}, {jsonl: {path: 'o_{index}.jsonl'}}"
    told = run("in.mp4", sinks=sinks, options=("-q", "--overwrite", "--report", name))
    one_line(told, 1, Path(name).name, "it belongs to this run")
    assert Path("in.mp4").read_bytes() == clip.read_bytes()
    assert len(Path("o.jsonl").read_bytes().splitlines()) == len(Path("o_0.jsonl").read_bytes().splitlines()) == 60


@posix
def test_a_report_through_a_link(run, clip):
    os.symlink("there.json", "here.json")
    for _ in range(2):
        assert run(clip, options=("-q", "--report", "here.json")).code == 0
    assert Path("here.json").is_symlink()
    assert sorted(os.listdir()) == ["here.json", "there.json"]


def test_a_gpu_that_is_not_there(run, clip):
    one_line(run(clip, device="cuda:99"), 2, "cuda")
    told = run(clip, device="gpu")
    one_line(told, 2, "did you mean 'cuda'")


def test_an_unknown_stage(run, clip):
    one_line(run(clip, options=("--set", "stages=[resise]")), 2, "resise", "did you mean 'resize'")


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_under_jsonl(run, clip):
    told = run(clip, sinks="{jsonl: {path: /dev/full}}", options=("-q", "--report", "r.json"))
    one_line(told, 1, "/dev/full", "the disk is full")
    assert books("r.json")["exit"] == "failed"


@posix
def test_a_full_disk_under_a_video(run, clip, tmp_path):
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))\n"
        "from framepipe.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    Path("p.yaml").write_text("version: 1\nsources: [x]\nsinks: [{video: {path: o.mp4}}]\n", encoding="utf-8")
    done = child("-c", code, "run", "p.yaml", "-q", "--device", "cpu", "--source", str(clip))
    one_line(Told(done.returncode, done.stdout, done.stderr.splitlines()), 1, "o.mp4", "largest size")
    assert not Path("o.mp4").exists()


# -- damage ------------------------------------------------------------------------------------------------------------


def child(*argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def books(path: str | Path) -> dict[str, Any]:
    """A report from a file, found in balance."""
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    parts = {key: value for key, value in document.items() if key != "schema"}
    if parts["frames"]:
        balance(RunReport(**parts))
    return document


def cuts(data: bytes, count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [data[: rng.randrange(1, len(data))] for _ in range(count)]


def flips(data: bytes, count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 3, 10, 100))):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        out.append(bytes(flipped))
    return out


ALL_OF_THEM = """
import sys
from framepipe.cli import main
for number in range(int(sys.argv[1])):
    argv = ["run", "p.yaml", "-q", "--device", "cpu", *sys.argv[2:]]
    code = main([*argv, "--source", f"{number}.mp4", "--report", f"{number}.json"])
    print(number, code, flush=True)
"""


def survive(damaged: list[bytes], *options: str) -> list[int]:
    """Run each in one child process, which must live, end and report; the exit codes."""
    for number, data in enumerate(damaged):
        Path(f"{number}.mp4").write_bytes(data)
    Path("p.yaml").write_text("version: 1\nsources: [x]\nsinks: [discard]\n", encoding="utf-8")
    done = child("-c", ALL_OF_THEM, str(len(damaged)), *options)
    codes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(codes) == len(damaged), (done.returncode, len(codes), done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    assert "This is a bug" not in done.stderr
    for number, code in enumerate(codes):
        document = books(f"{number}.json")
        assert code == {"complete": 0, "failed": 1, "incomplete": 3}[document["exit"]], number
        assert (document["error"] is not None) or code != 1
    return codes


@pytest.fixture(scope="session")
def streamable(tmp_path_factory) -> bytes:
    """40 small pictures in an MP4 that begins with its index."""
    folder = tmp_path_factory.mktemp("streamable")
    clip, front = make_clip(folder / "a.mp4", 40, gop=8), folder / "b.mp4"
    with av.open(str(clip)) as source, av.open(str(front), "w", options={"movflags": "faststart"}) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    return front.read_bytes()


@pytest.mark.parametrize("decode", ["segments", "linear"])
def test_cut_off(streamable, tmp_path, monkeypatch, decode):
    monkeypatch.chdir(tmp_path)
    codes = survive(cuts(streamable, 15, seed=1), "--set", f"decode={decode}")
    assert set(codes) == {1, 3}


@pytest.mark.parametrize("decode", ["segments", "linear"])
def test_flipped_bits(streamable, tmp_path, monkeypatch, decode):
    monkeypatch.chdir(tmp_path)
    codes = survive(flips(streamable, 15, seed=2), "--set", f"decode={decode}")
    assert 3 in codes
    assert any(books(f"{number}.json")["frames"]["packet_errors"] for number in range(15))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 5))
@pytest.mark.parametrize("more", ["decode=auto", "decode=frame", "decode=segments", "decode=linear"])
@pytest.mark.parametrize("way", [cuts, flips])
def test_much_damage(streamable, clip, tmp_path, monkeypatch, way, more, seed):
    """The index at the front or at the end; through a stage and in batches."""
    monkeypatch.chdir(tmp_path)
    data = streamable if seed % 2 else clip.read_bytes()
    survive(way(data, 60, seed), "--set", more, "--set", "stages=[rgb]", "--set", f"staging.batch={1 + 3 * (seed % 2)}")
