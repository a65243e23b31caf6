"""Planes into slots: what arrives is what `plane_view` shows, and nothing is written beside it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.filter import Graph
from av.video import frame as av_frame
from hypothesis import given, settings
from hypothesis import strategies as st

from framepipe import pixfmt, planecopy
from framepipe.frame import FrameSpec, frame_planes
from framepipe.planecopy import PlaneCopy

FORMATS = sorted(set(pixfmt.table()) & set(av.video.format.names))
POISON = 0xA5
LARGE = (640, 512)
"""A picture of 8 bits with more bytes than are copied with the interpreter lock held, in every format."""

SIZES = st.integers(1, 70)


@pytest.fixture(params=["found", "missing"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """FFmpeg's copy, and what is done without it."""
    planecopy._library.cache_clear()
    planecopy._format.cache_clear()
    with monkeypatch.context() as patch:
        if request.param == "missing":
            patch.setattr(planecopy, "_library", cache(lambda: None))
        else:
            assert planecopy._library() is not None, "PyAV's own libavutil is not found on this system"
        yield request.param
        planecopy._format.cache_clear()


def filled(width: int, height: int, name: str, seed: int) -> av.VideoFrame:
    """A picture whose every byte is random, those behind the rows too."""
    frame = av.VideoFrame(width, height, name)
    rng = np.random.default_rng(seed)
    for plane in frame.planes:
        plane.update(rng.integers(0, 256, plane.buffer_size, np.uint8).tobytes())
    return frame


def filtered(frame: av.VideoFrame, name: str, arguments: str) -> av.VideoFrame:
    """The picture behind one filter of libavfilter."""
    graph = Graph()
    frame.pts, frame.time_base = 0, Fraction(1, 25)
    first = graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base)
    between, last = graph.add(name, arguments), graph.add("buffersink")
    first.link_to(between)
    between.link_to(last)
    graph.configure()
    graph.push(frame)
    return graph.pull()


def put_all(frames: list[Any], spec: FrameSpec, at_once: int = 1) -> tuple[PlaneCopy, np.ndarray]:
    """The frames, so many at once, in poisoned memory with more room than they need."""
    memory = np.full((len(frames) + 1, spec.nbytes + 320), POISON, np.uint8)
    room = PlaneCopy(memory, spec)
    for i in range(0, len(frames), at_once):
        room.put(i, frames[i : i + at_once])
    return room, memory


def check(frames: list[Any], spec: FrameSpec, memory: np.ndarray) -> None:
    """Each picture is there, and every other byte is as it was."""
    expected = np.full_like(memory, POISON)
    for i, frame in enumerate(frames):
        views = spec.views(expected[i : i + 1])
        for view, plane in zip(views, frame_planes(frame, spec), strict=True):
            view[0] = plane
    assert np.array_equal(memory, expected)


def fast(room: PlaneCopy) -> bool:
    """Whether every picture so far went by FFmpeg's copy."""
    return bool(room._lines) and all(lines is not False for lines in room._lines.values())


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(width=SIZES, height=SIZES, count=st.integers(1, 3))
def test_every_format_arrives_whole_and_alone(name, width, height, count):
    frames = [filled(width, height, name, seed) for seed in range(count)]
    spec = FrameSpec.of(frames[0])
    room, memory = put_all(frames, spec)
    check(frames, spec, memory)
    assert fast(room)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_arrives_by_either_way(library, name):
    """Odd and even, larger and smaller than what is copied with the interpreter lock held."""
    for width, height in ((1, 1), (2, 2), (33, 17), (64, 48), (70, 69), (LARGE[0] - 1, LARGE[1] - 1)):
        frames = [filled(width, height, name, seed) for seed in range(2)]
        spec = FrameSpec.of(frames[0])
        room, memory = put_all(frames, spec)
        check(frames, spec, memory)
        assert fast(room) == (library == "found")


def test_large_pictures_let_go_of_the_interpreter_lock_and_small_ones_do_not():
    """The smallest that are copied without it are just larger than the largest that are copied with it."""
    for number, width, lets_go in ((1, 1024, False), (1, 1088, True), (4, 256, False), (4, 320, True)):
        frames = [filled(width, 256, "gray", seed) for seed in range(number)]
        spec = FrameSpec.of(frames[0])
        room = PlaneCopy(np.zeros((number, spec.nbytes), np.uint8), spec)
        room._library = library = Counting(planecopy._library())
        room.put(0, frames)
        name = "image" if number == 1 else "samples"
        assert library.called == {name if lets_go else f"{name}_held": 1}


class Counting:
    """FFmpeg's functions, and how often each was called."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.called: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.library, name)
        if not callable(found):
            return found

        def call(*given: Any) -> Any:
            self.called[name] = self.called.get(name, 0) + 1
            return found(*given)

        return call


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(columns=st.integers(1, 3), height=st.integers(1, 40), at=st.integers(0, 2), count=st.integers(2, 5))
def test_several_pictures_arrive_whole_and_alone(name, columns, height, at, count):
    """Of widths that leave no gaps between rows, and of those that do."""
    for width in (columns * 256, columns * 256 - 1):
        frames = [filled(width, height, name, seed) for seed in range(at + count)]
        spec = FrameSpec.of(frames[0])
        memory = np.full((len(frames) + 1, spec.nbytes + 320), POISON, np.uint8)
        room = PlaneCopy(memory, spec)
        room._library = library = Counting(planecopy._library())
        for i, frame in enumerate(frames[:at]):
            room.put(i, [frame])
        library.called.clear()
        room.put(at, frames[at:])
        check(frames, spec, memory)
        whole = [plane.pitch * plane.height for plane in spec.planes]
        block = np.gcd.reduce(whole)
        together = not spec.has_gaps and sum(whole) <= planecopy._BLOCKS * block
        calls = {name.removesuffix("_held"): calls for name, calls in library.called.items()}
        assert calls == ({"samples": 1} if together else {"image": count})


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("yuv420p", 6), ("nv12", 3), ("yuv422p", 4), ("yuv444p10le", 3), ("gray", 1), ("rgb24", 1), ("gbrap", 4)],
)
def test_usual_pictures_are_a_handful_of_blocks(name, blocks):
    for size in ((1920, 1080), (1280, 720), (3840, 2160)):
        spec = FrameSpec(*size, name)
        nbytes, starts = planecopy._blocks(spec)
        assert sum(map(len, starts)) == blocks and blocks * nbytes == sum(p.pitch * p.height for p in spec.planes)


def test_several_pictures_go_again_where_others_went(library):
    frames = [filled(128, 32, "yuv420p", seed) for seed in range(6)]
    spec = FrameSpec.of(frames[0])
    for at_once in (2, 3, 2):
        room, memory = put_all(frames[::-1], spec, at_once)
        for at in range(0, 6, at_once):
            room.put(at, frames[at : at + at_once])
        check(frames, spec, memory)


def test_pictures_of_which_one_has_other_lines_are_copied_one_by_one(library):
    cut = filtered(filled(640, 96, "yuv420p", 1), "crop", "128:32:0:0")
    frames = [filled(128, 32, "yuv420p", 2), cut, filled(128, 32, "yuv420p", 3)]
    spec = FrameSpec.of(frames[0])
    assert not spec.has_gaps
    _, memory = put_all(frames, spec, 3)
    check(frames, spec, memory)


def test_pictures_upside_down_are_copied_one_by_one(library):
    frames = [filled(128, 32, "yuv420p", 1), filtered(filled(128, 32, "yuv420p", 2), "vflip", "")]
    spec = FrameSpec.of(frames[0])
    _, memory = put_all(frames, spec, 2)
    check(frames, spec, memory)


@pytest.mark.parametrize("name", ["yuv420p", "yuva420p", "yuv422p10le", "nv12", "p010le", "gray", "rgb24", "gbrap"])
@pytest.mark.parametrize(("width", "height"), [(33, 17), (64, 48), (1, 1)])
def test_rows_may_be_longer_than_those_of_the_slot(library, name, width, height):
    """A picture cut out of a large one keeps its lines."""
    whole = filled(640, 96, name, 1)
    frames = [filtered(whole, "crop", f"{width}:{height}:{x}:{y}:exact=1") for x, y in ((0, 0), (6, 4))]
    spec = FrameSpec.of(frames[0])
    assert all(frame.planes[0].line_size > spec.planes[0].pitch for frame in frames)
    room, memory = put_all(frames, spec)
    check(frames, spec, memory)
    assert fast(room) == (library == "found")


def test_pictures_of_different_lines_share_a_room(library):
    cut = filtered(filled(640, 96, "yuv420p", 1), "crop", "48:32:0:0")
    frames = [filled(48, 32, "yuv420p", 2), cut, filled(48, 32, "yuv420p", 3)]
    spec = FrameSpec.of(frames[0])
    room, memory = put_all(frames, spec)
    check(frames, spec, memory)
    assert len(room._lines) == 2


@pytest.mark.parametrize(("name", "good"), [("yuv420p", (64, 32, 32)), ("yuv420p10le", (128, 64, 64))])
def test_lines_that_do_not_fit_are_not_ffmpegs(name, good):
    """It would read beyond them, or what is no plane."""
    spec = FrameSpec(64, 32, name)
    room = PlaneCopy(np.empty((1, spec.nbytes), np.uint8), spec)
    assert room._fits(good) and room._fits(tuple(2 * size for size in good))
    assert not any(room._fits((*good[:i], good[i] - 1, *good[i + 1 :])) for i in range(3))
    assert not any(room._fits(sizes) for sizes in ((0, 0, 0), tuple(-size for size in good), good[:2], (*good, 64)))


def test_a_format_that_this_ffmpeg_does_not_know_is_copied_without_it(monkeypatch):
    monkeypatch.setattr(planecopy, "_format", lambda name: -1)
    frames = [filled(33, 17, "nv12", 1)]
    spec = FrameSpec.of(frames[0])
    room, memory = put_all(frames, spec)
    check(frames, spec, memory)
    assert not fast(room)


def test_every_format_has_a_number_in_ffmpeg():
    assert all(planecopy._format(name) >= 0 for name in FORMATS)
    assert planecopy._format("nonesuch") == -1


@pytest.mark.parametrize("size", [(64, 48), LARGE])
def test_several_threads_put_different_pictures_at_once(library, size):
    frames = [filled(*size, "yuv420p", seed) for seed in range(6)]
    spec = FrameSpec.of(frames[0])
    memory = np.full((len(frames) + 1, spec.nbytes), POISON, np.uint8)
    room = PlaneCopy(memory, spec)
    together = threading.Barrier(3)

    def put(first: int) -> None:
        for _ in range(5):
            together.wait(10)
            for i in range(first, len(frames), 3):
                room.put(i, [frames[i]])

    threads = [threading.Thread(target=put, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    check(frames, spec, memory)


class Library:
    """What a library loaded by name has: ``functions`` of it, and nothing else."""

    def __init__(self, functions: tuple[str, ...]) -> None:
        for name in functions:
            setattr(self, name, type(name, (), {"__call__": lambda self, *given: 0})())


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """PyAV as it lies on Windows: modules that export nothing of FFmpeg, and its libraries in a folder beside."""
    module = tmp_path / "av" / "video" / "frame.pyd"
    module.parent.mkdir(parents=True)
    (tmp_path / "av.libs").mkdir()
    planecopy._library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(av_frame, "__file__", str(module))
        yield tmp_path / "av.libs"
    planecopy._library.cache_clear()


def loading(monkeypatch: pytest.MonkeyPatch, exports: dict[str, tuple[str, ...]]) -> list[str]:
    """Make `ctypes` find ``exports`` by file name; returns what was asked for."""
    asked: list[str] = []

    def load(path: str) -> Library:
        name = Path(path).name
        asked.append(name)
        if name not in exports:
            raise OSError(f"{name} is no library")
        return Library(exports[name])

    monkeypatch.setattr(ctypes, "PyDLL", load)
    monkeypatch.setattr(ctypes, "CDLL", load)
    return asked


ALL = planecopy._FUNCTIONS


def test_the_library_of_a_windows_wheel_is_found_by_its_name(wheel, monkeypatch):
    for name in ("avcodec-62-0a1b.dll", "avutil-60-99ffee.dll", "swscale-9-77.dll"):
        (wheel / name).touch()
    asked = loading(monkeypatch, {"frame.pyd": (), "avutil-60-99ffee.dll": ALL, "avcodec-62-0a1b.dll": ALL})
    found = planecopy._library()
    assert asked == ["frame.pyd", *["avutil-60-99ffee.dll"] * 3]
    held, free = found.image_held, found.image
    assert held is not free and held.restype is None and len(held.argtypes) == len(free.argtypes) == 7
    assert found.samples_held is not found.samples and len(found.samples.argtypes) == 7
    assert found.number_of.argtypes == [ctypes.c_char_p]


def test_libraries_that_cannot_be_loaded_or_lack_a_function_are_passed_over(wheel, monkeypatch):
    for name in ("avutil-58-a.dll", "avutil-59-b.dll", "avutil-60-c.dll"):
        (wheel / name).touch()
    asked = loading(monkeypatch, {"avutil-59-b.dll": ALL[:-1], "avutil-60-c.dll": ALL})
    assert planecopy._library() is not None
    assert asked[-1] == "avutil-60-c.dll" and "avutil-58-a.dll" in asked


def test_without_any_library_numpy_copies(wheel, monkeypatch):
    loading(monkeypatch, {})
    planecopy._format.cache_clear()
    try:
        assert planecopy._library() is None and planecopy._format("yuv420p") == -1
        frames = [filled(33, 17, "yuv420p", 1)]
        spec = FrameSpec.of(frames[0])
        room, memory = put_all(frames, spec)
        check(frames, spec, memory)
        assert not fast(room)
    finally:
        planecopy._format.cache_clear()


@pytest.mark.parametrize("name", ["yuv420p", "nv12", "rgb24", "yuv420p10le"])
def test_a_picture_that_lies_upside_down_in_memory_comes_upright(library, name):
    frame = filled(66, 48, name, 1)
    wanted = [plane[::-1].tobytes() for plane in frame_planes(frame, FrameSpec.of(frame))]
    turned = filtered(frame, "vflip", "")
    spec = FrameSpec.of(turned)
    assert turned.planes[0].line_size < 0
    assert [plane.tobytes() for plane in frame_planes(turned, spec)] == wanted
    room, _ = put_all([turned], spec)
    assert [view[0].tobytes() for view in room.views] == wanted
