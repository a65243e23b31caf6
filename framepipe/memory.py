"""Host memory: aligned exact-size blocks, mappings, and memory that is recycled."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

PAGE = 4096
_TOUCHING = 8
"""The most threads that touch a mapping: the system's own locks bound them."""
_TOUCH_NBYTES = 4 << 20
"""A thread more for each: about 3 ms of touching, many times what it takes to start one."""


def aligned_empty(nbytes: int, align: int = PAGE) -> np.ndarray:
    """An uninitialised uint8 array of exactly ``nbytes`` whose first byte is at a multiple of ``align``."""
    raw = np.empty(nbytes + align, np.uint8)
    at = -raw.ctypes.data % align
    return raw[at : at + nbytes]


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


def power_of_two(nbytes: int) -> int:
    """``nbytes`` as pools of page-locked memory round it up: to 512, then to a power of two."""
    return max(512, 1 << (-(-nbytes // 512) * 512 - 1).bit_length())


def mapping(nbytes: int, *, touch: bool = True) -> np.ndarray:
    """A mapping of its own as a page-aligned uint8 array of exactly ``nbytes``, given back with the last array over it.

    It shares no page with other memory, so that it can be page-locked by itself. Its pages are there already unless
    ``touch`` is False; to get them is what costs, and several threads do it at once.
    """
    size = max(whole_pages(nbytes), PAGE)
    if sys.platform == "win32":
        area = mmap.mmap(-1, size)
    else:  # a private one is cheaper to touch than the shared one of the default
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block: np.ndarray = np.frombuffer(area, np.uint8, nbytes)
    if touch:
        _touch(block)
    return block


def _touch(block: np.ndarray) -> None:
    # NumPy lets go of the interpreter lock in an assignment of this length.
    parts = np.array_split(block[::PAGE], min(_TOUCHING, os.cpu_count() or 1, 1 + block.nbytes // _TOUCH_NBYTES))
    threads = [threading.Thread(target=part.fill, args=(0,), name="framepipe-touch", daemon=True) for part in parts[1:]]
    for thread in threads:
        thread.start()
    parts[0].fill(0)
    for thread in threads:
        thread.join()


class RecyclingPool:
    """Memory that comes back when its last holder drops it: no page faults in steady state.

    `empty` never blocks: with every block held it makes a new one, counted in ``made``. Arrays and views of them
    keep their block; nobody overwrites it while they live. Any thread may drop the last reference.

    ``make(nbytes, owner)`` gets a page-aligned block and ``free(block)`` gives it back; ``dropped(block)`` is told of
    every block that nobody holds any more, in the thread that dropped it and before anybody can get it again.
    """

    def __init__(
        self,
        make: Callable[[int, str], np.ndarray],
        free: Callable[[np.ndarray], None],
        dropped: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        self._make, self._free_block, self._dropped = make, free, dropped
        self._free: dict[int, deque[np.ndarray]] = {}
        self._closed = False
        self.made = 0

    def empty(self, shape: tuple[int, ...], dtype: Any, owner: str = "") -> np.ndarray:
        """An uninitialised C-contiguous array; ``owner`` is in whose name a block is made, if one is."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for side in shape:
            nbytes *= side
        return np.asarray(_Lease(self, self._take(max(nbytes, 1), owner), shape, dtype))

    def give_back(self) -> int:
        """Let go of every block that nobody holds (sizes change when the input does); bytes of them."""
        return sum(self._drain(free) for free in list(self._free.values()))

    def close(self) -> None:
        """Let go of free blocks now and of held ones as they are dropped. Idempotent."""
        self._closed = True
        self.give_back()

    def _take(self, nbytes: int, owner: str) -> np.ndarray:
        block = self._again(nbytes)
        if block is None:
            block = self._new(nbytes, owner)
            self.made += 1
        return block

    def _new(self, nbytes: int, owner: str) -> np.ndarray:
        return self._make(nbytes, owner)

    def _again(self, nbytes: int) -> np.ndarray | None:
        """A block that nobody holds, if there is one."""
        try:
            return self._free_list(nbytes).pop()  # the warmest block first; deque.pop is atomic, so no lock
        except IndexError:
            return None

    def _free_list(self, nbytes: int) -> deque[np.ndarray]:
        free = self._free.get(nbytes)
        return self._free.setdefault(nbytes, deque()) if free is None else free

    def _drain(self, free: deque[np.ndarray]) -> int:
        """Let go of all blocks of a list; bytes of them."""
        nbytes = 0
        while free:
            try:
                block = free.pop()
            except IndexError:  # pragma: no cover - another thread took it
                break
            nbytes += block.nbytes
            self._free_block(block)
        return nbytes

    def _give(self, block: np.ndarray) -> None:
        if self._dropped is not None:
            self._dropped(block)
        self._free_list(block.nbytes).append(block)
        if self._closed:  # looked at last: another thread may close just now
            self.give_back()


class _Lease:
    """Keeps a block out of the pool for as long as an array over it lives (numpy keeps it as ``base``)."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, pool: RecyclingPool, block: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._pool = pool
        self._block = block
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (block.ctypes.data, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if not sys.is_finalizing():  # modules are being taken apart, and the memory goes anyway
            self._pool._give(self._block)
