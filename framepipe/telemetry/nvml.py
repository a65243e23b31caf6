"""Device memory as the NVIDIA Management Library sees it, through ``pynvml`` (package nvidia-ml-py)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from framepipe.telemetry.adapter import Adapter
from framepipe.telemetry.base import Sensor, SensorUnavailableError, describe
from framepipe.telemetry.system import DriverModel, DriverModelReading

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's own process namespace (PROC_PID_INIT_INO in Linux, include/linux/proc_ns.h)."""


class NvmlMemory(Sensor):
    """NVML: memory of the whole device, and what this process has of it.

    ``used``, ``free``, ``total`` and ``reserved`` are of the device, whoever uses it; drivers older than 510 count
    what is reserved as used and do not tell it. ``process_used`` is this process's, from the lists of compute and
    graphics processes; it is None under WDDM, where Windows manages the memory, in WSL 2, and inside a container,
    since NVML lists the machine's process numbers and not the container's. The device is found by its UUID: NVML
    numbers devices otherwise than CUDA, and does not know CUDA_VISIBLE_DEVICES. No context is needed.

    Raises `SensorUnavailableError`, and `ModuleNotFoundError` without ``pynvml``.
    """

    name = "nvml"
    source = "NVML"
    readings = MappingProxyType(
        {
            "used": "nvmlDeviceGetMemoryInfo used",
            "free": "nvmlDeviceGetMemoryInfo free",
            "total": "nvmlDeviceGetMemoryInfo total",
            "reserved": "nvmlDeviceGetMemoryInfo_v2 reserved",
            "process_used": "nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
        }
    )

    def __init__(self, adapter: Adapter, library: Any = None, pid: int | None = None) -> None:
        super().__init__()
        self._nvml = importlib.import_module("pynvml") if library is None else library
        self._pid = os.getpid() if pid is None else pid
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise SensorUnavailableError(f"NVML does not start: {error}") from error
        try:
            self._handle = self._find(adapter)
        except SensorUnavailableError:
            self._nvml.nvmlShutdown()
            raise

    def _find(self, adapter: Adapter) -> Any:
        # CUDA gives a MIG instance the same kind of number as a GPU; NVML wants to be told which it is.
        for kind in ("GPU", "MIG"):
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{adapter.uuid}")
            except self._nvml.NVMLError as error:
                failed = error
        raise SensorUnavailableError(f"NVML does not know the device {adapter.uuid}: {failed}") from failed

    def _read(self) -> Mapping[str, int | str]:
        found: dict[str, int | str] = {}
        try:
            found.update(self._memory())
        except self._nvml.NVMLError as error:  # NOT_SUPPORTED where device and host share their memory
            found.update(dict.fromkeys(("used", "free", "total", "reserved"), describe(error)))
        found["process_used"] = self._process_used()
        return found

    def _memory(self) -> dict[str, int | str]:
        keys = ("used", "free", "total")
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)
        except self._nvml.NVMLError_FunctionNotFound:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            old = "this driver counts reserved memory as used"
            return {**{key: int(getattr(memory, key)) for key in keys}, "reserved": old}
        return {key: int(getattr(memory, key)) for key in (*keys, "reserved")}

    def _process_used(self) -> int | str:
        if not _sees_machine_pids():
            return "NVML lists process numbers of the machine, and this process only knows its number in a container"
        lists = (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses)
        try:
            own = [row.usedGpuMemory for get in lists for row in get(self._handle) if row.pid == self._pid]
        except self._nvml.NVMLError as error:
            return describe(error)
        if not own:
            return "NVML does not list this process: it has no context on the device yet"
        known = [int(nbytes) for nbytes in own if nbytes is not None]
        # A process that computes and draws stands in both lists, each time with all it has.
        return max(known) if known else "NVML cannot tell it: under WDDM Windows manages the memory"

    def driver_model(self) -> DriverModelReading:
        """The driver model of the device; None with a reason outside Windows. Never raises."""
        source = "nvmlDeviceGetDriverModel_v2"
        try:
            try:
                models = self._nvml.nvmlDeviceGetDriverModel_v2(self._handle)
            except self._nvml.NVMLError_FunctionNotFound:
                source = "nvmlDeviceGetDriverModel"
                models = self._nvml.nvmlDeviceGetDriverModel_v1(self._handle)
            current, pending = (DriverModel(model) for model in models)
        except Exception as error:  # NOT_SUPPORTED outside Windows, or a model that is not known here
            return DriverModelReading(None, None, source, describe(error))
        return DriverModelReading(current, pending, source)

    def _close(self) -> None:
        self._nvml.nvmlShutdown()


def _sees_machine_pids(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether process numbers here are the machine's: not so in a container with process numbers of its own."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        return namespace.stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
