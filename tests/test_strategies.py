"""Staging strategies on machines without a GPU: order, hazards, what is page-locked, and what is refused."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import framepipe, number_of
from test_pipeline import balance
from test_simulated import Broken, Copy
from test_simulated import run as run_copy

from framepipe import _cli_list, memory, pagelock
from framepipe.device.cpu import CpuDevice
from framepipe.device.host import MAPPED, WRITE_COMBINED
from framepipe.device.simulated import SimulatedDevice
from framepipe.errors import ConfigError, HazardError
from framepipe.frame import FrameSpec
from framepipe.ledger import Ledger
from framepipe.memory import PAGE, mapping, whole_pages
from framepipe.pipeline import Pipeline
from framepipe.registry import find, names
from framepipe.report import RunReport
from framepipe.sinks.callback import Callback
from framepipe.stage import Stage
from framepipe.stages.rgb import Rgb
from framepipe.staging.pooled import Pooled
from framepipe.testing import FrameList, check_stager, pattern_frames

pytestmark = pytest.mark.usefixtures("nothing_left")
HERE = [
    (make.kind, name)
    for make in (CpuDevice, SimulatedDevice)
    for name in names("staging")
    if find("staging", name).missing(make.kind) is None
]
MAKE: dict[str, Callable[[], Any]] = {"cpu": CpuDevice, "simulated": SimulatedDevice}
PICTURE = FrameSpec.of(pattern_frames(1)[0]).nbytes


def run(strategy: str, device: str, count: int = 24, *, slots: int = 3, **staging: Any) -> RunReport:
    """Pictures through `Rgb`, looked at on the device, so that nothing is page-locked but by the strategy."""
    seen: list[int] = []
    sink = Callback(function=lambda frame: seen.append(frame.index), host=False)
    options = {"strategy": strategy, "slots": slots, **staging}
    with Pipeline([FrameList(name="t", frames=pattern_frames(count))], [Rgb(accuracy="exact")], [sink],
                  device=device, staging=options) as pipeline:  # fmt: skip
        report = pipeline.run()
    balance(report)
    assert seen == list(range(count))
    return report


# -- the contract ----------------------------------------------------------------------------------------------------


def test_the_strategies_of_each_device_are_these():
    both = {"pooled", "per_frame", "pageable", "direct"}
    assert {name for device, name in HERE if device == "cpu"} == both | {"locked", "locked_per_frame"}
    assert {name for device, name in HERE if device == "simulated"} == both | {
        "write_combined", "mapped", "registered", "registered_per_frame",
    }  # fmt: skip


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("device", "strategy"), HERE)
def test_the_contract_with_batches_of_any_size(device, strategy, batch):
    check_stager(strategy, MAKE[device], batch=batch)


@pytest.mark.parametrize("wrong", ["only the first", "all at the beginning"])
def test_the_contract_finds_a_strategy_that_does_not_take_several_pictures(monkeypatch, wrong):
    plain = Pooled.fill

    def fill(self, frames, at, slot, spec):
        if wrong == "only the first":
            plain(self, frames[:1], at, slot, spec)
        else:
            plain(self, frames, 0, slot, spec)

    monkeypatch.setattr(Pooled, "fill", fill)
    with pytest.raises(AssertionError, match="arrived changed"):
        check_stager("pooled", MAKE["cpu"])


@pytest.mark.parametrize("fillers", [2, "auto"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("device", "strategy"), HERE)
def test_every_frame_comes_in_order(clip, device, strategy, batch, fillers):
    options = {"strategy": strategy, "batch": batch, "fillers": fillers}
    with framepipe.open(clip, device=device, staging=options, accuracy="exact") as frames:
        seen = [(frame.index, number_of(frame.numpy())) for frame in frames]
    assert seen == [(i, i) for i in range(60)]
    assert frames.report is not None
    assert frames.report.staging["strategy"] == strategy and not frames.report.warnings
    balance(frames.report)


@pytest.mark.parametrize(("device", "strategy"), HERE)
def test_pictures_that_grow_and_shrink(device, strategy):
    frames = [*pattern_frames(5, 32, 32), *pattern_frames(5, 64, 48, seed=1), *pattern_frames(5, 32, 32, seed=2)]
    for pts, frame in enumerate(frames):
        frame.pts = pts
    images: dict[str, list[bytes]] = {}
    for how in (strategy, "pooled"):
        with Pipeline([FrameList(name="s", frames=frames)], [Rgb(accuracy="exact")], device=device,
                      staging={"strategy": how, "batch": 3}) as pipeline:  # fmt: skip
            images[how] = [frame.numpy().tobytes() for frame in pipeline]
    assert len(images[strategy]) == 15
    assert images[strategy] == images["pooled"]


# -- hazards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("strategy", [name for device, name in HERE if device == "simulated" and name != "direct"])
def test_an_early_refill_is_a_hazard(strategy, batch, monkeypatch):
    """Behind the copy, or with `mapped` behind the last reader; `direct` has no slot to fill."""
    monkeypatch.setattr(Broken, "ignored", "copied slot/fence")
    with pytest.raises(HazardError, match="slot"):
        run_copy(Broken, monkeypatch, strategy=strategy, batch=batch, slots=2)


@pytest.mark.parametrize("strategy", [name for device, name in HERE if device == "simulated"])
def test_with_every_edge_there_is_none(strategy, monkeypatch):
    plain = run_copy(SimulatedDevice, monkeypatch, strategy="pooled")
    assert len(plain) == 24
    for slots, depth in ((1, 1), (2, 3), (6, 1)):
        assert run_copy(SimulatedDevice, monkeypatch, strategy=strategy, slots=slots, depth=depth) == plain


class Late(Copy):
    """Reads the planes behind a stage that does so as well."""


def test_a_mapped_slot_is_free_only_behind_its_last_reader(monkeypatch):
    """Recorded behind the first of two readers, the fence lets the slot be filled under the second."""
    from framepipe import running

    def two(device: type[SimulatedDevice]) -> list[int]:
        monkeypatch.setattr("framepipe.device.simulated.SimulatedDevice", device)
        seen: list[int] = []
        stages: list[Stage] = [Rgb(accuracy="exact"), Late()]
        with Pipeline([FrameList(name="t", frames=pattern_frames(24))], stages,
                      [lambda frame: seen.append(frame.index)], device="simulated",
                      staging={"strategy": "mapped", "slots": 2, "depth": 3}) as pipeline:  # fmt: skip
            pipeline.run()
        return seen

    assert two(SimulatedDevice) == list(range(24))
    plain = running.Chain.__init__

    def first_reader(self: Any, *args: Any) -> None:
        plain(self, *args)
        self.last_reader = 0

    monkeypatch.setattr(running.Chain, "__init__", first_reader)
    with pytest.raises(HazardError, match="slot"):
        two(SimulatedDevice)


def test_a_mapped_slot_waits_for_its_own_reader_and_no_later_one(monkeypatch):
    """The half's event is recorded again by the batch after next, and would hold a slot back until then."""
    fences = []
    from framepipe.ring import Ring

    plain = Ring.release

    def release(self: Any, slot: Any, fence: Any = None) -> None:
        fences.append((slot.index, fence.name))
        plain(self, slot, fence)

    monkeypatch.setattr(Ring, "release", release)
    run("mapped", "simulated")
    assert len(fences) == 24
    assert all(name == f"copied slot {index}" for index, name in fences)


# -- what is page-locked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("device", "strategy", "rounded"),
    [("simulated", "pooled", False), ("simulated", "write_combined", False), ("simulated", "mapped", False),
     ("simulated", "registered", True), ("cpu", "locked", True)],
)  # fmt: skip
def test_a_slab_is_page_locked_once(device, strategy, rounded, batch):
    report = run(strategy, device, batch=batch)
    asked = 3 * batch * PICTURE
    assert report.memory["pinned_bytes"] == asked
    assert report.memory["pinned_bytes_taken"] == (whole_pages(asked) if rounded else asked)
    assert report.memory["pinned_allocations"] == 1 and report.memory["pageable_bytes"] < asked + 10 * 64 * 48 * 3 * 4


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("device", "strategy", "rounded"),
    [("simulated", "per_frame", False), ("simulated", "registered_per_frame", True),
     ("cpu", "locked_per_frame", True)],
)  # fmt: skip
def test_per_frame_page_locks_for_every_batch(device, strategy, rounded, batch):
    report = run(strategy, device, batch=batch, fillers=1)
    each = batch * PICTURE
    assert report.memory["pinned_allocations"] >= 24 / batch
    held, left = divmod(report.memory["pinned_bytes"], each)
    assert left == 0 and 1 <= held <= 3
    assert report.memory["pinned_bytes_taken"] == held * (whole_pages(each) if rounded else each)


def test_ordinary_memory_is_not_called_page_locked():
    for device, strategy in (("cpu", "pooled"), ("cpu", "per_frame"), ("cpu", "direct"), ("simulated", "pageable")):
        found = run(strategy, device).memory
        assert found["pinned_bytes"] == found["pinned_bytes_taken"] == found["pinned_allocations"] == 0


def test_mapped_needs_no_device_memory_for_uploads():
    found = {}
    for strategy in ("mapped", "pooled"):
        with Pipeline([FrameList(frames=pattern_frames(24))], [], ["discard"], device="simulated",
                      staging={"strategy": strategy, "depth": 2}) as pipeline:  # fmt: skip
            report = pipeline.run()
        found[strategy] = (report.upload["bytes"], report.memory["device_bytes_peak"])
    assert found == {"mapped": (0, None), "pooled": (24 * PICTURE, 2 * PICTURE)}


def test_flags_are_those_of_the_strategy(monkeypatch):
    asked = []
    plain = SimulatedDevice.host_empty

    def host_empty(self: Any, nbytes: int, *, pinned: bool, flags: int = 0, **options: Any) -> Any:
        asked.append((pinned, flags))
        return plain(self, nbytes, pinned=pinned, flags=flags, **options)

    monkeypatch.setattr(SimulatedDevice, "host_empty", host_empty)
    for strategy in ("pooled", "write_combined", "mapped", "pageable"):
        run(strategy, "simulated")
    assert asked == [(True, 0), (True, WRITE_COMBINED), (True, MAPPED), (False, 0)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmLck is Linux's")
def test_locked_memory_is_locked_and_unlocked():
    nbytes = 64 * 1024
    limit = pagelock.limit_bytes()
    if limit is not None and limit < 4 * nbytes:
        pytest.skip(f"this process may lock {limit} bytes")

    def locked() -> int:
        with open("/proc/self/status", encoding="utf-8") as status:
            return int(re.findall(r"VmLck:\s+(\d+) kB", status.read())[0]) * 1024

    before = locked()
    device = CpuDevice()
    block = mapping(nbytes, touch=False)
    assert device.host_register(block) and device.is_locked(block)
    assert locked() == before + nbytes
    device.host_unregister(block)
    assert locked() == before and not device.is_locked(block)
    assert device.ledger.bytes == {"pinned": 0} and device.ledger.taken == {"pinned": 0}


# -- libraries that need a GPU: in their place, what they are asked for ------------------------------------------------


class Buffer:
    """Of a pool that takes 64 KiB at a time."""

    def __init__(self, pool: DriverPool, nbytes: int) -> None:
        self.block = np.full(nbytes, 7, np.uint8)
        self.handle = self.block.ctypes.data
        self.pool = pool
        pool.live.append(self)

    def close(self, stream: Any) -> None:
        assert stream == "stream"
        self.pool.live.remove(self)


class DriverPool:
    """What ``PinnedMemoryResource`` is used for."""

    last: DriverPool

    def __init__(self, options: Any) -> None:
        assert options == "a pool of its own"
        self.live: list[Buffer] = []
        self.is_closed = False
        self.most = 0
        DriverPool.last = self

    def allocate(self, nbytes: int, *, stream: Any) -> Buffer:
        buffer = Buffer(self, nbytes)
        self.most = max(self.most, self.attributes.reserved_mem_current)
        return buffer

    @property
    def attributes(self) -> Any:
        held = sum(buffer.block.nbytes for buffer in self.live)
        return SimpleNamespace(reserved_mem_current=-(-held // 65536) * 65536)

    def close(self) -> None:
        assert not self.live and not self.is_closed
        self.is_closed = True


class Stream(str):
    """Waited for before the memory is used, and closed once."""

    synced = 0

    def sync(self) -> None:
        Stream.synced += 1

    def close(self) -> None:
        pass


def alone(monkeypatch: pytest.MonkeyPatch, strategy: str, **modules: Any) -> None:
    """Let ``strategy`` run where there is no GPU."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("_", "."), module)
    monkeypatch.setattr(find("staging", strategy), "missing", classmethod(lambda cls, kind: None))


@pytest.mark.parametrize("batch", [1, 4])
def test_the_pool_of_the_driver_is_used_and_given_back(batch, monkeypatch):
    gpu = SimpleNamespace(set_current=lambda: None, create_stream=lambda: Stream("stream"))
    core = SimpleNamespace(
        Device=lambda number: gpu, PinnedMemoryResource=DriverPool,
        PinnedMemoryResourceOptions=lambda: "a pool of its own",
    )  # fmt: skip
    alone(monkeypatch, "cuda_core", cuda=SimpleNamespace(core=core), cuda_core=core)
    check_stager("cuda_core", SimulatedDevice, batch=batch)
    assert DriverPool.last.is_closed
    before = Stream.synced
    found = run("cuda_core", "simulated", batch=batch, fillers=1).memory
    assert DriverPool.last.is_closed and Stream.synced - before >= 24 / batch
    assert found["pinned_bytes_taken"] == DriverPool.last.most >= found["pinned_bytes"]
    assert found["pinned_bytes"] in [n * batch * PICTURE for n in (1, 2, 3)] and found["pinned_allocations"] >= 6


@pytest.mark.parametrize("batch", [1, 4])
def test_the_pool_of_cupy_is_used_and_its_rounding_shown(batch, monkeypatch):
    class Block(bytearray):
        mem: Any = None

    def alloc_pinned_memory(nbytes: int) -> Block:
        block = Block(1 << (nbytes - 1).bit_length())
        block.mem = SimpleNamespace(size=len(block))
        return block

    cupy = SimpleNamespace(cuda=SimpleNamespace(alloc_pinned_memory=alloc_pinned_memory))
    alone(monkeypatch, "cupy_pool", cupy=cupy)
    check_stager("cupy_pool", SimulatedDevice, batch=batch)
    found = run("cupy_pool", "simulated", batch=batch, fillers=1).memory
    held = found["pinned_bytes"] // (batch * PICTURE)
    assert found["pinned_bytes_taken"] == held * (1 << (batch * PICTURE - 1).bit_length()) > found["pinned_bytes"]


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "strategy"), [pair for pair in HERE if pair[1] not in ("direct", "pageable") and pair[0] != "cpu"]
)
def test_a_refused_pin_falls_back_once(device, strategy, monkeypatch):
    tried = []

    def refuse(self: Any, nbytes: Any, kind: str = "pinned", align: Any = None) -> Any:
        if kind != "pinned":
            return plain(self, nbytes, kind, align)
        tried.append(nbytes)
        raise MemoryError("no more")

    plain = SimulatedDevice._tracked
    monkeypatch.setattr(SimulatedDevice, "_tracked", refuse)
    monkeypatch.setattr(SimulatedDevice, "_register", refuse)
    monkeypatch.setattr(SimulatedDevice, "refused", lambda self, error: isinstance(error, MemoryError))
    report = run(strategy, device, fillers=1)
    assert len(tried) == 1
    assert report.memory["pinned_bytes"] == report.memory["pinned_bytes_taken"] == 0
    assert report.memory["pageable_bytes"] >= PICTURE
    assert [warning for warning in report.warnings if "refused to page-lock" in warning and "no more" in warning]
    assert len(report.warnings) == 1


def test_two_refusals_at_once_are_told_once(monkeypatch):
    monkeypatch.setattr(SimulatedDevice, "refused", lambda self, error: isinstance(error, MemoryError))
    device = SimulatedDevice()

    def fail() -> None:
        raise MemoryError("no more")

    def meanwhile() -> None:
        assert device.page_lock(1, fail) is None  # another thread's, while this one asks
        fail()

    assert device.page_lock(2, meanwhile) is None
    assert len(device.warnings) == 1
    device.close()


def test_mapped_is_copied_where_it_cannot_be_page_locked(monkeypatch):
    def refuse(self: Any, error: Exception) -> bool:
        return True

    monkeypatch.setattr(SimulatedDevice, "refused", refuse)
    monkeypatch.setattr(SimulatedDevice, "_pin", failing_pin)
    report = run("mapped", "simulated", slots=2, depth=3)
    assert report.upload["bytes"] == 24 * PICTURE


def failing_pin(self: Any, nbytes: int, flags: int, align: Any) -> Any:
    raise MemoryError("no more")


def test_an_error_that_is_no_refusal_ends_the_run(monkeypatch):
    def broken(self: Any, block: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(SimulatedDevice, "_register", broken)
    with pytest.raises(RuntimeError, match="broken"):
        run("registered", "simulated")


@pytest.mark.skipif(sys.platform == "win32", reason="mlock")
@pytest.mark.parametrize("strategy", ["locked", "locked_per_frame"])
def test_a_limit_of_the_system_is_named(strategy, monkeypatch):
    calls = []

    def mlock(name: str, address: int, nbytes: int) -> int:
        calls.append(name)
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pagelock, "_call", mlock)
    monkeypatch.setattr(pagelock, "limit_bytes", lambda: 8192)
    report = run(strategy, "cpu", fillers=1)
    assert calls == ["mlock"]
    assert [warning for warning in report.warnings if "RLIMIT_MEMLOCK is 8192 bytes" in warning]
    assert report.memory["pinned_bytes"] == 0


class Kernel:
    """What is asked of kernel32; each attribute is a function."""

    def __init__(self, locks: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.locks = locks
        for name in ("GetCurrentProcess", "GetProcessWorkingSetSize", "SetProcessWorkingSetSize", "VirtualLock"):
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        class Function:
            restype = None

            def __call__(inner, *args: Any) -> int:
                self.calls.append((name, *(getattr(arg, "value", None) for arg in args)))
                if name == "GetProcessWorkingSetSize":
                    args[1]._obj.value, args[2]._obj.value = 200_000, 1_400_000
                return int(self.locks) if name == "VirtualLock" else 1

        return Function()


def test_windows_makes_room_in_the_working_set_first():
    kernel = Kernel(locks=True)
    pagelock._lock_windows(kernel, 4096, 1_000_000)
    assert kernel.calls[-2:] == [
        ("SetProcessWorkingSetSize", 1, 1_200_000, 2_400_000),
        ("VirtualLock", 4096, 1_000_000),
    ]
    with pytest.raises(OSError, match="VirtualLock: Windows error"):
        pagelock._lock_windows(Kernel(locks=False), 4096, 1_000_000)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "strategy"),
    [(device, name) for device in MAKE for name in names("staging") if (device, name) not in HERE],
)
def test_a_strategy_that_is_missing_is_a_mistake_that_says_why(device, strategy):
    reason = find("staging", strategy).missing(device)
    with pytest.raises(ConfigError, match=f"staging '{strategy}' cannot be used on {device}: ") as caught:
        Pipeline([FrameList(frames=pattern_frames(1))], [], device=device, staging=strategy)
    assert reason in str(caught.value)


def test_list_says_what_is_missing_here(monkeypatch):
    from framepipe.device.select import Choice

    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(_cli_list, "choose", lambda name, kind=kind: Choice(kind, 0, name))
        found = {line.split()[0]: line for line in _cli_list.lines("staging")}
        for name in names("staging"):
            reason = find("staging", name).missing(kind)
            assert (f"(Not here: {reason}.)" in found[name]) == (reason is not None)
        assert ("Not here" in found["mapped"]) == (kind == "cpu")
        assert ("Not here" in found["locked"]) == (kind == "cuda")


@pytest.mark.parametrize(
    ("module", "word"), [("torch", "PyTorch cannot be imported"), ("cuda_core", "cuda.core cannot be imported")]
)
def test_a_library_that_is_not_there_is_named(module, word, monkeypatch):
    for name in ("torch", "cuda.core"):
        monkeypatch.setitem(sys.modules, name, None)
    assert word in find("staging", module).missing("cuda")


class Prying(Stage):
    """Wants planes on the host."""

    readback = ("planes",)


def test_nobody_reads_write_combined_memory_on_the_host():
    frames = FrameList(frames=pattern_frames(1))
    sink = Callback(function=print, reads={"planes"})
    options: dict[str, Any] = {"device": "simulated", "staging": "write_combined"}
    with pytest.raises(ConfigError, match="stage 'pry' would read planes on the host"):
        stage = Prying()
        stage.id = "pry"
        Pipeline([frames], [stage], **options)
    with pytest.raises(ConfigError, match="sink 'callback' would read planes on the host"):
        Pipeline([frames], [], [sink], **options)
    Pipeline([frames], ["rgb"], [Callback(function=print, reads={"planes"}, host=False)], **options)
    Pipeline([frames], [], [sink], device="simulated", staging="pooled")
    with pytest.raises(ConfigError, match="every stage would read it"):
        Pipeline([frames], ["rgb"], device="cpu", staging="write_combined")


def test_where_stages_run_on_the_host_every_reader_counts(monkeypatch):
    """A strategy of somebody else's, which does not say that it is none for the CPU."""
    monkeypatch.setattr(Pooled, "host_readable", False)
    frames = FrameList(frames=pattern_frames(1))
    with pytest.raises(ConfigError, match="stage 'rgb' would read planes on the host"):
        Pipeline([frames], ["rgb"], device="cpu", staging="pooled")
    Pipeline([frames], ["rgb"], device="simulated", staging="pooled")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_mapping_has_pages_of_its_own():
    blocks = [mapping(nbytes) for nbytes in (1, PAGE, 3 * PAGE + 1, 100_000)]
    pages: set[int] = set()
    for block in blocks:
        assert block.dtype == np.uint8 and block.flags.writeable and block.ctypes.data % PAGE == 0
        own = set(range(block.ctypes.data // PAGE, (block.ctypes.data + whole_pages(block.nbytes)) // PAGE))
        assert not pages & own
        pages |= own
    assert [block.nbytes for block in blocks] == [1, PAGE, 3 * PAGE + 1, 100_000]


@pytest.mark.skipif(not sys.platform.startswith("linux") or mmap.PAGESIZE != PAGE, reason="mincore, pages of 4096")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_pages_of_a_mapping_are_there(threads, monkeypatch):
    monkeypatch.setattr(memory, "_TOUCH_NBYTES", PAGE)
    monkeypatch.setattr(memory, "_TOUCHING", threads)
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 8)
    there = mapping(1000 * PAGE - 5)
    assert resident(there) == 1000
    assert resident(mapping(1000 * PAGE, touch=False)) < 1000


def resident(block: np.ndarray) -> int:
    """How many pages of a block are in memory."""
    pages = whole_pages(block.nbytes) // PAGE
    found = (ctypes.c_ubyte * pages)()
    library = ctypes.CDLL(None, use_errno=True)
    assert not library.mincore(ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(pages * PAGE), found)
    return sum(flags & 1 for flags in found)


def test_the_ledger_counts_what_is_asked_for_and_what_is_taken():
    ledger = Ledger()
    ledger.add("pinned", 100)
    ledger.add("pinned", 50, 64)
    assert (ledger.bytes["pinned"], ledger.taken["pinned"], ledger.allocations["pinned"]) == (150, 164, 2)
    ledger.add("pinned", -50, -64)
    ledger.take("pinned", 1000)
    ledger.take("pinned", -1000)
    assert (ledger.bytes["pinned"], ledger.taken["pinned"], ledger.allocations["pinned"]) == (100, 100, 2)
    assert (ledger.peak["pinned"], ledger.most_taken("pinned"), ledger.most_taken("device")) == (150, 1100, 0)
    ledger.untold.add("pinned")
    assert ledger.most_taken("pinned") is None
