"""Random pipelines, faults and stops: nothing hangs, nothing leaks, the books balance and frames stay in order.

A failure names its seed; ``FRAMEPIPE_SEED=1234 pytest tests/test_stress.py`` runs that one alone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import av
import pytest
from conftest import descriptors, make_clip, number_of, ours, picture
from test_pipeline import balance

from framepipe import decode, registry
from framepipe.decode import DecodePool
from framepipe.errors import ClosedError, FramepipeError
from framepipe.feed import Feed
from framepipe.frame import Batch, FrameSpec, frame_planes
from framepipe.pipeline import Pipeline
from framepipe.ring import Slot
from framepipe.sink import Sink
from framepipe.sinks.jsonl import Jsonl
from framepipe.sinks.video import Video
from framepipe.source import Source
from framepipe.sources.file import File
from framepipe.stage import Flow, Stage
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList

LIMIT_S = 60
"""Far more than any run takes: whoever is still at it hangs."""
FAULTS = (
    *("stage plan", "stage open", "stage launch", "stage collect", "stage close"),
    *("sink open", "sink write", "sink end", "sink close"),
    *("stager fill", "stager upload", "stager plan", "progress"),
)
STOPS = ("before", "start", "sink", "thread", "close", "two closes", "stop and close")
CLIPS: dict[str, dict[str, Any]] = {
    "short.mp4": {"count": 12},
    "gops.mp4": {"count": 70, "gop": 16, "width": 64, "height": 48},
    "open.mkv": {
        "count": 66, "bframes": 3, "width": 80, "height": 48,
        "options": {"x264-params": "open-gop=1:keyint=18:min-keyint=18:scenecut=0:threads=1"},
    },
    "refresh.mp4": {
        "count": 60, "width": 64, "height": 64,
        "options": {"x264-params": "intra-refresh=1:keyint=16:scenecut=0:threads=1"},
    },
    "one.mp4": {"count": 1},
    "wide.ts": {"count": 30, "gop": 15, "width": 128, "height": 80, "container": "mpegts"},
}  # fmt: skip


class Boom(Exception):
    """What goes wrong on purpose."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stress")
    for name, options in CLIPS.items():
        make_clip(made / name, **options)
    (made / "text.mp4").write_text("no video\n" * 99)
    return made


@cache
def pictures(count: int, width: int, height: int) -> list[av.VideoFrame]:
    frames = [picture(width, height, number) for number in range(count)]
    for pts, frame in enumerate(frames):
        frame.pts = pts
    return frames


@dataclass(kw_only=True)
class Listed(FrameList):
    """A list of pictures with a short ``repr``."""

    def __repr__(self) -> str:
        own = {key: value for key, value in vars(self).items() if key != "frames" and value is not None}
        return f"{type(self).__name__}({len(self.frames)} frames, {own})"


@dataclass(kw_only=True, repr=False)
class Unruly(Listed):
    """Fails at opening (``at`` < 0) or behind ``at`` frames; waits there for ``release`` instead where it has one."""

    at: int = 1_000_000
    release: threading.Event | None = None
    may_stall: bool = False

    def open(self, stopping: Callable[[], bool]) -> Any:
        if self.at < 0:
            raise Boom("source open")
        stream = super().open(stopping)
        plain = stream.frames

        def frames() -> Iterator[Any]:
            for number, frame in enumerate(plain()):
                if number == self.at:
                    if self.release is None:
                        raise Boom("source read")
                    while not stopping() and not self.release.wait(0.002):
                        pass
                yield frame

        stream.frames = frames
        return stream


@dataclass(kw_only=True)
class Chaos(Stage):
    """Fails in ``where`` at picture ``at``, and filters each third picture where told."""

    where: str = ""
    at: int = 0
    filters: bool = False
    late: bool = False

    writes = frozenset({"meta"})

    def __post_init__(self) -> None:
        self.reads = frozenset({"meta"} if self.late else {"planes"})
        self.opened = self.closed = 0

    def _maybe(self, where: str, batch: Batch | None = None) -> None:
        if where == self.where and (batch is None or any(item.index == self.at for item in batch.items)):
            raise Boom(where)

    def open(self, device: Any) -> None:
        super().open(device)
        self._maybe("stage open")
        self.opened += 1

    def plan(self, flow: Flow) -> Flow:
        self._maybe("stage plan")
        return flow

    def launch(self, batch: Batch) -> None:
        self._maybe("stage launch", batch)

    def collect(self, batch: Batch) -> None:
        self._maybe("stage collect", batch)
        for item in batch.items:
            item.meta[self.id] = item.index
            if self.filters and item.index % 3 == 1:
                item.filtered_by = self.id

    def close(self) -> None:
        self.closed += 1
        self._maybe("stage close")


@dataclass(kw_only=True)
class Noting(Sink):
    """Notes source, index and the number seen in the picture; calls ``each``; fails in ``where``."""

    where: str = ""
    at: int = 0
    looks: bool = False
    each: Callable[[int], None] = lambda count: None
    type_name = "noting"

    def __post_init__(self) -> None:
        self.reads = frozenset({"image"} if self.looks else {"meta"})
        self.seen: list[tuple[str, int, int | None]] = []
        self.ended: list[str] = []
        self.opened = self.closed = 0

    def _maybe(self, where: str, index: int = 0) -> None:
        if where == self.where and index == self.at:
            raise Boom(where)

    def open(self, context: Any) -> None:
        self._maybe("sink open", self.at)
        self.opened += 1

    def write(self, frame: Any) -> None:
        assert self.opened and not self.closed and frame.source not in self.ended
        self._maybe("sink write", frame.index)
        self.seen.append((frame.source, frame.index, number_of(frame.image) if self.looks else None))
        self.each(len(self.seen))

    def end(self, source: str) -> None:
        self.ended.append(source)
        self._maybe("sink end", self.at)

    def close(self) -> None:
        self.closed += 1
        self._maybe("sink close", self.at)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What ``function`` returns or raises, in a thread of its own; fails with all stacks if it takes longer."""
    results: list[Any] = []

    def body() -> None:
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=body, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise AssertionError(f"still at it after {seconds} s\n{stacks()}")
    result, error = results[0]
    if error is not None:
        raise error
    return result


def stacks() -> str:
    """Where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"-- {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    )


@dataclass
class Plan:
    """One run, drawn from a seed."""

    seed: int
    sources: list[Source] = field(default_factory=list)
    truth: dict[str, list[tuple[int, int]]] = field(default_factory=dict, repr=False)
    """By source: (index, number in the picture) of all that must come where nothing stops or fails."""
    lossy: set[str] = field(default_factory=set)
    """Sources that drop: anything in order may come of them."""
    stages: list[Stage] = field(default_factory=list)
    sinks: list[Noting] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    way: str = "run"
    stop: str = ""
    stop_at: int = 0
    fault: str = ""
    interval_s: float = 0.005
    large_nbytes: int = 1 << 20
    """From which size on decoding threads look behind each picture whether they can fill."""
    fault_at: int = 0
    out: Path | None = None
    files: list[Sink] = field(default_factory=list)
    """Sinks that write into the folder ``out``, behind ``sinks``."""
    pipes: list[tuple[Path, Path, bool]] = field(default_factory=list)
    """FIFOs: what is written to which, and whether the writer ever closes it."""
    release: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


def draw(seed: int, folder: Path) -> Plan:
    r = random.Random(seed)
    plan = Plan(seed)
    plan.way = r.choice(("run", "run", "iterate", "break"))
    plan.stop = r.choice(STOPS) if r.random() < 0.5 else ""
    plan.stop_at = r.choice((0, 1, r.randrange(60)))
    plan.fault = r.choice(FAULTS) if r.random() < 0.3 else ""
    plan.interval_s = r.choice((1e-6, 1e-5, 0.005))
    looks = r.random() < 0.5
    at = plan.fault_at = r.choice((0, r.randrange(40)))
    for number in range(r.choice((1, 1, 2, 3, 6))):
        _add_source(plan, r, f"s{number}", folder)
    if looks:
        plan.stages.append(Rgb(accuracy=r.choice((None, "exact"))))
    for late in r.choice(((), (False,), (True,), (False, True))):
        plan.stages.append(Chaos(late=late, filters=r.random() < 0.3))
    if plan.fault.startswith("stage"):
        plan.stages.append(Chaos(where=plan.fault, at=at, late=r.random() < 0.3))
    plan.stages.sort(key=lambda stage: getattr(stage, "late", False))
    for number in range(r.choice((1, 1, 2))):
        fails = plan.fault.startswith("sink") and number == 0
        plan.sinks.append(Noting(where=plan.fault if fails else "", at=at, looks=looks))
    if r.random() < 0.2:
        plan.out = folder / f"out-{seed}"
        plan.files = [Jsonl(path=str(plan.out / "o.jsonl")), Video(path=str(plan.out / "{source}.mkv"), threads=1)]
    device = r.choice(("cpu", "cpu", "simulated"))
    copying = ("pooled", "per_frame", "pageable")
    plan.options = {
        "device": device,
        "threads": r.randint(1, 4),
        "decode": r.choice(("auto", "segments", "linear", "frame")),
        "queue": r.randint(1, 5),
        "ahead_bytes": r.choice((None, 1, 50_000)),
        "staging": {
            "strategy": r.choice(("auto", *copying) if device == "simulated" else ("auto", "direct", *copying)),
            "slots": r.choice(("auto", "auto", 1, 2, 5)),
            "depth": r.randint(1, 3),
            "batch": r.randint(1, 7),
            "batch_timeout_s": r.choice((0.0, 0.003, 0.04)),
            "fillers": r.choice((1, 2, 3, "auto", "auto", "auto")),
        },
    }
    plan.large_nbytes = r.choice((0, 0, 1 << 20))
    return plan


def _add_source(plan: Plan, r: random.Random, name: str, folder: Path) -> None:
    kind = r.choice(("file", "file", "list", "list", "grow", "unruly", "stall", "missing", "pipe"))
    loop = r.choice((1, 1, 1, 2, 3))
    keep: dict[str, Any] = r.choice(({}, {}, {}, {"every": 3}, {"end": 0.5}, {"start": 0.5}, {"fps": 10.0}))
    count = r.choice((0, 1, 7, 40))
    if kind == "file":
        clip = r.choice(list(CLIPS))
        numbers = list(range(CLIPS[clip]["count"])) * loop
        uri = str(folder / clip)
        keep = {key: value for key, value in keep.items() if key == "every"}  # times need not begin at 0 in a file
        decode = r.choice((None, None, "segments", "linear", "frame"))
        plan.sources.append(File(name=name, uri=uri, loop=loop, decode=decode, threads=r.choice((None, 1, 2)), **keep))
    elif kind == "pipe" and hasattr(os, "mkfifo"):
        pipe, numbers, keep = folder / f"{plan.seed}-{name}.fifo", list(range(CLIPS["wide.ts"]["count"])), {}
        closes = plan.stop not in ("sink", "thread", "close", "two closes") or r.random() < 0.5
        plan.pipes.append((pipe, folder / "wide.ts", closes))
        plan.sources.append(File(name=name, uri=str(pipe)))
        os.mkfifo(pipe)
    elif kind == "missing":
        uri = str(folder / r.choice(("text.mp4", "nowhere.mp4")))
        numbers, keep = [], {}
        plan.sources.append(File(name=name, uri=uri))
    else:
        frames = list(pictures(count, *r.choice(((64, 32), (96, 64)))))
        if kind == "grow":
            frames = frames[: count // 2] + pictures(count, 128, 96)[count // 2 :]
        options: dict[str, Any] = {"name": name, "frames": frames, "loop": loop, **keep}
        numbers = list(range(len(frames))) * loop
        if kind in ("unruly", "stall"):
            at = r.choice((-1, 0, r.randrange(1, 30)))
            if kind == "stall":
                options |= {"release": plan.release, "may_stall": r.random() < 0.7}
                at = max(at, 0)
            elif at < len(frames):
                numbers = numbers[: max(at, 0)]
            plan.sources.append(Unruly(at=at, **options))
        else:
            plan.sources.append(Listed(**options))
    truth = list(enumerate(numbers))
    if keep:
        ((key, value),) = keep.items()
        wanted = {  # at 25 pictures a second
            "every": lambda index: index % value == 0,
            "end": lambda index: index < 25 * value,
            "start": lambda index: index >= 25 * value,
            "fps": lambda index: index in {-(-k * 25 // int(value)) for k in range(index + 1)},
        }[key]
        truth = [pair for pair in truth if wanted(pair[0])]
    plan.truth[name] = truth
    if not keep.keys() & {"every", "fps"} and r.random() < 0.2:  # those count what comes
        plan.sources[-1].drop = r.choice(("oldest", "latest"))
        plan.lossy.add(name)


def run_one(seed: int, folder: Path) -> None:
    """Draw a pipeline, drive it, check what is left. Raises AssertionError naming the seed."""
    plan = draw(seed, folder)
    failure: list[BaseException] = []

    def body() -> None:
        try:
            _drive_and_check(plan)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="stress", daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(plan.interval_s)
    try:
        thread.start()
        thread.join(LIMIT_S)
    finally:
        sys.setswitchinterval(before)
    if thread.is_alive():
        raise AssertionError(f"seed {seed} hangs\n{plan}\n{stacks()}")
    if failure:
        text = "".join(traceback.format_exception(failure[0]))
        raise AssertionError(f"seed {seed} failed\n{plan}\n{text}") from None


def _drive_and_check(plan: Plan) -> None:
    before = descriptors()
    with _faulty_stager(plan), mock.patch.object(decode, "_LARGE", plan.large_nbytes):
        try:
            _drive_pipeline(plan)
            _check_files(plan)
        finally:
            for pipe, _, _ in plan.pipes:
                pipe.unlink()
            if plan.out is not None:
                shutil.rmtree(plan.out, ignore_errors=True)
    assert not ours(), "threads are left"
    assert descriptors() <= before, "descriptors are left"


def _drive_pipeline(plan: Plan) -> None:
    pipeline = Pipeline(plan.sources, plan.stages, [*plan.sinks, *plan.files], **plan.options)
    pending: list[BaseException] = []
    taken: list[tuple[str, int]] = []
    hands = _hands(plan, pipeline, pending)
    plan.sinks[0].each = lambda count: _count(plan, pipeline, count)
    error: BaseException | None = None
    try:
        if plan.stop == "before":
            pipeline.stop()
        for hand in hands:
            hand.start()
        _drive(plan, pipeline, taken)
    except (FramepipeError, Boom) as failed:
        error = failed
    finally:
        for event in (plan.reached, plan.release, plan.over):
            event.set()
        for hand in hands:
            hand.join()
        with contextlib.suppress(Boom):
            pipeline.close()
    assert not pending, pending
    _check(plan, pipeline, error, taken)


@contextlib.contextmanager
def _faulty_stager(plan: Plan) -> Iterator[None]:
    """While it is entered the strategy of this plan fails where the plan says."""
    part, _, method = plan.fault.partition(" ")
    if part != "stager":
        yield
        return
    name = plan.options["staging"]["strategy"]
    if name == "auto":
        name = "direct" if plan.options["device"] == "cpu" else "pooled"
    stager = registry.find("staging", name)
    plain = getattr(stager, method)

    def failing(self: Any, *arguments: Any) -> Any:
        slot = next((part for part in arguments if isinstance(part, Slot)), None)
        if slot is None or any(item.index == plan.fault_at for item in slot.items):
            raise Boom(plan.fault)
        return plain(self, *arguments)

    with mock.patch.object(stager, method, failing):
        yield


def _count(plan: Plan, pipeline: Pipeline, count: int) -> None:
    if count < plan.stop_at:
        return
    if plan.stop == "sink":
        pipeline.stop()
    plan.reached.set()


def _hands(plan: Plan, pipeline: Pipeline, pending: list[BaseException]) -> list[threading.Thread]:
    """Threads that interfere: one that lets stalled sources go on, others that stop or close."""

    def acting(wait: bool, *actions: Callable[[], None]) -> threading.Thread:
        def act() -> None:
            try:
                if wait:
                    plan.reached.wait(LIMIT_S)
                for action in actions:
                    action()
            except Boom:
                pass
            except BaseException as error:
                pending.append(error)

        return threading.Thread(target=act, name="hand")

    hands = [acting(False, lambda: (plan.reached.wait(0.02), plan.release.set()))]
    hands += [acting(False, partial(_feed, plan, *pipe)) for pipe in plan.pipes]
    if not all(closes for _, _, closes in plan.pipes):  # too few frames may come to reach what the others wait for
        hands.append(acting(False, lambda: plan.over.wait(0.3) or pipeline.stop()))
    if plan.stop == "start":
        hands.append(acting(False, pipeline.stop))
    elif plan.stop == "thread":
        hands.append(acting(True, pipeline.stop))
    elif plan.stop == "close":
        hands.append(acting(True, pipeline.close))
    elif plan.stop == "two closes":
        hands += [acting(True, pipeline.close), acting(True, pipeline.close)]
    elif plan.stop == "stop and close":
        hands += [acting(False, pipeline.stop), acting(True, pipeline.close)]
    return hands


def _feed(plan: Plan, pipe: Path, clip: Path, closes: bool) -> None:
    """Write to a FIFO, hold it open until all was read, and for ever unless it ``closes``."""
    fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # opens, and keeps what was written, without a reader too
    try:
        left = memoryview(clip.read_bytes())
        while not plan.over.is_set():
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(fd, left[:4096]) :] if left else left
            if closes and not left and not select.select([fd], [], [], 0)[0]:
                return
            plan.over.wait(0.0005)
    finally:
        os.close(fd)


def _drive(plan: Plan, pipeline: Pipeline, taken: list[tuple[str, int]]) -> None:
    if plan.way == "run":
        pipeline.run(progress=lambda now: _progress(plan))
        return
    for frame in pipeline:
        taken.append((frame.source, frame.index))
        if plan.way == "break" and len(taken) > plan.stop_at:
            break


def _progress(plan: Plan) -> None:
    if plan.fault == "progress":
        raise Boom("progress")


def _check(plan: Plan, pipeline: Pipeline, error: BaseException | None, taken: list[tuple[str, int]]) -> None:
    for part in (*plan.sinks, *(stage for stage in plan.stages if isinstance(stage, Chaos))):
        assert part.closed == part.opened, f"{part} was opened {part.opened} times and closed {part.closed}"
    report = pipeline.report
    if report is None:
        assert error is not None, "no report and no error"
        return
    if report.frames:
        balance(report)
    quiet = not plan.stop and not plan.fault and plan.way != "break"
    nothing = not report.frames.get("delivered")
    assert error is None or plan.fault or nothing or isinstance(error, ClosedError), error
    filters = any(isinstance(stage, Chaos) and stage.filters for stage in plan.stages)
    for sink in plan.sinks:
        assert len(set(sink.ended)) == len(sink.ended)
        _check_order(plan, [(source, index, number) for source, index, number in sink.seen], filters, quiet)
    _check_order(plan, [(source, index, None) for source, index in taken], filters, quiet and plan.way == "iterate")
    if quiet and report.exit != "failed":
        for source in report.sources:
            asked = {"oldest", "latest"} if source["name"] in plan.lossy else set()
            assert source["dropped"].keys() <= asked, "a file never drops unless asked"
        assert set(plan.sinks[0].ended) >= {s["name"] for s in report.sources if s["delivered"]}
    if report.exit == "complete" and report.frames:
        assert "stopped" not in report.frames["dropped"], "frames are missing and yet complete"


def _check_order(plan: Plan, seen: list[tuple[str, int, int | None]], filters: bool, whole: bool) -> None:
    """What came of each source is a beginning of what should: in order, without gaps, the right pictures."""
    for name, truth in plan.truth.items():
        wanted = [pair for pair in truth if not (filters and pair[0] % 3 == 1)]
        got = [(index, number) for source, index, number in seen if source == name]
        if name in plan.lossy:
            indices = {index for index, _ in got}
            assert [index for index, _ in got] == sorted(indices), (name, got)
            wanted = [pair for pair in wanted if pair[0] in indices]
        assert [index for index, _ in got] == [index for index, _ in wanted][: len(got)], (name, got)
        assert all(number is None or number == n for (_, number), (_, n) in zip(got, wanted, strict=False)), (name, got)
        if whole:
            assert len(got) == len(wanted), f"{name}: {len(got)} of {len(wanted)} frames came"


def _check_files(plan: Plan) -> None:
    """What was written is whole, and exactly what the sink before was given."""
    if plan.out is None or not plan.out.exists():
        assert not plan.files or not plan.sinks[0].seen
        return
    text = (plan.out / "o.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["source"], line["index"]) for line in lines] == [seen[:2] for seen in plan.sinks[0].seen]
    assert not list(plan.out.glob("*.part*"))
    pictures = 0
    for video in plan.out.glob("*.mkv"):
        with av.open(str(video)) as container:
            pictures += sum(1 for _ in container.decode(video=0))
    assert pictures == len(lines)


def _run_many(seeds: range, folder: Path) -> None:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in seeds:
            run_one(seed, folder)
    gc.collect()
    assert not ours()


def run_pool(seed: int, folder: Path) -> None:
    """The decode pool alone, with the shortest segments and the tightest bounds, and an uneven taker."""
    r = random.Random(seed)
    names = r.sample([name for name in CLIPS if name != "one.mp4"], r.randint(1, 3))
    feeds = [Feed(File(uri=str(folder / name), loop=r.choice((1, 1, 2))), name, r.choice((0, 1))) for name in names]
    pool = DecodePool(
        feeds,
        threads=r.randint(1, 5),
        decode=r.choice(("segments", "segments", "auto", "frame")),
        ahead_nbytes=r.choice((1, 20_000, 1 << 20)),
        queue_nbytes=r.choice((1, 50_000)),
        min_queue=r.choice((1, 2, 5)),
        min_segment=r.choice((1, 1, 5)),
    )
    crashes: list[BaseException] = []
    pool.crash = lambda error: (crashes.append(error), pool.stop())
    finished = {name: r.randrange(60) for name in names if r.random() < 0.2}
    stop_at = r.randrange(100) if r.random() < 0.2 else None
    seen: dict[str, list[int]] = {name: [] for name in names}
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(r.choice((1e-6, 1e-5, 0.005)))
    try:
        pool.start()
        while not (pool.exhausted or pool.stopping):
            got = pool.take(r.choice((0.0, 0.002, LIMIT_S)))
            if got is None:
                continue
            feed, frame = got
            feed.taken += 1
            feed.decoded += 1
            feed.handled += r.choice((0, 0, 2)) if feed.in_flight > 1 else 0
            if feed.over:
                continue  # what was on its way when it was finished
            seen[feed.name].append(number_of(frame_planes(frame, FrameSpec.of(frame))[0]))
            if len(seen[feed.name]) == finished.get(feed.name):
                pool.finish(feed)
            if sum(map(len, seen.values())) == stop_at:
                pool.stop()
            if r.random() < 0.02:
                threading.Event().wait(0.002)
    finally:
        sys.setswitchinterval(interval_s)
        pool.stop()
        pool.join()
    assert not crashes, (seed, crashes)
    for feed in feeds:
        truth = list(range(CLIPS[feed.name]["count"])) * feed.source.loop
        got = seen[feed.name]
        assert got == truth[: len(got)], (seed, feed.name, feed.mode, got)
        assert len(got) == len(truth) or feed.name in finished or stop_at is not None, (seed, feed.name, len(got))
        assert not feed.error and not feed.packet_errors and feed.stream is None, seed


def _run_pools(seeds: range, folder: Path) -> None:
    before = descriptors()
    for seed in seeds:
        within(LIMIT_S, partial(run_pool, seed, folder))
        assert not ours() and descriptors() <= before, seed


FIRST = int(os.environ.get("FRAMEPIPE_SEED", "0"))


def test_random_runs(folder: Path) -> None:
    _run_many(range(FIRST, FIRST + (1 if FIRST else 60)), folder)


def test_random_pools(folder: Path) -> None:
    _run_pools(range(FIRST, FIRST + (1 if FIRST else 25)), folder)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_a_thousand_random_runs(first: int, folder: Path) -> None:
    shift = int(os.environ.get("FRAMEPIPE_SEED_SHIFT", "0"))
    _run_many(range(first + shift, first + shift + 100), folder)
    _run_pools(range(first + shift, first + shift + 30), folder)
