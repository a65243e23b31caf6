"""Planes to RGB against the standards' formulas in float64."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import av
import numpy as np
import pytest
from av.video.plane import VideoPlane
from hypothesis import given, settings
from hypothesis import strategies as st

from framepipe import pixfmt
from framepipe.frame import FrameSpec, Planes, frame_planes
from framepipe.kernels import _colour, _swscale, cpu

FORMATS = pixfmt.table()
WEIGHTS = {
    "bt601": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020": (0.2627, 0.0593),
    "smpte240m": (0.212, 0.087),
    "fcc": (0.30, 0.11),
}
FAST = ["yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "nv12"]


def matrices(name):
    return list(WEIGHTS) if FORMATS[name].model == "yuv" else ["rgb"]


def ranges(name):
    always_full = FORMATS[name].model == "rgb" or name.startswith("yuvj")
    return [True] if always_full else [False, True]


def noise(spec, n=1, seed=0):
    """Planes of every code there is, in a slab whose rows are padded with other bytes."""
    rng = np.random.default_rng(seed)
    slab = rng.integers(0, 256, (n, spec.nbytes), np.uint8)
    for view in spec.views(slab):
        view[...] = rng.integers(0, 1 << spec.format.bits, view.shape) << spec.format.shift
    return Planes(spec, n, slab=slab)


def smooth(spec, seed=0):
    rng = np.random.default_rng(seed)
    slab = np.zeros((1, spec.nbytes), np.uint8)
    for view in spec.views(slab):
        y, x = np.mgrid[: view.shape[1], : view.shape[2]]
        wave = np.sin(x / rng.uniform(5, 15) + rng.uniform(0, 6)) * np.cos(y / rng.uniform(5, 15))
        wave = wave.reshape(1, *wave.shape, *[1] * (view.ndim - 3))
        view[...] = np.rint((wave + 1) / 2 * ((1 << spec.format.bits) - 1)).astype(int) << spec.format.shift
    return Planes(spec, 1, slab=slab)


def component(planes, spec, letter, sample):
    at, channel = spec.format.components[letter]
    plane, where = planes[at], spec.format.planes[at]
    if plane.ndim == 3:
        plane = plane[..., channel]
    return sample(plane.astype(np.float64) / (1 << spec.format.shift), where.w_shift, where.h_shift, spec)


def repeated(plane, w_shift, h_shift, spec):
    return plane[np.arange(spec.height)[:, None] >> h_shift, np.arange(spec.width) >> w_shift]


def interpolated(plane, w_shift, h_shift, spec):
    """Chroma samples on the left luma column and half-way between rows; edges repeat."""
    x = np.arange(spec.width) / (1 << w_shift)
    y = (np.arange(spec.height) + 0.5) / (1 << h_shift) - 0.5
    across = np.stack([np.interp(x, np.arange(plane.shape[1]), row) for row in plane])
    return np.stack([np.interp(y, np.arange(plane.shape[0]), column) for column in across.T], 1)


def formula(planes, spec, sample=repeated):
    """The lying picture by the standards' formulas in float64, not rounded: (H, W, 3), 0 to 255."""
    bits, top = spec.format.bits, (1 << spec.format.bits) - 1
    step = 1 << (bits - 8)
    if spec.format.model == "rgb":
        rgb = np.stack([component(planes, spec, c, sample) for c in "RGB"], -1) / top
        return np.clip(rgb * 255, 0, 255)
    luma = component(planes, spec, "Y", sample)
    luma = luma / top if spec.full_range else (luma - 16 * step) / (219 * step)
    if spec.format.model == "gray":
        return np.clip(np.stack([luma] * 3, -1) * 255, 0, 255)
    unit = top if spec.full_range else 224 * step
    cb, cr = ((component(planes, spec, c, sample) - 128 * step) / unit for c in "UV")
    kr, kb = WEIGHTS[spec.matrix]
    red, blue = luma + 2 * (1 - kr) * cr, luma + 2 * (1 - kb) * cb
    green = (luma - kr * red - kb * blue) / (1 - kr - kb)
    return np.clip(np.stack([red, green, blue], -1) * 255, 0, 255)


def exact(planes, **options):
    width, height = planes.spec.upright_size
    out = np.full((planes.n, height, width, 3), 77, np.uint8)
    assert cpu.to_rgb(planes, out, **options) is out
    return out


def off(picture, reference):
    """Codes between a picture and the rounded formula."""
    return np.abs(picture - np.floor(reference + 0.5)).max()


@pytest.mark.parametrize("name", FORMATS)
def test_exact_is_within_one_code_of_the_formula(name):
    worst = 0.0
    for matrix in matrices(name):
        for full in ranges(name):
            for width, height in [(33, 21), (2, 2), (1, 1), (5, 1), (1, 6)]:
                spec = FrameSpec(width, height, name, matrix, full)
                planes = noise(spec)
                reference = formula(planes.picture(0), spec)
                picture = exact(planes)[0]
                assert off(picture, reference) <= 1, (matrix, full, width, height)
                worst = max(worst, np.abs(picture - reference).max())
    assert worst <= 0.58  # as the definition promises: 0.08 beside the rounding


@pytest.mark.parametrize("name", ["yuv420p", "yuv422p10le", "yuv444p", "yuv440p12le", "yuv411p", "yuv410p", "p016le"])
@pytest.mark.parametrize("size", [(33, 21), (32, 20), (1, 1), (2, 3)])
def test_bilinear_chroma_is_within_one_code_of_the_formula(name, size):
    for full in (False, True):
        spec = FrameSpec(*size, name, "bt709", full)
        planes = noise(spec)
        reference = formula(planes.picture(0), spec, interpolated)
        assert off(exact(planes, chroma="bilinear")[0], reference) <= 1


def test_bilinear_chroma_differs_from_repeated():
    planes = noise(FrameSpec(16, 16, "yuv420p", "bt709"))
    assert off(exact(planes, chroma="bilinear")[0], exact(planes)[0].astype(float)) > 30


def test_strips_join_without_a_seam(monkeypatch):
    planes = {chroma: noise(FrameSpec(40, 50, "yuv420p")) for chroma in ("nearest", "bilinear")}
    whole = {chroma: exact(picture, chroma=chroma) for chroma, picture in planes.items()}
    monkeypatch.setattr(_colour, "_STRIP_PIXELS", 40 * 8)
    for chroma, picture in planes.items():
        assert (exact(picture, chroma=chroma) == whole[chroma]).all()


def term(k, sample, spec):
    return (k * sample) >> (spec.format.bits + spec.format.shift)


@pytest.mark.parametrize("name", ["yuv420p", "yuv420p10le", "p010le", "yuv444p16le", "nv21"])
def test_the_integer_definition_in_python_integers(name):
    """What a kernel of another device has to compute, sample by sample."""
    spec = FrameSpec(6, 5, name, "bt2020")
    planes = noise(spec, seed=5)
    k = _colour.coefficients(spec)
    picture = exact(planes)[0]
    views = planes.picture(0)
    where = spec.format.planes[1]

    def sample(letter, x, y):
        at, channel = spec.format.components[letter]
        return int(views[at][y, x] if views[at].ndim == 2 else views[at][y, x, channel])

    for y in range(5):
        for x in range(6):
            luma = term(k.y, sample("Y", x, y), spec)
            u, v = (sample(letter, x >> where.w_shift, y >> where.h_shift) for letter in "UV")
            sums = (
                luma + term(k.rv, v, spec) + k.r0,
                luma - term(k.gu, u, spec) - term(k.gv, v, spec) + k.g0,
                luma + term(k.bu, u, spec) + k.b0,
            )
            assert [min(max(value >> 5, 0), 255) for value in sums] == picture[y, x].tolist()


def test_terms_fit_the_words_of_the_definition():
    for name in FORMATS:
        for matrix in matrices(name):
            for full in ranges(name):
                spec = FrameSpec(2, 2, name, matrix, full)
                k = _colour.coefficients(spec)
                largest = ((1 << spec.format.bits) - 1) << spec.format.shift
                assert max(k.y, k.rv, k.gu, k.gv, k.bu) * largest < 1 << 32
                luma, rv, gu, gv, bu = (term(each, largest, spec) for each in (k.y, k.rv, k.gu, k.gv, k.bu))
                assert max(luma + rv + max(k.r0, 0), luma + bu + max(k.b0, 0), luma + k.g0) < 1 << 15
                assert min(k.r0, k.b0, k.g0 - gu - gv) >= -(1 << 15)


def test_rgb_is_copied_and_alpha_dropped():
    for name in ("rgb24", "bgr24", "rgba", "bgra", "argb", "abgr", "rgb0", "0bgr", "gbrp", "gbrap"):
        planes = noise(FrameSpec(7, 5, name, "rgb", True))
        views = planes.picture(0)
        at = FORMATS[name].components
        wanted = [views[at[c][0]][..., at[c][1]] if views[at[c][0]].ndim == 3 else views[at[c][0]] for c in "RGB"]
        assert (exact(planes)[0] == np.stack(wanted, -1)).all(), name


ORIENTATIONS = list(itertools.product([0, 90, 180, 270], [False, True]))
"""Every ``rotation`` and ``mirrored`` of a spec."""


def upright(lying, rotation, mirrored):
    """What the spec says, in NumPy's words."""
    return np.rot90(np.fliplr(lying) if mirrored else lying, rotation // 90)


def oriented(planes, rotation, mirrored):
    """The same samples, held otherwise."""
    spec = replace(planes.spec, rotation=rotation, mirrored=mirrored)
    return Planes(spec, planes.n, slab=planes.slab)


@pytest.mark.parametrize(("rotation", "mirrored"), ORIENTATIONS)
@pytest.mark.parametrize("name", ["yuv420p", "yuv422p", "yuv420p10le", "yuv411p", "rgb24", "gbrp12le", "gray", "nv12"])
def test_pictures_come_upright(rotation, mirrored, name):
    for size, accuracy, chroma in itertools.product([(34, 22), (7, 5)], ["exact", "fast"], ["nearest", "bilinear"]):
        planes = noise(FrameSpec(*size, name, matrices(name)[-1]))
        turned = oriented(planes, rotation, mirrored)
        lying = np.asarray(cpu.to_rgb(planes, accuracy=accuracy, chroma=chroma)[0])
        found = np.asarray(cpu.to_rgb(turned, accuracy=accuracy, chroma=chroma)[0])
        assert found.shape[:2] == turned.spec.upright_size[::-1]
        assert (found == upright(lying, rotation, mirrored)).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    name=st.sampled_from(sorted(FORMATS)),
    orientation=st.sampled_from(ORIENTATIONS),
    to=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    accuracy=st.sampled_from(["exact", "fast"]),
)
def test_any_picture_comes_upright_and_its_tensor_too(width, height, name, orientation, to, accuracy):
    planes = noise(FrameSpec(width, height, name, matrices(name)[0]))
    turned = oriented(planes, *orientation)
    right = np.ascontiguousarray(upright(np.asarray(cpu.to_rgb(planes, accuracy=accuracy)[0]), *orientation))
    assert (np.asarray(cpu.to_rgb(turned, accuracy=accuracy)[0]) == right).all()
    wanted, found = np.zeros((1, to[1], to[0], 3), np.uint8), np.zeros((1, to[1], to[0], 3), np.uint8)
    cpu.resize([right], wanted, method="area")
    cpu.to_tensor(turned, found, accuracy=accuracy, method="area", layout="nhwc")
    assert (found == wanted).all()


@pytest.mark.parametrize(("rotation", "mirrored"), ORIENTATIONS)
def test_views_of_a_plane_go_upright_and_back(rotation, mirrored):
    spec = FrameSpec(5, 3, "yuv444p", rotation=rotation, mirrored=mirrored)
    for lying in (np.arange(15).reshape(3, 5), np.arange(30).reshape(3, 5, 2)):
        turned = spec.to_upright(lying)
        assert turned.shape[:2] == spec.upright_size[::-1] and np.shares_memory(turned, lying)
        assert (turned == upright(lying, rotation, mirrored)).all()
        assert (spec.to_lying(turned) == lying).all() and spec.to_lying(turned).strides == lying.strides


def frame_of(spec, planes):
    """A decoded frame with these planes and tags."""
    frame = av.VideoFrame(spec.width, spec.height, spec.pix_fmt)
    for plane, layout, view in zip(frame.planes, spec.planes, planes, strict=True):
        rows = np.frombuffer(plane, np.uint8, plane.line_size * layout.height).reshape(layout.height, plane.line_size)
        bytes_a_row = layout.row_samples * spec.format.itemsize
        rows[:, :bytes_a_row] = np.ascontiguousarray(view).view(np.uint8).reshape(layout.height, bytes_a_row)
    return frame


def solid(name, y, u, v, colorspace, color_range, size=(34, 22)):
    spec = FrameSpec(*size, name)
    shift = spec.format.shift
    views = [np.zeros((p.height, p.width, p.channels), spec.format.dtype) for p in spec.planes]
    for letter, value in zip("YUV", (y, u, v), strict=True):
        at, channel = spec.format.components[letter]
        views[at][..., channel] = value << shift
    frame = frame_of(spec, [view.squeeze(-1) if view.shape[-1] == 1 else view for view in views])
    frame.colorspace, frame.color_range = colorspace, color_range
    return frame


@pytest.mark.parametrize(
    ("name", "yuv", "colorspace", "color_range", "rgb"),
    [
        ("yuv420p", (81, 90, 240), 6, 1, (254, 0, 0)),
        ("yuv420p", (81, 90, 240), 5, 0, (254, 0, 0)),
        ("yuv420p", (81, 90, 240), 2, 1, (254, 0, 0)),
        ("yuv420p", (81, 90, 240), 1, 1, (255, 24, 0)),
        ("yuv422p", (81, 90, 240), 2, 0, (254, 0, 0)),
        ("yuv444p", (81, 90, 240), 2, 0, (254, 0, 0)),
        ("nv12", (81, 90, 240), 2, 0, (254, 0, 0)),
        ("nv21", (81, 90, 240), 2, 0, (254, 0, 0)),
        ("yuv420p", (200, 100, 160), 1, 2, (250, 190, 148)),
        ("yuvj420p", (200, 100, 160), 5, 0, (245, 187, 150)),
        ("yuv420p10le", (504, 512, 512), 1, 1, (128, 128, 128)),
        ("yuv420p10le", (65, 512, 512), 1, 1, (0, 0, 0)),
        ("yuv420p10le", (940, 512, 512), 1, 1, (255, 255, 255)),
        ("p010le", (504, 512, 512), 1, 1, (128, 128, 128)),
        ("p010le", (940, 512, 512), 1, 1, (255, 255, 255)),
        ("yuv420p10le", (520, 512, 512), 9, 1, (133, 133, 133)),
        ("yuv420p10le", (300, 448, 640), 9, 1, (122, 51, 34)),
    ],
)
def test_known_colours(name, yuv, colorspace, color_range, rgb):
    frame = solid(name, *yuv, colorspace, color_range)
    planes = Planes(FrameSpec.of(frame), 1, frames=[frame])
    assert np.abs(exact(planes)[0] - np.array(rgb, int)).max() <= 1
    fast = cpu.to_rgb(planes, accuracy="fast")[0]
    assert np.abs(fast - np.array(rgb, int)).max() <= 3


def test_untagged_hd_is_709_and_can_be_overridden():
    frame = solid("yuv420p", 63, 102, 240, 2, 0, size=(1280, 720))
    for matrix, rgb in ((None, (255, 1, 0)), ("bt601", (233, 0, 2))):
        spec = FrameSpec.of(frame, matrix)
        picture = cpu.to_rgb(Planes(spec, 1, frames=[frame]))[0]
        assert np.abs(picture[::90, ::90] - np.array(rgb, int)).max() <= 1


@pytest.mark.parametrize("name", FAST)
def test_fast_is_within_three_codes_of_the_formula(name):
    for matrix in matrices(name):
        for full in ranges(name):
            for size in [(130, 34), (64, 32), (2, 2)]:
                spec = FrameSpec(*size, name, matrix, full)
                assert cpu.fast_path(spec)
                for planes in (noise(spec), smooth(spec)):
                    reference = formula(planes.picture(0), spec)
                    picture = cpu.to_rgb(planes, accuracy="fast")[0]
                    assert picture.shape == (size[1], size[0], 3)
                    assert off(picture, reference) <= 3, (matrix, full, size)


def test_fast_is_exact_for_every_other_format():
    for name in FORMATS.keys() - set(FAST):
        spec = FrameSpec(34, 22, name, matrices(name)[-1])
        planes = noise(spec)
        assert not cpu.fast_path(spec), name
        assert (np.stack(cpu.to_rgb(planes, accuracy="fast")) == exact(planes)).all(), name


@pytest.mark.parametrize("name", FAST)
def test_fast_is_exact_at_odd_sizes(name):
    for size in [(33, 22), (34, 21), (1, 1)]:
        planes = noise(FrameSpec(*size, name, full_range=True))
        assert (np.stack(cpu.to_rgb(planes, accuracy="fast")) == exact(planes)).all(), size


def test_fast_with_bilinear_chroma_is_exact():
    planes = noise(FrameSpec(34, 22, "yuv420p"))
    fast = cpu.to_rgb(planes, accuracy="fast", chroma="bilinear")
    assert (np.stack(fast) == exact(planes, chroma="bilinear")).all()


def test_yuvj_forced_to_limited_range_is_exact():
    planes = noise(FrameSpec(34, 22, "yuvj420p", full_range=False))
    assert off(cpu.to_rgb(planes, accuracy="fast")[0], formula(planes.picture(0), planes.spec)) <= 1


@pytest.mark.parametrize("name", FAST)
def test_fast_goes_by_the_spec_and_leaves_the_frame_alone(name):
    """Decoder frames, whatever their tags say: the spec may override them."""
    spec = FrameSpec(66, 34, name, "bt2020", full_range=True)
    source = noise(spec)
    reference = formula(source.picture(0), spec)
    for tags in itertools.product((1, 2, 6), (0, 1, 2)):
        frame = frame_of(spec, source.picture(0))
        frame.colorspace, frame.color_range = tags
        picture = cpu.to_rgb(Planes(spec, 1, frames=[frame]), accuracy="fast")[0]
        assert off(picture, reference) <= 3, tags
        assert (picture == cpu.to_rgb(source, accuracy="fast")[0]).all()  # from the slab: the same
        assert (frame.colorspace, frame.color_range) == tags
        assert all((a == b).all() for a, b in zip(frame_planes(frame, spec), source.picture(0), strict=True))


def test_fast_frames_are_recycled_and_held_ones_stay():
    spec = FrameSpec(64, 32, "yuv420p")
    first, second = noise(spec, seed=1), noise(spec, seed=2)
    held = base = cpu.to_rgb(first, accuracy="fast")[0]
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, VideoPlane | memoryview)  # a view of libavfilter's memory, no copy
    before = held.copy()
    addresses = set()
    for _ in range(20):
        addresses.add(cpu.to_rgb(second, accuracy="fast")[0].ctypes.data)
    assert (held == before).all()
    assert held.ctypes.data not in addresses
    assert len(addresses) <= 2


def test_fast_pictures_outlive_their_thread():
    planes = noise(FrameSpec(64, 32, "yuv420p"))
    got = []
    thread = threading.Thread(target=lambda: got.append(cpu.to_rgb(planes, accuracy="fast")[0]))
    thread.start()
    thread.join(10)
    assert (got[0] == cpu.to_rgb(planes, accuracy="fast")[0]).all()


def test_one_frame_in_several_threads():
    spec = FrameSpec(320, 180, "yuv420p")
    frame = frame_of(spec, noise(spec).picture(0))
    planes = Planes(spec, 1, frames=[frame])
    wanted = cpu.to_rgb(planes, accuracy="fast")[0]
    wrong = []

    def convert():
        for _ in range(20):
            if not (cpu.to_rgb(planes, accuracy="fast")[0] == wanted).all():
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=convert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong


def test_a_graph_is_made_once_a_spec_and_a_few_are_kept(monkeypatch):
    made = []

    class Counting(_swscale._Converter):
        def __init__(self, spec):
            made.append(spec)
            super().__init__(spec)

    monkeypatch.setattr(_swscale, "_Converter", Counting)
    monkeypatch.setattr(_swscale, "_converters", _swscale._Converters())
    batches = [noise(FrameSpec(width, 4, "yuv420p"), n=2) for width in range(2, 14, 2)]
    for planes in batches:
        for _ in range(2):
            pictures = cpu.to_rgb(planes, accuracy="fast")
        assert off(pictures[1], formula(planes.picture(1), planes.spec)) <= 3
    assert made == [planes.spec for planes in batches]
    assert len(_swscale._converters.by_spec) == 4
    cpu.to_rgb(batches[-4], accuracy="fast")  # still there, and now the last to go
    cpu.to_rgb(batches[0], accuracy="fast")
    cpu.to_rgb(batches[-4], accuracy="fast")
    assert len(made) == len(batches) + 1


def test_fast_into_given_memory_and_batches():
    planes = noise(FrameSpec(34, 22, "yuv420p"), n=3)
    out = np.zeros((3, 22, 34, 3), np.uint8)
    assert cpu.to_rgb(planes, out, accuracy="fast") is out
    assert (out == np.stack(cpu.to_rgb(planes, accuracy="fast"))).all()
    assert off(out[2], formula(planes.picture(2), planes.spec)) <= 3


def test_exact_writes_to_memory_with_any_strides():
    planes = noise(FrameSpec(33, 21, "yuv420p"))
    wide = np.zeros((21, 70, 3), np.uint8)
    cpu.to_rgb(planes, [wide[:, 2:35]])
    assert (wide[:, 2:35] == exact(planes)[0]).all()
    assert not wide[:, :2].any()
    assert not wide[:, 35:].any()
