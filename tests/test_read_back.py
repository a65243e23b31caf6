"""Results on their way to the host: memory made once, before it is needed, and what the device's own clock says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import number_of
from test_pipeline import balance
from test_stress import Listed, pictures, stacks, within

from framepipe.device.base import Stream, Timer
from framepipe.device.cpu import CpuDevice
from framepipe.device.simulated import SimulatedDevice
from framepipe.pipeline import Pipeline
from framepipe.running import _SAMPLE
from framepipe.sink import Sink
from framepipe.sinks.jsonl import Jsonl
from framepipe.sinks.video import Video
from framepipe.stage import Stage
from framepipe.stages.draw import Draw
from framepipe.stages.motion import Motion
from framepipe.stages.rgb import Rgb
from framepipe.stages.tensor import Tensor

pytestmark = pytest.mark.usefixtures("nothing_left")

LIMIT_S = 20
"""Far more than anything here takes."""
DEPTH = 2


@dataclass(kw_only=True)
class Rows(Sink):
    """Copies what it reads, as a writer of tables does, and calls ``each`` before."""

    wants: str = "meta"
    each: Callable[[], None] = lambda: None
    type_name = "rows"

    def __post_init__(self) -> None:
        self.reads = frozenset({self.wants})
        self.rows: list[Any] = []

    def write(self, frame: Any) -> None:
        self.each()
        array = frame.image if self.wants == "image" else frame.tensors.get(self.wants)
        assert array is None or isinstance(array, np.ndarray)
        self.rows.append((frame.index, None if array is None else array.copy()))


def motion(sink: Rows, folder: Any) -> tuple[list[Stage], list[Any]]:
    return [Motion()], [sink, Jsonl(path=str(folder / "o.jsonl"))]


def rgb(sink: Rows, folder: Any) -> tuple[list[Stage], list[Any]]:
    sink.wants, sink.reads = "image", frozenset({"image"})
    return [Rgb()], [sink]


def tensor(sink: Rows, folder: Any) -> tuple[list[Stage], list[Any]]:
    sink.wants, sink.reads = "tensor", frozenset({"tensor"})
    return [Tensor(width=32, height=32)], [sink]


def drawn_video(sink: Rows, folder: Any) -> tuple[list[Stage], list[Any]]:
    return [Motion(), Rgb(), Draw()], [sink, Video(path=str(folder / "{source}.mp4"), threads=1)]


def drawn_callback(sink: Rows, folder: Any) -> tuple[list[Stage], list[Any]]:
    sink.wants, sink.reads = "image", frozenset({"image"})
    return [Motion(), Rgb(), Draw()], [sink]


def until(condition: Callable[[], Any]) -> None:
    over = threading.Event()
    for _ in range(LIMIT_S * 1000):
        if condition():
            return
        over.wait(0.001)
    raise AssertionError(f"it does not come\n{stacks()}")


@pytest.mark.parametrize("make", [motion, rgb, tensor, drawn_video, drawn_callback])
@pytest.mark.parametrize(("batch", "count"), [(1, 40), (4, 10), (4, 3)])
def test_nothing_is_page_locked_behind_the_first_batch(monkeypatch, tmp_path, make, batch, count):
    """With as many batches under way as there may be, and partial ones among them."""
    plain, reserved = SimulatedDevice.host_reserve, []

    def host_reserve(device: SimulatedDevice, nbytes: int, blocks: int, owner: str) -> None:
        plain(device, nbytes, blocks, owner)
        reserved.append(device.ledger.allocations["pinned"])

    def each() -> None:
        engine = pipeline._engine
        ledger = engine.device.ledger
        held.append((ledger.allocations["pinned"], ledger.bytes["pinned"]))
        if len(held) == 1:  # everything behind the first frame has come as far as it can
            under_way = min(DEPTH + 1, -(-count // batch) - 1)
            until(lambda: engine.runner.tokens.qsize() == DEPTH + 1 - under_way)

    monkeypatch.setattr(SimulatedDevice, "host_reserve", host_reserve)
    held: list[tuple[int, int]] = []
    sink = Rows(each=each)
    stages, sinks = make(sink, tmp_path)
    source = Listed(name="s", frames=pictures(count, 64, 48))
    staging = {"batch": batch, "depth": DEPTH, "batch_timeout_s": 100.0}
    with Pipeline([source], stages, sinks, device="simulated", staging=staging) as pipeline:
        report = within(LIMIT_S, pipeline.run)
        balance(report)
        ledger = pipeline._engine.device.ledger
        assert report.frames["delivered"] == count == len(held)
        assert {allocations for allocations, _ in held} == {reserved[-1]} == {ledger.allocations["pinned"]}
        assert len({nbytes for _, nbytes in held}) == 1
    assert [index for index, _ in sink.rows] == list(range(count))
    if make is rgb:
        assert [number_of(image) for _, image in sink.rows] == list(range(count))


def test_what_a_user_holds_makes_memory_anew_and_is_not_overwritten():
    """Nothing ever waits for it."""
    kept: list[Any] = []
    source = Listed(name="s", frames=pictures(20, 64, 48))
    with Pipeline([source], [Rgb()], [lambda frame: kept.append(frame.image)], device="simulated") as pipeline:
        within(LIMIT_S, pipeline.run)
        assert pipeline._engine.device.ledger.allocations["pinned"] >= 20
    assert [number_of(image) for image in kept] == list(range(20))


def test_a_growing_input_plans_its_read_back_once_for_each_size(monkeypatch):
    plain, reserved = SimulatedDevice.host_reserve, []

    def host_reserve(device: SimulatedDevice, nbytes: int, blocks: int, owner: str) -> None:
        reserved.append((nbytes, blocks))
        plain(device, nbytes, blocks, owner)

    monkeypatch.setattr(SimulatedDevice, "host_reserve", host_reserve)
    sizes = [(64, 48), (128, 96), (64, 48), (128, 96)]
    frames = [picture for n, size in enumerate(sizes) for picture in pictures(6 * n + 6, *size)[6 * n :]]
    sink = Rows(wants="image")
    staging = {"depth": DEPTH, "batch": 2}
    source = Listed(name="s", frames=frames)
    with Pipeline([source], [Rgb()], [sink], device="simulated", staging=staging) as pipeline:
        within(LIMIT_S, pipeline.run)
    assert reserved == [(2 * 3 * width * height, DEPTH + 2) for width, height in sizes[:2]]
    assert [number_of(image) for _, image in sink.rows] == list(range(24))


def test_where_memory_is_shared_nothing_is_read_back(monkeypatch):
    monkeypatch.setattr(CpuDevice, "host_reserve", lambda *arguments: 1 / 0)
    monkeypatch.setattr(CpuDevice, "host_output", lambda *arguments: 1 / 0)
    source = Listed(name="s", frames=pictures(9, 64, 48))
    with Pipeline([source], [Motion(), Rgb(), Draw()], [Rows(wants="image")], device="cpu") as pipeline:
        assert within(LIMIT_S, pipeline.run).exit == "complete"


# -- the device's own time --------------------------------------------------------------------------------------------


class FakeTimer(Timer):
    """Says how many timers were made before it, in milliseconds, once both points were marked on one stream."""

    made: list[FakeTimer]

    def __init__(self) -> None:
        self.number = len(self.made)
        self.made.append(self)
        self.marks: list[str] = []
        self.read = 0

    def start(self, stream: Stream) -> None:
        assert not self.marks
        self.marks.append(stream.name)

    def stop(self, stream: Stream) -> None:
        assert self.marks == [stream.name]
        self.marks.append(stream.name)

    def seconds(self) -> float:
        assert len(self.marks) == 2
        self.read += 1
        return (self.number + 1) / 1000


@pytest.fixture(params=[CpuDevice, SimulatedDevice])
def timed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, type[FakeTimer]]:
    """A device that has timers, and what they are made of."""

    class Mine(FakeTimer):
        made: list[FakeTimer] = []  # noqa: RUF012

    monkeypatch.setattr(request.param, "timer", lambda device: Mine())
    return request.param.kind, Mine


def test_of_each_32_batches_one_is_timed(timed):
    device, timers = timed
    count = 2 * _SAMPLE + 5
    source = Listed(name="s", frames=pictures(count, 64, 48))
    stages = [Motion(), Rgb(), Draw()]
    with Pipeline([source], stages, [Rows(wants="image")], device=device) as pipeline:
        report = within(LIMIT_S, pipeline.run)
        durations = pipeline._engine.runner.device_durations
    assert [timer.marks for timer in timers.made] == [["compute", "compute"]] * 4
    assert all(timer.read == 1 for timer in timers.made)
    # The late one runs on the sink thread, behind what it waits for: its time says nothing.
    assert {name: duration.count for name, duration in durations.items()} == {"motion": 2, "rgb": 2, "draw": 0}
    assert report.stages["motion"]["device"]["count"] == 2
    assert report.stages["motion"]["device"]["max_ms"] == pytest.approx(3, rel=0.2)
    assert report.stages["rgb"]["device"]["max_ms"] == pytest.approx(4, rel=0.2)
    assert report.stages["draw"]["device"] is None
    assert report.stages["motion"]["count"] == count


def test_a_short_run_times_nothing(timed):
    device, timers = timed
    source = Listed(name="s", frames=pictures(_SAMPLE - 1, 64, 48))
    with Pipeline([source], [Rgb()], [Rows(wants="image")], device=device) as pipeline:
        report = within(LIMIT_S, pipeline.run)
    assert not timers.made and report.stages["rgb"]["device"] is None


def test_a_device_without_timers_tells_no_times():
    source = Listed(name="s", frames=pictures(_SAMPLE + 1, 64, 48))
    with Pipeline([source], [Rgb()], [Rows(wants="image")], device="simulated") as pipeline:
        assert within(LIMIT_S, pipeline.run).stages["rgb"]["device"] is None


@pytest.mark.parametrize("failing", ["start", "stop", "seconds"])
def test_a_timer_that_fails_ends_the_run_with_balanced_books(timed, monkeypatch, failing):
    device, timers = timed
    monkeypatch.setattr(timers, failing, lambda self, *arguments: 1 / 0)
    source = Listed(name="s", frames=pictures(2 * _SAMPLE, 64, 48))
    pipeline = Pipeline([source], [Rgb()], [Rows(wants="image")], device=device)
    with pytest.raises(ZeroDivisionError):
        within(LIMIT_S, pipeline.run)
    pipeline.close()
    balance(pipeline.report)
    assert pipeline.report.exit == "failed" and pipeline.report.frames["delivered"] == _SAMPLE - 1
