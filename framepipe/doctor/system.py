"""Processor and memory, and what a container leaves of them."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from framepipe import pagelock
from framepipe.hardware import cpu_name
from framepipe.telemetry.base import SensorUnavailableError
from framepipe.telemetry.cgroup import CgroupMemory

_ROOT = Path("/")


def processor(root: Path = _ROOT) -> dict[str, Any]:
    """Model, counts, how many this process may use, and the quota of its control group (all None where unknown)."""
    import psutil

    return {
        "model": cpu_name(root / "proc" / "cpuinfo"),
        "machine": platform.machine(),
        "logical": psutil.cpu_count(),
        "physical": psutil.cpu_count(logical=False),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quota": _quota(root),
    }


def _quota(root: Path) -> float | None:
    """CPUs that a container may use in the long run, from cgroup version 2."""
    words = (_group_value(root, "cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _group_value(root: Path, name: str) -> str | None:
    """A value of this process's control group, or of the nearest one above that has it."""
    own = re.search(r"^0::(/.*)$", _read(root / "proc" / "self" / "cgroup") or "", re.MULTILINE)
    if own is None:
        return None
    mount = root / "sys" / "fs" / "cgroup"
    at = mount / own[1].lstrip("/")
    for folder in (at, *at.parents):
        if text := _read(folder / name):
            return text
        if folder == mount:
            break
    return None


def memory(root: Path = _ROOT) -> dict[str, Any]:
    """Total and available bytes, limit and use of the control group, and what the process may lock by itself."""
    import psutil

    found = psutil.virtual_memory()
    return {
        "total_bytes": int(found.total),
        "available_bytes": int(found.available),
        **_group_memory(root, int(found.total)),
        "memlock_bytes": pagelock.limit_bytes(),
    }


def _group_memory(root: Path, total: int) -> dict[str, Any]:
    try:
        sensor = CgroupMemory(root / "proc" / "self" / "cgroup", root / "sys" / "fs" / "cgroup")
    except (SensorUnavailableError, OSError) as error:
        return {"cgroup_limit_bytes": None, "cgroup_used_bytes": None, "cgroup": str(error)}
    found = sensor.read()
    sensor.close()
    limit = found["limit"]
    # One above what the machine has is none.
    return {
        "cgroup_limit_bytes": limit if limit is not None and limit < total else None,
        "cgroup_used_bytes": found["current"],
        "cgroup": sensor.source,
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
