"""Device memory that runs out, limits on it, a system with little to page-lock, and errors that come late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_pipeline import balance

from framepipe import config
from framepipe.chain import Chain, locate
from framepipe.device.base import memory_error
from framepipe.device.simulated import SimulatedDevice, SimulatedEvent
from framepipe.errors import ConfigError, DeviceError, DeviceMemoryError, HazardError, StageError
from framepipe.frame import Batch, FrameSpec, Item
from framepipe.pipeline import Pipeline
from framepipe.report import RunReport
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.testing import FrameList, pattern_frames
from framepipe.units import format_bytes, parse_bytes

pytestmark = pytest.mark.usefixtures("nothing_left")
PICTURE = FrameSpec.of(pattern_frames(1)[0]).nbytes
RGB = 64 * 48 * 3


class Invert(Stage):
    """The negative of the image."""

    reads = frozenset({"image"})
    writes = frozenset({"image"})

    def launch(self, batch: Batch) -> None:
        np.subtract(255, batch.arrays["image"], out=batch.out["image"])


def run(limit: Any, *, batch: int = 4, device: str = "simulated", depth: int = 2) -> RunReport:
    """Twelve pictures through rgb and Invert."""
    with Pipeline([FrameList(name="film", frames=pattern_frames(12))], ["rgb", Invert()], ["discard"], device=device,
                  device_memory=limit, staging={"batch": batch, "depth": depth}) as pipeline:  # fmt: skip
        return pipeline.run()


def fails(limit: Any, **options: Any) -> BaseException:
    with pytest.raises((StageError, DeviceError)) as caught:
        run(limit, **options)
    return caught.value


# -- limits ----------------------------------------------------------------------------------------------------------


def test_memory_that_a_stage_has_no_room_for_is_told_with_its_place_and_numbers():
    limit = 2 * 4 * PICTURE + 4 * RGB  # both halves and one batch of pictures
    error = fails(limit)
    assert isinstance(error, StageError) and isinstance(error.__cause__, MemoryError)
    assert error.where == {"stage": "invert", "source": "film", "index": 0, "pts": 0}
    text = str(error)
    for part in ("stage 'invert'", "frame 0 of 'film' and 3 more", "in batches of 4", f"{4 * RGB} bytes wanted",
                 f"{limit} held by this pipeline", f"own limit is reached, device_memory: {limit}",
                 "smaller staging batch or depth"):  # fmt: skip
        assert part in text


def test_memory_for_uploads_is_told_as_such():
    error = fails(4 * PICTURE)
    assert type(error) is DeviceMemoryError and isinstance(error, MemoryError)
    assert "no memory for 2 uploads in flight (batches of 4)" in str(error)
    assert error.where["source"] == "film" and "stage" not in error.where


def test_a_smaller_batch_stays_within_the_limit():
    limit = 2 * 4 * PICTURE + 4 * RGB
    report = run(limit, batch=1)
    assert report.frames["delivered"] == 12
    assert report.memory["device_bytes_peak"] <= limit


def test_the_frames_of_a_run_that_fails_are_in_the_books():
    pipeline = Pipeline([FrameList(frames=pattern_frames(12))], ["rgb"], ["discard"], device="simulated",
                        device_memory=2 * PICTURE + 100)  # fmt: skip
    with pytest.raises(StageError), pipeline:
        pipeline.run()
    assert pipeline.report is not None
    balance(pipeline.report)
    assert pipeline.report.frames["failed"] == {"rgb": 1}


def test_a_pipeline_beside_one_that_fails_goes_on():
    other = Pipeline([FrameList(frames=pattern_frames(12))], ["rgb"], device="simulated")
    with other:
        first = next(iter(other)).numpy().copy()
        fails(PICTURE)
        assert len(list(other)) == 11
    assert first.any()


def test_recycled_memory_makes_room_before_anything_fails():
    device = SimulatedDevice()
    device.limit_memory(1000)
    stream = device.stream("compute")
    kept = device.empty((600,), "uint8", stream)
    del kept  # recycled, and still counted
    assert device.ledger.bytes["device"] == 600
    assert device.empty((700,), "uint8", stream).nbytes == 700
    with pytest.raises(DeviceMemoryError, match=r"1001 bytes wanted .* 0 held"):
        device.fixed(1001)
    device.close()


def test_memory_that_is_held_makes_no_room():
    device = SimulatedDevice()
    device.limit_memory(1000)
    kept = device.empty((600,), "uint8", device.stream("compute"))
    with pytest.raises(DeviceMemoryError, match="600 held by this pipeline"):
        device.fixed(401)
    half = device.fixed(400)
    device.fixed_free(half)
    del kept
    device.close()


def test_host_memory_is_not_counted():
    device = SimulatedDevice()
    device.limit_memory(1)
    device.host_free(device.host_empty(1 << 20, pinned=True))
    device.close()


def test_on_the_cpu_a_limit_is_a_warning():
    report = run("1kB", device="cpu")
    assert report.frames["delivered"] == 12
    assert [warning for warning in report.warnings if "device_memory has no effect on cpu" in warning]
    assert not run(None, device="cpu").warnings


def test_what_the_device_itself_lacks_is_not_called_a_limit():
    text = str(memory_error(3_000_000_000, 2_000_000, 1_000_000))
    assert text.startswith(
        "device memory is exhausted: 3000000000 bytes wanted (3.0 GB), 2000000 held by this pipeline"
    )
    assert "1000000 free on the device (1.0 MB)" in text and "limit" not in text
    assert "limit set by CUPY_GPU_MEMORY_LIMIT" in str(memory_error(1, 1, 1, 1, "CUPY_GPU_MEMORY_LIMIT"))


# -- sizes as people write them --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(1, 1), (4_000_000_000, 4_000_000_000), ("4GB", 4_000_000_000), ("4 gb", 4_000_000_000), ("1.5GB", 1_500_000_000),
     ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("8k", 8000), ("700", 700), ("700 B", 700), ("1TiB", 1 << 40)],
)  # fmt: skip
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-4GB", "4iB", "1e9", "4 G B", True, None, 4.5, 0, "0.1B", -1])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)
    if text is not None:
        with pytest.raises(ConfigError, match="device_memory: expected"):
            Pipeline([FrameList(frames=())], device_memory=text)


def test_the_limit_in_yaml():
    text = "version: 1\nsources: [a.mp4]\n"
    assert config.loads(text).device_memory is None
    assert config.loads(text + "device_memory: 4GB\n").kwargs()["device_memory"] == 4_000_000_000
    assert config.loads(text + "device_memory: ${M}\n", env={"M": "1 MiB"}).device_memory == 1 << 20
    assert config.loads(text, sets=["device_memory=12"]).device_memory == 12
    with pytest.raises(ConfigError, match=r":3: device_memory: expected a number of bytes, .* got the text '4 apples'"):
        config.loads(text + "device_memory: 4 apples\n")
    assert "device_memory" in config.schema()["properties"]


# -- a system with little memory to page-lock ------------------------------------------------------------------------


def slots(monkeypatch: pytest.MonkeyPatch, limit: int | None, frames: list[Any] | None = None, **staging: Any) -> Any:
    monkeypatch.setattr(SimulatedDevice, "host_limit_nbytes", limit)
    frames = pattern_frames(30) if frames is None else frames
    with Pipeline([FrameList(frames=frames)], ["rgb"], ["discard"], device="simulated",
                  staging={"batch": 2, "fillers": 2, **staging}) as pipeline:  # fmt: skip
        report = pipeline.run()
    assert report.frames["delivered"] == len(frames)
    balance(report)
    told = [warning for warning in report.warnings if "WSL 2" in warning]
    return report.staging["slots"], report.memory["pinned_bytes"], told


SLOT = 2 * PICTURE


def test_without_a_limit_slots_are_as_planned(monkeypatch):
    count, _, told = slots(monkeypatch, None)
    assert (count, told) == (5, [])


def test_the_ring_stays_within_what_the_system_gives(monkeypatch):
    count, nbytes, told = slots(monkeypatch, 3 * SLOT + 100)
    assert count == 3 and len(told) == 1
    assert f"3 slots of {format_bytes(SLOT)} instead of 5, to stay within {format_bytes(3 * SLOT + 100)}" in told[0]
    rest = slots(monkeypatch, None)[1] - 5 * SLOT  # page-locked for results
    assert nbytes - rest <= 3 * SLOT


def test_two_slots_are_the_least(monkeypatch):
    count, _, told = slots(monkeypatch, 10)
    assert count == 2 and "the least there can be" in told[0]


def test_a_limit_that_is_enough_changes_nothing(monkeypatch):
    assert slots(monkeypatch, 5 * SLOT)[::2] == (5, [])


def test_slots_that_somebody_asked_for_stay(monkeypatch):
    assert slots(monkeypatch, 10, slots=4)[::2] == (4, [])


def test_what_is_not_page_locked_is_not_limited(monkeypatch):
    assert slots(monkeypatch, 10, strategy="pageable")[::2] == (5, [])


def test_pictures_that_grow_take_slots_away_later(monkeypatch):
    large = pattern_frames(10, 128, 96)
    limit = 4 * 2 * FrameSpec.of(large[0]).nbytes - 1
    assert limit > 5 * SLOT
    count, _, told = slots(monkeypatch, limit, pattern_frames(10) + large + pattern_frames(10))
    assert count == 3 and len(told) == 1


# -- errors that show only when a batch is waited for ----------------------------------------------------------------


class Copies(Stage):
    """Makes an image of the luma."""

    reads = frozenset({"planes"})
    writes = frozenset({"image"})

    def plan(self, flow: Flow) -> Flow:
        return flow.put("image", ArraySpec((flow.spec.height, flow.spec.width, 3)))

    def launch(self, batch: Batch) -> None:
        for i in range(len(batch)):
            batch.out["image"][i] = batch.planes.picture(i)[0][..., None]


def breaks_when_waited_for(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    plain, seen = SimulatedEvent.synchronize, []

    def synchronize(self: SimulatedEvent) -> None:
        plain(self)
        if self.name.startswith("done") and self._stream is not None:
            seen.append(self)
            if len(seen) >= nth:
                raise DeviceError("the GPU context is lost (fake)")

    monkeypatch.setattr(SimulatedEvent, "synchronize", synchronize)


def test_an_error_found_by_waiting_names_the_batch_and_the_only_stage(monkeypatch):
    breaks_when_waited_for(monkeypatch, 3)
    pipeline = Pipeline([FrameList(name="film", frames=pattern_frames(12))], [Copies()], ["discard"],
                        device="simulated", staging={"batch": 2})  # fmt: skip
    with pytest.raises(DeviceError) as caught, pipeline:
        pipeline.run()
    where = caught.value.where
    assert {**where, "pts": 4} == {"source": "film", "index": 4, "pts": 4, "stage": "copies"}
    assert "the device failed at frame 4 of 'film' and 1 more behind stage 'copies': the GPU" in str(caught.value)
    assert pipeline.report is not None
    balance(pipeline.report)
    assert pipeline.report.frames["failed"]["copies"] >= 2


def test_several_stages_are_all_named(monkeypatch):
    breaks_when_waited_for(monkeypatch, 1)
    with pytest.raises(DeviceError, match="behind stages 'copies', 'invert'") as caught:
        with Pipeline([FrameList(frames=pattern_frames(4))], [Copies(), Invert()], ["discard"],
                      device="simulated") as pipeline:  # fmt: skip
            pipeline.run()
    assert "stage" not in caught.value.where


def test_only_what_comes_late_is_laid_at_the_door_of_a_stage():
    chain = Chain([Copies()], FrameSpec.of(pattern_frames(1)[0]), None)
    items = [Item("film", 7, None, None, 0.0)]
    for error in (HazardError("unordered"), DeviceMemoryError("none left")):
        locate(error, items, chain)
        assert error.where == {"source": "film", "index": 7} and "stage" not in str(error)
    other = StageError("mine", stage="x")
    known = DeviceError("said", source="a")
    for error in (other, known, ValueError("no device's")):
        before = str(error)
        locate(error, items, chain)
        assert str(error) == before


def test_a_stage_error_says_what_the_device_makes_of_it(monkeypatch):
    def explain(self: Any, error: BaseException) -> BaseException:
        return DeviceError("in plain words") if isinstance(error, ArithmeticError) else error

    class Divides(Copies):
        def launch(self, batch: Batch) -> None:
            raise ArithmeticError(np.int64(7))

    monkeypatch.setattr(SimulatedDevice, "explain", explain)
    with pytest.raises(StageError, match="DeviceError: in plain words") as caught:
        with Pipeline([FrameList(frames=pattern_frames(2))], [Divides()], ["discard"], device="simulated") as pipeline:
            pipeline.run()
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_a_half_that_cannot_grow_is_given_back_once():
    small, large = pattern_frames(2), pattern_frames(2, 640, 480)
    limit = FrameSpec.of(large[0]).nbytes - 1
    pipeline = Pipeline([FrameList(frames=small + large)], [Copies()], ["discard"], device="simulated",
                        device_memory=limit)  # fmt: skip
    with pytest.raises(DeviceMemoryError, match="uploads in flight"), pipeline:
        pipeline.run()
    assert pipeline._engine is not None
    assert pipeline._engine.device.ledger.bytes["device"] == 0


def test_an_error_that_a_filler_finds_names_the_stage_too(monkeypatch):
    plain = SimulatedEvent.done

    def done(self: SimulatedEvent) -> bool:
        if self.name.startswith("copied") and self._stream is not None:
            raise DeviceError("the GPU context is lost (fake)")
        return plain(self)

    monkeypatch.setattr(SimulatedEvent, "done", done)
    pipeline = Pipeline([FrameList(name="film", frames=pattern_frames(12))], [Copies()], ["discard"],
                        device="simulated", staging={"slots": 2})  # fmt: skip
    with pytest.raises(DeviceError, match="behind stage 'copies': the GPU context is lost") as caught, pipeline:
        pipeline.run()
    assert (caught.value.where["source"], caught.value.where["stage"]) == ("film", "copies")
    assert pipeline.report is not None
    balance(pipeline.report)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_host_memory_that_runs_out_names_the_stage_as_well(device):
    class Enormous(Stage):
        reads = frozenset({"planes"})
        writes = frozenset({"huge"})

        def plan(self, flow: Flow) -> Flow:
            return flow.put("huge", ArraySpec((1 << 20, 1 << 42)))

    with pytest.raises(StageError, match=r"stage 'enormous' failed at frame 0 .* \(in batches of 1\)") as caught:
        with Pipeline([FrameList(frames=pattern_frames(2))], [Enormous()], ["discard"], device=device) as pipeline:
            pipeline.run()
    assert isinstance(caught.value.__cause__, MemoryError)
