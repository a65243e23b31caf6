"""Pictures copied in slices: they come whole, whatever FFmpeg makes of odd rows, and every thread of it ends."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_planecopy import FORMATS, POISON, filled

from framepipe import ffmpeg, planecopy, slicecopy
from framepipe.frame import FrameSpec, frame_planes
from framepipe.planecopy import PlaneCopy
from framepipe.slicecopy import SliceCopies, SliceCopy, threads_for

linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads of a process are counted on Linux")


@pytest.fixture(autouse=True)
def tried_anew():
    threads_for.cache_clear()
    yield
    threads_for.cache_clear()


@pytest.fixture
def large(monkeypatch):
    """Every picture is large enough for several threads."""
    monkeypatch.setattr(planecopy, "LARGE", 0)


def system_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def asked(monkeypatch) -> list[bool]:
    """Of each picture that was to be copied in slices whether it was."""
    plain, told = SliceCopies.copy, []

    def copy(self: SliceCopies, *given: Any) -> bool:
        told.append(plain(self, *given))
        return told[-1]

    monkeypatch.setattr(SliceCopies, "copy", copy)
    return told


def put(frame: Any, count: int) -> PlaneCopy:
    """Copy a picture with ``count`` threads."""
    spec = FrameSpec.of(frame)
    memory = np.full((1, spec.nbytes), POISON, np.uint8)
    room, threads = PlaneCopy(memory, spec), SliceCopies(count)
    room.put(0, [frame], threads)
    threads.close()
    return room


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("size", [(640, 360), (642, 486), (129, 135), (128, 1080), (128, 135)])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_format_comes_whole(size, count):
    """Of 1080 rows, eight threads would get 135 each."""
    for name in FORMATS:
        frame = filled(*size, name, 1)
        room = put(frame, count)
        for view, plane in zip(room.views, frame_planes(frame, room.spec), strict=True):
            assert np.array_equal(view[0], plane), name


def test_threads_are_as_many_as_bring_a_picture_whole():
    assert threads_for(FrameSpec(1920, 1080, "yuv420p"), 4) == 4
    assert 2 <= threads_for(FrameSpec(1920, 1080, "yuv420p"), 8) <= 8
    assert threads_for(FrameSpec(1920, 1080, "yuv444p"), 8) == 8
    assert threads_for(FrameSpec(1920, 1080, "yuv420p"), 1) == 0


def test_a_row_that_is_lost_is_seen(monkeypatch):
    """As slices of 135 rows lose one of chroma."""
    plain = SliceCopy.copy
    spec = FrameSpec(128, 48, "yuv420p")

    def copy(self: SliceCopy, to: Any, pitches: Any, source: Any, lines: Any) -> bool:
        done = plain(self, to, pitches, source, lines)
        ctypes.memset(to[2] + 7 * pitches[2], 0, 32)
        return done

    assert threads_for(spec, 4) == 4
    threads_for.cache_clear()
    monkeypatch.setattr(SliceCopy, "copy", copy)
    assert threads_for(spec, 4) == 0


def test_small_pictures_are_copied_by_one_thread(asked):
    put(filled(640, 360, "yuv420p", 1), 4)
    assert asked == []
    put(filled(1280, 720, "yuv420p", 1), 4)
    assert asked == [True]


@pytest.mark.usefixtures("large")
def test_what_is_between_rows_is_left_alone(asked):
    """FFmpeg would copy it, and behind the last row what is not the picture's."""
    frame = filled(642, 480, "yuv420p", 1)
    room = put(frame, 2)
    assert asked == [False]
    (luma, *_) = room.spec.planes
    whole = room.views[0].base
    while whole.base is not None:
        whole = whole.base
    rows = whole.reshape(-1)[luma.offset : luma.offset + luma.pitch * luma.height].reshape(luma.height, luma.pitch)
    assert luma.pitch > 642 and (rows[:, 642:] == POISON).all()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("missing", ["library", "layout", "refusal"])
def test_without_it_a_picture_is_copied_all_the_same(monkeypatch, asked, missing):
    slicecopy._library.cache_clear()
    if missing == "library":
        monkeypatch.setattr(ffmpeg, "path_of", lambda *given: None)
    elif missing == "layout":
        monkeypatch.setattr(slicecopy, "_begins_as_expected", lambda util: False)
    else:
        monkeypatch.setattr(SliceCopy, "copy", lambda *given: False)
    try:
        frame = filled(256, 240, "yuv420p", 3)
        room = put(frame, 4)
        assert asked == [False]
        for view, plane in zip(room.views, frame_planes(frame, room.spec), strict=True):
            assert np.array_equal(view[0], plane)
    finally:
        slicecopy._library.cache_clear()


@linux
def test_the_threads_end_with_it():
    spec = FrameSpec(640, 480, "yuv420p")
    assert threads_for(spec, 3) == 3
    before = system_threads()
    frame = filled(640, 480, "yuv420p", 1)
    memory = np.zeros((1, spec.nbytes), np.uint8)
    copies = SliceCopies(3)
    to = [memory.ctypes.data + plane.offset for plane in spec.planes]
    given = (to, [plane.pitch for plane in spec.planes])
    source = ([plane.buffer_ptr for plane in frame.planes], [plane.line_size for plane in frame.planes])
    for _ in range(3):
        assert copies.copy(spec, *given, *source)
    assert before < system_threads() <= before + 3
    copies.close()
    copies.close()
    assert system_threads() == before


@linux
@pytest.mark.usefixtures("large")
def test_threads_of_sizes_that_are_gone_end():
    threads = SliceCopies(2)
    before = system_threads()
    for width in range(128, 128 * 21, 128):
        frame = filled(width, 48, "yuv420p", 1)
        spec = FrameSpec.of(frame)
        PlaneCopy(np.zeros((1, spec.nbytes), np.uint8), spec).put(0, [frame], threads)
    assert system_threads() <= before + 2 * slicecopy._SIZES
    threads.close()
    assert system_threads() == before


@pytest.mark.usefixtures("large")
def test_several_threads_copy_at_the_same_time():
    frames = [filled(256, 240, "yuv420p", number) for number in range(24)]
    spec = FrameSpec.of(frames[0])
    memory = np.zeros((len(frames), spec.nbytes), np.uint8)
    room, threads = PlaneCopy(memory, spec), SliceCopies(3)

    def work(first: int) -> None:
        for i in range(first, len(frames), 4):
            room.put(i, [frames[i]], threads)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    threads.close()
    for i, frame in enumerate(frames):
        for view, plane in zip(room.views, frame_planes(frame, spec), strict=True):
            assert np.array_equal(view[i], plane)
