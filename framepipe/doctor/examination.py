"""The examination: facts, measurements, and the checks in the order in which one would go through them."""

from __future__ import annotations

import datetime
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from framepipe import __version__
from framepipe.doctor import checks_gpu, checks_media, checks_memory, checks_system, compiler, gpus, media, system
from framepipe.doctor.check import UNKNOWN, Check, Line
from framepipe.doctor.measuring import How, measure, measures
from framepipe.errors import ConfigError, OutputExistsError
from framepipe.hardware import is_wsl2
from framepipe.probe import record
from framepipe.telemetry.base import describe

SCHEMA = "framepipe.doctor/1"
OPTIONAL = ("pyarrow", "nvidia-ml-py", "pywin32")
BASELINE_ROUNDS = 5
"""So many repeats a side that ranks can be tested (`framepipe.bench.noise`)."""

CHECKS: tuple[Callable[[Mapping[str, Any]], Check], ...] = (
    checks_gpu.devices,
    checks_gpu.driver,
    checks_gpu.driver_model,
    checks_system.wsl2,
    checks_system.container,
    checks_memory.bus,
    checks_media.codecs,
    checks_media.hardware,
    checks_media.cupy,
    checks_system.page_lock,
    checks_memory.counters,
    checks_gpu.processes,
    checks_memory.churn,
    checks_memory.fallback,
    checks_memory.pinning,
    checks_system.packages,
)


def examine(how: How | None = None, found: dict[str, Any] | None = None) -> dict[str, Any]:
    """The record of this machine, schema ``framepipe.doctor/1``, as plain JSON values.

    Without ``how`` nothing is measured and ``measured`` is None; with it child processes measure for some seconds.
    ``checks`` are in order, ``advice`` is that of all of them, ``fingerprint`` is what a comparison says is not the
    same, and ``measures`` is what it judges. ``found`` are `facts` that are known already; they are added to. Raises
    `ConfigError` for a device that no machine has, and nothing else.
    """
    found = facts() if found is None else found
    before = gpus.windows_counters()
    found["measured"] = None
    if how is not None:
        used = {device["uuid"]: device["used_bytes"] for device in found["gpu"]["devices"] if device["uuid"]}
        found["measured"] = measure(how, wsl2=found["wsl2"], used_bytes=used)
    found["windows"] = [before, gpus.windows_counters() if how is not None else before]
    found["fingerprint"] = _fingerprint(found)
    found["measures"] = measures(found["measured"])
    checks = [_asked(check, found) for check in CHECKS]
    found["checks"] = [check.as_json() for check in checks]
    found["advice"] = [line for check in checks for line in check.advice]
    return found


def facts() -> dict[str, Any]:
    """What the system, its programs and its packages tell, before anything is measured."""
    gpu = gpus.examine()
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "framepipe": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "os": platform.platform(),
        "system": sys.platform,
        "wsl2": is_wsl2(),
        "cpu": system.processor(),
        "memory": system.memory(),
        "video": media.video(),
        "driver_libraries": media.driver_libraries(),
        "gpu": gpu,
        "processes": gpus.processes(),
        "cupy": compiler.cupy(gpu["driver"]),
        "optional": {name: compiler.version(name) for name in OPTIONAL},
    }
    found["device"], found["why"] = compiler.expected_device(found)
    return found


def _fingerprint(found: Mapping[str, Any]) -> dict[str, Any]:
    about = (found["measured"] or {}).get("machine", {})
    gpu = about.get("gpu") or {}
    keys = ("name", "uuid", "cuda_driver", "cuda_runtime", "cupy", "memory_bytes")
    models = [device["driver_model"] for device in found["gpu"]["devices"]]
    return {
        "os": found["os"],
        "wsl2": found["wsl2"],
        "cpu": found["cpu"]["model"],
        "cpus": found["cpu"]["usable"] or found["cpu"]["logical"],
        "memory_bytes": found["memory"]["total_bytes"],
        "driver": found["gpu"]["driver"],
        "driver_models": models,
        "gpu": {key: gpu.get(key) for key in keys} if gpu else None,
        "framepipe": found["framepipe"],
        "python": found["python"],
    }


def _asked(check: Callable[[Mapping[str, Any]], Check], found: Mapping[str, Any]) -> Check:
    try:
        return check(found)
    except Exception as error:  # a record that nobody thought of: the other checks still answer
        name = check.__name__
        return Check(name, name.replace("_", " "), UNKNOWN, (Line(f"could not be told: {describe(error)}"),))


def claim(path: Path, *, overwrite: bool) -> None:
    """See before measuring that a baseline can be saved. Raises `OutputExistsError` or `ConfigError`."""
    if path.is_dir():
        raise ConfigError(f"--save-baseline {path}: is a folder")
    if path.exists() and not overwrite:
        raise OutputExistsError(f"{path}: exists; --overwrite replaces it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # measuring takes minutes, and would be for nothing
            pass
    except OSError as error:
        raise ConfigError(f"--save-baseline {path}: {error.strerror}") from None


def save(found: Mapping[str, Any], path: Path) -> None:
    """Write a record for `framepipe compare`. Raises OSError."""
    record.replace(path, as_json(found))


def as_json(found: Mapping[str, Any]) -> str:
    """The record as text; what is not finite becomes null."""
    return record.as_json(found)
