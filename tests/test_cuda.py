"""The same contracts and results on a GPU, and the hazards that only a real one has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import number_of
from test_pipeline import Invert, Mean, balance

import framepipe
from framepipe.device.select import why_not
from framepipe.frame import Batch
from framepipe.pipeline import Pipeline
from framepipe.registry import find, names
from framepipe.sources.file import File
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.testing import FrameList, check_device, check_stage, check_stager, pattern_frames

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
    pytest.mark.usefixtures("nothing_left_but_cuda"),
]


@pytest.fixture
def nothing_left_but_cuda():
    """CUDA keeps descriptors of its own, so only threads are looked at."""
    from conftest import ours

    yield
    assert not ours()


def device() -> Any:
    from framepipe.device.cuda import CudaDevice

    return CudaDevice()


def test_the_device_keeps_its_contract():
    check_device(device)


def available() -> list[Any]:
    """The strategies that can work here; each other one is skipped and says why."""
    found = {name: find("staging", name).missing("cuda") for name in names("staging")} if not why_not() else {}
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=f"{name}: {reason}"))
        for name, reason in found.items()
    ]


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "nv12", "yuv444p10le", "rgb24", "gray"])
@pytest.mark.parametrize("strategy", available())
def test_staging_strategies_keep_their_contract(strategy, pix_fmt):
    check_stager(strategy, device, pix_fmt=pix_fmt)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("strategy", available())
def test_every_frame_comes_in_order(clip, strategy, batch):
    options = {"strategy": strategy, "batch": batch, "fillers": 2}
    with framepipe.open(clip, device="cuda", staging=options) as frames:
        seen = [(frame.index, number_of(frame.numpy())) for frame in frames]
    assert seen == [(i, i) for i in range(60)]
    balance(frames.report)


def test_results_are_those_of_the_cpu(clips):
    images = {}
    for name in ("cpu", "cuda"):
        with framepipe.open([clips / "a.mp4", clips / "b.mp4"], device=name, accuracy="exact") as frames:
            images[name] = {(f.source, f.index): f.numpy().tobytes() for f in frames}
    assert len(images["cuda"]) == 100
    assert images["cpu"] == images["cuda"]


@pytest.mark.parametrize(
    "stages", ["rgb motion", "rgb motion draw", "tensor", "rgb stats", "rgb resize crop normalize"]
)
def test_every_stage_gives_what_it_gives_on_the_cpu(stages, clip):
    results = {}
    for name in ("cpu", "cuda"):
        made = [_stage(word) for word in stages.split()]
        sink: list[tuple] = []

        def write(frame, sink=sink):
            tensors = {key: value.tobytes() for key, value in frame.tensors.items()}
            image = None if frame.image is None else frame.image.tobytes()
            sink.append((frame.index, frame.meta, image, tensors))

        from framepipe.sinks.callback import Callback

        reads = (
            frozenset({"meta", "tensor"})
            if stages == "tensor"
            else frozenset({"meta", "image"}) | ({"tensor"} if "normalize" in stages else set())
        )
        with Pipeline([clip], made, [Callback(function=write, reads=reads)], device=name,
                      staging={"batch": 4}) as pipeline:  # fmt: skip
            pipeline.run()
        results[name] = sink
    assert results["cpu"] == results["cuda"]


def _stage(word: str) -> Stage:
    from framepipe.registry import find

    options: dict[str, dict[str, Any]] = {
        "motion": {"warmup": 5}, "tensor": {"width": 64, "height": 64, "mode": "letterbox", "accuracy": "exact"},
        "resize": {"width": 50, "height": 40}, "crop": {"x": 3, "y": 5, "width": 31, "height": 17},
        "rgb": {"accuracy": "exact"},
    }  # fmt: skip
    made: Stage = find("stages", word)(**options.get(word, {}))
    return made


def test_late_stages(clip):
    with Pipeline([clip], [Mean(), Invert()], device="cuda") as pipeline:
        for frame in pipeline:
            image = frame.numpy()
            assert abs(255 - image.mean() - frame.meta["mean"]) < 1e-3
            assert number_of(255 - image) == frame.index


SLOW = r"""
extern "C" __global__ void slow(long long cycles) { long long end = clock64() + cycles; while (clock64() < end) {} }
"""


class Slow(Stage):
    """Looks at the planes only after a long kernel, and copies their luma."""

    reads = frozenset({"planes"})
    writes = frozenset({"image"})

    def plan(self, flow: Flow) -> Flow:
        return flow.put("image", ArraySpec((flow.spec.height, flow.spec.width, 3)))

    def launch(self, batch: Batch) -> None:
        xp = self.device.xp
        kernel = xp.RawKernel(SLOW, "slow")
        kernel((1,), (1,), (np.int64(20_000_000),))
        for i in range(len(batch)):
            batch.out["image"][i] = batch.planes.picture(i)[0][..., None]


def test_a_slow_kernel_with_early_uploads(clip):
    """The next upload into the half waits for the kernel that still reads it."""
    with Pipeline([clip], [Slow()], device="cuda", staging={"depth": 1, "slots": 6}) as pipeline:
        assert [number_of(frame.numpy()) for frame in pipeline] == list(range(60))


def test_a_slow_copy_with_early_refills(clip, monkeypatch):
    """A slot is refilled only behind its copy, however long the copy is kept back."""
    import cupy as cp

    from framepipe.device.cuda import CudaDevice

    kernel = cp.RawKernel(SLOW, "slow")
    plain = CudaDevice.upload

    def upload(self, dst, src, stream):
        with stream.raw:
            kernel((1,), (1,), (np.int64(10_000_000),))
        plain(self, dst, src, stream)

    monkeypatch.setattr(CudaDevice, "upload", upload)
    with framepipe.open(clip, device="cuda", staging={"slots": 2}) as frames:
        assert [number_of(frame.numpy()) for frame in frames] == list(range(60))


def test_without_the_fence_the_same_run_goes_wrong(clip, monkeypatch):
    """The test above can fail: with fences that do not wait, pictures are overwritten before they are copied."""
    import cupy as cp

    from framepipe.device.cuda import CudaDevice, CudaEvent

    kernel = cp.RawKernel(SLOW, "slow")
    plain, wait = CudaDevice.upload, CudaEvent.synchronize

    def upload(self, dst, src, stream):
        with stream.raw:
            kernel((1,), (1,), (np.int64(10_000_000),))
        plain(self, dst, src, stream)

    monkeypatch.setattr(CudaDevice, "upload", upload)
    monkeypatch.setattr(CudaEvent, "synchronize", lambda self: None if self.name.startswith("copied") else wait(self))
    with framepipe.open(clip, device="cuda", staging={"slots": 2, "depth": 4}) as frames:
        assert [number_of(frame.numpy()) for frame in frames] != list(range(60))


def test_a_frame_dropped_while_a_user_stream_reads_it(clip):
    """The block is used again only behind the stream on which it was dropped."""
    import cupy as cp

    kernel = cp.RawKernel(SLOW, "slow")
    user = cp.cuda.Stream(non_blocking=True)
    copies = []
    with framepipe.open(clip, device="cuda", queue=1) as frames:
        for frame in frames:
            with user:
                kernel((1,), (1,), (np.int64(5_000_000),))
                copies.append(frame.image.copy())
                del frame
        user.synchronize()
    assert [number_of(cp.asnumpy(copy)) for copy in copies] == list(range(60))


def test_release_names_the_stream(clip):
    import cupy as cp

    kernel = cp.RawKernel(SLOW, "slow")
    user = cp.cuda.Stream(non_blocking=True)
    copies = []
    with framepipe.open(clip, device="cuda", queue=1) as frames:
        for frame in frames:
            with user:
                kernel((1,), (1,), (np.int64(5_000_000),))
                copies.append(frame.image.copy())
            frame.release(user)
            assert frame.image is None
        user.synchronize()
    assert [number_of(cp.asnumpy(copy)) for copy in copies] == list(range(60))


def test_a_consumer_that_keeps_fifty_frames(clip):
    with framepipe.open(clip, device="cuda") as frames:
        held = [frame for frame, _ in zip(frames, range(50), strict=False)]
        list(frames)
    assert [number_of(frame.numpy()) for frame in held] == list(range(50))


def test_pinned_allocations_stay_constant(clip):
    counts = set()
    for loop in (1, 5):
        with Pipeline([File(uri=str(clip), loop=loop)], [_stage("rgb")], ["discard"], device="cuda") as pipeline:
            report = pipeline.run()
        counts.add(report.memory["pinned_allocations"])
    assert counts == {1}


def test_other_libraries_take_frames_without_a_copy(clip):
    torch = pytest.importorskip("torch")
    with framepipe.open(clip, device="cuda") as frames:
        frame = next(iter(frames))
        tensor = torch.from_dlpack(frame)
        assert tensor.data_ptr() == frame.image.data.ptr
        assert number_of(tensor.cpu().numpy()) == 0


@pytest.mark.parametrize("name", ["rgb", "motion", "stats", "tensor"])
def test_stages_keep_their_contract(name):
    check_stage(_stage(name))


def test_a_number_that_is_not_there():
    with pytest.raises(framepipe.FramepipeError, match="cuda:99"):
        Pipeline([FrameList(frames=pattern_frames(1))], device="cuda:99")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told_to_spawn(clip):
    with framepipe.open(clip, device="cuda") as frames:
        next(iter(frames))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with framepipe.open(clip, device="cuda") as frames:
                next(iter(frames))
            os.write(write, b"it ran")
        except BaseException as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 4096).decode()
    os.close(read)
    os.close(write)
    assert "spawn" in said


def test_a_refused_pin_falls_back_once(clip, monkeypatch):
    import cupy as cp

    calls = []

    def refuse(nbytes, flags=0):
        calls.append(nbytes)
        raise cp.cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(cp.cuda, "PinnedMemory", refuse)
    with Pipeline([clip], [_stage("rgb")], ["discard"], device="cuda") as pipeline:
        report = pipeline.run()
    assert len(calls) == 1 and report.memory["pinned_bytes"] == 0 and report.memory["pageable_bytes"] > 0
    assert any("page-lock" in warning for warning in report.warnings)


ELSEWHERE = r"""
import gc, json, sys
import cupy as cp
import pynvml
from framepipe.device.current import current
from framepipe.pipeline import Pipeline
from framepipe.registry import find

pynvml.nvmlInit()
first = pynvml.nvmlDeviceGetHandleByPciBusId(cp.cuda.runtime.deviceGetPCIBusId(0))
before = pynvml.nvmlDeviceGetMemoryInfo(first).used
with current(1):
    user = cp.cuda.Stream(non_blocking=True)
frames, places, kept = [], set(), []
stages = [find("stages", "rgb")(accuracy="exact"), find("stages", "motion")(warmup=5)]
guarded = {"device": "cuda:1", "staging": {"batch": 4}, "guard": {"interval_s": 0.05}}
with Pipeline([sys.argv[1]], stages, ["discard"], **guarded) as pipeline:
    for frame in pipeline:
        places.add(frame.image.device.id)
        frames.append((frame.index, frame.meta["motion"], int(frame.numpy().sum())))
        if frame.index % 2:
            frame.release(user)  # in a thread whose current GPU is the first one
        elif frame.index > 50:
            kept.append(frame)
    during = pynvml.nvmlDeviceGetMemoryInfo(first).used
kept.clear()
del pipeline, frame, stages
gc.collect()
after = pynvml.nvmlDeviceGetMemoryInfo(first).used
json.dump({"frames": frames, "places": list(places), "grown": [during - before, after - before]}, sys.stdout)
"""


def test_everything_is_on_the_device_that_was_asked_for(clip):
    """Also the context: that of the first GPU is never made (some hundred MB)."""
    import cupy as cp

    pytest.importorskip("pynvml")
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(clip)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["places"] == [1] and found["grown"] == [0, 0]
    with Pipeline([clip], [_stage("rgb"), _stage("motion")], ["discard"], device="cpu") as pipeline:
        wanted = [[f.index, f.meta["motion"], int(f.numpy().sum())] for f in pipeline]
    assert found["frames"] == wanted
