"""Host memory: aligned exact-size blocks, recycled output memory, and the ledger of every byte."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

import numpy as np

PAGE = 4096


class Ledger:
    """Bytes held now and at peak, and allocations made, by kind (``pinned``, ``pageable``, ``device``, …)."""

    def __init__(self) -> None:
        # Guards the three dictionaries below; re-entrant, because memory may be dropped by the collector, anywhere.
        self._lock = threading.RLock()
        self.bytes: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.allocations: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Count an allocation (``nbytes`` > 0) or a release (< 0)."""
        with self._lock:
            now = self.bytes.get(kind, 0) + nbytes
            self.bytes[kind] = now
            self.peak[kind] = max(now, self.peak.get(kind, 0))
            if nbytes > 0:
                self.allocations[kind] = self.allocations.get(kind, 0) + 1


def aligned_empty(nbytes: int, align: int = PAGE) -> np.ndarray:
    """An uninitialised uint8 array of exactly ``nbytes`` whose first byte is at a multiple of ``align``."""
    raw = np.empty(nbytes + align, np.uint8)
    at = -raw.ctypes.data % align
    return raw[at : at + nbytes]


class RecyclingPool:
    """Output memory that comes back when its last holder drops it: no page faults in steady state.

    `empty` never blocks: with every block held it makes a new one, counted in ``made``. Arrays and views of them
    keep their block; nobody overwrites it while they live. Any thread may drop the last reference.
    """

    def __init__(self, ledger: Ledger | None = None, kind: str = "pageable") -> None:
        self.kind = kind
        self._free: dict[int, deque[np.ndarray]] = {}
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
        """Make ``count`` blocks of ``nbytes`` now."""
        blocks = [self._new(nbytes) for _ in range(count)]
        self.made += count
        self._free.setdefault(nbytes, deque()).extend(blocks)

    def trim(self) -> None:
        """Let go of every block that nobody holds (sizes change when the input does)."""
        for free in list(self._free.values()):
            while free:
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
