"""Damaged and odd files: what is whole of them comes, the rest is told, and nothing ends the process.

Rows B40 to B43 and B47. What PyAV alone decodes with one thread, damaged packets passed over, is the truth; `fuzz`
draws such files by the thousand.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import av
import fuzz
import pytest
from case_inputs import a_module_leaves_nothing_behind  # noqa: F401 (a fixture)
from conftest import framepipe, make_clip, number_of
from test_pipeline import balance

from framepipe import cli, container, decoding, retake
from framepipe.errors import FramepipeError, SourceError
from framepipe.pipeline import Pipeline
from framepipe.report import RunReport
from framepipe.sources.file import File

pytestmark = pytest.mark.usefixtures("a_module_leaves_nothing_behind")
ROOT = str(Path(framepipe.__file__).parents[1])
WAYS = [("linear", 1), ("segments", 2), ("frame", 2), ("frame", 4), ("auto", 2), ("auto", 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("damage")
    fuzz.make_files(made)
    make_clip(made / "open.mp4", 60, bframes=2, options={"x264-params": "open-gop=1:keyint=20:threads=1:scenecut=0"})
    make_clip(made / "refresh.mp4", 60, options={"x264-params": "intra-refresh=1:keyint=16:scenecut=0:threads=1"})
    return made


def run(path: Path, decode: str = "auto", threads: int = 2, **options: Any) -> tuple[RunReport, list[int]]:
    """Report, and the numbers in the pictures."""
    seen: list[int] = []
    sink = lambda frame: seen.append(int(number_of(frame.numpy())))  # noqa: E731
    source = File(uri=str(path), decode=decode, **options)
    with Pipeline([source], [], [sink], device="cpu", threads=threads) as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.frames["delivered"] == len(seen)
    return report, seen


def truth(path: Path) -> tuple[list[int], int]:
    """(numbers in the pictures, damaged packets) as PyAV alone finds them with one thread."""
    seen: list[int] = []
    errors = 0
    with av.open(str(path)) as opened:
        stream = opened.streams.video[0]
        stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
        for packet in opened.demux(stream):
            try:
                for frame in stream.codec_context.decode(packet if packet.size else None):
                    seen.append(int(number_of(frame.to_ndarray(format="rgb24"))))
            except av.FFmpegError:
                errors += 1
    return seen, errors


def packets(path: Path) -> list[tuple[int, int]]:
    """(position, size) of each packet."""
    with av.open(str(path)) as opened:
        return [(packet.pos, packet.size) for packet in opened.demux(video=0) if packet.size]


def cut(folder: Path, to: Path, name: str, number: int, inside: int) -> Path:
    """A copy that ends ``inside`` bytes into packet ``number``."""
    position = packets(folder / name)[number][0]
    path = to / f"cut-{name}"
    path.write_bytes((folder / name).read_bytes()[: position + inside])
    return path


# -- B40: cut ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decode", "threads"), WAYS)
@pytest.mark.parametrize("name", ["first.mp4", "open.mp4"])
def test_b40_cut_in_the_middle(folder, tmp_path, name, decode, threads):
    """Frame threads lose the last pictures, and with four of them without any error."""
    if name == "open.mp4":
        make_clip(tmp_path / "o.mp4", 60, bframes=2, options={"movflags": "faststart"})
    path = cut(folder, tmp_path, "first.mp4", 25, 7)
    if name == "open.mp4":
        path = _streamed(folder / "open.mp4", tmp_path / "s.mp4", 41)
    right, errors = truth(path)
    report, seen = run(path, decode, threads)
    assert seen == right and len(seen) > 20
    assert report.exit == "incomplete" and report.frames["packet_errors"] == errors
    assert "announced packets were there" in " ".join(report.sources[0]["warnings"])


def _streamed(source: Path, to: Path, number: int) -> Path:
    """The file with its index first, cut inside packet ``number``."""
    with av.open(str(source)) as read, av.open(str(to), "w", options={"movflags": "faststart"}) as out:
        copy = out.add_stream_from_template(read.streams.video[0])
        for packet in read.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                out.mux(packet)
    position, size = packets(to)[number]
    to.write_bytes(to.read_bytes()[: position + size // 2])
    return to


@pytest.mark.parametrize("name", ["one.mp4", "a.mkv", "a.ts", "m2.ts", "m4.avi", "v9.webm", "a.264", "nob.264"])
def test_b40_no_way_of_decoding_loses_more_than_another(folder, tmp_path, name):
    """Wherever it is cut: one group of pictures, B-frames, no time stamps, no count of packets."""
    r = random.Random(name)
    data = (folder / name).read_bytes()
    if name == "one.mp4":
        data = _streamed(folder / name, tmp_path / "s.mp4", 39).read_bytes()
    for number in range(6):
        path = tmp_path / f"{number}{Path(name).suffix}"
        path.write_bytes(data[: r.randrange(len(data) * 2 // 3, len(data))])
        right, errors = truth(path)
        for decode, threads in WAYS:
            report, seen = run(path, decode, threads)
            assert (seen, report.frames["packet_errors"]) == (right, errors), (number, decode, threads)


@pytest.mark.parametrize("name", ["a.mkv", "v9.webm"])
def test_b40_a_cut_is_seen_where_only_the_duration_is_announced(folder, tmp_path, name):
    assert run(folder / name)[0].exit == "complete"
    path = tmp_path / name
    path.write_bytes((folder / name).read_bytes()[: (folder / name).stat().st_size // 2])
    report, seen = run(path)
    assert report.exit == "incomplete" and seen
    assert "announced" in " ".join(report.sources[0]["warnings"])


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
@pytest.mark.parametrize("name", ["a.ts", "a.mkv", "nob.264"])
def test_b40_a_cut_pipe(folder, tmp_path, monkeypatch, name):
    """It cannot be opened a second time for another decoder: the first one is copied."""
    data = bytearray((folder / name).read_bytes())
    if name == "a.mkv":
        for position, size in packets(folder / name)[26:28]:
            data[position + size // 2 : position + size + 20] = b"\xff" * (size - size // 2 + 20)
    copies: list[Any] = []
    monkeypatch.setattr(container, "copy_of", lambda context: copies.append(context) or retake.copy_of(context))
    for number in range(5):
        whole = tmp_path / f"{number}-{name}"
        whole.write_bytes(data[: len(data) * (95 - number) // 100 - 3 * number])
        pipe = tmp_path / f"pipe-{whole.name}"
        os.mkfifo(pipe)
        writer = threading.Thread(target=lambda pipe=pipe, whole=whole: pipe.write_bytes(whole.read_bytes()))
        writer.start()
        report, seen = run(pipe, "frame", 4)
        writer.join()
        assert report.sources[0]["decode"] == "frame"
        assert (seen, report.frames["packet_errors"]) == truth(whole)
    assert copies or name != "a.mkv"


def test_b40_a_copy_of_a_decoder_decodes_what_stands_apart(folder):
    """Some containers have the sequence's parameters in their header alone."""
    for name in ("one.mp4", "a.mkv", "m4.avi", "v9.webm", "f.mkv"):
        with av.open(str(folder / name)) as opened:
            stream = opened.streams.video[0]
            copy = retake.copy_of(stream.codec_context)
            assert copy is not stream.codec_context
            count = sum(len(copy.decode(packet if packet.size else None)) for packet in opened.demux(stream))
        assert count == fuzz.KINDS[name]["count"], name


def test_b40_what_came_before_the_cut_is_in_the_results(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = cut(folder, tmp_path, "first.mp4", 25, 7)
    sinks = [{"jsonl": {"path": "o.jsonl"}}, {"video": {"path": "o.mp4"}}]
    Path("p.yaml").write_text(json.dumps({"version": 1, "sources": [path.as_posix()], "sinks": sinks}), "utf-8")
    assert cli.main(["run", "p.yaml", "-q", "--device", "cpu"]) == 3
    lines = Path("o.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(len(truth(path)[0])))
    with av.open("o.mp4") as opened:
        assert sum(1 for _ in opened.decode(video=0)) == len(lines)


# -- frame threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("name", ["first.mp4", "open.mp4", "refresh.mp4", "a.ts", "m2.ts", "v9.webm", "nob.264"])
def test_nothing_is_taken_again_of_a_whole_file(folder, monkeypatch, name, threads):
    monkeypatch.setattr(decoding.Decoding, "_take_again", lambda self, unit: pytest.fail("taken again"))
    report, seen = run(folder / name, "frame", threads)
    assert report.exit == "complete" and seen == list(range(len(seen))) and len(seen) > 20


@pytest.mark.parametrize("name", ["first.mp4", "open.mp4", "one.mp4", "refresh.mp4", "a.ts", "a.264"])
def test_frame_threads_lose_nothing_behind_a_damaged_packet(folder, tmp_path, name):
    data = bytearray((folder / name).read_bytes())
    position, size = packets(folder / name)[22]
    position = position if position is not None and position >= 0 else len(data) // 2
    data[position + 4 : position + 4 + max(12, size // 2)] = b"\xff" * max(12, size // 2)
    path = tmp_path / name
    path.write_bytes(data)
    right = truth(path)
    for threads in (2, 4):
        report, seen = run(path, "frame", threads)
        assert (seen, report.frames["packet_errors"]) == right, threads


@pytest.mark.parametrize(("gop", "bframes"), [(1, 0), (2, 0), (3, 2)])
def test_nor_where_key_frames_without_time_stamps_follow_closely(tmp_path, gop, bframes):
    """The next ones are at work before the first has come."""
    with av.open(str(make_clip(tmp_path / "whole.264", 40, gop=gop, bframes=bframes, container="h264"))) as opened:
        whole = [bytes(packet) for packet in opened.demux(video=0) if packet.size]
    for number in (1, 19, 20, 21, 22, 38):
        packet = bytearray(whole[number])
        head = packet.rindex(b"\0\0\1") + 4  # of the slice
        packet[head : head + 6] = b"\xff" * 6
        path = tmp_path / f"{number}.264"
        path.write_bytes(b"".join([*whole[:number], packet, *whole[number + 1 :]]))
        right, errors = truth(path)
        assert errors == 1
        for threads in (2, 4):
            report, seen = run(path, "frame", threads)
            assert (len(seen), report.frames["packet_errors"]) == (len(right), errors), (number, threads)


def test_packets_beyond_a_bound_are_not_kept(folder, tmp_path, monkeypatch):
    """Then the tail is lost, and that is all."""
    path = cut(folder, tmp_path, "first.mp4", 25, 7)
    monkeypatch.setattr(retake, "_HELD_NBYTES", 100)
    report, seen = run(path, "frame", 4)
    assert report.exit == "incomplete" and seen == list(range(len(seen)))


# -- B41, B42: nothing there -------------------------------------------------------------------------------------------


def test_b41_the_index_is_missing(folder, tmp_path):
    path = tmp_path / "unfinished.mp4"
    data = (folder / "last.mp4").read_bytes()
    path.write_bytes(data[: data.index(b"moov") - 4])
    with pytest.raises(SourceError, match=r"unfinished\.mp4: .*index is missing"):
        run(path)


def child(path: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """``framepipe run`` over one file in a process of its own."""
    document = {"version": 1, "sources": [path.as_posix()], "sinks": ["discard"]}
    (tmp_path / "p.yaml").write_text(json.dumps(document), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "framepipe", "run", "p.yaml", "--device", "cpu"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, encoding="utf-8",
        timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("inside", [0, 40], ids=["index-only", "in-the-first-frame"])
def test_b42_cut_inside_the_first_frame(folder, tmp_path, inside):
    """PyAV alone tells no error, or one; either way nothing of what was announced is no success."""
    path = cut(folder, tmp_path, "first.mp4", 0, inside)
    told = child(path, tmp_path)
    assert told.returncode == 1, told
    assert "Traceback" not in told.stderr and "of 40 announced" in told.stderr and path.stem in told.stderr


@pytest.mark.parametrize(("decode", "threads"), WAYS)
def test_b42_cut_inside_the_first_frame_in_every_way(folder, tmp_path, decode, threads):
    for inside in (0, 1, 5, 40):
        with pytest.raises(FramepipeError, match="no picture could be decoded"):
            run(cut(folder, tmp_path, "first.mp4", 0, inside), decode, threads)


@pytest.mark.parametrize("name", ["a.mkv", "a.ts", "v9.webm", "f.mkv", "a.264", "mj.avi", "a.gif"])
def test_b42_nothing_but_a_header_is_no_success(folder, tmp_path, name):
    for share in (0.02, 0.05, 0.1):
        path = tmp_path / name
        data = (folder / name).read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        error: FramepipeError | None = None
        try:
            _, seen = run(path)
        except FramepipeError as failed:
            error, seen = failed, []
        assert seen or Path(name).stem in str(error)


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "avi", "nut"])
def test_b42_not_one_picture_is_no_success(tmp_path, suffix):
    """A recorder that was started and given nothing."""
    path = tmp_path / f"started.{suffix}"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.start_encoding()
    with pytest.raises(FramepipeError, match="started"):
        run(path)


# -- B43: damaged packets ----------------------------------------------------------------------------------------------


def flipped(folder: Path, to: Path, first: int, count: int) -> Path:
    """Bytes of the slices of some packets turned, their lengths left as they are."""
    data = bytearray((folder / "first.mp4").read_bytes())
    for position, size in packets(folder / "first.mp4")[first : first + count]:
        data[position + 5 : position + size] = bytes(byte ^ 0xFF for byte in data[position + 5 : position + size])
    path = to / "flipped.mp4"
    path.write_bytes(data)
    return path


def wrong_lengths(folder: Path, to: Path, first: int, count: int) -> Path:
    """The length in front of a slice is far beyond its packet."""
    data = bytearray((folder / "first.mp4").read_bytes())
    for position, _ in packets(folder / "first.mp4")[first : first + count]:
        data[position : position + 2] = b"\x7f\xff"
    path = to / "lengths.mp4"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("decode", "threads"), WAYS)
@pytest.mark.parametrize("damage", [flipped, wrong_lengths])
def test_b43_one_bad_packet_does_not_end_the_run(folder, tmp_path, damage, decode, threads):
    path = damage(folder, tmp_path, 12, 3)
    right, errors = truth(path)
    report, seen = run(path, decode, threads)
    assert seen == right and seen[-1] == 39 and len(seen) >= 30
    assert report.frames["packet_errors"] == errors > 0
    assert report.exit == report.sources[0]["status"] == "incomplete"


@pytest.mark.parametrize("decode", ["linear", "frame", "segments"])
def test_b43_a_limit_of_bad_packets_in_a_row(folder, tmp_path, monkeypatch, decode):
    """Nothing from behind them comes, however far other threads are."""
    monkeypatch.setattr(decoding, "GIVE_UP", 5)
    plain = decoding.Decoding._decode

    def later(self: Any, feed: Any, unit: Any, packet: Any) -> None:
        if decode == "segments" and unit is feed.units[0] and unit.segment.key_pts is None:
            while len(feed.units) > 1 and not feed.units[1].out:  # the segment behind is decoded first
                threading.Event().wait(0.001)
        plain(self, feed, unit, packet)

    monkeypatch.setattr(decoding.Decoding, "_decode", later)
    report, seen = run(wrong_lengths(folder, tmp_path, 12, 5), decode)
    assert report.sources[0]["error"] is None and seen[-1] == 39
    report, seen = run(wrong_lengths(folder, tmp_path, 12, 6), decode)
    assert report.exit == "incomplete" and len(seen) <= 12
    assert "given up after 5 undecodable packets in a row" in report.sources[0]["error"]


# -- B47: nothing at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("empty.mp4", 1, "empty.mp4: the file is empty"),
        ("text.mp4", 1, "text.mp4: is no video"),
        ("folder.mp4", 1, "folder.mp4: the folder holds no video"),
        ("nowhere.mp4", 1, "nowhere.mp4: no such file"),
        ("", 2, "the name of an input is empty"),
    ],
)
def test_b47_no_video_at_all(tmp_path, monkeypatch, capfd, name, code, words):
    monkeypatch.chdir(tmp_path)
    Path("empty.mp4").touch()
    Path("text.mp4").write_text("no video at all\n" * 100, encoding="utf-8")
    Path("folder.mp4").mkdir()
    Path("p.yaml").write_text("version: 1\nsources: [a.mp4]\nsinks: [discard]\n", encoding="utf-8")
    assert cli.main(["run", "p.yaml", "--device", "cpu", "--source", name]) == code
    out, err = capfd.readouterr()
    assert not out and len(err.splitlines()) == 1 and words in err
