"""Every counter of every adapter in one row, and waiting until they hold still."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from framepipe.guard import waiting
from framepipe.guard.waiting import REAL, Clock, Patience, Settled, far
from framepipe.telemetry.adapter import find_adapter
from framepipe.telemetry.base import Missing, Sensor, SensorUnavailableError
from framepipe.telemetry.pdh import Instance, PdhMemory
from framepipe.telemetry.sensors import close_sensors, open_sensors

Row = dict[str, int | None]
_CONSTANT = ("total", "limit", "budget", "reservation", "available_for_reservation", "reserved")
_SHARED = ("cgroup.",)


class Counters:
    """Sensors under a prefix each, read as one row of bytes by ``prefix + sensor.reading``; None without a number.

    The sensors are closed by `close`. ``pid`` is the process whose counters of other adapters are wanted.
    """

    def __init__(self, sensors: Iterable[tuple[str, Sensor]], pid: int | None = None) -> None:
        self._sensors = list(sensors)
        self._pid = pid
        self.sources = {
            f"{prefix}{sensor.name}.{key}": f"{sensor.source}: {what}"
            for prefix, sensor in self._sensors
            for key, what in sensor.readings.items()
        }
        """What each column was read from."""
        self.missing: dict[str, str] = {}
        """Why a sensor is not there, or a column had no number in the last row."""

    def read(self) -> Row:
        """One reading of everything. Never raises."""
        row: Row = {}
        self.missing = {}
        for prefix, sensor in self._sensors:
            if isinstance(sensor, Missing):
                self.missing[f"{prefix}{sensor.name}"] = sensor.reason
                continue
            found = sensor.read()
            row.update({f"{prefix}{sensor.name}.{key}": nbytes for key, nbytes in found.items()})
            self.missing.update({f"{prefix}{sensor.name}.{key}": why for key, why in sensor.reasons.items()})
            if isinstance(sensor, PdhMemory) and not prefix:
                row.update(self._everything(sensor))
        return row

    def _everything(self, sensor: PdhMemory) -> Row:
        """Windows' counters of all adapters, those that CUDA does not know included, and of this process on each."""
        row: Row = {}
        for key, numbers in sensor.everything().items():
            for instance, nbytes in numbers.items():
                if instance.pid in (None, self._pid):
                    column = f"pdh[{_place(instance)}].{key}"
                    row[column] = nbytes
                    self.sources[column] = f"{sensor.source}: {sensor.readings[key]}, adapter {_place(instance)}"
        return row

    def close(self) -> None:
        """Close the sensors, the last opened first."""
        close_sensors(sensor for _, sensor in self._sensors)


def _place(instance: Instance) -> str:
    return f"{instance.luid} {instance.physical}"


def open_counters(device: int | None, pid: int) -> Counters:
    """The sensors of this process and of CUDA device ``device``, and those of every other CUDA device.

    Of the others NVML and Windows are asked and CUDA is not, which would make a context on each.
    """
    sensors = [("", sensor) for sensor in open_sensors(device)]
    if device is not None:
        sensors += [(f"cuda:{number} ", sensor) for number in _others(device) for sensor in _of_other(number)]
    return Counters(sensors, pid)


def _others(device: int) -> Iterable[int]:
    number = 0
    while True:
        try:
            find_adapter(number)
        except SensorUnavailableError:
            return
        if number != device:
            yield number
        number += 1


def _of_other(number: int) -> list[Sensor]:
    sensors = open_sensors(number)
    wanted = [sensor for sensor in sensors if sensor.name in ("nvml", "wddm", "pdh")]
    close_sensors(sensor for sensor in sensors if sensor not in wanted)
    return wanted


def decides(column: str) -> bool:
    """Whether waiting goes by this column: not by limits and totals, nor by what the whole control group shares."""
    return not column.startswith(_SHARED) and not column.endswith(_CONSTANT)


# -- waiting --


def settle(
    read: Callable[[], Row],
    patience: Patience,
    *,
    target: Mapping[str, int | None] | None = None,
    began_s: float | None = None,
    clock: Clock = REAL,
) -> Settled:
    """`framepipe.guard.waiting.settle` by the columns that `decides` picks."""
    return waiting.settle(read, patience, target=target, began_s=began_s, decides=decides, clock=clock)


def back_s(
    rows: Sequence[tuple[float, Mapping[str, int | None]]],
    target: Mapping[str, int | None],
    column: str,
    eps_nbytes: int,
) -> float | None:
    """When ``column`` was back at its target for good, to the distance of two readings; None if it was not."""
    away = [i for i, (_, row) in enumerate(rows) if far(row.get(column), target.get(column), eps_nbytes)]
    at = away[-1] + 1 if away else 0
    return rows[at][0] if at < len(rows) else None


def difference(a: Mapping[str, int | None], b: Mapping[str, int | None]) -> Row:
    """``a`` less ``b`` for each column of ``a``, None where either has no number."""
    return {
        column: None if number is None or (other := b.get(column)) is None else number - other
        for column, number in a.items()
    }
