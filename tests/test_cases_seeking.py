"""``start`` and ``end``: exactly those pictures whose time is within them, in every container and way of decoding.

Rows B37 to B39. What a linear read of the whole file gives is the truth.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from case_inputs import a_module_leaves_nothing_behind  # noqa: F401 (a fixture)
from conftest import make_clip, number_of
from test_pipeline import balance

from framepipe.errors import ConfigError
from framepipe.pipeline import Pipeline
from framepipe.sources.file import File

pytestmark = pytest.mark.usefixtures("a_module_leaves_nothing_behind")
DECODE = ["linear", "segments", "frame"]
OPEN_GOP = {"x264-params": "open-gop=1:keyint=20:min-keyint=20:scenecut=0:threads=1"}
KINDS: dict[str, dict[str, Any]] = {
    "gop20.mp4": {"count": 60, "gop": 20},
    "open.mp4": {"count": 60, "bframes": 2, "options": OPEN_GOP},
    "bframes.mkv": {"count": 60, "gop": 13, "bframes": 3},
    "gop13.ts": {"count": 40, "gop": 13, "container": "mpegts"},
    "open.ts": {"count": 60, "bframes": 2, "options": OPEN_GOP, "container": "mpegts"},
    "mpeg2.ts": {"count": 40, "gop": 12, "codec": "mpeg2video", "container": "mpegts"},
    "vp9.webm": {"count": 40, "codec": "libvpx-vp9", "gop": 15, "options": {"deadline": "realtime", "cpu-used": "8"}},
    "m4.avi": {"count": 40, "codec": "mpeg4", "gop": 12},
    "mj.avi": {"count": 20, "codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "one.mp4": {"count": 40, "gop": 250, "bframes": 2},
    "gap.mp4": {"count": 40, "gop": 10, "pts": [i + 200 * (i >= 17) for i in range(40)]},
    "raw.264": {"count": 40, "gop": 10, "container": "h264"},
    "a.gif": {"count": 20, "codec": "gif", "pix_fmt": "rgb8", "rate": 10},
    "refresh.mp4": {"count": 60, "options": {"x264-params": "intra-refresh=1:keyint=16:scenecut=0:threads=1"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("seeking")
    for name, options in KINDS.items():
        make_clip(made / name, **options)
    return made


def read(path: Path, decode: str = "linear", **options: Any) -> list[tuple[int, int, float]]:
    """(index, number in the picture, time) of what is delivered."""
    seen: list[tuple[int, int, float]] = []
    sink = lambda frame: seen.append((frame.index, number_of(frame.numpy()), frame.time_s))  # noqa: E731
    with Pipeline([File(uri=str(path), decode=decode, **options)], [], [sink], device="cpu", threads=2) as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.exit == "complete", report.sources[0]
    return seen


@cache
def whole(path: Path) -> list[tuple[int, int, float]]:
    return read(path)


def within(path: Path, start: float | None, end: float | None) -> list[tuple[int, float]]:
    """(number, time) that ``start`` and ``end`` leave of the whole file."""
    return [
        (number, time_s)
        for _, number, time_s in whole(path)
        if (start is None or time_s >= start) and (end is None or time_s < end)
    ]


def plain(seen: list[tuple[int, int, float]]) -> list[tuple[int, float]]:
    return [(number, time_s) for _, number, time_s in seen]


@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("name", ["gop20.mp4", "open.mp4"])
def test_b37_the_target_is_the_first_picture_not_the_key_frame(folder, name, decode):
    assert [number for number, _ in plain(read(folder / name, decode, start=0.5, end=1.0))] == list(range(13, 25))
    assert read(folder / name, decode, start=2.4) == []
    assert [number for number, _ in plain(read(folder / name, decode, start=2.36))] == [59]
    assert [number for number, _ in plain(read(folder / name, decode, end=0.08))] == [0, 1]


def test_b37_a_start_behind_the_end_is_a_mistake(folder):
    with pytest.raises(ConfigError, match=r"start is 2.*behind end"):
        File(uri=str(folder / "gop20.mp4"), start=2, end=1)
    assert read(folder / "gop20.mp4", start=1.0, end=1.0) == []


@pytest.mark.parametrize("decode", DECODE)
def test_b38_a_seek_that_lands_too_late(folder, decode):
    """A transport stream has no index: the first picture found is looked at, and if need be sought earlier."""
    seen = read(folder / "gop13.ts", decode, start=1.48)
    first = whole(folder / "gop13.ts")[0][2]
    assert seen[0][1] == round((1.48 - first) * 25) and seen[0][2] == pytest.approx(1.48)
    assert plain(seen) == within(folder / "gop13.ts", 1.48, None)


@pytest.mark.parametrize("decode", DECODE)
def test_b39_a_file_without_time_stamps_is_read_from_its_beginning(folder, decode):
    seen = read(folder / "raw.264", decode, start=0.5, end=1.0)
    assert plain(seen) == within(folder / "raw.264", 0.5, 1.0)
    assert [number for _, number, _ in seen] == list(range(13, 25))
    assert [index for index, _, _ in seen] == list(range(13, 25)), "the index counts what was passed over"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
@pytest.mark.parametrize("name", ["gop13.ts", "bframes.mkv", "raw.264"])
def test_b39_a_pipe_is_read_from_its_beginning(folder, name, tmp_path):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    first = whole(folder / name)[0][2]
    writer = threading.Thread(target=lambda: pipe.write_bytes((folder / name).read_bytes()))
    writer.start()
    seen = read(pipe, start=first + 0.5, end=first + 1.0)
    # What is behind the end is not read: the writer may hold it still.
    writer.join()
    assert plain(seen) == within(folder / name, first + 0.5, first + 1.0)


@pytest.mark.parametrize("name", KINDS)
def test_every_container_wherever_it_begins_and_ends(folder, name):
    """Between, on and beside the times of pictures, from before the first to behind the last one."""
    r = random.Random(name)
    times = [time_s for *_, time_s in whole(folder / name)]
    assert [number for _, number, _ in whole(folder / name)] == list(range(KINDS[name]["count"]))
    for _ in range(8):
        points = [r.choice(times) + r.choice((0.0, 0.0, -0.001, 0.013)) for _ in range(2)]
        points += [times[0] - 1, times[-1] + 0.5, times[-1]]
        start, end = sorted(r.sample(points, 2))
        limits = r.choice(((start, end), (start, None), (None, end)))
        limits = tuple(None if limit is None else max(0.0, limit) for limit in limits)
        decode = r.choice(DECODE)
        seen = read(folder / name, decode, start=limits[0], end=limits[1])
        assert plain(seen) == within(folder / name, *limits), (name, decode, limits)
