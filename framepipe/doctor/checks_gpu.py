"""The checks of GPU, driver and driver model, and of who else is on the GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from framepipe.doctor.check import CLAIM, NOTE, UNKNOWN, VENDOR, Check, Found, Line, answer, has_gpu
from framepipe.units import format_bytes

_SHOWN = 8
_NVML = "NVIDIA, NVML reference, nvmlDriverModel_t"


def devices(found: Found) -> Check:
    """Which GPUs there are, and how much of their memory is free."""
    gpu = found["gpu"]
    if not gpu["devices"]:
        if has_gpu(found):
            return answer("devices", "GPU", f"CuPy finds one; {gpu['reason']}", status=NOTE)
        status = UNKNOWN if gpu["driver"] else NOTE
        return answer("devices", "GPU", f"none is seen: {gpu['reason'] or 'no reason is given'}", status=status)
    lines: list[Line | str] = [_device(number, device) for number, device in enumerate(gpu["devices"])]
    if len({device["name"] for device in gpu["devices"]}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        words = "these numbers are nvidia-smi's; CUDA counts from the one that it takes for the fastest"
        lines.append(Line(words, VENDOR, "NVIDIA, CUDA programming guide, CUDA_DEVICE_ORDER"))
    return answer("devices", "GPU", *lines)


def _device(number: int, device: Mapping[str, Any]) -> str:
    size = format_bytes(device["memory_bytes"]) if device["memory_bytes"] else "memory unknown"
    free = f", {format_bytes(device['free_bytes'])} free" if device["free_bytes"] is not None else ""
    capability = device["compute_capability"] or "unknown"
    return f"{number}: {device['name']}, {size}{free}, compute capability {capability}"


def driver(found: Found) -> Check:
    """The version of the NVIDIA driver."""
    gpu = found["gpu"]
    if gpu["driver"]:
        return answer("driver", "driver", f"NVIDIA {gpu['driver']}")
    return answer("driver", "driver", "there is no NVIDIA driver that can be seen", status=NOTE)


def driver_model(found: Found) -> Check:
    """Whether Windows manages the GPU's memory (WDDM, MCDM) or the driver does (TCC), now and after the next boot."""
    known = found["gpu"]["devices"]
    if found["system"] != "win32":
        words = "there is none: this is not Windows"
        where = Line(
            "in WSL 2 the GPU is driven by Windows' driver, under WDDM", VENDOR, "NVIDIA, CUDA on WSL guide, 5"
        )
        return answer("driver_model", "driver model", words, *([where] if found["wsl2"] else []))
    if not known:
        return answer("driver_model", "driver model", "no GPU is seen whose model could be told", status=UNKNOWN)
    lines = [_model(number, device) for number, device in enumerate(known)]
    models = {device["driver_model"] for device in known}
    if None in models:
        return answer("driver_model", "driver model", *lines, status=UNKNOWN)
    changing = any(device["pending_driver_model"] not in (None, device["driver_model"]) for device in known)
    return answer("driver_model", "driver model", *lines, *_meaning(models), status=NOTE if changing else "ok")


def _model(number: int, device: Mapping[str, Any]) -> str:
    now, later = device["driver_model"], device["pending_driver_model"]
    if now is None:
        return f"{number}: nvidia-smi does not tell it"
    if later not in (None, now):
        return f"{number}: {now}, and {later} after the next start of Windows"
    return f"{number}: {now}"


def _meaning(models: set[str | None]) -> list[Line]:
    lines = []
    if "WDDM" in models:
        lines.append(
            Line(
                "under WDDM Windows manages video memory; page-locked memory counts against a budget that all share",
                VENDOR,
                "Microsoft, Windows driver docs: GPU segments, Calculating graphics memory",
            )
        )
    if models & {"WDDM", "TCC"}:
        lines.append(
            Line(
                "for a GPU without a display NVIDIA prefers MCDM now; TCC is deprecated, and not every model has it",
                VENDOR,
                _NVML,
            )
        )
    return lines


def processes(found: Found) -> Check:
    """Who else uses the GPUs, and how much; nobody is ended."""
    if not has_gpu(found):
        return answer("processes", "who else", "there is no GPU that anybody could use")
    rows = _users(found)
    known = found["processes"]
    if not rows:
        if known["reason"]:
            return answer("processes", "who else", f"{known['source']}: {known['reason']}", status=UNKNOWN)
        if found["wsl2"]:  # where an empty list says nothing
            words = Line("in WSL 2 processes cannot be asked for", VENDOR, "NVIDIA, CUDA on WSL guide, 5.2")
            return answer("processes", "who else", words, *_held(found, 0), status=UNKNOWN)
        return answer("processes", "who else", f"nobody, by {known['source']}", *_held(found, 0))
    lines = [_user(row) for row in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"and {len(rows) - _SHOWN} more")
    named = sum(row["nbytes"] or 0 for row in rows)
    return answer("processes", "who else", *lines, *_held(found, named), status=NOTE)


def _users(found: Found) -> list[dict[str, Any]]:
    """By size, the largest first. Under WDDM NVML knows the processes, and Windows' counters what they hold."""
    windows = {(row["gpu"], row["pid"]): row for row in found["windows"][-1]["processes"]}
    rows = []
    for row in found["processes"]["rows"]:
        told = windows.get((row["gpu"], row["pid"]), {}).get("local_bytes")
        rows.append({**row, "nbytes": told if row["nbytes"] is None else row["nbytes"]})
    listed = {(row["gpu"], row["pid"]) for row in rows}
    rows += [
        {**row, "nbytes": row["local_bytes"]}
        for key, row in windows.items()
        if key not in listed and row["local_bytes"]
    ]
    return sorted(rows, key=lambda row: -(row["nbytes"] or 0))


def _user(row: Mapping[str, Any]) -> str:
    size = "an unknown amount" if row["nbytes"] is None else format_bytes(row["nbytes"])
    name = f" ({row['name']})" if row["name"] else ""
    return f"process {row['pid']}{name} holds {size}"


def _held(found: Found, named: int) -> list[Line]:
    """What is used and belongs to no process that is listed: in a container those of the machine are not."""
    used = sum(device["used_bytes"] or 0 for device in found["gpu"]["devices"])
    rest = used - named
    if rest < 512 << 20:
        return []
    words = f"{format_bytes(rest)} are used beside that, by the driver or by processes that are not listed here"
    if found["system"] != "linux" or found["wsl2"]:
        return [Line(words)]
    source = "users report that NVML does not list a machine's processes to a container: NVIDIA/nvidia-docker#1483"
    return [Line(words), Line("in a container, other processes may be hidden", CLAIM, source)]
