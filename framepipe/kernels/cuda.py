"""The kernels of NVIDIA GPUs: the functions of `framepipe.kernels.cpu`, with the same bits.

Every function enqueues on CuPy's current stream of the current device and returns; none waits, copies to or from the
host, or takes device memory. Arrays are CuPy's; ``planes`` are in a slab on the device,
whose rows may be further apart than a picture is long. A batch in one array is one launch (two for statistics), in a
list one for each picture. Images and results may have any strides. The fast cases are results whose rows (of pixels, or
of each channel) have no gaps, from planes of 4:2:0, 4:2:2 and 4:4:4 with repeated chroma that lie upright, or from
pictures without gaps whose width is a multiple of 8; of resampling, those by area to fewer pixels and bilinear.

A launch needs addresses, sizes and numbers only, which travel as its arguments: resize weights are computed by
the blocks that use them, marks and their text are arguments too, and the font and the tables of tone mapping are in the
code. So there is no table on the device that somebody would have to own. Each kernel is compiled when it is first used,
which takes some tenths of a second once on a machine, or by `prepare`; what is compiled belongs to the process and is
kept until its end.

``accuracy`` makes no difference here: the exact conversion is about as fast as memory is, and there is no faster one.
Wrong shapes and dtypes raise `ValueError` or `TypeError` before anything is enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels import _cuda_difference, _cuda_draw, _cuda_picture, _cuda_stats
from framepipe.kernels._cuda_code import Program, cupy
from framepipe.kernels._difference import COUNTS
from framepipe.kernels._draw import Mark
from framepipe.kernels._resample import Color, Method, Rect
from framepipe.kernels._tensor import Layout, Order
from framepipe.kernels._tonemap import Tone
from framepipe.kernels.cpu import Accuracy, Chroma

__all__ = [
    "difference",
    "difference_scratch",
    "draw_boxes",
    "fast_path",
    "luma_stats",
    "normalize",
    "prepare",
    "resize",
    "stats",
    "to_rgb",
    "to_tensor",
]

_PROGRAMS = (
    *_cuda_picture.programs,
    _cuda_stats.program,
    _cuda_difference.program,
    _cuda_draw.program,
)


def prepare() -> float:
    """Compile every kernel for the current device now, not when it is first used; seconds that took.

    Some seconds of several cores once for a version of framepipe, CuPy and the driver: CuPy keeps the result on disk.
    Raises `DeviceError` where a kernel cannot be compiled.
    """
    began = time.perf_counter()
    number = cupy().cuda.runtime.getDevice()

    choose = cupy().cuda.runtime.setDevice  # in threads that end with it
    with ThreadPoolExecutor(thread_name_prefix="framepipe compile", initializer=choose, initargs=(number,)) as pool:
        list(pool.map(Program.module, _PROGRAMS))
    return time.perf_counter() - began


def fast_path(spec: FrameSpec) -> bool:
    """False: "fast" is the exact kernel here."""
    return False


def to_rgb(
    planes: Planes,
    out: Any = None,
    *,
    accuracy: Accuracy = "exact",
    chroma: Chroma = "nearest",
    tone: Tone | None = None,
) -> Any:
    """Write the upright RGB of each picture to ``out``, (N, H, W, 3) uint8, and return it.

    See `framepipe.kernels.cpu.to_rgb`. Where ``out`` is None it is new memory of the current allocator.
    """
    return _cuda_picture.to_rgb(planes, out, chroma, tone)


def resize(
    images: Any,
    out: Any,
    *,
    method: Method,
    source: Rect | None = None,
    target: Rect | None = None,
    color: Color = (0, 0, 0),
) -> None:
    """Resample the part ``source`` of each picture to the part ``target`` of ``out``; the rest becomes ``color``.

    See `framepipe.kernels.cpu.resize`.
    """
    _cuda_picture.resize(images, out, method, source, target, color)


def normalize(
    images: Any, out: Any, *, factor: Any, offset: Any, layout: Layout = "nchw", order: Order = "rgb"
) -> None:
    """``x * factor[c] + offset[c]`` of every sample, to (N, 3, H, W) or (N, H, W, 3).

    See `framepipe.kernels.cpu.normalize`; ``factor`` and ``offset`` are numpy arrays here too.
    """
    _cuda_picture.normalize(images, out, factor, offset, layout, order)


def to_tensor(
    planes: Planes,
    out: Any,
    *,
    accuracy: Accuracy = "exact",
    method: Method = "bilinear",
    source: Rect | None = None,
    target: Rect | None = None,
    color: Color = (0, 0, 0),
    factor: Any = None,
    offset: Any = None,
    layout: Layout = "nchw",
    order: Order = "rgb",
    tone: Tone | None = None,
) -> None:
    """Planes to a tensor in one launch, with the bits of `to_rgb`, `resize` and `normalize`.

    See `framepipe.kernels.cpu.to_tensor`.
    """
    _cuda_picture.to_tensor(planes, out, method, source, target, color, factor, offset, layout, order, tone)


def stats(images: Any, out: Any) -> None:
    """Sum, minimum and maximum of red, green and blue of each picture to ``out``, (N, 3, 3) int64."""
    _cuda_stats.stats(images, out)


def luma_stats(planes: Planes, out: Any) -> None:
    """Sum, minimum and maximum of each picture's luma samples as they lie in memory to ``out``, (N, 1, 3) int64."""
    _cuda_stats.luma_stats(planes, out)


def difference(
    channels: Sequence[Any],
    state: Any,
    mask: Any,
    scratch: Any,
    *,
    shrink: int,
    extra_bits: int,
    threshold: int,
    limit: int,
    slow: int,
    hold: int,
    first: bool = False,
) -> None:
    """Compare one picture with what ``state`` knows of the background, write ``mask``, and learn from the picture.

    See `framepipe.kernels.cpu.difference`. Whether there was a cut is found out and acted on by the device.
    """
    _cuda_difference.difference(channels, state, mask, scratch, shrink, extra_bits, threshold, limit, slow, hold, first)


def difference_scratch(height: int, width: int) -> Any:
    """Working memory for `difference` with a state of ``(4, height, width)``, from the current allocator."""
    return cupy().empty(COUNTS + height * width, "uint32")


def draw_boxes(image: Any, marks: Iterable[Mark], thickness: int, scale: int) -> None:
    """Draw ``marks`` into ``image``, (H, W, 3) uint8, in place; later ones are on top.

    See `framepipe.kernels.cpu.draw_boxes`. A launch takes 40 marks and 2048 letters.
    """
    _cuda_draw.draw_boxes(image, marks, thickness, scale)
