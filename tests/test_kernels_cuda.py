"""The GPU's kernels give the CPU's bits, and do nothing but enqueue."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_kernels_colour import FORMATS, ORIENTATIONS, matrices, noise, ranges

from framepipe.device.select import why_not
from framepipe.frame import FrameSpec, Planes
from framepipe.kernels import _cuda_code, _cuda_draw, _cuda_picture, _cuda_rows, cpu, cuda
from framepipe.kernels._colour import component
from framepipe.kernels._draw import Mark
from framepipe.kernels._resample import taps
from framepipe.planecopy import PlaneCopy
from framepipe.testing import pattern_frames

METHODS = ["nearest", "bilinear", "area"]
SOME = ["yuv420p", "nv21", "yuv420p10le", "p010le", "yuv444p", "yuv411p", "yuv444p16le", "gray", "gbrp", "rgba64le"]


def gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that is skipped, saying why, where there is no GPU."""
    missing = why_not()
    return pytest.mark.gpu(pytest.mark.skipif(bool(missing), reason=f"no GPU: {missing}")(test))


def put(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(array)


def back(array: Any) -> np.ndarray:
    import cupy

    return cupy.asnumpy(array)


def on_gpu(planes: Planes, gap: int = 0, skip: int = 0) -> Planes:
    """The same planes in a slab whose rows are ``gap`` bytes further apart and begin ``skip`` bytes later."""
    wide = np.full((planes.n, planes.slab.shape[1] + gap), 0xEE, np.uint8)
    wide[:, skip : skip + planes.slab.shape[1]] = planes.slab
    return Planes(planes.spec, planes.n, slab=put(wide)[:, skip : skip + planes.slab.shape[1]])


def rgb_of(planes: Planes, **options: Any) -> np.ndarray:
    width, height = planes.spec.upright_size
    out = np.full((planes.n, height, width, 3), 77, np.uint8)
    cpu.to_rgb(planes, out, **options)
    return out


def same(got: Any, wanted: np.ndarray, *about: Any) -> None:
    """Equal bit for bit, also not-a-numbers and signs of zero."""
    got = back(got)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    bits = f"u{wanted.dtype.itemsize}"
    differs = np.flatnonzero(np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(wanted).view(bits))
    assert not differs.size, (*about, f"{differs.size} of {wanted.size} differ, first at {differs[0]}")


# -- without a GPU --


def test_the_contract_is_that_of_the_cpu():
    for name in cpu.__all__:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (cuda, cpu))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]
    assert set(cuda.__all__) == {*cpu.__all__, "prepare"}


CTYPES = {"i1": ctypes.c_int8, "i4": ctypes.c_int32, "i8": ctypes.c_int64, "u1": ctypes.c_uint8, "u2": ctypes.c_uint16,
          "u4": ctypes.c_uint32, "u8": ctypes.c_uint64, "f4": ctypes.c_float}  # fmt: skip


def c_struct(dtype: np.dtype[Any]) -> Any:
    """What a C compiler makes of a dtype."""
    if dtype.shape:
        return c_struct(dtype.base) * math.prod(dtype.shape)
    if dtype.fields is None:
        return CTYPES[dtype.str[1:]]
    fields = [(name, c_struct(of)) for name, (of, *_) in dtype.fields.items()]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("program", cuda._PROGRAMS, ids=lambda program: program.files[-1])
def test_host_and_device_agree_on_structs(program):
    assert program.source().isascii()  # compilers on Windows take source in the system's code page
    for name, dtype in program.structs.items():
        struct = c_struct(dtype)
        assert ctypes.sizeof(struct) == dtype.itemsize
        for field, (_, offset, *_) in dtype.fields.items():
            assert getattr(struct, field).offset == offset, (name, field)
            assert f" {field}" in program.source()
    assert sum(dtype.itemsize for dtype in program.structs.values()) + 8 * 8 <= 4096  # arguments of a launch


def chosen(name: str, size: tuple[int, int], to: tuple[int, int], n: int = 32, **options: Any) -> Any:
    """The launch of a tensor of float32, laid out without a GPU."""
    options = {
        "method": "area",
        "layout": "nchw",
        "order": "rgb",
        "part": None,
        "rotation": 0,
        "mirrored": False,
        "aligned": True,
    } | options
    spec = FrameSpec(*size, name, rotation=options["rotation"], mirrored=options["mirrored"])
    like = np.broadcast_to(np.float32(0), (1,))
    shape = tensor_shape(n, *to, options["layout"])
    strides = tuple(4 * math.prod(shape[axis + 1 :]) for axis in range(4))
    wrote = (shape, strides, like.dtype.name, options["layout"], options["order"], None, None)
    how = (options["method"], None, options["part"], (0, 0, 0))
    return _cuda_picture._tensors(spec, n, spec.nbytes, options["aligned"], wrote, how)


@pytest.mark.parametrize(
    ("kernel", "name", "to", "options"),
    [
        ("tensor_planar", "yuv420p", (1920, 1080), {}),
        ("tensor_planar", "p010le", (1920, 1080), {"order": "bgr"}),
        ("tensor_interleaved", "nv12", (1920, 1080), {"layout": "nhwc"}),
        ("picture_copy", "nv12", (1920, 1080), {"layout": "nhwc", "order": "bgr"}),
        ("picture_copy", "gray", (1920, 1080), {}),
        ("area_fine", "yuv420p", (640, 640), {"part": (0, 140, 640, 360)}),
        ("area_fine", "nv12", (480, 135), {}),  # 8 rows each
        ("area_narrow", "yuv420p", (480, 120), {}),  # 9
        ("area_narrow", "yuv420p10le", (640, 360), {}),
        ("area_narrow", "yuv444p10le", (224, 224), {}),
        ("area_wide", "yuv422p", (518, 518), {"layout": "nhwc", "order": "bgr"}),
        ("bilinear_narrow", "yuv420p", (640, 640), {"method": "bilinear", "part": (0, 140, 640, 360)}),
        ("bilinear_wide", "yuv420p", (800, 600), {"method": "bilinear"}),
        ("bilinear_narrow", "yuv420p", (3840, 2160), {"method": "bilinear", "n": 1}),
        ("picture_bilinear", "yuv420p", (160, 90), {"method": "bilinear"}),  # most columns are between the taps
        ("picture_nearest", "yuv420p", (640, 360), {"method": "nearest"}),
        ("picture_area", "yuv420p", (2000, 1080), {}),
        ("picture_area", "yuv420p", (640, 360), {"aligned": False}),
        ("picture_area", "yuv420p", (640, 360), {"rotation": 90}),
        ("picture_area", "yuv420p", (640, 360), {"mirrored": True}),
        ("picture_copy", "yuv420p", (1920, 1080), {"mirrored": True}),
        ("picture_area", "yuv411p", (640, 360), {}),
        ("picture_area", "yuv420p", (64, 36), {"n": 1}),  # too few warps
        ("gather_area", "yuv420p", (16, 9), {}),
    ],
)
def test_the_kernel_that_is_chosen(kernel, name, to, options):
    assert chosen(name, (1920, 1080), to, **options).name == kernel


@pytest.mark.parametrize("method", ["area", "bilinear"])
def test_tiles_fit_what_a_block_has(method):
    """Columns fit the warps, shared memory its limit, weights and sums their bits, and magic numbers divide."""
    rng = np.random.default_rng(5)
    sizes = [(1920, 1080, 640, 360), (1920, 1080, 224, 126), (3840, 2160, 518, 291), (1280, 720, 1920, 1080)]
    sizes += [(n_x, n_y, *rng.integers(1, [n_x, n_y]).tolist()) for n_x, n_y in rng.integers(2, 3000, (60, 2)).tolist()]
    names = set()
    for n_x, n_y, m_x, m_y in sizes:
        found = chosen("yuv420p", (n_x, n_y), (m_x, m_y), method=method)
        names.add(found.name)
        if found.program not in _cuda_rows._resamples.values():
            continue
        job = found.job.view(_cuda_rows.TILED_JOB)
        tiling, place = job["tiling"], job["place"]
        narrow, fine = found.name.endswith(("narrow", "fine")), found.name.endswith("fine")
        columns, rows = int(tiling["columns"]), int(tiling["rows"])
        assert found.shared <= 48 << 10
        assert rows == 1 or rows % 2 == 0 or not narrow
        spans = _spans(method, n_x, m_x)
        for left in range(0, m_x, columns):
            tile = spans[left : left + columns]
            assert tile[-1][1] - (tile[0][0] & ~7) <= 256
        count = max(end - begin for begin, end in spans)
        taps = int(tiling["taps"])
        assert taps == (-(-(count + 1) // 4) if narrow else count)
        read = max(
            (begin - (spans[i - i % columns][0] & ~7) & (~1 if narrow else ~0)) + taps * (4 if narrow else 1)
            for i, (begin, _) in enumerate(spans)
        )
        assert (read - 256) * (2 if narrow else 4) <= _cuda_rows._BEYOND, "a warp reads another's sums"
        assert found.grid[0] == -(-m_x // columns) * -(-m_y // (_cuda_rows._WARPS * rows))
        step_x, step_y = place["step"].tolist()
        if narrow:
            assert 255 * (32 if fine else 1) * step_y < 1 << 16
            assert min(step_x, int(place["pixel"][0])) < 256
        half, magic, shift = (int(tiling[field]) for field in ("half", "magic", "shift"))
        total = step_x * step_y * (32 if fine else 1)
        assert half == total // 2 * magic
        for code in (0, 1, 127, 254, 255):
            for beside in (-1, 0, 1):
                a = max(0, code * total + beside)
                if a <= 255 * total:
                    assert (a * magic + half) >> (32 + shift) == (a + total // 2) // total < 256
        assert magic < 1 << 32 and 255 * total + total // 2 < 1 << 31
    assert names >= {f"{method}_narrow", f"{method}_wide"} | ({"area_fine"} if method == "area" else set())


def _spans(method: str, n: int, m: int) -> list[tuple[int, int]]:
    """First and end of the source positions with a weight, of each output position."""
    found = taps(method, n, m)
    spans = []
    for index, weight in zip(found.index, found.weight, strict=True):
        used = index[weight > 0]
        spans.append((int(used[0]), int(used[-1]) + 1))
    return spans


# -- planes to RGB --


@gpu
@pytest.mark.parametrize("name", FORMATS)
def test_rgb_of_every_format(name):
    for matrix, full in itertools.product(matrices(name), ranges(name)):
        for width, height in [(70, 37), (33, 2), (1, 1)]:
            planes = noise(FrameSpec(width, height, name, matrix, full), 2)
            out = put(np.full((2, height, width, 3), 77, np.uint8))
            assert cuda.to_rgb(on_gpu(planes), out) is out
            same(out, rgb_of(planes), matrix, full, width, height)


@gpu
@pytest.mark.parametrize(("rotation", "mirrored"), ORIENTATIONS)
@pytest.mark.parametrize("name", ["yuv420p", "nv12", "yuv422p", "yuv444p", "p010le", "yuv422p10le", "yuv444p12le",
                                  "nv42", "yuv440p", "yuv410p", "gray10le", "rgb24", "bgra", "gbrp12le"])  # fmt: skip
def test_rgb_of_every_size_and_orientation(name, rotation, mirrored):
    for seed, (width, height) in enumerate([(1, 1), (2, 3), (7, 5), (8, 2), (64, 64), (65, 66), (255, 17), (257, 16),
                                            (258, 33), (600, 31), (96, 131), (131, 96)]):  # fmt: skip
        n = 1 + seed % 3
        spec = FrameSpec(width, height, name, matrices(name)[-1], rotation=rotation, mirrored=mirrored)
        planes = noise(spec, n, seed)
        for gap, skip in [(0, 0), (64, 0), (256, 128), (2, 2)]:  # the last is aligned to nothing but samples
            same(cuda.to_rgb(on_gpu(planes, gap, skip)), rgb_of(planes), width, height, gap, skip)


@gpu
@pytest.mark.parametrize(
    "name", ["yuv420p", "yuv420p10le", "nv12", "yuv440p12le", "yuv411p", "yuv410p", "yuv444p", "p216le"]
)
def test_bilinear_chroma(name):
    sizes = [(33, 21), (32, 20), (1, 1), (2, 3), (140, 9)]
    for (rotation, mirrored), size in itertools.product(ORIENTATIONS, sizes):
        spec = FrameSpec(*size, name, "bt709", rotation=rotation, mirrored=mirrored)
        planes = noise(spec, 2)
        same(cuda.to_rgb(on_gpu(planes), chroma="bilinear"), rgb_of(planes, chroma="bilinear"), spec)


@gpu
@pytest.mark.parametrize("name", ["yuv420p", "yuv444p10le", "bgr24"])
def test_rgb_to_memory_of_any_strides(name):
    planes = noise(FrameSpec(70, 36, name, matrices(name)[0], rotation=90, mirrored=name == "yuv444p10le"), 3)
    wanted, read = rgb_of(planes), on_gpu(planes)
    for part in [
        np.s_[:, :, 3:39],
        np.s_[:, :, 5:41],
        np.s_[:, ::-1, :36],
        np.s_[:, :, 40:4:-1],
        np.s_[:, :, :36, ::-1],
    ]:
        memory = put(np.full((3, 70, 50, 3), 77, np.uint8))
        cuda.to_rgb(read, memory[part])
        same(memory[part], wanted, part)
        host = back(memory)
        host[part] = 77
        assert (host == 77).all(), part  # nothing beside it was written
    parts = [put(np.zeros((70, 36, 3), np.uint8)) for _ in range(3)]
    assert cuda.to_rgb(read, parts) is parts
    for picture, one in zip(parts, wanted, strict=True):
        same(picture, one)


@gpu
def test_rgb_of_decoded_frames():
    for name in ("yuv420p", "nv12", "yuv422p10le", "gray", "rgb24"):
        frames = pattern_frames(3, 98, 51, name)
        spec = FrameSpec.of(frames[0])
        slab = np.zeros((3, spec.nbytes), np.uint8)
        room = PlaneCopy(slab, spec)
        for i, frame in enumerate(frames):
            room.put(i, [frame])
        planes = Planes(spec, 3, slab=slab)
        for accuracy in ("exact", "fast"):
            same(cuda.to_rgb(on_gpu(planes), accuracy=accuracy), rgb_of(planes), name)
        assert not cuda.fast_path(spec)


# -- sizes --


def pictures(n: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), np.uint8)


def check_resize(images: Any, size: tuple[int, int], read: Any = None, **options: Any) -> None:
    wanted = np.full((len(images), size[1], size[0], 3), 77, np.uint8)
    out = put(wanted)
    cpu.resize(images, wanted, **options)
    cuda.resize(put(images) if read is None else read, out, **options)
    same(out, wanted, size, options)


@gpu
@pytest.mark.parametrize("method", METHODS)
def test_resize(method):
    rng = np.random.default_rng(METHODS.index(method))
    sizes = [rng.integers(1, 200, 4).tolist() for _ in range(40)]
    sizes += [[640, 3, 5, 2], [300, 200, 3, 2], [33, 17, 33, 40], [1, 1, 70, 9], [9, 9, 9, 9], [200, 300, 1, 1]]
    for seed, (n_x, n_y, m_x, m_y) in enumerate(sizes):
        check_resize(pictures(1 + seed % 3, n_y, n_x, seed), (m_x, m_y), method=method)


@gpu
@pytest.mark.parametrize("method", METHODS)
def test_resize_of_very_long_sides(method):
    """Products of two lengths that need more than 32 bits."""
    check_resize(pictures(1, 2, 70_001), (65_537, 3), method=method)
    check_resize(pictures(1, 70_001, 2), (1, 69_999), method=method)


@gpu
def test_sums_of_the_largest_pictures_do_not_overflow():
    images = np.broadcast_to(pictures(1, 1, 4111), (1, 4099, 4111, 3)) | np.uint8(240)
    read = put(images)
    check_resize(images, (1, 1), read, method="area")  # a block a pixel
    check_resize(images, (4110, 4098), read, method="area")  # a thread a pixel


@gpu
@pytest.mark.parametrize("method", METHODS)
def test_parts_borders_strides_and_lists(method):
    images = pictures(3, 60, 90)
    read = put(images)
    rect = {"source": (5, 6, 70, 40), "target": (3, 4, 31, 41), "color": (1, 2, 3)}
    check_resize(images, (40, 50), method=method, **rect)
    check_resize(images, (401, 299), method=method, source=(1, 2, 3, 4), target=(390, 1, 11, 260))
    check_resize(images, (90, 60), method=method, source=(10, 20, 30, 40), target=(60, 0, 30, 40), color=(9, 8, 7))
    view = np.s_[:, 50:7:-1, 3:80:2, ::-1]
    check_resize(images[view], (31, 17), read[view], method=method)
    check_resize(list(images), (31, 17), list(read), method=method)
    check_resize(images[:, :, :1], (1, 17), read[:, :, :1], method=method, source=(0, 3, 1, 50))
    check_resize(images[:, 7:50, 5:40], (20, 20), list(read[:, 7:50, 5:40]), method=method)


# -- tensors --

FACTOR = np.array([0.0171, 0.25, 1 / 3], np.float32)
OFFSET = np.array([-2.1, 0.5, 7.0], np.float32)
TINY = (
    np.array([3e-8, 300, 1], np.float32),
    np.array([1e-8, -0.0, 0.0004882], np.float32),
)  # subnormals, infinities, ties


def tensor_shape(n: int, width: int, height: int, layout: str) -> tuple[int, ...]:
    return (n, 3, height, width) if layout == "nchw" else (n, height, width, 3)


@gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("order", ["rgb", "bgr"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_normalize(layout, order, dtype):
    signs = np.array([-1, 1, -1], np.float32), np.zeros(3, np.float32)
    numbers = [(FACTOR, OFFSET), TINY, signs, (signs[0], -signs[1]), (None, None)]
    numbers = numbers[-1:] if dtype == "uint8" else numbers
    for width, height, n in [(9, 7, 2), (300, 9, 1), (128, 8, 3), (1, 1, 1), (33, 40, 2)]:
        images = pictures(n, height, width)
        for factor, offset in numbers:
            options = {"factor": factor, "offset": offset, "layout": layout, "order": order}
            wanted = np.full(tensor_shape(n, width, height, layout), 77, dtype)
            out = put(wanted)
            with np.errstate(over="ignore", under="ignore"):
                cpu.normalize(images, wanted, **options)
            cuda.normalize(put(images), out, **options)
            same(out, wanted, width, height)
            parts = put(np.full((n, *wanted.shape[1:-1], wanted.shape[-1] + 2), 77, dtype))[..., 1:-1]
            cuda.normalize(list(put(images)), parts, **options)
            same(parts, wanted, "with gaps")


def check_tensor(planes: Planes, size: tuple[int, int], dtype: str = "float32", **options: Any) -> None:
    options = {"factor": FACTOR, "offset": OFFSET, "layout": "nchw", **options}
    if dtype == "uint8":
        options |= {"factor": None, "offset": None}
    wanted = np.full(tensor_shape(planes.n, *size, options["layout"]), 77, dtype)
    out = put(wanted)
    cpu.to_tensor(planes, wanted, **options)
    cuda.to_tensor(on_gpu(planes, 32), out, **options)
    same(out, wanted, planes.spec, size, dtype, options)


@gpu
@pytest.mark.parametrize("name", SOME)
def test_tensor_is_rgb_resize_and_normalize(name):
    rng = np.random.default_rng(len(name))
    kinds = itertools.cycle(itertools.product(["float32", "float16", "uint8"], ["nchw", "nhwc"], ["rgb", "bgr"]))
    for (rotation, mirrored), method in itertools.product(ORIENTATIONS, METHODS):
        width, height, m_x, m_y = rng.integers(1, 150, 4).tolist()
        spec = FrameSpec(width, height, name, matrices(name)[0], rotation=rotation, mirrored=mirrored)
        planes = noise(spec, 1 + m_x % 3, m_x)
        dtype, layout, order = next(kinds)
        check_tensor(planes, (m_x, m_y), dtype, method=method, layout=layout, order=order)
        check_tensor(planes, planes.spec.upright_size, dtype, layout=layout, order=order)


@gpu
@pytest.mark.parametrize("method", METHODS)
def test_tensor_of_a_part_with_a_border(method):
    for name, (rotation, mirrored) in itertools.product(["yuv420p", "gray10le"], ORIENTATIONS[::5] + ORIENTATIONS[-1:]):
        spec = FrameSpec(120, 90, name, rotation=rotation, mirrored=mirrored)
        planes = noise(spec, 2)
        border = {"target": (10, 0, 44, 50), "color": (114, 113, 112)}
        check_tensor(planes, (64, 50), method=method, source=(3, 5, 81, 80), **border)
        check_tensor(planes, (64, 50), "float16", method=method, layout="nhwc", source=(3, 5, 44, 50), **border)
        check_tensor(planes, (3, 2), method=method, order="bgr")  # a block a pixel, by area


def forget_layouts() -> None:
    for cached in (_cuda_picture._rgb, _cuda_picture._resized, _cuda_picture._normalized, _cuda_picture._tensors):
        cached.cache_clear()


@pytest.fixture
def any_size(monkeypatch):
    """Kernels for large batches are chosen for small ones too."""
    monkeypatch.setattr(_cuda_rows, "_FEWEST_WARPS", 0)
    forget_layouts()
    yield
    forget_layouts()


@pytest.fixture
def as_if_large(any_size, monkeypatch):
    """Geometries are laid out as for batches that keep a large GPU busy: threads make several pixels in turn."""
    monkeypatch.setattr(_cuda_picture, "_ENOUGH_WARPS", 1)
    monkeypatch.setattr(_cuda_rows, "_ENOUGH_BLOCKS", 1)
    monkeypatch.setattr(_cuda_rows, "_MULTIPROCESSORS", 1)
    forget_layouts()


@gpu
@pytest.mark.usefixtures("as_if_large")
def test_large_batches():
    for name, (width, height) in itertools.product(SOME, [(300, 101), (520, 75)]):
        planes = noise(FrameSpec(width, height, name, matrices(name)[0]), 2)
        same(cuda.to_rgb(on_gpu(planes)), rgb_of(planes), name)
    for method, (width, height) in itertools.product(METHODS, [(300, 20), (129, 33), (20, 9)]):
        check_resize(pictures(2, 60, 200), (width, height), method=method)
        check_tensor(noise(FrameSpec(210, 90, "yuv420p"), 2), (width, height), method=method, layout="nhwc")
    images, wanted = pictures(3, 9, 300), np.zeros((3, 300 * 9 * 3), np.float16)
    for layout, shape in [("nchw", (3, 3, 9, 300)), ("nhwc", (3, 9, 300, 3))]:
        out = put(wanted).reshape(shape)
        cpu.normalize(images, wanted.reshape(shape), factor=FACTOR, offset=OFFSET, layout=layout)
        cuda.normalize(put(images), out, factor=FACTOR, offset=OFFSET, layout=layout)
        same(out, wanted.reshape(shape), layout)


FAST = ["yuv420p", "nv12", "nv21", "p010le", "yuv422p", "yuv422p10le", "nv16", "yuv444p", "nv42", "yuv444p12le"]


@gpu
@pytest.mark.parametrize("name", FAST)
def test_tensors_of_the_same_size(name):
    kinds = itertools.cycle(itertools.product(["float32", "float16", "uint8"], ["nchw", "nhwc"], ["rgb", "bgr"]))
    for seed, (width, height) in enumerate([(1, 1), (3, 2), (8, 5), (66, 37), (255, 9), (256, 8), (264, 34), (600, 3)]):
        for _ in range(6):
            dtype, layout, order = next(kinds)
            planes = noise(FrameSpec(width, height, name, matrices(name)[0]), 2, seed)
            check_tensor(planes, (width, height), dtype, layout=layout, order=order)
    planes = noise(FrameSpec(40, 6, name), 2)
    for order, (factor, offset) in itertools.product(["rgb", "bgr"], [(-FACTOR, -0 * OFFSET), (FACTOR, -0 * OFFSET)]):
        check_tensor(planes, (40, 6), order=order, factor=factor, offset=-offset)  # zeros of either sign


@gpu
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", [*FAST, "images"])
def test_tiles(name, large, request):
    """Every division of the work that resample.cu knows, of parts and with borders, up and down."""
    request.getfixturevalue("as_if_large" if large else "any_size")
    rng = np.random.default_rng(len(name) + large)
    kinds = itertools.cycle(itertools.product(["float32", "float16", "uint8"], ["nchw", "nhwc"], ["rgb", "bgr"]))
    whole = [
        (480, 96, 160, 32),
        (480, 90, 120, 30),
        (520, 60, 61, 7),
        (640, 37, 9, 4),
        (304, 40, 400, 71),
        (16, 9, 8, 3),
    ]
    chance = [rng.integers(1, [700, 90, 300, 60]).tolist() for _ in range(8)]
    for seed, (width, height, m_x, m_y) in enumerate(whole + chance):
        width = -(-width // 8) * 8 if name == "images" else width
        x, y = rng.integers(0, [width, height]).tolist()
        part = {"source": (x, y, width - x, height - y), "target": (seed % 5, seed % 3, m_x, m_y), "color": (255, 7, 1)}
        room = (m_x + seed % 5 + seed % 7, m_y + seed % 3 + seed % 4)
        letterbox = {"target": (0, seed, m_x, m_y), "color": (1, 2, 3)}
        cases = [((m_x, m_y), {}), (room, part), ((m_x, m_y + 2 * seed + 1), letterbox)]
        for method, (size, options) in itertools.product(["area", "bilinear"], cases):
            if name == "images":
                check_resize(pictures(2, height, width, seed), size, method=method, **options)
                continue
            planes = noise(FrameSpec(width, height, name, matrices(name)[0]), 2, seed)
            dtype, layout, order = next(kinds)
            check_tensor(planes, size, dtype, method=method, layout=layout, order=order, **options)


@gpu
@pytest.mark.usefixtures("any_size")
def test_tiles_of_the_brightest_pictures():
    """Sums that need every bit they have, and codes that are clipped."""
    for method, (m_x, m_y) in itertools.product(["area", "bilinear"], [(7, 4), (601, 209), (256, 3), (255, 210)]):
        images = np.full((1, 211, 640, 3), 255, np.uint8)
        check_resize(images, (m_x, m_y), method=method)
        planes = noise(FrameSpec(640, 211, "yuv420p", "bt2020"), 1)
        planes.slab[:] |= 0xE0
        check_tensor(planes, (m_x, m_y), method=method)
    for name, (m_x, m_y) in itertools.product(["yuv420p", "nv12", "yuv444p"], [(80, 8), (213, 16), (640, 9)]):
        planes = noise(FrameSpec(640, 64, name, "bt709"), 1)
        planes.slab[:, : 640 * 64], planes.slab[:, 640 * 64 :] = 255, 128
        assert (rgb_of(planes) == 255).all()
        check_tensor(planes, (m_x, m_y), method="area")


@gpu
@pytest.mark.usefixtures("any_size")
def test_nothing_beside_a_tensor_is_written():
    import cupy

    planes = on_gpu(noise(FrameSpec(200, 60, "yuv420p"), 2))
    for dtype, size, part in itertools.product(
        ["float32", "float16", "uint8"], [(200, 60), (50, 30)], [np.s_[:, :, 3:, 5:], np.s_[:, :, :-3, :-5]]
    ):
        memory = cupy.full((2, 3, size[1] + 3, size[0] + 5), 77, dtype)
        out, numbers = memory[part], {} if dtype == "uint8" else {"factor": FACTOR, "offset": OFFSET}
        for method in ("area", "bilinear"):
            wanted = np.full(out.shape, 77, dtype)
            inner = None if size[0] == 200 else (3, 2, 45, 28)
            cpu.to_tensor(planes_on_cpu(planes), wanted, method=method, target=inner, **numbers)
            cuda.to_tensor(planes, out, method=method, target=inner, **numbers)
            same(out, wanted, dtype, size, method)
        host = back(memory)
        host[part] = 77
        assert (host == 77).all()


def planes_on_cpu(planes: Planes) -> Planes:
    return Planes(planes.spec, planes.n, slab=back(planes.slab))


# -- statistics --


@gpu
def test_stats():
    for n, height, width in [(3, 31, 64), (1, 1, 1), (2, 300, 700), (1, 2000, 3)]:
        images = pictures(n, height, width)
        wanted = np.zeros((n, 3, 3), np.int64)
        out = put(np.full((n, 3, 6), -5, np.int64))
        for view in (np.s_[:], np.s_[:, : height // 2 + 1, ::-1]):
            cpu.stats(np.ascontiguousarray(images[view]), wanted)
            cuda.stats(put(images)[view], out[..., ::2])
            same(out[..., ::2], wanted)
        cuda.stats(list(put(images)[view]), out[..., ::2])
        same(out[..., ::2], wanted)


@gpu
@pytest.mark.parametrize("name", ["yuv420p", "nv12", "p010le", "yuv420p10le", "gray", "gray16le", "ya8", "ya16le"])
def test_luma_stats(name):
    planes = noise(FrameSpec(333, 77, name), 3)
    planes.slab[1:] = 0xFF  # one picture of all codes, two of the largest number alone
    wanted, out = np.zeros((3, 1, 3), np.int64), put(np.zeros((3, 1, 3), np.int64))
    cpu.luma_stats(planes, wanted)
    cuda.luma_stats(on_gpu(planes, 64), out)
    same(out, wanted)


# -- difference --


def scenes(spec: FrameSpec, count: int) -> list[Planes]:
    """Pictures in which something moves, stands and goes, the light changes and there is a cut."""
    rng = np.random.default_rng(spec.width)
    top = (1 << spec.format.bits) - 1
    slabs = []
    pattern = rng.random((2, spec.height, spec.width))
    for number in range(count):
        picture = pattern[int(number > 24)] * 0.5 + 0.25
        if number >= 8:
            picture = picture * (0.8 if number < 20 else 1.1)
        picture = picture + rng.normal(0, 0.004, picture.shape)
        at = 3 * min(number, 12)
        picture[at : at + 24, at : at + 30] = 0.9 if number < 18 else picture[at : at + 24, at : at + 30]
        codes = np.clip(picture * top, 0, top).astype(int) << spec.format.shift
        slab = np.zeros((1, spec.nbytes), np.uint8)
        for view in spec.views(slab):
            across = np.arange(view.shape[2]) * spec.width // view.shape[2]
            down = np.arange(view.shape[1]) * spec.height // view.shape[1]
            view[0] = codes[down[:, None], across].reshape(*view.shape[1:3], *[1] * (view.ndim - 3))
        slabs.append(Planes(spec, 1, slab=slab))
    return slabs


@gpu
@pytest.mark.parametrize("shrink", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["yuv420p", "yuv420p10le", "p010le", "rgb24", "gbrp10le", "gray16le"])
def test_difference(name, shrink):
    spec = FrameSpec(203, 131, name, matrices(name)[0])
    height, width = spec.height // shrink, spec.width // shrink
    cells = (-(-height // 4), -(-width // 4))
    state, mask = np.zeros((4, height, width), np.uint16), np.zeros(cells, np.uint8)
    gpu_state, gpu_masks = put(state), put(np.full((cells[0], 2, cells[1] + 3), 99, np.uint8))
    gpu_mask = gpu_masks[:, 1, 2:-1]
    scratch = cuda.difference_scratch(height, width)
    letters = "RGB" if spec.format.model == "rgb" else "Y"
    bits = spec.format.bits + spec.format.shift - 8
    seen: set[str] = set()
    for number, planes in enumerate(scenes(spec, 32)):
        options = {"shrink": shrink, "extra_bits": bits, "threshold": 3072, "limit": round(0.6 * height * width),
                   "slow": 1 + number % 5, "hold": min(6, number // 2 + 1), "first": number == 0}  # fmt: skip
        read = on_gpu(planes).picture(0)
        cpu.difference([component(planes.picture(0), spec, c) for c in letters], state, mask, None, **options)
        cuda.difference([component(read, spec, c) for c in letters], gpu_state, gpu_mask, scratch, **options)
        same(gpu_state, state, number)
        same(gpu_mask, mask, number)
        seen |= {"moved"} if mask.any() else {"still"}
        seen |= {"aged"} if (state[3] > 1).any() else set()
    host = back(gpu_masks)
    host[:, 1, 2:-1] = 99
    assert (host == 99).all()
    assert seen >= {"moved", "still"}


@gpu
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 3), (33, 9), (5, 40)])
def test_difference_of_small_pictures_at_random(size):
    """Noise as the state: every branch at every pixel, light changes of every gain, ages up to the last."""
    rng = np.random.default_rng(size[0])
    shape = (4, size[1], size[0])
    cells = (-(-size[1] // 4), -(-size[0] // 4))
    for number in range(40):
        state = rng.integers(0, 65281, shape, np.uint16)
        state[3] = rng.choice([0, 1, 2, 65533, 65534, 65535], shape[1:])
        if number % 2:
            state[:3] = rng.normal(0, 400, (3, *shape[1:])).astype(np.int64) + rng.integers(2500, 60000)
        gain = rng.uniform(0.5, 1.8)
        picture = np.clip(state[0] / 256 * gain + rng.normal(0, 2 if number % 3 else 40, shape[1:]), 0, 255).astype(
            np.uint8
        )
        gpu_state, gpu_mask, mask = put(state), put(np.full(cells, 9, np.uint8)), np.zeros(cells, np.uint8)
        options = {"shrink": 1, "extra_bits": 0, "threshold": int(rng.integers(256, 8000)),
                   "hold": 65535 if number % 5 else 3, "limit": int(rng.integers(0, size[0] * size[1] + 1)),
                   "slow": int(rng.integers(1, 15))}  # fmt: skip
        scratch = cuda.difference_scratch(size[1], size[0])
        cuda.difference([put(picture)], gpu_state, gpu_mask, scratch, **options)
        cpu.difference([picture], state, mask, None, **options)
        same(gpu_state, state, number)
        same(gpu_mask, mask, number)


# -- draw --


def some_marks(rng: np.random.Generator, count: int) -> list[Mark]:
    words = ["", "cat 0.93", "Ünïcode ?", " ", "x" * 40, "long " * 300, "|_^~"]
    marks = []
    for number in range(count):
        x1, y1 = rng.uniform(-60, 260, 2)
        box = [x1, y1, x1 + rng.uniform(-9, 150), y1 + rng.uniform(-9, 120)]
        if number % 11 == 0:
            box[number % 4] = [math.nan, math.inf, -1e30, 1e30][number % 4]
        marks.append(Mark(tuple(box), tuple(rng.integers(0, 256, 3).tolist()), words[number % len(words)]))
    return marks


@gpu
@pytest.mark.parametrize(("thickness", "scale"), [(1, 1), (3, 2), (64, 5)])
def test_draw(thickness, scale):
    rng = np.random.default_rng(scale)
    for count in (0, 1, 7, 39, 40, 41, 100):
        marks = some_marks(rng, count)
        image = pictures(1, 180, 240, count)[0]
        drawn = put(image)
        cpu.draw_boxes(image, marks, thickness, scale)
        cuda.draw_boxes(drawn, iter(marks), thickness, scale)
        same(drawn, image, count)


@gpu
def test_later_marks_are_on_top_whichever_is_done_first():
    image = np.zeros((1000, 1500, 3), np.uint8)
    drawn = put(image)
    large = Mark((5, 5, 1490, 990), (200, 0, 0), "x" * 60)
    small = [Mark((x, y, x + 30, y + 30), (0, 200, 0), "y") for x in range(0, 1500, 200) for y in (0, 20, 40, 960)]
    for marks in ([large, *small], [*small, large]):
        cpu.draw_boxes(image, marks, 64, 3)
        cuda.draw_boxes(drawn, marks, 64, 3)
        same(drawn, image)


@gpu
def test_draw_on_part_of_a_picture():
    image = pictures(1, 90, 120)[0]
    drawn = put(image)
    marks = [Mark((-5.5, 0.5, 40.5, 2.5), (1, 2, 3), "edge"), Mark((30, 30, 20, 60), (200, 255, 9), "inverted"),
             Mark((88.5, 60, 300, 71.4), (0, 0, 0), "right"), Mark((500, 5, 600, 9), (9, 9, 9), "outside")]  # fmt: skip
    view = np.s_[80:9:-1, 10:110]
    cpu.draw_boxes(image[view], marks, 2, 1)
    cuda.draw_boxes(drawn[view], marks, 2, 1)
    same(drawn, image)


# -- what every function keeps --


def calls() -> tuple[dict[str, Callable[[], Any]], list[Any]]:
    """Every kernel with memory that is there already, and what they write."""
    import cupy

    planes = on_gpu(noise(FrameSpec(130, 98, "yuv420p"), 2))
    turned = Planes(FrameSpec(130, 98, "gray10le", rotation=90), 2, slab=put(np.zeros((2, 60_000), np.uint8)))
    image, small = put(pictures(2, 98, 130)), put(pictures(2, 40, 30))
    upright = put(pictures(2, 130, 98))
    tensor, sums = cupy.zeros((2, 3, 40, 30), np.float32), cupy.zeros((2, 3, 3), np.int64)
    numbers = {"factor": FACTOR, "offset": OFFSET}
    state, mask = cupy.zeros((4, 98, 130), np.uint16), cupy.zeros((25, 33), np.uint8)
    scratch = cuda.difference_scratch(98, 130)
    learn = {"shrink": 1, "extra_bits": 0, "threshold": 256, "limit": 9999, "slow": 3, "hold": 4}
    kernels = {
        "to_rgb": lambda: cuda.to_rgb(planes, image),
        "to_rgb, turned": lambda: cuda.to_rgb(turned, upright),
        "resize": lambda: cuda.resize(image, small, method="area"),
        "normalize": lambda: cuda.normalize(small, tensor, **numbers),
        "to_tensor": lambda: cuda.to_tensor(planes, tensor, method="bilinear", **numbers),
        "stats": lambda: cuda.stats(image, sums),
        "luma_stats": lambda: cuda.luma_stats(planes, sums[:, :1]),
        "difference, first": lambda: cuda.difference([planes.picture(0)[0]], state, mask, scratch, first=True, **learn),
        "difference": lambda: cuda.difference([planes.picture(1)[0]], state, mask, scratch, **learn),
        "draw_boxes": lambda: cuda.draw_boxes(image[0], some_marks(np.random.default_rng(1), 60), 2, 1),
    }
    return kernels, [image, upright, small, tensor, sums, state, mask]


WAIT = r"""
extern "C" __global__ void wait(volatile int* go) { while (!*go) {} }
"""


@gpu
def test_nothing_waits_and_nothing_runs_on_another_stream():
    """Behind a kernel that waits for the host every call returns, and nothing is done until the host lets it go."""
    import cupy

    kernels, written = calls()
    for call in kernels.values():
        call()  # compiled
    pinned = cupy.cuda.PinnedMemory(4, cupy.cuda.runtime.hostAllocMapped)
    go = np.frombuffer(cupy.cuda.PinnedMemoryPointer(pinned, 0), np.int32, 1)
    seen = cupy.ndarray(1, np.int32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(go.ctypes.data, 4, pinned), 0))
    wait = cupy.RawKernel(WAIT, "wait").kernel
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with stream:
        for array in written:
            array.fill(99)
    stream.synchronize()
    go[0] = 0
    try:
        with stream:
            wait((1,), (1,), (seen,))
            for name, call in kernels.items():
                call()
                assert not stream.done, name
        for array in written:
            assert (cupy.asnumpy(array, stream=other) == 99).all()
    finally:
        go[0] = 1
        stream.synchronize()
    for array in written:
        assert not (back(array) == 99).all()


@gpu
def test_nothing_takes_device_memory():
    import cupy

    taken: list[int] = []

    def count(nbytes: int) -> Any:
        taken.append(nbytes)
        return cupy.get_default_memory_pool().malloc(nbytes)

    for name, call in calls()[0].items():
        call()
        taken.clear()
        with cupy.cuda.using_allocator(count):
            call()
        assert not taken, name


@gpu
def test_a_scratch_for_smaller_pictures_is_refused():
    picture, state, mask = (
        put(np.zeros((8, 8), np.uint8)),
        put(np.zeros((4, 8, 8), np.uint16)),
        put(np.zeros((2, 2), np.uint8)),
    )
    options = {"shrink": 1, "extra_bits": 0, "threshold": 256, "limit": 9, "slow": 3, "hold": 4}
    with pytest.raises(ValueError, match="scratch of 576 uint32 is not enough"):
        cuda.difference([picture], state, mask, cuda.difference_scratch(9, 7), **options)


@gpu
def test_wrong_shapes_are_refused():
    import cupy

    planes = on_gpu(noise(FrameSpec(16, 8, "yuv420p"), 2))
    image, empty = put(pictures(2, 8, 16)), cupy.empty
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: cuda.to_rgb(planes, empty((2, 16, 8, 3), np.uint8))),
        (ValueError, lambda: cuda.to_rgb(planes, empty((2, 8, 16, 3), np.float32))),
        (ValueError, lambda: cuda.to_rgb(planes, [image[0]])),
        (ValueError, lambda: cuda.to_rgb(Planes(planes.spec, 3, slab=planes.slab))),
        (ValueError, lambda: cuda.to_rgb(Planes(planes.spec, 2, frames=[]))),
        (ValueError, lambda: cuda.resize(image, image[:1], method="area")),
        (ValueError, lambda: cuda.resize(image, image, method="area", source=(1, 0, 16, 8))),
        (ValueError, lambda: cuda.resize(image, image, method="area", target=(0, 1, 16, 8))),
        (ValueError, lambda: cuda.normalize(image, empty((2, 3, 8, 15), np.float32), factor=FACTOR, offset=OFFSET)),
        (TypeError, lambda: cuda.normalize(image, empty((2, 3, 8, 16), np.uint8), factor=FACTOR, offset=OFFSET)),
        (TypeError, lambda: cuda.to_tensor(planes, empty((2, 3, 8, 16), np.float64))),
        (ValueError, lambda: cuda.to_tensor(planes, empty((1, 3, 8, 16), np.float32))),
        (ValueError, lambda: cuda.stats(image, empty((2, 3, 3), np.int32))),
        (ValueError, lambda: cuda.draw_boxes(image, [], 1, 1)),
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()


@gpu
def test_prepare_compiles_everything_once():
    assert cuda.prepare() >= 0
    modules = [program.module() for program in cuda._PROGRAMS]
    cuda.prepare()
    assert all(program.module() is module for program, module in zip(cuda._PROGRAMS, modules, strict=True))


@gpu
def test_source_that_does_not_compile_says_so():
    from framepipe.errors import DeviceError

    broken = _cuda_code.Program("draw.cu", structs=_cuda_draw.program.structs, macros={"GLYPH_WORDS": "nonsense"})
    with pytest.raises(DeviceError, match=r"draw\.cu cannot be compiled"):
        broken.module()
