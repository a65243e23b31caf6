"""The cases whose pictures a device makes, on a GPU: the bits of the CPU's exact conversion."""

from __future__ import annotations

import copy
from fractions import Fraction

import av
import numpy as np
import pytest
from case_inputs import (
    BT709,
    BT2020,
    FULL,
    GREY,
    INTERLACED_ENCODING,
    LIMITED,
    SMPTE170M,
    bits_of,
    encode,
    near,
    numbered,
    planes_of,
    rgb,
    see,
    solid,
    tagged,
)

from framepipe.device.select import why_not
from framepipe.stages.motion import Motion
from framepipe.stages.resize import Resize
from framepipe.stages.rgb import Rgb
from framepipe.stages.tensor import Tensor
from framepipe.testing import FrameList, check_stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}")]


def alike(uri, *, make=lambda: [Rgb(accuracy="exact")], batch=4, **source):
    """The same pictures on both devices; those of the GPU."""
    host = see(uri, stages=make(), device="cpu", **source)
    seen = see(uri, stages=make(), device="cuda", batch=batch, **source)
    assert len(seen.pictures) == len(host.pictures) > 0
    for one, other in zip(host.pictures, seen.pictures, strict=True):
        assert one.shape == other.shape and (one == other).all()
    for one, other in zip(host.tensors, seen.tensors, strict=True):
        assert one.keys() == other.keys()
        assert all((one[name] == other[name]).all() for name in one)
    assert seen.times == host.times and seen.counters == host.counters
    return seen


def noise(count, pix_fmt):
    """Pictures of 97x33 with every code of every component, alpha too, at 25 a second."""
    rng = np.random.default_rng(count)
    frames = []
    for number in range(count):
        frame = solid((0, 0, 0, 0), size=(97, 33), pix_fmt=pix_fmt)
        for _, view in planes_of(frame):
            view[:] = rng.integers(0, 1 << bits_of(pix_fmt), view.shape)
        frame.pts, frame.time_base = number, Fraction(1, 25)
        frames.append(frame)
    return frames


@pytest.mark.parametrize("colorspace", [SMPTE170M, BT709, BT2020])
@pytest.mark.parametrize("extent", [LIMITED, FULL])
def test_tags_decide(tmp_path, colorspace, extent):
    tags = {"color_range": extent, "colorspace": colorspace}
    seen = alike(encode(tmp_path / "clip.mp4", [solid((140, 90, 170), i) for i in range(5)], tags=tags))
    assert all(near(colour, rgb((140, 90, 170), colorspace, full=extent == FULL)) for colour in seen.colours)


@pytest.mark.parametrize("size", [(63, 47), (1, 1), (130, 70), (199, 3)])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv422p10le", "nv12", "p010le", "gray", "gbrp", "bgr0"])
def test_any_size_and_format(size, pix_fmt):
    rng = np.random.default_rng(size[0])
    frames = []
    for number in range(3):
        frame = solid((0, 0, 0), size=size, pix_fmt=pix_fmt)
        for _, view in planes_of(frame):
            view[:] = rng.integers(0, 1 << bits_of(pix_fmt), view.shape)
        frame.pts, frame.time_base = number, Fraction(1, 25)
        frames.append(frame)
    if pix_fmt != "p010le":  # whose samples stand at the top
        alike(FrameList(frames=frames))
    else:
        for frame in frames:
            for _, view in planes_of(frame):
                view[:] <<= 6
        alike(FrameList(frames=frames))


@pytest.mark.parametrize("pix_fmt", ["yuva420p", "yuva444p12le", "rgba", "argb", "gbrap16le", "ya8", "yuv420p"])
@pytest.mark.parametrize("alpha", ["drop", "keep", (255, 0, 60)])
def test_alpha(pix_fmt, alpha):
    frames = noise(3, pix_fmt)
    seen = alike(FrameList(frames=frames), make=lambda: [Rgb(accuracy="exact", alpha=alpha)])
    assert all(("alpha" in tensors) == (alpha == "keep") for tensors in seen.tensors)


@pytest.mark.parametrize("pix_fmt", ["yuva420p", "yuva444p12le", "rgba", "gbrap16le", "ya8", "yuv420p"])
@pytest.mark.parametrize(
    "options", [{}, {"width": 40}, {"width": 50, "height": 50, "mode": "letterbox", "layout": "nhwc", "order": "bgr"}]
)
def test_alpha_in_a_tensor(pix_fmt, options):
    frames = noise(5, pix_fmt)
    given = {"accuracy": "exact", "alpha": (255, 0, 60), **options}
    alike(FrameList(frames=frames), make=lambda: [Tensor(**given), Rgb(accuracy="exact")])
    check_stage(Tensor(**given), pix_fmt=pix_fmt, device="cuda")


@pytest.mark.parametrize("alpha", ["keep", (9, 99, 199)])
def test_the_contract_of_alpha(alpha):
    check_stage(Rgb(accuracy="exact", alpha=alpha), pix_fmt="yuva420p", device="cuda")
    check_stage(Rgb(accuracy="exact", alpha=alpha), device="cuda")


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("hflip", [False, True])
def test_turned_and_mirrored(tmp_path, degrees, hflip):
    frames = []
    for i in range(8):
        frame = solid(GREY, i)
        dict(planes_of(frame))["Y"][16:40, 16:24] = 200
        frames.append(frame)
    clip = encode(tmp_path / "clip.mp4", frames, turned=(degrees, hflip, False))
    alike(clip)
    tensors = [
        {"height": 40},
        {"dtype": "float16", "layout": "nhwc"},
        {"width": 99, "height": 77, "method": "bilinear"},
    ]
    make = [Tensor(accuracy="exact", name=f"t{i}", **given) for i, given in enumerate(tensors)]
    alike(clip, make=lambda: [*copy.deepcopy(make), Rgb(accuracy="exact", chroma="bilinear")])


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("hflip", [False, True])
def test_alpha_and_motion_of_turned_and_mirrored(tmp_path, degrees, hflip):
    rng = np.random.default_rng(3)
    still = rng.integers(0, 100, (96, 160), np.uint8)
    frames = []
    for i in range(16):
        frame = av.VideoFrame(160, 96, "argb")
        for _, view in planes_of(frame):
            view[:] = still
            view[24:56, 40 + 4 * i : 60 + 4 * i] = 250
        frames.append(frame)
    clip = encode(tmp_path / "clip.mov", frames, "qtrle", turned=(degrees, hflip, False))
    seen = alike(clip, make=lambda: [Motion(warmup=5), Rgb(accuracy="exact", alpha="keep")])
    host = see(clip, stages=[Motion(warmup=5), Rgb(accuracy="exact")])
    assert [frame.meta for frame in seen.frames] == [frame.meta for frame in host.frames]
    assert any(frame.meta["motion"] for frame in seen.frames)
    alike(clip, make=lambda: [Rgb(accuracy="exact", alpha=(9, 99, 199))])


def test_the_shape_of_pixels_that_changes(tmp_path):
    parts = []
    for number, aspect in enumerate([Fraction(12, 11), Fraction(16, 11), Fraction(12, 11)]):
        part = encode(
            tmp_path / f"{number}.ts", numbered(8, size=(72, 56), first=8 * number),
            pts=range(8 * number, 8 * number + 8), aspect=aspect, container_options={"max_delay": "0"},
        )  # fmt: skip
        parts.append(part.read_bytes())
    clip = tmp_path / "all.ts"
    clip.write_bytes(b"".join(parts))
    square = {"accuracy": "exact", "square_pixels": True}
    seen = alike(clip, make=lambda: [Tensor(height=28, **square), Rgb(accuracy="exact"), Resize(square_pixels=True)])
    assert len({picture.shape for picture in seen.pictures}) == 2 and seen.counters["changed"] == 2


def test_interlaced(tmp_path):
    options = {"x264-params": "threads=1:scenecut=0:tff=1"}
    clip = encode(tmp_path / "clip.mkv", numbered(12), options=options, flags=INTERLACED_ENCODING)
    assert alike(clip).counters == {"interlaced": 12}
    assert alike(clip, deinterlace=True).counters == {"deinterlaced": 12}


def test_square_pixels(tmp_path):
    clip = encode(tmp_path / "clip.mp4", numbered(3, size=(72, 48)), aspect=Fraction(32, 27))
    assert alike(clip, make=lambda: [Rgb(accuracy="exact"), Resize(square_pixels=True)]).pictures[0].shape[1] == 85
    alike(
        clip,
        make=lambda: [Tensor(accuracy="exact", square_pixels=True, width=64, dtype="uint8"), Rgb(accuracy="exact")],
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_sizes_depth_and_colour_that_change(batch):
    frames = []
    for number in range(12):
        size, pix_fmt = ((64, 48), (128, 96), (66, 50))[number // 2 % 3], ("yuv420p", "yuv420p10le")[number // 3 % 2]
        step = 1 << bits_of(pix_fmt) - 8
        frame = solid([c * step for c in (140, 90, 170)], number, size=size, pix_fmt=pix_fmt)
        tagged(frame, {"colorspace": (BT709, SMPTE170M)[number // 4 % 2], "color_range": LIMITED})
        frame.pts, frame.time_base = number, Fraction(1, 25)
        frames.append(frame)
    seen = alike(FrameList(frames=frames), batch=batch)
    assert seen.numbers == list(range(12))
