"""Motion: boxes against known truth, state per source, and a kernel that is exactly what its docstring says."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from framepipe.device.cpu import CpuDevice
from framepipe.errors import ConfigError
from framepipe.frame import Batch, FrameSpec, Item, Planes
from framepipe.kernels import cpu
from framepipe.kernels._difference import difference
from framepipe.pipeline import Pipeline
from framepipe.sources.synthetic import Synthetic
from framepipe.stage import Flow
from framepipe.stages._blobs import find_blobs
from framepipe.stages.motion import Motion
from framepipe.testing import FrameList, pattern_frames

SAMPLES = Path(__file__).parents[1] / "samples"
Box = Sequence[float]


class Runner:
    """Does for one stage what a pipeline does: open, plan, memory, launch, read-back, collect."""

    def __init__(self, stage: Motion) -> None:
        self.stage = stage
        self.device = CpuDevice()
        self.stream = self.device.stream("compute")
        stage.id = "motion"
        stage.open(self.device)

    def __call__(self, spec: FrameSpec, named: Sequence[tuple[str, Any]]) -> list[list[dict[str, Any]]]:
        """One batch of (source, frame or tuple of planes)."""
        flow = self.stage.plan(Flow(spec))
        n = len(named)
        planes = Planes(spec, n, frames=[frame for _, frame in named])
        batch = Batch([Item(source, 0, None, None, 0.0) for source, _ in named], planes)
        batch.out = {
            name: self.device.empty((n, *array.shape), array.dtype, self.stream) for name, array in flow.arrays.items()
        }
        for out in batch.out.values():
            out[...] = 255  # recycled memory holds anything
        self.stage.launch(batch)
        batch.arrays.update(batch.out)
        batch.planes = None
        batch.host = {name: batch.arrays[name] for name in self.stage.readback}
        self.stage.collect(batch)
        return [item.meta["motion"] for item in batch.items]


def found_in(frames: Iterable[Any], **options: Any) -> list[list[dict[str, Any]]]:
    runner = Runner(Motion(**options))
    return [runner(FrameSpec.of(frame), [("a", frame)])[0] for frame in frames]


def frames_of(source: Synthetic) -> list[Any]:
    return list(source.open(lambda: False).frames())


def gray(luma: np.ndarray) -> Any:
    """A frame of one luma plane, (H, W) uint8."""
    return av.VideoFrame.from_ndarray(np.ascontiguousarray(luma), "gray")


def filled(luma: np.ndarray, pix_fmt: str) -> Any:
    """A frame with these codes of 8 bits in every component, at the depth of the format."""
    frame = av.VideoFrame(luma.shape[1], luma.shape[0], pix_fmt)
    spec = FrameSpec.of(frame)
    for plane, layout in zip(frame.planes, spec.planes, strict=True):
        samples = np.frombuffer(memoryview(plane), spec.format.dtype).reshape(layout.height, -1)
        codes = luma[: layout.height, : layout.width].repeat(layout.channels, axis=1)
        samples[:, : codes.shape[1]] = codes.astype(samples.dtype) << (spec.format.bits - 8 + spec.format.shift)
    return frame


def scene(width: int = 160, height: int = 96) -> np.ndarray:
    """A background with edges in it."""
    y, x = np.mgrid[:height, :width]
    return (90 + 40 * ((x // 8 + y // 8) % 2) + x // 8).astype(np.uint8)


def with_square(background: np.ndarray, x: int, y: int = 32, side: int = 24, code: int = 230) -> np.ndarray:
    picture = background.copy()
    picture[y : y + side, x : x + side] = code
    return picture


def iou(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    common = width * height
    return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)


def recall_and_precision(found: Sequence[Any], truth: Sequence[Any]) -> tuple[float, float]:
    hits = boxes = known = 0
    for here, there in zip(found, truth, strict=True):
        left = [entry["box"] for entry in there]
        boxes, known = boxes + len(here), known + len(left)
        for entry in here:
            best = max(left, key=lambda box: iou(box, entry["box"]), default=None)
            if best is not None and iou(best, entry["box"]) >= 0.5:
                left.remove(best)
                hits += 1
    return hits / known, hits / boxes


# -- against the truth --


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pix_fmt": "yuv420p10le"},
        {"pix_fmt": "p010le"},
        {"pix_fmt": "gray"},
        {"pix_fmt": "rgb24"},
        {"pix_fmt": "gbrp12le"},
        {"pix_fmt": "yuvj420p", "noise": 4.0},
        {"width": 641, "height": 363, "shapes": 6},
        {"width": 1280, "height": 720, "matrix": "bt709"},
    ],
    ids=str,
)
def test_boxes_are_where_the_shapes_are(options):
    source = Synthetic(**{"width": 320, "height": 180, "frames": 50, "empty": 25, **options})
    found = found_in(frames_of(source))
    truth = [source.truth(index) for index in range(50)]
    assert recall_and_precision(found, truth) == (1.0, 1.0)
    for here, there in zip(found, truth, strict=True):
        for entry in here:
            assert max(iou(entry["box"], t["box"]) for t in there) > 0.8
            assert entry["label"] == "motion"
            assert 0.5 < entry["score"] <= 1
    json.dumps(found, allow_nan=False)


def test_the_sample_is_found():
    truth = [frame["boxes"] for frame in json.loads((SAMPLES / "shapes.json").read_text("utf-8"))["frames"]]
    with av.open(str(SAMPLES / "shapes.mp4")) as container:
        found = found_in(container.decode(video=0))
    recall, precision = recall_and_precision(found, truth)
    assert recall >= 0.95
    assert precision >= 0.95


def test_who_is_there_from_the_start_leaves_no_ghost():
    background = scene()
    pictures = [with_square(background, min(4 * i, 110)) for i in range(40)]
    found = found_in(map(gray, pictures), warmup=20)
    assert all(not here for here in found[:20])
    for i, here in enumerate(found[20:27], 20):
        assert len(here) == 1
        assert iou(here[0]["box"], (4 * i, 32, 4 * i + 24, 56)) > 0.7


def test_what_stands_still_fades_after_hold_and_leaves_no_ghost():
    background = scene()
    pictures = [background] * 40 + [with_square(background, 60)] * 40 + [background] * 5
    found = found_in(map(gray, pictures), warmup=5, hold=25)
    assert [len(here) for here in found[40:65]] == [1] * 25
    assert not any(found[65:])


def test_a_change_of_light_is_no_motion():
    background = scene()
    pictures = [(background * (1 + 0.04 * max(0, i - 10))).clip(0, 255).astype(np.uint8) for i in range(22)]
    lit = with_square(pictures[-1], 60, code=20)
    found = found_in(map(gray, [*pictures, lit]), warmup=5)
    assert not any(found[:-1])
    assert len(found[-1]) == 1


def test_a_cut_is_no_motion_and_learnt_at_once():
    before, after = scene(), np.roll(255 - scene(), 3, axis=1)
    found = found_in(map(gray, [before] * 8 + [after] * 3 + [with_square(after, 60, code=10)]), warmup=5)
    assert [len(here) for here in found] == [0] * 11 + [1]


def test_a_camera_that_shakes_by_a_pixel_is_no_motion():
    background = scene()
    pictures = [np.roll(background, (i % 2, i // 2 % 2), (0, 1)) for i in range(20)]
    found = found_in(map(gray, [*pictures, with_square(background, 60)]), warmup=5)
    assert not any(found[:-1])
    assert len(found[-1]) == 1


def test_small_things_are_left_out_and_near_ones_joined():
    background = scene()
    two = with_square(with_square(background, 40, side=16), 72, side=16)
    pictures = [gray(background)] * 6 + [gray(two)]
    assert len(found_in(pictures, warmup=5)[-1]) == 2
    (joined,) = found_in(pictures, warmup=5, merge=16)[-1]
    assert iou(joined["box"], (40, 32, 88, 48)) > 0.9
    assert found_in(pictures, warmup=5, min_area=257)[-1] == []
    assert len(found_in(pictures, warmup=5, min_area=256)[-1]) == 2


@pytest.mark.parametrize("pix_fmt", ["gray", "yuv420p", "yuv420p10le", "p010le", "gray16le", "rgb24"])
def test_the_threshold_is_in_codes_of_8_bits(pix_fmt):
    background = np.full((96, 160), 100, np.uint8)
    pictures = [background] * 6 + [with_square(background, 40, code=121)]
    frames = [filled(picture, pix_fmt) for picture in pictures]
    assert len(found_in(frames, warmup=5, threshold=20)[-1]) == 1
    assert found_in(frames, warmup=5, threshold=22)[-1] == []


# -- sources, batches, specs --


def test_sources_in_one_batch_keep_backgrounds_of_their_own():
    sources = {
        name: Synthetic(width=160, height=96, seed=seed, frames=24, empty=10)
        for name, seed in zip("ab", (1, 2), strict=True)
    }
    frames = {name: frames_of(source) for name, source in sources.items()}
    alone = {name: found_in(frames[name], warmup=5) for name in sources}
    assert alone["a"] != alone["b"]
    runner = Runner(Motion(warmup=5))
    mixed: dict[str, list[Any]] = {"a": [], "b": []}
    order = [(name, i) for i in range(24) for name in "ab"]
    order[6:10] = [("a", 3), ("a", 4), ("b", 3), ("b", 4)]  # runs of one source, as a decoder delivers them
    spec = sources["a"].spec
    for begin in range(0, 48, 5):
        part = order[begin : begin + 5]
        results = runner(spec, [(name, frames[name][i]) for name, i in part])
        for (name, _), result in zip(part, results, strict=True):
            mixed[name].append(result)
    assert mixed == alone


def test_a_source_begins_anew_when_its_spec_changes_and_others_do_not():
    large, small = (Synthetic(width=w, height=h, frames=20, empty=8) for w, h in ((160, 96), (128, 80)))
    alone = found_in(frames_of(small), warmup=4)
    stage = Motion(warmup=4)
    runner = Runner(stage)
    for frame in frames_of(large):
        runner(large.spec, [("a", frame), ("b", frame)])
    second = Runner(copy.copy(stage))  # as a pipeline does for a further spec
    second.stage.reset("a")
    assert [second(small.spec, [("a", frame)])[0] for frame in frames_of(small)] == alone
    (here,) = runner(large.spec, [("b", frames_of(large)[-1])])
    assert len(here) == 4, "source b still knows its background"
    assert runner(large.spec, [("a", frames_of(large)[-1])]) == [[]], "source a, back at its first size, does not"


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_boxes_are_in_the_upright_picture(rotation, mirrored):
    background = scene(160, 100)
    moved = with_square(background, 40, y=8, side=16)
    moved[24:40, 40:48] = 230  # an L: no turn of it looks like another
    spec = replace(FrameSpec.of(gray(background)), rotation=rotation, mirrored=mirrored)
    runner = Runner(Motion(warmup=5))
    for _ in range(6):
        runner(spec, [("a", gray(background))])
    ((entry,),) = runner(spec, [("a", gray(moved))])
    changed = moved != background
    rows, columns = np.nonzero(np.rot90(np.fliplr(changed) if mirrored else changed, rotation // 90))
    assert entry["box"] == pytest.approx([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], abs=1)


@pytest.mark.parametrize(("forget", "boxes"), [(("reset", "b"), 1), (("reset", "a"), 0), (("close",), 0)])
def test_a_source_that_is_reset_begins_anew(forget, boxes):
    background = scene()
    runner = Runner(Motion(warmup=5))
    spec = FrameSpec.of(gray(background))
    for _ in range(5):
        runner(spec, [("a", gray(background))])
    method, *arguments = forget
    getattr(copy.copy(runner.stage), method)(*arguments)  # the copies of a stage share what is known of sources
    (here,) = runner(spec, [("a", gray(with_square(background, 60)))])
    assert len(here) == boxes


def test_parameters_are_checked_and_make_equal_stages():
    assert Motion(threshold=9) == replace(Motion(), threshold=9) != Motion()
    with pytest.raises(ConfigError, match=r"threshold.*update"):
        Motion(threshold=0, update=0.9)
    with pytest.raises(ConfigError, match="min_area must be 0 or more"):
        Motion(min_area=-1)


# -- the kernel --


def by_the_book(channels, state, mask, *, shrink, extra_bits, threshold, limit, slow, hold, first=False):
    """The kernel's docstring, one pixel at a time, in Python's own numbers."""
    height, width = state.shape[1:]
    log = shrink.bit_length() - 1

    def luma(y, x):
        parts = []
        for plane in channels:
            block = plane[y * shrink : (y + 1) * shrink, x * shrink : (x + 1) * shrink]
            parts.append((sum(block.ravel().tolist()) << 8) >> (2 * log + extra_bits))
        return parts[0] if len(parts) == 1 else (77 * parts[0] + 150 * parts[1] + 29 * parts[2]) >> 8

    every = [(y, x) for y in range(height) for x in range(width)]
    f = {at: luma(*at) for at in every}
    b, p, c, age = ({at: int(layer[at]) for at in every} for layer in state)

    def begin():
        for at in every:
            state[0][at] = state[1][at] = state[2][at] = f[at]
            state[3][at] = 0
        mask[...] = 0

    if first:
        return begin()
    ratios = [min(256 * f[y, x] // max(b[y, x], 2048), 511) for y, x in every if y % 4 == 2 and x % 4 == 2]
    half = len(ratios) // 2
    gain = next(g for g in range(512) if sum(r <= g for r in ratios) > half) if ratios else 256
    if abs(gain - 256) >= 3 and sum(abs(r - gain) <= 16 for r in ratios) > half:
        for layer in (b, p, c):
            for at in every:
                layer[at] = min(layer[at] * gain >> 8, 65535)
    changed = set()
    for at in every:
        if abs(f[at] - b[at]) > threshold:
            if abs(f[at] - p[at]) <= threshold:
                b[at], p[at] = p[at], b[at]
            else:
                changed.add(at)
    if len(changed) > limit:
        return begin()
    outside = set()
    for y, x in changed:
        around = [b[y + i, x + j] for i in (-1, 0, 1) for j in (-1, 0, 1) if (y + i, x + j) in b]
        if f[y, x] > max(around) + threshold or f[y, x] < min(around) - threshold:
            outside.add((y, x))
    for row, column in np.ndindex(mask.shape):
        cell = {(y, x) for y in range(4 * row, 4 * row + 4) for x in range(4 * column, 4 * column + 4)}
        mask[row, column] = min(len(cell & changed), 15) + 16 * min(len(cell & outside), 15)
    for at in every:
        step = (f[at] >> 1) - (b[at] >> 1)
        if at not in changed:
            age[at] = 0
            b[at] += step >> (slow - 1)
            continue
        if at not in outside:
            b[at] += step >> (slow + 1)
        if age[at] > 0 and abs(f[at] - c[at]) <= threshold:
            age[at] = min(age[at] + 1, 65535)
        else:
            c[at], age[at] = f[at], 1
        if age[at] >= hold:
            p[at], b[at], age[at] = b[at], f[at], 0
    for layer, values in zip(state, (b, p, c, age), strict=True):
        for at in every:
            layer[at] = values[at]
    return None


@pytest.mark.parametrize(
    ("size", "shrink", "dtype", "extra_bits", "count"),
    [
        ((18, 26), 1, np.uint8, 0, 1),
        ((25, 39), 2, np.uint8, 0, 1),
        ((24, 36), 2, np.uint16, 2, 1),
        ((64, 80), 4, np.uint16, 8, 1),
        ((25, 39), 2, np.uint8, 0, 3),
        ((3, 3), 1, np.uint8, 0, 1),
        ((2, 1), 1, np.uint8, 0, 1),
    ],
)
def test_the_kernel_is_what_its_docstring_says(size, shrink, dtype, extra_bits, count):
    rng = np.random.default_rng(11)
    shape = (4, size[0] // shrink, size[1] // shrink)
    cells = (-(-shape[1] // 4), -(-shape[2] // 4))
    states = [np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)]
    masks = [np.full(cells, 255, np.uint8), np.full(cells, 255, np.uint8)]
    codes = 256 << extra_bits
    still = rng.integers(0, codes, (count, *size), dtype=np.uint32)
    seen = set()
    for number in range(24):
        picture = still.copy()
        if number in (9, 17):  # a cut, and back
            still = picture = rng.integers(0, codes, still.shape, dtype=np.uint32)
        elif number in (5, 13):
            still = picture = np.minimum(still * 9 // 10, codes - 1)
        if number % 5 != 4 and min(size) > 8:
            y, x = number % 6, 2 * number % (size[1] // 2)
            picture[:, y : y + 8, x : x + 12] = codes // (2 + number % 2) + rng.integers(0, codes // 8)
        options = {
            "shrink": shrink, "extra_bits": extra_bits, "threshold": 12 * 256, "limit": shape[1] * shape[2] * 6 // 10,
            "slow": 1 + number % 6, "hold": 1 + number % 4, "first": number == 0,
        }  # fmt: skip
        channels = [plane.astype(dtype) for plane in picture]
        difference(channels, states[0], masks[0], None, **options)
        by_the_book(channels, states[1], masks[1], **options)
        assert np.array_equal(masks[0], masks[1]), number
        assert np.array_equal(states[0], states[1]), number
        seen |= set(np.unique(masks[0]).tolist())
    assert len(seen) > 3 or min(size) < 8, "the pictures must give the kernel something to do"


@pytest.mark.parametrize("far", [16, 17, -16, -17])
def test_light_that_moves_half_of_the_picture_alike(far):
    # Of the 16 pixels looked at, 300 is the median; with those at 300 + far, if they are near, 12 are near it.
    ratios = [200] * 4 + [300] * 5 + [300 + far] * 7 if far > 0 else [300 + far] * 7 + [300] * 5 + [400] * 4
    picture = np.full((16, 16), 300, np.uint16)
    picture[2::4, 2::4] = np.reshape(ratios, (4, 4))
    states = [np.zeros((4, 16, 16), np.uint16) for _ in range(2)]
    masks = [np.zeros((4, 4), np.uint8) for _ in range(2)]
    for state in states:
        state[:3] = 128 << 8
    options = {"shrink": 1, "extra_bits": 8, "threshold": 3072, "limit": 256, "slow": 4, "hold": 9}
    difference([picture * 128], states[0], masks[0], None, **options)
    by_the_book([picture * 128], states[1], masks[1], **options)
    assert np.array_equal(states[0], states[1])
    assert (states[0][0, 0, 0] > 128 << 8) == (abs(far) == 16), "brighter, or as it was"


# -- regions --


def test_regions_of_cells():
    full = 15 | 15 << 4
    mask = np.zeros((12, 20), np.uint8)
    mask[1:4, 1:4] = full  # two that touch by a corner are one
    mask[4:6, 4:7] = full
    mask[1:9, 10] = mask[1:9, 14] = mask[8, 10:15] = full  # a U joins at its end
    mask[0, 18] = 3 << 4 | 3  # too few pixels
    mask[10, 18] = 15  # changed, but nothing stands out
    blobs = {blob.box: blob for blob in find_blobs(mask)}
    assert set(blobs) == {(1, 1, 7, 6), (10, 1, 15, 9)}
    assert blobs[1, 1, 7, 6].area == 16 * (9 + 6)
    assert blobs[1, 1, 7, 6].fill == pytest.approx(15 / 30)
    assert [blob.box for blob in find_blobs(mask, reach=2)] == [(1, 1, 15, 9)]
    assert find_blobs(np.zeros((3, 3), np.uint8)) == []


def test_boxes_end_inside_cells():
    full = 15 | 15 << 4
    mask = np.zeros((8, 9), np.uint8)
    mask[2:5, 2:5] = full
    mask[2:5, 1] = 6 | 6 << 4  # 0.4 of a column
    mask[5, 2:5] = 3 | 3 << 4  # 0.2 of a row, too little for a cell of its own
    (blob,) = find_blobs(mask)
    assert blob.box == pytest.approx((1.6, 2, 5, 5.2))


def test_objects_are_whole_where_they_look_like_their_background():
    full = 15 | 15 << 4
    mask = np.zeros((8, 20), np.uint8)
    mask[2:5, 2:5] = full
    mask[2:5, 5:15] = 15  # changed, but does not stand out: two cells of it, and the next as their fringe
    mask[2:5, 17] = 15
    (blob,) = find_blobs(mask)
    assert blob.box == (2, 2, 8, 5)
    assert blob.area == 16 * 9


def test_working_memory_is_let_go_at_the_close(monkeypatch):
    """Of every picture size: what copies of the stage, for further sizes, had once lived as long as the pipeline."""
    made: list[weakref.ref[np.ndarray]] = []

    def scratch(height: int, width: int) -> np.ndarray:
        block = np.empty(height * width, np.uint32)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(cpu, "difference_scratch", scratch)
    sources = [FrameList(name=f"{width}", frames=pattern_frames(4, width, 48)) for width in (64, 96)]
    pipeline = Pipeline(sources, [Motion()], ["discard"], device="simulated")
    pipeline.run()
    pipeline.close()
    assert len(made) == 2 and all(block() is None for block in made)
