"""Every counter of every adapter in one row, and waiting until they hold still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framepipe.telemetry.adapter import find_adapter
from framepipe.telemetry.base import Missing, Sensor, SensorUnavailableError
from framepipe.telemetry.pdh import Instance, PdhMemory
from framepipe.telemetry.sensors import close_sensors, open_sensors

Row = dict[str, int | None]
_CONSTANT = ("total", "limit", "budget", "reservation", "available_for_reservation", "reserved")
_SHARED = ("cgroup.",)
_CURVE_ROWS = 200


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


@dataclass(frozen=True, slots=True)
class Patience:
    """Counters hold still once each has stayed within ``eps_nbytes`` for ``window_s``; after ``timeout_s`` no matter.

    They are read every ``interval_s``.
    """

    eps_nbytes: int = 1 << 20
    window_s: float = 0.5
    timeout_s: float = 10.0
    interval_s: float = 0.05


@dataclass(frozen=True)
class Clock:
    """``now`` in seconds and ``sleep`` for some; tests have their own."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


@dataclass(frozen=True)
class Settled:
    """The last ``row``; the columns that still ``moved``, or were not ``back``; all rows with their times."""

    row: Row
    seconds: float
    moved: list[str]
    away: list[str]
    rows: list[tuple[float, Row]]

    def as_json(self) -> dict[str, Any]:
        """Plain values, without the rows."""
        return {"seconds": round(self.seconds, 3), "still_moving": self.moved, "not_back": self.away}

    def curve(self) -> dict[str, Any]:
        """``t_s`` and ``columns`` of at most `_CURVE_ROWS` rows; the columns that moved, constant ones left out."""
        rows = self.rows[:: -(-len(self.rows) // _CURVE_ROWS) or 1]
        columns = {column: [row.get(column) for _, row in rows] for column in self.row}
        return {
            "t_s": [round(time_s, 4) for time_s, _ in rows],
            "columns": {column: numbers for column, numbers in columns.items() if len(set(numbers)) > 1},
        }


def settle(
    read: Callable[[], Row],
    patience: Patience,
    *,
    target: Mapping[str, int | None] | None = None,
    began_s: float | None = None,
    clock: Clock = REAL,
) -> Settled:
    """Read until all deciding columns hold still and, with a ``target``, are back at it within ``eps_nbytes``.

    Times count from ``began_s``, by default now. Never raises; what did not come to rest is named in the result.
    """
    start_s = clock.now()
    zero_s = start_s if began_s is None else began_s
    rows: list[tuple[float, Row]] = []
    while True:
        now_s = clock.now()
        rows.append((now_s - zero_s, read()))
        latest = [row for time_s, row in rows if time_s >= now_s - zero_s - patience.window_s]
        moved = _moving(latest, patience.eps_nbytes)
        away = _away(rows[-1][1], target or {}, patience.eps_nbytes)
        waited_s = now_s - start_s
        calm = waited_s >= patience.window_s and not moved and not away
        if calm or waited_s >= patience.timeout_s:
            return Settled(rows[-1][1], now_s - zero_s, moved, away, rows)
        clock.sleep(patience.interval_s)


def _moving(rows: Sequence[Row], eps_nbytes: int) -> list[str]:
    def span(column: str) -> int:
        numbers = [number for row in rows if (number := row.get(column)) is not None]
        return max(numbers) - min(numbers) if numbers else 0

    return [column for column in rows[-1] if decides(column) and span(column) > eps_nbytes]


def _away(row: Row, target: Mapping[str, int | None], eps_nbytes: int) -> list[str]:
    return [column for column in row if decides(column) and _far(row[column], target.get(column), eps_nbytes)]


def _far(number: int | None, wanted: int | None, eps_nbytes: int) -> bool:
    return number is not None and wanted is not None and abs(number - wanted) > eps_nbytes


def back_s(
    rows: Sequence[tuple[float, Row]], target: Mapping[str, int | None], column: str, eps_nbytes: int
) -> float | None:
    """When ``column`` was back at its target for good, to the distance of two readings; None if it was not."""
    far = [i for i, (_, row) in enumerate(rows) if _far(row.get(column), target.get(column), eps_nbytes)]
    at = far[-1] + 1 if far else 0
    return rows[at][0] if at < len(rows) else None


def difference(a: Mapping[str, int | None], b: Mapping[str, int | None]) -> Row:
    """``a`` less ``b`` for each column of ``a``, None where either has no number."""
    return {
        column: None if number is None or (other := b.get(column)) is None else number - other
        for column, number in a.items()
    }
