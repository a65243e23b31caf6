"""The synthetic source: what it draws is what `truth` says, in every format, from memory that is shared and bounded."""

from __future__ import annotations

import importlib.util
import itertools
import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.format import VideoFormat

from framepipe import pixfmt
from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec, Planes, frame_planes
from framepipe.kernels import cpu
from framepipe.sources.synthetic import Synthetic

SAMPLES = Path(__file__).parents[1] / "samples"


def pictures(source: Synthetic, count: int | None = None) -> list[av.VideoFrame]:
    return list(itertools.islice(source.open(lambda: False).frames(), count))


def planes_of(frame: av.VideoFrame) -> tuple[np.ndarray, ...]:
    return frame_planes(frame, FrameSpec.of(frame))


def pixels(frame: av.VideoFrame) -> bytes:
    return b"".join(plane.tobytes() for plane in planes_of(frame))


def address(frame: av.VideoFrame) -> int:
    return planes_of(frame)[0].ctypes.data


def known_formats() -> list[str]:
    names = []
    for name in pixfmt.table():
        try:
            VideoFormat(name)
        except ValueError:
            continue
        names.append(name)
    return names


@pytest.mark.parametrize("pix_fmt", known_formats())
def test_every_format_is_drawn_and_tagged(pix_fmt):
    source = Synthetic(width=67, height=49, pix_fmt=pix_fmt, shapes=1, frames=1, seed=3)
    (frame,) = pictures(source)
    spec = FrameSpec.of(frame)
    assert spec == source.spec
    assert not spec.assumed
    assert (frame.format.name, frame.width, frame.height) == (pix_fmt, 67, 49)
    x1, y1, x2, y2 = (int(side) for side in source.truth(0)[0]["box"])
    rgb = cpu.to_rgb(Planes(spec, 1, frames=[frame]))[0][(y1 + y2) // 2, (x1 + x2) // 2]
    yellow = np.array([247, 230, 76])  # (0.97, 0.90, 0.30) in codes
    if spec.format.model == "gray":
        yellow = np.full(3, round(0.299 * 247 + 0.587 * 230 + 0.114 * 76))
    assert np.abs(rgb.astype(int) - yellow).max() <= 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        # Y, U, V of (0.97, 0.90, 0.30) from the standards' formulas, by hand.
        ({"matrix": "bt601"}, (203, 58, 147)),
        ({"matrix": "bt709"}, (207, 59, 142)),
        ({"matrix": "bt601", "full_range": True}, (217, 48, 149)),
        ({"matrix": "bt601", "pix_fmt": "yuv444p10le"}, (811, 233, 587)),
        ({"matrix": "bt601", "pix_fmt": "p010le"}, (811 << 6,)),
    ],
)
def test_codes_follow_matrix_range_and_depth(options, code):
    source = Synthetic(width=160, height=96, shapes=1, frames=1, **options)
    (frame,) = pictures(source)
    x1, y1, x2, y2 = source.truth(0)[0]["box"]
    found = []
    for plane, layout in zip(planes_of(frame), source.spec.format.planes, strict=True):
        if layout.channels == 1:
            found.append(plane[int(y1 + y2) // 2 >> layout.h_shift, int(x1 + x2) // 2 >> layout.w_shift])
    assert found == list(code)


def test_the_truth_is_where_the_shapes_are():
    source = Synthetic(width=320, height=180, frames=60, seed=5)
    for index, frame in enumerate(pictures(source)):
        luma = planes_of(frame)[0]
        assert len(source.truth(index)) == 4
        for found in source.truth(index):
            x1, y1, x2, y2 = (int(side) for side in found["box"])
            assert 0 <= x1 < x2 <= 320
            assert 0 <= y1 < y2 <= 180
            code = luma[(y1 + y2) // 2, (x1 + x2) // 2]
            same = luma == code
            rows, columns = np.nonzero(same[y1:y2, x1:x2])
            assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, y2 - y1 - 1, 0, x2 - x1 - 1)
            share = same[y1:y2, x1:x2].mean()
            assert share == 1 if found["label"] == "rectangle" else 0.7 < share < 0.85
            assert not same[y1:y2, max(x1 - 1, 0) : x1].any()
            assert not same[y1:y2, x2 : x2 + 1].any()


def test_shapes_never_touch_and_move_a_little_at_a_time():
    for seed in range(5):
        source = Synthetic(seed=seed, shapes=6)
        before = source.truth(source.period - 1)
        for index in range(source.period, 2 * source.period):
            now = source.truth(index)
            for a, b in itertools.combinations(now, 2):
                (_, top, _, bottom), (_, other_top, _, other_bottom) = a["box"], b["box"]
                assert bottom < other_top or other_bottom < top
            for old, new in zip(before, now, strict=True):
                assert abs(old["box"][0] - new["box"][0]) <= 0.02 * 640 + 1
                assert abs(old["box"][1] - new["box"][1]) <= 0.02 * 360 + 1
            before = now
        assert source.truth(3) == source.truth(3 + source.period)
        assert source.truth(3) != source.truth(9)


def test_empty_pictures_come_first():
    source = Synthetic(width=64, height=48, frames=6, empty=4, noise=0)
    frames = pictures(source)
    assert [len(source.truth(i)) for i in range(6)] == [0, 0, 0, 0, 4, 4]
    assert len({pixels(frame) for frame in frames[:4]}) == 1
    assert pixels(frames[4]) != pixels(frames[0])
    moved = Synthetic(width=64, height=48, frames=2)
    assert [pixels(frame) for frame in pictures(moved)] == [pixels(frame) for frame in frames[4:]]


@pytest.mark.parametrize(("pix_fmt", "size"), [("yuv420p", (65, 47)), ("rgb24", (64, 48)), ("yuv422p10le", (66, 50))])
def test_frames_share_memory_that_is_bounded_and_never_changes(pix_fmt, size):
    source = Synthetic(width=size[0], height=size[1], pix_fmt=pix_fmt, frames=None, cache_mib=1)
    source.__dict__["period"] = 7
    held = pictures(source, 30)
    before = [pixels(frame) for frame in held[:7]]
    assert len({id(frame) for frame in held}) == 30
    assert len({address(frame) for frame in held}) == 7, "a picture is drawn once"
    for index, frame in enumerate(held):
        assert (frame.pts, frame.time_base) == (index, Fraction(1, 25))
        assert address(frame) == address(held[index % 7])
        assert pixels(frame) == before[index % 7]
    again = pictures(source, 3)
    assert [address(frame) for frame in again] == [address(frame) for frame in held[:3]]


def test_whoever_makes_a_frame_writable_gets_a_copy():
    source = Synthetic(width=64, height=48, frames=2)
    first, second = pictures(source)
    kept = pixels(second)
    second.make_writable()
    np.frombuffer(memoryview(second.planes[0]), np.uint8)[:] = 0
    assert pixels(second) != kept
    assert pixels(pictures(source)[1]) == kept
    assert pixels(first) != pixels(second)


def test_the_cache_says_how_long_the_motion_is():
    assert Synthetic().period == 250
    big = Synthetic(width=1920, height=1080)
    assert big.period * big.spec.nbytes <= 128 * 2**20 < (big.period + 1) * big.spec.nbytes
    assert Synthetic(width=7680, height=4320, cache_mib=1).period == 2


def test_the_seed_decides():
    one, same, other = (
        [pixels(f) for f in pictures(Synthetic(width=96, height=64, frames=3, seed=seed, noise=3))]
        for seed in (1, 1, 2)
    )
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "gray10le", "rgb24"])
def test_noise_has_the_strength_asked_for(pix_fmt):
    quiet, noisy = (
        planes_of(pictures(Synthetic(width=320, height=180, pix_fmt=pix_fmt, noise=noise, frames=1))[0])[0]
        for noise in (0, 5)
    )
    apart = (noisy.astype(float) - quiet) / (4 if pix_fmt == "gray10le" else 1)
    assert apart.std() == pytest.approx(5, rel=0.05)
    assert abs(apart.mean()) < 0.2


@pytest.mark.parametrize(
    ("rate", "time_base"), [(25, Fraction(1, 25)), ("30000/1001", Fraction(1001, 30000)), (12.5, Fraction(2, 25))]
)
def test_rates(rate, time_base):
    stream = Synthetic(width=64, height=48, rate=rate, frames=3).open(lambda: False)
    frames = list(stream.frames())
    assert (stream.rate, stream.time_base, stream.expected) == (1 / time_base, time_base, 3)
    assert [frame.pts * Fraction(frame.time_base) for frame in frames] == [0, time_base, 2 * time_base]


def test_it_ends_when_asked_to_stop_and_not_before():
    taken = 0
    stream = Synthetic(width=64, height=48, frames=None).open(lambda: taken >= 300)
    for _ in stream.frames():
        taken += 1
    assert taken == 300
    assert stream.expected is None
    assert pictures(Synthetic(width=64, height=48, frames=0)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pix_fmt": "yuv420"}, "did you mean 'yuv420p'"),
        ({"pix_fmt": "gbrap9le"}, "pix_fmt"),
        ({"matrix": "bt610"}, "did you mean 'bt601'"),
        ({"matrix": "rgb"}, "matrix"),
        ({"rate": "0/1"}, "rate"),
        ({"rate": "fast"}, "rate"),
        ({"rate": "1/0"}, "rate"),
        ({"width": 0}, "width"),
        ({"height": 24, "shapes": 4}, "height of 32"),
        ({"frames": -1}, "frames"),
        ({"noise": -1.0}, "noise"),
    ],
)
def test_mistakes_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        Synthetic(**options)


def test_the_sample_is_what_its_script_makes(tmp_path):
    found = importlib.util.spec_from_file_location("make_shapes", SAMPLES / "make_shapes.py")
    make_shapes = importlib.util.module_from_spec(found)
    found.loader.exec_module(make_shapes)
    make_shapes.write_truth(tmp_path / "shapes.json")
    assert (tmp_path / "shapes.json").read_bytes() == (SAMPLES / "shapes.json").read_bytes()
    assert json.loads((tmp_path / "shapes.json").read_text("utf-8")) == make_shapes.truth()
    assert (SAMPLES / "shapes.mp4").stat().st_size < 300_000
    with av.open(str(SAMPLES / "shapes.mp4")) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        assert len(packets) == make_shapes.SCENE.frames
        assert sum(packet.is_keyframe for packet in packets) == 10
        container.seek(0)
        drawn = make_shapes.SCENE.open(lambda: False).frames()
        for decoded, original in itertools.islice(zip(container.decode(video=0), drawn, strict=False), 40):
            assert FrameSpec.of(decoded) == make_shapes.SCENE.spec
            apart = planes_of(decoded)[0].astype(int) - planes_of(original)[0]
            assert (apart**2).mean() < 10
