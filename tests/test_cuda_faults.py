"""What goes wrong on a GPU: memory that runs out, kernels that fail, a lost context, and what goes on beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import number_of, ours
from test_pipeline import balance

import framepipe
from framepipe.device.select import why_not
from framepipe.errors import DeviceError, DeviceMemoryError, StageError
from framepipe.frame import Batch
from framepipe.pipeline import Pipeline
from framepipe.registry import find
from framepipe.stage import ArraySpec, Flow, Stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
    pytest.mark.usefixtures("no_thread_left"),
]
PETABYTE = 1 << 50


@pytest.fixture
def no_thread_left():
    yield
    assert not ours()


def device() -> Any:
    from framepipe.device.cuda import CudaDevice

    return CudaDevice()


def numbers(pipeline: Any) -> list[int]:
    return [number_of(frame.numpy()) for frame in pipeline]


class OnPlanes(Stage):
    """Reads the planes; what it does is the test's."""

    reads = frozenset({"planes"})

    def __init__(self, do: Any) -> None:
        self.do = do
        self.id = "breaks"

    def launch(self, batch: Batch) -> None:
        self.do(self.device.xp, batch)


def failing(clip: Path, do: Any, *, batch: int = 4, **options: Any) -> StageError:
    pipeline = Pipeline([clip], [OnPlanes(do)], ["discard"], device="cuda", staging={"batch": batch}, **options)
    with pytest.raises(StageError) as caught, pipeline:
        pipeline.run()
    assert pipeline.report is not None
    balance(pipeline.report)
    assert caught.value.where["stage"] == "breaks"
    return caught.value


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_that_a_stage_allocates_itself(clip):
    error = failing(clip, lambda xp, batch: xp.empty(PETABYTE, np.uint8))
    assert isinstance(error.__cause__, DeviceMemoryError) and isinstance(error.__cause__, MemoryError)
    for part in ("stage 'breaks'", "in batches of 4", f"{PETABYTE} bytes wanted", "held by this pipeline",
                 "free on the device", "smaller staging batch or depth"):  # fmt: skip
        assert part in str(error)
    assert "limit" not in str(error)


class Enormous(Stage):
    """Wants an output that no GPU has room for."""

    reads = frozenset({"planes"})
    writes = frozenset({"huge"})

    def plan(self, flow: Flow) -> Flow:
        return flow.put("huge", ArraySpec((1 << 20, 1 << 30)))


def test_memory_for_the_output_of_a_stage(clip):
    with pytest.raises(StageError, match=rf"stage 'enormous' failed at frame 0 .*{PETABYTE} bytes wanted") as caught:
        with Pipeline([clip], [Enormous()], ["discard"], device="cuda", check_memory=False) as pipeline:
            pipeline.run()
    assert isinstance(caught.value.__cause__, DeviceMemoryError)


def test_a_pipeline_beside_one_without_memory_goes_on(clip):
    with framepipe.open(clip, device="cuda") as frames:
        seen = [number_of(next(frames).numpy()) for _ in range(5)]
        failing(clip, lambda xp, batch: xp.empty(PETABYTE, np.uint8))
        seen += numbers(frames)
    assert seen == list(range(60))
    with framepipe.open(clip, device="cuda") as frames:
        assert numbers(frames) == list(range(60))


def test_a_limit_ends_the_run_and_says_that_it_is_one(clip):
    error = failing(clip, lambda xp, batch: xp.empty(64 << 20, np.uint8), device_memory="32MiB")
    assert f"own limit is reached, device_memory: {32 << 20}" in str(error)
    with pytest.raises(DeviceMemoryError, match="no memory for 2 uploads in flight"):
        with Pipeline([clip], ["rgb"], ["discard"], device="cuda", device_memory=1000) as pipeline:
            pipeline.run()


def test_a_run_within_its_limit(clip):
    limit = 4 << 20
    with Pipeline([clip], ["rgb"], ["discard"], device="cuda", device_memory=limit) as pipeline:
        report = pipeline.run()
    assert report.frames["delivered"] == 60
    assert 0 < report.memory["device_bytes_peak"] <= limit


def test_what_the_pool_keeps_makes_room_before_anything_fails():
    own = device()
    own.limit_memory(4 << 20)
    stream = own.stream("compute")
    with own.current(stream):
        kept = own.empty((3 << 20,), "uint8", stream)
        del kept
        again = own.empty((2 << 20,), "uint8", stream)
        unused = own.xp.empty(1 << 20, np.uint8)
        del unused
        more = own.xp.empty((1 << 20) + 4096, np.uint8)
        with pytest.raises(DeviceMemoryError, match="limit is reached"):
            own.fixed(2 << 20)
        del again, more
    own.close()


# -- kernels that fail and leave the context as it is ----------------------------------------------------------------


def uncompilable(xp: Any, batch: Batch) -> None:
    xp.RawKernel('extern "C" __global__ void broken() { this is no CUDA }', "broken")((1,), (1,), ())


def too_large(xp: Any, batch: Batch) -> None:
    xp.RawKernel('extern "C" __global__ void idle() {}', "idle")((1,), (1 << 20,), ())


@pytest.mark.parametrize("do", [uncompilable, too_large])
def test_a_kernel_that_cannot_start_ends_its_run_alone(clip, do):
    error = failing(clip, do)
    assert "frame 0 of 'a' and 3 more" in str(error)
    assert "context is lost" not in str(error)
    with framepipe.open(clip, device="cuda") as frames:
        assert numbers(frames) == list(range(60))


# -- a lost context --------------------------------------------------------------------------------------------------

CHILD = r'''
import json, os, sys, threading
import numpy as np
from framepipe.errors import FramepipeError
from framepipe.pipeline import Pipeline
from framepipe.stage import Stage

LATE = r"""
extern "C" __global__ void bad(int* nowhere, long long cycles) {
    long long end = clock64() + cycles;
    while (clock64() < end) {}
    *nowhere = 1;
}
"""

class Breaks(Stage):
    reads = frozenset({"planes"})

    def open(self, device):
        super().open(device)
        self.kernel = device.xp.RawKernel(LATE, "bad")
        self.kernel.compile()

    def launch(self, batch):
        if batch.items[0].index >= 8:
            self.kernel((1,), (1,), (np.uint64(16), np.int64(int(sys.argv[2]))))

def attempt(stages):
    said = {"where": None, "error": None, "kind": None}
    pipeline = Pipeline([sys.argv[1]], stages, ["discard"], device="cuda", staging={"batch": 4})
    try:
        with pipeline:
            pipeline.run()
    except FramepipeError as error:
        said = {"where": error.where, "error": str(error), "kind": type(error).__name__}
    if pipeline.report is not None:
        said["frames"] = pipeline.report.frames
        said["exit"] = pipeline.report.exit
    return said

found = {"first": attempt([Breaks()]), "second": attempt(["rgb"])}
found["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("framepipe")]
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # what CUDA still has to free cannot be freed any more
'''


@pytest.mark.parametrize("cycles", [0, 50_000_000])  # found by the next launch, or by whoever waits
def test_a_lost_context_ends_the_run_and_is_told(clip, cycles):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(clip), str(cycles)],
        capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["threads"] == []
    first = found["first"]
    assert first["kind"] in ("DeviceError", "StageError")
    assert "context is lost" in first["error"] and "start a new one" in first["error"]
    assert "'breaks'" in first["error"] and first["where"]["stage"] == "breaks"
    assert first["where"]["source"] == "a" and first["where"]["index"] >= 0
    assert first["exit"] == "failed"
    frames = first["frames"]
    out = sum(frames["dropped"].values()) + sum(frames["failed"].values())
    assert frames["decoded"] == frames["delivered"] + out + sum(frames["skipped"].values())
    assert found["second"]["error"] is not None and "context is lost" in found["second"]["error"]


# -- several pipelines, and frames that outlive theirs ---------------------------------------------------------------


def test_two_pipelines_on_one_device_from_two_threads(clips):
    found: dict[str, list[int]] = {}

    def work(name: str) -> None:
        with framepipe.open(clips / name, device="cuda", staging={"batch": 3}) as frames:
            found[name] = numbers(frames)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a.mp4", "b.mp4")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {"a.mp4": list(range(60)), "b.mp4": list(range(40))}


def test_two_pipelines_taking_turns(clips):
    with framepipe.open(clips / "a.mp4", device="cuda") as one, framepipe.open(clips / "b.mp4", device="cuda") as other:
        pairs = [(number_of(a.numpy()), number_of(b.numpy())) for a, b in zip(one, other, strict=False)]
    assert pairs == [(i, i) for i in range(40)]


def test_frames_held_beyond_close_are_whole_and_give_their_memory_back(clip):
    import cupy as cp

    kernel = cp.RawKernel(
        'extern "C" __global__ void slow(long long n) { long long end = clock64() + n; while (clock64() < end) {} }',
        "slow",
    )
    with framepipe.open(clip, device="cuda") as frames:
        held = [frame for frame, _ in zip(frames, range(8), strict=False)]
    assert frames._engine is not None
    own = frames._engine.device
    assert own.ledger.bytes["device"] > 0
    with framepipe.open(clip, device="cuda") as others:  # whose memory must be none of theirs
        assert numbers(others) == list(range(60))
    assert [number_of(frame.numpy()) for frame in held] == list(range(8))
    user = cp.cuda.Stream(non_blocking=True)
    with user:
        kernel((1,), (1,), (np.int64(20_000_000),))
        copies = [frame.image.copy() for frame in held]
        held.clear()
    user.synchronize()
    assert [number_of(cp.asnumpy(copy)) for copy in copies] == list(range(8))
    assert own.ledger.bytes["device"] == 0


def test_the_last_frame_may_be_dropped_by_another_thread_after_close(clip):
    with framepipe.open(clip, device="cuda") as frames:
        held = [next(frames)]
    own = frames._engine.device
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(60)
    assert not held and own.ledger.bytes["device"] == 0


def test_the_device_cannot_be_used_once_closed():
    own = device()
    own.close()
    with pytest.raises(framepipe.FramepipeError, match="closed"):
        own.fixed(10)


# -- streams of a stage's own ----------------------------------------------------------------------------------------


class OnOwnStream(Stage):
    """Inverts the image on a stream of its own."""

    reads = frozenset({"image"})
    writes = frozenset({"image"})

    def __init__(self, *, waits: bool = True, joins: bool = True, blocks: bool = False) -> None:
        self.waits, self.joins, self.blocks = waits, joins, blocks

    def open(self, device: Any) -> None:
        super().open(device)
        self.side = device.xp.cuda.Stream(non_blocking=True)

    def launch(self, batch: Batch) -> None:
        xp = self.device.xp
        compute = xp.cuda.get_current_stream()
        if self.waits:
            self.side.wait_event(compute.record())
        with self.side:
            xp.subtract(255, batch.arrays["image"], out=batch.out["image"])
        if self.joins:
            compute.wait_event(self.side.record())
        if self.blocks:
            self.side.synchronize()


def streams_of(stage: Stage) -> None:
    from framepipe._testing_streams import check_streams
    from framepipe.chain import prepare
    from framepipe.testing import pattern_frames

    check_streams(prepare([find("stages", "rgb")(accuracy="exact"), stage], (), find), pattern_frames(4), "cuda", 0)


def test_a_stage_that_joins_its_own_stream_is_right():
    streams_of(OnOwnStream())


@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"joins": False}, "batch.stream must wait for an event recorded behind its work"),
        ({"waits": False}, "must wait for an event recorded on batch.stream"),
        ({"blocks": True}, "waits for the device in launch"),
    ],
)
def test_a_stage_without_an_edge_is_found_every_time(broken, told, attempt):
    with pytest.raises(AssertionError, match=told):
        streams_of(OnOwnStream(**broken))


@pytest.mark.parametrize("name", ["rgb", "motion", "stats", "tensor"])
def test_the_stages_keep_their_contract_on_a_gpu(name):
    from framepipe.testing import check_stage

    options: dict[str, dict[str, Any]] = {
        "rgb": {"accuracy": "exact"}, "motion": {"warmup": 2},
        "tensor": {"width": 32, "height": 32, "mode": "letterbox", "accuracy": "exact"},
    }  # fmt: skip
    made = [check_stage(find("stages", name)(**options.get(name, {})), device=kind) for kind in ("cpu", "cuda")]
    for cpu, cuda in zip(*made, strict=True):
        assert cpu["meta"] == cuda["meta"]
        assert cpu["image"] is None or np.array_equal(cpu["image"], cuda["image"])
        for key, array in cpu["tensors"].items():
            assert np.array_equal(array, cuda["tensors"][key])


def test_device_errors_are_of_the_family():
    assert issubclass(DeviceMemoryError, DeviceError)
