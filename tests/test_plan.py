"""The plan of a pipeline's memory: it says beforehand what a run's report says afterwards."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from framepipe import Pipeline, budget, cli, fitting, limits, parts
from framepipe import plan as planning
from framepipe.device.cpu import CpuDevice
from framepipe.device.simulated import SimulatedDevice
from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec
from framepipe.kernels import cuda
from framepipe.limits import Limit
from framepipe.memory import power_of_two
from framepipe.planned import Plan, RulesOfThumb
from framepipe.sink import Sink
from framepipe.sources.file import File
from framepipe.sources.synthetic import Synthetic
from framepipe.stager import StagingOptions
from framepipe.stages.crop import Crop
from framepipe.stages.draw import Draw
from framepipe.stages.motion import Motion
from framepipe.stages.resize import Resize
from framepipe.stages.rgb import Rgb
from framepipe.stages.stats import Stats
from framepipe.stages.tensor import Tensor
from framepipe.telemetry.base import Missing


class Hold(Sink):
    """Keeps the first frame until as much is in flight as there can be."""

    def __init__(self, names: set[str], host: bool = True) -> None:
        self.reads, self.host = frozenset(names), host
        self.until: Any = None

    def write(self, frame: Any) -> None:
        until, self.until = self.until, None
        deadline = time.monotonic() + 10
        while until is not None and not until() and time.monotonic() < deadline:
            threading.Event().wait(0.002)


class Gated(Synthetic):
    """Gives its first pictures, and the rest once its gate is open."""

    first = 0
    gate: threading.Event
    may_stall = True

    def open(self, stopping: Any) -> Any:
        stream = super().open(stopping)
        plain = stream.frames

        def frames() -> Any:
            for number, frame in enumerate(plain()):
                if number == self.first:
                    self.gate.wait(10)
                yield frame

        stream.frames = frames
        return stream


def source(frames: int = 60, width: int = 96, height: int = 64, **more: Any) -> Synthetic:
    return Synthetic(width=width, height=height, frames=frames, **more)


PIPELINES: dict[str, tuple[Any, set[str]]] = {
    "picture": (list, {"image"}),
    "tensor": (lambda: [Tensor(width=40, height=40)], {"input"}),
    "found": (lambda: [Motion(), Rgb(), Draw()], {"image", "meta"}),
    "numbers": (lambda: [Stats(of="luma")], {"meta"}),
    "chain": (lambda: [Rgb(accuracy="exact"), Resize(width=48), Stats()], {"image", "meta"}),
}


def planned(stages: Any, sinks: Any, sources: Any = None, **options: Any) -> Plan:
    return planning.plan(sources or [source()], stages, sinks, **{"device": "simulated", **options})


def device_bytes(plan: Plan) -> int:
    """What the simulated device counts: states are the stages' own arrays there, and nothing is rounded."""
    return sum(need.nbytes for need in plan.needs if need.kind == "device" and not need.owner.startswith("state"))


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    ("strategy", "batch", "depth"),
    [("pooled", 1, 2), ("pooled", 4, 1), ("pooled", 3, 3), ("mapped", 2, 2), ("pageable", 2, 2), ("direct", 2, 2)],
)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_takes_what_was_planned(name, strategy, batch, depth, host):
    make, reads = PIPELINES[name]
    staging = {"strategy": strategy, "batch": batch, "depth": depth, "batch_timeout_s": 10}
    plan = planned(make(), [Hold(reads, host)], staging=staging, threads=1)
    sink, most = Hold(reads, host), device_bytes(plan)
    # As many pictures as can be in flight, and the batch that the sink keeps: who fills a slot once more waits for what
    # was in it, and so may have the simulated device run what would still be in flight.
    gated = Gated(width=96, height=64, frames=60)
    gated.first, gated.gate = (depth + 2) * batch, threading.Event()
    pipeline = Pipeline([gated], make(), [sink], device="simulated", staging=staging, threads=1)

    def every_batch_that_may_be() -> bool:
        if pipeline._engine.runner.in_flight.qsize() <= depth:
            return False
        gated.gate.set()
        return True

    sink.until = every_batch_that_may_be
    memory = pipeline.run().memory
    assert memory["pinned_bytes"] == sum(need.nbytes for need in plan.needs if need.kind == "pinned")
    assert memory["pinned_bytes_taken"] == plan.nbytes("pinned")
    assert memory["pinned_allocations"] == sum(need.blocks or 0 for need in plan.needs if need.kind == "pinned")
    owners = {row["owner"]: row["peak_bytes"] for row in memory["pins"]}
    assert owners == {need.owner: need.nbytes for need in plan.needs if need.kind == "pinned"}
    for tier in ("hot", "cold"):
        assert memory["tiers"][tier]["peak_bytes"] == sum(need.nbytes for need in plan.needs if need.tier == tier)
    assert memory["pageable_bytes"] == plan.nbytes("pageable")
    assert 0.95 * most <= memory["device_bytes_peak"] <= most
    assert pipeline.report.staging["slots"] == plan.staging["slots"]


@pytest.mark.parametrize("strategy", ["per_frame", "registered_per_frame", "registered", "write_combined"])
def test_other_strategies_page_lock_what_was_planned(strategy):
    staging = {"strategy": strategy, "batch": 2, "batch_timeout_s": 10}
    plan = planned([], [Hold({"image"})], staging=staging, threads=1)
    with Pipeline([source()], [], [Hold({"image"})], device="simulated", staging=staging, threads=1) as pipeline:
        memory = pipeline.run().memory
    assert memory["pinned_bytes"] == sum(need.nbytes for need in plan.needs if need.kind == "pinned")
    assert memory["pinned_bytes_taken"] == plan.nbytes("pinned")
    once = sum(need.blocks or 0 for need in plan.needs if need.kind == "pinned")
    for_batches = [need for need in plan.needs if need.kind == "pinned" and need.blocks is None]
    assert memory["pinned_allocations"] == once + 30 * len(for_batches)
    assert bool(for_batches) == strategy.endswith("per_frame")


@pytest.mark.parametrize("strategy", ["pooled", "locked", "locked_per_frame", "direct"])
def test_on_the_cpu_the_ring_is_what_was_planned(strategy):
    staging = {"strategy": strategy, "batch": 2, "batch_timeout_s": 10}
    plan = planned([], [Hold(set())], device="cpu", staging=staging, threads=1)
    with Pipeline([source()], [], [Hold(set())], device="cpu", staging=staging, threads=1) as pipeline:
        report = pipeline.run()
    if any("refused" in warning for warning in report.warnings):
        pytest.skip("this system locks too little memory")
    assert report.memory["pinned_bytes_taken"] == plan.nbytes("pinned")
    assert report.memory["pageable_bytes"] == plan.nbytes("pageable")
    assert report.staging["slots"] == plan.staging["slots"]


@pytest.mark.parametrize(("strategy", "flights"), [("pooled", 2), ("direct", 16)])
def test_what_is_made_on_the_cpu_is_bounded(strategy, flights):
    stages, reads = PIPELINES["chain"]
    staging = {"strategy": strategy, "batch": 2, "depth": 1, "batch_timeout_s": 10}
    plan = planned(stages(), [Hold(reads)], device="cpu", staging=staging, threads=1)
    sink = Hold(reads)
    with Pipeline([source()], stages(), [sink], device="cpu", staging=staging, threads=1) as pipeline:
        sink.until = lambda: pipeline._engine.runner.in_flight.qsize() >= flights
        used = pipeline.run().memory["pageable_bytes"]
    assert 0.95 * plan.nbytes("pageable") <= used <= plan.nbytes("pageable")


def test_sources_of_several_sizes_are_reckoned_with_together_and_told_apart():
    sources = [source(40, name="small"), source(40, width=160, height=96, name="large")]
    plan = planned([], [Hold({"image"})], sources, staging={"batch": 2}, threads=1)
    with Pipeline(sources, [], [Hold({"image"})], device="simulated", staging={"batch": 2}, threads=1) as pipeline:
        memory = pipeline.run().memory
    backs = [need for need in plan.needs if need.tier == "cold"]
    assert not any(need.exact for need in backs), "those of one size may be given back when another one comes"
    largest = max(need.nbytes for need in backs)
    assert plan.nbytes("pinned") - sum(need.nbytes for need in backs) + largest <= memory["pinned_bytes"]
    assert memory["pinned_bytes"] <= plan.nbytes("pinned")
    assert memory["device_bytes_peak"] <= plan.nbytes("device")
    small, large = plan.sources
    assert small.alone["pinned"] < large.alone["pinned"] < plan.nbytes("pinned")
    owners = {need.owner for need in plan.needs}
    assert {"read-back of image (96x64 yuv420p)", "read-back of image (160x96 yuv420p)"} <= owners


def test_sources_that_are_alike_but_for_their_colours_share_memory():
    sources = [source(40, name=matrix, matrix=matrix) for matrix in ("bt601", "bt709", "bt2020")]
    for stages in (list, lambda: ["motion", "rgb"]):
        plan = planned(stages(), [Hold({"image"})], sources, staging={"batch": 2}, threads=1)
        with Pipeline(
            sources, stages(), [Hold({"image"})], device="simulated", staging={"batch": 2}, threads=1
        ) as pipeline:
            memory = pipeline.run().memory
        assert len({found.spec for found in plan.sources}) == 3
        one = planned(stages(), [Hold({"image"})], sources[:1], staging={"batch": 2}, threads=1)
        assert memory["pinned_bytes"] == plan.nbytes("pinned") == one.nbytes("pinned")
        assert memory["device_bytes_peak"] <= plan.nbytes("device")
        states = sum(need.weight for need in plan.needs if need.owner.startswith("state of motion"))
        assert states == 3 * sum(need.weight for need in one.needs if need.owner.startswith("state of motion"))
        assert plan.nbytes("device") - states * 2 / 3 == one.nbytes("device")
        assert any("and 2 like it" in need.owner for need in plan.needs)


def test_partial_batches_take_no_more_than_whole_ones():
    sizes = {"batch": 4, "depth": 1, "batch_timeout_s": 10}
    # Where pictures of another size come in between, what there is of a batch goes on.
    sources = [
        source(7, name="a"),
        source(9, width=160, height=96, name="b"),
        source(10, width=48, height=32, name="c"),
    ]
    plan = planned(["rgb"], [Hold({"image"}, False)], sources, staging=sizes, threads=1)
    with Pipeline(sources, ["rgb"], [Hold({"image"}, False)], device="simulated", staging=sizes, threads=1) as pipeline:
        memory = pipeline.run().memory
        made = pipeline._engine.device._pool.made
    assert memory["device_bytes_peak"] <= plan.nbytes("device")
    blocks = sum(int(need.what.split(" ")[0]) for need in plan.needs if need.owner.startswith("stage rgb"))
    assert made <= blocks


def test_what_small_pictures_got_is_reckoned_with_for_large_ones():
    small, large = source(40, width=64, height=48, name="small"), source(4, width=3840, height=2160, name="large")
    assert budget.affordable(large.spec.nbytes) == 2
    plan = planned([], [Hold(set())], [small, large], device="cpu", threads=1)
    (way,) = (need for need in plan.needs if need.kind == "decoder")
    assert way.nbytes == 16 * large.spec.nbytes
    assert plan.staging["slots"] == 16
    with Pipeline([small], [], [Hold(set())], device="cpu", threads=1) as pipeline:
        assert pipeline.run().staging["slots"] == 16, "and the ring does not shrink"


def test_a_first_batch_that_is_not_full_makes_no_more_in_flight():
    staging = {"strategy": "direct", "batch": 8, "batch_timeout_s": 0}
    frame = source(8, width=640, height=480)
    plan = planned([], [Hold(set())], [frame], device="cpu", staging=staging, threads=1)
    setup = parts.make_setup(CpuDevice(), parts.make_options(staging), 1, [])
    with Pipeline([frame], [], [Hold(set())], device="cpu", staging=staging, threads=1) as pipeline:
        pipeline.run()
        assert len(pipeline._engine.runner.tokens) == setup.flights([frame.spec.nbytes]) == 4
    assert plan.fits


def test_who_iterates_may_hold_frames():
    setup = budget.Setup(
        options=StagingOptions(strategy="pooled", batch=2), stager=parts.registry.find("staging", "pooled"),
        threads=1, host_shared=False, deferred=True, queue=4,
    )  # fmt: skip
    stages = [Rgb()]
    stages[0].id, stages[0].device = "rgb", SimulatedDevice()
    spec = FrameSpec(96, 64, "yuv420p")
    (need,) = (
        need
        for need in budget.needs([fitting.Chain(stages, spec, None)], setup, {spec: 1})
        if need.owner == "stage rgb: image"
    )
    with Pipeline([source()], ["rgb"], device="simulated", staging={"batch": 2}, threads=1, queue=4) as pipeline:
        frames = iter(pipeline)
        engine = pipeline._engine
        first = next(frames)
        halves, block = 2 * 2 * first.spec.nbytes, need.nbytes // need.blocks
        deadline = time.monotonic() + 10
        # In flight 3, with the sink thread 1, and behind those at least 2 that the first frame and the queue keep.
        while engine.device.ledger.peak["device"] < halves + 6 * block and time.monotonic() < deadline:
            threading.Event().wait(0.002)
        assert 6 * block <= engine.device.ledger.peak["device"] - halves <= need.nbytes == 7 * block


def test_a_stage_says_what_it_keeps():
    stage = Motion()
    stage.id, stage.device = "motion", SimulatedDevice()
    chain = fitting.Chain([stage], FrameSpec(960, 540, "yuv420p"), set())
    layers = chain.links[0].stage._state("a").layers.nbytes
    assert stage.device_nbytes(3) == 3 * stage.device_nbytes(1) > 3 * layers


def test_what_motion_says_that_it_keeps_has_room_for_the_scratch(monkeypatch):
    """It once was two kilobytes more, so that a run could go beyond its plan."""
    stage = Motion()
    stage.id, stage.device = "motion", SimulatedDevice()
    fitting.Chain([stage], FrameSpec(960, 540, "yuv420p"), set())
    monkeypatch.setattr(cuda, "cupy", lambda: np)
    scratch = cuda.difference_scratch(*stage._small)
    assert stage._state("a").layers.nbytes + scratch.nbytes == stage.device_nbytes(1)


def test_a_strategy_that_does_not_tell_is_a_note(monkeypatch):
    stager = parts.registry.find("staging", "pooled")
    monkeypatch.setattr(stager, "host_memory", classmethod(lambda cls, *arguments, **options: None))
    plan = planned([], [])
    assert plan.notes == ["staging pooled does not tell what it takes on the host"]
    assert plan.nbytes("pinned") == 0 < plan.nbytes("device")


# -- how many slots --


@pytest.mark.parametrize(
    ("options", "threads", "slots"),
    [
        (StagingOptions(), 1, 4),
        (StagingOptions(), 16, 7),
        (StagingOptions(depth=3, fillers=2), 64, 6),
        (StagingOptions(slots=9, fillers=2), 64, 9),
    ],
)
def test_slots_without_a_number_follow_depth_and_fillers(options, threads, slots):
    assert budget.slots(options, threads) == slots


@pytest.mark.parametrize(("limit", "slots"), [(1 << 30, 4), (120_000, 3), (1, 2)])
def test_little_memory_to_page_lock_makes_fewer_slots_in_plan_and_run(monkeypatch, limit, slots):
    monkeypatch.setattr(SimulatedDevice, "host_limit_nbytes", limit)
    each = 3 * source().spec.nbytes
    assert 120_000 // each == 3
    plan = planned([], [Hold(set())], staging={"batch": 3}, threads=1)
    with Pipeline([source()], [], [Hold(set())], device="simulated", staging={"batch": 3}, threads=1) as pipeline:
        report = pipeline.run()
    assert report.staging["slots"] == plan.staging["slots"] == slots
    assert report.memory["pinned_bytes"] == plan.nbytes("pinned") == slots * each
    assert any("WSL 2" in warning for warning in report.warnings) == (slots < 4)


@pytest.mark.parametrize("strategy", ["pooled", "pageable", "per_frame"])
def test_in_a_container_the_ring_takes_its_share(monkeypatch, strategy):
    monkeypatch.setattr(budget, "_container_limit", lambda: 4 * 120_000)
    plan = planned([], [Hold(set())], staging={"strategy": strategy, "batch": 3}, threads=1)
    staging = {"strategy": strategy, "batch": 3}
    with Pipeline([source()], [], [Hold(set())], device="simulated", staging=staging, threads=1) as pipeline:
        report = pipeline.run()
    assert report.staging["slots"] == plan.staging["slots"] == 3
    assert any("container may have 480.0 kB" in warning and "3 slots" in warning for warning in report.warnings)
    own = Pipeline([source()], [], [Hold(set())], device="simulated", staging={**staging, "slots": 8}, threads=1)
    assert own.run().staging["slots"] == 8, "who says a number gets it"


def test_rounding_is_the_allocators():
    find = parts.registry.find
    spec = FrameSpec(1920, 1080, "yuv420p")
    pool = find("staging", "cupy_pool").host_memory(spec, 4, 1, host_shared=False)
    assert (pool.nbytes, pool.taken, pool.blocks, pool.per_batch) == (spec.nbytes, 4 << 20, 4, True)
    assert find("staging", "cuda_core").host_memory(spec, 4, 1, host_shared=False).taken is None
    assert find("staging", "registered").host_memory(spec, 3, 1, host_shared=False).taken % 4096 == 0
    planes = find("staging", "torch").host_memory(spec, 4, 1, host_shared=False)
    assert planes.taken == (2 << 20) + 2 * (512 << 10)
    assert find("staging", "direct").host_memory(spec, 4, 1, host_shared=False) is None
    assert [power_of_two(nbytes) for nbytes in (1, 513, 1 << 20, (1 << 20) + 1)] == [512, 1024, 1 << 20, 2 << 20]


# -- what there is --


def host(free: int, total: int = 1 << 40) -> list[Limit]:
    return [Limit("memory", free, total, budget.HOST, "measured now", "a test", hard=True)]


def test_a_run_that_needs_more_than_is_free_is_not_begun(monkeypatch, clip, tmp_path):
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(50_000))
    out = tmp_path / "out.jsonl"
    sink = {"device": "simulated", "staging": {"batch": 4, "slots": 5}, "threads": 1}
    from framepipe.sinks.jsonl import Jsonl

    with pytest.raises(ConfigError) as caught:
        Pipeline([str(clip)], [], [Jsonl(path=str(out))], **sink).run()
    nbytes = FrameSpec(96, 64, "yuv420p").nbytes
    assert 5 * 4 * nbytes == 245_760
    text = str(caught.value)
    assert "245.8 kB of memory needed, 50.0 kB free (a test), 195.8 kB too much" in text
    assert "slots: 2 saves 147.5 kB" in text
    assert "batch: 1 saves 184.3 kB" in text
    assert "--force" in text
    assert caught.value.exit_code == 2
    assert not out.exists()
    report = Pipeline([str(clip)], [], [Jsonl(path=str(out))], check_memory=False, **sink).run()
    assert report.exit == "complete"


def test_headers_are_read_only_where_it_may_matter(monkeypatch, clip):
    read = []
    monkeypatch.setattr("framepipe.preview.by_header", lambda feed: read.append(feed.name))
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(16 << 30))
    assert Pipeline([str(clip)], [], ["discard"], threads=1).run().exit == "complete"
    assert read == []
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(1 << 20))
    assert Pipeline([str(clip)], [], ["discard"], threads=1).run().exit == "complete", (
        "what is not known is let through"
    )
    assert read == ["a"]


def test_a_limit_that_is_not_measured_holds_nothing_up(monkeypatch):
    soft = Limit("video memory", 10, 100, ("device",), "model", "a test")
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(1 << 20))  # so little that the needs are looked at
    monkeypatch.setattr(limits, "of_device", lambda device: [soft])
    assert Pipeline([source()], ["rgb"], [Hold({"image"})], device="simulated").run().exit == "complete"
    assert planned(["rgb"], [Hold({"image"})]).fits is False


def test_stages_that_make_much_are_looked_at_where_pictures_are_not(monkeypatch):
    """What a usual picture needs is asked of the stages themselves, so that a large result is no surprise."""
    monkeypatch.setattr(fitting, "_LARGEST", source().spec)
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(2_000_000))
    few = source(2)
    assert Pipeline([few], [Rgb()], [Hold({"image"})], device="simulated", threads=1).run().exit == "complete"
    with pytest.raises(ConfigError, match=r"of memory needed, 2\.0 MB free"):
        Pipeline([few], [Rgb(), Resize(width=960)], [Hold({"image"})], device="simulated", threads=1).run()


def test_what_cannot_be_planned_hides_no_other_source(monkeypatch, clip):
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(1000))
    stages = [Crop(x=0, y=0, width=90, height=60)]
    small = source(name="small", width=64, height=32)
    with pytest.raises(ConfigError, match=r"of memory needed, 1\.0 kB free"):
        Pipeline([small, str(clip)], [Rgb(), *stages], [Hold({"image"})], device="simulated", threads=1).run()


def test_what_is_simulated_is_memory_of_the_host():
    for device, kinds in (("simulated", (*budget.HOST, "device")), ("cpu", budget.HOST)):
        assert {limit.kinds for limit in planned([], [], device=device).limits if limit.name == "memory"} == {kinds}


def test_a_header_that_cannot_be_had_is_no_error(tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")

    class Odd(File):
        def open(self, stopping: Any) -> Any:
            raise ValueError("says the test")

    files = [File(uri=str(tmp_path / "empty.mp4")), File(uri=str(tmp_path / "none.mp4")), Odd(uri=__file__)]
    assert [planning.preview.by_header(feed) for feed in parts.make_feeds(files)] == [None, None, None]


def test_header_and_first_picture_agree_on_a_plain_file(clip):
    (feed,) = parts.make_feeds([File(uri=str(clip), start=1.0, every=7)])
    spec = planning.preview.by_first_picture(feed)
    header = planning.preview.by_header(feed)
    assert (spec.width, spec.height, spec.pix_fmt, spec.nbytes) == (96, 64, "yuv420p", header.nbytes)
    assert feed.decoded == 0, "the feed itself is not touched"


def test_the_container_is_read(tmp_path, monkeypatch):
    for name, text in (
        ("memory.max", "1000000"),
        ("memory.current", "900000"),
        ("memory.stat", "inactive_file 600000"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "cgroup").write_text("0::/\n", encoding="utf-8")
    sensor = limits.CgroupMemory(tmp_path / "cgroup", tmp_path)
    monkeypatch.setattr(limits, "CgroupMemory", lambda: sensor)
    monkeypatch.setattr(limits.sys, "platform", "linux")
    memory, container = limits.of_host()
    assert (container.free, container.total, container.hard) == (700_000, 1_000_000, True)
    assert 0 < memory.free < memory.total
    (tmp_path / "memory.max").write_text("max", encoding="utf-8")
    free, unlimited = limits.of_host()[1].free, limits.of_host()[1].unlimited
    assert (free, unlimited) == (None, True)
    monkeypatch.setattr(limits.sys, "platform", "win32")
    assert [limit.name for limit in limits.of_host()] == ["memory"], "what there is no word of is no row"


def test_a_container_that_cannot_be_read_is_unknown_and_stops_nothing(monkeypatch):
    def forbidden() -> Any:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/memory.max")

    monkeypatch.setattr(limits.sys, "platform", "linux")
    monkeypatch.setattr(limits, "CgroupMemory", forbidden)
    monkeypatch.setattr(budget, "CgroupMemory", forbidden)
    (container,) = (limit for limit in planned([], []).limits if limit.name == "container")
    assert (container.free, container.unlimited) == (None, False)
    assert "memory.max" in container.reason
    assert Pipeline([source()], [], [Hold(set())], device="simulated").run().exit == "complete"


@pytest.mark.parametrize(("free", "ahead"), [(1 << 40, 2 << 30), (80 << 20, 10 << 20), (0, 1)])
def test_what_is_decoded_ahead_is_little_in_a_small_container(monkeypatch, free, ahead):
    monkeypatch.setattr(limits, "of_host", lambda *kinds: [*host(1 << 40), *host(free)])
    assert parts.ahead_nbytes(32) == ahead


def test_no_more_is_decoded_ahead_than_a_short_clip_has(clip):
    """A clip of some megabytes was once said to take gigabytes on a machine of many processors."""

    def ahead(*sources: Any) -> int:
        return planning.plan([*sources], device="simulated", threads=16).nbytes("ahead")

    picture = FrameSpec(96, 64, "yuv420p").nbytes
    assert ahead(clip) == 60 * picture
    assert ahead(File(uri=str(clip), loop=3), clip) == 240 * picture
    assert ahead(clip, source()) == parts.ahead_nbytes(16), "nobody knows how many pictures the second one has"


def test_budgets_of_windows_are_read_for_each_kind(monkeypatch):
    class Wddm:
        name, source, reason = "wddm", "D3DKMTQueryVideoMemoryInfo", "of another number; says the test"
        reasons = {"non_local_budget": "says the test", "non_local_usage": "says the test"}  # noqa: RUF012

        def read(self) -> dict[str, int | None]:
            keys = ("local_budget", "local_usage", "non_local_budget", "non_local_usage")
            return dict(zip(keys, (1000, 400, 800, None), strict=True))

    monkeypatch.setattr(limits.sys, "platform", "win32")
    local, other = limits.of_sensor(Wddm())
    assert (local.name, local.free, local.total, local.kinds) == ("local budget", 600, 1000, ("device",))
    assert (other.name, other.free, other.kinds) == ("non-local budget", None, ("pinned",))
    assert other.reason == "says the test"


def test_windows_that_cannot_be_asked_leaves_both_budgets_unknown(monkeypatch):
    monkeypatch.setattr(limits.sys, "platform", "win32")
    rows = limits.of_sensor(Missing("wddm", "says the test"))
    assert [(row.name, row.free, row.reason) for row in rows] == [
        ("local budget", None, "says the test"), ("non-local budget", None, "says the test"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("now", "free", "reason"),
    [
        ({"free": 5, "total": 9}, 5, None),
        ({"free": 10, "total": 9}, None, "nonsense was told: 10 bytes free of 9"),
        ({"free": -1, "total": 9}, None, "nonsense was told: -1 bytes free of 9"),
        ({"free": None, "total": None}, None, "says the test"),
    ],
)
def test_a_counter_that_is_missing_or_nonsense_is_no_number(now, free, reason):
    class Nvml:
        name, source = "nvml", "NVML"

        def __init__(self) -> None:
            self.reasons = {"process_used": "of another number"}
            if now["free"] is None:
                self.reasons["free"] = "says the test"
            self.reason = "; ".join(self.reasons.values())

        def read(self) -> dict[str, int | None]:
            return now

    (limit,) = limits.of_sensor(Nvml())
    assert (limit.free, limit.reason, limit.hard) == (free, reason, False)
    device = SimulatedDevice()
    device.vram = lambda: [{"source": "cudaMemGetInfo", **now}]
    (limit,) = limits.of_device(device)
    assert (limit.free, limit.hard) == (free, True)
    assert (limit.reason is None) == (free is not None)


def test_system_locks_and_wsl_bound_what_is_page_locked_alone(monkeypatch):
    locked = planned([], [], device="cpu", staging="locked")
    setup = parts.make_setup(SimulatedDevice(), StagingOptions(strategy="pooled"), 1, [])
    monkeypatch.setattr(limits.pagelock, "limit_bytes", lambda: 8 << 20)
    cpu = planned([], [], device="cpu", staging="locked")
    assert [limit.free for limit in cpu.limits if limit.name == "page-lock limit"] == [8 << 20]
    assert not [limit for limit in planned([], [], device="cpu").limits if limit.name == "page-lock limit"]
    monkeypatch.setattr(limits, "is_wsl2", lambda: True)
    (row,) = limits.of_locking(setup, locked.needs)
    assert (row.free, row.ground, row.hard) == (512 << 20, "reported by users", False)


@pytest.mark.parametrize(
    ("effective", "users", "exempt"),
    [
        ("000001fffeffffff", "0 0 4294967295", True),
        ("0000000000000000", "0 0 4294967295", False),
        ("000001fffeffffff", "0 1000 1", False),  # root in a user namespace of its own alone
        ("nonsense", "", False),
    ],
)
def test_who_may_lock_all_has_no_limit(tmp_path, effective, users, exempt):
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t0\n", encoding="utf-8")
    (tmp_path / "uid_map").write_text(f"   {users}\n", encoding="utf-8")
    assert limits.pagelock._may_lock_all(tmp_path) is exempt
    assert not limits.pagelock._may_lock_all(tmp_path / "none")


# -- what would help --


def test_every_change_saves_what_planning_it_would(clip):
    staging = {"strategy": "pooled", "batch": 4, "depth": 3}
    plan = planned(["rgb"], [Hold({"image"})], [str(clip)], staging=staging, threads=1)
    told = {knob.change: knob for knob in plan.knobs}
    assert set(told) == {
        "slots: 2", "depth: 1", "batch: 1", "batch: 2", "staging: pageable", "staging: mapped",
        "pictures of half the width and height",
    }  # fmt: skip
    for change, values in (
        ("slots: 2", {"slots": 2}), ("depth: 1", {"depth": 1}), ("batch: 2", {"batch": 2}),
        ("staging: pageable", {"strategy": "pageable"}), ("staging: mapped", {"strategy": "mapped"}),
    ):  # fmt: skip
        other = planned(["rgb"], [Hold({"image"})], [str(clip)], staging={**staging, **values}, threads=1)
        for kind in ("pinned", "device", "pageable"):
            assert told[change].saves(kind) == plan.nbytes(kind) - other.nbytes(kind), (change, kind)
    small = planned(["rgb"], [Hold({"image"})], [source(width=48, height=32)], staging=staging, threads=1)
    half = told["pictures of half the width and height"]
    assert half.saves("pinned") == plan.nbytes("pinned") - small.nbytes("pinned")


def test_rules_of_thumb_are_their_constants():
    plan = planned(["rgb"], [Hold({"image"})], staging={"batch": 2, "depth": 2}, rules=RulesOfThumb(gui_apps=3))
    device, picture = plan.nbytes("device"), source().spec.nbytes
    assert [nbytes for _, nbytes in plan.rules] == [
        round(1.5 * 3 * 2 * picture), round(1.2 * device), round(1.8 * device), device + 4_000_000_000,
    ]  # fmt: skip
    other = planned(["rgb"], [Hold({"image"})], rules=RulesOfThumb(pool=9, linux=7, windows=8, base=5, gui_app=1))
    assert other.rules[1][1] == 7 * other.nbytes("device")
    assert other.fits, "and nothing goes by them"


# -- memory models --


def test_a_model_is_asked_what_page_locking_costs():
    staging = {"batch": 8, "slots": 8}
    plan = planned([], [Hold({"image"})], device="simulated:wddm-claim,share=0.5", staging=staging)
    (part,) = (need for need in plan.needs if need.modelled)
    assert plan.nbytes("pinned") / 2 < part.nbytes < plan.nbytes("pinned") * 0.6 + 40 * 2 * 65536
    assert "wddm-claim" in part.what
    (video,) = (limit for limit in plan.limits if limit.name == "video memory")
    assert (video.ground, video.total, video.hard) == ("model", 12 * 10**9, False)
    assert plan.to_dict()["device"]["model"]["name"] == "wddm-claim"


def test_what_a_model_refuses_does_not_fit():
    plan = planned([], [], device="simulated:wddm-budget,ram=128MiB", staging={"batch": 64, "slots": 200})
    assert plan.refusal
    assert "non-local" in plan.refusal
    assert plan.fits is False
    assert any(limit.name == "non-local budget" and limit.ground == "model" for limit in plan.limits)


# -- bad input --


def test_a_file_that_is_not_there_is_a_line_and_the_rest_is_planned(clip, tmp_path):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    missing = [str(tmp_path / name) for name in ("none.mp4", "none-*.mp4", "bad.mp4")]
    plan = planned([], [], [*missing, str(clip), "-"])
    errors = {source.uri: source.error for source in plan.sources}
    assert "no such file" in errors[missing[0]]
    assert "no file matches" in errors[missing[1]]
    assert "no video" in errors[missing[2]]
    assert "read only once" in errors["-"]
    assert errors[str(clip)] is None
    assert plan.fits
    nothing = planned([], [], missing)
    assert nothing.fits is None
    assert nothing.limits
    json.dumps(nothing.to_dict(), allow_nan=False)


def test_a_gpu_that_is_not_there_is_a_line_and_the_rest_is_planned(monkeypatch):
    def none(name: str) -> Any:
        raise planning.DeviceUnavailableError("there is no GPU, says the test")

    monkeypatch.setattr(planning.select, "choose", none)
    plan = planned(["motion"], [], device="cuda", staging="mapped")
    assert plan.notes == ["there is no GPU, says the test"]
    assert (plan.device["kind"], plan.device["name"]) == ("cuda", None)
    assert plan.nbytes("pinned")
    (video,) = (limit for limit in plan.limits if limit.name == "video memory")
    assert video.free is None
    assert video.reason
    assert planned([], [], device="cuda", staging="torch").nbytes("pinned")


def test_a_pipeline_that_cannot_be_is_a_mistake(clip):
    with pytest.raises(ConfigError, match="no stage before it writes"):
        planned([_Reads()], [], [str(clip)])
    with pytest.raises(ConfigError, match="cannot be used on cpu"):
        planned([], [], device="cpu", staging="mapped")
    plan = planned([Rgb(), _Crop()], [], [str(clip)])
    assert "does not fit into the picture" in plan.sources[0].error


def test_the_plan_leaves_nothing(clip, nothing_left):
    for device in ("cpu", "simulated"):
        planned(["motion"], ["discard"], [str(clip), source()], device=device)


# -- the command --


@pytest.fixture
def pipeline_file(tmp_path, clip):
    path = tmp_path / "p.yaml"
    sink = f"{{jsonl: {{path: '{tmp_path.as_posix()}/o.jsonl'}}}}"
    text = f"version: 1\nsources: ['{clip.as_posix()}']\nstages: [motion, draw]\nsinks: [{sink}]\n"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_command_tells_people(pipeline_file, capsys):
    assert cli.main(["plan", str(pipeline_file), "--device", "simulated", "--set", "staging.batch=2"]) == 0
    out = capsys.readouterr().out
    assert "page-locked (planned)" in out
    assert "4 slots x 2 pictures x 12.3 kB" in out
    assert "measured now (psutil.virtual_memory().available)" in out
    assert "slots: 2" in out
    assert "rules of thumb of an article" in out
    assert out.splitlines()[-1] == "fits"
    assert max(map(len, out.splitlines())) < 140
    assert not pipeline_file.with_name("o.jsonl").exists()


def test_the_command_tells_programs(pipeline_file, capsys):
    arguments = ["--device", "simulated", "--json", "--gui-apps", "2", "--gui-app-memory", "1GB"]
    assert cli.main(["plan", str(pipeline_file), *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "framepipe.plan/1"
    assert told["fits"] is True
    assert told["planned_bytes"]["pinned"] == sum(row["taken"] for row in told["planned"] if row["kind"] == "pinned")
    assert {row["ground"] for row in told["limits"]} == {"measured now"}
    assert told["rules_of_thumb"][-1]["bytes"] == told["planned_bytes"]["device"] + 4_500_000_000
    assert told["sources"][0]["picture_bytes"] == 12_288


def test_the_command_says_what_does_not_fit(pipeline_file, capsys, monkeypatch):
    monkeypatch.setattr(limits, "of_host", lambda *kinds: host(1000))
    assert cli.main(["plan", str(pipeline_file), "--device", "simulated"]) == 1
    assert "does not fit: 50.7 kB of memory needed" in capsys.readouterr().out
    assert cli.main(["run", str(pipeline_file), "--device", "simulated", "--quiet"]) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(["run", str(pipeline_file), "--device", "simulated", "--quiet", "--force"]) == 0


def test_what_cannot_be_page_locked_is_pageable(pipeline_file, capsys, monkeypatch):
    monkeypatch.setattr(limits.pagelock, "limit_bytes", lambda: 8192)
    assert cli.main(["plan", str(pipeline_file), "--device", "cpu", "--staging", "locked"]) == 1
    told = "8.2 kB free (RLIMIT_MEMLOCK), 41.0 kB too much, set; a run goes on with pageable memory there"
    assert told in capsys.readouterr().out.splitlines()[-1]


def test_no_source_that_fails_is_hidden_behind_those_that_do_not(pipeline_file, capsys, clip, tmp_path):
    sources = [option for _ in range(12) for option in ("--source", str(clip))]
    missing = [option for number in range(12) for option in ("--source", str(tmp_path / f"none-{number}.mp4"))]
    arguments = ["--device", "simulated", "--set", "sinks=[discard]"]
    assert cli.main(["plan", str(pipeline_file), *sources, *missing, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("source ")]
    assert sum("96x64" in row for row in rows) == sum("no such file" in row for row in rows) == 8
    assert [row.split("… ")[1] for row in rows if "… " in row] == ["and 4 more", "and 4 more that cannot be planned"]
    assert lines[-1] == "fits, without 12 of 24 sources, which cannot be planned"


def test_what_is_not_planned_is_said(clip, monkeypatch, tmp_path):
    class Gpu(Hold):
        codec = "h264_nvenc"

    assert [words.split(" (")[0] for words in planned([], []).unplanned] == [
        "what FFmpeg's decoders and encoders keep for themselves"
    ]
    encoded = planned([], [Gpu({"image"})]).unplanned
    assert "sessions of h264_nvenc" in encoded[1]

    def none(name: str) -> Any:
        raise planning.DeviceUnavailableError("there is no GPU, says the test")

    monkeypatch.setattr(planning.select, "choose", none)
    assert "CUDA's own context" in planned([], [], device="cuda").unplanned[-1]
    plan = planned([Rgb(), _NeedsGpu()], [Hold({"image"})], [str(clip)], device="cuda")
    assert plan.notes[1] == "stage 'stats' cannot be opened to be planned: no GPU, says the stage"
    assert plan.nbytes("pinned")


def test_the_command_and_wrong_words(pipeline_file, capsys):
    assert cli.main(["plan", str(pipeline_file), "--desktop-memory", "much"]) == 2
    assert "--desktop-memory much" in capsys.readouterr().err
    for factor in ("inf", "1e400"):
        assert cli.main(["plan", str(pipeline_file), "--windows-factor", factor]) == 2
        assert "--windows-factor inf: expected a finite number" in capsys.readouterr().err
    assert cli.main(["plan", str(pipeline_file), "--device", "simulated", "--desktop-memory", "0"]) == 0
    assert "what is needed + 0 GB" in capsys.readouterr().out
    assert cli.main(["plan", str(pipeline_file), "--set", "staging.batch=none"]) == 2
    assert cli.main(["plan", str(pipeline_file), "--source", "none.mp4"]) == 1
    assert "nothing could be planned" in capsys.readouterr().out


class _Reads(Stats):
    """Reads what nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = frozenset({"nothing"})


class _NeedsGpu(Stats):
    """Cannot be opened without a GPU."""

    def open(self, device: Any) -> None:
        raise RuntimeError("no GPU, says the stage")


class _Crop(Stats):
    """Cannot be planned."""

    def plan(self, flow: Any) -> Any:
        raise ConfigError("it does not fit into the picture")
