"""Reading a bench record that may lack anything: groups of cells, their repeats, words and units for figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeGuard

from framepipe.units import format_bytes

SWEPT = ("batch", "depth", "slots", "fillers", "copy_threads")
"""Axes of how frames are staged, as opposed to which frames and by which strategy."""
NO_BREAK = "\u202f"  # narrow: between a figure and its unit
TIMES = "\u00d7"
DASH = "\u2013"
MICROSECONDS = "\u00b5s"

Cell = Mapping[str, Any]


def cells(record: Mapping[str, Any]) -> list[Cell]:
    """The cells of a record."""
    return [cell for cell in record.get("cells") or () if isinstance(cell, Mapping)]


def axis(cell: Cell, name: str) -> Any:
    """Where a cell stands on an axis, or None."""
    return (cell.get("axes") or {}).get(name)


def samples(cell: Cell, measure: str) -> list[float]:
    """The repeats of one measure of a cell; what only the summary knows counts as a single repeat."""
    found = [run.get(measure) for run in cell.get("runs") or ()]
    known = (cell.get("summary") or {}).get(measure)
    known = known.get("median") if isinstance(known, Mapping) else known
    return [each for each in found if _is_number(each)] or ([known] if _is_number(known) else [])


def latency(cell: Cell, what: str) -> dict[str, float]:
    """p50, p95, p99 and max of ``copy_ms`` and the like: medians over the repeats; {} where nothing is known."""
    found: dict[str, float] = {}
    for at in ("p50", "p95", "p99", "max"):
        values = [(run.get(what) or {}).get(at) for run in cell.get("runs") or ()]
        values.append(
            ((cell.get("summary") or {}).get(what) or {}).get(at) if not any(map(_is_number, values)) else None
        )
        known = middle([value for value in values if _is_number(value)])
        if known is not None:
            found[at] = known
    return found


def middle(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return median(values) if values else None


def typical_run(cell: Cell) -> Mapping[str, Any] | None:
    """The repeat whose rate is nearest to the median and that has a timeline; None if none has."""
    runs = [run for run in cell.get("runs") or () if (run.get("timeline") or {}).get("t_s")]
    wanted = middle(samples(cell, "fps")) or 0.0
    return min(runs, key=lambda run: abs((run.get("fps") or 0.0) - wanted), default=None)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# -- groups --


def groups(record: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """Cells that had the same work to do, by what that was: mode, input and device."""
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells(record):
        found.setdefault(tuple(str(axis(cell, name)) for name in ("mode", "input", "device")), []).append(cell)
    titled: dict[str, list[Cell]] = {}
    for group in found.values():
        titled.setdefault(_work(group), []).extend(group)
    return titled


def _work(group: Sequence[Cell]) -> str:
    """What the cells of a group had to do; sizes are of the first that knows them."""

    def known(name: str) -> Any:
        return next((value for cell in group if (value := axis(cell, name)) is not None), None)

    width, height = known("width"), known("height")
    size = f"{width}{TIMES}{height}" if width and height else None
    parts = (known("mode"), known("input"), size, known("pix_fmt"), known("device"))
    return ", ".join(str(part) for part in parts if part is not None) or "unknown work"


def base_cells(group: Iterable[Cell]) -> list[Cell]:
    """Of a group the cells that differ in their strategy at most, the fastest first, those without a rate last."""
    found = [cell for cell in group if not set(cell.get("varies") or ()) & set(SWEPT)]
    return sorted(found, key=lambda cell: -(middle(samples(cell, "fps")) or -1.0))


def sweeps(group: Sequence[Cell]) -> dict[str, list[Cell]]:
    """By axis, the cells that vary it alone, with the one they start from among them, in the order of the axis."""
    found: dict[str, list[Cell]] = {}
    for name in SWEPT:
        varied = [cell for cell in group if set(cell.get("varies") or ()) & set(SWEPT) == {name}]
        strategies = {str(axis(cell, "strategy")) for cell in varied}
        start = [cell for cell in base_cells(group) if str(axis(cell, "strategy")) in strategies]
        each = [cell for cell in [*start, *varied] if samples(cell, "fps")]
        if len({str(axis(cell, name)) for cell in each}) > 1:
            found[name] = sorted(each, key=lambda cell: _order(axis(cell, name)))
    return found


def _order(value: Any) -> tuple[float, str]:
    return (value, "") if _is_number(value) else (math.inf, str(value))


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values inside a JSON value with their dotted names: ``gpu.driver``, ``clips.0.sha256``."""
    parts: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield prefix, value
        return
    for key, part in parts:
        yield from leaves(part, f"{prefix}.{key}" if prefix else str(key))


# -- figures in words --


def number(value: float | None) -> str:
    """Three digits at least: ``1,240``, ``847``, ``84.7``, ``0.0123``; a dash for None."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def figure(value: Any, unit: str) -> str:
    """A value with its unit, ``bytes_per_s`` in GB/s and a small part of a ``ms`` in microseconds; a dash for None."""
    if not _is_number(value):
        return DASH
    if unit == "bytes":
        return format_bytes(value).replace(" ", NO_BREAK)
    if unit == "bytes_per_s":
        value, unit = value / 1e9, "GB/s"
    if unit == "ms" and 0 < abs(value) < 0.1:
        value, unit = value * 1e3, MICROSECONDS
    return f"{number(value)}{NO_BREAK}{unit}"


def plain(name: str, value: Any) -> str:
    """A value of the record for people, its unit taken from the end of its name."""
    if value is None:
        return "none" if name == "gpu" else "unknown"
    if isinstance(value, bool) or not _is_number(value):
        return str(value)
    last = name.rsplit(".", 1)[-1]
    for ending, unit in (("bytes_per_s", "bytes_per_s"), ("bytes", "bytes"), ("_ms", "ms"), ("_s", "s")):
        if last.endswith(ending):
            return figure(value, unit)
    return figure(value, "s") if last == "seconds" else f"{value:g}" if isinstance(value, float) else str(value)
