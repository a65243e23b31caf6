"""What people who use PyTorch write: ``pin_memory()`` and ``to(device, non_blocking=True)``, for every picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framepipe.device.base import Event, Stream
from framepipe.frame import FrameSpec, Planes
from framepipe.ledger import Pin
from framepipe.memory import power_of_two
from framepipe.registry import register
from framepipe.stager import HostMemory
from framepipe.staging._copying import CopyingStager

if TYPE_CHECKING:
    from framepipe.device.base import Device
    from framepipe.ring import Slot


@register("torch")
@dataclass(kw_only=True)
class Torch(CopyingStager):
    """PyTorch's ``pin_memory()`` of the decoder's planes, then a copy to the device that does not block.

    Leaner than what is usually written: the planes are tensors without a copy, and where the decoder's rows are as long
    as those on the device they go straight there. ``pin_memory`` copies with many threads: 8456-14033 frames/s of 1080p
    in a bare loop of one thread, against 3409-3496 with `pooled` copying in one (ready frames). In a pipeline
    `framepipe bench` found 1012 to 1237 of ready frames, against 3047 to 3181 with `pooled`. It is not that fillers'
    threads fight for the processors: one filler and two came alike (1390 to 1626), and both at 2421 to 2617 in batches
    of 8; each plane is a call to PyTorch on either side of the ring. Measured on H200s. Sizes are rounded up to powers
    of two, and the pool is the process's and keeps what it has: ``memory.pinned_bytes_taken`` of the report is how much
    it grew in the run, ``pinned_allocations`` how often it was asked.
    """

    holds = "frame"

    @classmethod
    def missing(cls, device_kind: str) -> str | None:
        if device_kind != "cuda":
            return "PyTorch page-locks for a GPU"
        try:
            torch: Any = importlib.import_module("torch")
        except Exception as error:  # a broken one raises whatever it likes
            return f"PyTorch cannot be imported ({type(error).__name__}: {error})"
        return None if torch.cuda.is_available() else "the PyTorch that is installed finds no GPU"

    @classmethod
    def host_memory(cls, spec: FrameSpec, slots: int, batch: int, *, host_shared: bool) -> HostMemory | None:
        # Rows are as long as the decoder makes them, which is known of its frames alone: much as in a slot.
        planes = [plane.pitch * plane.height for plane in spec.planes]
        nbytes, taken = batch * sum(planes), batch * sum(power_of_two(each) for each in planes)
        return HostMemory("pinned", slots, nbytes, taken, per_batch=True)

    def open(self, device: Device, slots: int, batch: int, depth: int) -> None:
        super().open(device, slots, batch, depth)
        self.torch: Any = importlib.import_module("torch")
        self.number: int = getattr(device, "number", 0)
        self.tensors: dict[int, list[list[tuple[Any, Pin | None]]]] = {}
        """By slot and picture: each plane as a tensor, and its entry in the ledger where it is page-locked."""
        self.rooms: dict[tuple[int, FrameSpec, int], list[Any]] = {}
        self.streams: dict[int, Any] = {}
        with device.bound():
            self.torch.cuda.init()
        self.before = self._pool_nbytes()

    def plan(self, spec: FrameSpec, ring: Sequence[Slot] = ()) -> bool:
        self.tensors = {slot.index: [[] for _ in range(self.batch)] for slot in ring}
        return False

    def plan_device(self, spec: FrameSpec) -> None:
        self.rooms.clear()  # first: they hold the memory that is given back
        super().plan_device(spec)

    def fill(self, frames: Sequence[Any], at: int, slot: Slot, spec: FrameSpec) -> None:
        tensors = self.tensors[slot.index]
        for i, frame in enumerate(frames, at):
            self._drop(tensors[i])
            pairs = zip(frame.planes, spec.planes, strict=False)
            with self.timed("copy"):  # PyTorch allocates and copies in one
                tensors[i] = [self._pin(plane, layout.height) for plane, layout in pairs]

    def upload(self, slot: Slot, spec: FrameSpec, half: int, stream: Stream, copied: Event) -> Planes:
        n = len(slot.items)
        if stream.ptr not in self.streams:
            self.streams[stream.ptr] = self.torch.cuda.ExternalStream(stream.ptr, device=self.number)
        rooms = [self._rooms(half, spec, i) for i in range(n)]
        with self.torch.cuda.stream(self.streams[stream.ptr]):
            for i in range(n):
                for (tensor, _), room in zip(self.tensors[slot.index][i], rooms[i], strict=True):
                    self._move(tensor, room)
        copied.record(stream)
        return Planes(spec, n, slab=self.target(half, spec.nbytes, n))

    def close(self) -> None:
        self.rooms.clear()
        after = self._pool_nbytes()
        if self.before is None or after is None:
            self.device.ledger.untold.add("pinned")
        elif after > self.before:
            self.device.ledger.take("pinned", after - self.before)
            self.device.ledger.take("pinned", self.before - after)  # it is the process's from now on
        self.before = after
        for pictures in self.tensors.values():
            for tensors in pictures:
                self._drop(tensors)
        super().close()

    def _pin(self, plane: Any, height: int) -> tuple[Any, Pin | None]:
        torch, line = self.torch, abs(plane.line_size)
        rows = torch.frombuffer(memoryview(plane), dtype=torch.uint8, count=line * height).view(height, line)
        if plane.line_size < 0:  # the picture lies upside down in memory
            rows = rows.flip(0)
        nbytes = height * line
        tensor = self.device.page_lock(nbytes, rows.pin_memory)
        if tensor is not None:  # what its pool takes is counted as a whole
            return tensor, self.device.ledger.pin(nbytes, 0, owner=self.owner)
        self.device.ledger.add("pageable", nbytes)
        return rows.clone(), None

    def _drop(self, tensors: list[tuple[Any, Pin | None]]) -> None:
        for tensor, pin in tensors:
            if pin is not None:
                self.device.ledger.unpin(pin)
            else:
                self.device.ledger.add("pageable", -tensor.nbytes)
        tensors.clear()

    def _rooms(self, half: int, spec: FrameSpec, i: int) -> list[Any]:
        """Where the planes of picture ``i`` go in a half, as (height, pitch) tensors."""
        rooms = self.rooms.get((half, spec, i))
        if rooms is None:
            row = self.torch.from_dlpack(self.target(half, spec.nbytes, self.batch))[i]
            rooms = self.rooms[half, spec, i] = [
                row[plane.offset : plane.offset + plane.height * plane.pitch].view(plane.height, plane.pitch)
                for plane in spec.planes
            ]
        return rooms

    def _move(self, tensor: Any, room: Any) -> None:
        if tensor.shape == room.shape:
            room.copy_(tensor, non_blocking=True)
            return
        # Rows of another length: they are cut on the device, since a copy of parts of rows would not be asynchronous.
        width = min(tensor.shape[1], room.shape[1])
        moved = tensor.to(room.device, non_blocking=True)
        room[:, :width].copy_(moved[:, :width], non_blocking=True)

    def _pool_nbytes(self) -> int | None:
        """What PyTorch's pool has page-locked, in the sizes that it rounds to; None in versions that do not count."""
        stats: dict[str, Any] = getattr(self.torch.cuda, "host_memory_stats", dict)()
        nbytes = stats.get("allocated_bytes.current")
        return None if nbytes is None else int(nbytes)
