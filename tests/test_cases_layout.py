"""Pixel formats, plane layout, alpha, interlacing, and how a picture is to be held (rows B09 to B18)."""

from __future__ import annotations

import copy
import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext, bitstream_filters_available
from case_inputs import (
    BT709,
    GREY,
    INTERLACED_ENCODING,
    LIMITED,
    RED_601,
    SMPTE170M,
    a_module_leaves_nothing_behind,
    bits_of,
    encode,
    letters,
    near,
    numbered,
    planes_of,
    png,
    rgb,
    see,
    solid,
    tagged,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import framepipe
from framepipe import cli, pixfmt
from framepipe.errors import ConfigError, UnsupportedFormatError
from framepipe.frame import FrameSpec
from framepipe.pipeline import Pipeline
from framepipe.sinks.video import Video
from framepipe.stage import ArraySpec, Stage
from framepipe.stages.crop import Crop
from framepipe.stages.motion import Motion
from framepipe.stages.resize import Resize
from framepipe.stages.rgb import Rgb
from framepipe.stages.tensor import Tensor
from framepipe.testing import FrameList, check_stage, run_stages

__all__ = ["a_module_leaves_nothing_behind"]
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])
DECODE = pytest.mark.parametrize("decode", ["linear", "segments", "frame"])


# -- B09: depth --------------------------------------------------------------------------------------------------------


@DEVICES
def test_b09_ten_bits_are_ten_bits(tmp_path, device):
    frames = [solid((y, 512, 512), i, pix_fmt="yuv420p10le") for i, y in enumerate([504, 65, 940])]
    seen = see(encode(tmp_path / "deep.mp4", frames), device=device)
    assert [colour[0] for colour in seen.colours] == [128, 0, 255]
    assert seen.numbers == [0, 1, 2]
    assert seen.source["pix_fmt"] == "yuv420p10le"


@DEVICES
@pytest.mark.parametrize(
    "pix_fmt",
    [f"yuv{sub}p{bits}le" for sub in (420, 422, 444) for bits in (9, 10, 12, 14, 16)]
    + ["p010le", "p012le", "p016le", "p210le", "p410le", "gray10le", "gray12le", "gray16le", "yuva444p12le"],
)
def test_b09_every_depth(device, pix_fmt):
    """Black, the code nearest to the middle, white: of 8 bits and of as many as there are."""
    bits, full = bits_of(pix_fmt), pix_fmt.startswith("gray")
    step, top = 1 << bits - 8, (1 << bits) - 1
    lumas = (0, round(top * 128 / 255), top) if full else (16 * step, 126 * step, 235 * step)
    frames = [solid((y, 128 * step, 128 * step)[: 1 if full else 3], i, pix_fmt=pix_fmt) for i, y in enumerate(lumas)]
    seen = see(FrameList(frames=frames), device=device)
    assert [colour[0] for colour in seen.colours] == [0, 128, 255]
    assert all(max(colour) == min(colour) for colour in seen.colours)
    assert seen.numbers == [0, 1, 2]


# -- B10, B16: subsampling and order -----------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("pix_fmt", ["yuv422p", "yuv444p"])
def test_b10_422_and_444(tmp_path, device, pix_fmt):
    seen = see(encode(tmp_path / "clip.mp4", [solid(RED_601, i, pix_fmt=pix_fmt) for i in range(3)]), device=device)
    assert all(near(colour, (254, 0, 0)) for colour in seen.colours)
    assert seen.numbers == [0, 1, 2]
    assert seen.source["pix_fmt"] == pix_fmt


def _white(pix_fmt):
    """A white picture; None where FFmpeg cannot make one (formats of a GPU, and those that are only read)."""
    try:
        return solid((235, 128, 128), size=(32, 16)).reformat(format=pix_fmt)
    except (ValueError, av.error.FFmpegError):
        return None


_MADE = [name for name in sorted(av.video.format.names) if _white(name) is not None]


@pytest.mark.parametrize("pix_fmt", _MADE)
def test_b10_any_format_gives_pictures_or_is_named(pix_fmt):
    """Every format that FFmpeg knows: taken as it is, converted, or an error that says which one it was."""
    frame = _white(pix_fmt)
    if pix_fmt in ("bgr4", "rgb4"):  # FFmpeg writes these and does not read them
        with pytest.raises(UnsupportedFormatError, match=f"source: pictures in {pix_fmt} cannot be converted"):
            see(FrameList(frames=[frame]))
        return
    seen = see(FrameList(frames=[frame]))
    assert seen.pictures[0].shape == (16, 32, 3)
    assert min(seen.colours[0]) >= 240, seen.colours


def test_b10_a_format_that_is_not_taken_is_named():
    for pix_fmt in set(av.video.format.names) - set(_MADE) - set(pixfmt.table()):
        frame = SimpleNamespace(
            width=32, height=16, format=av.VideoFormat(pix_fmt), colorspace=2, color_range=0, color_trc=2, rotation=0
        )
        with pytest.raises(UnsupportedFormatError, match=f"'{pix_fmt}' is not supported"):
            FrameSpec.of(frame)


@DEVICES
@pytest.mark.parametrize("pix_fmt", ["nv12", "nv21", "nv16", "nv24", "nv42"])
def test_b16_interleaved_chroma_is_not_swapped(tmp_path, device, pix_fmt):
    frames = [solid(RED_601, i, pix_fmt=pix_fmt) for i in range(2)]
    if pix_fmt == "nv12":
        seen = see(encode(tmp_path / "clip.nut", frames, "rawvideo"), device=device)
    else:
        seen = see(FrameList(frames=frames), device=device)
    assert all(near(colour, (254, 0, 0)) for colour in seen.colours)
    assert seen.numbers == [0, 1]
    assert seen.source["pix_fmt"] == pix_fmt


@pytest.mark.parametrize(
    "pix_fmt", ["rgb24", "bgr24", "rgba", "bgra", "argb", "abgr", "rgb0", "bgr0", "0rgb", "0bgr", "gbrp", "gbrap"]
)
def test_b16_the_order_of_rgb(pix_fmt):
    """Nor red and blue."""
    seen = see(FrameList(frames=[solid((250, 130, 10, 255), 5, pix_fmt=pix_fmt)]), device="simulated")
    assert seen.colours == [(250, 130, 10)] and seen.numbers == [5]


# -- B12: alpha --------------------------------------------------------------------------------------------------------

_ALPHA = (255, 0, 128)


def _alpha_clip(tmp_path, codec, suffix):
    frames = [solid((*GREY, alpha), i, pix_fmt="yuva420p") for i, alpha in enumerate(_ALPHA)]
    options = {} if codec == "ffv1" else {"auto-alt-ref": "0"}
    return encode(tmp_path / f"alpha{suffix}", frames, codec, options=options)


ALPHA_FILES = pytest.mark.parametrize(
    ("codec", "suffix"), [("libvpx-vp9", ".webm"), ("ffv1", ".mkv"), ("libvpx", ".webm"), ("libvpx-vp9", ".mkv")]
)


@DEVICES
@ALPHA_FILES
def test_b12_alpha_is_dropped_knowingly(tmp_path, device, codec, suffix):
    clip = _alpha_clip(tmp_path, codec, suffix)
    seen = see(clip, device=device)
    assert all(near(colour, (128, 128, 128), 2) for colour in seen.colours)
    assert seen.source["pix_fmt"] == "yuva420p"
    assert seen.warns("alpha (yuva420p)", "dropped", "rgb: {alpha:")
    assert sum("alpha" in warning for warning in seen.report.warnings) == 1
    assert any(warning.startswith("alpha: ") for warning in seen.report.warnings)  # the name of the source


@DEVICES
@DECODE
@ALPHA_FILES
def test_b12_alpha_is_kept_on_request(tmp_path, device, decode, codec, suffix):
    seen = see(
        _alpha_clip(tmp_path, codec, suffix), device=device, decode=decode, stages=[Rgb(accuracy="exact", alpha="keep")]
    )
    alphas = [tensors["alpha"] for tensors in seen.tensors]
    assert [alpha.shape for alpha in alphas] == [(64, 96)] * 3
    assert all(
        near([int(alpha.min()), int(alpha.max())], [right] * 2, 2) for alpha, right in zip(alphas, _ALPHA, strict=True)
    )
    assert seen.source["warnings"] == []


@DEVICES
@ALPHA_FILES
def test_b12_alpha_is_composed_on_a_colour(tmp_path, device, codec, suffix):
    stage = Rgb(accuracy="exact", alpha=(255, 0, 60))
    seen = see(_alpha_clip(tmp_path, codec, suffix), device=device, stages=[stage], batch=2)
    for colour, right in zip(seen.colours, [(128, 128, 128), (255, 0, 60), (191, 64, 94)], strict=True):
        assert near(colour, right, 2), seen.colours
    assert seen.source["warnings"] == []


@DEVICES
@DECODE
@ALPHA_FILES
def test_b12_alpha_is_composed_in_a_tensor_too(tmp_path, device, decode, codec, suffix):
    clip, color = _alpha_clip(tmp_path, codec, suffix), (255, 0, 60)
    kinds = {"accuracy": "exact", "alpha": color}
    stages = [Tensor(**kinds, width=48, layout="nhwc", dtype="uint8"), Rgb(**kinds), Resize(width=48)]
    seen = see(clip, device=device, decode=decode, stages=stages, batch=2)
    assert len(seen.pictures) == 3
    for tensors, picture in zip(seen.tensors, seen.pictures, strict=True):
        assert set(tensors) == {"tensor"}
        assert (tensors["tensor"] == picture).all()
    alone = see(clip, device=device, stages=stages[:1])
    assert alone.source["warnings"] == []
    assert all((a["tensor"] == b["tensor"]).all() for a, b in zip(alone.tensors, seen.tensors, strict=True))
    assert see(clip, stages=[Tensor()]).warns("alpha (yuva420p)", "dropped")


@DEVICES
@pytest.mark.parametrize("pix_fmt", ["rgba", "argb", "gbrap", "gbrap10le", "gbrap16le", "rgba64le", "yuva444p16le"])
def test_b12_the_formula_of_composing(device, pix_fmt):
    bits = bits_of(pix_fmt)
    top, rng = (1 << bits) - 1, np.random.default_rng(bits)
    frame = av.VideoFrame(24, 10, pix_fmt)
    for _, view in planes_of(frame):
        view[:] = rng.integers(0, top + 1, view.shape)
    alpha = dict(planes_of(frame))["A"].astype(np.float64)[..., None] / top
    plain = run_stages([Rgb(accuracy="exact")], [frame])[0]["image"]
    found = run_stages([Rgb(accuracy="exact", alpha=(7, 200, 255))], [frame], device=device)[0]["image"]
    right = plain * alpha + np.array([7, 200, 255]) * (1 - alpha)
    assert np.abs(found - right).max() <= 0.501


def test_b12_grey_with_alpha_and_pictures_without():
    on_white = see(FrameList(frames=[solid((0, 51), pix_fmt="ya8")]), stages=[Rgb(alpha=(255, 255, 255))])
    assert on_white.colours == [(204, 204, 204)]
    for accuracy in ("exact", "fast"):
        stage = Rgb(accuracy=accuracy, alpha="keep")
        kept = see(FrameList(frames=[solid(GREY), solid(GREY)]), stages=[stage])
        assert all((tensors["alpha"] == 255).all() for tensors in kept.tensors)
        assert not any("alpha" in warning for warning in kept.source["warnings"])


def test_b12_alpha_turns_with_the_picture(tmp_path):
    frame = solid((*GREY, 255), pix_fmt="yuva420p")
    dict(planes_of(frame))["A"][:32] = 0  # the upper half
    clip = encode(tmp_path / "turned.mov", [frame.reformat(format="argb")], "qtrle", turned=(90, False, False))
    seen = see(clip, stages=[Rgb(alpha="keep")])
    alpha = seen.tensors[0]["alpha"]
    assert alpha.shape == (96, 64) and (alpha[:, :32] == 0).all() and (alpha[:, 32:] == 255).all()


def test_b12_a_still_with_alpha(tmp_path):
    path = tmp_path / "half.png"
    path.write_bytes(png(16, 12, (200, 100, 0, 128)))
    assert see(path).colours == [(200, 100, 0)]
    assert see(path).warns("alpha (rgba)")
    assert see(path, stages=[Rgb(alpha=(0, 0, 0))]).colours == [(100, 50, 0)]


@pytest.mark.parametrize("alpha", ["white", (256, 0, 0), (1, 2)])
def test_b12_what_alpha_cannot_be(alpha):
    with pytest.raises(ConfigError, match="alpha"):
        Rgb(alpha=alpha)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("keep", 0),
        ("[255, 255, 255]", 0),
        ("drop", 0),
        ("kep", 2),
        ("[255, 255]", 2),
        ("'#ffffff'", 2),
        ("[1, 2, 300]", 2),
    ],
)
def test_b12_in_yaml(tmp_path, capfd, given, code):
    path = tmp_path / "p.yaml"
    stages = f"[rgb: {{alpha: {given}}}, resize: {{square_pixels: true}}]"
    sources = "[{uri: a.mp4, rotate: none, deinterlace: true}]"
    path.write_text(f"version: 1\nsources: {sources}\nstages: {stages}\nsinks: [discard]\n", encoding="utf-8")
    assert cli.main(["check", str(path)]) == code
    assert code == 0 or "alpha" in capfd.readouterr().err


def test_b12_the_contract_of_the_stage():
    for alpha in ("keep", (9, 99, 199)):
        check_stage(Rgb(accuracy="exact", alpha=alpha), pix_fmt="yuva420p")
        check_stage(Rgb(accuracy="exact", alpha=alpha), width=33, height=17)


def test_b12_without_the_decoder_it_is_said_that_alpha_is_lost(tmp_path, monkeypatch):
    clip = _alpha_clip(tmp_path, "libvpx-vp9", ".webm")
    monkeypatch.setattr("av.codecs_available", av.codecs_available - {"libvpx-vp9"})
    seen = see(clip, loop=2)
    assert seen.source["pix_fmt"] == "yuv420p"
    assert seen.warns("alpha", "lost", "libvpx-vp9")


# -- B14, B15: sizes and rows ------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize(
    ("codec", "suffix", "pix_fmt"), [("libvpx-vp9", ".webm", "yuv420p"), ("libx264", ".mp4", "yuv444p")]
)
def test_b14_odd_sizes(tmp_path, device, codec, suffix, pix_fmt):
    clip = encode(tmp_path / f"odd{suffix}", numbered(4, size=(63, 47), pix_fmt=pix_fmt), codec)
    seen = see(clip, device=device)
    assert [picture.shape for picture in seen.pictures] == [(47, 63, 3)] * 4
    for picture in seen.pictures:
        assert (np.abs(picture[:, -1].astype(int)[8:] - 128) <= 1).all() and (
            np.abs(picture[-1].astype(int) - 128) <= 1
        ).all()
    assert [number >> 1 for number in seen.numbers] == [0, 0, 1, 1]  # seven blocks fit


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    pix_fmt=st.sampled_from(
        ["yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv411p", "gray", "bgr0", "nv12", "rgb24"]
    ),
    device=st.sampled_from(["cpu", "simulated"]),
    count=st.integers(1, 3),
)
def test_b14_any_size_through_a_file(tmp_path_factory, width, height, pix_fmt, device, count):
    """Raw video in a container: every sample comes back where it stood, to the last row and column."""
    path = tmp_path_factory.mktemp("any") / "clip.nut"
    bits = bits_of(pix_fmt)
    codes = [(250, 130, 10)] if "R" in "".join(letters(pix_fmt)) else [tuple(c << bits - 8 for c in (140, 90, 170))]
    frames = [solid(codes[0], i, size=(width, height), pix_fmt=pix_fmt) for i in range(count)]
    seen = see(encode(path, frames, "rawvideo"), device=device)
    assert [picture.shape for picture in seen.pictures] == [(height, width, 3)] * count
    right = rgb(codes[0], bits=bits) if len(letters(pix_fmt)) > 1 else None
    if pix_fmt == "gray":
        right = (140,) * 3
    elif pix_fmt in ("rgb24", "bgr0"):
        right = codes[0]
    for picture in seen.pictures:
        plain = picture[8:] if height > 8 and width >= 8 else picture[:, 64:] if width >= 8 else picture
        assert (np.abs(plain.astype(int) - right) <= 1).all()
    if width >= 64 and height >= 8:
        assert seen.numbers == list(range(count))


@DEVICES
@DECODE
@pytest.mark.parametrize("size", [(130, 70), (98, 50), (66, 18), (258, 34)])
def test_b15_padded_rows(tmp_path, device, decode, size):
    clip = encode(tmp_path / "clip.mp4", numbered(30, size=size), gop=5)
    with av.open(str(clip)) as container:
        frame = next(container.decode(video=0))
        assert frame.planes[0].line_size > size[0]  # it is such a file
    seen = see(clip, device=device, decode=decode)
    assert seen.numbers == list(range(30))
    for picture in seen.pictures:
        assert picture.shape == (size[1], size[0], 3)
        assert (np.abs(picture[8:].astype(int) - 128) <= 2).all()


# -- B17: interlaced ---------------------------------------------------------------------------------------------------


def _interlaced(path, count=6, codec="mpeg2video", *, moving=False, order="tt"):
    """Top field first; ``moving`` gives the lower field other codes, so that rows are combed."""
    frames = []
    for i in range(count):
        frame = solid(GREY, i)
        if moving:
            dict(planes_of(frame))["Y"][9::2] = 60 + 2 * i
            dict(planes_of(frame))["Y"][8::2] = 160 + 2 * i
        frames.append(frame)
    options = {"field_order": order} if codec == "mpeg2video" else {"x264-params": "threads=1:scenecut=0:tff=1"}
    return encode(path, frames, codec, options=options, flags=INTERLACED_ENCODING)


@DEVICES
@DECODE
def test_b17_interlaced_pictures_pass_and_are_flagged(tmp_path, device, decode):
    seen = see(_interlaced(tmp_path / "clip.ts"), device=device, decode=decode)
    assert seen.numbers == list(range(6))  # six, not twelve
    assert all(frame.interlaced and frame.meta["picture"]["interlaced"] for frame in seen.frames)
    assert seen.counters == {"interlaced": 6}
    assert seen.warns("6 pictures interlaced", "deinterlace: true")


def test_b17_progressive_pictures_are_not_flagged(tmp_path):
    seen = see(encode(tmp_path / "clip.ts", numbered(6), "mpeg2video"))
    assert not any(frame.interlaced for frame in seen.frames)
    assert seen.counters == {} and seen.source["warnings"] == []


@DEVICES
@DECODE
@pytest.mark.parametrize(("codec", "suffix"), [("mpeg2video", ".ts"), ("libx264", ".mkv")])
def test_b17_deinterlaced_on_request(tmp_path, device, decode, codec, suffix):
    clip = _interlaced(tmp_path / f"clip{suffix}", 30, codec, moving=True)
    plain = see(clip, device=device, decode=decode)
    seen = see(clip, device=device, decode=decode, deinterlace=True)
    assert seen.times == plain.times and len(seen.times) == 30  # as many, when they were
    assert [frame.pts for frame in seen.frames] == [frame.pts for frame in plain.frames]
    assert not any(frame.interlaced for frame in seen.frames)
    assert seen.counters == {"deinterlaced": 30} and seen.source["warnings"] == []
    assert seen.source["decode"] != "segments"
    for combed, whole in zip(plain.pictures[1:-1], seen.pictures[1:-1], strict=True):
        rows = combed[20:44, 40, 0].astype(int), whole[20:44, 40, 0].astype(int)
        assert np.abs(np.diff(rows[0])).min() > 80 and np.abs(np.diff(rows[1])).max() < 40


def test_b17_what_is_not_interlaced_is_left_alone(tmp_path):
    clip = encode(tmp_path / "clip.mp4", numbered(12))
    plain, seen = see(clip), see(clip, deinterlace=True)
    assert seen.numbers == list(range(12)) and seen.counters == {}
    assert all((a == b).all() for a, b in zip(plain.pictures, seen.pictures, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_b17_few_pictures_and_several_rounds(tmp_path, count):
    seen = see(_interlaced(tmp_path / "clip.mp4", count), deinterlace=True, loop=3)
    assert seen.numbers == list(range(count)) * 3
    assert seen.counters["deinterlaced"] == 3 * count


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
def test_b17_a_size_that_changes_is_deinterlaced_anew(tmp_path, codec):
    parts = []
    for i, size in enumerate([(64, 48), (128, 96), (64, 48)]):
        frames = [solid(GREY, 5 * i + k, size=size) for k in range(5)]
        options = {"field_order": "tt"} if codec == "mpeg2video" else {"x264-params": "threads=1:scenecut=0:tff=1"}
        part = encode(
            tmp_path / f"{i}.ts", frames, codec, pts=range(5 * i, 5 * i + 5), options=options,
            flags=INTERLACED_ENCODING, container_options={"max_delay": "0"},
        )  # fmt: skip
        parts.append(part.read_bytes())
    clip = tmp_path / "all.ts"
    clip.write_bytes(b"".join(parts))
    seen = see(clip, deinterlace=True)
    assert seen.numbers == list(range(15))
    assert [picture.shape[:2] for picture in seen.pictures] == [(48, 64)] * 5 + [(96, 128)] * 5 + [(48, 64)] * 5
    assert seen.counters["deinterlaced"] == 15 and seen.counters["changed"] == 2


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv422p10le", "nv12", "yuva420p", "gray", "rgb24", "gbrp"])
@pytest.mark.parametrize("colorspace", [0, 2, 3, BT709, SMPTE170M, 8, 9])
def test_b17_filters_take_every_colour(pix_fmt, colorspace):
    """And change none of it: what a tag means is the stages' business."""
    if pix_fmt == "nv12" and colorspace in (3, 8):
        return  # FFmpeg cannot make another format of these, and its bwdif takes no nv12
    frames = []
    for number in range(3):
        frame = tagged(solid((140, 90, 170), number, pix_fmt=pix_fmt), {"colorspace": colorspace})
        frame.pts, frame.time_base = number, Fraction(1, 25)
        frames.append(frame)

    @dataclass(kw_only=True)
    class Deinterlaced(FrameList):
        deinterlace: bool = True

    plain, seen = see(FrameList(frames=frames)), see(Deinterlaced(frames=frames))
    assert seen.numbers == [0, 1, 2] and seen.times == plain.times
    assert all((a == b).all() for a, b in zip(plain.pictures, seen.pictures, strict=True))


def test_b17_colour_is_kept(tmp_path):
    frames = [tagged(solid(RED_601, i), {"colorspace": BT709, "color_range": LIMITED}) for i in range(4)]
    clip = encode(
        tmp_path / "clip.mp4", frames, "mpeg2video", options={"field_order": "tt"}, flags=INTERLACED_ENCODING,
        tags={"colorspace": BT709, "color_range": LIMITED, "color_primaries": 1, "color_trc": 1},
    )  # fmt: skip
    assert all(near(colour, (255, 24, 0), 2) for colour in see(clip, deinterlace=True).colours)


# -- B18: orientation --------------------------------------------------------------------------------------------------


def _oriented(path, degrees, hflip=False, vflip=False, size=(96, 64), aspect=None):
    frames = []
    for i in range(20):
        frame = solid(GREY, i, size=size)
        dict(planes_of(frame))["Y"][16:40, 16:24] = 200  # a bar that tells all eight ways apart
        dict(planes_of(frame))["Y"][40:48, 16:64] = 60
        frames.append(frame)
    return encode(path, frames, turned=(degrees, hflip, vflip), gop=5, aspect=aspect)


@DEVICES
@pytest.mark.parametrize(("degrees", "k"), [(90, 1), (180, 2), (-90, 3)])
def test_b18_turned_video_comes_upright(tmp_path, device, degrees, k):
    lying = see(_oriented(tmp_path / "a.mp4", 0), device=device)
    seen = see(_oriented(tmp_path / "b.mp4", degrees), device=device)
    size = (64, 96) if k % 2 else (96, 64)
    assert (seen.source["width"], seen.source["height"]) == size
    assert all((frame.width, frame.height) == size for frame in seen.frames)
    for stored, upright in zip(lying.pictures, seen.pictures, strict=True):
        assert (np.rot90(stored, k) == upright).all()


_WAYS = [(degrees, hflip, vflip) for degrees in (0, 90, 180, 270) for hflip in (False, True) for vflip in (False, True)]


@DEVICES
@DECODE
@pytest.mark.parametrize("way", _WAYS)
def test_b18_mirrored_video_comes_upright(tmp_path, device, decode, way):
    """All the ways that EXIF and phones know; a matrix that turns and mirrors twice is the same as one that turns."""
    degrees, hflip, vflip = way
    lying = see(_oriented(tmp_path / "a.mp4", 0), device=device)
    seen = see(_oriented(tmp_path / "b.mp4", *way), device=device, decode=decode)
    for stored, upright in zip(lying.pictures, seen.pictures, strict=True):
        right = np.rot90(stored, degrees // 90)
        right = np.fliplr(right) if hflip else right
        right = np.flipud(right) if vflip else right
        assert upright.shape == right.shape and (right == upright).all()
    assert seen.times == lying.times


@pytest.mark.parametrize("way", _WAYS[1::3])
@pytest.mark.parametrize("staging", ["direct", "pooled"])
def test_b18_the_fast_conversion_too(tmp_path, way, staging):
    """Of memory that runs from the last row to the first, too."""
    clip = _oriented(tmp_path / "clip.mp4", *way)
    exact = see(clip).pictures
    with framepipe.open(clip, device="cpu", accuracy="fast", staging=staging) as frames:
        for frame, right in zip(frames, exact, strict=True):
            assert np.abs(frame.numpy().astype(int) - right).max() <= 3


@DEVICES
@pytest.mark.parametrize("way", [(90, False, False), (0, True, False), (90, True, False)])
def test_b18_as_stored_on_request(tmp_path, device, way):
    lying = see(_oriented(tmp_path / "a.mp4", 0), device=device)
    seen = see(_oriented(tmp_path / "b.mp4", *way), device=device, rotate="none")
    assert all((a == b).all() for a, b in zip(lying.pictures, seen.pictures, strict=True))
    assert (seen.source["width"], seen.source["height"]) == (96, 64)


def _exif(orientation):
    """An APP1 segment of a JPEG that says only how the camera was held (Exif 2.3, tag 0x0112)."""
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    body = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


_EXIF = [
    lambda p: p, np.fliplr, lambda p: np.rot90(p, 2), np.flipud, lambda p: p.transpose(1, 0, 2),
    lambda p: np.rot90(p, 3), lambda p: np.rot90(p, 2).transpose(1, 0, 2), lambda p: np.rot90(p, 1),
]  # fmt: skip


@DEVICES
def test_b18_photographs_as_the_camera_was_held(tmp_path, device):
    """Each of a sequence on its own, and by itself."""
    frame = solid((200, 100, 160), 77, pix_fmt="yuvj420p")
    dict(planes_of(frame))["Y"][16:40, 16:24] = 60
    jpeg = encode(tmp_path / "plain.mjpeg", [frame], "mjpeg", container="mjpeg").read_bytes()
    for orientation in range(1, 9):
        (tmp_path / f"{orientation}.jpg").write_bytes(jpeg[:2] + _exif(orientation) + jpeg[2:])
    stored = see(tmp_path / "plain.mjpeg", device=device).pictures[0]
    sequence = see(tmp_path / "%d.jpg", device=device)
    lying = see(tmp_path / "%d.jpg", device=device, rotate="none")
    for orientation, upright in enumerate(_EXIF, 1):
        right = upright(stored)
        alone = see(tmp_path / f"{orientation}.jpg", device=device).pictures[0]
        for picture in (alone, sequence.pictures[orientation - 1]):
            assert picture.shape == right.shape and (picture == right).all(), orientation
        assert (lying.pictures[orientation - 1] == stored).all()
    assert sequence.times == [round(i / 25, 6) for i in range(8)]


def test_b18_deinterlaced_and_mirrored(tmp_path):
    given = {"options": {"field_order": "tt"}, "flags": INTERLACED_ENCODING}
    lying = see(encode(tmp_path / "a.mp4", numbered(6), "mpeg2video", **given), deinterlace=True)
    for degrees, hflip, vflip in _WAYS:
        clip = encode(tmp_path / "b.mp4", numbered(6), "mpeg2video", turned=(degrees, hflip, vflip), **given)
        seen = see(clip, deinterlace=True)
        for stored, upright in zip(lying.pictures, seen.pictures, strict=True):
            right = np.rot90(stored, degrees // 90)
            right = np.fliplr(right) if hflip else right
            assert (upright == (np.flipud(right) if vflip else right)).all()
        assert seen.counters == {"deinterlaced": 6}


@dataclass(kw_only=True)
class _Keep(Stage):
    """Copies the luma plane, as it is given to stages, to a tensor."""

    reads = frozenset({"planes"})
    writes = frozenset({"luma"})

    def plan(self, flow):
        return flow.put("luma", ArraySpec((flow.spec.height, flow.spec.width)))

    def launch(self, batch):
        for i in range(len(batch)):
            batch.out["luma"][i] = batch.planes.picture(i)[0]


@DEVICES
@DECODE
@pytest.mark.parametrize("way", _WAYS)
def test_b18_planes_travel_as_they_were_decoded(tmp_path, monkeypatch, device, decode, way):
    """No filter turns them or mirrors them before they are on the device."""
    clip = _oriented(tmp_path / "clip.mp4", *way)
    with av.open(str(clip)) as container:
        stored = [dict(planes_of(frame))["Y"].copy() for frame in container.decode(video=0)]
    monkeypatch.setattr("framepipe.filtergraph.av.filter.Graph", None)
    seen = see(clip, device=device, decode=decode, stages=[_Keep(), Rgb(accuracy="exact")], batch=3)
    assert len(seen.tensors) == 20
    for tensors, luma in zip(seen.tensors, stored, strict=True):
        assert (tensors["luma"] == luma).all()
    degrees, hflip, vflip = way
    spec = seen.frames[0].spec
    assert spec.mirrored == (hflip != vflip)
    assert (spec.width, spec.height) == (96, 64)
    assert spec.upright_size == ((64, 96) if degrees % 180 else (96, 64))


@DEVICES
@pytest.mark.parametrize("way", _WAYS)
def test_b18_alpha_comes_upright_too(tmp_path, device, way):
    """Kept, and composed: pictures that are their own alpha are squared on black."""
    degrees, hflip, vflip = way
    frame = av.VideoFrame(34, 18, "argb")
    codes = np.random.default_rng(1).integers(0, 256, (18, 34), np.uint8)
    for _, view in planes_of(frame):
        view[:] = codes
    clip = encode(tmp_path / "clip.mov", [frame], "qtrle", turned=way)
    right = np.rot90(codes, degrees // 90)
    right = np.fliplr(right) if hflip else right
    right = np.flipud(right) if vflip else right
    kept = see(clip, device=device, stages=[Rgb(accuracy="exact", alpha="keep")])
    assert (kept.tensors[0]["alpha"] == right).all() and (kept.pictures[0] == right[..., None]).all()
    squares = ((right.astype(int) ** 2 + 127) // 255)[..., None]
    tensor = Tensor(accuracy="exact", alpha=(0, 0, 0), layout="nhwc", dtype="uint8")
    composed = see(clip, device=device, stages=[tensor, Rgb(accuracy="exact", alpha=(0, 0, 0))])
    assert (composed.pictures[0] == squares).all() and (composed.tensors[0]["tensor"] == squares).all()


@DECODE
@pytest.mark.parametrize("how", ["rotate=90:flip=horizontal", "flip=vertical", "rotate=180:flip=horizontal"])
def test_b18_a_stream_that_is_mirrored_further_on(tmp_path, decode, how):
    """As a camera says that is turned round while it records: H.264 says it with each picture."""
    if "h264_metadata" not in bitstream_filters_available:
        pytest.skip("this FFmpeg cannot write display orientation")
    plain = encode(tmp_path / "a.h264", numbered(6), container="h264").read_bytes()
    one, turned = encode(tmp_path / "one.h264", numbered(1), container="h264"), b""
    with av.open(str(one)) as container:
        stream = container.streams.video[0]
        mark = BitStreamFilterContext(f"h264_metadata=display_orientation=insert:{how}", stream)
        for packet in container.demux(stream):
            turned += b"".join(bytes(marked) for marked in mark.filter(packet if packet.size else None))
    clip = tmp_path / "b.h264"
    clip.write_bytes(plain + turned + plain)
    seen = see(clip, decode=decode)
    assert [frame.spec.mirrored for frame in seen.frames] == [False] * 6 + [True] + [False] * 6
    assert seen.counters["changed"] == 2
    right = np.rot90(np.fliplr(seen.pictures[0]), seen.frames[6].spec.rotation // 90)
    assert right.shape == ((96, 64, 3) if "90" in how else (64, 96, 3)) and (seen.pictures[6] == right).all()


@pytest.mark.parametrize("way", _WAYS)
def test_b18_formats_that_are_converted_come_upright_too(tmp_path, way):
    frame = solid((100, 128, 128), size=(64, 48))
    dict(planes_of(frame))["Y"][10:20, 30:60] = 200
    packed = [frame.reformat(format="yuyv422")]
    lying = see(encode(tmp_path / "a.mov", packed, "rawvideo")).pictures[0]
    seen = see(encode(tmp_path / "b.mov", packed, "rawvideo", turned=way))
    degrees, hflip, vflip = way
    right = np.rot90(lying, degrees // 90)
    right = np.fliplr(right) if hflip else right
    right = np.flipud(right) if vflip else right
    assert seen.source["pix_fmt"] != "yuyv422" and (seen.pictures[0] == right).all()


def test_b18_a_matrix_that_says_nothing_turns_nothing():
    frame = av.VideoFrame(32, 16, "gray")
    for degrees in (-(1 << 31), 1000):  # what PyAV makes of one that is all zeros
        told = SimpleNamespace(
            width=32, height=16, format=frame.format, colorspace=2, color_range=0, color_trc=2, rotation=degrees
        )
        assert FrameSpec.of(told).rotation == 0


@DEVICES
@pytest.mark.parametrize("way", _WAYS)
def test_b18_motion_is_found_where_it_is_seen(tmp_path, device, way):
    frames = []
    for i in range(20):
        frame = solid(GREY, size=(160, 96))
        if i > 15:
            dict(planes_of(frame))["Y"][24:56, 40:56] = 230
            dict(planes_of(frame))["Y"][40:56, 56:96] = 230
        frames.append(frame)
    clip = encode(tmp_path / "clip.mp4", frames, turned=way)
    motion = Motion(warmup=5, min_area=200)
    seen = see(clip, device=device, stages=[motion, Rgb(accuracy="exact")])
    (found,) = seen.frames[-1].meta["motion"]
    rows, columns = np.nonzero(seen.pictures[-1][..., 0] > 200)
    assert found["box"] == pytest.approx([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], abs=4)


# -- pixels that are not square ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "suffix"), [("libx264", ".mp4"), ("libx264", ".mkv"), ("mpeg2video", ".mpg"), ("mpeg4", ".avi")]
)
def test_the_aspect_of_pixels_is_told(tmp_path, codec, suffix):
    clip = encode(tmp_path / f"clip{suffix}", numbered(3, size=(72, 48)), codec, aspect=Fraction(16, 9) * 48 / 72)
    seen = see(clip)
    assert {Fraction(*frame.spec.sample_aspect) for frame in seen.frames} == {Fraction(32, 27)}
    assert Fraction(*seen.source["sample_aspect"]) == Fraction(32, 27)
    assert seen.frames[0].meta["picture"]["sample_aspect"] == [32, 27]
    assert all(picture.shape == (48, 72, 3) for picture in seen.pictures)  # as they are, unless asked


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_square_pixels_on_request(tmp_path, device):
    clip = encode(tmp_path / "clip.mp4", numbered(3, size=(72, 48)), aspect=Fraction(32, 27))
    for options, size in [
        ({}, (85, 48)),
        ({"height": 96}, (171, 96)),
        ({"width": 128}, (128, 72)),
        ({"width": 160, "height": 90, "mode": "fit"}, (160, 90)),
        ({"width": 90, "height": 90, "mode": "letterbox"}, (90, 90)),
    ]:
        resize = Resize(square_pixels=True, **options)
        seen = see(clip, stages=[Rgb(accuracy="exact"), resize], device=device)
        assert all(picture.shape == (size[1], size[0], 3) for picture in seen.pictures), options
        tensor = Tensor(square_pixels=True, accuracy="exact", layout="nhwc", dtype="uint8", **options)
        other = see(clip, stages=[tensor], device=device)
        for tensors, picture in zip(other.tensors, seen.pictures, strict=True):
            assert (tensors["tensor"] == picture).all()


def test_square_pixels_stay_square_when_turned_cropped_and_resized(tmp_path):
    clip = _oriented(tmp_path / "clip.mp4", 90, aspect=Fraction(4, 3))
    seen = see(clip, stages=[Rgb(), Resize(square_pixels=True)])
    assert seen.pictures[0].shape == (96, 48, 3)  # 96x64 lying; upright 64x96 pixels of 3:4
    assert seen.source["sample_aspect"] == [3, 4] == seen.frames[0].meta["picture"]["sample_aspect"]
    squeezed = see(clip, stages=[Rgb(), Resize(width=32, height=96), Resize(square_pixels=True)])
    assert squeezed.pictures[0].shape == (96, 48, 3)
    again = see(clip, stages=[Rgb(), Resize(square_pixels=True), Resize(square_pixels=True)])
    assert again.pictures[0].shape == (96, 48, 3)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
@pytest.mark.parametrize(
    ("stages", "aspect"),
    [
        ([], Fraction(4, 3)),
        ([Resize(width=48)], Fraction(4, 3)),
        ([Crop(x=8, y=8, width=64, height=32)], Fraction(4, 3)),
        ([Resize(square_pixels=True)], 1),
        ([Resize(width=64, height=64)], 1),
    ],
)
def test_a_video_that_is_written_says_it_too(tmp_path, suffix, stages, aspect):
    clip = encode(tmp_path / "clip.mp4", numbered(5), aspect=Fraction(4, 3))
    sink = Video(path=str(tmp_path / f"out{suffix}"))
    with Pipeline([clip], copy.deepcopy(stages), [sink], device="cpu") as pipeline:
        assert pipeline.run().frames["delivered"] == 5
    with av.open(str(tmp_path / f"out{suffix}")) as container:
        found = container.streams.video[0].sample_aspect_ratio
        assert (Fraction(found.numerator, found.denominator) if found else 1) == aspect


def test_the_aspect_of_mirrored_pixels(tmp_path):
    seen = see(_oriented(tmp_path / "clip.mp4", 90, True, aspect=Fraction(4, 3)))
    assert seen.source["sample_aspect"] == [3, 4] and seen.pictures[0].shape == (96, 64, 3)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    to=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    aspect=st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=50),
    mode=st.sampled_from(["stretch", "fit", "fill", "letterbox"]),
)
def test_where_a_picture_of_such_pixels_goes(size, to, aspect, mode):
    from framepipe.stages._picture import placement

    place = placement(size, *to, mode, aspect)
    x, y, w, h = place.source
    assert x >= 0 and y >= 0 and w >= 1 and h >= 1 and x + w <= size[0] and y + h <= size[1]
    tx, ty, tw, th = place.target
    assert tx >= 0 and ty >= 0 and tw >= 1 and th >= 1 and tx + tw <= place.size[0] and ty + th <= place.size[1]
    if mode in ("fit", "letterbox"):
        # The seen shape is kept, to the rounding of the side that follows.
        wide = size[0] * aspect / size[1]
        assert math.isclose(tw / th, wide, rel_tol=1 / min(tw, th)) or min(tw, th) == 1
    assert (aspect == 1) <= (place == placement(size, *to, mode))
