"""One repeat of one cell: the clock, the memory and the times of a real pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framepipe.bench import _pictures, _work
from framepipe.errors import FramepipeError
from framepipe.frame import Frame, FrameSpec
from framepipe.pipeline import Pipeline
from framepipe.telemetry.sampler import Sampler
from framepipe.telemetry.sensors import close_sensors, open_sensors, read_sensors

_HZ = 20
_ROWS = 400
_NEAR = 4 << 20
"""Bytes within which a reading counts as back where it was."""
_PATIENCE_S = 3.0
_SLICE_S = 0.02
_GIVEN_BACK = ("cuda", "nvml", "wddm", "pdh", "procfs.rss_shmem", "procfs.locked")
"""Readings that fall when memory is given back: allocators keep ordinary memory for the next one who asks."""


class Clock:
    """Times a run from the last frame of the warm-up to the last frame counted, then calls `stop`.

    At least ``frames`` are counted, and more until ``least_s`` seconds have passed; both ends are behind a whole batch,
    if ``warmup`` and ``frames`` are multiples of it. Called on the sink's thread. Raises
    `framepipe.bench._pictures.SizeChangedError` where a source changes its size or format.
    """

    def __init__(
        self,
        warmup: int,
        frames: int,
        batch: int,
        least_s: float,
        mark: Callable[[str], None] = lambda label: None,
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._warmup, self._frames, self._batch, self._least_s = warmup, frames, batch, least_s
        self._mark, self._clock, self._cpu = mark, clock, cpu
        self.stop: Callable[[], None] = lambda: None
        self._specs: dict[str, FrameSpec] = {}
        self._seen = 0
        self._began = self._ended = (0.0, 0.0)
        self._over = False
        self.first_s: float | None = None
        self.frames = 0
        self.nbytes = 0

    def __call__(self, frame: Frame) -> None:
        if self._over:
            return
        self._check(frame)
        self._seen += 1
        if self.first_s is None:
            self.first_s = self._clock()
            self._mark("first frame")
        if self._seen > self._warmup:
            self._count(frame.spec.nbytes)
        elif self._seen == self._warmup:
            self._began = self._clock(), self._cpu()
            self._mark("warm")

    def _check(self, frame: Frame) -> None:
        before = self._specs.setdefault(frame.source, frame.spec)
        if before is not frame.spec and _size(before) != _size(frame.spec):
            raise _pictures.SizeChangedError(
                f"the size changes in mid-clip, from {_size(before)} to {_size(frame.spec)} at picture {frame.index}"
            )

    def _count(self, nbytes: int) -> None:
        self.frames += 1
        self.nbytes += nbytes
        self._ended = self._clock(), self._cpu()
        enough = self.frames >= self._frames and self.frames % self._batch == 0
        if enough and self._ended[0] - self._began[0] >= self._least_s:
            self._over = True
            self._mark("counted")
            self.stop()

    @property
    def seconds(self) -> float:
        """From the end of the warm-up to the last frame counted."""
        return self._ended[0] - self._began[0]

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the process in that time."""
        return self._ended[1] - self._began[1]


def _size(spec: FrameSpec) -> str:
    return f"{spec.width}x{spec.height} {spec.pix_fmt}"


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of ``runs`` in ``bench.json``."""
    work = _staged(request) if request["mode"] == "staging" else _piped(request)
    options = _work.staging(request, measure=True)
    _once(request, options)
    sensors = open_sensors(request["device_index"])
    try:
        read_sensors(sensors)  # makes the process's context on the device, which is no pipeline's doing
        rest = read_sensors(sensors)
        sampler = Sampler(sensors, hz=_HZ, capacity=_ROWS)
        clock = _clock(request, sampler)
        with sampler:
            sampler.mark("open")
            began_s = time.perf_counter()
            pipeline = work.pipeline(clock, host=False, device=request["device"], staging=options)
            clock.stop = pipeline.stop
            with pipeline:
                pipeline.run()
            sampler.sample()
            sampler.mark("closed")
            after, back_s = settle(lambda: read_sensors(sensors), rest, time.perf_counter, time.sleep)
        seen = sampler.timeline()
    finally:
        close_sensors(sensors)
    return _entry(request, clock, pipeline, began_s, seen, memory(seen["extremes"], rest, after, back_s))


def _once(request: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Two small pictures by the same strategy, ahead of everything that is measured.

    What CUDA, its kernels and libraries make once in a process is no strategy's doing, and is never given back.
    """
    work = _work.staging_work(_pictures.of_size(64, 48, "yuv420p", 2), rounds=1, parity=False)
    with work.pipeline(lambda frame: None, host=False, device=request["device"], staging=options) as pipeline:
        pipeline.run()


def _clock(request: Mapping[str, Any], sampler: Sampler) -> Clock:
    batch, least_s = request["staging"]["batch"], request["least_s"]
    return Clock(request["warmup"], request["frames"], batch, least_s, sampler.mark)


def _staged(request: Mapping[str, Any]) -> _work.Work:
    ready = _work.frames(request, request["distinct"])
    return _work.staging_work(ready, rounds=_work.ENDLESS, parity=False)


def _piped(request: Mapping[str, Any]) -> _work.Work:
    return _work.pipeline_work(request, parity=False, rounds=_work.ENDLESS)


def settle(
    read: Callable[[], dict[str, int | None]],
    rest: Mapping[str, int | None],
    clock: Callable[[], float],
    wait: Callable[[float], object],
) -> tuple[dict[str, int | None], dict[str, float | None]]:
    """The readings right after a close, and after how many seconds each was back near ``rest``.

    None where one was not within a few seconds, or is of memory that is not given back to anybody.
    """
    began_s = clock()
    after = now = read()
    back_s: dict[str, float | None] = dict.fromkeys(after)
    while True:
        passed_s = clock() - began_s
        for name, nbytes in now.items():
            if back_s[name] is None and _is_near(nbytes, rest.get(name)):
                back_s[name] = round(passed_s, 3)
        waiting = [name for name in now if name.startswith(_GIVEN_BACK) and now[name] is not None]
        if all(back_s[name] is not None for name in waiting) or passed_s >= _PATIENCE_S:
            return after, back_s
        wait(_SLICE_S)
        now = read()


def _is_near(nbytes: int | None, rest: int | None) -> bool:
    return nbytes is not None and rest is not None and abs(nbytes - rest) <= _NEAR


def memory(
    extremes: Mapping[str, Any],
    rest: Mapping[str, int | None],
    after: Mapping[str, int | None],
    back_s: Mapping[str, float | None],
) -> dict[str, Any]:
    """Each reading at rest, at its peak and least while the pipeline lived, and after its close; bytes."""
    return {
        name: {
            "rest": rest.get(name),
            "peak": seen["most"],
            "least": seen["least"],
            "after_close": after.get(name),
            "back_s": back_s.get(name),
        }
        for name, seen in extremes.items()
        if seen is not None
    }


def _entry(
    request: Mapping[str, Any],
    clock: Clock,
    pipeline: Pipeline,
    began_s: float,
    seen: Mapping[str, Any],
    readings: Mapping[str, Any],
) -> dict[str, Any]:
    if clock.frames < max(2, request["staging"]["batch"]) or clock.seconds <= 0:
        needed = request["warmup"] + request["frames"]
        raise FramepipeError(f"the input ended after {clock.frames} frames behind the warm-up; {needed} are needed")
    assert pipeline.report is not None and clock.first_s is not None
    report = pipeline.report.to_dict()
    told, staging = report["memory"], report["staging"]
    rate = clock.frames / clock.seconds
    return {
        "frames": clock.frames,
        "seconds": round(clock.seconds, 6),
        "fps": round(rate, 3),
        "bytes_per_s": round(clock.nbytes / clock.seconds),
        "cpu_s": round(clock.cpu_s, 6),
        "start_s": round(clock.first_s - began_s, 6),
        "ready_bytes": request["distinct"] * (clock.nbytes // clock.frames) or None,
        **{name: duration(staging.get(name)) for name in ("copy_ms", "allocate_ms", "release_ms", "upload_ms")},
        "pinned_bytes_asked": told.get("pinned_bytes"),
        "pinned_bytes_taken": told.get("pinned_bytes_taken"),
        "pinned_allocations": told.get("pinned_allocations"),
        "pageable_bytes": told.get("pageable_bytes"),
        "memory": dict(readings),
        "missing": seen["missing"],
        "timeline": _timeline(seen),
        **_modelled(report["device"].get("model")),
        "bottleneck": report["bottleneck"],
        "warnings": report["warnings"],
    }


def _modelled(model: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a memory model makes of the run, over its own seconds; apart from ``timeline``, which is measured."""
    if model is None:
        return {}
    timeline = model["timeline"]
    columns = {f"model.{key}": values for key, values in timeline["columns"].items()}
    counts = {key: model[key] for key in ("name", "pins", "refusals", "pinned_ever", "least_free", "now_s")}
    return {"modelled": {**counts, **timeline, "columns": columns}}


def duration(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A summary of durations without the unit in its names; None where nothing was measured."""
    if not told or not told.get("count"):
        return None
    return {"count": told["count"], **{name: told.get(f"{name}_ms") for name in ("p50", "p95", "p99", "max")}}


def _timeline(seen: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Sequence[int | None]] = {
        name: numbers for name, numbers in seen["columns"].items() if any(number is not None for number in numbers)
    }
    cost = {name: seen["cost"][name] for name in ("rows", "reading_s")}
    return {"t_s": seen["t_s"], "columns": columns, "marks": seen["marks"], "cost": cost}
