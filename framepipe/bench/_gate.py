"""The memory gate: whether a cell fits, before it is tried."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from framepipe.bench.cells import Cell, Input
from framepipe.telemetry.base import SensorUnavailableError
from framepipe.telemetry.cgroup import CgroupMemory
from framepipe.units import format_bytes

_SHARE = 0.8
"""Of what is free: others live here, too."""


@dataclass(frozen=True)
class Room:
    """Bytes of host memory that this process could still have."""

    available_nbytes: int

    @staticmethod
    def now() -> Room:
        """As the system and the process's control group tell."""
        memory = psutil.virtual_memory()
        try:
            group = CgroupMemory().read()
        except SensorUnavailableError:
            group = {}
        limit, current = group.get("limit"), group.get("current")
        if limit is None or current is None:
            return Room(memory.available)
        return Room(min(memory.available, max(0, limit - current)))


def room_for(cell: Cell, given: Input, distinct: int, room: Room, device_free: int | None) -> str | None:
    """Why there is no room for a cell, with the numbers, or None; ``distinct`` pictures are ready in memory.

    ``device_free`` is None where host and device memory are one.
    """
    if not given.nbytes:
        return None
    axes = cell.axes
    pictures = 3 * (given.width or 0) * (given.height or 0) * axes.batch * (axes.depth + 2)
    results = pictures if axes.mode == "pipeline" else 0
    slots = cell.slots * axes.batch * given.nbytes
    host = slots + distinct * given.nbytes + (results if device_free is None else 0)
    if host > _SHARE * room.available_nbytes:
        ready = f" and {distinct} pictures in memory" if distinct else ""
        return _too_much(f"{cell.slots} slots of {axes.batch}{ready}", host, "host", room.available_nbytes)
    if device_free is None:
        return None
    device = axes.depth * axes.batch * given.nbytes + results
    if device > _SHARE * device_free:
        return _too_much(f"{axes.depth} batches of {axes.batch} in flight", device, "device", device_free)
    return None


def _too_much(what: str, nbytes: int, where: str, free: int) -> str:
    wanted, there = format_bytes(nbytes), format_bytes(free)
    return f"{what} need {wanted} of {where} memory, more than {_SHARE:.0%} of the {there} that are free"
