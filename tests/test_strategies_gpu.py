"""Staging strategies on a GPU: order, what CUDA is asked for, what is page-locked, and what is refused."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import number_of, ours
from test_cuda import SLOW, Slow, device
from test_pipeline import balance

import framepipe
from framepipe.device.select import why_not
from framepipe.frame import FrameSpec
from framepipe.memory import whole_pages
from framepipe.pipeline import Pipeline
from framepipe.registry import find, names
from framepipe.report import RunReport
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList, check_stager, pattern_frames

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
    pytest.mark.usefixtures("no_thread_left"),
]
SIZE = 320, 240
PICTURE = FrameSpec.of(pattern_frames(1, *SIZE)[0]).nbytes


def reasons() -> dict[str, str | None]:
    """Every strategy with the reason why it cannot work here."""
    if why_not():
        return {name: why_not() for name in names("staging")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries while they are imported
        return {name: find("staging", name).missing("cuda") for name in names("staging")}


HERE = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=f"{name}: {reason}"))
    for name, reason in reasons().items()
]


def only(*wanted: str) -> list[Any]:
    return [param for param in HERE if param.values[0] in wanted]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    assert not ours()


@pytest.fixture(autouse=True)
def pool_of_its_own() -> Iterator[None]:
    """CuPy's pool begins empty, and nothing stays in it."""
    import cupy as cp

    cp.get_default_pinned_memory_pool().free_all_blocks()
    yield
    cp.get_default_pinned_memory_pool().free_all_blocks()


def run(strategy: str, count: int = 24, *, number: int = 0, **staging: Any) -> RunReport:
    """Pictures through the ring alone: nothing else is page-locked, and only halves are on the device."""
    options = {"strategy": strategy, "slots": 3, "depth": 2, "fillers": 1, **staging}
    with Pipeline([FrameList(name="t", frames=pattern_frames(count, *SIZE))], [], ["discard"],
                  device=f"cuda:{number}", staging=options) as pipeline:  # fmt: skip
        report = pipeline.run()
    balance(report)
    assert report.frames["delivered"] == count
    return report


# -- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "p010le", "gray"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("strategy", HERE)
def test_the_contract_with_batches_of_any_size(strategy, batch, pix_fmt):
    check_stager(strategy, device, pix_fmt=pix_fmt, batch=batch)


@pytest.mark.parametrize("fillers", [2, "auto"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("strategy", HERE)
def test_every_frame_comes_in_order_and_as_on_the_cpu(clip, strategy, batch, fillers):
    images = {}
    for kind, name in (("cpu", "direct"), ("cuda", strategy)):
        options = {"strategy": name, "batch": batch, "fillers": fillers}
        with framepipe.open(clip, device=kind, staging=options, accuracy="exact") as frames:
            images[kind] = [(frame.index, frame.numpy().tobytes()) for frame in frames]
        assert frames.report is not None and not frames.report.warnings
        balance(frames.report)
    assert len(images["cuda"]) == 60
    assert images["cuda"] == images["cpu"]


@pytest.mark.parametrize("strategy", HERE)
def test_pictures_that_grow_and_shrink(strategy):
    frames = [*pattern_frames(5, 64, 48), *pattern_frames(5, 320, 240, seed=1), *pattern_frames(5, 64, 48, seed=2)]
    for pts, frame in enumerate(frames):
        frame.pts = pts
    images = {}
    for kind, name in (("cpu", "direct"), ("cuda", strategy)):
        with Pipeline([FrameList(name="s", frames=frames)], [Rgb(accuracy="exact")], device=kind,
                      staging={"strategy": name, "batch": 3}) as pipeline:  # fmt: skip
            images[kind] = [frame.numpy().tobytes() for frame in pipeline]
    assert len(images["cuda"]) == 15
    assert images["cuda"] == images["cpu"]


@pytest.mark.parametrize("strategy", HERE)
def test_a_second_gpu_does_all_by_itself(strategy):
    import cupy as cp

    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    run(strategy, number=1)


# -- hazards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", HERE)
def test_a_slow_reader_sees_its_own_picture(clip, strategy):
    """Few slots, one half, and a kernel that looks at the planes long after they came."""
    staging = {"strategy": strategy, "depth": 1, "slots": 2}
    with Pipeline([clip], [Slow()], device="cuda", staging=staging) as pipeline:
        assert [number_of(frame.numpy()) for frame in pipeline] == list(range(60))


@pytest.mark.parametrize("strategy", only("mapped"))
def test_without_the_fence_a_slow_reader_sees_another_one(clip, strategy, monkeypatch):
    """The test above can fail: the fence of a mapped slot is behind the kernel that reads it."""
    from framepipe.device.cuda import CudaEvent

    wait, done = CudaEvent.synchronize, CudaEvent.done
    monkeypatch.setattr(CudaEvent, "synchronize", lambda self: None if self.name.startswith("copied") else wait(self))
    monkeypatch.setattr(CudaEvent, "done", lambda self: self.name.startswith("copied") or done(self))
    staging = {"strategy": strategy, "depth": 4, "slots": 2}
    with Pipeline([clip], [Slow()], device="cuda", staging=staging) as pipeline:
        assert [number_of(frame.numpy()) for frame in pipeline] != list(range(60))


@pytest.mark.parametrize("strategy", only("cupy_pool", "cuda_core", "torch", "per_frame", "registered_per_frame"))
def test_memory_that_goes_round_is_used_again_only_behind_its_copy(clip, strategy, monkeypatch):
    """The copy is kept back for long; whoever hands the memory out again meanwhile ruins it."""
    import cupy as cp

    kernel = cp.RawKernel(SLOW, "slow")
    cls = find("staging", strategy)
    plain = cls.upload

    def upload(self, slot, spec, half, stream, copied):
        with stream.raw:
            kernel((1,), (1,), (np.int64(10_000_000),))
        return plain(self, slot, spec, half, stream, copied)

    monkeypatch.setattr(cls, "upload", upload)
    with framepipe.open(clip, device="cuda", staging={"strategy": strategy, "slots": 2}) as frames:
        assert [number_of(frame.numpy()) for frame in frames] == list(range(60))


# -- what is page-locked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("strategy", only("pooled", "write_combined", "mapped", "registered"))
def test_a_slab_is_page_locked_once(strategy, batch):
    memory = run(strategy, batch=batch).memory
    asked = 3 * batch * PICTURE
    assert memory["pinned_bytes"] == asked and memory["pinned_allocations"] == 1
    assert memory["pinned_bytes_taken"] == (whole_pages(asked) if strategy == "registered" else asked)


@pytest.mark.parametrize("strategy", only("pooled", "write_combined", "mapped", "per_frame"))
def test_cuda_is_asked_for_the_kind_of_memory_that_the_strategy_is_about(strategy, monkeypatch):
    import cupy as cp

    asked = []
    plain = cp.cuda.PinnedMemory
    monkeypatch.setattr(
        cp.cuda, "PinnedMemory", lambda nbytes, flags=0: asked.append((nbytes, flags)) or plain(nbytes, flags)
    )
    run(strategy)
    flags = {
        "write_combined": cp.cuda.runtime.hostAllocWriteCombined, "mapped": cp.cuda.runtime.hostAllocMapped,
    }.get(strategy, cp.cuda.runtime.hostAllocDefault)  # fmt: skip
    assert set(asked) == {(PICTURE if strategy == "per_frame" else 3 * PICTURE, flags)}


@pytest.mark.parametrize("strategy", only("registered", "registered_per_frame"))
def test_what_is_registered_is_unregistered(strategy, monkeypatch):
    import cupy as cp

    runtime = cp.cuda.runtime
    calls: list[tuple[str, int]] = []
    kinds = set()
    register, unregister = runtime.hostRegister, runtime.hostUnregister

    def registering(ptr: int, nbytes: int, flags: int) -> None:
        register(ptr, nbytes, flags)
        kinds.add(int(runtime.pointerGetAttributes(ptr).type))
        calls.append(("register", ptr))

    def unregistering(ptr: int) -> None:
        unregister(ptr)
        calls.append(("unregister", ptr))

    monkeypatch.setattr(runtime, "hostRegister", registering)
    monkeypatch.setattr(runtime, "hostUnregister", unregistering)
    memory = run(strategy).memory
    assert kinds == {runtime.memoryTypeHost}
    count = memory["pinned_allocations"]
    assert count == (1 if strategy == "registered" else 24)
    for what in ("register", "unregister"):
        assert len([1 for name, _ in calls if name == what]) == count
    open_now: set[int] = set()
    for name, ptr in calls:
        assert (ptr in open_now) == (name == "unregister")
        open_now ^= {ptr}
    assert not open_now


@pytest.mark.parametrize("strategy", only("mapped"))
def test_mapped_uploads_nothing_and_needs_no_halves(strategy):
    mapped, pooled = run(strategy), run("pooled")
    assert mapped.upload["bytes"] == 0 and pooled.upload["bytes"] == 24 * PICTURE
    assert not mapped.memory["device_bytes_peak"] and pooled.memory["device_bytes_peak"] >= 2 * PICTURE


@pytest.mark.parametrize("strategy", only("cupy_pool"))
def test_the_pool_of_cupy_takes_powers_of_two(strategy):
    memory = run(strategy).memory
    held, left = divmod(memory["pinned_bytes"], PICTURE)
    assert left == 0 and 1 <= held <= 3
    assert memory["pinned_bytes_taken"] == held * (1 << (PICTURE - 1).bit_length()) > memory["pinned_bytes"]
    assert memory["pinned_allocations"] == 24


@pytest.mark.parametrize("strategy", only("cuda_core"))
def test_the_pool_of_the_driver_is_counted_and_closed(strategy):
    memory = run(strategy).memory
    assert memory["pinned_bytes_taken"] >= memory["pinned_bytes"] >= PICTURE
    assert memory["pinned_allocations"] == 24


@pytest.mark.parametrize("strategy", only("torch"))
def test_the_pool_of_torch_is_counted(strategy):
    torch = importlib.import_module("torch")
    memory = run(strategy).memory
    planes = len(FrameSpec.of(pattern_frames(1, *SIZE)[0]).planes)
    assert memory["pinned_allocations"] == 24 * planes
    counts = hasattr(torch.cuda, "host_memory_stats")
    # Nothing taken is right as well: the pool may have had enough from before.
    assert memory["pinned_bytes_taken"] >= 0 if counts else memory["pinned_bytes_taken"] is None


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 2, 208, 801])
@pytest.mark.parametrize(
    "strategy",
    only("pooled", "write_combined", "mapped", "per_frame", "registered", "registered_per_frame", "cupy_pool"),
)
def test_a_refused_pin_falls_back_once(clip, strategy, code, monkeypatch):
    import cupy as cp

    calls = []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        raise cp.cuda.runtime.CUDARuntimeError(code)

    monkeypatch.setattr(cp.cuda, "PinnedMemory", refuse)
    monkeypatch.setattr(cp.cuda.runtime, "hostRegister", refuse)
    monkeypatch.setattr(cp.cuda, "alloc_pinned_memory", refuse)
    report = run(strategy)
    assert len(calls) == 1
    assert report.memory["pinned_bytes"] == report.memory["pinned_bytes_taken"] == 0
    assert report.memory["pageable_bytes"] >= PICTURE
    assert len([warning for warning in report.warnings if "refused to page-lock" in warning]) == 1
    with framepipe.open(clip, device="cuda", staging=strategy) as frames:
        assert [number_of(frame.numpy()) for frame in frames] == list(range(60))


@pytest.mark.parametrize("strategy", only("torch"))
def test_a_pin_that_torch_is_refused(clip, strategy, monkeypatch):
    torch = importlib.import_module("torch")
    calls = []

    def refuse(*args: Any) -> Any:
        calls.append(args)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    report = run(strategy)
    assert len(calls) == 1 and report.memory["pinned_bytes"] == 0
    assert [warning for warning in report.warnings if "refused to page-lock" in warning]


@pytest.mark.parametrize("strategy", only("cuda_core"))
def test_a_pin_that_the_pool_of_the_driver_is_refused(strategy, monkeypatch):
    cls = find("staging", strategy)
    calls = []

    def refuse(self: Any, nbytes: int) -> Any:
        calls.append(nbytes)
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: the API call failed")

    monkeypatch.setattr(cls, "_from_pool", refuse)
    report = run(strategy)
    assert len(calls) == 1 and report.memory["pinned_bytes"] == 0
    assert [warning for warning in report.warnings if "refused to page-lock" in warning]


def test_an_error_that_is_no_refusal_is_not_hidden(monkeypatch):
    import cupy as cp

    def fail(*args: Any) -> Any:
        raise cp.cuda.runtime.CUDARuntimeError(719)

    monkeypatch.setattr(cp.cuda.runtime, "hostRegister", fail)
    with pytest.raises(framepipe.FramepipeError, match="context is lost"):
        run("registered")
