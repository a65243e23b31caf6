"""Draw when a pipeline's uploads, kernels and read-backs ran on the GPU, by events of its own, as an SVG.

    python tests/benchmarks/timeline_cuda.py OUT.svg [--clip CLIP] [--batches 24]

Every upload, stage and read-back is put between two timing events on its stream. Frames are ready in memory, so that
nothing but the device is drawn: a stage that costs about twice the upload, as in ``bench_cuda.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy as cp
from bench_cuda import Prefilled, Spin, cycles_for

from framepipe.device.cuda import CudaDevice
from framepipe.frame import FrameSpec
from framepipe.pipeline import Pipeline
from framepipe.stages.tensor import Tensor
from framepipe.testing import FrameList, pattern_frames

ROWS = {"copy": "#2a6f97", "compute": "#e07a1f", "read-back": "#5a8f3d"}
WORDS = {"copy": "uploads", "compute": "stages", "read-back": "read-back"}


class Recorder:
    """Puts events around what a device does on its streams."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, Any]] = []
        self.base: Any = None

    def around(self, stream: Any, work: Callable[[], Any]) -> Any:
        first, last = cp.cuda.Event(), cp.cuda.Event()
        if self.base is None:
            self.base = cp.cuda.Event()
            self.base.record(stream.raw)
        first.record(stream.raw)
        result = work()
        last.record(stream.raw)
        self.spans.append((stream.name, first, last))
        return result

    def times(self) -> list[tuple[str, float, float]]:
        """Row, begin and end in milliseconds."""
        cp.cuda.get_elapsed_time(self.base, self.spans[-1][2])
        return [
            (row, cp.cuda.get_elapsed_time(self.base, a), cp.cuda.get_elapsed_time(self.base, b))
            for row, a, b in self.spans
        ]


def record(batches: int) -> list[tuple[str, float, float]]:
    batch = 8
    frames = pattern_frames(32, 1920, 1080)
    cycles = cycles_for(2 * batch * FrameSpec.of(frames[0]).nbytes / 55e9)
    recorder = Recorder()
    upload, enqueue, download = CudaDevice.upload, CudaDevice.enqueue, CudaDevice.download
    CudaDevice.upload = lambda self, dst, src, stream: recorder.around(  # type: ignore[method-assign]
        stream, lambda: upload(self, dst, src, stream)
    )

    def stages(self: Any, stream: Any, work: Any, reads: Any = (), writes: Any = ()) -> None:
        if reads:  # else it only forgets the planes
            recorder.around(stream, lambda: enqueue(self, stream, work, reads, writes))
        else:
            enqueue(self, stream, work, reads, writes)

    CudaDevice.enqueue = stages  # type: ignore[method-assign]
    CudaDevice.download = lambda self, dst, src, stream: recorder.around(  # type: ignore[method-assign]
        stream, lambda: download(self, dst, src, stream)
    )
    source = FrameList(name="ready", frames=frames, loop=max(1, (batches + 20) * batch // len(frames)))
    sink = lambda frame: None  # noqa: E731
    made = [Spin(cycles=cycles), Tensor(width=320, height=320, dtype="float16")]
    from framepipe.sinks.callback import Callback

    staging = {"strategy": Prefilled.type_name, "fillers": 2, "slots": 8, "depth": 2, "batch": batch}
    with Pipeline([source], made, [Callback(function=sink, reads=frozenset({"tensor"}))], device="cuda",
                  staging=staging, threads=1) as pipeline:  # fmt: skip
        pipeline.run()
    cp.cuda.Device().synchronize()
    CudaDevice.upload, CudaDevice.enqueue, CudaDevice.download = upload, enqueue, download  # type: ignore[method-assign]
    return recorder.times()


def draw(times: list[tuple[str, float, float]], batches: int) -> str:
    """The SVG of so many batches from the middle of the run on."""
    uploads = [t for t in times if t[0] == "copy"]
    start = uploads[len(uploads) // 2][1]
    end = uploads[min(len(uploads) - 1, len(uploads) // 2 + batches)][1]
    scale = 900 / (end - start)
    parts = []
    for number, row in enumerate(ROWS):
        y = 40 + number * 44
        parts.append(f'<text x="10" y="{y + 20}">{WORDS[row]}</text>')
        for name, begin, finish in times:
            if name == row and finish > start and begin < end:
                left, right = max(begin, start), min(finish, end)
                parts.append(
                    f'<rect x="{110 + (left - start) * scale:.1f}" y="{y}" height="30" fill="{ROWS[row]}" '
                    f'width="{max(1.0, (right - left) * scale):.1f}" stroke="white" stroke-width="0.7"/>'
                )
    step = 1 if end - start <= 12 else 2 if end - start <= 25 else 5
    for tick in range(0, int(end - start) + 1, step):
        x = 110 + tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="172" stroke="#bbb" stroke-width="0.5"/>')
        parts.append(f'<text x="{x:.1f}" y="188" text-anchor="middle">{tick} ms</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1030 200" font-family="sans-serif" font-size="13">'
    title = '<text x="10" y="22">Streams of one pipeline on the GPU: batches of 8 pictures of 1920x1080</text>'
    return "\n".join([head, '<rect width="1030" height="200" fill="white"/>', title, *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--data", type=Path, help="write the times there, too, as JSON")
    options = parser.parse_args()
    times = record(options.batches)
    options.out.write_text(draw(times, options.batches), encoding="utf-8")
    if options.data:
        options.data.write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main()
