"""The checks of what stands around: WSL 2, containers, limits of locking, packages."""

from __future__ import annotations

from framepipe.doctor.check import CLAIM, ELSEWHERE, NOTE, VENDOR, Check, Found, Line, answer, has_gpu
from framepipe.doctor.measuring import pinned_rows
from framepipe.units import format_bytes


def wsl2(found: Found) -> Check:
    """Whether this is WSL 2, and what could be page-locked there."""
    if not found["wsl2"]:
        return answer("wsl2", "WSL 2", "this is not WSL 2")
    lines = [
        Line("the memory that can be page-locked is limited", VENDOR, "NVIDIA, CUDA on WSL guide, 5.1"),
        Line("users report limits of 0.5 to 1.1 GB for all processes together", CLAIM, "microsoft/WSL#14078, #8447"),
    ]
    rows = pinned_rows(found["measured"])
    had = [row["requested"] for row in rows if row["status"] == "ok"]
    refused = [row["requested"] for row in rows if row["status"] == "failed"]
    if had:
        lines.append(Line(f"a block of {format_bytes(max(had))} could be page-locked"))
    if refused:
        lines.append(Line(f"a block of {format_bytes(min(refused))} could not"))
    small = "WSL 2 page-locks little in all, for every process: keep slots and batch small"
    driver = "install no NVIDIA driver in Linux here: that of Windows serves both, and one inside breaks it"
    return answer("wsl2", "WSL 2", *lines, advice=(small, driver) if has_gpu(found) else (), status=NOTE)


def container(found: Found) -> Check:
    """The limits of the control group: memory and processor time."""
    memory, cpu = found["memory"], found["cpu"]
    limit, used = memory["cgroup_limit_bytes"], memory["cgroup_used_bytes"]
    lines, advice = [], []
    if limit is None:
        seen = "" if used is not None else " is seen"
        lines.append(Line(f"no limit of memory{seen} ({memory['cgroup']})"))
    else:
        cache = format_bytes(memory["cgroup_page_cache_bytes"] or 0)
        of = "" if used is None else f", {format_bytes(used)} of it used, {cache} of that by pages of files"
        lines.append(Line(f"limit {format_bytes(limit)}{of} ({memory['cgroup']}); `framepipe plan` goes by it"))
        lines.append(Line("page-locked memory is expected to count, as shared memory; not measured", CLAIM))
    usable = cpu["usable"] or cpu["logical"] or 1
    if cpu["quota"] and cpu["quota"] < usable:
        lines.append(Line(f"{cpu['quota']:g} CPUs of {usable} by quota"))
        threads = max(1, int(cpu["quota"]))
        advice.append(f"this container gets {cpu['quota']:g} CPUs of {usable}: set threads: {threads}")
    return answer("container", "container", *lines, advice=tuple(advice), status="ok" if limit is None else NOTE)


def page_lock(found: Found) -> Check:
    """What a process may lock by itself, which is not what CUDA may."""
    limit = found["memory"]["memlock_bytes"]
    if found["system"] == "win32":
        words = Line("the working set of a process is the limit for VirtualLock", VENDOR, "Microsoft, VirtualLock")
        half = Line(
            "what the GPU may pin is at most half of the memory, for all programs together",
            VENDOR,
            "Microsoft, Windows driver docs: Calculating graphics memory",
        )
        return answer("page_lock", "page-lock", words, *([half] if has_gpu(found) else []))
    said = "no limit" if limit is None else f"RLIMIT_MEMLOCK is {format_bytes(limit)}"
    said = f"{said}, for `staging: locked`"
    if not has_gpu(found) or found["wsl2"]:  # not known of WSL 2
        return answer("page_lock", "page-lock", said)
    free = Line("CUDA is not bound by it", ELSEWHERE, "pins beyond the limit, Linux, H200; NVIDIA's kernel modules")
    return answer("page_lock", "page-lock", said, free)


def packages(found: Found) -> Check:
    """Optional packages, and what they are for."""
    known = found["optional"]
    lines = [
        f"{name} {version or 'not installed'}" for name, version in known.items() if version or _wanted(name, found)
    ]
    advice = []
    if found["video"]["pyav"] is None:
        advice.append(f"PyAV cannot be imported ({found['video']['error']}): pip install av")
    if known["pyarrow"] is None:
        advice.append('for the parquet sink: pip install "framepipe[parquet]"')
    if has_gpu(found) and not all(known[name] for name in known if name != "pyarrow" and _wanted(name, found)):
        advice.append('for more readings of video memory: pip install "framepipe[telemetry]"')
    return answer("packages", "packages", ", ".join(lines), advice=tuple(advice))


def _wanted(name: str, found: Found) -> bool:
    return name != "pywin32" or found["system"] == "win32"
