"""Whether a stage orders the work on streams of its own with the compute stream. It takes a GPU to see."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from framepipe.chain import Chain, Link
from framepipe.device import select
from framepipe.frame import Batch, FrameSpec, Item, Planes, frame_planes
from framepipe.stage import Stage

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) { long long end = clock64() + cycles; while (clock64() < end) {} }
"""
_CYCLES = 400_000_000
"""A fifth of a second or more on GPUs of today: a launch must have returned long before."""

_SPARE_NBYTES = 64 << 20
_LATE = "its work on a stream of its own must wait for an event recorded on batch.stream"
_SLOW = "batch.stream must wait for an event recorded behind its work on a stream of its own"


def check_streams(stages: Sequence[Stage], frames: Sequence[Any], device: str, tolerance: int) -> None:
    """Check the last of ``stages`` (with ids, not opened) on a GPU against itself, with batches of all the frames.

    It must read its inputs behind the compute stream, whatever it waits for; its outputs must be there for whoever
    comes behind it on the compute stream, however slow its own streams are; it must write them whole, and it must
    not wait. Streams made by CuPy and PyTorch are found and slowed down. Raises `AssertionError`.
    """
    bench = _Bench(stages, frames, device)
    try:
        bench.run("warm")
        calm = bench.run("calm")
        bench.same(calm, bench.run("again", poison=0xFF), tolerance, "it is not written whole")
        bench.same(calm, bench.run("slow", poison=0xA5, slow=True), tolerance, f"other streams are slow: {_SLOW}")
        bench.same(calm, bench.run("late", poison=0xA5, late=True), tolerance, f"inputs come late: {_LATE}")
    finally:
        bench.close()


class _Bench:
    """A stage on a GPU, with the stages before it done and waited for."""

    def __init__(self, stages: Sequence[Stage], frames: Sequence[Any], device: str) -> None:
        self.device: Any = select.choose(device).make()
        self.xp: Any = self.device.xp
        self.compute: Any = self.device.stream("compute")
        self.spin = self.xp.RawKernel(_SPIN, "spin")
        self.stages = stages
        for stage in stages:
            stage.open(self.device)
        self.spec = FrameSpec.of(frames[0])
        self.links = Chain(stages, self.spec, None).links
        self.count = len(frames)
        self.planes = np.zeros((self.count, self.spec.nbytes), np.uint8)
        views = self.spec.views(self.planes)
        for i, frame in enumerate(frames):
            for view, plane in zip(views, frame_planes(frame, self.spec), strict=True):
                view[i] = plane

    def run(self, source: str, *, poison: int = 0, late: bool = False, slow: bool = False) -> dict[str, np.ndarray]:
        """What the last stage makes of the frames as ``source``, whose state is thereby its own."""
        with self.device.current(self.compute):
            batch = self._prepared(source)
            link = self.links[-1]
            outs = link.outs(self.device, self.count, self.compute)
            for out in outs.values():
                out.data.memset_async(poison, out.nbytes)
            assert batch.planes is not None
            inputs = [batch.planes.slab, *batch.arrays.values()]
            true = [array.copy() for array in inputs]
            self.xp.empty(_SPARE_NBYTES, np.uint8)  # for the pool to give from: cudaMalloc may wait for what runs
            if late:
                for array in inputs:
                    array.data.memset_async(0xA5, array.nbytes)
            self.xp.cuda.runtime.deviceSynchronize()
            if slow:
                self._each_other_stream(lambda: self.spin((1,), (1,), (np.int64(_CYCLES),)))
            if late:
                self.spin((1,), (1,), (np.int64(_CYCLES),))
                for array, content in zip(inputs, true, strict=True):
                    array.data.copy_from_device_async(content.data, array.nbytes)
            self._launch(link, batch, outs, late)
            if not (slow or late):
                self.xp.cuda.runtime.deviceSynchronize()  # right even where an edge is missing
            found = {name: array.copy() for name, array in batch.arrays.items()}
            self.compute.synchronize()
            results = {name: self.device.to_host(array) for name, array in found.items()}
            self.xp.cuda.runtime.deviceSynchronize()  # before its memory is used again
            return results

    def _prepared(self, source: str) -> Batch:
        slab = self.xp.asarray(self.planes)
        items = [Item(source, i, i, Fraction(1, 25), i / 25) for i in range(self.count)]
        batch = Batch(items, Planes(self.spec, self.count, slab=slab))
        for link in self.links[:-1]:
            link.run(batch, link.outs(self.device, self.count, self.compute), self.compute)
        return batch

    def _launch(self, link: Link, batch: Batch, outs: dict[str, Any], late: bool) -> None:
        reached = self.device.event("inputs")
        reached.record(self.compute)
        self.device.enqueue(self.compute, partial(link.run, batch, outs, self.compute))
        assert not late or not reached.done(), f"stage {link.stage.id!r} waits for the device in launch"

    def _each_other_stream(self, work: Callable[[], None]) -> None:
        kinds: tuple[type, ...] = (self.xp.cuda.Stream,)
        if "torch" in sys.modules:
            kinds += (sys.modules["torch"].cuda.Stream,)
        for thing in gc.get_objects():
            if not issubclass(type(thing), kinds):
                continue
            stream = self.device.stream_of(thing)
            # The default streams have the handles 0, 1 and 2.
            if stream.ptr > 2 and stream.ptr != self.compute.ptr and _device_of(thing) in (-1, self.device.number):
                with stream:
                    work()

    def same(self, calm: dict[str, np.ndarray], found: dict[str, np.ndarray], tolerance: int, what: str) -> None:
        for name, array in calm.items():
            apart = np.abs(array.astype(np.float64) - found[name].astype(np.float64))
            worst = np.nan_to_num(apart, nan=0.0).max(initial=0.0)
            stage = self.stages[-1].id
            assert worst <= tolerance, f"{name} of stage {stage!r} is off by {worst:g} where {what}"

    def close(self) -> None:
        for stage in self.stages:
            stage.close()
        self.device.close()


def _device_of(stream: Any) -> int:
    """The number of the device that a stream of CuPy or PyTorch is on; -1 where it does not say."""
    number = getattr(stream, "device_id", getattr(stream, "device_index", -1))
    return number if isinstance(number, int) else -1
