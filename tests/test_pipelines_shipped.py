"""The pipelines that come with framepipe: each runs as it is, in an empty folder, and does what its comments say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from conftest import make_clip
from test_motion import recall_and_precision

from framepipe import Pipeline, cli, shipped
from framepipe.config import load, loads

ROOT = Path(__file__).parents[1]
NAMES = ("convert", "motion", "tensors")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def frames_of(name: str, *sets: str, **options: Any) -> Pipeline:
    """The frames of a shipped pipeline, without its sinks."""
    return Pipeline(**load(shipped.find(name), sets=["sinks=[]", *sets], **options).kwargs())


def times_of(path: Path) -> list[float]:
    with av.open(str(path)) as container:
        return [frame.time for frame in container.decode(video=0)]


def sample(name: str) -> Path:
    folder = shipped.folder("samples")
    assert folder is not None
    return folder / name


def test_all_of_them_are_tested_here():
    assert tuple(shipped.pipelines()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_its_comments_are_right(name, capsys):
    text = shipped.find(name).read_text(encoding="utf-8")
    commands = re.findall(r"^#   framepipe (run .*?)(?:  .*)?$", text, re.MULTILINE)
    assert commands
    assert any(command == f"run {name}" or "--source" in command for command in commands)
    for command in commands:
        verb, *rest = shlex.split(command)
        assert verb == "run"
        assert cli.main(["check", *rest]) == 0, command
    capsys.readouterr()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_commented_out_is_right_too(name):
    path = shipped.find(name)
    text = path.read_text(encoding="utf-8")
    spare = re.compile(r"^(  )# (- \w+: \{.*\})$", re.MULTILINE)
    config = loads(spare.sub(r"\1\2", text), path=path)
    assert len(config.stages) == len(load(path).stages) + len(spare.findall(text))
    assert bool(spare.search(text)) == (name == "convert")


# -- motion --


def test_motion_finds_the_shapes_and_draws_them_into_the_video(capsys):
    assert cli.main(["run", "motion", "--report", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert (report["exit"], report["frames"]["decoded"], report["frames"]["delivered"]) == ("complete", 250, 250)
    assert not report["warnings"]
    lines = [json.loads(line) for line in Path("out/shapes.jsonl").read_text(encoding="utf-8").splitlines()]
    truth = json.loads(sample("shapes.json").read_text(encoding="utf-8"))["frames"]
    assert [(line["index"], line["time_s"]) for line in lines] == [(each["index"], each["time_s"]) for each in truth]
    recall, precision = recall_and_precision([line["meta"]["motion"] for line in lines], [e["boxes"] for e in truth])
    assert recall >= 0.95
    assert precision >= 0.95
    times = times_of(Path("out/shapes.mp4"))
    assert len(times) == 250
    assert times == times_of(sample("shapes.mp4"))
    said = capsys.readouterr().err
    assert "wrote " in said
    assert "warning" not in said


def test_motion_gives_the_same_on_the_simulated_device():
    sets = ["sources.0.end=2", "stages=[motion, {rgb: {accuracy: exact}}, draw]"]
    with frames_of("motion", *sets, device="cpu") as cpu, frames_of("motion", *sets, device="simulated") as simulated:
        seen = 0
        for one, other in zip(cpu, simulated, strict=True):
            assert one.meta == other.meta
            assert np.array_equal(one.numpy(), other.numpy())
            seen += bool(one.meta["motion"])
    assert seen == 25


def test_the_picture_in_the_readme_is_what_it_draws():
    with av.open(str(ROOT / "docs" / "motion.png")) as container:
        picture = next(container.decode(video=0)).to_ndarray(format="rgb24").astype(int)
    with frames_of("motion", "sources.0.end=4.02", device="cpu") as frames:
        *_, last = frames
    assert last.index == 100
    # The fast conversion may differ by some codes from one FFmpeg to another; a box elsewhere differs by more.
    assert np.abs(picture - last.numpy()).max() <= 6


# -- tensors --


def test_tensors_runs_without_extras():
    assert cli.main(["run", "tensors", "--quiet", "--report", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert report["staging"]["batch"] == 4
    assert report["stages"]["tensor"]["count"] == 63
    assert report["sinks"]["1:discard"]["frames"] == 250
    lines = Path("out/shapes-luma.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 250
    assert all(16 <= json.loads(line)["meta"]["stats"]["mean"] <= 235 for line in lines)


def test_the_python_in_the_comments_of_tensors_runs(monkeypatch):
    text = shipped.find("tensors").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^#   ((?:import|from| *with| *for| +\w).*|)$", text, re.MULTILINE))
    assert "frame.tensors" in code
    monkeypatch.chdir(shipped.find("tensors").parents[1])  # the code names the file from there
    seen: list[Any] = []
    exec(code + "\n        seen.append(tensor)\n        if len(seen) == 3: break\n", {"seen": seen})
    assert [(tensor.shape, tensor.dtype) for tensor in seen] == [((3, 640, 640), np.float32)] * 3
    first = seen[0].get() if hasattr(seen[0], "get") else seen[0]  # from a GPU
    top, middle = first[:, 0, 0], first[:, 320]
    assert np.allclose(top, 114 / 255)
    assert 0 <= middle.min() < middle.max() <= 1
    assert len(np.unique(middle)) > 20


# -- convert --


def test_convert_makes_h264_of_anything(tmp_path):
    odd = make_clip(tmp_path / "odd.mkv", 12, width=97, height=65, codec="ffv1", pix_fmt="yuv444p10le")
    argv = ["run", "convert", "--source", str(odd), "--source", str(sample("shapes.mp4")), "--quiet"]
    assert cli.main([*argv, "--set", "sources.1.end=1"]) == 0
    for name, size, count in (("odd", (98, 66), 12), ("shapes", (640, 360), 25)):
        with av.open(f"out/{name}-h264.mp4") as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            assert (context.name, context.pix_fmt, (context.width, context.height)) == ("h264", "yuv420p", size)
            frames = list(container.decode(stream))
        assert len(frames) == count
        assert frames[0].colorspace in (5, 6), "BT.601 below 720 lines, and tagged so"
    assert times_of(Path("out/shapes-h264.mp4")) == times_of(sample("shapes.mp4"))[:25]
    assert times_of(Path("out/odd-h264.mp4")) == pytest.approx(times_of(odd), abs=1e-3)
