"""Speed on a GPU, as ratios in one run: framepipe against what people write, in alternating pairs.

    python tests/benchmarks/bench_cuda.py CLIP [--pairs 5] [--loop 10] [--only WORD …] [--beside WORD …] [--out FILE]

The clip is read ``--loop`` times over. Every ratio is the median over the pairs, with the spread; above 1 framepipe is
faster. Start-up (opening, compiling, pinning) is left out: rates are taken between the first frame and the last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cupy as cp
import numpy as np

from framepipe.frame import Batch, FrameSpec
from framepipe.hardware import cpus
from framepipe.pipeline import Pipeline
from framepipe.planecopy import PlaneCopy
from framepipe.registry import register
from framepipe.sinks.discard import Discard
from framepipe.sources.file import File
from framepipe.stage import Stage
from framepipe.stages.rgb import Rgb
from framepipe.staging.pooled import Pooled
from framepipe.testing import FrameList, pattern_frames

SPIN = 'extern "C" __global__ void spin(long long n) { long long end = clock64() + n; while (clock64() < end) {} }'


class Clock:
    """Frames a second between the first frame counted and the last; ``skip`` are of the start. Any thread."""

    def __init__(self, skip: int = 0) -> None:
        self.skip = skip
        self.count = 0
        self.first = self.last = 0.0
        self._lock = threading.Lock()

    def __call__(self, _: Any = None) -> None:
        with self._lock:
            if self.skip:
                self.skip -= 1
                return
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.count += 1

    @property
    def fps(self) -> float:
        return (self.count - 1) / (self.last - self.first)


def loop_frames(path: str, times: int, threads: int) -> Iterator[av.VideoFrame]:
    """The decoded frames of a file, over and over, in a plain loop."""
    for _ in range(times):
        with av.open(path) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_type = "FRAME" if threads > 1 else "NONE"
            stream.codec_context.thread_count = threads
            yield from container.decode(stream)


def ours(path: str, times: int, stages: list[Stage], **options: Any) -> float:
    """Frames a second of a pipeline on the GPU whose results stay there."""
    clock = Clock()
    sinks = [Discard(read="image") if stages else Discard(), _counter(clock)]
    with Pipeline([File(uri=path, loop=times)], stages, sinks, device="cuda", **options) as pipeline:
        pipeline.run()
    ours.report = pipeline.report  # type: ignore[attr-defined]
    return clock.fps


def _counter(clock: Clock) -> Any:
    from framepipe.sinks.callback import Callback

    return Callback(function=clock, reads=frozenset(), host=False)


def bare(path: str, times: int) -> float:
    clock = Clock()
    for _ in loop_frames(path, times, cpus()):
        clock()
    return clock.fps


def asarray(path: str, times: int) -> float:
    """PyAV converts to RGB on the host, CuPy takes it over."""
    clock = Clock()
    for frame in loop_frames(path, times, cpus()):
        cp.asarray(frame.to_ndarray(format="rgb24"))
        clock()
    cp.cuda.Device().synchronize()
    clock.last = time.perf_counter()
    return clock.fps


def opencv_torch(path: str, times: int) -> float:
    """OpenCV decodes and converts, torch takes it over."""
    import cv2
    import torch

    clock = Clock()
    for _ in range(times):
        capture = cv2.VideoCapture(path)
        while (got := capture.read())[0]:
            torch.from_numpy(got[1]).to("cuda")
            clock()
        capture.release()
    torch.cuda.synchronize()
    clock.last = time.perf_counter()
    return clock.fps


MANY_S = 62.5
"""Seconds of each of many files (625 frames of the clip at hand)."""
MANY_SKIP = 500
"""Frames of many files after which both sides are at work, and time is taken."""


def many_bare(path: str, files: int) -> float:
    """So many single-thread decoders, each copying its planes into ordinary memory."""
    clock = Clock(MANY_SKIP)

    def work(_: int) -> None:
        memory = None
        for frame in loop_frames(path, 1, 1):
            if memory is None:
                spec = FrameSpec.of(frame)
                memory = PlaneCopy(np.empty((1, spec.nbytes), np.uint8), spec)
            if frame.time >= MANY_S:
                break
            memory.put(0, [frame])
            clock()

    _together(work, files)
    return clock.fps


def _together(work: Callable[[int], None], threads: int) -> float:
    """Seconds that so many threads take for it."""
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def many_ours(path: str, files: int) -> float:
    clock = Clock(MANY_SKIP)
    sources = [File(uri=path, end=MANY_S) for _ in range(files)]
    with Pipeline(sources, [], [_counter(clock)], device="cuda", staging={"batch": 8}) as pipeline:
        pipeline.run()
    return clock.fps


# -- staging ----------------------------------------------------------------------------------------------------------


def bus_rate(nbytes: int = 256 << 20) -> float:
    """Bytes a second of an asynchronous upload from pinned memory."""
    memory = cp.cuda.PinnedMemory(nbytes, 0)
    host = np.frombuffer(cp.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
    host[:] = 1
    device, stream = cp.empty(nbytes, cp.uint8), cp.cuda.Stream(non_blocking=True)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        cp.cuda.runtime.memcpyAsync(device.data.ptr, host.ctypes.data, nbytes, 1, stream.ptr)
        stream.synchronize()
        rates.append(nbytes / (time.perf_counter() - began))
    return statistics.median(rates)


DEPTH = 4
READY = 200
"""Distinct frames that are ready in memory: more than twice what the largest caches of today hold."""


def staged(frames: list[av.VideoFrame], times: int, fillers: int, batch: int, copy_threads: int = 1) -> float:
    """Bytes a second from ready frames through the ring to the device."""
    source = FrameList(name="ready", frames=frames, loop=times)
    options = {
        "strategy": "pooled",
        "fillers": fillers,
        "copy_threads": copy_threads,
        "depth": DEPTH,
        "batch": batch,
    }
    clock = Clock()
    with Pipeline([source], [], [_counter(clock)], device="cuda", staging=options, threads=2) as pipeline:
        pipeline.run()
    return clock.fps * FrameSpec.of(frames[0]).nbytes


def copied(frames: list[av.VideoFrame], times: int, threads: int, batch: int) -> float:
    """Bytes a second that so many threads copy between the same buffers, as many at a time, without ring and upload."""
    spec = FrameSpec.of(frames[0])
    slots = DEPTH + 1 + threads
    nbytes = slots * batch * spec.nbytes
    memory = cp.cuda.PinnedMemory(nbytes, 0)
    slab = np.frombuffer(cp.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes).reshape(slots, batch, spec.nbytes)
    rooms = [PlaneCopy(slot, spec) for slot in slab]
    batches = [frames[at : at + batch] for at in range(0, len(frames), batch)]
    counts = [0] * threads

    def work(number: int) -> None:
        mine = rooms[number::threads]
        for turn in range(times):
            for k, pictures in enumerate(batches[number::threads]):
                mine[(turn + k) % len(mine)].put(0, pictures)
                counts[number] += len(pictures)

    seconds = _together(work, threads)
    return sum(counts) / seconds * spec.nbytes


def torch_pinned(frames: list[av.VideoFrame], times: int) -> float:
    """Bytes a second of torch's ``pin_memory().to()`` from packed frames, one thread calling (it copies with many)."""
    import torch

    packed = [torch.from_numpy(frame.to_ndarray()) for frame in frames]
    clock = Clock()
    for _ in range(times):
        for picture in packed:
            picture.pin_memory().to("cuda", non_blocking=True)
            clock()
    torch.cuda.synchronize()
    clock.last = time.perf_counter()
    return clock.fps * packed[0].nbytes


@dataclass(kw_only=True)
class Spin(Stage):
    """Keeps one multiprocessor busy for so many clock cycles a batch."""

    cycles: int
    reads = frozenset({"planes"})
    writes = frozenset({"meta"})

    def open(self, device: Any) -> None:
        super().open(device)
        self._kernel = cp.RawKernel(SPIN, "spin")

    def launch(self, batch: Batch) -> None:
        self._kernel((1,), (1,), (np.int64(self.cycles),))


@register("prefilled")
@dataclass(kw_only=True)
class Prefilled(Pooled):
    """`Pooled` that copies into each slot once: what is behind the ring, measured without what is before it."""

    def fill(self, frames: Any, at: int, slot: Any, spec: FrameSpec) -> None:
        if slot.ticket < self.slots:
            super().fill(frames, at, slot, spec)


def cycles_for(seconds: float) -> int:
    """How many clock cycles `Spin` needs to take so long."""
    kernel = cp.RawKernel(SPIN, "spin")
    cycles = 1_000_000
    kernel((1,), (1,), (np.int64(cycles),))
    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    for _ in range(20):
        kernel((1,), (1,), (np.int64(cycles),))
    end.record()
    end.synchronize()
    return int(seconds / (cp.cuda.get_elapsed_time(start, end) / 1e3 / 20 / cycles))


def overlap(frames: list[av.VideoFrame], times: int) -> dict[str, float]:
    """(T_copy + T_compute - T_both) / min of both, a batch of 8, with a stage that costs twice the copy."""
    batch = 8

    def seconds(stages: list[Stage]) -> float:
        clock = Clock()
        source = FrameList(name="ready", frames=frames, loop=times)
        staging = {"strategy": "prefilled", "fillers": 2, "slots": 8, "depth": 2, "batch": batch}
        with Pipeline([source], stages, [_counter(clock)], device="cuda", staging=staging, threads=1) as pipeline:
            pipeline.run()
        return batch / clock.fps

    copy_s = batch * FrameSpec.of(frames[0]).nbytes / bus_rate()
    compute_s = 2 * copy_s
    both_s = statistics.median(seconds([Spin(cycles=cycles_for(compute_s))]) for _ in range(5))
    return {
        "copy_us": copy_s * 1e6,
        "compute_us": compute_s * 1e6,
        "both_us": both_s * 1e6,
        "overlap": (copy_s + compute_s - both_s) / min(copy_s, compute_s),
    }


# -- all of it --------------------------------------------------------------------------------------------------------


def rounds(
    name: str, ones: dict[str, Callable[[], float]], others: dict[str, Callable[[], float]], count: int
) -> list[dict[str, Any]]:
    """Rounds in which everybody runs once, in alternating order; ratios of each of ours to each other's in a round."""
    rates: dict[str, list[float]] = {key: [] for key in (*ones, *others)}
    for number in range(count):
        for key, run in [*ones.items(), *others.items()][:: 1 if number % 2 else -1]:
            rates[key].append(run())
    return [_ratio(f"{name}, {one} / {other}", rates[one], rates[other]) for one in ones for other in others]


def _ratio(name: str, first: list[float], second: list[float]) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    result = {
        "name": name,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
        "value": round(statistics.median(first), 2),
        "baseline": round(statistics.median(second), 2),
        "pairs": len(ratios),
    }
    spread = f"({ratios[0]:.2f}-{ratios[-1]:.2f})"
    print(f"{name:52} {result['ratio']:6.3f}  {spread}  {result['value']} / {result['baseline']}", flush=True)
    return result


def pairs(
    name: str, one: Callable[[], float], other: Callable[[], float], count: int, scale: float = 1
) -> dict[str, Any]:
    """Alternating pairs; the ratio of the first to the second."""
    first, second = [], []
    for number in range(count):
        for which in ((first, one), (second, other))[:: 1 if number % 2 else -1]:
            which[0].append(which[1]() * scale)
    return _ratio(name, first, second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--loop", type=int, default=10)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--beside", nargs="*", default=[], help="words: of what one file is compared with")
    parser.add_argument("--out")
    options = parser.parse_args()
    clip, n, loop = options.clip, options.pairs, options.loop
    results: list[dict[str, Any]] = []

    def wanted(name: str) -> bool:
        return not options.only or any(part in name for part in options.only)

    if wanted("file"):
        contenders: dict[str, Callable[[], float]] = {
            "bare decode": lambda: bare(clip, loop),
            "PyAV rgb24, cupy.asarray": lambda: asarray(clip, max(1, loop // 2)),
            "OpenCV, torch": lambda: opencv_torch(clip, max(1, loop // 2)),
            "per_frame": lambda: ours(clip, max(1, loop // 3), [Rgb()], staging="per_frame"),
        }
        if importlib.util.find_spec("cv2") is None or importlib.util.find_spec("torch") is None:
            del contenders["OpenCV, torch"]
        for name in list(contenders):
            if options.beside and not any(word in name for word in options.beside):
                del contenders[name]
        batches = {
            f"batch {batch}": lambda b=batch: ours(clip, loop, [Rgb()], staging={"batch": b}) for batch in (1, 4)
        }
        results += rounds("one file to RGB", batches, contenders, n)
    if wanted("many"):
        files = options.files
        results.append(
            pairs(
                f"{files} files / decoders and a copy",
                lambda: many_ours(clip, files),
                lambda: many_bare(clip, files),
                n,
            )
        )
    if any(wanted(name) for name in ("staging", "torch", "overlap")):
        frames = pattern_frames(READY, 1920, 1080)
    if wanted("staging"):
        bus = bus_rate() / 1e9
        print(f"bus {bus:.1f} GB/s")
        results.append({"name": "bus, GB/s", "value": round(bus, 2)})
        for fillers, batch in ((1, 1), (8, 1), (8, 8), (10, 8)):
            results.append(
                pairs(f"staging 1080p, {fillers} fillers, batch {batch} / copies alone, GB/s",
                      lambda f=fillers, b=batch: staged(frames, 30, f, b),
                      lambda f=fillers, b=batch: copied(frames, 30, f, b), n, 1e-9)
            )  # fmt: skip
    if wanted("torch") and importlib.util.find_spec("torch") is not None:
        for fillers, copies, batch in ((1, 8, 1), (2, 4, 1), (1, 8, 8), (2, 4, 8), (8, 1, 8)):
            results.append(
                pairs(f"staging 1080p, {fillers} fillers, {copies} copy_threads, batch {batch} / torch, GB/s",
                      lambda f=fillers, c=copies, b=batch: staged(frames, 20, f, b, c),
                      lambda: torch_pinned(frames, 20), n, 1e-9)
            )  # fmt: skip
    if wanted("overlap"):
        result: dict[str, Any] = {"name": "overlap", **overlap(frames, 30)}
        print(result)
        results.append(result)
    if options.out:
        from framepipe.report import versions

        device = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        machine = {"cpus": cpus(), "gpu": device, "cupy": cp.__version__, "load": os.getloadavg(), **versions()}
        Path(options.out).write_text(json.dumps({"machine": machine, "results": results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
