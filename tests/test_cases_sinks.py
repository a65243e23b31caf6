"""Results and configuration, from files through the whole pipeline to files.

Rows B86 to B92. The sinks and the configuration have modules of their own with every parameter; here is one test a row.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from case_inputs import a_module_leaves_nothing_behind  # noqa: F401 (a fixture)
from conftest import make_clip, number_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_faults import Boom
from test_interrupt import SCENE, running, until_lines
from test_interrupt import pipeline as write_pipeline
from test_pipeline import balance

from framepipe import cli
from framepipe.errors import SinkError
from framepipe.pipeline import Pipeline
from framepipe.sinks.jsonl import Jsonl
from framepipe.sinks.video import Video
from framepipe.source import Source
from framepipe.sources.file import File
from framepipe.testing import FrameList

pytestmark = pytest.mark.usefixtures("a_module_leaves_nothing_behind")
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


def pictures(path: Path) -> list[tuple[int, Fraction]]:
    """(number in the picture, time) of a whole file."""
    with av.open(str(path)) as container:
        return [
            (int(number_of(frame.to_ndarray(format="gray"))), frame.pts * Fraction(*_ratio(frame.time_base)))
            for frame in container.decode(video=0)
        ]


def _ratio(base: Any) -> tuple[int, int]:
    return base.numerator, base.denominator


def convert(source: Any, *sinks: Any, **options: Any) -> Any:
    with Pipeline([source], ["rgb"], list(sinks), device="cpu", **options) as pipeline:
        report = pipeline.run()
    balance(report)
    return report


def solid(colour: tuple[int, int, int], width: int, height: int, count: int = 3) -> FrameList:
    frames = []
    for pts in range(count):
        frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), colour, np.uint8), "rgb24")
        frame.pts, frame.time_base = pts, Fraction(1, 25)
        frames.append(frame)
    return FrameList(name="s", frames=frames)


# -- B86: whole files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov", "avi", "ts"])
def test_b86_every_picture_is_in_a_readable_file(clip, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    convert(clip, Video(path=str(path), crf=10, threads=1))
    assert [number for number, _ in pictures(path)] == list(range(60))


@pytest.mark.parametrize("how", ["error", "stop", "break"])
def test_b86_what_was_written_before_an_early_end_is_readable(clip, tmp_path, how):
    path = tmp_path / "a.mp4"
    written: list[int] = []

    def at_40(frame: Any) -> None:
        written.append(frame.index)
        if frame.index == 40:
            if how == "error":
                raise Boom
            if how == "stop":
                pipeline.stop()

    pipeline = Pipeline([clip], ["rgb"], [Video(path=str(path), crf=10, threads=1), at_40], device="cpu")
    with pipeline:
        if how == "break":
            for frame in pipeline:
                if frame.index == 40:
                    break
        elif how == "error":
            with pytest.raises(SinkError):
                pipeline.run()
        else:
            pipeline.run()
    found = [number for number, _ in pictures(path)]
    assert found == list(range(len(found))) and len(found) >= 41 and set(written) <= set(found)
    assert os.listdir(tmp_path) == ["a.mp4"]


@posix
def test_b86_a_kill_leaves_no_half_file_under_the_final_name(tmp_path, monkeypatch):
    """What is there has a name that says so."""
    monkeypatch.chdir(tmp_path)
    write_pipeline(SCENE % "", "{jsonl: {path: o.jsonl}}, {video: {path: o.mp4}}")
    with running() as process:
        until_lines(process, count=5)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    assert "o.mp4" not in os.listdir() and "o.part.mp4" in os.listdir()


# -- B87: times --------------------------------------------------------------------------------------------------------

MS = [0, 40, 80, 500, 540, 580, 620, 980]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
@pytest.mark.parametrize("shift", [0, 1400])
def test_b87_times_are_those_of_the_source(tmp_path, suffix, shift):
    """Not rounded to the rate, nor begun at zero."""
    times = [ms + shift for ms in MS]
    source = make_clip(tmp_path / "in.mkv", len(times), rate=1000, pts=times, gop=4)
    path = tmp_path / f"out.{suffix}"
    convert(source, Video(path=str(path), crf=10, threads=1))
    assert pictures(path) == [(number, Fraction(ms, 1000)) for number, ms in enumerate(times)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    base=st.sampled_from([(1, 1000), (1, 90_000), (1, 600), (1001, 30_000), (1, 48_000)]),
    first=st.integers(0, 5000),
)
def test_b87_times_of_any_kind(tmp_path, steps, base, first):
    """Of any time base: the greatest error is half a tick of the output's (1/10000 s or finer in MP4)."""
    ticks = [first + sum(steps[:number]) for number in range(len(steps))]
    source = solid((99, 120, 80), 64, 48, len(ticks))
    for frame, pts in zip(source.frames, ticks, strict=True):
        frame.pts, frame.time_base = pts, Fraction(*base)
    path = tmp_path / "a.mp4"
    convert(source, Video(path=str(path), preset="ultrafast", threads=1), overwrite=True)
    found = [time for _, time in pictures(path)]
    right = [pts * Fraction(*base) for pts in ticks]
    assert len(found) == len(right)
    assert max(abs(a - b) for a, b in zip(found, right, strict=True)) <= Fraction(1, 20_000)


# -- B88, B89: sizes ---------------------------------------------------------------------------------------------------


def test_b88_another_size_begins_another_file(tmp_path):
    """And it is said; nothing is resized unasked."""
    data = b""
    for number, (width, height) in enumerate([(64, 48), (128, 96), (64, 48)]):
        clip = make_clip(tmp_path / f"{number}.ts", 6, width=width, height=height, container="mpegts",
                         pts=[6 * number + i for i in range(6)], first=6 * number)  # fmt: skip
        data += clip.read_bytes()
    (tmp_path / "chg.ts").write_bytes(data)
    out = tmp_path / "out"
    report = convert(tmp_path / "chg.ts", Video(path=str(out / "a.mkv"), crf=5, threads=1))
    assert sorted(path.name for path in out.iterdir()) == ["a.mkv", "a_0001.mkv", "a_0002.mkv"]
    numbers = []
    for path, size in zip(sorted(out.iterdir()), [(64, 48), (128, 96), (64, 48)], strict=True):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height) == size
        numbers += [number for number, _ in pictures(path)]
    assert numbers == list(range(18))
    assert "64x48 to 128x96" in " ".join(report.warnings)
    resized = tmp_path / "b.mkv"
    with Pipeline(
        [tmp_path / "chg.ts"], ["rgb", _resize(64, 48)], [Video(path=str(resized), threads=1)], device="cpu"
    ) as pipeline:
        pipeline.run()
    assert len(pictures(resized)) == 18


def _resize(width: int, height: int) -> Any:
    from framepipe.stages.resize import Resize

    return Resize(width=width, height=height)


def test_b89_an_odd_size_into_h264(tmp_path):
    """The last column and row are repeated, and that is said; yuv444p keeps the size."""
    report = convert(solid((200, 100, 50), 63, 47), Video(path=str(tmp_path / "a.mp4"), threads=1))
    with av.open(str(tmp_path / "a.mp4")) as container:
        frame = next(container.decode(video=0))
        assert (frame.width, frame.height) == (64, 48)
    assert "cannot hold 63x47" in " ".join(report.warnings) and "yuv444p" in " ".join(report.warnings)
    report = convert(solid((200, 100, 50), 63, 47), Video(path=str(tmp_path / "b.mp4"), pix_fmt="yuv444p", threads=1))
    with av.open(str(tmp_path / "b.mp4")) as container:
        frame = next(container.decode(video=0))
        assert (frame.width, frame.height) == (63, 47)
    assert not report.warnings


CODECS = [("a.mp4", "libx264", "yuv420p"), ("a.mkv", "libx264", "yuv422p"), ("a.mp4", "libx264", "yuv444p"),
          ("a.webm", "libvpx-vp9", "yuv420p"), ("a.mkv", "ffv1", "yuv420p"), ("a.avi", "mjpeg", "yuvj420p"),
          ("a.mp4", "mpeg4", "yuv420p"), ("a.mkv", "libx264rgb", "rgb24")]  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(width=st.integers(16, 70), height=st.integers(16, 70), which=st.sampled_from(CODECS))
def test_b89_any_size_into_any_encoder(tmp_path, width, height, which):
    """The picture is there in full, with a column or a row more at most."""
    name, codec, pix_fmt = which
    if codec not in av.codecs_available:
        return
    options = {"deadline": "realtime", "cpu-used": "8"} if "vp9" in codec else {}
    sink = Video(path=str(tmp_path / name), codec=codec, pix_fmt=pix_fmt, threads=1, options=options)
    convert(solid((200, 100, 50), width, height), sink, overwrite=True)
    with av.open(str(tmp_path / name)) as container:
        found = list(container.decode(video=0))
    assert len(found) == 3
    assert 0 <= found[0].width - width <= 1 and 0 <= found[0].height - height <= 1
    image = found[0].to_ndarray(format="rgb24").astype(int)
    assert np.abs(image[height - 1, width - 1] - (200, 100, 50)).max() < 40, "no black edge"


# -- B90: mistakes in a configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("stages: [{resize: {widht: 640}}]\n", 3, ["stages[0].widht", "did you mean 'width'"]),
        ("stages: [rgb, {resize: {widht: 640}}]\n", 3, ["stages[1].widht"]),
        ("stages: [reszie]\n", 3, ["unknown stage 'reszie'", "did you mean 'resize'"]),
        ('stages: [{resize: {width: "4"}}]\n', 3, ["stages[0].width", "remove the quotes"]),
        ("stages: []\nstages: []\n", 4, ["stages", "twice"]),
        ("decode: Linear\n", 3, ["decode", "did you mean 'linear'"]),
        ("source_defaults: {drop: Latest}\n", 3, ["source_defaults.drop", "did you mean 'latest'"]),
        ("source_defaults: {timeout_s: soon}\n", 3, ["source_defaults.timeout_s", "a number"]),
        ("stages:\n\t- rgb\n", 4, ["tab"]),
        ("sinks: [{jsonl: {path: o.jsonl, pth: x}}]\n", 3, ["sinks[0].pth", "did you mean 'path'"]),
    ],
)
def test_b90_a_mistake_has_file_line_and_the_nearest_name(tmp_path, monkeypatch, capfd, text, line, words):
    """Nothing is opened or written before the whole file is checked."""
    monkeypatch.chdir(tmp_path)
    opened: list[Any] = []
    monkeypatch.setattr(File, "open", lambda self, stopping: opened.append(self))
    sinks = "" if "sinks" in text else "sinks: [{jsonl: {path: out/o.jsonl}}]\n"
    Path("p.yaml").write_text(f"version: 1\nsources: [a.mp4]\n{text}{sinks}", encoding="utf-8")
    assert cli.main(["run", "p.yaml", "--device", "cpu", "--report", "out/r.json"]) == 2
    err = capfd.readouterr().err
    assert f"p.yaml:{line}" in err, err
    for word in words:
        assert word in err, err
    assert not opened and os.listdir() == ["p.yaml"]


def test_b90_an_empty_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").touch()
    assert cli.main(["run", "p.yaml"]) == 2
    assert "p.yaml: empty" in capfd.readouterr().err


def test_b90_every_source_takes_a_drop_policy():
    """By the class, so that a source of somebody else has it too."""
    assert Source(drop="oldest").drop == "oldest"
    assert File(uri="a.mp4").drop == "never"


# -- B91: colour -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height", "matrix"), [(96, 64, (0.299, 0.114, 6)), (1280, 720, (0.2126, 0.0722, 1))])
def test_b91_the_colour_of_the_output(tmp_path, width, height, matrix):
    kr, kb, tag = matrix
    path = tmp_path / "a.mp4"
    convert(solid((74, 203, 221), width, height, 1), Video(path=str(path), preset="ultrafast", crf=15, threads=1))
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    assert (int(frame.colorspace), int(frame.color_range)) == (tag, 1)
    planes = [np.frombuffer(p, np.uint8).reshape(-1, p.line_size)[p.height // 2, p.width // 2] for p in frame.planes]
    y, u, v = (float(code) for code in planes)
    luma, cb, cr = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
    red, blue = luma + 2 * (1 - kr) * cr, luma + 2 * (1 - kb) * cb
    back = np.array([red, (luma - kr * red - kb * blue) / (1 - kr - kb), blue]) * 255
    assert np.abs(back - (74, 203, 221)).max() <= 3


# -- B92: versions of PyAV ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.mkv", "raw.264", "a.gif", "a.nut"])
def test_b92_rates_and_time_bases_of_any_version_are_plain_json(tmp_path, name):
    """Fractions in one version, numbers of PyAV's own in the next; unknown ones None, or 0/0 of which float is nan."""
    options: dict[str, Any] = {
        "raw.264": {"container": "h264"},
        "a.gif": {"codec": "gif", "pix_fmt": "rgb8"},
        "a.nut": {"codec": "rawvideo", "pix_fmt": "nv12"},
    }.get(name, {})
    source = make_clip(tmp_path / name, 5, **options)
    report = convert(source, Jsonl(path=str(tmp_path / "o.jsonl")))
    json.dumps(report.to_dict(), allow_nan=False)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 5 and all(isinstance(line["time_s"], float | int) for line in lines)
    with Pipeline([source], device="cpu") as frames:
        for frame in frames:
            assert type(frame.time_base) is Fraction
