"""The two tiers of host memory: hot, the ring's own and never resized; cold, a pool for large and rare buffers."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from framepipe.memory import RecyclingPool

HOT, COLD = "hot", "cold"
ALIGN = 64 << 10
LEAST_ALIGN = 256


@dataclass(frozen=True, slots=True)
class TierState:
    """A tier at one moment, in bytes and blocks.

    ``pinned_bytes`` of ``bytes`` are page-locked. ``made`` and ``reused`` count blocks handed out since the start (None
    where that is the ring's business), ``returned_bytes`` what went back to the system. ``peak_in_use_bytes`` is exact
    in one thread; several that take and drop at the same moment may make it a block more. ``align`` is what addresses
    are multiples of (None: as they come).
    """

    bytes: int
    blocks: int
    in_use_bytes: int
    in_use_blocks: int
    free_bytes: int
    free_blocks: int
    pinned_bytes: int
    made: int
    reused: int | None
    returned_bytes: int
    peak_bytes: int
    peak_in_use_bytes: int
    align: int | None

    @property
    def utilisation(self) -> float | None:
        """The share of the bytes that somebody holds; None of an empty tier."""
        return self.in_use_bytes / self.bytes if self.bytes else None

    def as_json(self) -> dict[str, Any]:
        """As in ``memory.tiers`` of the report."""
        share = self.utilisation
        return {**asdict(self), "utilisation": None if share is None else round(share, 4)}


class HotTier:
    """The account of the ring's host memory: all of it is in use as long as it is there."""

    def __init__(self) -> None:
        # Guards the numbers; re-entrant, because memory may be dropped by the collector, anywhere.
        self._lock = threading.RLock()
        self._nbytes = self._blocks = self._made = self._returned = self._peak = 0

    def add(self, nbytes: int) -> None:
        """Count a block that was made."""
        with self._lock:
            self._nbytes += nbytes
            self._blocks += 1
            self._made += 1
            self._peak = max(self._peak, self._nbytes)

    def remove(self, nbytes: int) -> None:
        """Count one that was given back."""
        with self._lock:
            self._nbytes -= nbytes
            self._blocks -= 1
            self._returned += nbytes

    def state(self, pinned_nbytes: int = 0) -> TierState:
        """The tier now."""
        with self._lock:
            return TierState(
                bytes=self._nbytes, blocks=self._blocks, in_use_bytes=self._nbytes, in_use_blocks=self._blocks,
                free_bytes=0, free_blocks=0, pinned_bytes=pinned_nbytes, made=self._made, reused=None,
                returned_bytes=self._returned, peak_bytes=self._peak, peak_in_use_bytes=self._peak, align=None,
            )  # fmt: skip


class ColdTier(RecyclingPool):
    """Host memory for large and rare buffers (results read back, batches, chunks): page-locked where there is a GPU.

    Blocks are of exact sizes, which never share, and begin at multiples of ``align`` bytes, a power of two of at least
    256. ``empty`` never blocks: with every block held it makes a new one. Any thread may call anything.

    ``make(nbytes, owner)`` gets a block and ``free(block)`` gives it back; no lock is held in either. A refused
    page-lock is the maker's to tell, and the block is pageable then. Raises ValueError for an alignment that is none.
    """

    def __init__(
        self,
        make: Callable[[int, str], np.ndarray],
        free: Callable[[np.ndarray], None],
        *,
        align: int = ALIGN,
        dropped: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        check_align(align)
        super().__init__(make, free, dropped)
        self.align = align
        # Guards the numbers below, each changed by one `+=`; re-entrant, because memory may be dropped by the
        # collector, anywhere. What is dropped goes to its free list without it.
        self._lock = threading.RLock()
        self._sizes: defaultdict[int, int] = defaultdict(int)  # blocks that there are, held and free
        self._reserved: defaultdict[int, int] = defaultdict(int)
        self._nbytes = self._peak = self._peak_in_use = self._reused = self._returned = 0

    def reserve(self, nbytes: int, count: int, owner: str = "") -> int:
        """Make ``count`` blocks of ``nbytes`` now, which `give_back` leaves there; none in a tier that is closed.

        Returns how many.
        """
        made = self._add(nbytes, count, owner)
        with self._lock:
            self._reserved[nbytes] += made
        return made

    def unreserve(self, nbytes: int, count: int) -> None:
        """Let `give_back` take ``count`` of the blocks of ``nbytes`` that were reserved."""
        with self._lock:
            self._reserved[nbytes] = max(0, self._reserved[nbytes] - count)

    def grow(self, count: int, nbytes: int | None = None, owner: str = "growth of the cold tier") -> int:
        """Make ``count`` blocks more, of ``nbytes`` or of the size of which most is held.

        They stay until they are given back. Returns the bytes made: 0 in an empty tier without ``nbytes``.
        """
        if nbytes is None:
            nbytes = self._most_wanted()
        return 0 if not nbytes else nbytes * self._add(nbytes, count, owner)

    def grow_by(self, nbytes: int) -> int:
        """As `grow`, by as many blocks of the size of which most is held as ``nbytes`` hold. Returns the bytes made."""
        size = self._most_wanted()
        return self.grow(nbytes // size, size) if size else 0

    def give_back(self) -> int:
        """Give blocks that nobody holds back to the system; bytes of them.

        As many of a size stay as are reserved, with those that are held. Nobody waits for them: what is wanted later is
        made again.
        """
        if self._closed:
            with self._lock:
                self._reserved.clear()
        return sum(self._spare(nbytes, free) for nbytes, free in list(self._free.items()))

    @property
    def utilisation(self) -> float | None:
        """The share of the bytes that somebody holds; None of an empty tier."""
        return self.state().utilisation

    def state(self, pinned_nbytes: int = 0) -> TierState:
        """The tier now; ``pinned_nbytes`` of it are page-locked, which the ledger knows."""
        with self._lock:
            free = self._unused()
            free_nbytes, free_blocks = sum(size * number for size, number in free.items()), sum(free.values())
            blocks = sum(self._sizes.values())
            return TierState(
                bytes=self._nbytes, blocks=blocks, in_use_bytes=self._nbytes - free_nbytes,
                in_use_blocks=blocks - free_blocks, free_bytes=free_nbytes, free_blocks=free_blocks,
                pinned_bytes=pinned_nbytes, made=self.made, reused=self._reused, returned_bytes=self._returned,
                peak_bytes=self._peak, peak_in_use_bytes=self._peak_in_use, align=self.align,
            )  # fmt: skip

    def _unused(self) -> dict[int, int]:
        """Lock held: how many blocks of each size nobody holds."""
        return {nbytes: min(len(free), self._sizes[nbytes]) for nbytes, free in list(self._free.items())}

    def _spare(self, nbytes: int, free: deque[np.ndarray]) -> int:
        """Let go of the free blocks of a size that are more than what is reserved of it; bytes of them."""
        freed = 0
        while True:
            # One at a time, with the count of this moment: somebody may drop one meanwhile, and what came back then
            # must not let a reserved one go.
            with self._lock:
                if self._sizes[nbytes] <= self._reserved[nbytes]:
                    return freed
                try:
                    block = free.pop()
                except IndexError:
                    return freed
                self._nbytes -= nbytes
                self._sizes[nbytes] -= 1
                self._returned += nbytes
            self._free_block(block)
            freed += nbytes

    def _most_wanted(self) -> int:
        with self._lock:
            free = self._unused()
            held = {size: (size * (number - free.get(size, 0)), size) for size, number in self._sizes.items() if number}
        return max(held, key=lambda size: held[size], default=0)

    def _add(self, nbytes: int, count: int, owner: str) -> int:
        """New free blocks, one after another; how many there are."""
        for number in range(count):
            if self._closed:
                return number
            self._free_list(nbytes).append(self._new(nbytes, owner))
            if self._closed:  # looked at last: another thread may close just now
                self.give_back()
        return count

    def _take(self, nbytes: int, owner: str) -> np.ndarray:
        block = self._again(nbytes)
        reused = block is not None
        if block is None:
            block = self._new(nbytes, owner)
        with self._lock:
            self._reused += reused
            in_use = self._nbytes - sum(size * number for size, number in self._unused().items())
            self._peak_in_use = max(self._peak_in_use, in_use)
        return block

    def _new(self, nbytes: int, owner: str) -> np.ndarray:
        """A block of the maker's; not counted any more where that fails."""
        with self._lock:
            self._nbytes += nbytes
            self._sizes[nbytes] += 1
        try:
            block = super()._new(nbytes, owner)
        except BaseException:
            with self._lock:
                self._nbytes -= nbytes
                self._sizes[nbytes] -= 1
            raise
        with self._lock:
            self.made += 1
            self._peak = max(self._peak, self._nbytes)
        return block


def check_align(align: int) -> None:
    """Raise ValueError with the reason where blocks cannot be aligned so."""
    if align < LEAST_ALIGN or align & (align - 1):
        raise ValueError(
            f"align is {align}; it must be a power of two of at least {LEAST_ALIGN}: that is what allocators for GPUs "
            "promise and code that reads memory in vectors takes for granted (a copy works at any address)"
        )
