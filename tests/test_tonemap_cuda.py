"""The GPU's tone mapping gives the CPU's bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_kernels_colour import FORMATS, matrices, noise, ranges
from test_kernels_cuda import back, gpu, on_gpu, put, same
from test_tonemap import CURVES, LAYOUTS, PQ, TRANSFERS, hdr_clip, see

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels import _cuda_picture, _cuda_source, _cuda_tonemap, cpu, cuda
from framepipe.kernels._tonemap import Tone
from framepipe.stages.rgb import Rgb
from framepipe.stages.tensor import Tensor


def toned(planes: Planes, tone: Tone, **options: Any) -> np.ndarray:
    width, height = planes.spec.upright_size
    out = np.full((planes.n, height, width, 3), 77, np.uint8)
    cpu.to_rgb(planes, out, tone=tone, **options)
    return out


# -- without a GPU --


def test_a_toned_source_is_the_other_and_more():
    spec = FrameSpec(33, 17, "yuv420p10le", "bt2020", rotation=90, transfer="hlg")
    source, reader = _cuda_source.planes_source(spec, 1 << 16)
    toned_source, toned_reader = _cuda_tonemap.toned_source(spec, 1 << 16, Tone("hable"))
    assert toned_reader == f"toned_{reader}"
    for name in source.dtype.names:
        assert (toned_source[name] == source[name]).all()
    assert toned_source["hlg"] == 1


def test_every_format_has_a_reader():
    for name, smooth in itertools.product(FORMATS, (False, True)):
        spec = FrameSpec(8, 8, name, matrices(name)[0], ranges(name)[0], transfer="pq")
        assert _cuda_tonemap.toned_source(spec, spec.nbytes, Tone("hable"), smooth)[1] in _cuda_picture._pictures


def test_tables_are_in_the_code_bit_for_bit():
    source = _cuda_picture._pictures["toned_yuv_16"].source()
    words = next(line for line in source.splitlines() if line.startswith("#define PQ_LIGHT_WORDS ")).split(" ", 2)[2]
    bits = np.array([int(word, 16) for word in words.split(",")], np.uint32)
    assert (bits.view(np.float32) == _cuda_tonemap._tonemap.light("pq")).all()


# -- with one --


@gpu
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name, transfer):
    for matrix, full in itertools.product(matrices(name), ranges(name)):
        for width, height in [(33, 21), (64, 34), (1, 1), (5, 1), (1, 6)]:
            planes = noise(FrameSpec(width, height, name, matrix, full, transfer=transfer), 2)
            for tone in (Tone("hable"), Tone("reinhard", 4000.0)):
                same(cuda.to_rgb(on_gpu(planes), tone=tone), toned(planes, tone), matrix, full, width, height, tone)


@gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_turned_mirrored_and_interpolated(name):
    for rotation, mirrored, chroma in itertools.product((0, 90, 180, 270), (False, True), ("nearest", "bilinear")):
        spec = FrameSpec(39, 22, name, matrices(name)[-1], ranges(name)[0], rotation=rotation, transfer="pq")
        planes = noise(replace(spec, mirrored=mirrored), 2)
        got = cuda.to_rgb(on_gpu(planes), tone=Tone("hable"), chroma=chroma)
        same(got, toned(planes, Tone("hable"), chroma=chroma), rotation, mirrored, chroma)


@gpu
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_every_code_and_any_peak(transfer, curve):
    """Each signal beside each of some others."""
    spec = FrameSpec(1024, 64, "gbrp10le", "rgb", True, transfer=transfer)
    planes = noise(spec)
    green, blue, _ = planes.picture(0)
    green[...], blue[...] = np.arange(1024), (np.arange(64) * 1023 // 63)[:, None]
    for peak_nits in (203.0, 333.3, 1000.0, 10000.0):
        tone = Tone(curve, peak_nits)
        same(cuda.to_rgb(on_gpu(planes), tone=tone), toned(planes, tone), peak_nits)


@gpu
def test_planes_and_results_of_any_strides():
    planes = noise(FrameSpec(50, 20, "yuv420p10le", "bt2020", False, transfer="pq"), 2)
    wanted, tone = toned(planes, Tone("hable")), Tone("hable")
    memory = put(np.full((2, 22, 60, 3), 9, np.uint8))
    cuda.to_rgb(on_gpu(planes, gap=64, skip=32), memory[:, 1:21, 7:57], tone=tone)
    same(memory[:, 1:21, 7:57], wanted)
    around = back(memory).copy()
    around[:, 1:21, 7:57] = 9
    assert (around == 9).all()
    parts = [put(np.zeros((20, 50, 3), np.uint8)) for _ in range(2)]
    assert cuda.to_rgb(on_gpu(planes), parts, tone=tone) is parts
    for part, picture in zip(parts, wanted, strict=True):
        same(part, picture)


@gpu
@pytest.mark.parametrize("to", [(40, 30), (16, 12), (90, 70), (3, 2), (1, 1)])
@pytest.mark.parametrize("method", ["nearest", "bilinear", "area"])
@pytest.mark.parametrize("name", ["yuv420p10le", "p010le", "yuv420p", "yuv444p12le", "rgb48le"])
def test_tensors(name, method, to):
    planes = noise(FrameSpec(40, 30, name, matrices(name)[-1], ranges(name)[0], transfer="hlg"), 3)
    factor, offset = np.float32([0.1, 0.2, 0.3]), np.float32([-1, 0, 1])
    for layout, dtype in itertools.product(("nchw", "nhwc"), (np.float32, np.float16, np.uint8)):
        shape = (3, 3, to[1], to[0]) if layout == "nchw" else (3, to[1], to[0], 3)
        how: dict[str, Any] = {"method": method, "layout": layout, "order": "bgr", "tone": Tone("reinhard")}
        if dtype != np.uint8:
            how |= {"factor": factor, "offset": offset}
        wanted = np.zeros(shape, dtype)
        cpu.to_tensor(planes, wanted, **how)
        got = put(np.zeros(shape, dtype))
        cuda.to_tensor(on_gpu(planes), got, **how)
        same(got, wanted, layout, dtype)


@gpu
def test_a_pipeline_maps_as_on_the_cpu(tmp_path):
    clip = hdr_clip(tmp_path / "hdr.mp4", PQ)
    stages = {"tonemap": "hable", "peak_nits": 2000.0}
    here, there = (
        see(clip, stages=[Rgb(**stages), Tensor(width=31, height=17, **stages)], device=device)
        for device in ("cpu", "cuda")
    )
    assert all((one == other).all() for one, other in zip(here.pictures, there.pictures, strict=True))
    assert all((one["tensor"] == other["tensor"]).all() for one, other in zip(here.tensors, there.tensors, strict=True))
    assert not any("HDR" in warning for warning in there.report.warnings)
