"""What the machine is, asked in a child process: the parent holds no context on the device that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framepipe import registry
from framepipe.bench import _pictures, _work
from framepipe.device import select
from framepipe.hardware import cpus
from framepipe.memory_models import table as memory_models
from framepipe.report import versions
from framepipe.telemetry.base import Missing, Sensor
from framepipe.telemetry.sensors import close_sensors, open_sensors, read_driver_model


def examine(request: Mapping[str, Any]) -> dict[str, Any]:
    """The device that will be used, its strategies (with the reason why one cannot be), sensors and versions.

    Raises what choosing the device raises.
    """
    choice = select.choose(request["device"])
    device = choice.make()
    shared, name = device.host_shared, device.name
    memory_model, words = _model(choice)
    device.close()
    gpu: dict[str, Any] | None = None
    if choice.kind == "cuda":
        from framepipe.bench import _machine_cuda

        gpu = _machine_cuda.examine(choice.number)
    sensors = open_sensors(choice.number if gpu else None)
    try:
        model = read_driver_model(sensors)
        if gpu is not None:
            gpu["driver_model"] = model.as_json()["current"]
        return {
            "device": {
                "kind": choice.kind,
                "number": choice.number,
                "name": name,
                "why": choice.why,
                "shared": shared,
                **memory_model,
            },
            "gpu": gpu,
            "strategies": _strategies(request, choice.kind),
            "sensors": {
                **{f"{s.name}.{key}": f"{_source(s)}: {what}" for s in sensors for key, what in s.readings.items()},
                **words,
            },
            "missing": {s.name: s.reason for s in sensors if isinstance(s, Missing)},
            "versions": versions(),
            "cpus": cpus(),
            "cache_bytes": _pictures.cache_nbytes(),
        }
    finally:
        close_sensors(sensors)


def _source(sensor: Sensor) -> str:
    """Where a sensor reads; which control group that is would say much of a machine and nothing of the figures."""
    return "control group" if sensor.name == "cgroup" else sensor.source


def _model(choice: select.Choice) -> tuple[dict[str, Any], dict[str, str]]:
    """The memory model of a simulated device, and what its readings are; empty where there is none."""
    if not choice.model:
        return {}, {}
    model = memory_models.make(choice.model)
    words = {f"model.{key}": f"model {model.name}: {what}" for key, what in model.words.items()}
    return {"model": {"text": choice.model, **model.about()}}, words


def _strategies(request: Mapping[str, Any], kind: str) -> dict[str, str | None]:
    """Why each strategy cannot run on a device of this ``kind``; None for those that can."""
    names = request["strategies"] or registry.names("staging")
    return {name: _missing(name, kind, allow_code=request["allow_code"]) for name in names}


def _missing(name: str, kind: str, *, allow_code: bool) -> str | None:
    cls: Any = registry.find("staging", _work.strategy(name, allow_code=allow_code))
    missing: str | None = cls.missing(kind)
    return missing
