"""GPU memory and streams: rows B78 to B85, on the simulated device and, where there is one, on a GPU.

The hazards of every strategy, and each missing edge by itself, are in the tests of the devices; here is one test a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import framepipe, number_of
from test_pipeline import balance
from test_simulated import Broken, Copy
from test_simulated import run as run_copy

from framepipe.device.select import why_not
from framepipe.device.simulated import SimulatedDevice
from framepipe.errors import DeviceError, FramepipeError, HazardError, StageError
from framepipe.frame import FrameSpec
from framepipe.pipeline import Pipeline
from framepipe.registry import find
from framepipe.sinks.callback import Callback
from framepipe.sources.file import File
from framepipe.testing import FrameList, pattern_frames

gpu = (pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"))
both = pytest.mark.parametrize("device", ["simulated", pytest.param("cuda", marks=gpu)])
on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
SLOW = r"""
extern "C" __global__ void slow(long long cycles) { long long end = clock64() + cycles; while (clock64() < end) {} }
"""


def slowly(cycles: int) -> None:
    """Keep CuPy's current stream busy."""
    import cupy as cp

    cp.RawKernel(SLOW, "slow")((1,), (1,), (np.int64(cycles),))


@both
@pytest.mark.parametrize("strategy", ["pooled", "mapped"])
def test_b78_pictures_that_a_consumer_holds_are_left_alone(device, strategy, clip):
    held, seen = [], []
    staging = {"strategy": strategy, "slots": 2, "depth": 1}
    with framepipe.open(clip, device=device, staging=staging, queue=1) as frames:
        for frame in frames:
            if len(held) < 5:
                held.append(frame)
            else:
                seen.append(number_of(frame.numpy()))
    assert [number_of(frame.numpy()) for frame in held] + seen == list(range(60))


@on_a_gpu
def test_b79_a_slot_is_filled_again_only_behind_its_copy(device, clip, monkeypatch):
    from framepipe.device.cuda import CudaDevice

    plain = CudaDevice.upload

    def upload(self: Any, dst: Any, src: Any, stream: Any) -> None:
        with stream.raw:
            slowly(5_000_000)
        plain(self, dst, src, stream)

    monkeypatch.setattr(CudaDevice, "upload", upload)
    with framepipe.open(clip, device=device, staging={"slots": 2}) as frames:
        assert [number_of(frame.numpy()) for frame in frames] == list(range(60))


def test_b79_an_early_refill_is_found_every_time(monkeypatch):
    """The simulated device copies as late as it may."""
    assert len(run_copy(SimulatedDevice, monkeypatch, strategy="pooled", slots=2)) == 24
    monkeypatch.setattr(Broken, "ignored", "copied slot/fence")
    with pytest.raises(HazardError, match="slot"):
        run_copy(Broken, monkeypatch, strategy="pooled", slots=2)


@on_a_gpu
def test_b80_memory_is_used_again_only_behind_the_stream_that_dropped_it(device, clip):
    import cupy as cp

    user, copies = cp.cuda.Stream(non_blocking=True), []
    with framepipe.open(clip, device=device, queue=1) as frames:
        for frame in frames:
            with user:
                slowly(2_000_000)
                copies.append(frame.image.copy())
                del frame
        user.synchronize()
    assert [number_of(cp.asnumpy(copy)) for copy in copies] == list(range(60))


@both
def test_b80_pictures_that_are_dropped_at_once_give_their_memory_to_others(device, clip):
    """Freed memory of the simulated device is overwritten, so that too early would be seen."""
    seen = []
    with framepipe.open(clip, device=device, queue=1) as frames:
        for frame in frames:
            seen.append(number_of(frame.numpy()))
            del frame
    assert seen == list(range(60))
    assert frames.report.memory["device_bytes_peak"] < 10 * 96 * 64 * 3, "and not a block for each"


NV12 = FrameSpec(1920, 1080, "nv12")


def test_b81_what_rounding_takes_is_planned_with():
    """Five pictures of 1080p NV12: 15.6 MB asked for, 16.8 MB taken by CuPy's pool, no more than asked by our own."""
    pool = find("staging", "cupy_pool").host_memory(NV12, 1, 5, host_shared=False)
    assert (pool.nbytes, pool.taken) == (5 * NV12.nbytes, 1 << 24) == (15_552_000, 16_777_216)
    own = find("staging", "pooled").host_memory(NV12, 1, 5, host_shared=False)
    assert own.nbytes == own.taken == 15_552_000


@on_a_gpu
@pytest.mark.parametrize(("strategy", "taken"), [("cupy_pool", 1 << 24), ("pooled", 5 * NV12.nbytes)])
def test_b81_what_rounding_takes_is_reported(device, strategy, taken):
    source = FrameList(name="nv12", frames=pattern_frames(5, 1920, 1080, "nv12"))
    staging = {"strategy": strategy, "slots": 1, "batch": 5, "batch_timeout_s": 60, "fillers": 1}
    with Pipeline([source], [], ["discard"], device=device, staging=staging, threads=1) as pipeline:
        memory = pipeline.run().memory
    assert (memory["pinned_bytes"], memory["pinned_bytes_taken"]) == (5 * NV12.nbytes, taken)


@both
def test_b82_nothing_more_is_page_locked_while_a_run_goes_on(device, clip):
    found = []
    for rounds in (1, 5):
        with Pipeline([File(uri=str(clip), loop=rounds)], ["rgb"], ["discard"], device=device) as pipeline:
            memory = pipeline.run().memory
        found.append((memory["pinned_allocations"], memory["pinned_bytes"], memory["pinned_bytes_taken"]))
    assert found[0] == found[1] and found[0][0] == 1


@on_a_gpu
def test_b82_cupys_own_pool_of_page_locked_memory_is_not_used(device, clip, monkeypatch):
    import cupy as cp

    taken: list[int] = []
    pool = cp.get_default_pinned_memory_pool()

    def malloc(nbytes: int) -> Any:
        taken.append(nbytes)
        return pool.malloc(nbytes)

    cp.cuda.set_pinned_memory_allocator(malloc)
    try:
        with framepipe.open(clip, device=device) as frames:
            assert len(list(frames)) == 60
    finally:
        cp.cuda.set_pinned_memory_allocator(pool.malloc)
    assert taken == []


def refuse(device: str, monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let no more than ``most`` bytes be page-locked; what was asked for beyond."""
    held, refused = [0], []

    def counted(nbytes: int, error: BaseException) -> None:
        if held[0] + nbytes > most:
            refused.append(nbytes)
            raise error
        held[0] += nbytes

    if device == "cuda":
        import cupy as cp

        locked = cp.cuda.PinnedMemory

        def allocate(nbytes: int, flags: int = 0) -> Any:
            counted(nbytes, cp.cuda.runtime.CUDARuntimeError(2))
            return locked(nbytes, flags)

        monkeypatch.setattr(cp.cuda, "PinnedMemory", allocate)
        return refused
    plain = SimulatedDevice._pin

    def pin(self: Any, nbytes: int, flags: int, align: int | None) -> Any:
        counted(nbytes, MemoryError("no more"))
        return plain(self, nbytes, flags, align)

    monkeypatch.setattr(SimulatedDevice, "_pin", pin)
    monkeypatch.setattr(SimulatedDevice, "refused", lambda self, error: isinstance(error, MemoryError))
    return refused


@both
def test_b83_where_nothing_can_be_page_locked_a_run_goes_on_and_says_so_once(device, clip, monkeypatch):
    refused = refuse(device, monkeypatch, 0)
    with Pipeline([clip], ["rgb"], ["discard"], device=device) as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.frames["delivered"] == 60 and len(refused) == 1
    assert report.memory["pinned_bytes"] == 0 < report.memory["pageable_bytes"]
    assert len([warning for warning in report.warnings if "page-lock" in warning]) == 1


@both
def test_b83_what_is_refused_later_leaves_what_there_is(device, clip, monkeypatch):
    """The ring's slab is page-locked; what pictures are read back to is not any more."""
    seen: list[int] = []
    slab = 3 * FrameSpec(96, 64, "yuv420p").nbytes
    refused = refuse(device, monkeypatch, slab)
    sink = Callback(function=lambda frame: seen.append(number_of(frame.image)))
    with Pipeline([clip], ["rgb"], [sink], device=device, staging={"slots": 3}) as pipeline:
        report = pipeline.run()
    assert seen == list(range(60))
    assert len(refused) == 1 and report.memory["pinned_bytes"] == slab
    assert len([warning for warning in report.warnings if "page-lock" in warning]) == 1


def test_b84_a_number_that_is_not_there_is_told_with_what_there_is():
    with pytest.raises(FramepipeError, match="cuda:99") as caught:
        Pipeline([FrameList(frames=pattern_frames(1))], device="cuda:99")
    assert (why_not() or "cuda:0") in str(caught.value)


@on_a_gpu
def test_b84_every_array_is_on_the_device_that_was_asked_for(device, clip):
    """Of two GPUs the second; that the first one is left alone is seen in `test_cuda`."""
    import cupy as cp

    number = cp.cuda.runtime.getDeviceCount() - 1
    with framepipe.open(clip, device=f"{device}:{number}") as frames:
        assert {frame.image.device.id for frame in frames} == {number}


@both
def test_b85_memory_that_runs_out_is_told_with_its_place_and_others_go_on(device, clip):
    options: dict[str, Any] = {"device": device, "staging": {"batch": 4, "depth": 1}, "check_memory": False}
    options["device_memory"] = 5 * FrameSpec(96, 64, "yuv420p").nbytes  # the half for uploads, and no picture
    with framepipe.open(clip, device=device) as frames:
        first = number_of(next(frames).numpy())
        for _ in range(2):  # nothing of the first one's is left that would be in the way
            with pytest.raises((StageError, DeviceError)) as caught:
                with Pipeline([clip], ["rgb", Copy()], ["discard"], **options) as pipeline:
                    pipeline.run()
            for part in ("batches of 4", "bytes wanted", "held by this pipeline", "device_memory"):
                assert part in str(caught.value), part
            balance(pipeline.report)
        assert [first, *(number_of(frame.numpy()) for frame in frames)] == list(range(60))
