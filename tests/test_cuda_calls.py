"""What a run asks of CUDA between its first batches and its last: no hidden wait, and no copy of pageable memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ours

from framepipe.device.select import why_not
from framepipe.pipeline import Pipeline
from framepipe.registry import find
from framepipe.sinks.callback import Callback
from framepipe.sinks.jsonl import Jsonl
from framepipe.sources.file import File

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cuCtxSynchronize", "cuStreamSynchronize")
"""The sink thread's cudaEventSynchronize is the one wait there is."""
ALLOCATES = ("cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister", "cudaFree", "cuMemHostAlloc")
COUNT = 300


def pipeline(kind: str, clip: Path, folder: Path, seen: list[Any]) -> Pipeline:
    """``kind`` of a pipeline over ``COUNT`` pictures."""
    stages: list[Any] = {
        "motion": [find("stages", "motion")(warmup=5)],
        "rgb": [find("stages", "rgb")()],
        "tensor": [find("stages", "tensor")(width=64, height=64)],
    }[kind]
    sinks: list[Any] = {
        "motion": [Jsonl(path=str(folder / "out.jsonl"))],
        "rgb": [Callback(function=lambda frame: seen.append(int(frame.image[0, 0, 0])), reads={"image"})],
        "tensor": ["discard"],
    }[kind]
    return Pipeline([File(uri=str(clip), loop=COUNT // 60)], stages, sinks, device="cuda", staging={"batch": 2})


@pytest.mark.parametrize("kind", ["motion", "rgb", "tensor"])
def test_nothing_of_ours_waits_or_copies_by_the_back_door(kind, clip, tmp_path, monkeypatch):
    import cupy as cp

    calls: list[str] = []

    def watched(name: str) -> Any:
        plain = getattr(cp.cuda.runtime, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return plain(*args)

        return call

    for name in ("memcpy", "deviceSynchronize", "streamSynchronize", "memcpyAsync"):
        monkeypatch.setattr(cp.cuda.runtime, name, watched(name))
    with pipeline(kind, clip, tmp_path, []) as run:
        report = run.run()
    assert report.frames["delivered"] == COUNT
    assert set(calls) == {"memcpyAsync"}
    assert len(calls) >= COUNT // 2  # an upload a batch: the watch was on
    assert not ours()


@pytest.mark.parametrize("kind", ["motion", "rgb", "tensor"])
def test_the_calls_and_copies_that_cuda_saw(kind, clip, tmp_path):
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch here has no CUDA")
    torch.cuda.init()
    seen: list[Any] = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        with pipeline(kind, clip, tmp_path, seen) as run:
            run.run()
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    check_events([event for event in events if event.get("ph") == "X"], read_back=kind != "tensor")


def check_events(events: list[dict[str, Any]], *, read_back: bool) -> None:
    """Look at what lies between an early upload, behind which all memory is there, and the last one."""
    copies = sorted((e for e in events if e.get("cat") == "gpu_memcpy"), key=lambda e: e["ts"])
    uploads = [e for e in copies if "HtoD" in e["name"]]
    assert len(uploads) >= COUNT // 2, "the profiler saw no uploads"
    first, last = uploads[len(uploads) // 5]["ts"], uploads[-1]["ts"]
    copies = [e for e in copies if first <= e["ts"] <= last]
    for event in copies:
        expected = "(Device -> Pinned)" if "DtoH" in event["name"] else "(Pinned -> Device)"
        assert "DtoD" in event["name"] or expected in event["name"], event["name"]
    back = sum("DtoH" in event["name"] for event in copies)
    assert (back > COUNT // 10) == read_back
    calls = [e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and first <= e["ts"] <= last]
    assert "cudaMemcpyAsync" in calls or "cuMemcpyHtoDAsync_v2" in calls, "the profiler saw no calls"
    blocking = [name for name in calls if name.startswith(("cudaMemcpy", "cuMemcpy")) and "Async" not in name]
    assert not blocking
    assert not [name for name in calls if name.startswith(WAITS)]
    assert not [name for name in calls if name.startswith(ALLOCATES)]
