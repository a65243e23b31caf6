"""Interleavings that once went wrong, made to happen every time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import pytest
from conftest import make_clip, ours
from test_lifecycle import child
from test_pipeline import balance
from test_stress import CLIPS, Boom, Chaos, Noting, Unruly, pictures, within

import framepipe
from framepipe import decode
from framepipe.decode import DecodePool
from framepipe.delivering import Delivery
from framepipe.device.cpu import CpuDevice
from framepipe.engine import Engine
from framepipe.errors import FramepipeError
from framepipe.feed import Feed
from framepipe.frame import Frame, Item
from framepipe.ledger import Ledger
from framepipe.memory import RecyclingPool, aligned_empty
from framepipe.pipeline import Pipeline
from framepipe.sink import Sink
from framepipe.source import Source
from framepipe.sources.file import File
from framepipe.stages.rgb import Rgb
from framepipe.staging.pooled import Pooled
from framepipe.testing import FrameList

pytestmark = pytest.mark.usefixtures("nothing_left")


def pool_of(*sources: Source, threads: int = 1, **options: Any) -> DecodePool:
    return DecodePool([Feed(source, f"s{i}") for i, source in enumerate(sources)], threads=threads, **options)


def take_all(pool: DecodePool) -> list[Any]:
    frames = []
    while (got := within(10, pool.take)) is not None:
        frames.append(got[1])
    return frames


def test_a_worker_is_woken_by_frames_taken_just_before_it_waits():
    """Takers hold no lock: everything may be gone between a worker's look at a full queue and its wait."""
    entered, emptied = threading.Event(), threading.Event()

    class Pool(DecodePool):
        def _claim(self, feeds: Any) -> Any:
            job = super()._claim(feeds)
            if job is None and feeds[0].units and len(feeds[0].units[0].out) == 2 and not entered.is_set():
                entered.set()
                emptied.wait(10)
            return job

    frames = pictures(7, 64, 32)
    pool = Pool([Feed(FrameList(frames=frames), "s")], threads=1, queue_nbytes=1, min_queue=2)
    pool.start()
    assert entered.wait(10)
    first = [pool.take(0)[1], pool.take(0)[1]]
    emptied.set()
    assert first + take_all(pool) == frames
    pool.stop()
    pool.join()


def test_what_came_before_a_stall_is_announced():
    """Takers are woken for several frames at once, but a source that may stall may never get to the next one."""
    taken, release = threading.Event(), threading.Event()

    class Bursts(FrameList):
        may_stall = True

        def open(self, stopping: Callable[[], bool]) -> Any:
            stream = super().open(stopping)

            def frames() -> Iterator[Any]:
                yield self.frames[0]
                taken.wait(10)
                while not pool._takers_waiting:
                    threading.Event().wait(0.001)
                yield self.frames[1]
                release.wait(20)

            stream.frames = frames
            return stream

    frames = pictures(2, 64, 32)
    pool = pool_of(Bursts(frames=frames))
    pool.start()
    try:
        assert within(5, pool.take)[1] is frames[0]
        taken.set()
        assert within(5, pool.take)[1] is frames[1]
    finally:
        release.set()
        pool.stop()
        pool.join()


def test_what_was_kept_back_before_a_stall_comes_of_a_source_that_does_not_say_that_it_may_stall(monkeypatch):
    """Small pictures are handed on by the dozen, and nobody tells of the last ones if no more come."""
    monkeypatch.setattr(decode, "_ANNOUNCE_S", float("inf"))
    release = threading.Event()

    class Bursts(FrameList):
        def open(self, stopping: Callable[[], bool]) -> Any:
            stream = super().open(stopping)

            def frames() -> Iterator[Any]:
                while not pool._takers_waiting:
                    threading.Event().wait(0.001)
                yield from self.frames
                release.wait(20)

            stream.frames = frames
            return stream

    frames = pictures(2, 64, 32)
    pool = pool_of(Bursts(frames=frames))
    pool.start()
    try:
        assert [within(5, pool.take)[1] for _ in frames] == frames
    finally:
        release.set()
        pool.stop()
        pool.join()


def test_the_end_of_a_source_comes_while_its_next_round_is_being_opened():
    opened, release = threading.Event(), threading.Event()

    class Slow(FrameList):
        def open(self, stopping: Callable[[], bool]) -> Any:
            if rounds:
                opened.set()
                release.wait(10)
            rounds.append(1)
            return super().open(stopping)

    rounds: list[int] = []
    frames = pictures(3, 64, 32)
    pool = pool_of(Slow(frames=frames, loop=5))
    pool.start()
    assert within(5, pool.take)[1] is frames[0]
    assert opened.wait(10)
    pool.finish(pool.feeds[0])
    release.set()
    assert take_all(pool) == [] and pool.exhausted
    assert len(rounds) == 2 and pool.feeds[0].loops_left == 0
    pool.stop()
    pool.join()


def test_the_end_of_a_source_comes_while_its_next_segment_is_being_cut(tmp_path):
    cutting, release = threading.Event(), threading.Event()

    class Pool(DecodePool):
        def _cut(self, feed: Feed) -> None:
            cutting.set()
            release.wait(10)
            super()._cut(feed)

    clip = make_clip(tmp_path / "gops.mp4", **CLIPS["gops.mp4"])
    pool = Pool([Feed(File(uri=str(clip)), "s")], threads=2, decode="segments")
    pool.start()
    assert within(5, pool.take) is not None and cutting.wait(10)
    pool.finish(pool.feeds[0])
    release.set()
    take_all(pool)
    assert pool.exhausted
    pool.stop()
    pool.join()


def test_the_next_round_begins_before_the_end_of_this_one_is_noted(tmp_path):
    class Pool(DecodePool):
        def _finish(self, feed: Feed, unit: Any) -> None:
            if unit.segment is not None and unit.segment.last and feed.loops_left:
                while not feed.retired or feed.claimed:  # until it has begun
                    threading.Event().wait(0.001)
            super()._finish(feed, unit)

    clip = make_clip(tmp_path / "gops.mp4", **CLIPS["gops.mp4"])
    pool = Pool([Feed(File(uri=str(clip), loop=2), "s")], threads=3, decode="segments")
    pool.start()
    assert [frame.pts for frame in take_all(pool)] == [frame.pts for _ in range(2) for frame in pool_frames(clip)]
    assert pool.exhausted
    pool.stop()
    pool.join()


def pool_frames(clip: Path) -> list[Any]:
    with av.open(str(clip)) as container:
        return list(container.decode(video=0))


def test_a_unit_is_not_taken_over_while_somebody_is_at_work_on_it(tmp_path):
    """Its decoder would be closed under the worker."""

    class Pool(DecodePool):
        def _merge(self, feed: Feed, unit: Any, following: Any) -> None:
            assert not following.busy
            merges.append(feed)
            super()._merge(feed, unit, following)

        def _emit(self, feed: Feed, unit: Any, frame: Any) -> None:
            super()._emit(feed, unit, frame)
            if unit.verified is False:
                threading.Event().wait(0.002)  # long enough for the unit before to come to its end

    merges: list[Feed] = []
    clip = make_clip(tmp_path / "refresh.mp4", **CLIPS["refresh.mp4"])
    pool = Pool([Feed(File(uri=str(clip)), "s")], threads=3, decode="segments", min_segment=1)
    pool.crash = lambda error: crashes.append(error)
    crashes: list[BaseException] = []
    pool.start()
    assert len(take_all(pool)) == 60 and merges and not crashes
    pool.stop()
    pool.join()


def test_the_queue_is_bounded_in_bytes_when_pictures_grow():
    small, large = pictures(4, 64, 32), pictures(40, 256, 192)
    pool = pool_of(FrameList(frames=small + large), queue_nbytes=300_000, min_queue=2)
    pool.start()
    assert within(5, pool.take) is not None
    feed = pool.feeds[0]
    assert take_all(pool)[-1] is large[-1]
    assert feed.limit == 300_000 // feed.frame_nbytes == 4
    pool.stop()
    pool.join()


def test_an_input_that_cannot_be_closed_costs_a_warning_only():
    class Stuck(FrameList):
        def open(self, stopping: Callable[[], bool]) -> Any:
            stream = super().open(stopping)
            stream.close = lambda: 1 / 0
            return stream

    sources = [Stuck(name=f"s{i}", frames=pictures(3, 64, 32)) for i in range(2)]
    with Pipeline(sources, [], ["discard"], device="cpu") as pipeline:
        report = pipeline.run()
    assert report.exit == "complete" and report.frames["delivered"] == 6
    assert [s["warnings"] for s in report.sources] == [["closing failed: ZeroDivisionError: division by zero"]] * 2


def listed(count: int = 40, **options: Any) -> FrameList:
    return FrameList(name="s", frames=pictures(count, 64, 32), **options)


@dataclass(kw_only=True)
class Opening(Sink):
    """Calls ``function`` while it is being opened."""

    function: Callable[[], Any]
    type_name = "opening"

    def __post_init__(self) -> None:
        self.closed = 0

    def open(self, context: Any) -> None:
        self.function()

    def write(self, frame: Any) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("act", ["stop", "close"])
def test_a_stop_that_comes_while_everything_is_being_opened(act):
    """As a signal handler in the same thread does."""
    sink = Opening(function=lambda: getattr(pipeline, act)())
    pipeline = Pipeline([listed(loop=1_000_000)], [], [sink], device="cpu")
    assert within(10, pipeline.run).exit == "stopped"
    pipeline.close()
    assert sink.closed == 1


@pytest.mark.parametrize("act", ["stop", "close"])
def test_stop_and_close_from_another_thread_while_everything_is_being_opened(act):
    opening, release = threading.Event(), threading.Event()
    sink = Opening(function=lambda: (opening.set(), release.wait(10)))
    pipeline = Pipeline([listed(loop=1_000_000)], [], [sink], device="cpu")
    runner = threading.Thread(target=pipeline.run)
    runner.start()
    assert opening.wait(10)
    if act == "stop":
        within(5, pipeline.stop)  # never waits
        release.set()
    else:
        threading.Timer(0.01, release.set).start()
        within(10, pipeline.close)
        assert pipeline.report is not None, "close waits for the run that was about to begin"
    runner.join(10)
    assert not runner.is_alive() and pipeline.report.exit == "stopped"
    pipeline.close()
    assert sink.closed == 1


@pytest.mark.parametrize("failing", range(7))
def test_the_system_has_no_thread_left(monkeypatch, failing):
    """Sink, two decoders, one that takes, two fillers, runner: whichever thread cannot be started, all ends well."""
    plain, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("framepipe"):
            if len(started) == failing:
                started.append("failed")
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    sink = Noting()
    pipeline = Pipeline([listed()], [], [sink], device="cpu", threads=2, staging={"fillers": 2})
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        within(10, pipeline.run)
    within(10, pipeline.close)
    assert started[failing] == "failed" and sink.closed == 1 and not ours()
    assert pipeline.report.exit == "failed" and not getattr(caught.value, "__notes__", None)
    balance(pipeline.report)


def test_an_interrupt_while_the_first_thread_starts(monkeypatch):
    plain = threading.Thread.start

    caller = threading.current_thread()

    def start(thread: threading.Thread) -> None:
        plain(thread)
        if threading.current_thread() is caller:
            raise KeyboardInterrupt

    pipeline = Pipeline([listed(loop=1_000_000)], [], ["discard"], device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run()
    within(10, pipeline.close)
    assert pipeline.report.exit == "stopped" and not ours()


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_slot_whose_filling_failed_is_shown_to_nobody(monkeypatch, device):
    plain_fill, plain_fail = Pooled.fill, Engine.fail

    def fill(self: Any, frames: Any, at: int, slot: Any, spec: Any) -> None:
        if slot.ticket == 5:
            raise Boom("while filling")
        plain_fill(self, frames, at, slot, spec)

    def fail(self: Engine, error: BaseException) -> None:
        threading.Event().wait(0.05)  # the runner has all the time it wants to take the slot
        plain_fail(self, error)

    monkeypatch.setattr(Pooled, "fill", fill)
    monkeypatch.setattr(Engine, "fail", fail)
    sink = Noting(looks=True)
    pipeline = Pipeline([listed()], [Rgb()], [sink], device=device, staging="pooled")
    with pytest.raises(Boom):
        within(20, pipeline.run)
    pipeline.close()
    assert [number for _, _, number in sink.seen] == [0, 1, 2, 3, 4]
    balance(pipeline.report)


@pytest.mark.parametrize("method", ["plan", "fits"])
def test_memory_that_cannot_be_had_leaves_balanced_books(monkeypatch, method):
    monkeypatch.setattr(Pooled, method, lambda self, *args: 1 / 0)
    pipeline = Pipeline([listed()], [], [Noting()], device="cpu", staging={"strategy": "pooled", "batch": 3})
    with pytest.raises(ZeroDivisionError):
        within(10, pipeline.run)
    pipeline.close()
    balance(pipeline.report)
    assert pipeline.report.frames["decoded"] > 0


def test_a_stop_while_memory_is_made_anew_leaves_balanced_books():
    """The filler waits for every slot, the runner for the sink thread, and then the run is stopped."""
    frames = pictures(4, 64, 32) + pictures(6, 96, 64)[4:] + pictures(12, 128, 96)[6:]
    entered, release = threading.Event(), threading.Event()

    def sink(frame: Any) -> None:
        entered.set()
        release.wait(10)

    pipeline = Pipeline([FrameList(name="s", frames=frames)], [], [sink], device="simulated", staging={"batch": 2})
    runner = threading.Thread(target=pipeline.run)
    runner.start()
    assert entered.wait(10)
    while not pipeline._engine.ring._free.empty():
        threading.Event().wait(0.001)
    pipeline.stop()
    release.set()
    runner.join(10)
    pipeline.close()
    balance(pipeline.report)
    assert pipeline.report.exit == "stopped"


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_that_the_stop_made_is_no_end(fails):
    """Sources end, or fail, because they are told to stop: neither complete nor an error."""

    class Obedient(FrameList):
        def open(self, stopping: Callable[[], bool]) -> Any:
            stream = super().open(stopping)

            def frames() -> Iterator[Any]:
                yield from self.frames
                while not stopping():
                    threading.Event().wait(0.001)
                if fails:
                    raise Boom("cut off")

            stream.frames = frames
            return stream

    source = Obedient(name="s", frames=pictures(7, 64, 32))
    pipeline = Pipeline([source], [], [lambda frame: frame.index == 6 and pipeline.stop()], device="cpu")
    report = within(10, pipeline.run)
    pipeline.close()
    assert report.exit == "stopped" and report.sources[0]["status"] == "stopped"
    assert report.error is None and report.frames["delivered"] == 7


def test_a_run_broken_off_is_stopped_even_where_all_was_decoded():
    with framepipe.open(listed(3), device="cpu", queue=1) as frames:
        next(iter(frames))
        while not frames._engine.pool.exhausted:
            threading.Event().wait(0.001)
    assert frames.report.exit == "stopped"
    assert frames.report.frames["delivered"] + frames.report.frames["dropped"]["stopped"] == 3


def test_nothing_is_handed_over_behind_a_stop():
    delivery = Delivery(2, CpuDevice())
    feed = Feed(listed(), "s")
    frames = [Frame(Item("s", i, i, None, 0.0, handle=feed), None) for i in range(4)]
    assert delivery.put(frames[0])
    delivery.stop()
    assert delivery.take(1) is frames[0]
    assert not delivery.put(frames[1]) and not delivery.put(frames[2]) and not delivery.put(frames[3])
    assert feed.delivered == 1


def test_a_source_is_ended_while_another_one_stalls(monkeypatch):
    release, ended = threading.Event(), threading.Event()
    plain = DecodePool._advance

    def advance(pool: DecodePool) -> None:
        while pool.feeds[0].decoded == 5 and len(sink.seen) < 5:
            threading.Event().wait(0.001)  # the last frame has passed before anybody knows that it was the last
        plain(pool)

    monkeypatch.setattr(DecodePool, "_advance", advance)

    class Told(Noting):
        def end(self, source: str) -> None:
            super().end(source)
            ended.set()

    stalled = Unruly(name="stalled", frames=pictures(3, 64, 32), at=0, release=release, may_stall=True)
    sink = Told()
    with Pipeline([listed(5), stalled], [], [sink], device="cpu") as pipeline:
        runner = threading.Thread(target=pipeline.run)
        runner.start()
        assert ended.wait(10) and sink.ended == ["s"] and len(sink.seen) == 5
        release.set()
        runner.join(10)
    assert sink.ended == ["s", "stalled"] and pipeline.report.exit == "complete"


def test_what_was_opened_is_closed_even_if_closing_fails_too():
    stages = [Chaos(), Chaos(where="stage close"), Chaos()]
    sinks = [Noting(), Noting(where="sink open")]
    pipeline = Pipeline([listed()], stages, sinks, device="cpu")
    with pytest.raises(Boom, match="sink open") as caught:
        pipeline.run()
    assert [part.closed for part in (*stages, *sinks)] == [1, 1, 1, 1, 0]
    assert "Boom: stage close" in caught.value.__notes__[0]


def test_an_error_that_cannot_even_be_told_hangs_nobody():
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise Boom("no words")

    def fail() -> None:
        raise Unspeakable

    sinks = [Noting(where="sink write"), Noting()]
    for sink in sinks:
        sink.close = fail  # type: ignore[method-assign]
    pipeline = Pipeline([listed()], [], sinks, device="cpu")
    with pytest.raises((FramepipeError, Boom, Unspeakable)):
        within(10, pipeline.run)
    with contextlib.suppress(FramepipeError, Boom, Unspeakable):
        within(10, pipeline.close)


def test_the_interpreter_exits_while_a_pipe_is_waited_for(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no FIFOs here")
    os.mkfifo(tmp_path / "pipe")
    process = child(
        """
        import sys, framepipe, threading
        pipeline = framepipe.Pipeline([sys.argv[1]], [], ["discard"], device="cpu")
        iter(pipeline)
        while not any(thread.name.endswith("decode-pipe") for thread in threading.enumerate()):
            pass
        """,
        str(tmp_path / "pipe"),
    )
    assert (*process.communicate(timeout=30), process.returncode) == ("", "", 0)


def test_memory_given_back_while_the_pool_is_closed_does_not_stay_in_it():
    class Closing(deque):
        def append(self, block: Any) -> None:
            pool.close()
            super().append(block)

    ledger = Ledger()

    def make(nbytes: int, owner: str) -> Any:
        ledger.add("pageable", nbytes)
        return aligned_empty(nbytes)

    pool = RecyclingPool(make, lambda block: ledger.add("pageable", -block.nbytes))
    array = pool.empty((3, 5), "uint8")
    pool._free[array.nbytes] = Closing()
    del array
    assert ledger.bytes == {"pageable": 0} and not any(pool._free.values())


def test_memory_dropped_by_the_collector_while_the_ledger_is_written():
    ledger = Ledger()

    def add() -> None:
        with ledger._lock:
            ledger.add("device", 1)  # a lease that dies here, in this thread, comes by the same way

    within(5, add)
    assert ledger.bytes == {"device": 1}
