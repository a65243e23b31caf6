"""The NVIDIA driver, its GPUs and who uses them, as ``nvidia-smi``, NVML and Windows' counters tell it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from framepipe import hardware
from framepipe.telemetry.adapter import Adapter, find_adapter
from framepipe.telemetry.base import SensorUnavailableError, describe
from framepipe.telemetry.pdh import Instance, PdhMemory

_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "pci_bus_id": "pci.bus_id",
    "driver": "driver_version",
    "memory_bytes": "memory.total",
    "used_bytes": "memory.used",
    "free_bytes": "memory.free",
    "compute_capability": "compute_cap",
    "driver_model": "driver_model.current",
    "pending_driver_model": "driver_model.pending",
}
_OLD = ("name", "uuid", "pci_bus_id", "driver", "memory_bytes", "used_bytes", "free_bytes")
"""What every driver tells; one that does not know a field tells nothing at all."""
_SILENT = ("", "N/A", "Not Supported", "Not Found", "Unknown Error", "Insufficient Permissions", "Not Available")
_MIB = 1 << 20


def examine() -> dict[str, Any]:
    """``driver`` and ``devices``, or the ``reason`` why there are none. No CUDA context is made."""
    answer, fields = hardware.Answer(None), list(_FIELDS)
    for fields in (list(_FIELDS), list(_OLD)):
        answer = hardware.ask("nvidia-smi", _query("gpu", (_FIELDS[key] for key in fields)), *_FORMAT)
        if answer.text is not None:
            break
    devices = [_device(dict(zip(fields, parts, strict=True))) for parts in _rows(answer.text, len(fields))]
    drivers = [device.pop("driver") for device in devices]
    driver = (drivers[0] if drivers else None) or hardware.kernel_driver()
    reason = None if devices else answer.reason or "nvidia-smi lists no GPU"
    return {"driver": driver, "reason": reason, "devices": devices}


_FORMAT = ("--format=csv,noheader,nounits",)


def _query(what: str, fields: Any) -> str:
    return f"--query-{what}={','.join(fields)}"


def _rows(text: str | None, width: int) -> Iterator[list[str | None]]:
    for line in (text or "").splitlines():
        parts = [part.strip() for part in line.split(",", width - 1)]  # a name, which may have commas, stands last
        if len(parts) == width:
            yield [None if part.strip("[]") in _SILENT else part for part in parts]


def _device(row: Mapping[str, str | None]) -> dict[str, Any]:
    found: dict[str, Any] = {key: row.get(key) for key in _FIELDS}
    for key in ("memory_bytes", "used_bytes", "free_bytes"):
        found[key] = _mib(found[key])
    return found


def _mib(text: str | None) -> int | None:
    return int(text) * _MIB if text and text.isdigit() else None


# -- who uses them --


def processes(nvml: Any = None) -> dict[str, Any]:
    """``rows`` of ``gpu`` (a UUID), ``pid``, ``name`` and ``nbytes`` (None: not told), ``source`` and ``reason``.

    NVML's lists of compute and graphics processes where its package is installed, else what nvidia-smi lists, which is
    compute alone. This process is left out. Process numbers are the machine's, also in a container.
    """
    try:
        library = importlib.import_module("pynvml") if nvml is None else nvml
        reasons: list[str] = []
        rows = list(_by_nvml(library, reasons))
        return {"rows": rows, "source": "NVML", "reason": reasons[0] if reasons and not rows else None}
    except ModuleNotFoundError:
        return _by_smi()
    except Exception as error:  # of the library or the driver
        return {"rows": [], "source": "NVML", "reason": describe(error)}


def _by_nvml(nvml: Any, reasons: list[str]) -> Iterator[dict[str, Any]]:
    """The rows; why a list of a GPU cannot be had is added to ``reasons``, and the others are."""
    nvml.nvmlInit()
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            seen: dict[int, int | None] = {}
            for get in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
                try:
                    listed = get(handle)
                except Exception as error:  # WSL 2 has neither list
                    reasons.append(describe(error))
                    continue
                for row in listed:  # who computes and draws stands in both, each time with all it has
                    known = [nbytes for nbytes in (seen.get(row.pid), row.usedGpuMemory) if nbytes is not None]
                    seen[int(row.pid)] = int(max(known)) if known else None
            for pid, nbytes in seen.items():
                if pid != os.getpid():
                    yield {"gpu": uuid, "pid": pid, "name": _name(nvml, pid), "nbytes": nbytes}
    finally:
        nvml.nvmlShutdown()


def _name(nvml: Any, pid: int) -> str | None:
    try:
        return _last(_text(nvml.nvmlSystemGetProcessName(pid)))
    except Exception:  # of another user, or gone already
        return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _last(path: str | None) -> str | None:
    """The program alone: a path tells more of somebody else's machine than is wanted."""
    return path.replace("\\", "/").rsplit("/", 1)[-1] or None if path else None


def _by_smi() -> dict[str, Any]:
    fields = ("gpu_uuid", "pid", "used_gpu_memory", "process_name")
    answer = hardware.ask("nvidia-smi", _query("compute-apps", fields), *_FORMAT)
    rows = [
        {"gpu": uuid, "pid": int(pid), "name": _last(name), "nbytes": _mib(used)}
        for uuid, pid, used, name in _rows(answer.text, len(fields))
        if pid and pid.isdigit() and int(pid) != os.getpid()
    ]
    return {"rows": rows, "source": "nvidia-smi, compute processes alone", "reason": answer.reason}


# -- Windows --


def adapters(find: Callable[[int], Adapter] = find_adapter) -> list[Adapter]:
    """The adapters of all CUDA devices. Initialises the CUDA driver, and makes no context."""
    found: list[Adapter] = []
    try:
        while True:
            found.append(find(len(found)))
    except SensorUnavailableError:
        return found


def windows_counters(
    system: str = sys.platform, find: Callable[[int], Adapter] = find_adapter, pdh: Any = None
) -> dict[str, Any]:
    """Windows' counters of GPU memory now: ``adapters`` and ``processes`` on each, and the ``reason`` for none.

    An adapter has ``uuid``, ``dedicated_bytes`` and ``shared_bytes``; a process ``gpu``, ``pid``, ``name``,
    ``dedicated_bytes``, ``local_bytes`` and ``non_local_bytes``. Unknown is None.
    """
    if system != "win32":
        return {"adapters": [], "processes": [], "reason": "only Windows has them"}
    try:
        every = adapters(find)
        known = [(each, Instance(None, each.luid, each.physical)) for each in every if each.luid is not None]
        if not known:
            reason = "no adapter's memory is managed by Windows (TCC)" if every else "CUDA's driver shows no GPU"
            return {"adapters": [], "processes": [], "reason": reason}
        return {**_read_pdh(known, pdh), "reason": None}
    except ModuleNotFoundError:
        return {"adapters": [], "processes": [], "reason": "pywin32 is not installed"}
    except Exception as error:
        return {"adapters": [], "processes": [], "reason": describe(error)}


def _read_pdh(known: list[tuple[Adapter, Instance]], pdh: Any) -> dict[str, Any]:
    """``known`` are the adapters, each with the instance of its counters that is of all processes together."""
    sensor = PdhMemory(known[0][0], pdh)
    try:
        found = sensor.everything()
    finally:
        sensor.close()
    rows: list[dict[str, Any]] = []
    people: list[dict[str, Any]] = []
    for adapter, whole in known:
        uuid = f"GPU-{adapter.uuid}"
        rows.append(
            {"uuid": uuid, **{f"{key}_bytes": _of(found, f"adapter_{key}", whole) for key in ("dedicated", "shared")}}
        )
        instances = {each for numbers in found.values() for each in numbers if each.pid is not None}
        for each in sorted(instances, key=lambda instance: instance.pid or 0):
            if replace(each, pid=None) == whole and each.pid != os.getpid():
                keys = ("dedicated", "local", "non_local")
                numbers = {f"{key}_bytes": _of(found, f"process_{key}", each) for key in keys}
                people.append({"gpu": uuid, "pid": each.pid, "name": program(each.pid or 0), **numbers})
    return {"adapters": rows, "processes": people}


def program(pid: int) -> str | None:
    """The name of the program that a process of this machine runs, or None."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, ValueError, OverflowError):
        return None


def _of(found: Mapping[str, Mapping[Instance, int]], key: str, instance: Instance) -> int | None:
    return found.get(key, {}).get(instance)
