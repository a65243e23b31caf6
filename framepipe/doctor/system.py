"""Processor and memory, and what a container leaves of them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framepipe import pagelock
from framepipe.hardware import cpu_name
from framepipe.telemetry.base import SensorUnavailableError
from framepipe.telemetry.cgroup import CgroupMemory

_ROOT = Path("/")
_CPU_GROUPS = (
    (r"^0::(/.*)$", "", ("cpu.max",)),
    (r"^\d+:(?:[^:]*,)?cpu(?:,[^:]*)?:(/.*)$", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)
"""Of versions 2 and 1: the line of /proc/self/cgroup, the mount, and the files with quota and period."""


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
    """CPUs that may be used in the long run: the lowest quota of the process's control group and those above it."""
    groups, found = _read(root / "proc" / "self" / "cgroup") or "", []
    for line, mount, names in _CPU_GROUPS:
        own = re.search(line, groups, re.MULTILINE)
        for folder in _upwards(root / "sys" / "fs" / "cgroup" / mount, own[1]) if own else ():
            words = " ".join(_read(folder / name) or "" for name in names).split()
            if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # neither "max" nor -1
                found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    at = mount / path.lstrip("/")
    for folder in (at, *at.parents):
        yield folder
        if folder == mount:
            return


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
        nothing = dict.fromkeys(("cgroup_limit_bytes", "cgroup_used_bytes", "cgroup_page_cache_bytes"))
        return {**nothing, "cgroup": str(error)}
    found = sensor.read()
    sensor.close()
    limit = found["limit"]
    # One above what the machine has is none.
    return {
        "cgroup_limit_bytes": limit if limit is not None and limit < total else None,
        "cgroup_used_bytes": found["current"],
        "cgroup_page_cache_bytes": sensor.page_cache(),
        "cgroup": sensor.source,
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
