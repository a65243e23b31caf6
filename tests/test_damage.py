"""Damaged and odd inputs end with a report that balances: nothing crashes, hangs or stays open."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import av
import numpy as np
import pytest
from conftest import descriptors, make_clip, ours, picture
from test_pipeline import balance
from test_stress import within

import framepipe
from framepipe import cli
from framepipe.container import PatientFile
from framepipe.errors import FramepipeError, SourceError
from framepipe.pipeline import Pipeline
from framepipe.sources.file import File
from framepipe.testing import FrameList

pytestmark = pytest.mark.usefixtures("nothing_left")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="not on Windows")


# -- odd --------------------------------------------------------------------------------------------------------------


def remux(clip: Path, to: Path, title: str | None = None, turned: int | None = None, **options: str) -> Path:
    """The packets of a clip in another file."""
    with av.open(str(clip)) as source, av.open(str(to), "w", options=options) as out:
        if title is not None:
            out.metadata["title"] = title
        stream = out.add_stream_from_template(source.streams.video[0])
        if turned is not None:
            stream.set_display_rotation(turned)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    return to


def test_text_in_a_file_need_not_be_utf_8(tmp_path):
    clip = remux(make_clip(tmp_path / "a.mkv", 3), tmp_path / "b.mkv", title="CAFE-CAFE")
    data = clip.read_bytes()
    assert b"CAFE-CAFE" in data
    clip.write_bytes(data.replace(b"CAFE-CAFE", b"caf\xe9-caf\xe9"))
    with Pipeline([clip], [], ["discard"], device="cpu") as pipeline:
        assert pipeline.run().frames["delivered"] == 3


@pytest.mark.parametrize(("degrees", "size"), [(30, (96, 64)), (-100, (64, 96))])
def test_a_picture_turned_by_any_angle_is_turned_by_the_nearest_right_one(tmp_path, degrees, size):
    clip = remux(make_clip(tmp_path / "a.mp4", 3), tmp_path / "b.mp4", turned=degrees)
    with framepipe.open(clip, device="cpu") as frames:
        assert {(frame.width, frame.height) for frame in frames} == {size}


def test_a_cover_picture_is_no_video(tmp_path):
    path = tmp_path / "song.mp4"
    with av.open(str(path), "w") as out:
        audio, cover = out.add_stream("aac", rate=44100), out.add_stream("mjpeg", rate=25)
        audio.layout = "mono"
        cover.width, cover.height, cover.pix_fmt = 96, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = picture(96, 64, 1, "yuvj420p")
        frame.pts = 0
        out.mux([*cover.encode(frame), *cover.encode(None)])
        for number in range(9):
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            samples.rate, samples.pts = 44100, number * 1024
            out.mux(audio.encode(samples))
        out.mux(audio.encode(None))
    with Pipeline([path], [], ["discard"], device="cpu") as pipeline:
        with pytest.raises(
            SourceError, match=r"song.mp4: has no video stream; found .*1: video mjpeg \(cover picture\)"
        ):
            pipeline.run()


@pytest.fixture
def pipe(tmp_path) -> Path:
    """A FIFO."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no FIFOs here")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    ("data", "words"), [(b"no video\n" * 99, "is no video that FFmpeg knows"), (b"", "ended before")]
)
def test_a_pipe_full_of_nonsense_leaves_no_descriptor(pipe, data, words):
    before = descriptors()
    writer = threading.Thread(target=lambda: pipe.write_bytes(data))
    pipeline = Pipeline([pipe], [], ["discard"], device="cpu")
    writer.start()
    with pytest.raises(SourceError, match=words):
        within(20, pipeline.run)
    writer.join()
    pipeline.close()
    assert descriptors() == before


def test_a_pipe_is_opened_once_even_where_segments_are_asked_for(pipe, tmp_path):
    clip = make_clip(tmp_path / "c.ts", 60, gop=16, container="mpegts")
    writer = threading.Thread(target=lambda: pipe.write_bytes(clip.read_bytes()))
    with Pipeline([pipe], [], ["discard"], device="cpu", decode="segments", threads=3) as pipeline:
        writer.start()
        report = within(20, pipeline.run)
    writer.join()
    assert report.exit == "complete" and report.frames["delivered"] == 60


@POSIX
def test_descriptors_above_1023_can_be_waited_for():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] not in (resource.RLIM_INFINITY, -1) and before[1] < 1200:
        pytest.skip("so many descriptors are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1200, before[0]), before[1]))
    reading, writing = os.pipe()
    try:
        os.dup2(reading, 1100)
        file = PatientFile(1100, "pipe", lambda: False, owns_fd=True)
        os.write(writing, b"there")
        assert file.read(99) == b"there"
        file.close()
    finally:
        os.close(reading)
        os.close(writing)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_there_is_no_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with Pipeline(["-"], [], ["discard"], device="cpu") as pipeline:
        with pytest.raises(SourceError, match="-: there is no standard input to read; name a file"):
            pipeline.run()


def test_a_folder_that_may_not_be_listed(tmp_path, capsys, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("version: 1\nsources: [folder]\nsinks: [discard]\n", encoding="utf-8")
    Path("folder").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert cli.main(["run", "p.yaml", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "framepipe: error: folder: cannot be listed (Permission denied)\n"


def test_a_name_that_no_file_can_have():
    with Pipeline(["a\0b.mp4"], [], ["discard"], device="cpu") as pipeline, pytest.raises(FramepipeError, match="a\0b"):
        pipeline.run()


def test_pictures_that_cannot_be_converted_cost_their_source_alone(monkeypatch, clip):
    class Reformatter:
        def reformat(self, frame: av.VideoFrame, **options: object) -> None:
            raise ValueError("no path between these formats")

    monkeypatch.setattr(av.video.reformatter, "VideoReformatter", Reformatter)
    odd = FrameList(name="odd", frames=[av.VideoFrame(32, 32, "pal8")])
    with Pipeline([odd, clip], [], ["discard"], device="cpu") as pipeline:
        report = pipeline.run()
    assert report.exit == "incomplete" and report.frames["delivered"] == 60
    assert "pictures in pal8 cannot be converted" in report.sources[0]["error"]


# -- damaged ----------------------------------------------------------------------------------------------------------

WHOLE: dict[str, dict[str, object]] = {
    "a.mp4": {"count": 48, "gop": 16, "bframes": 2},
    "a.mkv": {"count": 48, "gop": 16},
    "a.ts": {"count": 48, "gop": 16, "container": "mpegts"},
    "a.264": {"count": 48, "gop": 16, "container": "h264"},
    "m.avi": {"count": 24, "codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "v.webm": {"count": 24, "codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "f.mkv": {"count": 12, "codec": "ffv1"},
    "g.gif": {"count": 12, "codec": "gif", "pix_fmt": "rgb8"},
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, bytes]:
    """The bytes of a clip of each kind; the index of the MP4 file stands first."""
    folder = tmp_path_factory.mktemp("wholes")
    clips = {name: make_clip(folder / name, width=64, height=48, **options) for name, options in WHOLE.items()}
    clips["a.mp4"] = remux(clips["a.mp4"], folder / "first.mp4", movflags="faststart")
    return {name: clip.read_bytes() for name, clip in clips.items()}


def damage(data: bytes, r: random.Random, how: str) -> bytes:
    if how == "cut":
        return data[: r.randrange(len(data))]
    spoiled = bytearray(data)
    if how == "burst":
        at = r.randrange(len(data))
        end = min(len(data), at + r.randrange(1, 400))
        spoiled[at:end] = r.randbytes(end - at)
        return bytes(spoiled)
    for _ in range(r.choice((1, 3, 10, 40))):
        spoiled[r.randrange(min(1500, len(data)) if how == "head" else len(data))] = r.randrange(256)
    return bytes(spoiled)


def run_damaged(path: Path, r: random.Random) -> str:
    """Run over a damaged file; however that ends, it ends with a report. Returns how."""
    before = descriptors()
    pipeline = Pipeline(
        [path],
        r.choice(([], ["rgb"])),
        ["discard"],
        device=r.choice(("cpu", "simulated")),
        threads=r.randint(1, 4),
        decode=r.choice(("auto", "linear", "segments", "frame")),
        staging={"batch": r.choice((1, 4))},
    )
    error: FramepipeError | None = None
    try:
        within(60, pipeline.run)
    except FramepipeError as failed:
        error = failed
    pipeline.close()
    report = pipeline.report
    balance(report)
    assert report.exit in ("complete", "incomplete", "failed")
    assert (error is None) == (report.exit != "failed")
    if error is not None:
        assert isinstance(error, SourceError) or "no picture could be decoded" in str(error), error
        assert report.error and not report.frames["delivered"]
    assert not ours() and descriptors() <= before
    return report.exit


def run_many(wholes: dict[str, bytes], folder: Path, name: str, hows: tuple[str, ...], count: int) -> list[str]:
    ends = []
    for seed in range(count):
        r = random.Random(seed)
        how = r.choice(hows)
        path = folder / f"{seed}{Path(name).suffix}"
        path.write_bytes(damage(wholes[name], r, how))
        try:
            ends.append(run_damaged(path, r))
        except BaseException as error:
            error.add_note(f"seed {seed}, {how} of {name}")
            raise
    return ends


def test_an_mp4_cut_anywhere_is_never_complete(wholes, tmp_path):
    assert set(run_many(wholes, tmp_path, "a.mp4", ("cut",), 40)) == {"failed", "incomplete"}


def test_an_mp4_spoiled_anywhere_ends_in_every_way(wholes, tmp_path):
    assert len(set(run_many(wholes, tmp_path, "a.mp4", ("flip",), 40))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_container_damaged_in_every_way(wholes, tmp_path, name):
    run_many(wholes, tmp_path, name, ("cut", "flip", "burst", "head"), 200)


@pytest.mark.parametrize("decode", ["auto", "linear", "segments", "frame"])
def test_a_cut_file_still_gives_what_is_whole(wholes, tmp_path, decode):
    data = wholes["a.mp4"]
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) * 3 // 4])
    seen: list[int] = []
    source = File(uri=str(tmp_path / "cut.mp4"), decode=decode)
    with Pipeline([source], [], [lambda frame: seen.append(frame.index)], device="cpu") as pipeline:
        report = pipeline.run()
    assert report.exit == "incomplete" and len(seen) > 20 and seen == list(range(len(seen)))
    assert "announced packets were there" in " ".join(report.sources[0]["warnings"])
