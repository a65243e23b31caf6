"""How much memory there is for a run, each number with its ground; and what a run must not begin with."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from framepipe import budget, pagelock
from framepipe.budget import HOST, Need, Setup
from framepipe.chain import Chain
from framepipe.device.base import Device
from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec
from framepipe.hardware import WSL2_RING_NBYTES, is_wsl2
from framepipe.telemetry.base import Sensor, SensorUnavailableError, describe
from framepipe.telemetry.cgroup import CgroupMemory
from framepipe.units import format_bytes

_KMT = "D3DKMTQueryVideoMemoryInfo"
Ground = Literal["measured now", "model", "set", "reported by users"]


@dataclass(frozen=True, slots=True)
class Limit:
    """``free`` of ``total`` bytes for needs of these ``kinds``; None with a ``reason`` where nobody knows.

    ``source`` is who says so. A run that needs more than a ``hard`` one is not begun, and an
    ``unlimited`` one is none.
    """

    name: str
    free: int | None
    total: int | None
    kinds: tuple[str, ...]
    ground: Ground
    source: str
    reason: str | None = None
    hard: bool = False
    unlimited: bool = False

    def lacks(self, needs: Collection[Need]) -> int:
        """How many bytes more are needed than there are; 0 or less where it fits, or where nobody knows."""
        return 0 if self.free is None else budget.total(needs, *self.kinds) - self.free


def of_host(kinds: tuple[str, ...] = HOST) -> list[Limit]:
    """The machine's memory and, under Linux, the container's, for needs of these kinds. Never raises.

    Costs a millisecond at most.
    """
    return [_memory(kinds), *([_container(kinds)] if sys.platform.startswith("linux") else [])]


def of_device(device: Device) -> list[Limit]:
    """What the device itself has read, or what its model says."""
    found = []
    for reading in device.vram():
        modelled = bool(reading.get("modelled"))
        ground: Ground = "model" if modelled else "measured now"
        source = str(reading.get("source")).removeprefix("model ")
        found.append(_video(reading.get("free"), reading.get("total"), ground, source, hard=not modelled))
        if "non_local_budget" in reading:
            found.append(_budget("non-local", "pinned", "non_local", reading, ground, source))
    return found


def of_sensor(sensor: Sensor) -> list[Limit]:
    """What NVML and Windows say of video memory; a row with the reason where one of them cannot be asked."""
    if sensor.name == "wddm" and sys.platform != "win32":
        return []
    now = sensor.read()

    def why(key: str) -> str | None:
        return sensor.reasons.get(key, sensor.reason)

    if sensor.name == "wddm":
        return [
            _budget(name, kind, key, now, "measured now", _KMT, why(f"{key}_budget"))
            for name, kind, key in (("local", "device", "local"), ("non-local", "pinned", "non_local"))
        ]
    return [_video(now.get("free"), now.get("total"), "measured now", "NVML", why("free"))]


def _video(
    free: int | None, total: int | None, ground: Ground, source: str, reason: str | None = None, *, hard: bool = False
) -> Limit:
    """Free video memory; nonsense is no number."""
    if free is not None and (free < 0 or (total is not None and free > total)):
        free, reason = None, f"nonsense was told: {free} bytes free of {total}"
    why = (reason or "it was not told") if free is None else None
    return Limit("video memory", free, total, ("device",), ground, source, why, hard=hard)


def _budget(
    name: str, kind: str, key: str, now: Mapping[str, int | None], ground: Ground, source: str, why: str | None = None
) -> Limit:
    """What a segment's budget leaves."""
    most, used = now.get(f"{key}_budget"), now.get(f"{key}_usage")
    if most is None or used is None:
        return Limit(f"{name} budget", None, most, (kind,), ground, source, why or "it was not told")
    return Limit(f"{name} budget", max(0, most - used), most, (kind,), ground, source)


def of_locking(setup: Setup, needs: Collection[Need]) -> list[Limit]:
    """What bounds page-locking alone, where it is needed: the system's limit where the system locks, and WSL 2."""
    if not budget.total(needs, "pinned"):
        return []
    if setup.host_shared:
        limit = pagelock.limit_bytes()
        return [] if limit is None else [Limit("page-lock limit", limit, limit, ("pinned",), "set", "RLIMIT_MEMLOCK")]
    if not is_wsl2():
        return []
    return [
        Limit(
            "page-locked memory in WSL 2",
            WSL2_RING_NBYTES,
            WSL2_RING_NBYTES,
            ("pinned",),
            "reported by users",
            "0.5 to 1 GB in all",
        )
    ]


def _memory(kinds: tuple[str, ...]) -> Limit:
    import psutil

    memory = psutil.virtual_memory()
    source = "psutil.virtual_memory().available"
    return Limit("memory", memory.available, memory.total, kinds, "measured now", source, hard=True)


def _container(kinds: tuple[str, ...]) -> Limit:
    try:
        sensor = CgroupMemory()
    except SensorUnavailableError as error:
        return Limit("container", None, None, kinds, "measured now", "cgroup", str(error), unlimited=True)
    except (OSError, ValueError) as error:
        return Limit("container", None, None, kinds, "measured now", "cgroup", describe(error))
    now = sensor.read()
    limit, current = now["limit"], now["current"]
    if limit is None or current is None:
        none = current is not None
        return Limit("container", None, limit, kinds, "measured now", sensor.source, sensor.reason, unlimited=none)
    # Pages of files are charged and are given up before anything else has to go.
    free = max(0, limit - max(0, current - sensor.page_cache()))
    return Limit("container", free, limit, kinds, "measured now", sensor.source, hard=True)


def exceeded(needs: Collection[Need], limits: Iterable[Limit]) -> list[Limit]:
    """The limits that a run with these needs is not begun with."""
    return [limit for limit in limits if limit.hard and limit.lacks(needs) > 0]


def refuse(chains: Sequence[Chain], setup: Setup, sources: Mapping[FrameSpec, int], limits: Iterable[Limit]) -> None:
    """Raise `ConfigError` with the numbers and what would help where more is needed than is measured free."""
    needs = budget.needs(chains, setup, sources)
    problems = [f"{verdict(limit, needs)}{_helps(chains, setup, sources, limit)}" for limit in exceeded(needs, limits)]
    if problems:
        raise ConfigError(
            f"this pipeline needs more memory than there is: {'; '.join(problems)}; 'framepipe plan' tells more, and "
            "--force (check_memory=False) runs it all the same",
            problems,
        )


def verdict(limit: Limit, needs: Collection[Need]) -> str:
    """A limit that is exceeded, in words with the numbers."""
    needed = budget.total(needs, *limit.kinds)
    return (
        f"{format_bytes(needed)} of {limit.name} needed, {format_bytes(limit.free or 0)} free ({limit.source}), "
        f"{format_bytes(limit.lacks(needs))} too much"
    )


def _helps(chains: Sequence[Chain], setup: Setup, sources: Mapping[FrameSpec, int], limit: Limit) -> str:
    saved = [(knob.saves(*limit.kinds), knob.change) for knob in budget.knobs(chains, setup, sources)]
    best = [f"{change} saves {format_bytes(nbytes)}" for nbytes, change in sorted(saved)[:-4:-1] if nbytes > 0]
    words = ", ".join(best)
    return f" ({words})" if words else ""
