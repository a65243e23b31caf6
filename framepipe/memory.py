"""Host memory: aligned exact-size blocks, mappings, recycled output memory, and the ledger of every byte."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import deque
from typing import Any

import numpy as np

PAGE = 4096
_TOUCHING = 8
"""The most threads that touch a mapping: the system's own locks bound them."""
_TOUCH_NBYTES = 4 << 20
"""A thread more for each: about 3 ms of touching, many times what it takes to start one."""


class Ledger:
    """Bytes held now and at peak, and allocations made, by kind (``pinned``, ``pageable``, ``device``, …).

    ``bytes`` and ``peak`` are what was asked for, ``taken`` and ``peak_taken`` what it takes of the system: more where
    an allocator rounds up or keeps a pool. Kinds in ``untold`` have an allocator that does not say.
    """

    def __init__(self) -> None:
        # Guards the dictionaries below; re-entrant, because memory may be dropped by the collector, anywhere.
        self._lock = threading.RLock()
        self.bytes: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.allocations: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.peak_taken: dict[str, int] = {}
        self.untold: set[str] = set()

    def add(self, kind: str, nbytes: int, taken: int | None = None) -> None:
        """Count an allocation (``nbytes`` > 0) or a release (< 0) that took ``taken`` bytes (None: as many)."""
        with self._lock:
            now = self.bytes.get(kind, 0) + nbytes
            self.bytes[kind] = now
            self.peak[kind] = max(now, self.peak.get(kind, 0))
            if nbytes > 0:
                self.allocations[kind] = self.allocations.get(kind, 0) + 1
            self.take(kind, nbytes if taken is None else taken)

    def take(self, kind: str, nbytes: int) -> None:
        """Count what a pool took of the system (``nbytes`` > 0) or gave back, whoever asked for it."""
        with self._lock:
            now = self.taken.get(kind, 0) + nbytes
            self.taken[kind] = now
            self.peak_taken[kind] = max(now, self.peak_taken.get(kind, 0))

    def most_taken(self, kind: str) -> int | None:
        """The most bytes that ``kind`` took at a time; None where its allocator does not say."""
        return None if kind in self.untold else self.peak_taken.get(kind, 0)


def aligned_empty(nbytes: int, align: int = PAGE) -> np.ndarray:
    """An uninitialised uint8 array of exactly ``nbytes`` whose first byte is at a multiple of ``align``."""
    raw = np.empty(nbytes + align, np.uint8)
    at = -raw.ctypes.data % align
    return raw[at : at + nbytes]


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


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
    """Output memory that comes back when its last holder drops it: no page faults in steady state.

    `empty` never blocks: with every block held it makes a new one, counted in ``made``. Arrays and views of them
    keep their block; nobody overwrites it while they live. Any thread may drop the last reference.
    """

    def __init__(self, ledger: Ledger | None = None, kind: str = "pageable") -> None:
        self.kind = kind
        self._free: dict[int, deque[np.ndarray]] = {}
        self._reserved: dict[int, int] = {}
        self._ledger = ledger
        self._closed = False
        self.made = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An uninitialised C-contiguous array, page aligned."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for side in shape:
            nbytes *= side
        nbytes = max(nbytes, 1)
        free = self._free.get(nbytes)
        if free is None:
            free = self._free.setdefault(nbytes, deque())
        try:
            block = free.pop()  # the warmest block first; deque.pop is atomic, so no lock
        except IndexError:
            block = self._new(nbytes)
            self.made += 1
        return np.asarray(_Lease(self, block, shape, dtype))

    def reserve(self, nbytes: int, count: int) -> None:
        """Make ``count`` blocks of ``nbytes`` now, to be there until `close`."""
        blocks = [self._new(nbytes) for _ in range(count)]
        self.made += count
        self._reserved[nbytes] = self._reserved.get(nbytes, 0) + count
        self._free.setdefault(nbytes, deque()).extend(blocks)

    def trim(self) -> None:
        """Let go of every block that nobody holds but those reserved (sizes change when the input does)."""
        for nbytes, free in list(self._free.items()):
            while len(free) > (0 if self._closed else self._reserved.get(nbytes, 0)):
                try:
                    block = free.pop()
                except IndexError:  # pragma: no cover - another thread took it
                    break
                self._let_go(block)

    def close(self) -> None:
        """Let go of free blocks now and of held ones as they are dropped. Idempotent."""
        self._closed = True
        self.trim()

    def _give(self, block: np.ndarray) -> None:
        self._free[block.nbytes].append(block)
        if self._closed:  # looked at last: another thread may close just now
            self.trim()

    def _new(self, nbytes: int) -> np.ndarray:
        if self._ledger is not None:
            self._ledger.add(self.kind, nbytes)
        return aligned_empty(nbytes)

    def _let_go(self, block: np.ndarray) -> None:
        if self._ledger is not None:
            self._ledger.add(self.kind, -block.nbytes)


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
