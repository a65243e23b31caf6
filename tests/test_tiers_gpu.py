"""The two tiers and the account of page-locked memory on a GPU: addresses, refusals, owners, and what others have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import ours

from framepipe.device.select import why_not
from framepipe.frame import FrameSpec
from framepipe.pipeline import Pipeline
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList, pattern_frames

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
    pytest.mark.usefixtures("no_thread_left"),
]
SIZE = 320, 240
PICTURE = FrameSpec.of(pattern_frames(1, *SIZE)[0]).nbytes
RGB = SIZE[0] * SIZE[1] * 3
ALIGN = 64 << 10
MIB = 1 << 20


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    assert not ours()


@pytest.fixture
def device() -> Iterator[Any]:
    from framepipe.device.cuda import CudaDevice

    made = CudaDevice()
    yield made
    made.close()


def run(each: Any = lambda frame: None, strategy: str = "pooled", **options: Any) -> Any:
    """Twenty-four pictures in batches of two through rgb, read back for a sink."""
    frames = FrameList(frames=pattern_frames(24, *SIZE))
    staging = {"strategy": strategy, "batch": 2, "depth": 2, "fillers": 1}
    with Pipeline([frames], [Rgb(accuracy="exact")], [each], device="cuda", staging=staging, **options) as pipeline:
        return pipeline.run()


def locked(array: np.ndarray) -> bool:
    import cupy as cp

    runtime = cp.cuda.runtime
    return int(runtime.pointerGetAttributes(array.ctypes.data).type) == runtime.memoryTypeHost


def test_cold_memory_is_page_locked_and_begins_at_multiples_of_64_kib(device):
    sizes = [1, 300, 300, 5000, 70_000, 200_000, 3 * MIB + 1]
    held = [device.host_output((size,), "uint8", "a test") for size in sizes]
    assert [array.ctypes.data % ALIGN for array in held] == [0] * len(sizes)
    assert all(locked(array) for array in held)
    for i, array in enumerate(held):
        array[:] = i
    assert [set(np.unique(array)) for array in held] == [{i} for i in range(len(sizes))]
    (account,) = device.ledger.owners()
    assert (account.owner, account.tier, account.nbytes, account.allocations) == ("a test", "cold", sum(sizes), 7)
    assert sum(sizes) <= account.taken <= sum(sizes) + 7 * ALIGN
    del held, array
    assert device.cold.give_back() == sum(sizes)
    assert device.ledger.bytes["pinned"] == device.ledger.taken["pinned"] == 0


def test_the_ring_takes_no_more_than_it_has(device):
    block = device.host_empty(5 * MIB + 1, pinned=True)
    assert device.ledger.taken["pinned"] == 5 * MIB + 1 and locked(block)
    device.host_free(block)


def test_cold_memory_is_read_back_to(device):
    import cupy as cp

    stream = device.stream("read-back")
    back = device.host_output((3, 1000), "uint16")
    with device.current(stream):
        values = cp.arange(3000, dtype=cp.uint16).reshape(3, 1000)
        device.download(back, values, stream)
    stream.synchronize()
    assert np.array_equal(back.reshape(-1), np.arange(3000))
    del back


def test_the_cold_tier_grows_and_gives_back(device):
    assert device.cold.grow(3, MIB) == 3 * MIB
    state = device.tiers()["cold"]
    assert (state.blocks, state.pinned_bytes, state.utilisation) == (3, 3 * MIB, 0.0)
    array = device.host_output((MIB,), "uint8")
    assert locked(array) and device.tiers()["cold"].blocks == 3, "it was there"
    assert device.cold.give_back() == 2 * MIB
    del array
    assert device.cold.give_back() == MIB and device.ledger.bytes["pinned"] == 0


def test_a_refused_read_back_is_pageable_and_told_once(monkeypatch):
    import cupy as cp

    plain, calls = cp.cuda.PinnedMemory, []

    def refuse(nbytes: int, flags: int = 0) -> Any:
        calls.append(nbytes)
        if len(calls) > 1:
            raise cp.cuda.runtime.CUDARuntimeError(2)
        return plain(nbytes, flags)

    sums: dict[str, list[int]] = {"plain": [], "refused": []}
    run(lambda frame: sums["plain"].append(int(frame.image.sum())))
    monkeypatch.setattr(cp.cuda, "PinnedMemory", refuse)
    report = run(lambda frame: sums["refused"].append(int(frame.image.sum())))
    memory, warnings = report.memory, report.warnings
    assert len(calls) == 2 and len([text for text in warnings if "refused to page-lock" in text]) == 1
    assert [row["owner"] for row in memory["pins"]] == ["ring slab (pooled)"]
    assert memory["tiers"]["cold"]["pinned_bytes"] == 0 < memory["tiers"]["cold"]["bytes"]
    assert sums["plain"] == sums["refused"]


@pytest.mark.parametrize("strategy", ["pooled", "per_frame", "registered"])
def test_owners_are_in_the_report(strategy):
    memory = run(strategy=strategy, pin_stacks=True).memory
    found = {row["owner"]: row for row in memory["pins"]}
    name = f"{'frame' if strategy == 'per_frame' else 'ring slab'} ({strategy})"
    assert set(found) == {name, "read-back of image"}
    assert found[name]["allocations"] == (12 if strategy == "per_frame" else 1)
    assert found[name]["allocate_s"] > 0 and found[name]["stack"][0].startswith("framepipe/staging/")
    back = found["read-back of image"]
    assert (back["tier"], back["allocations"], back["peak_bytes"]) == ("cold", 4, 4 * 2 * RGB)
    assert sum(row["allocations"] for row in memory["pins"]) == memory["pinned_allocations"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssShmem is Linux's")
@pytest.mark.parametrize("strategy", ["pooled", "registered"])
def test_what_another_library_page_locks_is_seen(strategy):
    import cupy as cp

    run(strategy=strategy)  # what CUDA and CuPy make once is there from now on
    before = run(strategy=strategy).memory["pinned_elsewhere"]
    held = []

    def plant(frame: Any) -> None:
        if not held:
            held.append(cp.cuda.PinnedMemory(64 * MIB))

    after = run(plant, strategy=strategy).memory["pinned_elsewhere"]
    assert before["reason"] is after["reason"] is None and "RssShmem" in after["counter"]
    assert 60 * MIB <= after["bytes"] - before["bytes"] <= 68 * MIB
    assert before["bytes"] <= 8 * MIB, "the pipeline's own is not counted"
