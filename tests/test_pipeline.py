"""The pipeline from sources to results: what comes out, in which order, and that the books balance."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import make_clip, number_of

import framepipe
from framepipe.errors import ClosedError, ConfigError
from framepipe.frame import Batch
from framepipe.pipeline import Pipeline
from framepipe.report import RunReport
from framepipe.sinks.discard import Discard
from framepipe.sources.file import File
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList, pattern_frames

pytestmark = pytest.mark.usefixtures("nothing_left")


def balance(report: RunReport) -> None:
    """decoded = skipped + dropped + filtered + failed + delivered, in total and for each source."""
    for books in (report.frames, *report.sources):
        gone = sum(sum(books[book].values()) for book in ("skipped", "dropped", "filtered", "failed"))
        assert books["decoded"] == gone + books["delivered"], books


def run(sources, stages=(), **options) -> tuple[RunReport, list]:
    """Run to the end; returns the report and (source, index, number read from the picture, time)."""
    seen = []
    sink = lambda frame: seen.append((frame.source, frame.index, number_of(frame.numpy()), frame.time_s))  # noqa: E731
    with Pipeline(sources, stages, [sink], **{"device": "cpu", **options}) as pipeline:
        report = pipeline.run()
    balance(report)
    return report, seen


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(
    ("device", "strategy"),
    [("cpu", "direct"), ("cpu", "pooled"), ("cpu", "per_frame"), ("cpu", "pageable"),
     ("simulated", "pooled"), ("simulated", "per_frame"), ("simulated", "pageable")],
)  # fmt: skip
def test_every_frame_comes_in_order_on_every_device(clip, device, strategy, batch):
    report, seen = run([clip], device=device, staging={"strategy": strategy, "batch": batch, "fillers": 2})
    assert [(index, number) for _, index, number, _ in seen] == [(i, i) for i in range(60)]
    assert [time for *_, time in seen] == [i / 25 for i in range(60)]
    assert report.exit == "complete" and report.frames["delivered"] == 60
    assert report.device["kind"] == device and report.staging["strategy"] == strategy


def test_cpu_and_simulated_agree_exactly(clips):
    images = {}
    for device in ("cpu", "simulated"):
        with framepipe.open([clips / "a.mp4", clips / "b.mp4"], device=device, accuracy="exact") as frames:
            images[device] = {(f.source, f.index): f.numpy().tobytes() for f in frames}
    assert len(images["cpu"]) == 100
    assert images["cpu"] == images["simulated"]


def test_pinned_allocations_stay_constant_after_warm_up(clip):
    counts = set()
    for loop in (1, 4):
        with Pipeline([File(uri=str(clip), loop=loop)], [], ["discard"], device="simulated") as pipeline:
            report = pipeline.run()
        counts.add(report.memory["pinned_allocations"])
        assert report.memory["replans"] == 0
    assert counts == {1}


def test_sources_of_several_sizes_keep_their_order(clips):
    for staging in ("direct", "pooled"):
        report, seen = run([clips / "a.mp4", clips / "b.mp4"], staging={"strategy": staging, "batch": 4})
        for name, count in (("a", 60), ("b", 40)):
            assert [number for source, _, number, _ in seen if source == name] == list(range(count))
        assert {s["name"]: s["delivered"] for s in report.sources} == {"a": 60, "b": 40}


def test_a_change_of_size_commits_the_partial_batch_and_plans_anew():
    small, large = pattern_frames(5, 32, 32), pattern_frames(5, 64, 48)
    frames = [*small, *large, *small]
    for pts, frame in enumerate(frames[:10]):
        frame.pts = pts
    sizes = []
    source = FrameList(name="s", frames=frames[:10])
    with Pipeline([source], [], [lambda f: sizes.append((f.index, f.numpy().shape[:2]))],
                  device="simulated", staging={"batch": 3}) as pipeline:  # fmt: skip
        report = pipeline.run()
    assert sizes == [(i, (32, 32)) for i in range(5)] + [(i, (48, 64)) for i in range(5, 10)]
    assert report.memory["replans"] == 1


def test_pictures_of_many_sizes_do_not_pile_up():
    """What is recycled of one size is let go when another comes: a folder of photographs has hundreds."""
    frames = [pattern_frames(1, 200 + 2 * i, 100)[0] for i in range(60)]
    for pts, frame in enumerate(frames):
        frame.pts = pts
    for device in ("cpu", "simulated"):
        rgb = Rgb(accuracy="exact")
        with Pipeline([FrameList(name="s", frames=frames)], [rgb], [Discard(read="image")], device=device) as pipeline:
            memory = pipeline.run().memory
        held = memory["pageable_bytes"] if device == "cpu" else memory["device_bytes_peak"]
        assert held < 12 * 320 * 100 * 3, (device, held)


class Gate(FrameList):
    """Hands out frames one by one, each when it is told to."""

    may_stall = True

    def gated(self, gates: list[threading.Event]) -> Gate:
        self.gates = gates
        return self

    def open(self, stopping):
        stream = super().open(stopping)
        plain = stream.frames

        def frames() -> Iterator[object]:
            for gate, frame in zip(self.gates, plain(), strict=True):
                while not gate.wait(0.02) and not stopping():
                    pass
                yield frame

        stream.frames = frames
        return stream


def test_a_batch_does_not_wait_for_ever():
    gates = [threading.Event() for _ in range(3)]
    gates[0].set()
    first = threading.Event()
    source = Gate(name="g", frames=pattern_frames(3)).gated(gates)
    with Pipeline([source], [], [lambda frame: first.set()], device="cpu",
                  staging={"batch": 8, "batch_timeout_s": 0.01}) as pipeline:  # fmt: skip
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        assert first.wait(20), "the first frame waits for a batch that never fills"
        for gate in gates:
            gate.set()
        thread.join(20)
    assert pipeline.report.frames["delivered"] == 3


def test_a_source_that_stalls_holds_back_nobody(clip):
    gates = [threading.Event()]
    others = threading.Event()
    seen = []

    def sink(frame):
        seen.append(frame.source)
        if len(seen) == 60:
            others.set()

    source = Gate(name="g", frames=pattern_frames(1)).gated(gates)
    with Pipeline([source, clip], [], [sink], device="cpu", staging={"batch": 4}) as pipeline:
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        assert others.wait(20)
        gates[0].set()
        thread.join(20)
    assert seen.count("g") == 1


def test_fifty_sources_through_eight_slots():
    sources = [FrameList(name=f"s{i}", frames=pattern_frames(4, 16, 16, seed=i)) for i in range(50)]
    report, _ = _discard(sources, staging={"strategy": "pooled", "slots": 8})
    assert all(source["delivered"] == 4 for source in report.sources)


def _discard(sources, **options):
    with Pipeline(sources, [], ["discard"], device="cpu", **options) as pipeline:
        report = pipeline.run()
    balance(report)
    return report, None


# -- which frames -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["linear", "segments", "frame"])
def test_start_is_inclusive_and_end_exclusive(clips, decode):
    report, seen = run([File(uri=str(clips / "a.mp4"), start=0.5, end=1.0)], decode=decode)
    assert [number for _, _, number, _ in seen] == list(range(13, 25))
    assert report.exit == "complete"


def test_a_start_behind_the_end_of_the_file_gives_nothing(clip):
    report, seen = run([File(uri=str(clip), start=100.0)])
    assert seen == [] and report.exit == "complete"


def test_every_and_fps(clip):
    report, seen = run([File(uri=str(clip), every=7)])
    assert [number for _, _, number, _ in seen] == list(range(0, 60, 7))
    assert report.frames["skipped"] == {"every": 60 - 9}
    report, seen = run([File(uri=str(clip), fps=10)])
    assert [number for _, _, number, _ in seen] == [0, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30, 33, 35, 38,
                                                    40, 43, 45, 48, 50, 53, 55, 58]  # fmt: skip
    assert run([File(uri=str(clip), fps=100)])[0].frames["delivered"] == 60


def test_fps_goes_by_time_stamps(tmp_path):
    clip = make_clip(tmp_path / "vfr.mp4", 8, pts=[0, 1, 2, 3, 8, 9, 21, 22])
    _, seen = run([File(uri=str(clip), fps=5)])
    assert [number for _, _, number, _ in seen] == [0, 4, 6]


def test_loop_repeats_with_times_going_on(clip):
    report, seen = run([File(uri=str(clip), loop=3, decode="segments")])
    assert [number for _, _, number, _ in seen] == [*range(60)] * 3
    times = [time for *_, time in seen]
    assert times == sorted(times) and len(set(times)) == 180
    assert report.exit == "complete"


@pytest.mark.parametrize("decode", ["linear", "segments", "frame"])
def test_a_loop_goes_on_one_frame_later(clip, decode):
    _, seen = run([File(uri=str(clip), loop=4, decode=decode)], threads=4)
    times = [time for *_, time in seen]
    assert [round(b - a, 6) for a, b in itertools.pairwise(times)] == [0.04] * 239
    assert [number for _, _, number, _ in seen] == [*range(60)] * 4


def test_without_time_stamps_times_are_estimated_and_say_so(tmp_path):
    clip = make_clip(tmp_path / "raw.264", 10, container="h264")
    with framepipe.open(clip, device="cpu") as frames:
        seen = [(f.time_s, f.item.estimated, f.pts) for f in frames]
    assert seen == [(i / 25, True, None) for i in range(10)]


# -- sources ----------------------------------------------------------------------------------------------------------


def test_a_folder_and_a_glob_are_a_source_a_file(clips):
    for uri in (clips, str(clips / "*.mp4"), str(clips / "**" / "[ab].mp4")):
        report, _ = _discard([uri])
        assert [s["name"] for s in report.sources] == ["a", "b"]
        assert report.frames["delivered"] == 100


def test_sources_of_one_name_are_told_apart(clip):
    report, _ = _discard([clip, clip, File(uri=str(clip), name="door")])
    assert [s["name"] for s in report.sources] == ["a", "a-2", "door"]


def test_stills_are_a_sequence(tmp_path):
    for i in (7, 8, 9, 11):
        make_clip(tmp_path / f"f_{i:04d}.png", 1, codec="png", pix_fmt="rgb24", container="image2", first=i)
    for uri in (tmp_path, tmp_path / "f_%04d.png", tmp_path / "*.png"):
        _, seen = run([File(uri=str(uri), rate=10.0)])
        assert [(number, time) for _, _, number, time in seen] == [(7, 0), (8, 0.1), (9, 0.2), (11, 0.3)]
    assert [n for _, _, n, _ in run([tmp_path / "f_0008.png"])[1]] == [8]


def test_an_existing_file_wins_over_a_pattern(tmp_path):
    clip = make_clip(tmp_path / "100%d [x]*.mp4", 3)
    assert _discard([clip])[0].frames["delivered"] == 3


# -- stages -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Mean(Stage):
    """Mean of the picture, read back."""

    reads = frozenset({"image"})
    writes = frozenset({"meta"})
    keep: float = 0.0

    def plan(self, flow: Flow) -> Flow:
        self.readback = (f"{self.id}.mean",)
        return flow.put(f"{self.id}.mean", ArraySpec((), "float64"))

    def launch(self, batch: Batch) -> None:
        for i, image in enumerate(batch.arrays["image"]):
            batch.out[f"{self.id}.mean"][i] = image.mean()

    def collect(self, batch: Batch) -> None:
        for item, mean in zip(batch.items, batch.host[f"{self.id}.mean"], strict=True):
            item.meta[self.id] = float(mean)
            if mean < self.keep:
                item.filtered_by = self.id


@dataclass(kw_only=True)
class Invert(Stage):
    """Inverted picture, once the mean is known (so it runs late)."""

    reads = frozenset({"image", "meta"})
    writes = frozenset({"image"})

    def launch(self, batch: Batch) -> None:
        for i, image in enumerate(batch.arrays["image"]):
            batch.out["image"][i] = 255 - image
            assert "mean" in batch.items[i].meta


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_late_stages_see_what_was_collected(clip, device):
    with Pipeline([clip], [Mean(), Invert()], device=device) as pipeline:
        for frame in pipeline:
            image = frame.numpy()
            assert abs(255 - image.mean() - frame.meta["mean"]) < 1e-6
            assert number_of(255 - image) == frame.index


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_late_stages_run_for_sinks_that_do_not_read_them(clip, device):
    with Pipeline([clip], [Mean(), Invert()], ["discard"], device=device) as pipeline:
        assert pipeline.run().frames["delivered"] == 60


def test_a_stage_may_filter(clip):
    report, _ = run([clip], [Mean(keep=1000.0)])
    assert report.frames["filtered"] == {"mean": 60} and report.frames["delivered"] == 0
    assert report.exit == "complete"


def test_a_stage_that_reads_what_nobody_writes_is_a_mistake_before_anything_opens(clip):
    class Reader(Stage):
        reads = frozenset({"tensor"})

    with pytest.raises(ConfigError, match="reads tensor, which no stage before it writes"):
        Pipeline([clip], [Reader()], device="cpu").run()


def test_two_stages_of_one_kind_have_ids_of_their_own(clip):
    with Pipeline([clip], [Mean(), Mean()], device="cpu") as pipeline:
        assert set(next(iter(pipeline)).meta) - {"picture"} == {"mean", "mean-2"}


def test_nobody_makes_pictures_that_nobody_reads(clip):
    with Pipeline([clip], [], ["discard"], device="cpu") as pipeline:
        assert pipeline.run().stages == {}


def test_held_frames_are_never_overwritten(clip):
    for device in ("cpu", "simulated"):
        with framepipe.open(clip, device=device) as frames:
            held = list(frames)
        assert [number_of(frame.image) for frame in held] == list(range(60))


# -- ways of use ------------------------------------------------------------------------------------------------------


def test_open_gives_upright_rgb(tmp_path):
    with framepipe.open(make_clip(tmp_path / "c.mp4", 2), device="cpu") as frames:
        frame = next(iter(frames))
    assert frame.image.shape == (64, 96, 3) and frame.image.dtype == np.uint8
    assert (frame.width, frame.height, frame.index, frame.source) == (96, 64, 0, "c")


def test_iterating_and_sinks_together(clip):
    seen = []
    with Pipeline([clip], [], [lambda f: seen.append(f.index)], device="cpu") as pipeline:
        indices = [frame.index for frame in pipeline]
    assert indices == seen == list(range(60))
    balance(pipeline.report)
    assert pipeline.report.exit == "complete"


def test_iteration_can_be_broken_off_and_resumed(clip):
    with framepipe.open(clip, device="cpu") as frames:
        first = [frame.index for frame, _ in zip(frames, range(5), strict=False)]
        rest = [frame.index for frame in frames]
    assert first + rest in ([*range(60)], [*range(5), *range(6, 60)])  # zip may have taken one more


def test_a_pipeline_runs_once(clip):
    pipeline = Pipeline([clip], [], ["discard"], device="cpu")
    pipeline.run()
    with pytest.raises(ClosedError, match="make a new one"):
        pipeline.run()
    pipeline.close()
    pipeline.close()
    with pytest.raises(ClosedError):
        pipeline.run()


def test_progress_and_statistics(clip):
    seen = []
    with Pipeline([clip], [], ["discard"], device="cpu") as pipeline:
        pipeline.run(progress=seen.append)
    assert seen[-1].delivered == seen[-1].decoded == seen[-1].expected == 60
    assert seen[-1].sources == {"a": 60}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cdua"}, "did you mean 'cuda'"),
        ({"staging": "poled"}, "did you mean 'pooled'"),
        ({"staging": {"batsch": 2}}, "did you mean 'batch'"),
        ({"staging": {"batch": 0}}, "must be at least 1"),
        ({"threads": 0}, "must be at least 1"),
    ],
)
def test_mistakes_are_named(clip, options, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline([clip], [], ["discard"], **options)


def test_no_source_is_a_mistake():
    with pytest.raises(ConfigError, match="at least one source"):
        Pipeline([])


def test_a_gpu_that_is_not_there_says_so(clip):
    with pytest.raises(framepipe.FramepipeError, match="cuda"):
        Pipeline([clip], device="cuda:99")
