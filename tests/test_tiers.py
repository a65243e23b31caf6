"""Two tiers of host memory: the ring's, and a pool for large and rare buffers."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from framepipe.device.base import Device
from framepipe.device.cpu import CpuDevice
from framepipe.device.simulated import SimulatedDevice
from framepipe.frame import FrameSpec
from framepipe.memory import aligned_empty
from framepipe.pipeline import Pipeline
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList, pattern_frames
from framepipe.tiers import ALIGN, ColdTier, TierState

pytestmark = pytest.mark.usefixtures("nothing_left")
PICTURE = FrameSpec.of(pattern_frames(1)[0]).nbytes
RGB = 64 * 48 * 3
KB = 1 << 10


class Maker:
    """Makes blocks and notes what is asked for and given back."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.freed: list[int] = []
        self.fails: type[Exception] | None = None
        self.meanwhile: Callable[[], Any] = lambda: None
        self.at_free: Callable[[], Any] = lambda: None

    def make(self, nbytes: int, owner: str) -> np.ndarray:
        if self.fails is not None:
            raise self.fails("no more")
        self.asked.append((nbytes, owner))
        self.meanwhile()
        return aligned_empty(nbytes, ALIGN)

    def free(self, block: np.ndarray) -> None:
        self.freed.append(block.nbytes)
        self.at_free()


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def cold(maker: Maker) -> ColdTier:
    return ColdTier(maker.make, maker.free)


def numbers(state: TierState) -> dict[str, Any]:
    """What is said of a tier, but for what is 0 or not known."""
    return {key: value for key, value in state.as_json().items() if value and key not in ("align", "utilisation")}


# -- blocks of exact sizes ---------------------------------------------------------------------------------------------


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_block_that_was_dropped_is_used_again_for_its_size_alone(cold, maker):
    first = cold.empty((100, 10), "uint8", "a")
    place = address(first)
    del first
    other = cold.empty((999,), "uint8", "b")
    assert address(other) != place
    again = cold.empty((250,), "float32", "c")
    assert address(again) == place and again.dtype == np.float32
    assert maker.asked == [(1000, "a"), (999, "b")]
    assert numbers(cold.state()) == {
        "bytes": 1999, "blocks": 2, "in_use_bytes": 1999, "in_use_blocks": 2, "made": 2, "reused": 1,
        "peak_bytes": 1999, "peak_in_use_bytes": 1999,
    }  # fmt: skip


def test_a_block_that_is_held_is_never_handed_out(cold):
    held = [cold.empty((64,), "uint8") for _ in range(20)]
    for i, array in enumerate(held):
        array[:] = i
    views = [array[3:5] for array in held[:10]]
    del held[:10], array
    for _ in range(20):
        cold.empty((64,), "uint8")[:] = 255
    assert [view.tolist() for view in views] == [[i, i] for i in range(10)], "a view keeps the block"
    assert [set(array.tolist()) for array in held] == [{i} for i in range(10, 20)]
    assert cold.state().in_use_blocks == 20


def test_a_size_of_nothing_has_a_block_too(cold):
    array = cold.empty((0, 5), "uint8")
    assert array.shape == (0, 5) and cold.state().bytes == 1


def test_threads_that_take_and_drop_never_share(cold):
    """Each writes its number into what it holds, and finds it there; sizes are the same few."""
    threads, rounds = 8, 300
    barrier, wrong = threading.Barrier(threads), []

    def work(number: int) -> None:
        order, held = random.Random(number), []
        barrier.wait(10)
        for _ in range(rounds):
            array = cold.empty((order.choice((100, 200, 300)),), "uint8", f"thread {number}")
            array[:] = number
            held.append(array)
            if len(held) > 4:
                gone = held.pop(order.randrange(len(held)))
                if set(gone.tolist()) != {number}:
                    wrong.append(number)
            if order.random() < 0.02:
                cold.give_back()
        wrong.extend(number for array in held if set(array.tolist()) != {number})

    every = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join(60)
    assert not wrong
    state = cold.state()
    assert state.made + state.reused == threads * rounds
    assert state.in_use_bytes == state.in_use_blocks == 0 and state.free_bytes == state.bytes
    cold.close()
    left = cold.state()
    assert left.bytes == left.blocks == 0 and left.returned_bytes > 0 and left.peak_in_use_bytes <= left.peak_bytes


# -- alignment ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", [0, 1, 128, 255, 257, 384, 65_535, -256])
def test_an_alignment_that_is_none_is_refused_with_the_reason(maker, align):
    with pytest.raises(ValueError, match=f"align is {align}; it must be a power of two of at least 256: "):
        ColdTier(maker.make, maker.free, align=align)


@pytest.mark.parametrize("align", [256, 4096, ALIGN, 1 << 21])
def test_the_least_alignment_and_larger_ones_are_taken(maker, align):
    assert ColdTier(maker.make, maker.free, align=align).state().align == align


@pytest.mark.parametrize("make", [CpuDevice, SimulatedDevice])
def test_memory_of_a_device_begins_at_multiples_of_64_kib(make):
    device = make()
    device.host_reserve(300, 2)
    held = [device.host_output((size,), "uint8") for size in (1, 300, 300, 300, 5000, 70_000, 200_000)]
    assert [address(array) % (64 * KB) for array in held] == [0] * 7
    assert device.tiers()["cold"].align == 64 * KB
    del held
    device.close()


# -- reserve, grow, give back ------------------------------------------------------------------------------------------


def test_what_is_reserved_stays_until_it_is_asked_back(cold, maker):
    assert cold.reserve(1000, 3, "read-back") == 3
    assert maker.asked == [(1000, "read-back")] * 3
    held = [cold.empty((1000,), "uint8") for _ in range(5)]
    assert cold.state().made == 5 and cold.state().reused == 3
    del held
    assert cold.give_back() == 2000 and maker.freed == [1000, 1000]
    assert cold.give_back() == 0
    cold.unreserve(1000, 1)
    assert cold.give_back() == 1000
    cold.unreserve(1000, 7)
    assert cold.give_back() == 2000
    assert numbers(cold.state()) == {
        "made": 5, "reused": 3, "returned_bytes": 5000, "peak_bytes": 5000, "peak_in_use_bytes": 5000,
    }  # fmt: skip
    assert cold.empty((1000,), "uint8").nbytes == 1000, "what is wanted later is made again"


def test_blocks_that_are_held_are_not_given_back(cold, maker):
    held = cold.empty((50,), "uint8")
    assert cold.give_back() == 0 and maker.freed == []
    del held
    assert cold.give_back() == 50


def test_growth_is_of_the_size_that_is_wanted_most(cold, maker):
    assert cold.grow(5) == 0, "nothing is known of what is wanted"
    held = [cold.empty((100,), "uint8") for _ in range(3)] + [cold.empty((200,), "uint8")]
    cold.reserve(10_000, 1)
    assert cold.grow(2) == 200 and maker.asked[-2:] == [(100, "growth of the cold tier")] * 2
    assert cold.grow(1, 200, "guard") == 200 and maker.asked[-1] == (200, "guard")
    assert cold.state().free_blocks == 4
    del held[:3]
    assert cold.grow(1) == 200, "most of what is held is now of the other size"


def test_growth_by_bytes_is_of_whole_blocks(cold):
    assert cold.grow_by(1000) == 0, "nothing is known of what is wanted"
    held = [cold.empty((100,), "uint8")]
    assert cold.grow_by(99) == 0 and cold.grow_by(250) == 200
    assert cold.state().free_blocks == 2 and len(held) == 1


def test_blocks_that_are_held_count_as_reserved(cold, maker):
    cold.reserve(1000, 3)
    held = [cold.empty((1000,), "uint8") for _ in range(5)]
    del held[2:]
    assert cold.give_back() == 2000, "two held and one free are the three that were reserved"
    assert cold.state().blocks == 3 and len(held) == 2


def test_a_block_that_comes_back_while_others_are_given_back_lets_no_reserved_one_go(cold, maker):
    cold.empty((10,), "uint8")  # free at once
    cold.reserve(1000, 4)
    held = [cold.empty((1000,), "uint8")]
    maker.at_free = held.clear
    assert cold.give_back() == 10 and maker.freed == [10]
    assert (cold.state().free_blocks, cold.state().free_bytes) == (4, 4000)


def test_a_tier_that_is_closed_while_it_grows_keeps_nothing(cold, maker):
    maker.meanwhile = cold.close
    assert cold.reserve(100, 3) == 1
    assert maker.freed == [100] and cold.state().bytes == 0


def test_a_tier_that_is_closed_does_not_grow(cold):
    cold.reserve(100, 1)
    cold.close()
    assert cold.grow(3, 100) == 0 and cold.reserve(100, 3) == 0
    assert cold.state().bytes == 0


def test_what_is_dropped_after_the_close_goes_at_once(cold, maker):
    held = [cold.empty((n,), "uint8") for n in (10, 20)]
    cold.close()
    cold.close()
    assert maker.freed == [] and cold.state().bytes == 30
    del held
    assert sorted(maker.freed) == [10, 20] and cold.state().bytes == cold.state().blocks == 0


def test_utilisation_is_the_share_that_is_held(cold):
    assert cold.utilisation is None
    cold.reserve(100, 4)
    assert cold.utilisation == 0.0
    held = [cold.empty((100,), "uint8") for _ in range(3)]
    assert cold.utilisation == 0.75
    del held[0]
    assert cold.utilisation == 0.5 and cold.state().peak_in_use_bytes == 300


def test_memory_that_cannot_be_had_is_not_counted(cold, maker):
    maker.fails = MemoryError
    for wanted in (lambda: cold.empty((100,), "uint8"), lambda: cold.reserve(100, 1), lambda: cold.grow(1, 100)):
        with pytest.raises(MemoryError, match="no more"):
            wanted()
    assert numbers(cold.state()) == {}
    maker.fails = None
    assert cold.empty((100,), "uint8").nbytes == 100


def test_memory_in_a_circle_comes_back_by_the_collector(cold):
    circle: list[Any] = [cold.empty((100,), "uint8")]
    circle.append(circle)
    del circle
    with cold._lock:  # whoever holds it may be the one in whose thread the collector runs
        gc.collect()
    assert cold.state().free_bytes == 100


# -- the tiers of a device ---------------------------------------------------------------------------------------------


def devices() -> Iterator[Device]:
    yield CpuDevice()
    yield SimulatedDevice()


def test_the_rings_memory_is_hot_and_what_is_read_back_is_cold():
    for device in devices():
        slab = device.host_empty(1000, pinned=True)
        back = device.host_output((7,), "uint8")
        tiers = device.tiers()
        pinned = 0 if device.kind == "cpu" else 1
        assert (tiers["hot"].bytes, tiers["hot"].blocks, tiers["hot"].utilisation) == (1000, 1, 1.0)
        assert (tiers["cold"].bytes, tiers["cold"].in_use_blocks) == (7, 1)
        assert (tiers["hot"].pinned_bytes, tiers["cold"].pinned_bytes) == (1000 * pinned, 7 * pinned)
        assert device.ledger.bytes["pinned" if pinned else "pageable"] == 1007
        del back
        device.host_free(slab)
        device.close()
        tiers = device.tiers()
        assert tiers["hot"].bytes == tiers["cold"].bytes == 0 and not any(device.ledger.bytes.values())
        assert (tiers["hot"].returned_bytes, tiers["cold"].returned_bytes) == (1000, 7)


def test_outputs_of_stages_are_not_of_the_cold_tier():
    for device in devices():
        out = device.empty((100,), "uint8", device.stream("compute"))
        part = device.fixed(50)
        assert device.tiers()["cold"].bytes == device.tiers()["hot"].bytes == 0
        del out
        device.fixed_free(part)
        device.close()


def memory_of(device: str, strategy: str, sizes: Any = ((64, 48),), **staging: Any) -> dict[str, Any]:
    """``memory`` of the report of twelve pictures of each size, read back for a sink."""
    sources = [FrameList(name=str(i), frames=pattern_frames(12, *size)) for i, size in enumerate(sizes)]
    options = {"strategy": strategy, "batch": 2, "depth": 2, "fillers": 1, **staging}
    with Pipeline(sources, ["rgb"], [lambda frame: None], device=device, staging=options) as pipeline:
        memory: dict[str, Any] = pipeline.run().to_dict()["memory"]
    return memory


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_the_report_tells_of_both_tiers(device):
    tiers = memory_of(device, "pooled")["tiers"]
    hot, cold = tiers["hot"], tiers["cold"]
    assert (hot["bytes"], hot["blocks"], hot["made"], hot["utilisation"]) == (4 * 2 * PICTURE, 1, 1, 1.0)
    assert (hot["reused"], hot["returned_bytes"]) == (None, 0)
    if device == "cpu":
        assert hot["pinned_bytes"] == cold["bytes"] == 0 and cold["utilisation"] is None
    else:
        assert hot["pinned_bytes"] == hot["bytes"]
        assert (cold["bytes"], cold["blocks"], cold["made"], cold["reused"]) == (4 * 2 * RGB, 4, 4, 6)
        assert cold["pinned_bytes"] == cold["bytes"] == cold["free_bytes"] and cold["peak_in_use_bytes"] > 0


def test_the_hot_tier_is_never_resized_but_for_an_input_that_grows():
    still = memory_of("simulated", "pooled")
    assert (still["replans"], still["tiers"]["hot"]["made"]) == (0, 1)
    growing = [*pattern_frames(6), *pattern_frames(6, 128, 96)]
    with Pipeline([FrameList(frames=growing)], ["rgb"], ["discard"], device="simulated", staging="pooled") as pipeline:
        memory = pipeline.run().to_dict()["memory"]
    hot = memory["tiers"]["hot"]
    assert (memory["replans"], hot["made"], hot["blocks"]) == (1, 2, 1) and hot["returned_bytes"] > 0


def test_of_many_sizes_the_cold_tier_keeps_the_last():
    sizes = [(64 + 2 * i, 48) for i in range(12)]
    frames = [frame for size in sizes for frame in pattern_frames(2, *size)]
    with Pipeline([FrameList(frames=frames)], ["rgb"], [lambda frame: None], device="simulated") as pipeline:
        memory = pipeline.run().to_dict()["memory"]
    cold = memory["tiers"]["cold"]
    each = [4 * width * height * 3 for width, height in sizes]
    assert (cold["made"], cold["bytes"]) == (len(sizes) * 4, sum(each[-2:])), "of the last and the one before"
    assert cold["returned_bytes"] == sum(each[:-2])


def test_sizes_that_come_by_turns_are_page_locked_once():
    sizes = [(64 + 32 * i, 48) for i in range(2)]
    sources = [FrameList(name=str(size), frames=pattern_frames(12, *size)) for size in sizes]
    with Pipeline(sources, ["rgb"], [lambda frame: None], device="simulated") as pipeline:
        cold = pipeline.run().to_dict()["memory"]["tiers"]["cold"]
    assert (cold["made"], cold["reused"], cold["returned_bytes"]) == (8, 24, 0)


def test_memory_for_every_batch_is_hot_and_made_each_time():
    hot = memory_of("simulated", "per_frame")["tiers"]["hot"]
    assert hot["made"] == 6 and hot["returned_bytes"] == hot["made"] * 2 * PICTURE - hot["bytes"]


# -- page-locking refused ----------------------------------------------------------------------------------------------


class Refusing(SimulatedDevice):
    """Page-locks nothing of a size of ``refuses``."""

    refuses: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[int] = []

    def _pin(self, nbytes: int, flags: int, align: int | None) -> tuple[np.ndarray, int]:
        self.tried.append(nbytes)
        if nbytes in self.refuses:
            raise MemoryError("no more")
        return super()._pin(nbytes, flags, align)

    def refused(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)


def test_a_refused_cold_block_is_pageable_and_told_once():
    device = Refusing()
    device.refuses = (300,)
    kept = device.host_output((100,), "uint8")
    device.host_reserve(300, 3)
    held = [device.host_output((300,), "uint8") for _ in range(4)]
    assert device.tried == [100, 300], "a refusal makes later ones likely: it is not tried again"
    assert len(device.warnings) == 1
    assert "refused to page-lock 300 bytes (no more)" in device.warnings[0]
    assert "going on with pageable memory" in device.warnings[0]
    assert (device.ledger.bytes["pinned"], device.ledger.bytes["pageable"]) == (100, 1200)
    state = device.tiers()["cold"]
    assert (state.bytes, state.pinned_bytes) == (1300, 100)
    assert [address(array) % (64 * KB) for array in held] == [0] * 4
    del kept, held
    device.close()
    assert not any(device.ledger.bytes.values())


def test_a_run_goes_on_where_its_read_back_is_not_page_locked(monkeypatch):
    monkeypatch.setattr(Refusing, "refuses", (2 * RGB,))
    monkeypatch.setattr("framepipe.device.simulated.SimulatedDevice", Refusing)
    sums = []
    with Pipeline([FrameList(frames=pattern_frames(12))], ["rgb"], [lambda frame: sums.append(int(frame.image.sum()))],
                  device="simulated", staging={"batch": 2, "depth": 2, "fillers": 1}) as pipeline:  # fmt: skip
        report = pipeline.run()
    assert len([warning for warning in report.warnings if "refused to page-lock" in warning]) == 1
    assert report.memory["pinned_bytes"] == 4 * 2 * PICTURE, "the ring was page-locked before"
    assert report.memory["tiers"]["cold"]["pinned_bytes"] == 0 < report.memory["tiers"]["cold"]["bytes"]
    with Pipeline([FrameList(frames=pattern_frames(12))], [Rgb(accuracy="exact")], device="cpu") as plain:
        assert sums == [int(frame.image.sum()) for frame in plain]


def test_page_locking_is_stopped_on_request_and_told_once():
    device = SimulatedDevice()
    before = device.host_output((100,), "uint8")
    device.stop_page_locking("memory is short (3 % free)")
    device.stop_page_locking("memory is short (2 % free)")
    after = device.host_output((200,), "uint8")
    assert device.warnings == ["memory is short (3 % free); going on with pageable memory, slower"]
    assert (device.ledger.bytes["pinned"], device.ledger.bytes["pageable"]) == (100, 200)
    del before, after
    device.close()


# -- the order of accesses ---------------------------------------------------------------------------------------------


def test_a_cold_block_is_watched_and_poisoned_on_the_simulated_device():
    device = SimulatedDevice()
    array = device.host_output((16,), "uint8")
    array[:] = 7
    del array
    again = device.host_output((16,), "uint8")
    assert set(again.tolist()) == {0xA5}
    del again
    assert device.cold.give_back() == 16
    device.close()


def test_to_drop_memory_waits_for_no_lock_of_the_device():
    """The collector may do so in a thread with the ledger's lock, for which a thread with the device's may wait."""
    device = SimulatedDevice()
    held = [device.host_output((16,), "uint8"), device.empty((16,), "uint8", device.stream("compute"))]
    dropping = threading.Thread(target=held.clear)
    with device.lock:
        dropping.start()
        dropping.join(10)
        assert not dropping.is_alive()
    assert device.tiers()["cold"].in_use_blocks == 0
    device.close()
