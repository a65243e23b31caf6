"""The host memory of a device: page-locked or not, in two tiers, with the account of who asked for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from framepipe.ledger import Ledger, Pin
from framepipe.memory import PAGE, aligned_empty, whole_pages
from framepipe.tiers import COLD, HOT, ColdTier, HotTier, TierState

T = TypeVar("T")
MAPPED, WRITE_COMBINED = 2, 4
"""Flags of `HostAllocator.host_empty`, with the values that cudaHostAlloc has for them."""

_SOMEBODY = "host memory"
_OUTPUT = "host_output"


class _Held(NamedTuple):
    """A block of `HostAllocator`; ``pin`` is None where it is pageable."""

    nbytes: int
    tier: str
    pin: Pin | None


class HostAllocator:
    """Host memory of one pipeline: blocks of exact sizes, page-locked or not, each with an owner and a tier.

    The ring's memory is ``hot``, and made once where the strategy does so; what results are read back to, and what
    stages and sinks ask for, is ``cold`` and recycled. ``ledger`` is the account of all memory taken through it.
    """

    host_shared: bool = True
    """True where host and device memory are the same, so that no upload or read-back is needed."""
    host_limit_nbytes: int | None = None
    """How much a ring should page-lock at most on a system that has little of it to give; None elsewhere."""
    refusal: str = "this is a limit of the host, not of the GPU's memory"
    """What a refused page-lock means, where host and device have memory of their own."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.warnings: list[str] = []
        """What the user should know, shown once and in the report."""
        self.cold = ColdTier(self._cold_block, self._cold_free, dropped=self._note_drop)
        """Host memory for large and rare buffers."""
        self._hot = HotTier()
        self._refused = False
        self._held: dict[int, _Held] = {}  # by address
        # Guards _refused and _held; re-entrant, because memory may be dropped by the collector, anywhere.
        self._locking = threading.RLock()

    # -- blocks --------------------------------------------------------------------------------------------------

    def host_empty(
        self,
        nbytes: int,
        *,
        pinned: bool,
        flags: int = 0,
        align: int | None = None,
        owner: str = _SOMEBODY,
        tier: str = HOT,
    ) -> np.ndarray:
        """An exact-size uint8 host block, page-locked where ``pinned``; give it back with `host_free`.

        ``flags`` say how it is page-locked: `MAPPED`, `WRITE_COMBINED`. Its address is a multiple of ``align``, if that
        is given. ``owner`` is who the report says page-locked it. Pageable where that is refused (`page_lock`).
        """
        if pinned:
            return self._made(nbytes, lambda: self._pin(nbytes, flags, align), align, owner, tier, flags)
        block = self._plain(nbytes, align)
        self.ledger.add("pageable", nbytes)
        self._hold(block, tier, None)
        return block

    def host_made(
        self, nbytes: int, make: Callable[[], tuple[np.ndarray, int]], *, owner: str = _SOMEBODY, tier: str = HOT
    ) -> np.ndarray:
        """As `host_empty`, page-locked by ``make``, which returns the block and how many bytes it takes of the system.

        `host_free` only notes that it is given back; who made it sees to that.
        """
        return self._made(nbytes, make, None, owner, tier, 0)

    def host_free(self, block: np.ndarray) -> None:
        """Give back a block of `host_empty` or `host_made`; no stream may still use it."""
        self._forget(block, None)

    def host_register(self, block: np.ndarray, *, owner: str = _SOMEBODY, tier: str = HOT) -> bool:
        """Page-lock a `framepipe.memory.mapping` as it stands, in one piece; False where the system refuses.

        Either way it counts as the pipeline's from now on, until `host_unregister`.
        """

        def register() -> float:
            began = time.perf_counter()
            self._register(block)
            return time.perf_counter() - began

        seconds = self.page_lock(block.nbytes, register)
        if seconds is None:
            self.ledger.add("pageable", block.nbytes)
            self._hold(block, tier, None)
            return False
        taken = whole_pages(block.nbytes)
        pin = self.ledger.pin(block.nbytes, taken, owner=owner, tier=tier, seconds=seconds, in_shmem=False)
        self._hold(block, tier, pin)
        return True

    def host_unregister(self, block: np.ndarray) -> None:
        """Undo `host_register`; no stream may still use the block, which must still be there."""
        began = time.perf_counter()
        if self.is_locked(block):
            self._unregister(block)
        self._forget(block, time.perf_counter() - began)

    def is_locked(self, block: np.ndarray) -> bool:
        """Whether a block of `host_empty`, `host_made` or `host_register` is page-locked: it was not refused."""
        address = block.ctypes.data
        with self._locking:
            held = self._held.get(address)
        return held is not None and held.pin is not None

    def _made(
        self,
        nbytes: int,
        make: Callable[[], tuple[np.ndarray, int]],
        align: int | None,
        owner: str,
        tier: str,
        flags: int,
    ) -> np.ndarray:
        def timed() -> tuple[np.ndarray, int, float]:
            began = time.perf_counter()
            block, taken = make()
            return block, taken, time.perf_counter() - began

        made = self.page_lock(nbytes, timed)
        if made is None:
            return self.host_empty(nbytes, pinned=False, align=align, owner=owner, tier=tier)
        block, taken, seconds = made
        in_shmem = not flags & WRITE_COMBINED
        pin = self.ledger.pin(nbytes, taken, owner=owner, tier=tier, seconds=seconds, in_shmem=in_shmem)
        self._hold(block, tier, pin)
        return block

    def _hold(self, block: np.ndarray, tier: str, pin: Pin | None) -> None:
        address = block.ctypes.data
        with self._locking:
            self._held[address] = _Held(block.nbytes, tier, pin)
        if tier == HOT:
            self._hot.add(block.nbytes)

    def _forget(self, block: np.ndarray, seconds: float | None) -> None:
        address = block.ctypes.data
        with self._locking:
            held = self._held.pop(address)
        if held.tier == HOT:
            self._hot.remove(held.nbytes)
        if held.pin is None:
            self.ledger.add("pageable", -held.nbytes)
        else:
            self.ledger.unpin(held.pin, seconds)

    # -- tiers ---------------------------------------------------------------------------------------------------

    def tiers(self) -> dict[str, TierState]:
        """The ``hot`` and the ``cold`` tier now; any thread."""
        return {
            HOT: self._hot.state(self.ledger.pinned_in(HOT)),
            COLD: self.cold.state(self.ledger.pinned_in(COLD)),
        }

    def host_output(self, shape: tuple[int, ...], dtype: Any, owner: str = _OUTPUT) -> np.ndarray:
        """Memory of the cold tier, page-locked on a GPU, recycled when its last holder drops it.

        Results are read back to it; a stage or sink may ask for some, with its name as ``owner``.
        """
        return self.cold.empty(shape, dtype, owner)

    def host_reserve(self, nbytes: int, count: int, owner: str = _OUTPUT) -> None:
        """Make ``count`` blocks of `host_output` beforehand, so that none is made in the run."""
        self.cold.reserve(nbytes, count, owner)

    def host_unreserve(self, nbytes: int, count: int) -> None:
        """Let so many of them go with what nobody holds, when pictures of another size come."""
        self.cold.unreserve(nbytes, count)

    def _cold_block(self, nbytes: int, owner: str) -> np.ndarray:
        return self.host_empty(nbytes, pinned=True, align=self.cold.align, owner=owner, tier=COLD)

    def _cold_free(self, block: np.ndarray) -> None:
        self.host_free(block)

    def _note_drop(self, block: np.ndarray) -> None:
        """Hear of a block of the cold tier that nobody holds any more."""

    # -- page-locking --------------------------------------------------------------------------------------------

    def page_lock(self, nbytes: int, lock: Callable[[], T]) -> T | None:
        """What ``lock`` page-locks, or None where the system refuses: a warning says so, and it is not tried again.

        (A refused pin has been seen to make later ones fail too.) Raises what else ``lock`` raises.
        """
        if self._refused:
            return None
        try:
            return lock()
        except Exception as error:
            if not self.refused(error):
                explained = self.explain(error)
                if explained is error:
                    raise
                raise explained from error
            told = next(iter(str(error).splitlines()), type(error).__name__)
            means = "" if self.host_shared else f"{self.refusal}: "
            self._go_on_pageable(f"the system refused to page-lock {nbytes} bytes ({told}); {means}")
            return None

    def stop_page_locking(self, reason: str) -> None:
        """Make what is wanted from now on pageable; a warning says so, once. What is page-locked stays so."""
        self._go_on_pageable(f"{reason}; ")

    def _go_on_pageable(self, reason: str) -> None:
        with self._locking:
            first, self._refused = not self._refused, True
        if first:
            memory = "memory that may be swapped out" if self.host_shared else "pageable memory, slower"
            self.warnings.append(f"{reason}going on with {memory}")

    def refused(self, error: Exception) -> bool:
        """Whether an error means that the system does not page-lock so much."""
        return False

    def explain(self, error: BaseException) -> BaseException:
        """``error``, or what it means where a library of this device raised it."""
        return error

    def _pin(self, nbytes: int, flags: int, align: int | None) -> tuple[np.ndarray, int]:
        """A page-locked block, and how many bytes it takes of the system."""
        return self._plain(nbytes, align), nbytes

    def _plain(self, nbytes: int, align: int | None) -> np.ndarray:
        """A pageable block."""
        return aligned_empty(nbytes, align or PAGE)

    def _register(self, block: np.ndarray) -> None:
        """Page-lock a block of whole pages."""

    def _unregister(self, block: np.ndarray) -> None:
        """Undo `_register`; raises nothing, since it is called while closing."""
