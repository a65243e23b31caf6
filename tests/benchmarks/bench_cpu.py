"""Speed on the CPU, as ratios in one run: framepipe against plain loops over the same file, in alternating pairs.

    python tests/benchmarks/bench_cpu.py CLIP… [--pairs 7] [--only NAME …] [--out FILE.json]

Ratios are medians over the pairs, given with the spread; a ratio above 1 means framepipe is faster. The baseline for
decoding is a bare PyAV loop with frame threads, one a CPU: PyAV's own default is a third slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av

import framepipe
from framepipe.hardware import cpus
from framepipe.pipeline import Pipeline
from framepipe.sources.file import File
from framepipe.sources.synthetic import Synthetic


def frame_threads(container: av.container.InputContainer, threads: int | None = None) -> av.VideoStream:
    """The video stream, set to decode with frame threads (or with none)."""
    stream = container.streams.video[0]
    threads = threads or cpus()
    stream.codec_context.thread_type = "FRAME" if threads > 1 else "NONE"
    stream.codec_context.thread_count = threads
    return stream


def bare(path: str, use: Callable[[av.VideoFrame], object] = lambda frame: None) -> float:
    """Frames a second of a plain loop."""
    began, count = time.perf_counter(), 0
    with av.open(path) as container:
        for frame in container.decode(frame_threads(container)):
            use(frame)
            count += 1
    return count / (time.perf_counter() - began)


def opencv(path: str) -> float:
    """Frames a second of OpenCV's reader (BGR)."""
    import cv2

    began, count = time.perf_counter(), 0
    capture = cv2.VideoCapture(path)
    while capture.read()[0]:
        count += 1
    capture.release()
    return count / (time.perf_counter() - began)


def ours(path: str, **options: object) -> float:
    """Frames a second of a pipeline that discards what it decodes."""
    options.setdefault("device", "cpu")
    with Pipeline([path], [], ["discard"], **options) as pipeline:
        report = pipeline.run()
    return report.frames["delivered"] / report.seconds


def opened(path: str, accuracy: str) -> float:
    """Frames a second of `framepipe.open` when every picture is taken."""
    began, count = time.perf_counter(), 0
    with framepipe.open(path, device="cpu", accuracy=accuracy) as frames:
        for frame in frames:
            count += frame.image is not None
    return count / (time.perf_counter() - began)


def many_bare(path: str, files: int = 8) -> float:
    """Frames a second, all files together, of one single-thread decoder a file, each in a thread of its own."""
    counts = [0] * files

    def decode(number: int) -> None:
        with av.open(path) as container:
            for _ in container.decode(frame_threads(container, 1)):
                counts[number] += 1

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(files)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def many_ours(path: str, files: int = 8) -> float:
    """Frames a second, all files together, of one pipeline with as many sources."""
    with Pipeline([path] * files, [], ["discard"], device="cpu") as pipeline:
        report = pipeline.run()
    return report.frames["delivered"] / report.seconds


def pairs(name: str, one: Callable[[], float], other: Callable[[], float], count: int) -> dict[str, object]:
    """Alternating pairs; the ratio of the first to the second."""
    first, second = [], []
    for number in range(count):
        for which in ((first, one), (second, other))[:: 1 if number % 2 else -1]:
            which[0].append(which[1]())
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    result = {
        "name": name,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
        "fps": round(statistics.median(first), 1),
        "baseline_fps": round(statistics.median(second), 1),
        "pairs": count,
    }
    print(
        f"{name:48} {result['ratio']:6.3f}  ({result['ratio_min']:.2f}-{result['ratio_max']:.2f})"
        f"  {result['fps']:9.1f} / {result['baseline_fps']:9.1f} frames/s",
        flush=True,
    )
    return result


def small_clip(source: str, folder: str) -> str:
    """The clip scaled to 320x180, three times over."""
    path = str(Path(folder) / "small.mp4")
    number = 0
    with av.open(path, "w") as out:
        stream = out.add_stream("libx264", rate=10, options={"preset": "veryfast", "g": "50"})
        stream.width, stream.height, stream.pix_fmt = 320, 180, "yuv420p"
        for _ in range(3):
            with av.open(source) as container:
                for frame in container.decode(frame_threads(container)):
                    small = frame.reformat(320, 180, "yuv420p")
                    small.pts, small.time_base = number, Fraction(1, 10)
                    number += 1
                    out.mux(stream.encode(small))
        out.mux(stream.encode())
    return path


def faults(path: str, accuracy: str | None) -> dict[str, object]:
    """Page faults a frame in steady state: the second half of a run (a loop would open new decoders each round)."""
    marks: list[int] = []

    def note(frame: framepipe.Frame) -> None:
        if frame.index % 50 == 0:
            marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    stages = [] if accuracy is None else [_rgb(accuracy)]
    with Pipeline([path], stages, [note], device="cpu") as pipeline:
        pipeline.run()
    half = len(marks) // 2
    value = (marks[-1] - marks[half]) / ((len(marks) - 1 - half) * 50)
    result = {"name": f"page faults a frame, {accuracy or 'decode only'}", "value": round(value, 2)}
    print(f"{result['name']:48} {result['value']:6.2f}", flush=True)
    return result


def _rgb(accuracy: str) -> framepipe.Stage:
    from framepipe.stages.rgb import Rgb

    return Rgb(accuracy=accuracy)


def import_time(count: int) -> dict[str, object]:
    """Wall time of a process that imports framepipe against one that imports numpy."""

    def run(module: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        return 1 / (time.perf_counter() - began)

    result = pairs("import numpy / import framepipe (processes)", lambda: run("framepipe"), lambda: run("numpy"), count)
    result["ratio"] = round(1 / float(str(result["ratio"])), 3)
    return result


def stop_time(path: str, count: int) -> dict[str, object]:
    """Milliseconds from `stop` to the return of `run` with everything joined, in the middle of decoding."""
    taken = []
    for _ in range(count):
        reached = threading.Event()
        at: list[float] = []
        pipeline = Pipeline(
            [File(uri=path, loop=100)], [], [lambda f, reached=reached: f.index == 100 and reached.set()], device="cpu"
        )

        def run(pipeline: Pipeline = pipeline, at: list[float] = at) -> None:
            pipeline.run()
            at.append(time.perf_counter())

        thread = threading.Thread(target=run)
        thread.start()
        reached.wait()
        began = time.perf_counter()
        pipeline.stop()
        thread.join()
        pipeline.close()
        taken.append((at[0] - began) * 1e3)
    result = {"name": "stop to return, ms", "value": round(statistics.median(taken), 1), "max": round(max(taken), 1)}
    print(f"{result['name']:48} {result['value']:6.1f}  (max {result['max']:.1f})", flush=True)
    return result


def ring_cost(count: int) -> list[dict[str, object]]:
    """Microseconds a frame of everything but decoding, 320x180, from a source that hands out ready frames."""
    results = []
    for staging in ("direct", "pooled"):
        for batch in (1, 8, 32):
            costs = []
            for _ in range(count):
                source = Synthetic(width=320, height=180, frames=20_000)
                options = {"strategy": staging, "batch": batch}
                with Pipeline([source], [], ["discard"], device="cpu", staging=options) as pipeline:
                    report = pipeline.run()
                costs.append(report.seconds / report.frames["delivered"] * 1e6)
            result = {
                "name": f"cost a frame, us, {staging}, batch {batch}",
                "value": round(statistics.median(costs), 1),
            }
            print(f"{result['name']:48} {result['value']:6.1f}", flush=True)
            results.append(result)
    return results


def of_clip(clip: str, n: int, wanted: Callable[[str], bool]) -> list[dict[str, object]]:
    """Everything that is measured on one clip."""
    name = Path(clip).stem
    results: list[dict[str, object]] = []
    if wanted("decode"):
        results.append(pairs(f"{name}: decode", lambda: ours(clip), lambda: bare(clip), n))
        results.append(pairs(f"{name}: decode pooled", lambda: ours(clip, staging="pooled"), lambda: bare(clip), n))
    if wanted("rgb"):
        fast, exact = (lambda: opened(clip, "fast")), (lambda: opened(clip, "exact"))
        with contextlib.suppress(ImportError):
            results.append(pairs(f"{name}: rgb fast / OpenCV", fast, lambda: opencv(clip), n))
        plain = lambda: bare(clip, lambda frame: frame.to_ndarray(format="rgb24"))  # noqa: E731
        results.append(pairs(f"{name}: rgb fast / to_ndarray", fast, plain, n))
        results.append(pairs(f"{name}: rgb exact / to_ndarray", exact, plain, n))
    if wanted("many"):
        results.append(pairs(f"{name}: eight files", lambda: many_ours(clip), lambda: many_bare(clip), min(n, 7)))
    if wanted("faults"):
        results += [faults(clip, accuracy) for accuracy in (None, "fast", "exact")]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out")
    options = parser.parse_args()
    results: list[dict[str, object]] = []

    def wanted(name: str) -> bool:
        return not options.only or any(part in name for part in options.only)

    for clip in options.clips:
        print(f"-- {clip}")
        results += of_clip(clip, options.pairs, wanted)
    with tempfile.TemporaryDirectory() as folder:
        if wanted("small"):
            small = small_clip(options.clips[0], folder)
            for batch in (1, 8, 32):
                results.append(
                    pairs(
                        f"320x180: decode, batch {batch}",
                        lambda batch=batch: ours(small, staging={"batch": batch}),
                        lambda: bare(small),
                        options.pairs,
                    )
                )
    if wanted("cost"):
        results += ring_cost(3)
    if wanted("import"):
        results.append(import_time(options.pairs))
    if wanted("stop"):
        results.append(stop_time(options.clips[0], options.pairs))
    if options.out:
        from framepipe.report import versions

        machine = {"cpus": cpus(), "processor": platform.processor(), "load": os.getloadavg(), **versions()}
        Path(options.out).write_text(json.dumps({"machine": machine, "results": results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
