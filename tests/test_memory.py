"""Memory and threads stay where they are, however many pictures and files go through.

Resident memory is read in a process of its own, where nothing else allocates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import framepipe, make_clip, ours

from framepipe.container import ContainerStream
from framepipe.decode import DecodePool
from framepipe.pipeline import Pipeline

ROOT = str(Path(framepipe.__file__).parents[1])
MB = 1_000_000

PREAMBLE = """
import gc, json, sys, threading
import psutil
from framepipe.pipeline import Pipeline

process = psutil.Process()

def rss():
    gc.collect()
    return process.memory_info().rss

def threads():
    return sorted(thread.name for thread in threading.enumerate())
"""

PICTURES = """
from framepipe.sources.synthetic import Synthetic

strategy, stages, first, last = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
at = {}

def look(frame):
    if frame.index in (first, last):
        at[frame.index] = rss()

source = Synthetic(width=320, height=180, frames=last + 1, cache_mib=2)
with Pipeline([source], stages, [look], device="cpu", staging=strategy) as pipeline:
    report = pipeline.run()
print(json.dumps({"grown": at[last] - at[first], "delivered": report.frames["delivered"], "threads": threads()}))
"""

FILES = """
clip, settled, rounds, stages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
for number in range(1, rounds + 1):
    with Pipeline([clip], stages, ["discard"], device="cpu") as pipeline:
        assert pipeline.run().frames["delivered"] == 60
    assert threads() == ["MainThread"], threads()
    if number == settled:
        before, handles = rss(), process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
left = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
print(json.dumps({"grown": rss() - before, "handles": left - handles}))
"""


def measure(code: str, *arguments: str) -> dict:
    """Run ``code`` in a process; the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout)
    return found


def flat(strategy: str, stages: list[str], first: int, last: int) -> None:
    found = measure(PICTURES, strategy, json.dumps(stages), str(first), str(last))
    assert found["delivered"] == last + 1
    assert found["grown"] < 5 * MB
    assert found["threads"] == ["MainThread"]


WAYS = [("auto", []), ("pooled", []), ("auto", ["rgb"]), ("pooled", ["rgb"])]


@pytest.mark.parametrize(("strategy", "stages"), WAYS[1:3])
def test_memory_is_flat_over_many_pictures(strategy, stages):
    flat(strategy, stages, 500, 2_500)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stages"), [*WAYS, ("per_frame", ["rgb"]), ("pageable", ["rgb"])])
def test_memory_is_flat_over_very_many_pictures(strategy, stages):
    flat(strategy, stages, 2_000, 50_000)


MANY = [(10, 50, ["rgb"], 10), pytest.param(200, 400, ["motion"], 5, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("settled", "rounds", "stages", "bound_mb"), MANY)
def test_memory_threads_and_handles_are_flat_over_many_files(clip, settled, rounds, stages, bound_mb):
    """The allocator's arenas, one a thread, fill for some 200 files; 900 were seen to take no more than 250."""
    found = measure(FILES, str(clip), str(settled), str(rounds), json.dumps(stages))
    assert found["grown"] < bound_mb * MB
    assert found["handles"] <= 0


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("threads", [1, 3])
def test_decode_threads_are_the_budget_however_many_sources(tmp_path, monkeypatch, threads):
    """Looked at whenever something is decoded; no decoder brings more threads of its own either."""
    seen: set[str] = set()
    within: list[int] = []
    step, decoder = DecodePool._step, ContainerStream.decoder

    def look(pool, feed, unit):
        living = [name for name in ours() if "-decode-" in name]
        assert threading.current_thread().name in living and len(living) <= threads
        seen.update(living)
        step(pool, feed, unit)

    def count(stream, threads=1):
        context = decoder(stream, threads)
        within.append(context.thread_count)
        return context

    monkeypatch.setattr(DecodePool, "_step", look)
    monkeypatch.setattr(ContainerStream, "decoder", count)
    for number in range(8):
        make_clip(tmp_path / f"{number}.mp4", 12, gop=4)
    with Pipeline(sorted(tmp_path.glob("*.mp4")), [], ["discard"], device="cpu", threads=threads) as pipeline:
        assert pipeline.run().frames["delivered"] == 96
    assert 1 <= len(seen) <= threads
    assert len(within) >= 8 and min(within) >= 1 and max(within) <= threads
