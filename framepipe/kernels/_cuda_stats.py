"""Sum, minimum and maximum of each channel on a GPU: two launches for the whole batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from framepipe.frame import FrameSpec, Planes
from framepipe.kernels._cuda_code import Program, blocks, by_value
from framepipe.kernels._cuda_source import Struct, slab_of

SAMPLES = np.dtype(
    [("picture", "i8"), ("row", "i8"), ("column", "i8"), ("channel", "i8"), ("width", "i4"), ("height", "i4")],
    align=True,
)
"""Bytes between pictures, rows, columns and channels, and the size in samples."""

SUMS = np.dtype(
    [("picture", "i8"), ("channel", "i8"), ("column", "i8"), ("pictures", "i4"), ("channels", "i4")], align=True
)
"""Bytes between pictures, channels and the three numbers of a channel."""

program = Program("stats.cu", structs={"Samples": SAMPLES, "Sums": SUMS})
_MOST_BLOCKS = 2048  # each ends with a few atomic operations


def stats(images: Any, out: Any) -> None:
    """See `framepipe.kernels.cpu.stats`."""
    if not hasattr(images, "strides"):
        if len(images) != len(out):
            raise ValueError(f"an output for {len(out)} pictures does not fit {len(images)}")
        for i, picture in enumerate(images):
            stats(picture[None], out[i : i + 1])
        return
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"pictures are uint8 with 3 channels, not {images.dtype} {images.shape}")
    n, height, width, _ = images.shape
    samples = _samples(*images.strides, width, height)
    _run("stats_rgb", images, samples, height, _sums(out.shape, out.strides, out.dtype.name, (n, 3, 3)), out)


def luma_stats(planes: Planes, out: Any) -> None:
    """See `framepipe.kernels.cpu.luma_stats`."""
    slab, spec = slab_of(planes), planes.spec
    samples, first, name = _luma(spec, slab.strides[0])
    sums = _sums(out.shape, out.strides, out.dtype.name, (planes.n, 1, 3))
    _run(name, slab[:, first:], samples, spec.height, sums, out)


def _run(name: str, read: Any, samples: Struct, height: int, sums: Struct, out: Any) -> None:
    n = len(out)
    if not n:
        return
    program.launch("stats_begin", (blocks(n * 3, 64), 1, 1), (64, 1, 1), (out, sums))
    program.launch(name, (min(height, max(1, _MOST_BLOCKS // n)), 1, n), (256, 1, 1), (read, out, samples, sums))


@lru_cache(maxsize=256)
def _luma(spec: FrameSpec, picture: int) -> tuple[Struct, int, str]:
    """The luma samples, the byte at which the first of a picture stands, and the kernel for them."""
    fmt = spec.format
    at, channel = fmt.components["Y"]
    layout = spec.planes[at]
    samples = _samples(picture, layout.pitch, layout.channels * fmt.itemsize, 0, spec.width, spec.height)
    return samples, layout.offset + channel * fmt.itemsize, f"stats_{8 * fmt.itemsize}"


@lru_cache(maxsize=256)
def _samples(picture: int, row: int, column: int, channel: int, width: int, height: int) -> Struct:
    return by_value(np.array((picture, row, column, channel, width, height), SAMPLES))


@lru_cache(maxsize=256)
def _sums(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, wanted: tuple[int, ...]) -> Struct:
    if shape != wanted or dtype != "int64":
        raise ValueError(f"the output is {dtype} {shape} instead of int64 {wanted}")
    return by_value(np.array((*strides, *shape[:2]), SUMS))
