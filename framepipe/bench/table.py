"""A record as rows of text: what the terminal shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framepipe.bench.noise import differs
from framepipe.bench.record import FAILED, OK, REFUSED, UNAVAILABLE, UNFINISHED
from framepipe.units import format_bytes, format_seconds

COLUMNS = ("", "frames/s", "least to most", "GB/s", "copy p50 / p99 ms", "CPU s/1000", "page-locked", "")
"""Headings; numbers stand between the first column and the last."""


@dataclass(frozen=True)
class Row:
    """One line: a text for each of `COLUMNS`. ``best`` marks the fastest strategy, ``told`` a cell without figures."""

    texts: tuple[str, ...]
    best: bool = False
    told: bool = False


@dataclass(frozen=True)
class Group:
    """The cells of one mode and input under a title."""

    title: str
    rows: tuple[Row, ...]


def groups(record: Mapping[str, Any]) -> list[Group]:
    """Every cell that can run here, the strategies first, each axis behind them beside the base."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in record["cells"]:
        found.setdefault((cell["axes"]["mode"], cell["axes"]["input"]), []).append(cell)
    made = [Group(_title(cells[0]["axes"]), tuple(_rows(cells))) for cells in found.values()]
    return [group for group in made if group.rows]


def closing(record: Mapping[str, Any]) -> Iterator[str]:
    """What cannot run here and why, what the runs warn of, and what a reader has to know."""
    reasons: dict[str, list[str]] = {}
    for cell in record["cells"]:
        if cell["status"] == UNAVAILABLE:
            names = reasons.setdefault(cell["reason"], [])
            if cell["axes"]["strategy"] not in names:
                names.append(cell["axes"]["strategy"])
    for reason, names in reasons.items():
        yield f"not here: {', '.join(names)} ({reason})"
    for warning, ids in _warnings(record).items():
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        yield f"warning: {ids[0]}{more}: {warning}"
    yield from _modelled(record)
    if not record["complete"]:
        yield "interrupted: not every repeat was made; --resume goes on"


def _modelled(record: Mapping[str, Any]) -> Iterator[str]:
    """What a memory model made of each strategy, in a line."""
    for cell in record["cells"]:
        if cell["varies"] not in ([], ["strategy"]):
            continue
        found = next((run["modelled"] for run in cell["runs"] if run.get("modelled")), None)
        if found is not None:
            pins = f"{found['pins']} pin{'s' if found['pins'] != 1 else ''}"
            refused = f"{found['refusals']} refused" if found["refusals"] else "none refused"
            yield (
                f"modelled by {found['name']}, not measured: {cell['id']}: {format_bytes(found['least_free'])} free at "
                f"least in {format_seconds(found['now_s'])} of video, {pins}, {refused}"
            )


def _warnings(record: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for cell in record["cells"]:
        for warning in dict.fromkeys(text for run in cell["runs"] for text in run["warnings"]):
            found.setdefault(warning, []).append(cell["id"])
    return found


def _title(axes: Mapping[str, Any]) -> str:
    size = f" {axes['width']}x{axes['height']} {axes['pix_fmt']}" if axes["width"] else ""
    what = "ready in memory to the device" if axes["mode"] == "staging" else "decode to result"
    return f"{axes['mode']}: {axes['input']}{size} on {axes['device']} ({what})"


def _rows(cells: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    here = [cell for cell in cells if cell["status"] != UNAVAILABLE]
    strategies = [cell for cell in here if cell["varies"] in ([], ["strategy"])]
    best = max((cell for cell in strategies if rates(cell)), key=_median, default=None)
    for cell in sorted(strategies, key=_median, reverse=True):
        yield _row(cell, cell["axes"]["strategy"], _against(cell, best, "the best"), best=cell is best)
    base = next((cell for cell in here if not cell["varies"]), None)
    for cell in here:
        if cell not in strategies:
            what = ", ".join(f"{name} {cell['axes'][name]}" for name in cell["varies"])
            usual = ", ".join(f"{name} {base['axes'][name]}" for name in cell["varies"]) if base else ""
            yield _row(cell, f"{cell['axes']['strategy']}, {what}", _against(cell, base, usual))


def rates(cell: Mapping[str, Any]) -> list[float]:
    """Frames a second of each repeat of a cell; empty for one whose figures count for nothing."""
    if cell["status"] not in (OK, UNFINISHED):
        return []
    return [run["fps"] for run in cell["runs"]]


def _median(cell: Mapping[str, Any]) -> float:
    rate = cell["summary"]["fps"]
    return float(rate["median"]) if rate and rates(cell) else 0.0


def _against(cell: Mapping[str, Any], other: Mapping[str, Any] | None, name: str) -> str:
    if cell["status"] not in (OK, UNFINISHED):
        return f"{cell['status']}: {cell['reason']}"
    if not rates(cell):
        return str(cell["status"])
    if other is None or not rates(other):
        return ""
    if cell is other:
        return "best"
    if not differs(rates(other), rates(cell)):
        return f"within noise of {name}"
    return f"{_median(cell) / _median(other):.2f} of {name}"


def _row(cell: Mapping[str, Any], name: str, against: str, *, best: bool = False) -> Row:
    summary = cell["summary"]
    rate, copy = summary["fps"], summary["copy_ms"]
    if not rate:
        return Row((name, *[""] * (len(COLUMNS) - 2), against), told=cell["status"] != UNFINISHED)
    texts = (
        name,
        _number(rate["median"]),
        f"{_number(rate['min'])} to {_number(rate['max'])}",
        f"{summary['bytes_per_s']['median'] / 1e9:.2f}",
        f"{copy['p50']:.3f} / {copy['p99']:.3f}" if copy else "",
        f"{summary['cpu_s_per_1000']:.2f}",
        _size(summary),
        against,
    )
    return Row(texts, best=best)


def _size(summary: Mapping[str, Any]) -> str:
    taken = summary["pinned_bytes_taken"]
    taken = summary["pinned_bytes_asked"] if taken is None else taken
    return "" if taken is None else format_bytes(taken)


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def failed(record: Mapping[str, Any]) -> bool:
    """Whether a cell failed that should have run, or its outputs were wrong."""
    return any(
        cell["status"] == FAILED or (cell["status"] == REFUSED and cell["hash"] is not None) for cell in record["cells"]
    )
