"""The account of memory: every byte by kind, and of every page-locked allocation who asked for it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

OTHERS = "others"
"""The owner under which allocations are counted once there are very many owners."""
_MOST_ACCOUNTS = 200
_DEEPEST = 16
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(_PACKAGE, name) for name in ("ledger.py", "tiers.py", "memory.py", "device"))
_BOOTSTRAP = "threading.py"


@dataclass(slots=True, eq=False)
class Account:
    """What one owner page-locked, from one place in the code if stacks are kept: now, at most and in all.

    ``nbytes`` and ``peak_nbytes`` are what was asked for, ``taken`` and ``peak_taken`` what it takes of the system;
    ``allocate_s`` and ``free_s`` are seconds of all calls together, the latter None where nobody measured one.
    """

    owner: str
    tier: str
    stack: tuple[str, ...]
    nbytes: int = 0
    peak_nbytes: int = 0
    taken: int = 0
    peak_taken: int = 0
    allocations: int = 0
    allocate_s: float = 0.0
    free_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """A row of ``memory.pins`` in the report; ``stack`` only where it was kept."""
        row: dict[str, Any] = {
            "owner": self.owner,
            "tier": self.tier,
            "bytes": self.nbytes,
            "bytes_taken": self.taken,
            "peak_bytes": self.peak_nbytes,
            "peak_bytes_taken": self.peak_taken,
            "allocations": self.allocations,
            "allocate_s": round(self.allocate_s, 6),
            "free_s": None if self.free_s is None else round(self.free_s, 6),
        }
        return {**row, "stack": list(self.stack)} if self.stack else row


@dataclass(slots=True, eq=False)
class Pin:
    """A page-locked allocation that lives.

    ``at_s`` is when it was made, in seconds since the ledger was; ``in_shmem`` whether Linux shows it in RssShmem, as
    it does what CUDA allocated, but neither ordinary memory that was registered nor what is write-combined (measured).
    """

    account: Account
    nbytes: int
    taken: int
    at_s: float
    in_shmem: bool

    @property
    def owner(self) -> str:
        """Who asked for it."""
        return self.account.owner

    @property
    def tier(self) -> str:
        """``hot`` or ``cold``."""
        return self.account.tier

    @property
    def stack(self) -> tuple[str, ...]:
        """Where in the code, innermost first, as ``file:line function``; empty unless stacks are kept."""
        return self.account.stack


class Ledger:
    """Bytes held now and at peak, and allocations made, by kind (``pinned``, ``pageable``, ``device``, …).

    ``bytes`` and ``peak`` are what was asked for, ``taken`` and ``peak_taken`` what it takes of the system: more where
    an allocator rounds up or keeps a pool. Kinds in ``untold`` have an allocator that does not say. Page-locked memory
    is entered by `pin`, with its owner; ``pinned_total`` is what was page-locked ever, and ``stacks = True`` keeps the
    Python stack of each, for some 20 µs an allocation. What is kept is bounded, however many allocations there are.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        # Guards what follows; re-entrant, because memory may be dropped by the collector, anywhere. For the same reason
        # numbers are changed by one `+=` each, in which the collector does not run.
        self._lock = threading.RLock()
        self.bytes: defaultdict[str, int] = defaultdict(int)
        self.peak: defaultdict[str, int] = defaultdict(int)
        self.allocations: defaultdict[str, int] = defaultdict(int)
        self.taken: defaultdict[str, int] = defaultdict(int)
        self.peak_taken: defaultdict[str, int] = defaultdict(int)
        self.untold: set[str] = set()
        self.stacks = False
        self.pinned_total = 0
        self._clock = clock
        self._began_s = clock()
        self._accounts: dict[tuple[str, str, tuple[str, ...]], Account] = {}
        self._live: set[Pin] = set()

    def add(self, kind: str, nbytes: int, taken: int | None = None) -> None:
        """Count an allocation (``nbytes`` > 0) or a release (< 0) that took ``taken`` bytes (None: as many)."""
        with self._lock:
            self.bytes[kind] += nbytes
            if self.bytes[kind] > self.peak[kind]:
                self.peak[kind] = self.bytes[kind]
            if nbytes > 0:
                self.allocations[kind] += 1
            self.take(kind, nbytes if taken is None else taken)

    def take(self, kind: str, nbytes: int) -> None:
        """Count what a pool took of the system (``nbytes`` > 0) or gave back, whoever asked for it."""
        with self._lock:
            self.taken[kind] += nbytes
            if self.taken[kind] > self.peak_taken[kind]:
                self.peak_taken[kind] = self.taken[kind]

    def most_taken(self, kind: str) -> int | None:
        """The most bytes that ``kind`` took at a time; None where its allocator does not say."""
        return None if kind in self.untold else self.peak_taken.get(kind, 0)

    def pin(
        self, nbytes: int, taken: int, *, owner: str, tier: str = "hot", seconds: float = 0.0, in_shmem: bool = True
    ) -> Pin:
        """Enter a page-locked allocation, which took ``seconds`` to make; hand what is returned to `unpin`."""
        stack = _stack() if self.stacks else ()
        with self._lock:
            account = self._account(owner, tier, stack)
            account.nbytes += nbytes
            account.taken += taken
            if account.nbytes > account.peak_nbytes:
                account.peak_nbytes = account.nbytes
            if account.taken > account.peak_taken:
                account.peak_taken = account.taken
            account.allocations += 1
            account.allocate_s += seconds
            self.pinned_total += nbytes
            pin = Pin(account, nbytes, taken, self._clock() - self._began_s, in_shmem)
            self._live.add(pin)
            self.add("pinned", nbytes, taken)
        return pin

    def unpin(self, pin: Pin, seconds: float | None = None) -> None:
        """Enter that it was given back, in ``seconds`` where that was measured. Once for each `pin`."""
        with self._lock:
            self._live.remove(pin)
            pin.account.nbytes -= pin.nbytes
            pin.account.taken -= pin.taken
            if seconds is not None:
                pin.account.free_s = seconds + (pin.account.free_s or 0.0)
            self.add("pinned", -pin.nbytes, -pin.taken)

    def live(self) -> list[Pin]:
        """Every page-locked allocation that lives, oldest first."""
        with self._lock:
            return sorted(self._live, key=lambda pin: pin.at_s)

    def owners(self) -> list[Account]:
        """The accounts of all who page-locked, the one with the most bytes at its peak first. They go on changing."""
        with self._lock:
            return sorted(self._accounts.values(), key=lambda account: -account.peak_nbytes)

    def pinned_in(self, tier: str) -> int:
        """Bytes of a tier that are page-locked now."""
        return sum(account.nbytes for account in self.owners() if account.tier == tier)

    def _account(self, owner: str, tier: str, stack: tuple[str, ...]) -> Account:
        """Lock held."""
        key = (owner, tier, stack)
        if key not in self._accounts and len(self._accounts) >= _MOST_ACCOUNTS:
            key = (OTHERS, tier, ())
        return self._accounts.setdefault(key, Account(*key))


def _stack() -> tuple[str, ...]:
    """Where in the code an allocation was asked for, innermost first, without the frames of the account itself."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < _DEEPEST:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) and os.path.basename(code.co_filename) != _BOOTSTRAP:
            lines.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(lines)


def _short(path: str) -> str:
    """A file without what is the machine's: as of its package's folder, or its name alone."""
    if path.startswith(_PACKAGE + os.sep):
        return "/".join(("framepipe", *path[len(_PACKAGE) + 1 :].split(os.sep)))
    parts = path.split(os.sep)
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    return parts[-1]
