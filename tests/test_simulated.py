"""The simulated device: it must fail for every missing edge, every time, and run what is right."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from framepipe.device.base import Event, Stream
from framepipe.device.cpu import CpuDevice
from framepipe.device.simulated import POISON, SimulatedDevice, SimulatedEvent, SimulatedStream
from framepipe.errors import HazardError
from framepipe.pipeline import Pipeline
from framepipe.registry import find, names
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.testing import FrameList, check_device, check_stager, pattern_frames


@pytest.mark.parametrize("make", [CpuDevice, SimulatedDevice])
def test_devices_keep_their_contract(make):
    check_device(make)


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "nv12", "yuv444p10le", "rgb24", "gray"])
@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (make, name)
        for make in (CpuDevice, SimulatedDevice)
        for name in names("staging")
        if find("staging", name).missing(make.kind) is None
    ],
)
def test_staging_strategies_keep_their_contract(make, strategy, pix_fmt):
    check_stager(strategy, make, pix_fmt=pix_fmt)


def test_nothing_runs_before_somebody_waits():
    device = SimulatedDevice()
    stream, event, ran = device.stream("s"), device.event("e"), []
    device.enqueue(stream, lambda: ran.append(1))
    event.record(stream)
    device.enqueue(stream, lambda: ran.append(2))
    assert ran == [] and not event.done()
    event.synchronize()
    assert ran == [1]
    stream.synchronize()
    assert ran == [1, 2]


def test_waiting_runs_what_the_other_stream_was_waited_for():
    device = SimulatedDevice()
    a, b, event, ran = device.stream("a"), device.stream("b"), device.event("e"), []
    device.enqueue(a, lambda: ran.append("a"))
    event.record(a)
    b.wait(event)
    device.enqueue(b, lambda: ran.append("b"))
    b.synchronize()
    assert ran == ["a", "b"]


def test_two_streams_without_an_event_are_a_hazard():
    device = SimulatedDevice()
    a, b = device.stream("a"), device.stream("b")
    block = device.fixed(64)
    device.enqueue(a, lambda: None, writes=(block,))
    with pytest.raises(HazardError, match="no event orders"):
        device.enqueue(b, lambda: None, reads=(block,))


def test_two_readers_are_none():
    device = SimulatedDevice()
    a, b = device.stream("a"), device.stream("b")
    block = device.fixed(64)
    device.enqueue(a, lambda: None, reads=(block,))
    device.enqueue(b, lambda: None, reads=(block,))


def test_slots_of_one_slab_are_apart():
    device = SimulatedDevice()
    a, b = device.stream("a"), device.stream("b")
    slab = device.host_empty(256, pinned=True)
    device.regions([slab[:128], slab[128:]], "slot")
    device.enqueue(a, lambda: None, reads=(slab[:128],))
    device.host_access(slab[128:], write=True)
    with pytest.raises(HazardError, match="slot 0"):
        device.host_access(slab[:128], write=True)
    b.synchronize()


def test_a_failure_is_sticky():
    device = SimulatedDevice()
    stream = device.stream("s")
    device.enqueue(stream, lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            stream.synchronize()


def test_freed_memory_is_poisoned_and_reused_behind_its_last_holder():
    device = SimulatedDevice()
    stream = device.stream("s")
    array = device.empty((16,), "uint8", stream)
    view = np.frombuffer(array.base._block, np.uint8)
    array[:] = 7
    del array
    assert (view == POISON).all()


@dataclass(kw_only=True)
class Copy(Stage):
    """Luma as an image, and its mean read back: every kind of edge is needed for it."""

    reads = frozenset({"planes"})
    writes = frozenset({"image", "meta"})

    def plan(self, flow: Flow) -> Flow:
        self.readback = (f"{self.id}.mean",)
        spec = flow.spec
        flow = flow.put("image", ArraySpec((spec.height, spec.width, 3)))
        return flow.put(f"{self.id}.mean", ArraySpec((), "float64"))

    def launch(self, batch):
        for i in range(len(batch)):
            luma = batch.planes.picture(i)[0]
            batch.out["image"][i] = luma[..., None]
            batch.out[f"{self.id}.mean"][i] = luma.mean()

    def collect(self, batch):
        for item, mean in zip(batch.items, batch.host[f"{self.id}.mean"], strict=True):
            item.meta[self.id] = float(mean)


class Broken(SimulatedDevice):
    """A simulated device on which waiting for events of some names does nothing."""

    ignored = ""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0
        self.overwriting = threading.Event()

    def upload(self, dst: Any, src: np.ndarray, stream: Stream) -> None:
        self.uploads += 1
        if self.uploads > 2:  # there are two halves
            self.overwriting.set()
        super().upload(dst, src, stream)

    def stream(self, name: str) -> SimulatedStream:
        stream = _Deaf(self, name)
        self.streams.append(stream)
        return stream

    def event(self, name: str) -> SimulatedEvent:
        return _Mute(self, name)


class _Deaf(SimulatedStream):
    def wait(self, event: Event) -> None:
        if not event.name.startswith(Broken.ignored.split("/")[0]) or "fence" in Broken.ignored:
            super().wait(event)


class _Mute(SimulatedEvent):
    @property
    def ignored(self) -> bool:
        fence = Broken.ignored.endswith("/fence") and self.name.startswith("copied")
        return fence or (Broken.ignored == "done" and self.name.startswith("done"))

    def done(self) -> bool:
        return self.ignored or super().done()

    def synchronize(self) -> None:
        if Broken.ignored == "consumed half" and self.name.startswith("done") and self._device.uploads:
            # Else the first results may come back, and their memory be used again, before their half is overwritten:
            # which is an edge back, too.
            self._device.overwriting.wait(5)
        if not self.ignored:
            super().synchronize()


def run(device_class: type[SimulatedDevice], monkeypatch: pytest.MonkeyPatch, **staging: object) -> list[float]:
    monkeypatch.setattr("framepipe.device.simulated.SimulatedDevice", device_class)
    means: list[float] = []
    frames = pattern_frames(24)
    pipeline = Pipeline(
        [FrameList(name="t", frames=frames)],
        [Copy()],
        [lambda frame: means.append(frame.meta["copy"])],
        device="simulated",
        staging={"strategy": "pooled", **staging},
    )
    with pipeline:
        pipeline.run()
    return means


def test_a_pipeline_with_every_edge_runs(monkeypatch, nothing_left):
    assert len(run(SimulatedDevice, monkeypatch)) == 24


EDGES = {
    "copied slot": "the edge forward: compute waits for the upload",
    "consumed half": "the edge back: the upload waits for whoever reads the half",
    "copied slot/fence": "the fence: the filler waits for the copy out of its slot",
    "done": "the host waits for the results it reads",
    "launched half": "the read-back waits for the stages",
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("edge", EDGES)
def test_a_missing_edge_fails_every_time(edge, batch, monkeypatch, nothing_left):
    monkeypatch.setattr(Broken, "ignored", edge)
    for _ in range(5):
        with pytest.raises(HazardError):
            run(Broken, monkeypatch, batch=batch)
