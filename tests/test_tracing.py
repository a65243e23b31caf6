"""Ranges for a profiler: none where nobody asked, balanced on every thread where somebody did."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from framepipe import tracing
from framepipe.errors import ConfigError, StageError
from framepipe.frame import Batch
from framepipe.pipeline import Pipeline
from framepipe.sources.synthetic import Synthetic
from framepipe.stages.stats import Stats


@dataclass
class FakeNvtx:
    """Remembers what was pushed, and fails where a thread pops what it has not pushed."""

    available: bool = True
    seen: list[str] = field(default_factory=list)
    open: dict[int, list[str]] = field(default_factory=dict)

    def RangePush(self, message: str, id_color: int = -1) -> None:
        self.seen.append(message)
        self.open.setdefault(threading.get_ident(), []).append(message)

    def RangePop(self) -> None:
        self.open[threading.get_ident()].pop()


@pytest.fixture
def nvtx(monkeypatch):
    """A CuPy that has nothing but NVTX."""
    fake = FakeNvtx()
    cuda: Any = ModuleType("cupy.cuda")
    cuda.nvtx = fake
    cupy: Any = ModuleType("cupy")
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return fake


def clip(frames: int = 6) -> Synthetic:
    return Synthetic(width=64, height=48, shapes=1, frames=frames)


def test_where_nothing_is_marked_a_function_stays_what_it_is():
    def work() -> int:
        return 3

    assert tracing.OFF.wrap("work", work) is work
    with tracing.OFF.range("outer"), tracing.OFF.range("inner"):
        pass


def test_ranges_are_nested_and_end_with_an_error(nvtx):
    tracer = tracing.nvtx()

    def divide(a: int, b: int) -> float:
        assert nvtx.open == {threading.get_ident(): ["outer", "divide"]}
        return a / b

    traced = tracer.wrap("divide", divide)
    assert (traced.__name__, traced.__wrapped__) == ("divide", divide)
    with tracer.range("outer"):
        assert traced(6, b=2) == 3.0
        with pytest.raises(ZeroDivisionError):
            traced(1, 0)
    assert nvtx.seen == ["outer", "divide", "divide"]
    assert nvtx.open == {threading.get_ident(): []}


def test_without_cupy_it_is_a_mistake(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ConfigError, match=r"need CuPy.*cuda12"):
        tracing.nvtx()
    with pytest.raises(ConfigError, match="need CuPy"):
        Pipeline([clip()], device="cpu", nvtx=True)


def test_a_cupy_without_nvtx_is_a_mistake(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvtx=FakeNvtx(available=False)))
    with pytest.raises(ConfigError, match="built with NVTX"):
        tracing.nvtx()


def test_a_pipeline_marks_all_that_its_threads_do(nvtx):
    sinks = ["discard", lambda frame: None]
    with Pipeline([clip()], ["rgb", "stats"], sinks, device="simulated", nvtx=True) as pipeline:
        pipeline.run()
    counts = Counter(nvtx.seen)
    decode, back = counts.pop("framepipe.decode"), counts.pop("framepipe.read-back")
    assert decode >= 1
    assert back >= 6
    assert counts == dict.fromkeys(
        [
            "framepipe.fill",
            "framepipe.upload",
            "framepipe.launch rgb",
            "framepipe.launch stats",
            "framepipe.collect stats",
            "framepipe.write discard",
            "framepipe.write callback",
        ],
        6,
    )
    assert all(not ranges for ranges in nvtx.open.values())


def test_on_the_cpu_a_pipeline_marks_what_there_is(nvtx):
    with Pipeline([clip()], ["stats"], ["discard"], device="cpu", nvtx=True) as pipeline:
        pipeline.run()
    assert set(nvtx.seen) == {
        "framepipe.decode", "framepipe.fill", "framepipe.upload", "framepipe.launch rgb", "framepipe.launch stats",
        "framepipe.collect stats", "framepipe.write discard",
    }  # fmt: skip


def test_an_error_leaves_no_range_open(nvtx):
    class Failing(Stats):
        def launch(self, batch: Batch) -> None:
            raise RuntimeError("no")

    stage = Failing()
    stage.id = "failing"
    with pytest.raises(StageError):
        with Pipeline([clip()], [stage], ["discard"], device="cpu", nvtx=True) as pipeline:
            pipeline.run()
    assert "framepipe.launch failing" in nvtx.seen
    assert all(not ranges for ranges in nvtx.open.values())


def test_nobody_who_did_not_ask_is_traced(nvtx):
    with Pipeline([clip(2)], ["stats"], ["discard"], device="cpu") as pipeline:
        pipeline.run()
    assert nvtx.seen == []
