"""A guard on a GPU: it sees memory that another process takes, and what it does while kernels run breaks nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import number_of
from test_pipeline import balance
from test_stress import Listed, pictures

from framepipe import guarding
from framepipe.device.select import choose, why_not
from framepipe.guard.options import GuardOptions, Mark
from framepipe.guard.readings import Reading, SystemMemory
from framepipe.guard.waiting import wait_for_headroom
from framepipe.pipeline import Pipeline
from framepipe.sources.synthetic import Synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]

LIMIT_S = 60
MIB = 1 << 20
HOG_NBYTES = 2048 * MIB
HOG = f"""
import sys
import cupy
block = cupy.cuda.runtime.malloc({HOG_NBYTES})
print("ready", flush=True)
sys.stdin.read()
"""


class OfTheGpu(SystemMemory):
    """The counts of the device alone: a machine or container may have less RAM than its GPU has memory."""

    def read(self) -> list[Reading]:
        return [reading for reading in super().read() if reading.source in ("cudaMemGetInfo free", "NVML free")]


@pytest.fixture
def memory() -> Iterator[OfTheGpu]:
    opened = OfTheGpu(0)
    assert opened.read()  # makes this process's context, which is not to count
    yield opened
    opened.close()


@contextmanager
def hog() -> Iterator[subprocess.Popen[str]]:
    """Another process with `HOG_NBYTES` of the device."""
    child = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.communicate(timeout=LIMIT_S)


def test_the_counts_of_a_gpu_are_read(memory):
    found = {reading.source: reading for reading in SystemMemory.read(memory)}
    assert found["RAM available"].free > 0
    assert found["cudaMemGetInfo free"].total > HOG_NBYTES
    if "nvml" not in memory.missing:
        assert found["NVML free"].total >= found["cudaMemGetInfo free"].free


def test_a_hog_in_another_process_is_seen_and_its_end_too(memory, monkeypatch):
    monkeypatch.setattr(guarding, "_memory", lambda device: OfTheGpu(device.number))
    mark = min(reading.free for reading in memory.read()) - HOG_NBYTES // 2
    options = GuardOptions(
        low=Mark(nbytes=mark), on_low=("give_back", "depth", "warn"), on_critical=(), interval_s=0.1,
        hysteresis_percent=0.01, calm_samples=1, cooldown_s=1,
    )  # fmt: skip
    came, went = threading.Event(), threading.Event()

    def on_guard(record: Any) -> None:
        {"low": came, "recovered": went}.get(record.event, threading.Event()).set()

    numbers = []
    source = Synthetic(width=640, height=360, frames=60)
    with Pipeline([source], ["rgb"], device="cuda", guard=options, on_guard=on_guard, staging={"depth": 3}) as frames:
        for number, frame in enumerate(frames):
            if number == 10:
                with hog():
                    assert came.wait(LIMIT_S)
                assert went.wait(LIMIT_S)
            numbers.append(frame.index)
    assert numbers == list(range(60))
    report = frames.report
    balance(report)
    told = report.guard
    assert told["events"][0]["source"] in ("cudaMemGetInfo free", "NVML free")
    assert told["events"][0]["free"] < mark
    assert told["depth_least"] == 2
    assert any(warning.startswith("memory was low: ") for warning in report.warnings)
    assert wait_for_headroom(memory, mark, LIMIT_S).reached


def test_results_that_nobody_holds_go_back_to_the_gpu():
    device = choose("cuda").make()
    try:
        stream = device.stream("results")
        with device.current(stream):
            held = [device.empty((64 * MIB,), "uint8", stream) for _ in range(4)]
            held[0][:] = 7
            del held[1:]
            assert device.give_back() == 3 * 64 * MIB
            assert device.give_back() == 0
            assert int(held[0][-1]) == 7
            again = device.empty((64 * MIB,), "uint8", stream)
            again[:] = 1
            stream.synchronize()
            del held, again
            assert device.give_back() == 2 * 64 * MIB
    finally:
        device.close()


def test_a_guard_gives_the_gpu_back_what_was_held_for_a_while(monkeypatch):
    monkeypatch.setattr(guarding, "_memory", lambda device: OfTheGpu(device.number))
    options = GuardOptions(
        low=Mark(percent=99.9), on_low=("give_back",), on_critical=(), critical=Mark(nbytes=MIB), interval_s=0.05,
    )  # fmt: skip
    acted = threading.Event()
    numbers = []
    source = Synthetic(width=640, height=360, frames=60)
    with Pipeline(
        [source], ["rgb"], device="cuda", guard=options, on_guard=lambda _: acted.set(), check_memory=False
    ) as frames:
        for frame in frames:  # results are made and given back at the same time
            numbers.append(frame.index)
            if len(numbers) == 30:
                assert acted.wait(LIMIT_S)
    assert numbers == list(range(60))
    balance(frames.report)


def test_page_locking_can_be_given_up_while_pictures_are_under_way():
    """The first reading is below the mark: pins of per_frame before and after it, and all pictures come out right."""
    options = GuardOptions(
        low=Mark(percent=99.9),
        on_low=("pageable",),
        on_critical=("depth",),
        critical=Mark(percent=99.8),
        interval_s=0.05,
    )
    seen: list[int] = []
    acted = threading.Event()

    def read(frame: Any) -> None:
        if len(seen) == 20:
            assert acted.wait(LIMIT_S)
        seen.append(number_of(frame.numpy()))

    source = Listed(name="s", frames=pictures(60, 64, 48))
    with Pipeline(
        [source], ["rgb"], [read], device="cuda", staging="per_frame", guard=options, on_guard=lambda _: acted.set()
    ) as pipeline:
        report = pipeline.run()
    assert seen == list(range(60))
    assert not report.guard["page_locking"]
    assert report.memory["pinned_allocations"] < 60
