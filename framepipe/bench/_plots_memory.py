"""The plots of memory: over time by strategy, and what is page-locked against the rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from framepipe.bench import _svg as svg
from framepipe.bench._plots import measured, name_of, panel
from framepipe.bench._reading import DASH, Cell, axis, figure, middle, number, samples, typical_run

_POINTS = 200
_TOP, _BOTTOM = 12, 124
_LEAST = 2e6
"""Bytes that a scale has at least, so that a few pages do not look like a rise."""


# -- over time --


def columns(cells: Sequence[Cell]) -> list[str]:
    """The readings that any of the cells' timelines has a number of."""
    found: dict[str, None] = {}
    for cell in cells:
        for name, values in _timeline(cell).get("columns", {}).items():
            if any(value is not None for value in values or ()):
                found[name] = None
    return sorted(found)


def is_flat(cells: Sequence[Cell], column: str) -> bool:
    """Whether a reading has the same value wherever there is one."""
    seen = {value for cell in cells for value in _timeline(cell).get("columns", {}).get(column) or ()}
    return len(seen - {None}) < 2


def over_time(names: svg.Names, title: str, column: str, cells: Sequence[Cell]) -> str:
    """One reading over the time of a run, a small plot a strategy, all on the same scales.

    Of each cell the repeat nearest to its median rate is drawn.
    """
    runs = [(cell, _timeline(cell)) for cell in cells if column in columns([cell])]
    events = next((words for _, seen in runs if (words := _events(seen.get("marks") or ()))), "")
    return traces(names, title, column, runs, events)


def traces(
    names: svg.Names, title: str, column: str, runs: Sequence[tuple[Cell, Mapping[str, Any]]], events: str = ""
) -> str:
    """One reading of several runs, each with ``t_s``, ``columns`` and ``marks``; ``events`` is markup above them."""
    values = [value for _, seen in runs for value in seen["columns"][column] if value is not None]
    wide = max(max(seen["t_s"]) for _, seen in runs) or 1.0
    least, most = min(values), max(values)
    scale = svg.Linear(least, max(most, least + max(min(_LEAST, 0.1 * most), 1000)), (_BOTTOM, _TOP), 4)
    across = svg.Linear(0, wide, (0, 100), 3)
    drawn = "".join(
        svg.tag("div", svg.tag("h4", svg.text(name_of(cell))) + _trace(names, title, column, cell, seen, scale, across))
        for cell, seen in runs
    )
    head = ("strategy", "at the start", "least", "most", "at the end")
    rows = [
        (name_of(cell), *(figure(value, "bytes") for value in _ends(seen["columns"][column]))) for cell, seen in runs
    ]
    return panel(
        f"{column}, {title}", events, svg.tag("div", drawn, class_="multiples small"), svg.figures_table(head, rows)
    )


def _timeline(cell: Cell) -> Mapping[str, Any]:
    run = typical_run(cell)
    return run["timeline"] if run is not None else {}


def _ends(values: Sequence[float | None]) -> tuple[float, float, float, float]:
    known = [value for value in values if value is not None]
    return known[0], min(known), max(known), known[-1]


def _trace(
    names: svg.Names,
    title: str,
    column: str,
    cell: Cell,
    seen: Mapping[str, Any],
    scale: svg.Linear,
    across: svg.Linear,
) -> str:
    rows = thinned(seen["t_s"], seen["columns"][column], _POINTS)
    points = [None if value is None else (across(time_s), scale(value)) for time_s, value in rows]
    start, least, most, end = _ends(seen["columns"][column])
    drawn = [
        *svg.axis_left(scale, bytes_words(scale)),
        *_time_axis(across),
        *_marks(seen.get("marks") or (), across),
        svg.curve(points, _BOTTOM + 24, "trace"),
    ]
    said = ", ".join(
        f"{figure(value, 'bytes')} {words}"
        for value, words in ((start, "at the start"), (least, "at least"), (most, "at most"), (end, "at the end"))
    )
    return svg.picture(names, f"{column} of {name_of(cell)}, {title}", said, _BOTTOM + 24, drawn, "left")


def _time_axis(scale: svg.Linear) -> list[str]:
    ends = {0: "start", len(scale.ticks) - 1: "end"}
    return [
        svg.label(
            scale(tick), _BOTTOM + 18, f"{tick:g}{' s' if ends.get(i) == 'end' else ''}", "tick", ends.get(i, "middle")
        )
        for i, tick in enumerate(scale.ticks)
    ]


def _events(marks: Sequence[Any]) -> str:
    labels = [str(words) for _, words in readable(marks)]
    return svg.tag("p", svg.text(f"Dashes, from the left: {', '.join(labels)}."), class_="how") if labels else ""


def readable(marks: Sequence[Any]) -> Iterator[tuple[float, object]]:
    """The seconds and the label of each mark."""
    for mark in marks:
        if isinstance(mark, list | tuple) and len(mark) == 2 and isinstance(mark[0], int | float):
            yield float(mark[0]), mark[1]


def _marks(marks: Sequence[Any], across: svg.Linear) -> list[str]:
    out = []
    for time_s, words in readable(marks):
        x = across(time_s)
        body = svg.tag("title", svg.text(f"{words} at {figure(time_s, 's')}"))
        out.append(svg.tag("line", body, x1=f"{x:.2f}%", x2=f"{x:.2f}%", y1=_TOP, y2=_BOTTOM, class_="event"))
    return out


def thinned(times_s: Sequence[float], values: Sequence[float | None], most: int) -> list[tuple[float, float | None]]:
    """At most about ``most`` of the rows, in order: of each stretch its least and its greatest, and every gap."""
    rows = list(zip(times_s, values, strict=False))
    if len(rows) <= most:
        return rows
    size = math.ceil(len(rows) / (most / 2))
    out: list[tuple[float, float | None]] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        known = [i for i, (_, value) in enumerate(part) if value is not None]
        keep = {f(known, key=lambda i: part[i][1] or 0) for f in (min, max)} if known else {0}
        keep |= {0} if len(known) < len(part) and part[0][1] is None else set()
        out += [part[i] for i in sorted(keep)]
    return out


def bytes_words(scale: svg.Linear) -> Callable[[float], str]:
    """How ticks of bytes are written: all in one unit, with as many decimals as their step asks for."""
    top = max(abs(scale.first), abs(scale.last), 1)
    power = min(int(math.log10(top) / 3 + 1e-9), 4)
    unit, size = ("B", "kB", "MB", "GB", "TB")[power], 1000**power
    decimals = max(0, -math.floor(math.log10(scale.step / size) + 1e-9))
    if decimals and round(scale.step / size * 10**decimals, 6) % 1:
        decimals += 1
    return lambda value: f"{value / size:,.{decimals}f} {unit}"


# -- against the rate --


def against_rate(names: svg.Names, title: str, base: Sequence[Cell], others: Sequence[Cell]) -> str:
    """Frames a second against bytes page-locked: a named dot a strategy, an unnamed ring for every other cell."""
    named, unnamed = ([cell for cell in measured(cells) if _taken(cell) is not None] for cells in (base, others))
    if not named:
        return ""
    most = max((_taken(cell) or 0.0) for cell in [*named, *unnamed])
    if most == 0:
        words = "No strategy that ran here page-locked any memory, so that there is nothing to weigh."
        return panel(title, svg.tag("p", svg.text(words)))
    height = max(220, 22 * len(named) + 60)
    bottom = height - 24
    across = svg.Linear(0, most, (0, 100))
    scale = svg.Linear(0, max(middle(samples(cell, "fps")) or 0.0 for cell in [*named, *unnamed]), (bottom, 14))
    drawn = [*svg.axis_left(scale, number), svg.label(0, 4, "fps", "tick", "end", dx=-8)]
    drawn += svg.axis_below(across, bottom, 14, bytes_words(across))
    drawn += [svg.dot(*_place(cell, across, scale), 3.5, "mark hollow faint", _hint(cell)) for cell in unnamed]
    drawn += _named_dots(named, across, scale, bottom)
    said = "; ".join(_hint(cell) for cell in named)
    plot = svg.picture(names, f"Frames a second against page-locked memory, {title}", said, height, drawn, "left")
    rows = [
        (cell.get("id") or DASH, figure(_taken(cell), "bytes"), figure(middle(samples(cell, "fps")), "fps"))
        for cell in [*named, *unnamed]
    ]
    return panel(title, plot, svg.figures_table(("cell", "page-locked", "median"), rows))


def _taken(cell: Cell) -> float | None:
    return middle(samples(cell, "pinned_bytes_taken"))


def _place(cell: Cell, across: svg.Linear, scale: svg.Linear) -> tuple[float, float]:
    return across(_taken(cell) or 0.0), scale(middle(samples(cell, "fps")) or 0.0)


def _hint(cell: Cell) -> str:
    rate, taken = figure(middle(samples(cell, "fps")), "fps"), figure(_taken(cell), "bytes")
    varied = ", ".join(f"{name} {axis(cell, name)}" for name in cell.get("varies") or () if name != "strategy")
    return f"{name_of(cell)}{f' with {varied}' if varied else ''}: {rate}, {taken} page-locked"


def _named_dots(cells: Sequence[Cell], across: svg.Linear, scale: svg.Linear, bottom: float) -> list[str]:
    """Dots with their names beside them. Names are 16 pixels apart wherever they stand, so that at any width none
    covers another."""
    places = [_place(cell, across, scale) for cell in cells]
    levels = svg.apart([y for _, y in places], 16, 18, bottom - 8)
    out = []
    for cell, (x, y), level in zip(cells, places, levels, strict=True):
        left = x > 50
        out.append(svg.dot(x, y, 5, "mark full", _hint(cell)))
        if abs(level - y) > 4:
            path = f"M0 0L{-10 if left else 10} {level - y:.1f}"
            lead = svg.tag("path", d=path, class_="lead")
            out.append(svg.tag("svg", lead, x=f"{x:.2f}%", y=float(y), width=1, height=1, class_="inner"))
        out.append(
            svg.label(x, level + 4, name_of(cell), "name halo", "end" if left else "start", dx=-12 if left else 12)
        )
    return out
