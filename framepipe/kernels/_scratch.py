"""Working memory of the CPU kernels: one set of blocks a thread, grown to the largest picture and kept."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from framepipe.memory import aligned_empty

_blocks = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised C-contiguous array of the calling thread; the next call with ``name`` may give it again."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    block: np.ndarray[Any, Any] | None = getattr(_blocks, name, None)
    if block is None or block.nbytes < nbytes:
        block = aligned_empty(nbytes)
        setattr(_blocks, name, block)
    array: np.ndarray[Any, Any] = block[:nbytes].view(dtype).reshape(shape)
    return array
