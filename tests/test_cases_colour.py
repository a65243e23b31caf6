"""Colour: what tags say is done, what they do not say is assumed and told (rows B01 to B06)."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import pytest
from case_inputs import (
    BT709,
    BT2020,
    FCC,
    FULL,
    HLG,
    LIMITED,
    PQ,
    RED_601,
    RED_709,
    SMPTE170M,
    SMPTE240M,
    WEIGHTS,
    a_module_leaves_nothing_behind,
    bits_of,
    encode,
    formula,
    near,
    planes_of,
    rgb,
    see,
    shift_of,
    solid,
    tagged,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import framepipe
from framepipe.config import loads
from framepipe.errors import ConfigError
from framepipe.framespec import FrameSpec
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList, run_stages

__all__ = ["a_module_leaves_nothing_behind"]
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])


# -- B01: the matrix ---------------------------------------------------------------------------------------------------


@DEVICES
def test_b01_the_matrix_tag_decides(tmp_path, device):
    for colorspace, right in [(SMPTE170M, (254, 0, 0)), (BT709, (255, 24, 0))]:
        tags = {"color_range": LIMITED, "colorspace": colorspace}
        clip = encode(tmp_path / f"{colorspace}.mp4", [solid(RED_601, i) for i in range(3)], tags=tags)
        seen = see(clip, device=device)
        assert all(near(colour, right) for colour in seen.colours), (colorspace, seen.colours)
        assert seen.numbers == [0, 1, 2]
        assert seen.source["assumed"] == []


@pytest.mark.parametrize(
    ("codec", "suffix"), [("libx264", ".mkv"), ("libx265", ".mp4"), ("libvpx-vp9", ".webm"), ("ffv1", ".mkv")]
)
@pytest.mark.parametrize("colorspace", [BT709, SMPTE170M, BT2020, SMPTE240M])
def test_b01_every_codec_and_container(tmp_path, codec, suffix, colorspace):
    tags = {"color_range": LIMITED, "colorspace": colorspace}
    clip = encode(tmp_path / f"clip{suffix}", [solid((140, 90, 170))] * 2, codec, tags=tags)
    seen = see(clip)
    assert seen.source["assumed"] == []
    assert all(near(colour, rgb((140, 90, 170), colorspace)) for colour in seen.colours)


def test_b01_the_fast_conversion_too(tmp_path):
    for colorspace in WEIGHTS:
        frames = [tagged(solid((140, 90, 170)), {"colorspace": colorspace, "color_range": LIMITED})]
        found = run_stages([Rgb(accuracy="fast")], frames)[0]["image"][-1, -1]
        assert near(found.tolist(), rgb((140, 90, 170), colorspace), within=3), colorspace


# -- B02, B04: the range -----------------------------------------------------------------------------------------------


@DEVICES
def test_b02_full_range_is_not_limited(tmp_path, device):
    tags = {"color_range": FULL, "colorspace": BT709}
    clip = encode(tmp_path / "full.mp4", [solid((200, 100, 160), i) for i in range(3)], tags=tags)
    seen = see(clip, device=device)
    assert all(near(colour, (250, 190, 148)) for colour in seen.colours), seen.colours
    assert seen.source["full_range"] is True


@pytest.mark.parametrize(("codec", "suffix"), [("libx264", ".mkv"), ("libx265", ".mp4"), ("libvpx-vp9", ".webm")])
def test_b02_every_codec_and_container(tmp_path, codec, suffix):
    tags = {"color_range": FULL, "colorspace": BT709}
    seen = see(encode(tmp_path / f"full{suffix}", [solid((200, 100, 160))] * 2, codec, tags=tags))
    assert all(near(colour, (250, 190, 148)) for colour in seen.colours)


@DEVICES
def test_b04_motion_jpeg_is_601_and_full(tmp_path, device):
    clip = encode(tmp_path / "clip.avi", [solid((200, 100, 160), i, pix_fmt="yuvj420p") for i in range(3)], "mjpeg")
    seen = see(clip, device=device)
    assert all(near(colour, (245, 187, 150)) for colour in seen.colours), seen.colours
    assert (seen.source["matrix"], seen.source["full_range"]) == ("bt601", True)


@pytest.mark.parametrize("suffix", [".mov", ".mkv"])
@pytest.mark.parametrize("pix_fmt", ["yuvj422p", "yuvj444p"])
def test_b04_other_jpegs(tmp_path, pix_fmt, suffix):
    clip = encode(tmp_path / f"clip{suffix}", [solid((200, 100, 160), pix_fmt=pix_fmt)] * 2, "mjpeg")
    assert all(near(colour, (245, 187, 150)) for colour in see(clip).colours)


# -- B05: no tags ------------------------------------------------------------------------------------------------------


@DEVICES
def test_b05_untagged_is_601_below_720_lines_and_709_from_there(tmp_path, device):
    small = see(encode(tmp_path / "sd.mp4", [solid(RED_601)] * 2), device=device)
    assert all(near(colour, (254, 0, 0)) for colour in small.colours)
    large = see(encode(tmp_path / "hd.mp4", [solid(RED_709, size=(1280, 720))] * 2), device=device)
    assert all(near(colour, (255, 1, 0)) for colour in large.colours)
    for seen, matrix in [(small, "bt601"), (large, "bt709")]:
        assert seen.source["matrix"] == matrix
        assert seen.source["assumed"] == ["matrix", "range"]
        assert all(frame.spec.assumed == ("matrix", "range") for frame in seen.frames)
        known = {"matrix": matrix, "range": "limited", "assumed": ["matrix", "range"]}
        assert all(frame.meta["picture"] == known for frame in seen.frames)


def test_b05_what_somebody_does_to_meta_is_in_no_other_picture():
    frames = see(FrameList(frames=[solid(RED_601), solid(RED_601)])).frames
    frames[0].meta["picture"]["assumed"].clear()
    assert frames[1].meta["picture"]["assumed"] == ["matrix", "range"] == frames[0].spec.notes["assumed"]


def test_b05_what_is_said_is_not_in_meta():
    plain = tagged(solid(RED_601), {"colorspace": SMPTE170M, "color_range": LIMITED})
    assert all("picture" not in frame.meta for frame in see(FrameList(frames=[plain])).frames)
    assert FrameSpec(8, 8, "yuv420p").notes == {}


def test_b05_no_stage_takes_the_name_that_meta_has_for_the_picture():
    stage = Rgb()
    stage.id = "picture"
    with (
        framepipe.Pipeline([FrameList(frames=[solid(RED_601)])], [stage], ["discard"], device="cpu") as pipeline,
        pytest.raises(ConfigError, match="'picture'"),
    ):
        pipeline.run()
    with pytest.raises(ConfigError, match=r"stages\[0\].id: no stage may be called 'picture'"):
        loads("version: 1\nsources: [a.mp4]\nstages: [{rgb: {}, id: picture}]\nsinks: [discard]\n")


def test_b05_the_assumption_can_be_overridden(tmp_path):
    clip = encode(tmp_path / "hd.mp4", [solid(RED_709, size=(1280, 720))] * 2)
    seen = see(clip, matrix="bt601", color_range="limited")
    assert all(near(colour, (233, 0, 2)) for colour in seen.colours)
    assert seen.source["assumed"] == []
    seen = see(clip, color_range="full")
    assert all(near(colour, rgb(RED_709, BT709, full=True)) for colour in seen.colours)
    assert seen.source["assumed"] == ["matrix"]


@pytest.mark.parametrize(
    ("size", "matrix"),
    [((1280, 718), "bt601"), ((720, 1280), "bt709"), ((1920, 800), "bt709"), ((718, 1280), "bt601")],
)
def test_b05_the_shorter_side_says_how_large_it_is(size, matrix):
    """A phone held upright makes HD, too."""
    seen = see(FrameList(frames=[solid(RED_601, size=size)]))
    assert seen.source["matrix"] == matrix


# -- B06: HDR ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trc", "name"), [(PQ, "pq"), (HLG, "hlg")])
@pytest.mark.parametrize("size", [(64, 48), (1280, 720)])
def test_b06_hdr_without_a_matrix_is_2020(size, trc, name):
    """BT.2100, which defines both, has no other."""
    seen = see(FrameList(frames=[tagged(solid((520, 512, 512), size=size, pix_fmt="yuv420p10le"), {"color_trc": trc})]))
    assert (seen.source["matrix"], seen.source["assumed"]) == ("bt2020", ["matrix", "range"])
    assert seen.frames[0].meta["picture"]["transfer"] == name


@DEVICES
@pytest.mark.parametrize(("trc", "name"), [(PQ, "pq"), (HLG, "hlg")])
def test_b06_hdr_is_converted_by_its_matrix_and_said_once(tmp_path, device, trc, name):
    tags = {"color_range": LIMITED, "colorspace": BT2020, "color_primaries": 9, "color_trc": trc}
    frames = [solid(codes, i, pix_fmt="yuv420p10le") for i, codes in enumerate([(520, 512, 512), (300, 448, 640)])]
    seen = see(encode(tmp_path / "hdr.mp4", frames, "libx265", tags=tags), device=device)
    assert near(seen.colours[0], (133, 133, 133)) and near(seen.colours[1], (122, 51, 34)), seen.colours
    assert seen.source["transfer"] == name and seen.source["matrix"] == "bt2020"
    assert [frame.spec.transfer for frame in seen.frames] == [name, name]
    assert seen.warns("HDR", name.upper(), "not tone mapped")
    assert sum("tone mapped" in warning for warning in seen.report.warnings) == 1


def test_b06_hdr_that_begins_in_the_middle_is_said_too():
    sdr = [tagged(solid((520, 512, 512), pix_fmt="yuv420p10le"), {"color_trc": 1}) for _ in range(3)]
    hdr = [tagged(solid((520, 512, 512), pix_fmt="yuv420p10le"), {"color_trc": PQ}) for _ in range(2)]
    for number, frame in enumerate(sdr + hdr):
        frame.pts, frame.time_base = number, Fraction(1, 25)
    seen = see(FrameList(frames=sdr + hdr))
    assert seen.warns("HDR", "PQ")
    assert seen.counters["changed"] == 1
    assert not any("HDR" in warning for warning in see(FrameList(frames=sdr)).source["warnings"])


# -- the kind ----------------------------------------------------------------------------------------------------------

_FORMATS = {
    "yuv420p": (1, 1), "yuv422p": (1, 0), "yuv444p": (0, 0), "yuv440p": (0, 1), "yuv411p": (2, 0), "nv12": (1, 1),
    "nv21": (1, 1), "yuv420p10le": (1, 1), "yuv422p12le": (1, 0), "yuv444p16le": (0, 0), "p010le": (1, 1),
    "yuva444p": (0, 0),
}  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    pix_fmt=st.sampled_from(sorted(_FORMATS)),
    colorspace=st.sampled_from([BT709, FCC, SMPTE170M, SMPTE240M, BT2020]),
    full=st.booleans(),
    seed=st.integers(0, 1 << 20),
    device=st.sampled_from(["cpu", "cpu", "simulated"]),
)
def test_any_picture_is_within_one_code_of_the_formula(width, height, pix_fmt, colorspace, full, seed, device):
    """The tags of a frame, through a whole pipeline: 1 code beside the rounded formula, chroma repeated."""
    rng = np.random.default_rng(seed)
    bits, shift = bits_of(pix_fmt), shift_of(pix_fmt)
    frame = av.VideoFrame(width, height, pix_fmt)
    planes = {}
    for letter, view in planes_of(frame):
        codes = rng.integers(0, 1 << bits, view.shape)
        view[:] = codes << shift
        planes[letter] = codes.astype(np.float64)
    tagged(frame, {"colorspace": colorspace, "color_range": FULL if full else LIMITED})
    w_shift, h_shift = _FORMATS[pix_fmt]
    rows, columns = np.arange(height) >> h_shift, np.arange(width) >> w_shift
    u, v = (planes[letter][rows][:, columns] for letter in "UV")
    right = formula(planes["Y"], u, v, colorspace, full=full, bits=bits)
    found = run_stages([Rgb(accuracy="exact")], [frame], device=device)[0]["image"]
    assert found.shape == (height, width, 3)
    assert np.abs(found - right).max() <= 1


def test_colours_come_the_same_from_the_shortest_way_of_reading(tmp_path):
    """`framepipe.open` without any parameter."""
    tags = {"color_range": LIMITED, "colorspace": BT709}
    clip = encode(tmp_path / "a.mp4", [solid(RED_601)] * 2, tags=tags)
    with framepipe.open(clip, device="cpu") as frames:
        assert all(near(frame.numpy()[-1, -1].tolist(), (255, 24, 0), within=3) for frame in frames)


@DEVICES
def test_tags_that_change_in_the_middle(tmp_path, device):
    """Every picture by its own tags, in every batch."""
    kinds = [(SMPTE170M, LIMITED), (BT709, LIMITED), (BT709, FULL), (BT2020, LIMITED), (SMPTE170M, LIMITED)]
    frames = []
    for number, (colorspace, extent) in enumerate(kind for kind in kinds for _ in range(3)):
        frame = tagged(solid((140, 90, 170), number), {"colorspace": colorspace, "color_range": extent})
        frame.pts, frame.time_base = number, Fraction(1, 25)
        frames.append(frame)
    for batch in (1, 4):
        seen = see(FrameList(frames=frames), device=device, batch=batch)
        assert seen.numbers == list(range(15)) and seen.counters == {"changed": 4}
        for i, colour in enumerate(seen.colours):
            colorspace, extent = kinds[i // 3]
            assert near(colour, rgb((140, 90, 170), colorspace, full=extent == FULL))


def test_stills_can_be_told_their_colour_too(tmp_path):
    """A sequence of pictures takes what a file takes."""
    for number in range(3):
        encode(tmp_path / f"{number}.jpg", [solid((140, 90, 170), pix_fmt="yuvj420p")], "mjpeg", container="image2")
    for uri in (tmp_path, tmp_path / "%d.jpg", tmp_path / "*.jpg"):
        seen = see(uri, matrix="bt709", color_range="limited")
        assert len(seen.colours) == 3
        assert all(near(colour, rgb((140, 90, 170), BT709), 2) for colour in seen.colours), uri


@pytest.mark.parametrize(("colorspace", "name"), [(8, "YCgCo"), (10, "constant luminance"), (14, "ICtCp")])
def test_a_matrix_without_a_formula_is_said(colorspace, name):
    frames = [tagged(solid((140, 90, 170), i), {"colorspace": colorspace}) for i in range(3)]
    seen = see(FrameList(frames=frames))
    assert seen.warns("no formula", name) and "matrix" in seen.source["assumed"]
    told = see(FrameList(frames=[tagged(solid((140, 90, 170)), {"colorspace": BT709})]))
    assert not any("formula" in warning for warning in told.source["warnings"])
