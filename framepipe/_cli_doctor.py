"""``framepipe doctor`` for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framepipe.units import format_bytes


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The findings for people, line by line."""
    cpu, memory, video, gpu, cupy = (found[name] for name in ("cpu", "memory", "video", "gpu", "cupy"))
    yield f"framepipe  {found['framepipe']}, Python {found['python']}"
    yield f"system     {found['os']}{' (WSL)' if found['wsl'] else ''}"
    quota = f", {cpu['quota']:g} by quota" if cpu["quota"] else ""
    usable = f", {cpu['usable']} usable" if cpu["usable"] else ""
    cores = f"{_or(cpu['physical'])} cores, {_or(cpu['logical'])} threads{usable}{quota}"
    yield f"CPU        {cpu['model'] or cpu['machine']}: {cores}"
    limit = f", limit {format_bytes(memory['cgroup_limit_bytes'])}" if memory["cgroup_limit_bytes"] else ""
    total, available = format_bytes(memory["total_bytes"]), format_bytes(memory["available_bytes"])
    yield f"memory     {total}, {available} available{limit}"
    lock = memory["memlock_bytes"]
    if lock is not None:
        yield f"memlock    {format_bytes(lock) if isinstance(lock, int) else lock} (CUDA is not bound by it)"
    if video["pyav"]:
        yield f"PyAV       {video['pyav']}, FFmpeg {_or(video['ffmpeg'])}"
        yield f"libraries  {', '.join(f'{name} {number}' for name, number in video['libraries'].items())}"
        yield f"decoders   {' '.join(video['decoders'])}"
        yield f"encoders   {' '.join(video['encoders'])}"
        yield f"hardware   {' '.join(video['hardware']) or 'none'} (built in; the driver decides)"
    for number, device in enumerate(gpu["devices"]):
        size = format_bytes(device["memory_bytes"]) if device["memory_bytes"] else "memory unknown"
        model = f", {device['driver_model']}" if device["driver_model"] else ""
        yield f"GPU {number}      {device['name']}, {size}, compute capability {device['compute_capability']}{model}"
    yield f"driver     {gpu['driver'] or 'no NVIDIA driver'}"
    missing = "not installed"
    works = {True: "works", False: f"does not work: {cupy['error']}", None: missing}[cupy["works"]]
    yield f"CuPy       {' '.join([*(f'{name} {version}' for name, version in cupy['packages'].items()), works])}"
    yield f"optional   {', '.join(f'{name} {version or missing}' for name, version in found['optional'].items())}"
    yield f"device     auto will be {found['device']}: {found['why']}"
    for advice in found["advice"]:
        yield f"to do      {advice}"


def _or(value: Any) -> str:
    return "unknown" if value is None else str(value)
