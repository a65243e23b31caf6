"""What a run on a GPU tells of itself, and what it gets done before its first frame."""

from __future__ import annotations

import pytest

from framepipe.device.select import why_not
from framepipe.frame import FrameSpec
from framepipe.pipeline import Pipeline
from framepipe.report import Statistics
from framepipe.sources.synthetic import Synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]


def clip(frames: int = 200) -> Synthetic:
    return Synthetic(width=320, height=240, shapes=2, frames=frames)


def test_live_statistics_and_the_report_tell_of_memory_and_uploads():
    seen: list[Statistics] = []
    with Pipeline([clip()], ["rgb"], [lambda frame: seen.append(pipeline.statistics())], device="cuda") as pipeline:
        report = pipeline.run()
    assert len(seen) == 200
    for now in seen:
        assert now.pinned_bytes >= report.staging["slots"] * 320 * 240 * 3 // 2
        assert now.device_bytes > 0
        assert 0 < now.device_bytes_peak <= report.memory["device_bytes_peak"]
        assert 0 < now.vram_free_bytes < report.memory["vram"][0]["total"]
    assert any(now.upload_bytes_per_s for now in seen)
    assert report.upload["bytes"] == 200 * FrameSpec(320, 240, "yuv420p").nbytes  # rows of a slot are aligned
    reading = report.memory["vram"][0]
    assert 0 < reading["free_least"] <= reading["free_start"] and reading["free_end"] == reading["free"] > 0


def test_stages_have_times_of_the_device():
    with Pipeline([clip()], ["rgb", "stats"], ["discard"], device="cuda") as pipeline:
        stages = pipeline.run().to_dict()["stages"]
    for times in stages.values():
        assert times["count"] == 200 and times["device"]["count"] >= 1
        assert 0 < times["device"]["p50_ms"] <= times["device"]["max_ms"]


def test_every_kernel_is_compiled_before_the_first_frame():
    from framepipe.device.cuda import CudaDevice
    from framepipe.kernels import cuda as kernels

    told: list[str] = []
    device = CudaDevice()
    try:
        device.prepare(told.append)
        device.prepare(told.append)
    finally:
        device.close()
    assert len(told) <= 1 and all("compiling" in text for text in told)
    assert all(device.number in program._modules for program in kernels._PROGRAMS)


def test_what_cannot_be_compiled_fails_where_it_is_launched(monkeypatch):
    from framepipe.errors import DeviceError
    from framepipe.kernels import cuda as kernels

    def refuse() -> float:
        raise DeviceError("no compiler")

    monkeypatch.setattr(kernels, "prepare", refuse)
    with Pipeline([clip(2)], [], ["discard"], device="cuda") as pipeline:
        assert pipeline.run().exit == "complete"


def test_ranges_are_marked_with_the_real_nvtx():
    with Pipeline([clip(20)], ["rgb", "stats"], ["discard"], device="cuda", nvtx=True) as pipeline:
        assert pipeline.run().frames["delivered"] == 20
