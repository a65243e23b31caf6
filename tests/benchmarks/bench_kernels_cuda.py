"""Speed of the GPU's kernels beside what memory allows, and what a launch costs the host.

    python tests/benchmarks/bench_kernels_cuda.py [--only WORD …] [--out FILE.json]

Device times are of launches captured in a CUDA graph, so that the host leaves no gaps between them, over buffers that
together are several times the second-level cache; the median of repeats. Bytes are counted once each for what must be
read and written; ``of copy`` is the rate as a share of a large device-to-device copy's in the same run. ``host`` is
the time of one call from Python with the device idle enough to take it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels import cuda
from framepipe.kernels._draw import Mark

ROTATING_BYTES = 400_000_000
REPEATS = 9
SIZES = {"480p": (854, 480), "1080p": (1920, 1080), "2160p": (3840, 2160)}
FACTOR, OFFSET = np.full(3, 1 / 255, np.float32), np.zeros(3, np.float32)
Call = Callable[[], Any]


def milliseconds(work: Call, stream: Any) -> float:
    """Of one run on the device, by events."""
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(cp.cuda.get_elapsed_time(begin, end))


def on_device(calls: list[Call], stream: Any) -> tuple[float, float]:
    """Seconds of one call on the device, and the spread of the repeats as a share."""
    for call in calls:
        call()  # compiled, and the pool warm
    stream.synchronize()
    rounds = max(1, 24 // len(calls))
    stream.begin_capture()
    for call in calls * rounds:
        call()
    graph = stream.end_capture()
    graph.launch(stream)
    found = sorted(milliseconds(lambda: graph.launch(stream), stream) for _ in range(REPEATS))
    middle = statistics.median(found)
    return middle / 1e3 / (len(calls) * rounds), (found[-2] - found[1]) / middle


def on_host(call: Call, stream: Any) -> float:
    """Seconds of one call on the host."""
    found = []
    for _ in range(REPEATS):
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            call()
        found.append((time.perf_counter() - began) / 20)
    stream.synchronize()
    return statistics.median(found)


def copy_rate(stream: Any) -> float:
    """Bytes a second of a device-to-device copy, counting what is read and what is written."""
    a, b = cp.empty(1 << 31, np.uint8), cp.empty(1 << 31, np.uint8)

    def work() -> None:
        b.data.copy_from_device_async(a.data, a.nbytes)

    work()
    return 2 * a.nbytes / statistics.median(milliseconds(work, stream) for _ in range(REPEATS)) * 1e3


class Bench:
    """One row: a kernel, its inputs and the bytes it cannot avoid."""

    def __init__(self, name: str, size: str, n: int, make: Callable[[], Call], nbytes: int) -> None:
        self.name, self.size, self.n, self.make, self.nbytes = name, size, n, make, nbytes

    def run(self, stream: Any, copied: float) -> dict[str, Any]:
        sets = min(24, max(2, -(-ROTATING_BYTES // self.nbytes)))
        calls = [self.make() for _ in range(sets)]
        seconds, spread = on_device(calls, stream)
        rate = self.nbytes / seconds
        return {
            "kernel": self.name, "size": self.size, "batch": self.n, "us": seconds * 1e6, "spread": spread,
            "us_a_picture": seconds * 1e6 / self.n, "bytes": self.nbytes, "GB_per_s": rate / 1e9,
            "of_copy": rate / copied, "host_us": on_host(calls[0], stream) * 1e6,
        }  # fmt: skip


@cache
def noise() -> Any:
    """Random bytes, the same for all: zeros would be kinder to memory than pictures are."""
    return cp.asarray(np.random.default_rng(0).integers(0, 256, 1 << 26, np.uint8))


def random(shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
    array = cp.empty(shape, dtype)
    bytes_of = array.reshape(-1).view(np.uint8)
    for at in range(0, bytes_of.size, noise().size):
        part = bytes_of[at : at + noise().size]
        part[:] = noise()[: part.size]
    return array


def planes_of(spec: FrameSpec, n: int) -> Planes:
    slab = random((n, spec.nbytes))
    if spec.format.itemsize == 2:
        for view in spec.views(slab):
            view &= ((1 << spec.format.bits) - 1) << spec.format.shift
    return Planes(spec, n, slab=slab)


def samples(spec: FrameSpec) -> int:
    """Bytes of a picture's samples that have to be read (alpha is not)."""
    used = {spec.format.components[letter][0] for letter in spec.format.components if letter != "A"}
    layouts = (spec.planes[at] for at in used)
    return sum(layout.height * layout.row_samples * spec.format.itemsize for layout in layouts)


def to_rgb(size: str, n: int, pix_fmt: str = "yuv420p", rotation: int = 0, **options: Any) -> Bench:
    spec = FrameSpec(*SIZES[size], pix_fmt, "rgb" if "rgb" in pix_fmt else "bt709", rotation=rotation)
    width, height = spec.upright_size

    def make() -> Call:
        planes, out = planes_of(spec, n), random((n, height, width, 3))
        return lambda: cuda.to_rgb(planes, out, **options)

    name = " ".join(["to_rgb", pix_fmt, *([f"turned {rotation}"] if rotation else []), *options.values()])
    return Bench(name, size, n, make, n * (samples(spec) + width * height * 3))


def to_tensor(
    size: str, n: int, to: tuple[int, int], method: Any, dtype: str = "float32", pix_fmt: str = "yuv420p"
) -> Bench:
    spec = FrameSpec(*SIZES[size], pix_fmt, "bt709")
    inner = (to[0], max(1, to[0] * spec.height // spec.width))
    target = (0, max(0, to[1] - inner[1]) // 2, *inner) if inner[1] <= to[1] else None

    def make() -> Call:
        planes, out = planes_of(spec, n), random((n, 3, to[1], to[0]), dtype)
        return lambda: cuda.to_tensor(planes, out, method=method, target=target, factor=FACTOR, offset=OFFSET)

    bytes_out = 3 * to[0] * to[1] * np.dtype(dtype).itemsize
    name = " ".join(["to_tensor", f"{to[0]}x{to[1]}", method, dtype, *([] if pix_fmt == "yuv420p" else [pix_fmt])])
    return Bench(name, size, n, make, n * (samples(spec) + bytes_out))


def resize(size: str, n: int, to: tuple[int, int], method: Any) -> Bench:
    width, height = SIZES[size]

    def make() -> Call:
        images, out = random((n, height, width, 3)), random((n, to[1], to[0], 3))
        return lambda: cuda.resize(images, out, method=method)

    return Bench(f"resize {to[0]}x{to[1]} {method}", size, n, make, n * 3 * (width * height + to[0] * to[1]))


def normalize(size: str, n: int, dtype: str, layout: Any) -> Bench:
    width, height = SIZES[size]
    shape = (n, 3, height, width) if layout == "nchw" else (n, height, width, 3)

    def make() -> Call:
        images, out = random((n, height, width, 3)), random(shape, dtype)
        return lambda: cuda.normalize(images, out, factor=FACTOR, offset=OFFSET, layout=layout)

    return Bench(f"normalize {layout} {dtype}", size, n, make, n * 3 * width * height * (1 + np.dtype(dtype).itemsize))


def stats(size: str, n: int) -> Bench:
    width, height = SIZES[size]

    def make() -> Call:
        images, out = random((n, height, width, 3)), cp.zeros((n, 3, 3), np.int64)
        return lambda: cuda.stats(images, out)

    return Bench("stats", size, n, make, n * 3 * width * height)


def luma_stats(size: str, n: int) -> Bench:
    spec = FrameSpec(*SIZES[size], "yuv420p")

    def make() -> Call:
        planes, out = planes_of(spec, n), cp.zeros((n, 1, 3), np.int64)
        return lambda: cuda.luma_stats(planes, out)

    return Bench("luma_stats", size, n, make, n * spec.width * spec.height)


def difference(size: str, shrink: int) -> Bench:
    spec = FrameSpec(*SIZES[size], "yuv420p")
    height, width = spec.height // shrink, spec.width // shrink

    def make() -> Call:
        plane = planes_of(spec, 1).picture(0)[0]
        state, mask = cp.zeros((4, height, width), np.uint16), cp.zeros((-(-height // 4), -(-width // 4)), np.uint8)
        numbers = {
            "shrink": shrink,
            "extra_bits": 0,
            "threshold": 3072,
            "limit": height * width,
            "slow": 4,
            "hold": 200,
        }
        scratch = cuda.difference_scratch(height, width)
        cuda.difference([plane], state, mask, scratch, first=True, **numbers)
        return lambda: cuda.difference([plane], state, mask, scratch, **numbers)

    return Bench(f"difference shrink {shrink}", size, 1, make, spec.width * spec.height + 16 * width * height)


def draw(size: str, count: int) -> Bench:
    width, height = SIZES[size]
    places = np.random.default_rng(0).uniform(0, 0.8, (count, 2)) * (width, height)
    marks = [Mark((x, y, x + 200, y + 120), (57, 255, 20), "person 0.93") for x, y in places.tolist()]

    def make() -> Call:
        image = random((height, width, 3))
        return lambda: cuda.draw_boxes(image, marks, 4, 3)

    return Bench(f"draw {count} boxes", size, 1, make, count * 3 * (4 * 640 + 27 * 201))


def benches() -> Iterator[Bench]:
    for size, n in (("1080p", 1), ("1080p", 8), ("2160p", 1), ("2160p", 8)):
        yield to_rgb(size, n)
    yield to_rgb("480p", 32)
    yield to_rgb("1080p", 32)
    for pix_fmt in ("nv12", "yuv422p", "yuv444p", "yuv420p10le", "p010le", "yuv422p10le", "yuv411p", "rgb24", "gray"):
        yield to_rgb("1080p", 8, pix_fmt)
    for rotation in (90, 180):
        yield to_rgb("1080p", 8, rotation=rotation)
    yield to_rgb("1080p", 8, "bgr24", 90)
    yield to_rgb("1080p", 8, chroma="bilinear")
    for n, (to, method) in itertools.product(
        (1, 8), [((224, 224), "area"), ((640, 640), "area"), ((640, 640), "bilinear")]
    ):
        yield to_tensor("1080p", n, to, method)
    yield to_tensor("1080p", 8, (640, 640), "area", "float16")
    yield to_tensor("2160p", 8, (224, 224), "area")
    yield to_tensor("1080p", 8, (1920, 1080), "bilinear", "float16")
    for to, method, dtype in (
        ((1920, 1080), "bilinear", "float32"),
        ((1920, 1080), "bilinear", "float16"),
        ((640, 640), "area", "float32"),
        ((640, 640), "area", "float16"),
        ((640, 640), "bilinear", "float32"),
        ((224, 224), "area", "float32"),
        ((800, 800), "bilinear", "float32"),  # weights that need 32 bits
        ((518, 518), "area", "float32"),
    ):
        yield to_tensor("1080p", 32, to, method, dtype)
    for pix_fmt in ("nv12", "p010le", "yuv444p"):
        yield to_tensor("1080p", 32, (640, 640), "area", pix_fmt=pix_fmt)
    yield resize("1080p", 8, (640, 360), "area")
    yield resize("1080p", 8, (16, 9), "area")
    yield resize("1080p", 8, (3840, 2160), "bilinear")
    for layout, dtype in itertools.product(("nchw", "nhwc"), ("float32", "float16")):
        yield normalize("1080p", 8, dtype, layout)
    yield stats("1080p", 8)
    yield luma_stats("1080p", 8)
    yield difference("1080p", 4)
    yield difference("2160p", 8)
    yield draw("1080p", 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="words of rows to run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    runtime, driver = cp.cuda.runtime.runtimeGetVersion(), cp.cuda.runtime.driverGetVersion()
    prepared = cuda.prepare()
    rows = []
    with cp.cuda.Stream(non_blocking=True) as stream:
        copied = copy_rate(stream)
        cp.get_default_memory_pool().free_all_blocks()
        print(f"{name}, CuPy {cp.__version__}, CUDA {runtime}, driver {driver}; copy {copied / 1e9:.0f} GB/s; "
              f"compiled or loaded in {prepared:.2f} s")  # fmt: skip
        print(f"{'kernel':42} {'size':6} {'n':>2} {'µs':>8} {'±':>4} {'GB/s':>6} {'of copy':>7} {'host µs':>7}")
        for bench in benches():
            if options.only and not any(word in bench.name for word in options.only):
                continue
            row = bench.run(stream, copied)
            rows.append(row)
            print(f"{row['kernel']:42} {row['size']:6} {row['batch']:2} {row['us']:8.2f} {row['spread']:4.0%} "
                  f"{row['GB_per_s']:6.0f} {row['of_copy']:7.0%} {row['host_us']:7.1f}")  # fmt: skip
            cp.get_default_memory_pool().free_all_blocks()
    if options.out:
        found = {
            "device": name,
            "copy_GB_per_s": copied / 1e9,
            "prepare_s": prepared,
            "cupy": cp.__version__,
            "rows": rows,
        }
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
