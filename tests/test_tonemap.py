"""HDR to SDR against the standards' formulas in float64, on its own and in whole pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from case_inputs import BT2020, HLG, LIMITED, PQ, a_module_leaves_nothing_behind, encode, see, solid, tagged  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_colour import FORMATS, formula, interpolated, matrices, noise, ranges, repeated

import framepipe
from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec, Planes
from framepipe.kernels import cpu
from framepipe.kernels._tonemap import Tone
from framepipe.stages.rgb import Rgb
from framepipe.stages.tensor import Tensor
from framepipe.testing import FrameList

CURVES = ["hable", "reinhard"]
TRANSFERS = ["pq", "hlg"]
LAYOUTS = ["yuv420p10le", "p010le", "yuv422p10le", "yuv444p12le", "yuv420p", "nv12", "yuv444p16le", "gbrp10le", "rgb24",
           "rgb48le", "gray10le", "yuv440p", "yuv411p"]  # fmt: skip
LIGHT = 0.006  # of white: half a step of 10 bits in highlights, where PQ's are 1 % and the primaries add to it
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])


# -- the formulas, once more -------------------------------------------------------------------------------------------


def pq_nits(signal: np.ndarray) -> np.ndarray:
    """SMPTE ST 2084: 0 to 1 to cd/m2."""
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    power = np.power(signal, 1 / m2)
    return 10000 * np.power(np.maximum(power - c1, 0) / (c2 - c3 * power), 1 / m1)


def pq_signal(nits: float) -> float:
    """The other way, as the standard has it too."""
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    power = (nits / 10000) ** m1
    return float(((c1 + c2 * power) / (1 + c3 * power)) ** m2)


def hlg_nits(signal: np.ndarray) -> np.ndarray:
    """BT.2100: inverse OETF, then the OOTF of a display of 1000 cd/m2; (..., 3)."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)
    luminance = scene @ [0.2627, 0.6780, 0.0593]
    return 1000 * luminance[..., None] ** 0.2 * scene


def reinhard(light: np.ndarray, white: float) -> np.ndarray:
    return light * (1 + light / white**2) / (1 + light)


def hable(light: np.ndarray, white: float) -> np.ndarray:
    def filmic(x):
        return (x * (0.15 * x + 0.05) + 0.004) / (x * (0.15 * x + 0.50) + 0.06) - 0.02 / 0.30

    return filmic(2 * light) / filmic(2 * white)


# ITU-R BT.2087: the product of its matrices to and from XYZ.
TO_BT709 = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])


def toned(signal: np.ndarray, transfer: str, curve: str, peak_nits: float = 1000.0) -> np.ndarray:
    """Signals from 0 to 1, (..., 3), to codes of SDR, not rounded."""
    nits = pq_nits(signal) if transfer == "pq" else hlg_nits(signal)
    light = np.maximum(nits / 203 @ TO_BT709.T, 0)
    white = (min(peak_nits, 1000) if transfer == "hlg" else peak_nits) / 203
    largest = light.max(-1, keepdims=True)
    into = {"reinhard": reinhard, "hable": hable}[curve](np.minimum(largest, white), white)
    light = light * np.divide(into, largest, out=np.zeros_like(into), where=largest > 0)
    return 255 * np.clip(light, 0, 1) ** (1 / 2.4)


def reference(planes: Planes, transfer: str, curve: str, peak_nits: float = 1000.0, sample: Any = repeated) -> Any:
    return toned(formula(planes.picture(0), planes.spec, sample) / 255, transfer, curve, peak_nits)


def mapped(planes: Planes, curve: str, peak_nits: float = 1000.0, **options: Any) -> np.ndarray:
    width, height = planes.spec.upright_size
    out = np.full((planes.n, height, width, 3), 77, np.uint8)
    assert cpu.to_rgb(planes, out, tone=Tone(curve, peak_nits), **options) is out
    return out


def grey(signals: np.ndarray, transfer: str, name: str = "gray16le") -> Planes:
    """A row of grey of full range."""
    spec = FrameSpec(len(signals), 1, name, "bt2020", True, transfer=transfer)
    slab = np.zeros((1, spec.nbytes), np.uint8)
    spec.views(slab)[0][0, 0] = np.rint(signals * ((1 << spec.format.bits) - 1))
    return Planes(spec, 1, slab=slab)


# -- the kernels against them ------------------------------------------------------------------------------------------


def check(codes: np.ndarray, wanted: np.ndarray, light: float, *about: Any) -> None:
    """Within 1 code, or as light within a share of white: a dark channel is what is left of two that nearly cancel."""
    linear = (wanted / 255) ** 2.4
    low, high = (255 * np.clip(linear + way * light, 0, 1) ** (1 / 2.4) for way in (-1, 1))
    low, high = (np.floor(code + 0.5) for code in (np.minimum(low, wanted - 0.5), np.maximum(high, wanted + 0.5)))
    outside = np.argwhere((codes < low) | (codes > high))
    assert not outside.size, (*about, f"{len(outside)} off, first at {outside[0]}")


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_mapped_by_the_formula(name, transfer, curve):
    for full, matrix in itertools.product(ranges(name), {"bt2020", "bt709"} & {*matrices(name)} or {"rgb"}):
        for size, peak in [((67, 45), 1000.0), ((1, 1), 4000.0), ((5, 1), 203.0), ((2, 7), 10000.0)]:
            planes = noise(FrameSpec(*size, name, matrix, full, transfer=transfer))
            check(mapped(planes, curve, peak)[0], reference(planes, transfer, curve, peak), LIGHT, matrix, full, size)


@given(
    name=st.sampled_from([name for name in FORMATS if "A" not in FORMATS[name].components]),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    transfer=st.sampled_from(TRANSFERS),
    curve=st.sampled_from(CURVES),
    peak_nits=st.floats(203, 10000),
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_picture_is_mapped_by_the_formula(name, size, transfer, curve, peak_nits, seed, data):
    matrix, full = data.draw(st.sampled_from(matrices(name))), data.draw(st.sampled_from(ranges(name)))
    planes = noise(FrameSpec(*size, name, matrix, full, transfer=transfer), seed=seed)
    check(mapped(planes, curve, peak_nits)[0], reference(planes, transfer, curve, peak_nits), LIGHT)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_interpolated_chroma_is_mapped_too(transfer):
    for name in ("yuv420p10le", "nv12", "yuv422p12le"):
        planes = noise(FrameSpec(31, 18, name, "bt2020", False, transfer=transfer))
        wanted = reference(planes, transfer, "hable", sample=interpolated)
        check(mapped(planes, "hable", chroma="bilinear")[0], wanted, LIGHT, name)
        repeating = mapped(planes, "hable")[0]
        assert (mapped(planes, "hable", chroma="bilinear")[0] != repeating).any()


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("peak_nits", [203.0, 1000.0, 4000.0])
def test_grey_is_within_a_code_monotone_and_stays_grey(transfer, curve, peak_nits):
    signals = np.arange(1024) / 1023
    for name in ("gray16le", "gray10le"):
        got = mapped(grey(signals, transfer, name), curve, peak_nits)[0, 0].astype(int)
        wanted = toned(np.stack([signals] * 3, -1), transfer, curve, peak_nits)
        assert np.abs(got - np.floor(wanted + 0.5)).max() <= 1
        assert np.abs(got - wanted).max() < 0.8
        assert (got == got[:, :1]).all()
        assert (np.diff(got[:, 0]) >= 0).all()
        assert got[0, 0] == 0
        assert got[-1, 0] == 255


@pytest.mark.parametrize(("curve", "white"), [("hable", 192), ("reinhard", 194)])
def test_the_white_of_sdr_comes_out_as_the_curve_has_it(curve, white):
    """203 cd/m2 are 58 % of PQ and 75 % of HLG (BT.2408): about three quarters of the codes, the rest is for lights."""
    assert pq_signal(203) == pytest.approx(0.58, abs=0.001)
    for transfer, signal in [("pq", pq_signal(203)), ("hlg", 0.75)]:
        assert toned(np.full(3, signal), transfer, curve)[0] == pytest.approx(white, abs=0.51)
        assert mapped(grey(np.array([signal]), transfer), curve)[0, 0, 0, 0] == white


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("peak_nits", [400.0, 1000.0, 4000.0])
def test_the_peak_becomes_white_and_nothing_below_does(curve, peak_nits):
    below, at, above = (pq_signal(peak_nits * by) for by in (0.9, 1.001, 2))
    codes = mapped(grey(np.array([below, at, above, 1.0]), "pq"), curve, peak_nits)[0, 0, :, 0]
    assert codes[0] < 255
    assert (codes[1:] == 255).all()


def test_a_peak_of_203_leaves_reinhard_nothing_to_do():
    """Up to white the light stays what it is: a gamma of 2.4 alone."""
    nits = np.linspace(0, 203, 50)
    codes = mapped(grey(np.array([pq_signal(n) for n in nits]), "pq"), "reinhard", 203.0)[0, 0, :, 0]
    assert np.abs(codes - 255 * (nits / 203) ** (1 / 2.4)).max() < 0.8


def test_hlg_has_no_more_than_1000_nits():
    planes = noise(FrameSpec(32, 32, "yuv444p10le", "bt2020", False, transfer="hlg"))
    assert (mapped(planes, "hable", 4000.0) == mapped(planes, "hable", 1000.0)).all()
    assert (mapped(planes, "hable", 400.0) != mapped(planes, "hable", 1000.0)).any()


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("nits", [50.0, 203.0, 900.0, 5000.0])
def test_proportions_are_kept_so_that_hues_are(curve, nits):
    """A colour inside BT.709's: its light has the proportions that it had, however bright it is."""
    share = np.linalg.inv(TO_BT709) @ [1.0, 0.5, 0.25]
    planes = noise(FrameSpec(1, 1, "gbrp16le", "rgb", True, transfer="pq"))
    for letter, light in zip("RGB", share / share.max(), strict=True):
        planes.picture(0)["GBR".index(letter)][...] = round(pq_signal(nits * light) * 65535)
    light = (mapped(planes, curve)[0, 0, 0] / 255) ** 2.4
    assert light[1] / light[0] == pytest.approx(0.5, abs=0.02)
    assert light[2] / light[0] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("channel", range(3))
def test_channels_are_not_mistaken(channel):
    """Each of BT.2020's primaries is outside BT.709: one channel alone is left, with what the matrix adds to others."""
    for name in ("gbrp12le", "rgb48le", "bgr24", "rgba"):
        spec = FrameSpec(3, 2, name, "rgb", True, transfer="pq")
        planes = Planes(spec, 1, slab=np.zeros((1, spec.nbytes), np.uint8))
        at, place = spec.format.components["RGB"[channel]]
        plane = planes.picture(0)[at]
        (plane[..., place] if plane.ndim == 3 else plane)[...] = round(0.58 * ((1 << spec.format.bits) - 1))
        codes = mapped(planes, "hable")[0]
        assert (codes.argmax(-1) == channel).all()
        check(codes, reference(planes, "pq", "hable"), LIGHT)


@pytest.mark.parametrize("name", ["yuv420p10le", "p010le", "yuv420p", "gbrp10le"])
def test_turned_and_mirrored_pictures_are_mapped_as_they_stand(name):
    lying = noise(FrameSpec(23, 14, name, matrices(name)[-1], ranges(name)[0], transfer="pq"))
    flat = mapped(lying, "hable")[0]
    for rotation, mirrored in itertools.product((0, 90, 180, 270), (False, True)):
        spec = replace(lying.spec, rotation=rotation, mirrored=mirrored)
        upright = np.rot90(flat[:, ::-1] if mirrored else flat, rotation // 90)
        assert (mapped(Planes(spec, 1, slab=lying.slab), "hable")[0] == upright).all()


def test_strips_are_joined_without_a_seam():
    """A large picture is as its parts are."""
    spec = FrameSpec(1000, 301, "yuv420p10le", "bt2020", False, transfer="hlg")
    planes = noise(spec)
    check(mapped(planes, "reinhard")[0], reference(planes, "hlg", "reinhard"), LIGHT)


@pytest.mark.parametrize("name", ["yuv420p", "nv12", "yuv420p10le"])
def test_fast_is_exact_where_pictures_are_mapped(name):
    planes = noise(FrameSpec(32, 18, name, "bt2020", False, transfer="hlg"), 2)
    assert (mapped(planes, "hable", accuracy="fast") == mapped(planes, "hable")).all()
    assert (np.stack(cpu.to_rgb(planes, accuracy="fast", tone=Tone("hable"))) == mapped(planes, "hable")).all()


def test_sdr_is_no_case_for_the_kernel():
    planes = noise(FrameSpec(4, 4, "yuv420p10le", "bt2020", False))
    with pytest.raises(ValueError, match="'sdr' are not tone mapped"):
        mapped(planes, "hable")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("method", ["nearest", "bilinear", "area"])
def test_a_tensor_is_made_of_the_mapped_picture(method, layout):
    for name in ("yuv420p10le", "yuv420p"):
        planes = noise(FrameSpec(40, 30, name, "bt2020", False, transfer="pq"), 2)
        shape = (2, 3, 16, 18) if layout == "nchw" else (2, 16, 18, 3)
        factor, offset = np.float32([0.1, 0.2, 0.3]), np.float32([-1, 0, 1])
        got, wanted = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        how: dict[str, Any] = {"factor": factor, "offset": offset, "layout": layout, "order": "bgr"}
        cpu.to_tensor(planes, got, accuracy="fast", method=method, source=(3, 2, 30, 20), tone=Tone("hable"), **how)
        resized = np.zeros((2, 16, 18, 3), np.uint8)
        cpu.resize(mapped(planes, "hable"), resized, method=method, source=(3, 2, 30, 20))
        cpu.normalize(resized, wanted, **how)
        assert (got == wanted).all()


# -- stages and pipelines ----------------------------------------------------------------------------------------------


def hdr_clip(path: Any, trc: int, codes: Any = ((520, 512, 512), (300, 448, 640), (940, 512, 512))) -> Any:
    tags = {"color_range": LIMITED, "colorspace": BT2020, "color_primaries": 9, "color_trc": trc}
    frames = [solid(each, i, pix_fmt="yuv420p10le") for i, each in enumerate(codes)]
    return encode(path, frames, "libx265", tags=tags)


def limited(codes: Any) -> np.ndarray:
    """Signals from 0 to 1 of one colour of 10 bits."""
    y, u, v = (codes[0] - 64) / 876, (codes[1] - 512) / 896, (codes[2] - 512) / 896
    red, blue = y + 1.4746 * v, y + 1.8814 * u
    return np.clip([red, (y - 0.2627 * red - 0.0593 * blue) / 0.678, blue], 0, 1)


@DEVICES
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("trc", "transfer"), [(PQ, "pq"), (HLG, "hlg")])
def test_b06_hdr_is_tone_mapped_when_asked(tmp_path, device, trc, transfer, curve):
    clip = hdr_clip(tmp_path / "hdr.mp4", trc)
    seen = see(clip, stages=[Rgb(tonemap=curve), Tensor(tonemap=curve, dtype="uint8", layout="nhwc")], device=device)
    for picture, tensor, codes in zip(
        seen.pictures, seen.tensors, [(520, 512, 512), (300, 448, 640), (940, 512, 512)], strict=True
    ):
        wanted = toned(limited(codes), transfer, curve)
        assert np.abs(picture[-1, -1] - wanted).max() <= 3, (codes, picture[-1, -1], wanted)  # x265 has its own
        assert (tensor["tensor"] == picture).all()
    assert seen.source["transfer"] == transfer
    assert not any("HDR" in warning for warning in seen.report.warnings)


@pytest.mark.parametrize("accuracy", [None, "exact", "fast"])
def test_hdr_of_8_bits_is_mapped_however_accurate_it_is_to_be(accuracy):
    frames = [tagged(solid((130, 128, 128)), {"color_trc": PQ, "colorspace": BT2020, "color_range": LIMITED})]
    frames[0].pts, frames[0].time_base = 0, Fraction(1, 25)
    seen = see(FrameList(frames=frames), stages=[Rgb(tonemap="reinhard", accuracy=accuracy)])
    wanted = toned(np.full(3, (130 - 16) / 219), "pq", "reinhard")
    assert np.abs(seen.pictures[0][-1, -1] - wanted).max() < 0.8


@DEVICES
def test_b06_a_conversion_that_does_not_map_is_named(tmp_path, device):
    clip = hdr_clip(tmp_path / "hdr.mp4", PQ)
    seen = see(clip, stages=[Rgb(tonemap="hable"), Tensor(width=8, height=8)], device=device)
    assert seen.warns("HDR (PQ)", "not tone mapped", "; tensor: {tonemap: hable} maps it")
    assert see(clip, device=device).warns("HDR (PQ)", "not tone mapped", "; rgb: {tonemap: hable} maps it")


def test_open_maps_when_asked(tmp_path):
    clip = hdr_clip(tmp_path / "hdr.mp4", HLG)
    with framepipe.open(str(clip), device="cpu", tonemap="hable") as frames:
        pictures = [frame.numpy() for frame in frames]
    assert np.abs(pictures[0][-1, -1] - toned(limited((520, 512, 512)), "hlg", "hable")).max() <= 3
    with pytest.raises(ConfigError, match="tonemap goes with the default stages"):
        framepipe.open(str(clip), stages=[Rgb()], tonemap="hable")


@DEVICES
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv420p10le"])
def test_sdr_is_the_same_bit_for_bit(device, pix_fmt):
    def pictures(tonemap):
        rng = np.random.default_rng(4)
        frames = []
        for number in range(2):
            frame = solid((0, 0, 0), pix_fmt=pix_fmt)
            for plane in frame.planes:
                rows = np.frombuffer(plane, np.uint8 if pix_fmt == "yuv420p" else np.uint16)
                rows[:] = rng.integers(0, 256 if pix_fmt == "yuv420p" else 1024, rows.shape)
            frame.pts, frame.time_base = number, Fraction(1, 25)
            frames.append(tagged(frame, {"color_trc": 1, "colorspace": BT2020}))
        seen = see(FrameList(frames=frames), stages=[Rgb(tonemap=tonemap), Tensor(tonemap=tonemap)], device=device)
        return seen.pictures, [tensors["tensor"] for tensors in seen.tensors]

    for plain, asked in zip(pictures("none"), pictures("hable"), strict=True):
        assert all((one == other).all() for one, other in zip(plain, asked, strict=True))


@pytest.mark.parametrize("of", [Rgb, Tensor])
def test_wrong_parameters_are_told(of):
    with pytest.raises(ConfigError, match="tonemap cannot be 'habel'; did you mean 'hable'"):
        of(tonemap="habel")
    for peak in (100.0, 20000.0, float("nan")):
        with pytest.raises(ConfigError, match=r"peak_nits is .*; it must be from 203"):
            of(tonemap="hable", peak_nits=peak)
