"""The machine that a probe ran on: what goes into its record, and what it has left to try something with."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from framepipe.errors import ConfigError, DeviceUnavailableError
from framepipe.hardware import cpu_name, cpus, driver_version, is_wsl2
from framepipe.probe import windows
from framepipe.report import versions
from framepipe.telemetry.adapter import find_adapter
from framepipe.telemetry.base import Sensor, SensorUnavailableError
from framepipe.telemetry.cgroup import CgroupMemory
from framepipe.units import format_bytes

RESERVE_NBYTES = 256 << 20
"""What a cell leaves to everybody else: interpreter, CUDA's own memory, the machine's breath."""
_START_S = 180.0
_DEVICE = re.compile(r"cuda(?::(\d+))?")


@dataclass(frozen=True)
class Machine:
    """``device`` is CUDA's number of the GPU that is probed, or None with the ``reason``; ``about`` is provenance."""

    device: int | None
    reason: str | None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def gpu(self) -> dict[str, Any] | None:
        """The GPU as `framepipe.probe._cuda_machine.gpu` tells it, or None."""
        found: dict[str, Any] | None = self.about.get("gpu")
        return found


def examine(device: str, run: Callable[[Mapping[str, Any], float], dict[str, Any]]) -> Machine:
    """The machine, its GPU looked at by ``run`` in a child process.

    ``device`` is ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``. Raises `ConfigError` for another
    word, and `DeviceUnavailableError` for a GPU that was asked for and cannot be used.
    """
    found = _DEVICE.fullmatch(device)
    if device == "cpu":
        return Machine(None, "device cpu was asked for", _about(None))
    if device != "auto" and found is None:
        raise ConfigError(f"device {device!r}: expected auto, cpu, cuda or cuda:N")
    number = int(found[1] or 0) if found else 0
    answer = run({"probe": "machine", "device": number}, _START_S)
    gpu, reason = answer.get("gpu"), answer.get("reason")
    if gpu is None and device != "auto" and answer["status"] != "unfinished":
        raise DeviceUnavailableError(f"device {device!r} was asked for, but {reason}")
    return Machine(None if gpu is None else number, reason, _about(gpu))


def look(request: Mapping[str, Any], tell: Callable[[Any], None]) -> dict[str, Any]:
    """In a child process: ``gpu``, or None with the ``reason``."""
    from framepipe.device.select import why_not

    number = int(request["device"])
    reason = why_not(number)
    if reason:
        return {"status": "unavailable", "gpu": None, "reason": reason}
    gpu = importlib.import_module("framepipe.probe._cuda_machine").gpu(number)
    return {"status": "ok", "gpu": gpu, "reason": None}


def _about(gpu: Any) -> dict[str, Any]:
    import psutil

    return {
        "os": platform.platform(),
        "wsl2": is_wsl2(),
        "cpu": cpu_name(),
        "cpus": cpus(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "load": [round(load, 2) for load in psutil.getloadavg()],
        "gpu": gpu,
        "windows": windows.settings(),
        "versions": versions(),
    }


def identity(device: int = 0) -> str:
    """What a baseline is kept under: UUID and driver of CUDA device ``device``, or the processor where there is none.

    Initialises the CUDA driver in this process, and makes no context.
    """
    try:
        return gpu_identity(str(find_adapter(device).uuid), driver_version())
    except SensorUnavailableError:
        return cpu_identity()


def gpu_identity(uuid: str, driver: str | None) -> str:
    """The name of a GPU under its driver."""
    return f"gpu {uuid} driver {driver or 'unknown'}"


def cpu_identity() -> str:
    """The name of this machine without a GPU."""
    return f"cpu {cpu_name() or 'unknown'} x{os.cpu_count() or 1}"


class Available(NamedTuple):
    """``nbytes`` of host memory that can be had, and in words which limit that is."""

    nbytes: int
    words: str


def available(open_cgroup: Callable[[], Sensor] = CgroupMemory, psutil: Any = None) -> Available:
    """Host memory that may be taken: what the system has available, or what the control group has left if that is less.

    Sources: ``psutil.virtual_memory().available``; limit and use of the control group (`CgroupMemory`).
    """
    psutil = psutil or importlib.import_module("psutil")
    memory = psutil.virtual_memory()
    nbytes = int(memory.available)
    system = Available(nbytes, f"{format_bytes(nbytes)} of {format_bytes(memory.total)} is available (psutil)")
    group = _left_in_group(open_cgroup)
    return min(system, group) if group else system


def _left_in_group(open_cgroup: Callable[[], Sensor]) -> Available | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        sensor = open_cgroup()
    except SensorUnavailableError:
        return None
    found = sensor.read()
    sensor.close()
    limit, current = found.get("limit"), found.get("current")
    if limit is None or current is None:
        return None
    left = max(0, limit - current)
    return Available(
        left, f"{format_bytes(left)} of {format_bytes(limit)} is left in the control group ({sensor.source})"
    )


def too_large(nbytes: int, has: Available) -> str | None:
    """Why a cell of ``nbytes`` is not tried, with the numbers; None if it fits."""
    if nbytes + RESERVE_NBYTES <= has.nbytes:
        return None
    wanted, reserve = format_bytes(nbytes), format_bytes(RESERVE_NBYTES)
    return f"{wanted} wanted beside a reserve of {reserve}, and {has.words}"
