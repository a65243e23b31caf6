"""All sensors at once: opened where there is one, and a row with the reason where there is none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable
from typing import NamedTuple

from framepipe.telemetry.adapter import Adapter, find_adapter
from framepipe.telemetry.base import Missing, Sensor, SensorUnavailableError, describe
from framepipe.telemetry.nvml import NvmlMemory
from framepipe.telemetry.system import DriverModelReading, model_from_cuda


class _Row(NamedTuple):
    name: str
    module: str
    cls: str
    of_device: bool = False
    system: str = ""  # of `sys.platform`; empty for all
    package: str = ""  # what to install where the module is missing


_ROWS = (
    _Row("process", "process", "ProcessMemory"),
    _Row("procfs", "procfs", "ProcfsMemory", system="linux"),
    _Row("cgroup", "cgroup", "CgroupMemory", system="linux"),
    _Row("cuda", "cuda_memory", "CudaMemory", of_device=True, package="CuPy"),
    _Row("nvml", "nvml", "NvmlMemory", of_device=True, package="nvidia-ml-py"),
    _Row("wddm", "wddm", "WddmMemory", of_device=True, system="win32"),
    _Row("pdh", "pdh", "PdhMemory", of_device=True, system="win32", package="pywin32"),
)
NAMES = tuple(row.name for row in _ROWS)
"""The names of all sensors, in the order of `open_sensors`."""
_SYSTEMS = {"linux": "Linux", "win32": "Windows"}


def open_sensors(
    device_index: int | None = None, *, adapter: Adapter | None = None, names: Collection[str] = NAMES
) -> list[Sensor]:
    """Every sensor of ``names``, in a fixed order; one that cannot be opened is a `Missing` row with its reason.

    ``device_index`` is CUDA's number of the device to watch; without it those of a device are missing, and nothing of
    CUDA is touched. With it the CUDA driver is initialised, and reading ``cuda`` makes this process's context there.
    ``adapter`` spares looking it up again. Never raises. The caller closes the sensors (`close_sensors`).
    """
    why = "no CUDA device was named"
    if adapter is None and device_index is not None:
        try:
            adapter = find_adapter(device_index)
        except Exception as error:
            why = describe(error)
    return [_open(row, adapter, why) for row in _ROWS if row.name in names]


def _open(row: _Row, adapter: Adapter | None, why: str) -> Sensor:
    if row.system and not sys.platform.startswith(row.system):
        return Missing(row.name, f"only {_SYSTEMS[row.system]} has it")
    if row.of_device and adapter is None:
        return Missing(row.name, why)
    try:
        cls = getattr(importlib.import_module(f"framepipe.telemetry.{row.module}"), row.cls)
        sensor: Sensor = cls(adapter) if row.of_device else cls()
    except ModuleNotFoundError as error:
        return Missing(row.name, f"{row.package or error.name} is not installed")
    except SensorUnavailableError as error:
        return Missing(row.name, str(error))
    except Exception as error:  # a library in a state that nobody thought of is no reason to stop what is watched
        return Missing(row.name, describe(error))
    return sensor


def read_sensors(sensors: Iterable[Sensor]) -> dict[str, int | None]:
    """One reading of all sensors: bytes by ``sensor.reading``, None where there is no number. Never raises."""
    return {f"{sensor.name}.{key}": nbytes for sensor in sensors for key, nbytes in sensor.read().items()}


def read_driver_model(sensors: Iterable[Sensor], adapter: Adapter | None = None) -> DriverModelReading:
    """The driver model of the device: by NVML where it is among ``sensors``, else as far as CUDA tells.

    Never raises; outside Windows there is none, which is the ``reason``.
    """
    said = [sensor.driver_model() for sensor in sensors if isinstance(sensor, NvmlMemory)]
    known = [reading for reading in said if reading.current is not None]
    return (known or [model_from_cuda(adapter.tcc if adapter else None)])[0]


def close_sensors(sensors: Iterable[Sensor]) -> None:
    """Close all of them, the last opened first."""
    for sensor in reversed(list(sensors)):
        sensor.close()
