"""Who page-locks: the account of every allocation with its owner, and what others of the process have."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from framepipe import holdings, ledger
from framepipe.device.cpu import CpuDevice
from framepipe.device.host import WRITE_COMBINED
from framepipe.device.simulated import SimulatedDevice
from framepipe.frame import Batch, FrameSpec
from framepipe.holdings import Holdings
from framepipe.ledger import OTHERS, Ledger
from framepipe.memory import mapping, whole_pages
from framepipe.pipeline import Pipeline
from framepipe.sink import Sink, SinkContext
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.telemetry.base import Sensor, SensorUnavailableError
from framepipe.testing import FrameList, pattern_frames

pytestmark = pytest.mark.usefixtures("nothing_left")
PICTURE = FrameSpec.of(pattern_frames(1)[0]).nbytes
RGB = 64 * 48 * 3
FRAMES = 24


def memory_of(strategy: str = "pooled", device: str = "simulated", **options: Any) -> dict[str, Any]:
    """``memory`` of the report of 24 pictures through rgb, read back for a sink."""
    staging = {"strategy": strategy, "batch": 2, "depth": 2, "fillers": 1}
    with Pipeline([FrameList(frames=pattern_frames(FRAMES))], ["rgb"], [lambda frame: None], device=device,
                  staging=staging, **options) as pipeline:  # fmt: skip
        memory: dict[str, Any] = pipeline.run().to_dict()["memory"]
    return memory


def rows(memory: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["owner"]: row for row in memory["pins"]}


# -- the account itself ------------------------------------------------------------------------------------------------


def clocked(*times: float) -> Callable[[], float]:
    left = iter(times)
    return lambda: next(left)


def test_an_allocation_is_named_as_long_as_it_lives():
    account = Ledger(clock=clocked(100.0, 101.0, 103.5))
    slab = account.pin(1000, 1024, owner="ring slab (pooled)")
    back = account.pin(50, 50, owner="read-back of image", tier="cold", in_shmem=False)
    assert [(pin.owner, pin.tier, pin.nbytes, pin.taken, pin.at_s, pin.in_shmem) for pin in account.live()] == [
        ("ring slab (pooled)", "hot", 1000, 1024, 1.0, True),
        ("read-back of image", "cold", 50, 50, 3.5, False),
    ]
    assert (account.pinned_in("hot"), account.pinned_in("cold")) == (1000, 50)
    account.unpin(slab)
    assert account.live() == [back] and account.pinned_in("hot") == 0
    with pytest.raises(KeyError):
        account.unpin(slab)
    assert (account.bytes["pinned"], account.taken["pinned"], account.peak["pinned"]) == (50, 50, 1050)


def test_an_owner_has_bytes_now_at_most_and_how_often_and_how_long():
    account = Ledger()
    first = account.pin(10, 16, owner="a", seconds=0.5)
    second = account.pin(20, 32, owner="a", seconds=0.25)
    account.unpin(first, 0.125)
    third = account.pin(5, 8, owner="a")
    account.unpin(third)
    (row,) = [each.as_json() for each in account.owners()]
    assert row == {
        "owner": "a", "tier": "hot", "bytes": 20, "bytes_taken": 32, "peak_bytes": 30, "peak_bytes_taken": 48,
        "allocations": 3, "allocate_s": 0.75, "free_s": 0.125,
    }  # fmt: skip
    assert account.pinned_total == 35
    account.unpin(second)
    assert row["free_s"] is not None and Ledger().owners() == []


def test_seconds_that_nobody_measured_are_not_known():
    account = Ledger()
    account.unpin(account.pin(1, 1, owner="a"))
    assert account.owners()[0].as_json()["free_s"] is None


def test_owners_are_told_with_the_largest_first_and_by_tier():
    account = Ledger()
    for owner, tier, nbytes in (("b", "hot", 5), ("a", "cold", 50), ("b", "cold", 7)):
        account.pin(nbytes, nbytes, owner=owner, tier=tier)
    assert [(each.owner, each.tier, each.nbytes) for each in account.owners()] == [
        ("a", "cold", 50), ("b", "cold", 7), ("b", "hot", 5),
    ]  # fmt: skip


def test_thousands_of_owners_take_no_more_than_so_much_memory():
    account = Ledger()
    pins = [account.pin(1, 2, owner=f"frame {i}") for i in range(1000)]
    found = {each.owner: each for each in account.owners()}
    assert len(found) == ledger._MOST_ACCOUNTS + 1
    assert found[OTHERS].nbytes == found[OTHERS].allocations == 1000 - ledger._MOST_ACCOUNTS
    for pin in pins:
        account.unpin(pin)
    assert account.live() == [] and {each.nbytes for each in account.owners()} == {0}


def test_allocations_of_many_threads_add_up(request):
    account, threads, rounds = Ledger(), 8, 200
    barrier = threading.Barrier(threads)
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)

    def work(number: int) -> None:
        barrier.wait(10)
        for i in range(rounds):
            pin = account.pin(i + 1, i + 2, owner=f"thread {number % 2}")
            assert len(account.live()) >= 1, "its own"
            account.unpin(pin, 0.5)

    every = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join(60)
    assert {(each.allocations, each.nbytes, each.taken) for each in account.owners()} == {(4 * rounds, 0, 0)}
    assert [each.free_s for each in account.owners()] == [4 * rounds * 0.5] * 2
    assert account.pinned_total == threads * rounds * (rounds + 1) // 2
    assert account.bytes["pinned"] == account.taken["pinned"] == 0 and account.live() == []


# -- stacks ------------------------------------------------------------------------------------------------------------


def here(account: Ledger) -> Any:
    return account.pin(1, 1, owner="a")


def test_a_stack_begins_where_memory_was_asked_for_and_names_no_folder_of_the_machine():
    account = Ledger()
    assert here(account).stack == ()
    account.stacks = True
    stack = here(account).stack
    first, second = (line.split(" ") for line in stack[:2])
    assert first == [f"{Path(__file__).name}:{here.__code__.co_firstlineno + 1}", "here"]
    assert second[1] == test_a_stack_begins_where_memory_was_asked_for_and_names_no_folder_of_the_machine.__name__
    assert not [line for line in stack if line.startswith(("/", "\\")) or str(Path.cwd()) in line]
    assert [line for line in stack if line.startswith("_pytest/")], "a package by its folder"


def test_allocations_from_one_place_are_one_row_and_from_two_are_two():
    account = Ledger()
    account.stacks = True
    pins = [here(account) for _ in range(3)]
    pins.append(account.pin(1, 1, owner="a"))
    assert sorted(each.allocations for each in account.owners()) == [1, 3]
    assert len({pin.stack for pin in pins}) == 2


def test_a_stack_has_an_end():
    account = Ledger()
    account.stacks = True

    def deep(levels: int) -> Any:
        return deep(levels - 1) if levels else account.pin(1, 1, owner="a")

    assert len(deep(50).stack) == ledger._DEEPEST


def test_an_allocation_of_a_device_is_told_from_outside_of_it():
    device = SimulatedDevice()
    device.ledger.stacks = True
    block = device.host_empty(10, pinned=True, owner="a")
    array = device.host_output((3,), "uint8", "b")
    names = [pin.stack[0].split()[1] for pin in device.ledger.live()]
    assert names == [test_an_allocation_of_a_device_is_told_from_outside_of_it.__name__] * 2
    del array
    device.host_free(block)
    device.close()


# -- devices and strategies --------------------------------------------------------------------------------------------


def test_blocks_of_a_device_are_named():
    device = SimulatedDevice()
    block = device.host_empty(1000, pinned=True, owner="mine")
    other = device.host_made(500, lambda: (np.zeros(500, np.uint8), 512), owner="a pool's", tier="cold")
    area = mapping(5000)
    assert device.host_register(area, owner="an area")
    found = {pin.owner: (pin.tier, pin.nbytes, pin.taken, pin.in_shmem) for pin in device.ledger.live()}
    assert found == {
        "mine": ("hot", 1000, 1000, True),
        "a pool's": ("cold", 500, 512, True),
        "an area": ("hot", 5000, whole_pages(5000), False),
    }
    device.host_unregister(area)
    for each in (block, other):
        device.host_free(each)
    assert device.ledger.live() == []
    times = {each.owner: each.free_s for each in device.ledger.owners()}
    assert times["mine"] is None and times["an area"] is not None
    device.close()


def test_ordinary_memory_has_no_owner_in_the_account():
    for device in (CpuDevice(), SimulatedDevice()):
        block = device.host_empty(1000, pinned=device.kind == "cpu", owner="nobody")
        assert device.ledger.owners() == [] and device.ledger.bytes["pageable"] == 1000
        device.host_free(block)
        device.close()


RING = ["pooled", "write_combined", "mapped", "registered"]


@pytest.mark.parametrize("strategy", RING)
def test_the_ring_is_one_allocation_of_its_strategy(strategy):
    found = rows(memory_of(strategy))
    slab = found[f"ring slab ({strategy})"]
    assert (slab["tier"], slab["allocations"], slab["peak_bytes"]) == ("hot", 1, 4 * 2 * PICTURE)
    back = found["read-back of image"]
    assert (back["tier"], back["allocations"], back["peak_bytes"]) == ("cold", 4, 4 * 2 * RGB)
    assert set(found) == {f"ring slab ({strategy})", "read-back of image"}


@pytest.mark.parametrize("strategy", ["per_frame", "registered_per_frame"])
def test_memory_for_every_batch_is_one_row_however_often_it_is_made(strategy):
    memory = memory_of(strategy)
    frame = rows(memory)[f"frame ({strategy})"]
    assert frame["allocations"] == FRAMES / 2 and frame["tier"] == "hot"
    assert frame["peak_bytes"] in [n * 2 * PICTURE for n in range(1, 5)]
    assert frame["allocate_s"] > 0
    assert memory["pinned_bytes_total"] == FRAMES * PICTURE + 4 * 2 * RGB
    assert "stack" not in frame


def test_the_rows_add_up_to_what_the_report_says_of_all():
    for strategy in (*RING, "per_frame"):
        memory = memory_of(strategy)
        assert sum(row["allocations"] for row in memory["pins"]) == memory["pinned_allocations"]
        assert sum(row["peak_bytes"] for row in memory["pins"]) >= memory["pinned_bytes"]
        held = sum(row["bytes"] for row in memory["pins"])
        assert held == sum(tier["pinned_bytes"] for tier in memory["tiers"].values()) > 0


def test_where_nothing_is_page_locked_nobody_is_named():
    for device, strategy in (("simulated", "pageable"), ("cpu", "pooled"), ("cpu", "direct")):
        owners = set(rows(memory_of(strategy, device)))
        assert owners == ({"read-back of image"} if device == "simulated" else set())


def test_what_is_made_for_frames_that_are_held_is_in_the_same_row():
    held: list[Any] = []
    with Pipeline([FrameList(frames=pattern_frames(FRAMES))], ["rgb"], [lambda frame: held.append(frame.image)],
                  device="simulated") as pipeline:  # fmt: skip
        memory = pipeline.run().to_dict()["memory"]
    row = rows(memory)["read-back of image"]
    assert row["allocations"] >= FRAMES == memory["tiers"]["cold"]["in_use_blocks"]
    assert len(memory["pins"]) == 2


@pytest.mark.parametrize("strategy", ["pooled", "per_frame"])
def test_stacks_are_in_the_report_for_who_asks(strategy):
    memory = memory_of(strategy, pin_stacks=True)
    frame, back = sorted(memory["pins"], key=lambda row: row["tier"], reverse=True)
    assert frame["stack"][0].startswith("framepipe/staging/")
    assert back["stack"][0].startswith("framepipe/running.py:")
    assert len(memory["pins"]) == 2, "one place is one row"
    assert not [line for line in (*frame["stack"], *back["stack"]) if line.startswith("threading.py")]


class Asks(Stage):
    """Takes memory of its own while it runs, and lets go of it."""

    reads = frozenset({"image"})
    writes = frozenset({"asked"})

    def plan(self, flow: Flow) -> Flow:
        return flow.put("asked", ArraySpec((1,), "uint8"))

    def open(self, device: Any) -> None:
        self.device = device

    def launch(self, batch: Batch) -> None:
        held = self.device.host_output((7, 11), "float32", "asks")
        held[:] = 1
        batch.out["asked"][:] = 1


def test_a_stage_may_ask_for_memory_under_its_name():
    with Pipeline([FrameList(frames=pattern_frames(6))], ["rgb", Asks()], ["discard"], device="simulated") as pipeline:
        memory = pipeline.run().to_dict()["memory"]
    row = rows(memory)["asks"]
    assert (row["tier"], row["allocations"], row["peak_bytes"]) == ("cold", 1, 7 * 11 * 4)


class Gathers(Sink):
    """Copies every image into a chunk of its own."""

    reads = frozenset({"image"})
    chunk: Any = None

    def open(self, context: SinkContext) -> None:
        self.context = context

    def write(self, frame: Any) -> None:
        if self.chunk is None:
            self.chunk = self.context.host_output((FRAMES, *frame.image.shape), "uint8", "chunk of a sink")
        self.chunk[frame.index] = frame.image

    def close(self) -> None:
        self.chunk = None


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_sink_may_ask_for_memory_under_its_name(device):
    with Pipeline([FrameList(frames=pattern_frames(FRAMES))], ["rgb"], [Gathers()], device=device) as pipeline:
        memory = pipeline.run().to_dict()["memory"]
    if device == "cpu":
        assert memory["tiers"]["cold"]["peak_bytes"] == FRAMES * RGB and memory["pins"] == []
        return
    row = rows(memory)["chunk of a sink"]
    assert (row["tier"], row["allocations"], row["peak_bytes"]) == ("cold", 1, FRAMES * RGB)


def test_a_sink_without_a_pipeline_gets_ordinary_memory():
    assert SinkContext({}).host_output((2, 3), "uint8", "a").shape == (2, 3)


# -- what others have --------------------------------------------------------------------------------------------------


class Readings(Sensor):
    """Gives one number after another."""

    name = source = "test"
    readings = {"rss_shmem": "RssShmem", "non_local_usage": "CurrentUsage"}  # noqa: RUF012

    def __init__(self, numbers: list[Any]) -> None:
        super().__init__()
        self.numbers = numbers

    def _read(self) -> Any:
        return dict.fromkeys(self.readings, self.numbers.pop(0))


def elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    numbers: list[Any],
    register: bool = False,
    own: int = 1000,
    flags: int = 0,
) -> Any:
    """What a GPU's account says where the counter gives ``numbers`` and the pipeline has page-locked ``own`` bytes."""
    monkeypatch.setattr(holdings, "ProcfsMemory", lambda: Readings(numbers))
    monkeypatch.setattr(holdings, "WddmMemory", lambda adapter: Readings(numbers))
    monkeypatch.setattr(holdings, "find_adapter", lambda number: SimpleNamespace(index=number))
    found = Holdings("cuda", system)
    device = SimulatedDevice()
    block = device.host_empty(own, pinned=True, flags=flags)
    area = mapping(5000)
    if register:
        device.host_register(area)
    found.look(device)
    if register:
        device.host_unregister(area)
    device.host_free(block)
    device.close()
    return found.as_json()["pinned_elsewhere"]


def test_others_have_what_the_counter_shows_beyond_the_ledger(monkeypatch):
    linux = elsewhere(monkeypatch, "linux", [500_000, 800_000])
    assert (linux["bytes"], linux["approximate"], linux["reason"]) == (800_000 - 500_000 - 1000, True, None)
    assert "RssShmem" in linux["counter"]
    windows = elsewhere(monkeypatch, "win32", [800_000])
    assert (windows["bytes"], windows["reason"]) == (799_000, None) and "non_local_usage" in windows["counter"]


def test_memory_that_was_registered_is_in_another_counter_of_linux(monkeypatch):
    assert elsewhere(monkeypatch, "linux", [0, 9000], register=True)["bytes"] == 8000
    assert elsewhere(monkeypatch, "win32", [9000], register=True)["bytes"] == 0


def test_others_have_no_less_than_nothing(monkeypatch):
    assert elsewhere(monkeypatch, "linux", [500_000, 500_900])["bytes"] == 0


def test_write_combined_memory_is_in_another_counter_of_linux(monkeypatch):
    assert elsewhere(monkeypatch, "linux", [0, 50 << 20], own=40 << 20, flags=WRITE_COMBINED)["bytes"] == 50 << 20


def test_little_that_a_counter_does_not_show_says_nothing_of_the_counter(monkeypatch):
    assert elsewhere(monkeypatch, "linux", [500_000, 500_000])["bytes"] == 0


@pytest.mark.parametrize(("system", "numbers"), [("linux", [500_000, 500_100]), ("win32", [0])])
def test_a_counter_that_does_not_show_the_pipelines_own_says_nothing_of_others(monkeypatch, system, numbers):
    told = elsewhere(monkeypatch, system, numbers, own=32_000_000)
    assert told["bytes"] is None and told["counter"] is None
    assert "the pipeline itself has page-locked 32.0 MB: it does not count such memory here" in told["reason"]


def test_where_there_is_no_counter_the_reason_is_told(monkeypatch):
    told = elsewhere(monkeypatch, "linux", ["this kernel has none", 5])
    assert told["bytes"] is None and told["counter"] is None and "RssShmem" in told["reason"]
    assert elsewhere(monkeypatch, "win32", ["access denied"])["reason"] == "access denied"
    assert "no counter" in elsewhere(monkeypatch, "darwin", [])["reason"]


def test_a_sensor_that_cannot_be_opened_is_no_reason_to_fail(monkeypatch):
    def refuse(*arguments: Any) -> Any:
        raise SensorUnavailableError("there is no gdi32.dll")

    monkeypatch.setattr(holdings, "find_adapter", lambda number: None)
    monkeypatch.setattr(holdings, "ProcfsMemory", refuse)
    monkeypatch.setattr(holdings, "WddmMemory", refuse)
    device = SimulatedDevice()
    for system, reason in (("linux", "this kernel does not tell RssShmem"), ("win32", "there is no gdi32.dll")):
        found = Holdings("cuda", system)
        found.look(device)
        assert found.elsewhere["bytes"] is None and found.elsewhere["reason"] == reason
    device.close()


def test_without_a_gpu_nobody_is_looked_for():
    for kind in ("cpu", "simulated"):
        found = memory_of(device=kind)["pinned_elsewhere"]
        assert found["bytes"] is None and found["reason"]
