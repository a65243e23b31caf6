"""What the copying strategies share: slots with memory on the host, halves on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.device.base import Event, Stream
from framepipe.errors import DeviceMemoryError
from framepipe.frame import FrameSpec, Planes
from framepipe.planecopy import PlaneCopy
from framepipe.slicecopy import SliceCopies
from framepipe.stager import HostMemory, Stager

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


class CopyingStager(Stager):
    """Planes are copied into a slot's memory, and from there to one of ``depth`` fixed device halves.

    Where host and device share memory no half exists and stages read the slot itself.
    """

    holds = "ring slab"
    """What a block of `allocate` is, for the account of page-locked memory."""

    per_batch: bool = False
    """True where memory is made for every batch."""

    @classmethod
    def locks(cls, *, host_shared: bool) -> bool:
        """Whether the slots are page-locked."""
        return cls.pinned and not host_shared

    @classmethod
    def takes(cls, nbytes: int) -> int | None:
        """What a page-locked block of ``nbytes`` takes of the system; None where its allocator does not say."""
        return nbytes

    @classmethod
    def host_memory(cls, spec: FrameSpec, slots: int, batch: int, *, host_shared: bool) -> HostMemory | None:
        blocks, pictures = (slots, batch) if cls.per_batch else (1, slots * batch)
        nbytes = pictures * spec.nbytes
        if not cls.locks(host_shared=host_shared):
            return HostMemory("pageable", blocks, nbytes, nbytes, cls.per_batch)
        return HostMemory("pinned", blocks, nbytes, cls.takes(nbytes), cls.per_batch)

    @classmethod
    def has_halves(cls, *, host_shared: bool) -> bool:
        return not host_shared

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.shares_memory = device.host_shared
        self.slices = SliceCopies(self.copy_threads) if self.copy_threads > 1 else None
        self.halves: list[Any] = [None] * depth
        self.half_nbytes = 0
        self.targets: dict[tuple[int, int, int], Any] = {}

    @property
    def owner(self) -> str:
        """Who page-locks, as the report names it."""
        return f"{self.holds} ({self.type_name})"

    def allocate(self, nbytes: int) -> np.ndarray:
        """A page-aligned block for slots, of exactly ``nbytes``: what most strategies differ in."""
        return self.device.host_empty(nbytes, pinned=self.pinned, owner=self.owner)

    def release(self, block: np.ndarray) -> None:
        """Give a block of `allocate` back; nothing uses it any more."""
        self.device.host_free(block)

    def ready(self, slot: Slot, spec: FrameSpec) -> None:
        """Before a thread fills: see to the slot's memory. Any number of threads for one slot at the same time."""

    def fill(self, frames: Sequence[Any], at: int, slot: Slot, spec: FrameSpec) -> None:
        room = self._room(slot, spec, at, len(frames))
        with self.timed("copy", len(frames)):
            room.put(at, frames, self.slices)

    def _room(self, slot: Slot, spec: FrameSpec, at: int, n: int) -> PlaneCopy:
        """Where ``n`` pictures go from ``at`` on."""
        self.ready(slot, spec)
        assert slot.memory is not None
        self.device.host_access(slot.memory[at : at + n], write=True)
        room: PlaneCopy | None = slot.rooms.get(spec)
        if room is None:
            room = slot.rooms[spec] = PlaneCopy(slot.memory, spec)
        return room

    def plan_device(self, spec: FrameSpec) -> None:
        """Make the halves large enough; nothing is in flight."""
        need = spec.nbytes * self.batch
        if self.shares_memory or need <= self.half_nbytes:
            return
        self.targets.clear()  # first: they hold the memory that is given back
        for i, half in enumerate(self.halves):
            if half is not None:
                self.device.fixed_free(half)
                self.halves[i] = half = None  # before the new one is made
            try:
                self.halves[i] = self.device.fixed(need)
            except DeviceMemoryError as error:
                error.args = (f"no memory for {self.depth} uploads in flight (batches of {self.batch}): {error}",)
                raise
        self.half_nbytes = need

    def target(self, half: int, nbytes: int, n: int) -> Any:
        """Room for ``n`` pictures in a half as (n, nbytes), made once: views of device memory are dear to make."""
        target = self.targets.get((half, nbytes, n))
        if target is None:
            whole = self.halves[half][: self.batch * nbytes].reshape(self.batch, nbytes)
            target = self.targets[half, nbytes, n] = whole[:n]
        return target

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        assert slot.memory is not None
        n = len(slot.items)
        if self.shares_memory:
            return Planes(spec, n, slab=slot.memory[:n])
        source = slot.memory[:n, : spec.nbytes]
        target = self.target(half, spec.nbytes, n)
        self.device.upload(target, source, stream)
        copied.record(stream)
        return Planes(spec, n, slab=target)

    def close(self) -> None:
        if self.slices is not None:
            self.slices.close()
        self.targets.clear()
        for half in self.halves:
            if half is not None:
                self.device.fixed_free(half)
        self.halves = []


def carve(block: np.ndarray, slots: int, batch: int, nbytes: int) -> list[np.ndarray]:
    """``slots`` arrays of (batch, nbytes) one behind another in ``block``."""
    parts = block[: slots * batch * nbytes].reshape(slots, batch, nbytes)
    return [parts[i] for i in range(slots)]
