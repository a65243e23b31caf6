"""The picture stages, driven as the runner drives them."""

from __future__ import annotations

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framepipe import registry
from framepipe.device.cpu import CpuDevice
from framepipe.errors import ConfigError
from framepipe.frame import Batch, FrameSpec, Item, Planes
from framepipe.kernels import cpu
from framepipe.kernels._colour import component
from framepipe.stage import Affine, ArraySpec, Flow
from framepipe.stages._picture import placement
from framepipe.stages.crop import Crop
from framepipe.stages.normalize import Normalize
from framepipe.stages.resize import Resize
from framepipe.stages.rgb import Rgb
from framepipe.stages.stats import Stats
from framepipe.stages.tensor import Tensor
from framepipe.testing import check_stage

SPEC = FrameSpec(64, 48, "yuv420p", "bt709")


class ExactCpu(CpuDevice):
    """The CPU with a GPU's default, so that images are whole arrays."""

    default_accuracy = "exact"


def noise(spec=SPEC, n=2, seed=0):
    rng = np.random.default_rng(seed)
    slab = np.zeros((n, spec.nbytes), np.uint8)
    for view in spec.views(slab):
        view[...] = rng.integers(0, 1 << spec.format.bits, view.shape) << spec.format.shift
    return Planes(spec, n, slab=slab)


def plan(stages, spec=SPEC, device=None):
    device = device or CpuDevice()
    flows = [Flow(spec)]
    for number, stage in enumerate(stages):
        stage.id = stage.id or f"{stage.type_name}-{number}"
        stage.open(device)
        flows.append(stage.plan(flows[-1]))
    return flows


def run(stages, planes=None, device=None):
    """Launch and collect: the batch, and the flow behind the last stage."""
    device = device or CpuDevice()
    planes = planes or noise()
    flows = plan(stages, planes.spec, device)
    batch = Batch([Item("clip", i, i, None, i / 25) for i in range(planes.n)], planes)
    stream = batch.stream = device.stream("compute")
    for stage, before, after in zip(stages, flows, flows[1:], strict=False):
        anew = {name: a for name, a in after.arrays.items() if a is not before.arrays.get(name)}
        own = {name for name in anew if name.startswith(f"{stage.id}.")}
        assert anew.keys() - own <= stage.writes and set(stage.readback) <= own
        batch.out = {}
        if not stage.allocates:
            batch.out = {n: device.empty((planes.n, *a.shape), a.dtype, stream) for n, a in anew.items()}
            for array in batch.out.values():
                array.view(np.uint8)[...] = 0xA5
        stage.launch(batch)
        for name, array in anew.items():
            assert [part.shape for part in batch.out[name]] == [array.shape] * planes.n
            assert all(part.dtype == array.dtype for part in batch.out[name])
        batch.arrays.update(batch.out)
    for stage in stages:
        batch.host = {name: np.asarray(batch.arrays[name]) for name in stage.readback}
        stage.collect(batch)
    return batch, flows[-1]


def image(batch):
    return np.stack([np.asarray(picture) for picture in batch.arrays["image"]])


def exact_rgb(planes):
    return np.stack(cpu.to_rgb(planes))


# -- rgb ------------------------------------------------------------------------------------------------------------


def test_rgb_takes_the_device_s_default():
    planes = noise()
    fast, exact = run([Rgb()], planes)[0], run([Rgb()], planes, ExactCpu())[0]
    assert isinstance(fast.arrays["image"], list)
    assert (image(exact) == exact_rgb(planes)).all()
    assert 1 <= np.abs(image(fast).astype(int) - image(exact)).max() <= 4
    assert (image(run([Rgb(accuracy="exact")], planes)[0]) == exact_rgb(planes)).all()


def test_rgb_allocates_itself_only_on_the_fast_path():
    for stage, spec, allocates in (
        (Rgb(), SPEC, True),
        (Rgb(accuracy="fast"), SPEC, True),
        (Rgb(accuracy="exact"), SPEC, False),
        (Rgb(chroma="bilinear"), SPEC, False),
        (Rgb(), FrameSpec(64, 48, "yuv420p10le"), False),
        (Rgb(), FrameSpec(63, 47, "yuv420p"), False),
    ):
        plan([stage], spec)
        assert stage.allocates is allocates
        assert (run([stage], noise(spec))[0].arrays["image"][0].shape) == (spec.height, spec.width, 3)


def test_rgb_planned_anew_for_another_spec():
    stage = Rgb()
    for spec in (SPEC, FrameSpec(63, 47, "yuv420p"), SPEC):
        batch, _ = run([stage], noise(spec))
        assert np.abs(image(batch).astype(int) - exact_rgb(batch.planes)).max() <= 4


def test_rgb_with_bilinear_chroma():
    planes = noise()
    smooth = image(run([Rgb(chroma="bilinear")], planes)[0])
    assert (smooth == np.stack(cpu.to_rgb(planes, chroma="bilinear"))).all()


def test_rgb_fast_on_a_device_that_is_not_the_host_writes_to_its_memory():
    class Other(CpuDevice):
        kind = "simulated"

    planes = noise()
    batch, _ = run([Rgb(accuracy="fast")], planes, Other())
    assert isinstance(batch.arrays["image"], np.ndarray)
    assert (image(batch) == image(run([Rgb(accuracy="fast")], planes)[0])).all()


def test_rgb_of_decoder_frames_stands_upright():
    frame = av.VideoFrame(64, 48, "yuv420p")
    spec = FrameSpec.of(frame)
    source = noise(spec, n=1)
    for plane, view in zip(frame.planes, source.picture(0), strict=True):
        rows = np.frombuffer(plane, np.uint8, plane.line_size * view.shape[0]).reshape(view.shape[0], -1)
        rows[:, : view.shape[1]] = view
    lying = cpu.to_rgb(source, accuracy="fast")[0]
    for mirrored in (False, True):
        turned = FrameSpec(64, 48, "yuv420p", rotation=90, mirrored=mirrored)
        batch, flow = run([Rgb()], Planes(turned, 1, frames=[frame]))
        assert flow.arrays["image"].shape == (64, 48, 3)
        assert (image(batch)[0] == np.rot90(np.fliplr(lying) if mirrored else lying)).all()


# -- geometry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picture", "arguments", "size", "source", "target"),
    [
        ((1920, 1080), (640, None, "stretch"), (640, 360), (0, 0, 1920, 1080), (0, 0, 640, 360)),
        ((1920, 1080), (None, 360, "letterbox"), (640, 360), (0, 0, 1920, 1080), (0, 0, 640, 360)),
        ((1920, 1080), (640, 640, "stretch"), (640, 640), (0, 0, 1920, 1080), (0, 0, 640, 640)),
        ((1920, 1080), (640, 640, "fit"), (640, 360), (0, 0, 1920, 1080), (0, 0, 640, 360)),
        ((1080, 1920), (640, 640, "fit"), (360, 640), (0, 0, 1080, 1920), (0, 0, 360, 640)),
        ((1920, 1080), (640, 640, "letterbox"), (640, 640), (0, 0, 1920, 1080), (0, 140, 640, 360)),
        ((1080, 1920), (640, 640, "letterbox"), (640, 640), (0, 0, 1080, 1920), (140, 0, 360, 640)),
        ((1920, 1080), (640, 640, "fill"), (640, 640), (420, 0, 1080, 1080), (0, 0, 640, 640)),
        ((1080, 1920), (640, 640, "fill"), (640, 640), (0, 420, 1080, 1080), (0, 0, 640, 640)),
        ((100, 50), (400, 400, "fit"), (400, 200), (0, 0, 100, 50), (0, 0, 400, 200)),
        ((1000, 1), (10, None, "fit"), (10, 1), (0, 0, 1000, 1), (0, 0, 10, 1)),
    ],
)
def test_placement(picture, arguments, size, source, target):
    place = placement(picture, *arguments)
    assert (place.size, place.source, place.target) == (size, source, target)


sides = st.integers(1, 300)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(w=sides, h=sides, width=sides, height=sides, mode=st.sampled_from(["stretch", "fit", "fill", "letterbox"]))
def test_placement_stays_inside_and_keeps_the_aspect(w, h, width, height, mode):
    place = placement((w, h), width, height, mode)
    (sx, sy, sw, sh), (tx, ty, tw, th) = place.source, place.target
    assert min(sx, sy, tx, ty) >= 0
    assert min(sw, sh, tw, th) >= 1
    assert sx + sw <= w
    assert sy + sh <= h
    assert tx + tw <= place.size[0]
    assert ty + th <= place.size[1]
    assert place.size == (width, height) or mode == "fit"
    assert place.size[0] <= width
    assert place.size[1] <= height
    if mode == "fill":  # the part taken has the result's aspect, to the pixel
        assert sw == w or sh == h
        assert abs(sw - sh * width / height) <= 0.5 or abs(sh - sw * height / width) <= 0.5 or min(sw, sh) == 1
    elif mode != "stretch":
        assert tw == width or th == height
        assert abs(tw - th * w / h) <= 0.5 or abs(th - tw * h / w) <= 0.5 or min(tw, th) == 1


@pytest.mark.parametrize("mode", ["stretch", "fit", "fill", "letterbox"])
@pytest.mark.parametrize("size", [(33, 91), (91, 33)])
def test_boxes_go_to_the_source_and_back(mode, size):
    stages = [Rgb(), Crop(x=7, y=5, width=50, height=40), Resize(width=size[0], height=size[1], mode=mode)]
    *_, flow = plan(stages)
    to_source = flow.arrays["image"].to_source
    for corner in ((0.0, 0.0), (12.5, 30.25), size):
        there = to_source(*corner)
        assert to_source.inverse()(*there) == pytest.approx(corner)
    place = placement((50, 40), *size, mode)
    left, top, width, height = place.target
    part_x, part_y, part_w, part_h = place.source
    assert to_source(left, top) == pytest.approx((7 + part_x, 5 + part_y))
    assert to_source(left + width, top + height) == pytest.approx((7 + part_x + part_w, 5 + part_y + part_h))


def test_a_mark_is_found_where_the_letterbox_says():
    """A white square in the source, found in the letterboxed image, mapped back."""
    slab = np.zeros((1, SPEC.nbytes), np.uint8)
    luma, *chroma = SPEC.views(slab)
    luma[:] = 16
    luma[:, 16:32, 40:56] = 235
    for view in chroma:
        view[:] = 128
    stages = [Rgb(), Resize(width=160, height=160, mode="letterbox", color=(90, 90, 90))]
    batch, flow = run(stages, Planes(SPEC, 1, slab=slab))
    picture = image(batch)[0]
    rows, columns = np.nonzero(picture[..., 1] > 128)
    to_source = flow.arrays["image"].to_source
    assert to_source(columns.min(), rows.min()) == pytest.approx((40, 16), abs=0.5)
    assert to_source(columns.max() + 1, rows.max() + 1) == pytest.approx((56, 32), abs=0.5)
    assert (picture[:20] == 90).all()
    assert (picture[140:] == 90).all()
    assert not (picture[20:140] == 90).all(-1).any()


# -- resize, crop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_resize_is_the_kernel_with_the_placement(accuracy):
    planes = noise()
    whole = image(run([Rgb(accuracy=accuracy)], planes)[0])
    for width, height, mode, method in [
        (30, 20, "stretch", "bilinear"),
        (100, 20, "fit", "nearest"),
        (20, 20, "fill", "area"),
        (64, 64, "letterbox", "bilinear"),
    ]:
        stages = [Rgb(accuracy=accuracy), Resize(width=width, height=height, mode=mode, method=method)]
        got = image(run(stages, planes)[0])
        place = placement((64, 48), width, height, mode)
        out = np.zeros((2, *place.size[::-1], 3), np.uint8)
        cpu.resize(whole, out, method=method, source=place.source, target=place.target)
        assert (got == out).all()


def test_resize_auto_averages_where_it_shrinks():
    for width, height, method in [(32, 24, "area"), (64, 20, "area"), (128, 96, "bilinear"), (128, 20, "bilinear")]:
        auto = image(run([Rgb(), Resize(width=width, height=height)])[0])
        asked = image(run([Rgb(), Resize(width=width, height=height, method=method)])[0])
        assert (auto == asked).all()


def test_resize_to_the_same_size_passes_the_image_on():
    for stage in (Resize(width=64), Resize(width=64, height=48, mode="letterbox"), Resize(height=48, mode="fill")):
        run([Rgb(), stage], noise(FrameSpec(32, 20, "yuv420p")))  # another size before
        flows = plan([Rgb(), stage])
        assert flows[-1] is flows[-2]
        assert (image(run([Rgb(), stage])[0]) == image(run([Rgb()])[0])).all()


@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_crop_takes_its_rectangle(accuracy):
    planes = noise()
    whole = image(run([Rgb(accuracy=accuracy)], planes)[0])
    batch, flow = run([Rgb(accuracy=accuracy), Crop(x=3, y=8, width=61, height=40)], planes)
    assert (image(batch) == whole[:, 8:, 3:]).all()
    assert image(batch).flags.c_contiguous
    assert flow.arrays["image"] == ArraySpec((40, 61, 3), "uint8", Affine(1, 1, 3, 8))


# -- normalize, tensor ----------------------------------------------------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_normalize_is_scale_mean_and_std(layout, dtype):
    planes = noise()
    stages = [Rgb(), Normalize(name="input", mean=MEAN, std=STD, dtype=dtype, layout=layout)]
    batch, flow = run(stages, planes)
    wanted = (image(batch) / 255 - MEAN) / STD
    wanted = wanted.transpose(0, 3, 1, 2) if layout == "nchw" else wanted
    assert flow.arrays["input"].shape == wanted.shape[1:]
    assert np.abs(batch.arrays["input"] - wanted).max() < (2e-6 if dtype == "float32" else 2e-3)
    assert flow.arrays["image"].shape == (48, 64, 3)


def test_normalize_by_default_is_zero_to_one():
    batch, _ = run([Rgb(), Normalize()])
    assert batch.arrays["tensor"].min() == 0
    assert batch.arrays["tensor"].max() == 1


@pytest.mark.parametrize("accuracy", ["exact", "fast"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("mode", ["stretch", "fit", "fill", "letterbox"])
def test_tensor_has_the_bits_of_the_stages_it_stands_for(accuracy, layout, mode):
    turned = FrameSpec(64, 48, "yuv420p10le", rotation=90), FrameSpec(63, 47, "yuv420p", rotation=180, mirrored=True)
    for spec in (SPEC, *turned):
        planes = noise(spec)
        size = {"width": 30, "height": 50, "mode": mode, "color": (9, 8, 7)}
        numbers = {"mean": MEAN, "std": STD, "layout": layout, "dtype": "float16"}
        one, flow = run([Tensor(crop=(3, 4, 40, 41), accuracy=accuracy, **size, **numbers)], planes)
        stages = [Rgb(accuracy=accuracy), Crop(x=3, y=4, width=40, height=41), Resize(**size), Normalize(**numbers)]
        many, same = run(stages, planes)
        assert (one.arrays["tensor"] == many.arrays["tensor"]).all()
        assert flow.arrays["tensor"] == same.arrays["tensor"]


def alpha_planes(pix_fmt, size=(63, 47), n=2, **orientation):
    """Noise with every alpha there is, none and all of it among them."""
    spec = FrameSpec(*size, pix_fmt, "rgb" if "rgb" in pix_fmt or "gbr" in pix_fmt else "bt709", **orientation)
    planes = noise(spec, n)
    for i in range(n):
        alpha = component(planes.picture(i), spec, "A")
        alpha[:3] = np.array([0, 1, (1 << spec.format.bits) - 1])[:, None] << spec.format.shift
    return planes


@pytest.mark.parametrize("pix_fmt", ["yuva420p", "yuva444p12le", "rgba", "gbrap16le", "ya8"])
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
@pytest.mark.parametrize(
    ("size", "crop"),
    [({}, None), ({}, (3, 4, 40, 41)), ({"width": 30, "height": 50, "mode": "letterbox"}, None), ({"width": 80}, None)],
)
def test_tensor_on_a_colour_has_the_bits_of_rgb_on_a_colour(pix_fmt, accuracy, size, crop):
    color, numbers = (255, 0, 60), {"mean": MEAN, "std": STD, "layout": "nhwc"}
    for rotation, mirrored in [(0, False), (0, True), (90, True), (270, False)]:
        planes = alpha_planes(pix_fmt, rotation=rotation, mirrored=mirrored)
        one, flow = run([Tensor(alpha=color, accuracy=accuracy, crop=crop, **size, **numbers)], planes)
        stages = [Rgb(accuracy=accuracy, alpha=color)]
        if crop is not None:
            x, y, width, height = crop
            stages.append(Crop(x=x, y=y, width=width, height=height))
        stages += [Resize(**size)] if size else []
        many, same = run([*stages, Normalize(**numbers)], planes)
        assert (one.arrays["tensor"] == many.arrays["tensor"]).all()
        assert flow.arrays["tensor"] == same.arrays["tensor"]
        codes = {"layout": "nhwc", "dtype": "uint8", "accuracy": accuracy, "crop": crop, "order": "bgr", **size}
        turned, _ = run([Tensor(alpha=color, **codes)], planes)
        assert (turned.arrays["tensor"][..., ::-1] == image(many)).all()
        dropped, _ = run([Tensor(accuracy=accuracy, crop=crop, **size, **numbers)], planes)
        assert (one.arrays["tensor"] != dropped.arrays["tensor"]).any()


def test_tensor_on_a_colour_needs_no_more_where_there_is_no_alpha():
    stage = Tensor(alpha=(1, 2, 3), dtype="uint8", accuracy="exact")
    batch, flow = run([stage])
    assert set(flow.arrays) == {"tensor"}
    plain, _ = run([Tensor(dtype="uint8", accuracy="exact")])
    assert (batch.arrays["tensor"] == plain.arrays["tensor"]).all()
    assert stage.uses_alpha and not Tensor().uses_alpha


@pytest.mark.parametrize("alpha", ["keep", "white", (1, 2), (0, 0, 256)])
def test_what_alpha_of_a_tensor_cannot_be(alpha):
    with pytest.raises(ConfigError, match="alpha") as caught:
        Tensor(alpha=alpha)
    assert (alpha == "keep") == ("rgb: {alpha: keep}" in str(caught.value))


def test_the_contract_of_a_tensor_on_a_colour():
    for pix_fmt in ("yuva420p", "yuv420p"):
        check_stage(Tensor(alpha=(9, 99, 199), accuracy="exact", width=20), pix_fmt=pix_fmt)


def test_tensor_keeps_size_and_codes_and_turns_the_order():
    planes = noise()
    rgb = exact_rgb(planes)
    same, _ = run([Tensor(dtype="uint8", layout="nhwc", accuracy="exact")], planes)
    turned, _ = run([Tensor(dtype="uint8", order="bgr", accuracy="exact")], planes)
    assert (same.arrays["tensor"] == rgb).all()
    assert (turned.arrays["tensor"] == rgb[..., ::-1].transpose(0, 3, 1, 2)).all()


def test_tensor_mean_follows_the_order():
    planes = noise()
    batch, _ = run([Tensor(order="bgr", scale=1, mean=(10, 20, 30), accuracy="exact", layout="nhwc")], planes)
    assert (batch.arrays["tensor"] == exact_rgb(planes)[..., ::-1].astype(np.float32) - (10, 20, 30)).all()


# -- stats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_stats_of_the_image(accuracy):
    batch, _ = run([Rgb(accuracy=accuracy), Stats()])
    for item, picture in zip(batch.items, image(batch), strict=True):
        assert item.meta == {
            "stats-1": {
                "mean": pytest.approx(picture.mean((0, 1)).tolist(), rel=1e-12),
                "min": picture.min((0, 1)).tolist(),
                "max": picture.max((0, 1)).tolist(),
            }
        }


@pytest.mark.parametrize("name", ["yuv420p", "yuv420p10le", "p010le", "gray16le", "nv12"])
def test_stats_of_the_luma_in_codes_of_8_bits(name):
    spec = FrameSpec(33, 21, name)
    planes = noise(spec)
    batch, _ = run([Stats(of="luma")], planes)
    for i, item in enumerate(batch.items):
        luma = planes.picture(i)[0].astype(float) / 2 ** (spec.format.bits + spec.format.shift - 8)
        found = item.meta["stats-0"]
        assert found == pytest.approx({"mean": luma.mean(), "min": luma.min(), "max": luma.max()}, rel=1e-12)


# -- what cannot be right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Resize(), "width and height"),
        (lambda: Resize(width=0), "width is 0"),
        (lambda: Resize(width=5, height=-2), "height is -2"),
        (lambda: Resize(width=5, mode="cover"), "mode cannot be 'cover'"),
        (lambda: Resize(width=5, method="aera"), "did you mean 'area'"),
        (lambda: Resize(width=5, color=(0, 0, 256)), "color is (0, 0, 256)"),
        (lambda: Crop(width=0, height=5), "width is 0"),
        (lambda: Crop(x=-1, width=5, height=5), "x is -1"),
        (lambda: Rgb(accuracy="quick"), "accuracy cannot be 'quick'"),
        (lambda: Rgb(accuracy="fast", chroma="bilinear"), "chroma 'bilinear'"),
        (lambda: Normalize(std=0.0), "std is 0.0"),
        (lambda: Normalize(std=(1.0, 0.0, 1.0)), "std is (1.0, 0.0, 1.0)"),
        (lambda: Normalize(mean=(1.0, 2.0)), "mean is (1.0, 2.0)"),
        (lambda: Normalize(mean=float("nan")), "mean is nan"),
        (lambda: Normalize(scale=0.0), "scale is 0.0"),
        (lambda: Normalize(dtype="float64"), "dtype cannot be 'float64'"),
        (lambda: Normalize(name="image"), "name cannot be 'image'"),
        (lambda: Tensor(name="a.b"), "name cannot be 'a.b'"),
        (lambda: Tensor(dtype="uint8", mean=0.5), "dtype 'uint8'"),
        (lambda: Tensor(crop=(0, 0, 0, 5)), "crop is (0, 0, 0, 5)"),
        (lambda: Tensor(order="gbr"), "order cannot be 'gbr'"),
        (lambda: Stats(of="chroma"), "of cannot be 'chroma'"),
    ],
)
def test_wrong_parameters_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "spec", "words"),
    [
        ([Resize(width=5)], SPEC, "needs an image"),
        ([Crop(width=5, height=5)], SPEC, "needs an image"),
        ([Normalize()], SPEC, "needs an image"),
        ([Stats()], SPEC, "needs an image"),
        ([Rgb(), Crop(x=60, width=5, height=5)], SPEC, "5x5 at (60, 0) is not inside the image, which is 64x48"),
        ([Rgb(), Crop(y=1, width=64, height=48)], SPEC, "which is 64x48"),
        ([Tensor(crop=(0, 0, 64, 49))], SPEC, "64x49 at (0, 0) is not inside the picture, which is 64x48"),
        ([Stats(of="luma")], FrameSpec(8, 8, "gbrp", "rgb", True), "gbrp have no luma"),
    ],
)
def test_what_does_not_fit_the_picture_is_refused_in_plan(stages, spec, words):
    with pytest.raises(ConfigError) as caught:
        plan(stages, spec)
    assert words in str(caught.value)
    assert caught.value.where["stage"] == stages[-1].id


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Tensor(width=0, layout="chw", std=-1.0)
    assert len(caught.value.problems) == 3


def test_stages_are_found_by_name():
    for cls in (Rgb, Resize, Crop, Normalize, Tensor, Stats):
        assert registry.find("stages", cls.type_name) is cls
