"""The ring of slots between fillers and the runner.

Two C queues of slots (free, ready): a `threading.Condition` in their place halved the rate. Closing is a message
put into them. A slot carries a ticket from `acquire`, and `get` hands slots out in ticket order, so that several
fillers keep the order in which they took their frames. The ring knows threads and opaque fences, not CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from framepipe.frame import FrameSpec, Item


class Fence(Protocol):
    """What a slot waits for before it is filled again."""

    def done(self) -> bool:
        """Whether whoever read the slot is done."""

    def synchronize(self) -> None:
        """Wait until whoever read the slot is done."""


class Slot:
    """Room for one batch on the host.

    Owned by one thread at a time: a filler between `Ring.acquire` and `Ring.commit`, the runner between `Ring.get`
    and `Ring.release`. ``memory`` is (batch, capacity) uint8 or None, ``rooms`` what copies pictures of a spec into it
    (made once), ``frames`` the decoder's own frames where they travel themselves.
    """

    __slots__ = ("copied", "fence", "frames", "index", "items", "memory", "rooms", "spec", "stamp", "ticket")

    def __init__(self, index: int) -> None:
        self.index = index
        self.fence: Fence | None = None
        self.copied: Any = None
        self.ticket = -1
        self.items: Sequence[Item] = ()
        self.spec: FrameSpec | None = None
        self.frames: list[Any] = []
        self.memory: np.ndarray | None = None
        self.rooms: dict[FrameSpec, Any] = {}
        self.stamp: Any = None


def affordable(nbytes: int) -> int:
    """How many batches of ``nbytes`` may wait for each other where no memory is made for them beforehand.

    Small pictures go through by the dozen, so that a thread that wakes up finds more than one.
    """
    return min(16, (32 << 20) // max(1, nbytes))


class Ring:
    """``size`` slots going round. ``waited_s`` sums waits for a free slot (`acquire`) and a full one (`get`)."""

    def __init__(
        self,
        size: int,
        stamp: Callable[[], Any] = lambda: None,
        observe: Callable[[Any], None] = lambda stamp: None,
    ) -> None:
        self.slots = [Slot(index) for index in range(size)]
        self.waited_s = {"acquire": 0.0, "get": 0.0}
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[Slot | None] = SimpleQueue()
        self._early: dict[int, Slot] = {}  # the runner's alone
        self._next_ticket = 0  # the fillers', serialised by them
        self._next_out = 0  # the runner's alone
        self._ending = False
        self.aborted = False
        self._stamp, self._observe = stamp, observe
        for slot in self.slots:
            self._free.put(slot)

    def acquire(self, *, wait: bool = True) -> Slot | None:
        """A free slot, its fence not yet waited for; None once shut down, or if there is none and nobody waits for it.

        Those who fill serialise the calls.
        """
        try:
            slot = self._take(self._free, "acquire") if wait else self._free.get_nowait()
        except Empty:
            return None
        if slot is None or self.aborted:
            self._free.put(None)  # the message is for every waiter
            return None
        self._observe(slot.stamp)
        slot.ticket = self._next_ticket
        self._next_ticket += 1
        return slot

    def commit(self, slot: Slot) -> None:
        """Hand a filled slot on. Any filler thread."""
        slot.stamp = self._stamp()
        self._ready.put(slot)

    def abort(self, slot: Slot) -> None:
        """Hand an acquired slot back unfilled."""
        slot.items, slot.frames = (), []
        self.commit(slot)

    def get(self) -> Slot | None:
        """The next filled slot in ticket order; None once the ring is drained or aborted. Runner thread only."""
        while not self.aborted:
            slot = self._early.pop(self._next_out, None)
            if slot is None:
                if self._ending and self._next_out == self._next_ticket:
                    return None
                slot = self._take(self._ready, "get")
                if slot is None:
                    self._ending = True
                    continue
                if self.aborted or slot.ticket != self._next_out:
                    self._early[slot.ticket] = slot  # one that comes behind an abort may be unfilled: see `leftover`
                    continue
            self._next_out += 1
            self._observe(slot.stamp)
            if slot.items:
                return slot
            self.release(slot, slot.fence)
        return None

    def release(self, slot: Slot, fence: Fence | None) -> None:
        """Give a slot back, to be filled again behind ``fence``."""
        slot.fence = fence
        slot.items, slot.frames = (), []
        slot.stamp = self._stamp()
        self._free.put(slot)

    def gather(self, mine: Slot) -> list[Slot] | None:
        """Every slot but ``mine``, idle and behind its fence, for memory to be planned anew; None once shut down.

        Calls are serialised with `acquire`. Hand them back with `scatter`.
        """
        others: list[Slot] = []
        while len(others) < len(self.slots) - 1:
            slot = self._take(self._free, "acquire")
            if slot is None or self.aborted:
                self._free.put(None)
                return None
            others.append(slot)
        for slot in (mine, *others):
            self._observe(slot.stamp)
            if slot.fence is not None:
                slot.fence.synchronize()
        return others

    def scatter(self, slots: list[Slot]) -> None:
        """Put gathered slots back into the ring."""
        for slot in slots:
            slot.stamp = self._stamp()
            self._free.put(slot)

    def keep(self, slots: list[Slot]) -> None:
        """Go on with these slots alone; every slot is idle (`gather`), and the others are never handed out again."""
        self.slots[:] = sorted(slots, key=lambda slot: slot.index)

    def grow(self, size: int, copied: Callable[[str], Any]) -> None:
        """Add slots up to ``size``. Calls are serialised with `acquire`; ``copied`` makes their events."""
        for index in range(len(self.slots), size):
            slot = Slot(index)
            slot.copied = copied(f"copied slot {index}")
            self.slots.append(slot)
            self._free.put(slot)

    def shutdown(self, *, drain: bool) -> None:
        """End the ring: ``drain`` lets the runner have what was committed, otherwise it ends at once. Idempotent."""
        if not drain:
            self.aborted = True
            self._free.put(None)
        self._ready.put(None)

    def leftover(self) -> list[Slot]:
        """After every thread has ended: filled slots that nobody took."""
        found = list(self._early.values())
        while True:
            try:
                slot = self._ready.get_nowait()
            except Empty:
                return found
            if slot is not None:
                found.append(slot)

    def _take(self, queue: SimpleQueue[Slot | None], what: str) -> Slot | None:
        try:
            return queue.get_nowait()
        except Empty:
            began = time.perf_counter()
            slot = queue.get()
            self.waited_s[what] += time.perf_counter() - began
            return slot
