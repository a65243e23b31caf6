"""How much memory is free, by each count there is: of the device, Windows' budgets, the container and RAM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from framepipe.telemetry.base import Missing, Sensor, describe
from framepipe.telemetry.cgroup import CgroupMemory
from framepipe.telemetry.sensors import close_sensors, open_sensors

_SENSORS = ("cgroup", "cuda", "nvml", "wddm")


@dataclass(frozen=True, slots=True)
class Reading:
    """``free`` bytes of ``total`` (None: not known) as ``source`` counts them; a budget is a total too."""

    source: str
    free: int
    total: int | None = None


class Memory(Protocol):
    """What a guard reads."""

    @property
    def missing(self) -> Mapping[str, str]:
        """Why a count had no number in the last reading, by its name."""

    def read(self) -> Sequence[Reading]:
        """Every count there is. Never raises."""

    def close(self) -> None:
        """Give handles back. Idempotent."""


class SystemMemory:
    """Free memory by the counts of the system, and with a ``device_index`` of that CUDA device.

    RAM that is available; what is left of the container's limit, its page cache taken as free since it is given up
    first; ``cudaMemGetInfo`` and NVML free; on Windows what is left of the process's local and non-local budgets. No
    two of them are added up. CUDA is asked only with a ``device_index``, and then makes the process's context if there
    is none yet. ``sensors`` stand in for the machine's in tests.
    """

    def __init__(self, device_index: int | None = None, *, sensors: Iterable[Sensor] | None = None) -> None:
        opened = open_sensors(device_index, names=_SENSORS) if sensors is None else list(sensors)
        self._sensors = {sensor.name: sensor for sensor in opened}
        self._ram = sensors is None
        self.missing: dict[str, str] = {}

    def read(self) -> list[Reading]:
        """Every count there is. Never raises."""
        missing: dict[str, str] = {}
        readings: list[Reading] = []
        for name, sensor in self._sensors.items():
            if isinstance(sensor, Missing):
                missing[name] = sensor.reason
                continue
            found = [reading for reading in _read(sensor) if _is_sane(reading)]
            readings += found
            if not found:
                missing[name] = sensor.reason or "its numbers make no sense"
        if self._ram:
            try:
                readings.append(_available())
            except Exception as error:  # where /proc is not as psutil expects it, for one
                missing["ram"] = describe(error)
        self.missing = missing
        return readings

    def close(self) -> None:
        """Close the sensors. Idempotent."""
        close_sensors(self._sensors.values())


class DeviceMemory:
    """Free memory as a device itself tells it (`framepipe.device.base.Device.vram`): that of a model, for one."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.missing: dict[str, str] = {}

    def read(self) -> list[Reading]:
        """Every count there is. Never raises."""
        try:
            rows = self._device.vram()
            readings = [reading for row in rows for reading in _of_row(row) if _is_sane(reading)]
        except Exception as error:  # whoever watches memory must not be stopped by what he watches
            self.missing = {"device": describe(error)}
            return []
        reason = "its numbers make no sense" if rows else "it counts no memory of its own"
        self.missing = {} if readings else {"device": reason}
        return readings

    def close(self) -> None:
        """Nothing is held."""


def _of_row(row: Mapping[str, Any]) -> list[Reading]:
    readings = [Reading(row["source"], row["free"], row.get("total"))] if row.get("free") is not None else []
    for group in ("local", "non_local"):
        budget, usage = row.get(f"{group}_budget"), row.get(f"{group}_usage")
        if budget is not None and usage is not None:
            readings.append(_left(f"{row['source']} {group.replace('_', '-')} budget", budget, usage))
    return readings


def _read(sensor: Sensor) -> list[Reading]:
    found = sensor.read()
    if sensor.name == "wddm":
        return [
            _left(f"{sensor.source} {group.replace('_', '-')} budget", budget, usage)
            for group in ("local", "non_local")
            if (budget := found.get(f"{group}_budget")) is not None
            and (usage := found.get(f"{group}_usage")) is not None
        ]
    if sensor.name == "cgroup":
        limit, current = found.get("limit"), found.get("current")
        if limit is None or current is None:
            return []
        cache = sensor.page_cache() if isinstance(sensor, CgroupMemory) else 0
        return [_left(f"limit of the control group {sensor.source}", limit, max(0, current - cache))]
    free = found.get("free")
    return [] if free is None else [Reading(f"{sensor.source} free", free, found.get("total"))]


def _left(source: str, budget: int, usage: int) -> Reading:
    # More used than allowed is possible (a budget shrinks), and means that nothing is free.
    return Reading(source, max(0, budget - usage), budget)


def _is_sane(reading: Reading) -> bool:
    return reading.free >= 0 and (reading.total is None or 0 < reading.total >= reading.free)


def _available() -> Reading:
    import psutil

    memory = psutil.virtual_memory()
    return Reading("RAM available", int(memory.available), int(memory.total))
