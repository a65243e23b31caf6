"""The plan of a pipeline's memory on a GPU: what a run takes there, what is free, and who else has it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from test_plan import PIPELINES, Hold, source

from framepipe import Pipeline, budget, cli
from framepipe import plan as planning
from framepipe.device.select import why_not
from framepipe.errors import ConfigError
from framepipe.planned import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}")]
SIZE = {"width": 640, "height": 360}
HOG = """
import sys
import cupy
memory = cupy.cuda.alloc(int(sys.argv[1]))
cupy.cuda.runtime.memset(memory.ptr, 1, int(sys.argv[1]))
cupy.cuda.runtime.deviceSynchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def free(plan: Plan, source: str) -> int | None:
    rows = [limit for limit in plan.limits if limit.name == "video memory" and limit.source == source]
    return rows[0].free if rows else None


def most_taken(plan: Plan) -> int:
    """A small block of the cold tier may have to be made larger to be aligned."""
    cold = sum(need.alive for need in plan.needs if need.tier == "cold")
    return plan.nbytes("pinned") + 65536 * cold


@pytest.mark.parametrize(
    ("strategy", "batch", "depth"), [("pooled", 1, 2), ("pooled", 4, 3), ("mapped", 2, 2), ("direct", 2, 1)]
)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_takes_what_was_planned(name, strategy, batch, depth):
    make, reads = PIPELINES[name]
    staging = {"strategy": strategy, "batch": batch, "depth": depth, "batch_timeout_s": 10}
    frames = {"sources": [source(83, **SIZE)], "device": "cuda", "staging": staging, "threads": 1}
    plan = planning.plan(stages=make(), sinks=[Hold(reads)], **frames)
    sink = Hold(reads)
    pipeline = Pipeline(stages=make(), sinks=[sink], **frames)
    sink.until = lambda: pipeline._engine.runner.in_flight.qsize() > depth
    memory = pipeline.run().memory
    pinned = [need for need in plan.needs if need.kind == "pinned"]
    assert memory["pinned_bytes"] == sum(need.nbytes for need in pinned)
    assert memory["pinned_allocations"] == sum(need.blocks or 0 for need in pinned)
    assert plan.nbytes("pinned") <= memory["pinned_bytes_taken"] <= most_taken(plan)
    assert 0.9 * plan.nbytes("device") <= memory["device_bytes_peak"] <= plan.nbytes("device")


@pytest.mark.parametrize("strategy", ["per_frame", "registered_per_frame", "registered", "write_combined", "cupy_pool"])
def test_other_strategies_page_lock_what_was_planned(strategy):
    frames = {"sources": [source(80, **SIZE)], "device": "cuda", "staging": {"strategy": strategy}, "threads": 1}
    plan = planning.plan(sinks=[Hold({"image"})], **frames)
    memory = Pipeline(sinks=[Hold({"image"})], **frames).run().memory
    assert memory["pinned_bytes"] == sum(need.nbytes for need in plan.needs if need.kind == "pinned")
    assert plan.nbytes("pinned") <= memory["pinned_bytes_taken"] <= most_taken(plan)


def test_what_is_free_is_measured_now():
    plan = planning.plan([source()], device="cuda")
    (memory,) = (limit for limit in plan.limits if limit.source == "cudaMemGetInfo")
    assert 0 < memory.free <= memory.total
    assert (memory.ground, memory.hard) == ("measured now", True)
    nvml = [limit for limit in plan.limits if limit.source == "NVML"]
    assert nvml, "a row of its own, with a number or the reason"
    assert nvml[0].free is not None or nvml[0].reason


def test_a_hog_in_another_process_is_seen():
    before = planning.plan([source()], device="cuda")
    nbytes = (free(before, "cudaMemGetInfo") or 0) // 4
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as hog:
        assert hog.stdout.readline() == "ready\n"
        during = planning.plan([source()], device="cuda")
        hog.stdin.close()
        assert hog.wait(60) == 0
    for name in ("cudaMemGetInfo", "NVML"):
        if free(before, name) is not None:
            assert free(before, name) - free(during, name) >= 0.95 * nbytes, name


def test_what_does_not_fit_into_video_memory_is_not_begun(monkeypatch, capsys):
    limits = planning.plan([source()], device="cuda").limits
    total = next(limit.total for limit in limits if limit.source == "cudaMemGetInfo")
    large = source(8, width=3840, height=2160)
    batch = total // (2 * large.spec.nbytes) + 1  # two halves are more than there is
    options: dict[str, Any] = {"device": "cuda", "staging": {"strategy": "direct", "batch": batch}, "threads": 1}
    plan = planning.plan([large], [], ["discard"], **options)
    assert "video memory" in [limit.name for limit in plan.exceeded]
    assert budget.total(plan.needs, "device") > total
    with pytest.raises(ConfigError, match=r"of video memory needed, .* free \(cudaMemGetInfo\)"):
        Pipeline([large], [], ["discard"], **options).run()


def test_the_command_on_a_gpu(capsys):
    assert cli.main(["plan", "motion", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "device     cuda, " in out
    assert "measured now (cudaMemGetInfo)" in out
    assert out.splitlines()[-1] == "fits"
