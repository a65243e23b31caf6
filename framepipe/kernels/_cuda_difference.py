"""What differs from a learnt background, on a GPU: four launches a picture, and nothing waits for any of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from framepipe.kernels._cuda_code import Program, blocks, by_value
from framepipe.kernels._cuda_source import Struct
from framepipe.kernels._difference import CELL, COUNTS

SCENE = np.dtype(
    [
        ("row", "i8", 3),
        ("column", "i8", 3),
        ("state_plane", "i8"),
        ("state_row", "i8"),
        ("state_column", "i8"),
        ("mask_row", "i8"),
        ("mask_column", "i8"),
        ("width", "i4"),
        ("height", "i4"),
        ("channels", "i4"),
        ("shrink_bits", "i4"),
        ("extra_bits", "i4"),
        ("samples", "i4"),
    ],
    align=True,
)
"""Bytes between rows and columns of each channel, of the state and of the mask; the size of the shrunk picture.

``samples`` is how many of its pixels the change of light is found from.
"""

program = Program("difference.cu", structs={"Scene": SCENE})
_BLOCK = (32, 8, 1)


def difference(
    channels: Sequence[Any],
    state: Any,
    mask: Any,
    scratch: Any,
    shrink: int,
    extra_bits: int,
    threshold: int,
    limit: int,
    slow: int,
    hold: int,
    first: bool,
) -> None:
    """See `framepipe.kernels.cpu.difference`."""
    if state.dtype != np.uint16 or mask.dtype != np.uint8:
        raise ValueError(f"the state is uint16 and the mask uint8, not {state.dtype} and {mask.dtype}")
    strides = tuple(channel.strides for channel in channels)
    scene = _scene(channels[0].shape, strides, state.shape, state.strides, mask.shape, mask.strides, shrink, extra_bits)
    height, width = state.shape[1:]
    if not width * height:
        return
    if scratch.dtype != np.uint32 or scratch.size < COUNTS + width * height:
        raise ValueError(f"a scratch of {scratch.size} {scratch.dtype} is not enough for a state of {state.shape}")
    if not first:
        scratch.data.memset_async(0, 4 * COUNTS)
    grid = (blocks(width, _BLOCK[0]), blocks(height, _BLOCK[1]), 1)
    planes = (channels[0], channels[-1] if len(channels) < 3 else channels[1], channels[-1])
    name = f"difference_luma_{8 * channels[0].dtype.itemsize}"
    program.launch(name, grid, _BLOCK, (*planes, state, mask, scratch, scene, np.int32(first)))
    if first:
        return
    bound = np.int32(threshold)
    program.launch("difference_change", grid, _BLOCK, (state, scratch, scene, bound))
    numbers = (bound, np.int64(limit), np.int32(slow), np.int32(hold))
    program.launch("difference_learn", grid, _BLOCK, (state, mask, scratch, scene, *numbers))


@lru_cache(maxsize=64)
def _scene(
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    state_shape: tuple[int, ...],
    state_strides: tuple[int, ...],
    mask_shape: tuple[int, ...],
    mask_strides: tuple[int, ...],
    shrink: int,
    extra_bits: int,
) -> Struct:
    height, width = shape[0] // shrink, shape[1] // shrink
    if state_shape != (4, height, width) or mask_shape != (blocks(height, CELL), blocks(width, CELL)):
        raise ValueError(f"a state of {state_shape} and a mask of {mask_shape} do not fit {height} x {width} blocks")
    scene = np.zeros((), SCENE)
    for i in range(3):
        scene["row"][i], scene["column"][i] = strides[min(i, len(strides) - 1)]
    scene["state_plane"], scene["state_row"], scene["state_column"] = state_strides
    scene["mask_row"], scene["mask_column"] = mask_strides
    scene["width"], scene["height"], scene["channels"] = width, height, len(strides)
    scene["shrink_bits"], scene["extra_bits"] = shrink.bit_length() - 1, extra_bits
    scene["samples"] = len(range(2, height, 4)) * len(range(2, width, 4))
    return by_value(scene)
