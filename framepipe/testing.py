"""Contracts as functions, for people who extend framepipe, and for framepipe's own backends.

Each ``check_*`` raises `AssertionError` saying which clause of the contract is broken. They run on any machine: a
stage that passes `check_stage` behaves the same with batches of any size, on memory that is not zeroed, and on a
device that does nothing before it is waited for.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from fractions import Fraction
from typing import Any

import av
import numpy as np

from framepipe import registry
from framepipe.device.base import Device
from framepipe.device.cpu import CpuDevice
from framepipe.frame import Frame, FrameSpec, Item, frame_planes
from framepipe.pipeline import Pipeline
from framepipe.ring import Ring
from framepipe.sink import Sink, SinkContext, SourceInfo
from framepipe.source import Source, Stream
from framepipe.stage import Flow, Stage


def pattern_frames(
    count: int, width: int = 64, height: int = 48, pix_fmt: str = "yuv420p", *, seed: int = 0
) -> list[av.VideoFrame]:
    """``count`` pictures of seeded noise over gradients, with pts 0, 1, … at 25 a second; every sample is in range."""
    rng = np.random.default_rng(seed)
    frames = []
    for number in range(count):
        frame = av.VideoFrame(width, height, pix_fmt)
        frame.pts, frame.time_base = number, Fraction(1, 25)
        spec = FrameSpec.of(frame)
        top = (1 << spec.format.bits) - 1
        for plane, layout in zip(frame.planes, spec.planes, strict=True):
            dtype = np.dtype(spec.format.dtype)
            rows = np.frombuffer(memoryview(plane), dtype).reshape(-1, plane.line_size // dtype.itemsize)
            view = rows[: layout.height, : layout.row_samples]
            ramp = np.linspace(0, top, layout.row_samples)[None, :] + number * top / 16
            noise = rng.integers(0, top // 8 + 1, (layout.height, layout.row_samples))
            view[:] = ((ramp + noise) % (top + 1)).astype(dtype) << spec.format.shift
        frames.append(frame)
    return frames


@dataclass(kw_only=True)
class FrameList(Source):
    """A source that hands out frames made beforehand (not registered: for tests)."""

    frames: Sequence[Any] = ()

    def open(self, stopping: Callable[[], bool]) -> Stream:
        stream = _ListStream()
        stream.expected = len(self.frames)
        stream.list = self.frames
        return stream


class _ListStream(Stream):
    list: Sequence[Any] = ()

    def frames(self) -> Iterator[Any]:
        yield from self.list


def run_stages(
    stages: Sequence[Stage], frames: Sequence[Any], *, device: str = "cpu", batch: int = 1
) -> list[dict[str, Any]]:
    """Run stages over frames in a real pipeline; for each picture its image, tensors and meta on the host."""
    results: list[dict[str, Any]] = []
    source = FrameList(name="test", frames=frames)
    with Pipeline([source], stages, device=device, staging={"batch": batch}) as pipeline:
        for frame in pipeline:
            arrays = {name: frame.to_host(array).copy() for name, array in frame.tensors.items()}
            image = None if frame.image is None else frame.numpy().copy()
            results.append({"image": image, "tensors": arrays, "meta": dict(frame.meta)})
    return results


def check_stage(
    stage: Stage,
    *,
    width: int = 64,
    height: int = 48,
    pix_fmt: str = "yuv420p",
    count: int = 6,
    tolerance: int = 0,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Check a stage's contract and return what it made of ``count`` pictures on ``device``.

    Parameters are a dataclass; planning twice gives the same; every output is written whole; inputs stay as they
    are; results do not depend on the size of batches, and on ``simulated`` differ from ``cpu`` by at most
    ``tolerance`` codes; ``meta`` is plain JSON.

    With ``device="cuda"`` all of that happens on the GPU alone, so that a stage which runs nowhere else can be checked;
    compare the results of the two for one that runs on both. What only a GPU shows is checked there too: work on
    streams of the stage's own waits for the compute stream and is waited for by it, and `Stage.launch` does not wait.
    """
    assert is_dataclass(stage), f"{type(stage).__name__} is no dataclass, so it has no parameters in YAML"
    assert replace(stage) == stage, "a stage made from its own fields must be equal to it"
    frames = pattern_frames(count, width, height, pix_fmt)
    before = [_bytes(frame) for frame in frames]
    on_gpu = device.startswith("cuda")
    if on_gpu:  # first: where order is missing, whatever else goes wrong is an accident
        from framepipe._testing_streams import check_streams
        from framepipe.chain import prepare

        check_streams(prepare(_chain(stage), (), _exact_rgb), frames, device, tolerance)
    reference = run_stages(_chain(stage), frames, device=device)
    assert [_bytes(frame) for frame in frames] == before, "the stage wrote to the decoder's planes"
    for other, batch in ((device, 3),) if on_gpu else (("cpu", 3), ("simulated", 1), ("simulated", 3)):
        found = run_stages(_chain(stage), frames, device=other, batch=batch)
        _same(reference, found, f"{other}, batches of {batch}", 0 if other == device else tolerance)
    for result in reference:
        json.dumps(result["meta"], allow_nan=False)  # raises where meta is not plain JSON
    if not on_gpu:
        _check_writes_all(stage, frames)
    return reference


def _bytes(frame: Any) -> bytes:
    return b"".join(plane.tobytes() for plane in frame_planes(frame, FrameSpec.of(frame)))


def _same(reference: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], where: str, tolerance: int) -> None:
    assert len(found) == len(reference), f"{where}: {len(found)} pictures came out instead of {len(reference)}"
    for number, (one, other) in enumerate(zip(reference, found, strict=True)):
        pairs = {"image": (one["image"], other["image"])}
        pairs |= {name: (array, other["tensors"].get(name)) for name, array in one["tensors"].items()}
        for name, (a, b) in pairs.items():
            if a is None and b is None:
                continue
            assert b is not None and a.shape == b.shape and a.dtype == b.dtype, f"{where}: {name} differs in shape"
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64)).max() if a.size else 0
            assert apart <= tolerance, f"{where}: {name} of picture {number} is off by {apart}"
        if not tolerance:
            assert one["meta"] == other["meta"], f"{where}: meta of picture {number} differs"


class _FilledDevice(CpuDevice):
    """Hands out memory full of one value, as a recycled block may be."""

    default_accuracy = "exact"

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Any) -> np.ndarray:
        array = super().empty(shape, dtype, stream)
        array.view(np.uint8).reshape(-1)[:] = self.value
        return array


def _check_writes_all(stage: Stage, frames: Sequence[Any]) -> None:
    """A stage must write its outputs whole: what was in recycled memory must not show through."""
    from framepipe.chain import Chain, prepare
    from framepipe.frame import Batch, Planes

    spec = FrameSpec.of(frames[0])
    results = []
    for value in (0x00, 0xFF):
        device = _FilledDevice(value)
        stages = prepare([copy.deepcopy(stage)], (), _exact_rgb)
        for one in stages:
            one.open(device)
        chain = Chain(stages, spec, None)
        assert stages[-1].plan(Flow(spec, chain.flow.arrays)).arrays.keys() == chain.flow.arrays.keys(), (
            "planning a second time gives other arrays"
        )
        items = [Item("test", i, i, Fraction(1, 25), i / 25) for i in range(len(frames))]
        batch = Batch(items, Planes(spec, len(items), frames=frames))
        stream = device.stream("test")
        for link in chain.links:
            link.run(batch, link.outs(device, len(batch), stream), stream)
        results.append({name: np.array(list(array)) for name, array in batch.arrays.items()})
        for one in stages:
            one.close()
        device.close()
    for name, array in results[0].items():
        same = np.array_equal(array, results[1][name], equal_nan=array.dtype.kind == "f")
        assert same, f"{name} is not written whole: what was in the memory before shows through"


def _chain(stage: Stage) -> list[Stage]:
    """A copy of the stage, behind an exact conversion if it wants pictures: devices agree on that one only."""
    own = copy.deepcopy(stage)
    return [_exact_rgb(), own] if "image" in stage.reads else [own]


def _exact_rgb() -> Stage:
    made: Stage = registry.find("stages", "rgb")(accuracy="exact")
    return made


def check_device(make: Callable[[], Device]) -> None:
    """Check a device: copies in order, events, leases that keep their memory, tiers, the ledger, closing twice."""
    device = make()
    copy_stream, compute = device.stream("copy"), device.stream("compute")
    host = device.host_empty(1024, pinned=True)
    assert host.dtype == np.uint8 and host.nbytes == 1024, "host_empty is exact in size"
    half = device.fixed(1024)
    device.host_access(host, write=True)
    host[:] = np.arange(1024) % 251
    copied, done = device.event("copied"), device.event("done")
    assert done.done(), "an event that was never recorded is done"
    device.upload(half, host, copy_stream)
    copied.record(copy_stream)
    compute.wait(copied)
    _check_result(device, half, compute, done)
    held = [device.empty((64,), "uint8", compute) for _ in range(8)]
    assert len({int(array.ctypes.data) for array in held if hasattr(array, "ctypes")}) in (0, 8), (
        "memory that is held must not be handed out again"
    )
    stamp = device.stamp()
    device.observe(stamp)
    del held
    _check_cold(device)
    compute.synchronize()
    copy_stream.synchronize()
    device.host_free(host)
    device.fixed_free(half)
    device.close()
    device.close()
    left = {kind: nbytes for kind, nbytes in device.ledger.bytes.items() if nbytes}
    assert not left, f"the ledger still holds {left} after close"


def _check_cold(device: Device) -> None:
    held = [device.host_output((size,), "uint8", "check") for size in (64, 100) for _ in range(3)]
    places = [int(array.ctypes.data) for array in held]
    assert len(set(places)) == len(places), "memory that is held must not be handed out again"
    assert not any(place % device.cold.align for place in places), "cold memory is aligned"
    before = device.tiers()["cold"].in_use_blocks
    del held
    assert before - device.tiers()["cold"].in_use_blocks == len(places), "what is dropped comes back"
    again = device.host_output((100,), "uint8", "check")
    assert int(again.ctypes.data) in places[3:], "a block is used again for its own size"


def _check_result(device: Device, half: Any, compute: Any, done: Any) -> None:
    out = device.empty((4, 256), "uint8", compute)

    def work() -> None:
        out.reshape(-1)[:] = 255 - half

    device.enqueue(compute, work, reads=(half,), writes=(out,))
    back = device.host_output((4, 256), "uint8")
    device.download(back, out, compute)
    done.record(compute)
    done.synchronize()
    assert done.done(), "an event that was waited for is done"
    device.host_access(back, write=False)
    assert np.array_equal(back.reshape(-1), 255 - np.arange(1024) % 251), "work runs in order behind its events"


def check_stager(name: str, make: Callable[[], Device], *, pix_fmt: str = "yuv420p", batch: int = 2) -> None:
    """Check a staging strategy: planes arrive unchanged, slots go round many times, nothing is left at close."""
    device = make()
    stager = registry.find("staging", name)()
    stager.open(device, 3, batch, 2)
    ring = Ring(3, device.stamp, device.observe)
    copy_stream, compute = device.stream("copy"), device.stream("compute")
    for each in ring.slots:
        each.copied = device.event("copied")
    consumed = [device.event("consumed") for _ in range(2)]
    frames = pattern_frames(8 * batch, 50, 34, pix_fmt)
    spec = FrameSpec.of(frames[0])
    for number in range(8):
        part = frames[number * batch : (number + 1) * batch]
        slot = ring.acquire()
        assert slot is not None
        if not stager.fits(spec) or number == 0:
            stager.plan(spec, ring.slots)
            stager.plan_device(spec)
        if slot.fence is not None:
            slot.fence.synchronize()
        slot.items, slot.spec = [Item("test", i, i, None, 0.0) for i in range(batch)], spec
        slot.frames = [None] * batch
        first = 1 + number % batch  # pictures come one at a time and together, at the beginning of a slot and within it
        stager.fill(part[:first], 0, slot, spec)
        if first < batch:
            stager.fill(part[first:], first, slot, spec)
        ring.commit(slot)
        assert ring.get() is slot, "slots come out in the order in which they were acquired"
        copy_stream.wait(consumed[number % 2])
        planes = stager.upload(slot, spec, number % 2, copy_stream, slot.copied)
        compute.wait(slot.copied)
        seen: list[list[bytes]] = []

        def work(planes: Any = planes, seen: list[list[bytes]] = seen) -> None:
            seen.extend([plane.tobytes() for plane in planes.picture(i)] for i in range(batch))

        device.enqueue(compute, work, reads=(planes.slab if planes.slab is not None else [],))
        consumed[number % 2].record(compute)
        ring.release(slot, consumed[number % 2] if stager.shares_memory else slot.copied)
        consumed[number % 2].synchronize()
        for frame, planes_seen in zip(part, seen, strict=True):
            expected = [plane.tobytes() for plane in frame_planes(frame, spec)]
            assert planes_seen == expected, f"{name}: planes of batch {number} arrived changed"
    for stream in (copy_stream, compute):
        stream.synchronize()
    stager.close()
    device.close()
    left = {kind: nbytes for kind, nbytes in device.ledger.bytes.items() if nbytes}
    assert not left, f"{name}: the ledger still holds {left} after close"


def check_source(source: Source, *, count: int | None = None) -> int:
    """Check a source: every frame has a time, times do not go back, held frames stay as they are, it opens twice.

    At most ``count`` frames are taken. Returns how many came.
    """
    numbers = []
    for _ in range(2):
        with Pipeline([replace(source)], device="cpu", stages=(), sinks=()) as pipeline:
            held: list[tuple[Frame, int]] = []
            last = float("-inf")
            for number, frame in enumerate(pipeline):
                assert frame.time_s == frame.time_s and frame.time_s >= last, "time goes back or is missing"
                last = frame.time_s
                if frame.image is not None and number < 8:
                    held.append((frame, hash(frame.numpy().tobytes())))
                if count is not None and number + 1 >= count:
                    break
            for frame, before in held:
                assert hash(frame.numpy().tobytes()) == before, "a frame changed while it was held"
            numbers.append(number + 1)
    assert numbers[0] == numbers[1], f"opened again it gave {numbers[1]} frames instead of {numbers[0]}"
    return numbers[0]


def check_sink(sink: Sink, *, count: int = 5, width: int = 64, height: int = 48) -> None:
    """Check a sink: it takes what it says it reads, closing is idempotent, and no file stays open."""
    import psutil

    before = len(psutil.Process().open_files())
    info = SourceInfo("test", "test", rate=Fraction(25), time_base=Fraction(1, 25))
    sink.paths(["test"])
    sink.open(SinkContext({"test": info}))
    spec = FrameSpec.of(pattern_frames(1, width, height)[0])
    image = np.zeros((height, width, 3), np.uint8)
    for i in range(count):
        sink.write(Frame(Item("test", i, i, Fraction(1, 25), i / 25), spec, image if "image" in sink.reads else None))
    sink.end("test")
    sink.close()
    sink.close()
    json.dumps(sink.state(), allow_nan=False)
    assert len(psutil.Process().open_files()) == before, "a file stays open after close"
