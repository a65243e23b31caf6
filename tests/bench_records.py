"""Records of benches that never ran, for tests of what reads them: rates, latencies and memory made from a seed."""

from __future__ import annotations

import math
import random
from typing import Any

MB = 10**6
RATES = {"pooled": 1040.0, "pageable": 612.0, "per_frame": 231.0, "registered": 1032.0, "mapped": 488.0}
"""Frames a second of 1080p on a GPU that never was."""
PINNED = {"pooled": 16.8, "pageable": 0.0, "per_frame": 54.3, "registered": 16.8, "mapped": 16.8}
SWEEPS = {"batch": (4, 16), "depth": (1, 3), "fillers": (1, 2, 4), "copy_threads": (2, 4)}


def durations(middle_ms: float, rng: random.Random) -> dict[str, Any]:
    spread = rng.uniform(1.1, 1.4)
    p95, p99 = middle_ms * spread, middle_ms * spread * rng.uniform(1.2, 2)
    return {"count": 600, "p50": middle_ms, "p95": p95, "p99": p99, "max": p99 * rng.uniform(1.5, 9)}


def timeline(taken: float, rng: random.Random, rows: int = 300) -> dict[str, Any]:
    """Memory that rises at opening, saws a little and falls at the close."""
    t_s = [i * 0.01 for i in range(rows)]
    held = [taken * (min(1.0, max(0.0, (i - 30) / 20)) if i < rows - 25 else 0.0) for i in range(rows)]
    noise = [rng.randrange(0, 64) * 4096 for _ in range(rows)]
    columns: dict[str, list[int | None]] = {
        "cuda.free": [83_680 * MB - int(h * 14) for h in held],
        "nvml.process_used": [520 * MB + int(h * 14) for h in held],
        "procfs.rss_shmem": [12 * MB + int(h) + n for h, n in zip(held, noise, strict=True)],
        "procfs.rss_anon": [190 * MB + n * 9 if i % 97 else None for i, n in enumerate(noise)],
    }
    marks = [[0.3, "open"], [0.52, "first frame"], [0.7, "warm"], [2.7, "counted"], [2.76, "closed"]]
    return {"t_s": t_s, "columns": columns, "marks": marks}


def run(strategy: str, rate: float, taken: float, nbytes: int, rng: random.Random) -> dict[str, Any]:
    copy_ms = None if strategy == "direct" else durations(0.21 + 0.05 * len(strategy) % 0.3, rng)
    allocate_ms = durations(3.1, rng) if strategy == "per_frame" else {**durations(0.0004, rng), "p50": 0.0}
    return {
        "frames": 600, "seconds": 600 / rate, "fps": rate, "bytes_per_s": rate * nbytes, "cpu_s": 0.9,
        "start_s": 0.31, "copy_ms": copy_ms, "allocate_ms": allocate_ms, "release_ms": durations(0.006, rng),
        "upload_ms": None, "pinned_bytes_asked": int(taken * 0.8), "pinned_bytes_taken": int(taken),
        "pinned_allocations": 1, "pageable_bytes": 0, "memory": {}, "missing": {"wddm": "only on Windows"},
        "timeline": timeline(taken, rng), "bottleneck": "staging", "warnings": [],
    }  # fmt: skip


def cell(
    strategy: str,
    rng: random.Random,
    *,
    rate: float,
    mode: str = "staging",
    given: str = "1080p",
    size: tuple[int, int] = (1920, 1080),
    pinned: float = 0.0,
    repeats: int = 5,
    varies: tuple[str, ...] = ("strategy",),
    **axes: Any,
) -> dict[str, Any]:
    where = {"batch": 1, "slots": "auto", "depth": 2, "fillers": "auto", "copy_threads": 1, **axes}
    nbytes = size[0] * size[1] * 3 // 2
    runs = [run(strategy, rate * rng.gauss(1, 0.008), pinned, nbytes, rng) for _ in range(repeats)]
    fps = sorted(each["fps"] for each in runs)
    numbers = "-".join(f"{name[0]}{where[name]}" for name in ("batch", "depth", "slots", "fillers", "copy_threads"))
    return {
        "id": f"{strategy}-{given}-{numbers}-{mode}",
        "axes": {
            "strategy": strategy, "mode": mode, "input": given, "width": size[0], "height": size[1],
            "pix_fmt": "yuv420p", "device": "cuda", **where,
        },
        "varies": [] if strategy == "pooled" and varies == ("strategy",) else list(varies),
        "status": "ok", "reason": None, "hash": "5f1c" * 16, "runs": runs,
        "summary": {
            "fps": {"median": fps[len(fps) // 2], "min": fps[0], "max": fps[-1]}, "cpu_s_per_1000": 1.5,
            "pinned_bytes_taken": int(pinned), "vram_peak_bytes": 740 * MB, "start_s": 0.31,
        },
    }  # fmt: skip


def without_result(
    strategy: str, status: str, reason: str, mode: str = "staging", given: str = "1080p"
) -> dict[str, Any]:
    axes = {"strategy": strategy, "mode": mode, "input": given, "width": None, "height": None, "pix_fmt": None}
    axes |= {"batch": 1, "slots": "auto", "depth": 2, "fillers": "auto", "copy_threads": 1, "device": "cuda"}
    return {
        "id": f"{strategy}-{given}-{mode}", "axes": axes, "varies": ["strategy"], "status": status, "reason": reason,
        "hash": None, "runs": [], "summary": None,
    }  # fmt: skip


def provenance(clip: str = "street at night.mp4") -> dict[str, Any]:
    return {
        "command": "framepipe bench 'street at night.mp4' --repeat 5", "started": "2031-04-05T06:07:08+00:00",
        "seconds": 412.7, "framepipe": "0.1.0", "python": "3.12.1", "os": "Linux-6.1-x86_64-with-glibc2.36",
        "cpu": "A Processor with 16 Cores", "cpus": 16, "memory_bytes": 137_438_953_472,
        "gpu": {
            "name": "A GPU", "driver": "570.86.15", "driver_model": None, "cuda": "12.8", "cupy": "14.0.1",
            "memory_bytes": 84_987_740_160, "bus_bytes_per_s": 26_400_000_000,
        },
        "versions": {"av": "18.1.0", "numpy": "2.3.1", "libavcodec": "62.11.100"}, "load": [0.4, 0.6, 0.5],
        "clips": [{
            "name": clip, "sha256": "ab12" * 16, "width": 1920, "height": 1080, "pix_fmt": "yuv420p", "codec": "h264",
            "frames": 1500, "seconds": 60.0,
        }],
        "parameters": {"frames": 600, "repeat": 5, "warmup": 60},
    }  # fmt: skip


def record(seed: int = 1, repeats: int = 5, clip: str = "street at night.mp4") -> dict[str, Any]:
    """A whole bench on a GPU: two modes, two inputs, strategies that work, fail and are not there, and four sweeps."""
    rng = random.Random(seed)
    cells = []
    for mode, given, size, share in (
        ("staging", "1080p", (1920, 1080), 1.0),
        ("staging", "2160p", (3840, 2160), 0.26),
        ("pipeline", clip, (1920, 1080), 0.55),
    ):
        for strategy, rate in RATES.items():
            rate = rate * share if mode == "staging" else min(rate * share, 420.0)
            pinned = PINNED[strategy] * MB * size[1] / 1080
            cells.append(
                cell(strategy, rng, rate=rate, mode=mode, given=given, size=size, pinned=pinned, repeats=repeats)
            )
        cells.append(without_result("write_combined", "unavailable", "the driver has no such memory", mode, given))
    cells.append(without_result("broken", "refused", "its outputs differ from those of the others: 9 of 16 frames"))
    for axis, values in SWEEPS.items():
        for value in values:
            rate = RATES["pooled"] * (1 + 0.12 * math.log2(value) - 0.02 * value)
            pinned = PINNED["pooled"] * MB * (value if axis == "batch" else 1 + value / 8)
            cells.append(
                cell("pooled", rng, rate=rate, pinned=pinned, repeats=repeats, varies=(axis,), **{axis: value})
            )
    return {
        "schema": "framepipe.bench/1", "notes": [], "complete": True, "provenance": provenance(clip), "cells": cells,
    }  # fmt: skip


def run_report(**parts: Any) -> dict[str, Any]:
    """A run report of a run that never was."""
    times = {"count": 100, "p50_ms": 2.0, "p95_ms": 3.0, "p99_ms": 4.0, "max_ms": 9.0}
    return {
        "schema": "framepipe.run/1", "exit": "complete", "pipeline": "motion.yaml",
        "device": {"kind": "cpu", "name": "cpu", "why": "asked for"}, "staging": {"strategy": "direct", "batch": 1},
        "frames": {"delivered": 100}, "sources": [{"name": "a", "uri": "a.mp4"}], "seconds": 0.5, "fps": 200.0,
        "stages": {"motion": {**times, "device": None}}, "memory": {"pinned_bytes": 0, "rss_peak_bytes": 90 * MB},
        "versions": {"framepipe": "0.1.0"}, **parts,
    }  # fmt: skip
