"""The GPU as CUDA tells it. In a child process alone, so that the parent has no context."""

from __future__ import annotations

from typing import Any

import cupy as cp

from framepipe.hardware import driver_version
from framepipe.telemetry.adapter import find_adapter
from framepipe.telemetry.sensors import close_sensors, open_sensors, read_driver_model


def gpu(number: int) -> dict[str, Any]:
    """Name, identifiers, driver, driver model, versions and memory of CUDA device ``number``."""
    properties = cp.cuda.runtime.getDeviceProperties(number)
    name = properties["name"]
    adapter = find_adapter(number)
    sensors = open_sensors(number, adapter=adapter)
    try:
        model = read_driver_model(sensors, adapter)
    finally:
        close_sensors(sensors)
    return {
        "index": number,
        "count": int(cp.cuda.runtime.getDeviceCount()),
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "uuid": str(adapter.uuid),
        "pci_bus_id": adapter.pci_bus_id,
        "driver": driver_version(),
        "driver_model": model.as_json(),
        "cuda_driver": int(cp.cuda.runtime.driverGetVersion()),
        "cuda_runtime": int(cp.cuda.runtime.runtimeGetVersion()),
        "cupy": cp.__version__,
        "memory_bytes": int(properties["totalGlobalMem"]),
    }
