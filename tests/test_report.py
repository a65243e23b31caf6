"""What a run tells of itself: the bottleneck, live statistics of a device, times of stages on the device."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from framepipe import report as reports
from framepipe.device.base import patiently
from framepipe.device.cpu import CpuDevice
from framepipe.device.select import Choice
from framepipe.device.simulated import SimulatedDevice
from framepipe.pipeline import Pipeline
from framepipe.report import Statistics
from framepipe.sources.synthetic import Synthetic
from framepipe.summary import Snapshots

# -- the bottleneck --

NAMES = ("decoder", "filler", "runner", "device", "sink")
# Waits of decoder, filler, runner, device and sink in a run of 10 s; how long batches in flight kept another one back
# and how long the runner worked (None where host and device are one).
CASES = {
    "nobody waits much": ((0, 2, 3, 3, 1), None, None, None),
    "nothing is known": ((None, None, None, None, None), None, None, None),
    # On the CPU "device" is the time in the stages, in the runner itself.
    "cpu, slow decoding": ((0, 9, 8, 1, 0), None, None, "decode"),
    "cpu, slow decoding and stages that take their time too": ((0, 8, 3, 6, 0), None, None, "decode"),
    "cpu, slow copying": ((4, 1, 8, 1, 0), None, None, "staging"),
    "cpu, slow stages": ((15, 1, 1, 8, 0), None, None, "device"),
    "cpu, slow sinks": ((15, 0, 1, 2, 7), None, None, "sink"),
    # On a GPU "device" is how long the sink thread waited, so also the way of a lonely batch through the device.
    "gpu, slow decoding": ((0, 9, 8, 2, 0), 0, 1, "decode"),
    "gpu, slow decoding and each batch waited for": ((0, 8, 7, 7, 0), 0.1, 3, "decode"),
    "gpu, slow copying": ((5, 1, 8, 1, 0), 0, 1, "staging"),
    "gpu, slow copying and each batch waited for": ((5, 1, 7, 7, 0), 0.1, 2, "staging"),
    "gpu, slow kernels": ((20, 0, 0.5, 9, 0), 8, 1, "device"),
    "gpu, slow kernels and many launches": ((20, 0, 0.5, 8, 0), 4, 5.5, "device"),
    "gpu, many launches": ((20, 0.5, 1, 1, 0), 0.2, 8, "launch"),
    "gpu, many launches and each batch waited for": ((20, 0.5, 1, 6, 0), 0.2, 8, "launch"),
    "gpu, slow sinks": ((20, 0, 0.5, 0.2, 8), 8.2, 1, "sink"),
    "gpu, nobody waits much": ((0, 3, 4, 4, 0), 1, 4, None),
    "gpu, each batch waited for but nothing queued": ((0, 4, 4, 7, 0), 0.5, 5, None),
}


@pytest.mark.parametrize(("waits", "held", "busy", "expected"), CASES.values(), ids=CASES.keys())
def test_the_bottleneck_is_what_the_others_wait_for(waits, held, busy, expected):
    waits_s = dict(zip(NAMES, waits, strict=True))
    assert reports.bottleneck(waits_s, 10.0, held_s=held, busy_s=busy) == expected


def test_a_run_of_no_time_has_no_bottleneck():
    assert reports.bottleneck(dict.fromkeys(NAMES, 1.0), 0.0) is None
    assert reports.bottleneck({}, 1.0) is None


# -- statistics --


class Metered(SimulatedDevice):
    """Has readings of its memory, as a GPU has."""

    def vram(self) -> list[dict[str, Any]]:
        return [{"source": "nothing", "free": None}, {"source": "test", "free": 12_345, "free_start": 20_000}]


def use(monkeypatch: pytest.MonkeyPatch, device: Any) -> Any:
    monkeypatch.setattr(Choice, "make", lambda self: device)
    return device


def clip(frames: int = 12) -> Synthetic:
    return Synthetic(width=64, height=48, shapes=1, frames=frames)


def test_live_statistics_tell_of_the_device(monkeypatch):
    device = use(monkeypatch, Metered())
    seen: list[Statistics] = []
    with Pipeline(
        [clip()], ["rgb"], [lambda frame: seen.append(pipeline.statistics())], device="simulated",
        check_memory=False,  # it says that hardly any is free
    ) as pipeline:  # fmt: skip
        before = pipeline.statistics()
        report = pipeline.run()
    assert (before.pinned_bytes, before.device_bytes, before.vram_free_bytes, before.upload_bytes_per_s) == (
        None, None, None, None,
    )  # fmt: skip
    assert len(seen) == 12
    for now in seen:
        assert now.pinned_bytes >= report.staging["slots"] * 64 * 48 * 3 // 2
        assert 0 < now.device_bytes <= now.device_bytes_peak <= report.memory["device_bytes_peak"]
        assert now.vram_free_bytes == 12_345
    assert any(now.upload_bytes_per_s for now in seen)
    assert device.ledger.bytes["device"] == 0


def test_on_the_cpu_there_is_nothing_to_tell_of_a_device():
    seen: list[Statistics] = []
    with Pipeline([clip(3)], ["rgb"], [lambda frame: seen.append(pipeline.statistics())], device="cpu") as pipeline:
        pipeline.run()
    assert {
        (s.pinned_bytes, s.device_bytes, s.device_bytes_peak, s.vram_free_bytes, s.upload_bytes_per_s) for s in seen
    } == {(None,) * 5}


def test_the_rate_of_uploads_is_since_the_snapshot_before():
    def engine(seconds: float, uploaded: int) -> Any:
        finished = threading.Event()
        finished.set()  # its time is what it says
        runner = SimpleNamespace(uploaded=uploaded)
        return SimpleNamespace(device=SimulatedDevice(), seconds=seconds, finished=finished, runner=runner)

    snapshots = Snapshots()
    steps = ((1.0, 1000), (3.0, 7000), (3.0, 7000), (4.0, 7000))
    rates = [snapshots.take(engine(*step), []).upload_bytes_per_s for step in steps]
    assert rates == [1000.0, 3000.0, None, 0.0]


# -- the times of stages --


class TimedTwice(SimulatedDevice):
    """Measures a quarter of a second for the first two stages that it is asked to time."""

    left = 2

    def timer(self) -> Any:
        if not self.left:
            return None
        self.left -= 1
        return SimpleNamespace(start=lambda stream: None, stop=lambda stream: None, seconds=lambda: 0.25)


def test_stages_have_times_of_the_host_and_of_the_device_where_there_are_any(monkeypatch):
    use(monkeypatch, TimedTwice())
    with Pipeline([clip(70)], ["rgb", "stats", "tensor"], ["discard"], device="simulated") as pipeline:
        stages = pipeline.run().to_dict()["stages"]
    assert {times["count"] for times in stages.values()} == {70}
    assert all(times["p50_ms"] is not None for times in stages.values())
    quarter = {"count": 1, "p50_ms": 250.0, "p95_ms": 250.0, "p99_ms": 250.0, "max_ms": 250.0}
    assert [stages[name]["device"] for name in ("rgb", "stats", "tensor")] == [quarter, quarter, None]


# -- getting a device ready --


def test_long_work_is_told_once_by_the_calling_thread():
    told: list[tuple[str, threading.Thread]] = []
    go_on = threading.Event()

    def tell(text: str) -> None:
        told.append((text, threading.current_thread()))
        go_on.set()

    done: list[bool] = []
    patiently(lambda: done.append(go_on.wait(15)), tell, "long", after_s=0.0)
    assert [text for text, _ in told] == ["long"]
    assert done == [True]
    patiently(lambda: None, tell, "short", after_s=15.0)
    assert len(told) == 1


def test_work_that_fails_fails_in_the_calling_thread():
    def fail() -> None:
        raise OSError("no cache")

    with pytest.raises(OSError, match="no cache"):
        patiently(fail, lambda text: None, "long")


def test_work_has_ended_even_if_telling_fails():
    go_on = threading.Event()
    ended: list[bool] = []

    def tell(text: str) -> None:
        go_on.set()
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        patiently(lambda: ended.append(go_on.wait(15)), tell, "long", after_s=0.0)
    assert ended == [True]


class Compiling(CpuDevice):
    """Says that it compiles, before anything else is made."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[str] = []

    def stream(self, name: str) -> Any:
        self.streams.append(name)
        return super().stream(name)

    def prepare(self, tell: Any) -> None:
        assert not self.streams
        tell("compiling")


def test_a_pipeline_gets_its_device_ready_and_tells_whoever_wants_to_hear(monkeypatch, caplog):
    use(monkeypatch, Compiling())
    told: list[str] = []
    with Pipeline([clip(2)], [], ["discard"]) as pipeline:
        pipeline.run(tell=told.append)
    assert (told, caplog.messages) == (["compiling"], [])


def test_without_anybody_the_logger_is_told(monkeypatch, caplog):
    use(monkeypatch, Compiling())
    with caplog.at_level("INFO", logger="framepipe"), Pipeline([clip(2)], ["rgb"]) as pipeline:
        assert len(list(pipeline)) == 2
    assert caplog.record_tuples == [("framepipe", 20, "compiling")]
