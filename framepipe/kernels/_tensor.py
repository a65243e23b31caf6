"""RGB pictures to tensors, and statistics of pictures: NumPy."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from framepipe.kernels._scratch import scratch

Array = np.ndarray[Any, Any]
Layout = Literal["nchw", "nhwc"]
Order = Literal["rgb", "bgr"]


def normalize_one(
    picture: Array, out: Array, factor: Array | None, offset: Array | None, layout: Layout, order: Order
) -> None:
    """One (H, W, 3) picture to (3, H, W) or (H, W, 3)."""
    channels = picture[..., ::-1] if order == "bgr" else picture
    if layout == "nchw":
        channels = channels.transpose(2, 0, 1)
    if factor is None or offset is None:
        np.copyto(out, channels)
        return
    values = out if out.dtype == np.float32 else scratch("values", out.shape, np.float32)
    np.copyto(values, channels)
    if layout == "nchw":
        np.multiply(values, factor[:, None, None], out=values)
        np.add(values, offset[:, None, None], out=values)
    else:
        # Whole rows of factors: an inner loop over three channels would be ten times slower.
        width = out.shape[1]
        lines = values.reshape(-1, width * 3)
        np.multiply(lines, np.tile(factor, width), out=lines)
        np.add(lines, np.tile(offset, width), out=lines)
    if values is not out:
        np.copyto(out, values, casting="same_kind")


def sum_min_max(samples: Array, out: Array) -> None:
    """Sum, minimum and maximum of each channel of (H, W, C) samples to ``out``, (C, 3) int64.

    Down the columns first, where whole rows are added at a time.
    """
    height, width, channels = samples.shape
    lines = samples.reshape(height, width * channels)
    columns = lines.sum(axis=0, dtype=np.uint32).reshape(width, channels)
    out[:, 0] = columns.sum(axis=0, dtype=np.int64)
    out[:, 1] = lines.min(axis=0).reshape(width, channels).min(axis=0)
    out[:, 2] = lines.max(axis=0).reshape(width, channels).max(axis=0)
