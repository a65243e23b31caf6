"""The record of a bench, schema ``framepipe.bench/1``: what ``bench.json`` holds.

A record is passed on: it names no folder, user or control group of the machine. Unknown is None, never 0 or NaN. Sizes
are bytes, times seconds unless the name says ``_ms``. A cell's ``runs`` has an entry a repeat; its ``summary`` has
medians over the repeats, with least and most for the rates.
"""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from framepipe import __version__
from framepipe.bench.cells import Cell, Input
from framepipe.hardware import cpu_name, driver_version
from framepipe.redact import without_folders

SCHEMA = "framepipe.bench/1"
OK, UNAVAILABLE, FAILED, REFUSED, UNFINISHED = "ok", "unavailable", "failed", "refused", "unfinished"
RATES = ("fps", "bytes_per_s")
DURATIONS = ("copy_ms", "allocate_ms", "release_ms", "upload_ms")
PERCENTILES = ("p50", "p95", "p99", "max")
_SAME_MACHINE = ("os", "cpu", "cpus", "memory_bytes", "framepipe", "python", "versions")
_SAME_GPU = ("name", "driver", "driver_model", "cuda", "cupy")


def new(
    cells: Sequence[Cell],
    inputs: Sequence[Input],
    machine: Mapping[str, Any],
    parameters: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    """A record with nothing measured yet; ``machine`` is what a child has found out."""
    return {
        "schema": SCHEMA,
        "notes": notes(machine),
        "complete": False,
        "provenance": _provenance(inputs, machine, parameters, command),
        "cells": [entry(cell) for cell in cells],
    }


def entry(cell: Cell) -> dict[str, Any]:
    """A cell's part of the record before anything is known of it."""
    return {
        "id": cell.id,
        "axes": asdict(cell.axes),
        "varies": list(cell.varies),
        "status": UNFINISHED,
        "reason": None,
        "hash": None,
        "runs": [],
        "summary": summary([]),
    }


def notes(machine: Mapping[str, Any]) -> list[str]:
    """What a reader has to know before any figure."""
    device = machine["device"]
    if machine["gpu"] is not None:
        return []
    why = device["why"].removeprefix("auto: ").split(": pip install")[0]
    if model := device.get("model"):
        return [
            f"readings named model.* are modelled by {model['name']} ({model['ground']}); none is measured here",
            f"device {device['kind']} ({why}): no other figure here says anything about a GPU",
        ]
    if device["kind"] != "cpu":
        return [f"device {device['kind']} ({why}): no figure here says anything about a GPU"]
    reason = "the CPU was asked for" if why == "asked for" else f"no GPU was used ({why})"
    return [f"{reason}: strategies ran on cpu, where no page-locked memory speeds up a copy to a device"]


def _provenance(
    inputs: Sequence[Input], machine: Mapping[str, Any], parameters: Mapping[str, Any], command: str
) -> dict[str, Any]:
    return {
        "command": without_folders(command),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "framepipe": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cpus": machine["cpus"],
        "cache_bytes": machine["cache_bytes"],
        "memory_bytes": int(psutil.virtual_memory().total),
        "device": dict(machine["device"]),
        "gpu": _gpu(machine["gpu"], machine["device"]["number"]),
        "versions": dict(machine["versions"]),
        "sensors": dict(machine["sensors"]),
        "load": load(),
        "clips": [dict(facts) for given in inputs for facts in given.facts],
        "parameters": dict(parameters),
    }


def _gpu(gpu: Mapping[str, Any] | None, number: int) -> dict[str, Any] | None:
    if gpu is None:
        return None
    device = {key: value for key, value in gpu.items() if key != "free_bytes"}
    return {**device, "driver": driver_version(), "number": number}


def load() -> list[float] | None:
    """The system's load averages; None on Windows, which has none at first."""
    if psutil.WINDOWS:
        return None
    return [round(value, 2) for value in psutil.getloadavg()]


# -- summaries --


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The middle of a cell's repeats; None where nothing was measured."""
    frames_s = [1000 * run["cpu_s"] / run["frames"] for run in runs]
    return {
        **{name: spread(run[name] for run in runs) for name in RATES},
        **{name: _percentiles(runs, name) for name in DURATIONS},
        "cpu_s_per_1000": middle(frames_s),
        "pinned_bytes_asked": middle(run["pinned_bytes_asked"] for run in runs),
        "pinned_bytes_taken": middle(run["pinned_bytes_taken"] for run in runs),
        "vram_peak_bytes": middle(map(vram_peak, runs)),
        "start_s": middle(run["start_s"] for run in runs),
    }


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """``median``, ``min`` and ``max``; None of no values."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _percentiles(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None] | None:
    known = [run[name] for run in runs if run[name]]
    return {key: middle(one[key] for one in known) for key in PERCENTILES} if known else None


def vram_peak(run: Mapping[str, Any]) -> int | None:
    """Bytes of device memory in use at the peak beyond those at rest, by CUDA's count of what is free."""
    free = run["memory"].get("cuda.free")
    if not free or free["rest"] is None or free["least"] is None:
        return None
    return max(0, int(free["rest"]) - int(free["least"]))


# -- going on where another bench ended --


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why results of ``before`` cannot stand beside those of ``now``: each as one line; empty where they can."""
    old, new = before["provenance"], now["provenance"]
    pairs = [(f"parameters.{name}", old["parameters"].get(name), value) for name, value in new["parameters"].items()]
    pairs += [(name, old.get(name), new.get(name)) for name in _SAME_MACHINE]
    pairs += [("device", old.get("device"), new["device"])]
    ours, theirs = old.get("gpu") or {}, new["gpu"] or {}
    pairs += [(f"gpu.{name}", ours.get(name), theirs.get(name)) for name in _SAME_GPU]
    pairs += [("clips", _hashes(old), _hashes(new))]
    pairs += [("cells", [each["id"] for each in before["cells"]], [each["id"] for each in now["cells"]])]
    return [_difference(name, was, here) for name, was, here in pairs if was != here]


def _difference(name: str, was: Any, here: Any) -> str:
    if name in ("clips", "cells"):
        return f"{name} are not the same"
    return f"{name} was {was!r} and is {here!r}"


def _hashes(provenance: Mapping[str, Any]) -> list[str | None]:
    return [clip.get("sha256") for clip in provenance.get("clips", ())]


def adopt(record: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Take over what ``before`` has measured; interrupted and failed cells are tried again."""
    measured = {each["id"]: each for each in before["cells"]}
    for each in record["cells"]:
        old = measured[each["id"]]
        each.update(hash=old["hash"], runs=list(old["runs"]))
    record["provenance"]["started"] = before["provenance"]["started"]
    record["provenance"]["seconds"] = before["provenance"]["seconds"]
