"""The plots of rates and latencies: a figure of HTML each, its drawing and the same figures as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from framepipe.bench import _svg as svg
from framepipe.bench._reading import MICROSECONDS, Cell, axis, figure, latency, middle, number, samples
from framepipe.bench.noise import differs

_ROW = 50
_LATENCIES = {"copy_ms": "copy into the slot", "allocate_ms": "allocate", "release_ms": "release"}
Absence = tuple[str, str, str]
_MARKS = ("p50", "p95", "p99", "max")


def panel(title: str, *parts: str) -> str:
    """A figure with its heading."""
    return svg.tag("figure", svg.tag("h3", svg.text(title)) + "".join(parts), class_="panel")


def name_of(cell: Cell) -> str:
    """The strategy of a cell."""
    return str(axis(cell, "strategy") or cell.get("id") or "unnamed")


def measured(cells: Sequence[Cell]) -> list[Cell]:
    """Those with a rate."""
    return [cell for cell in cells if samples(cell, "fps")]


# -- throughput by strategy --


def throughput(names: svg.Names, title: str, cells: Sequence[Cell], elsewhere: Sequence[Absence] = ()) -> str:
    """Frames a second by strategy, the fastest first: a dot a repeat, a bar for their median, a band for their spread.

    ``cells`` are `framepipe.bench._reading.base_cells`; those without a rate are listed below with the reason,
    but for those that are told ``elsewhere``. "" if that leaves nothing.
    """
    shown = measured(cells)
    parts = []
    if shown:
        scale = svg.Linear(0, max(max(samples(cell, "fps")) for cell in shown), (0, 100), 5)
        bottom = _ROW * len(shown) + 6
        drawn = svg.axis_below(scale, bottom, 24, number)
        best = samples(shown[0], "fps")
        for i, cell in enumerate(shown):
            drawn += _rate_row(cell, i, scale, _standing(cell, best, first=i == 0))
        said = "; ".join(f"{name_of(cell)} {figure(middle(samples(cell, 'fps')), 'fps')}" for cell in shown)
        parts.append(svg.picture(names, f"Frames a second by strategy, {title}", said, bottom + 24, drawn))
    missing = [each for each in absences(cells) if each not in elsewhere]
    if not shown and not missing:
        return ""
    return panel(title, *parts, absent(missing), _rates_table(shown))


def _standing(cell: Cell, best: Sequence[float], first: bool) -> str:
    if first:
        return "fastest"
    return "" if differs(best, samples(cell, "fps")) else "within noise of it"


def _rate_row(cell: Cell, place: int, scale: svg.Linear, standing: str) -> list[str]:
    rates = samples(cell, "fps")
    top, y = place * _ROW, place * _ROW + 34
    level = "best" if standing == "fastest" else "near" if standing else "rest"
    centre = scale(middle(rates) or 0.0)
    return [
        _row_head(name_of(cell), standing, figure(middle(rates), "fps"), top + 18),
        svg.line(0, y, 100, y, "rail"),
        svg.line(0, y, centre, y, f"stem {level}"),
        svg.bar(scale(min(rates)), scale(max(rates)), y, 10, f"spread {level}"),
        *(svg.dot(scale(rate), y, 3, f"repeat {level}", figure(rate, "fps")) for rate in rates),
        svg.line(centre, y - 9, centre, y + 9, f"median {level}"),
    ]


def _row_head(name: str, aside: str, said: str, y: float) -> str:
    words = svg.text(name) + (svg.tag("tspan", svg.text(aside), class_="aside", dx=8) if aside else "")
    return svg.tag("text", words, x=0, y=float(y), class_="name") + svg.label(100, y, said, "value", "end")


def _rates_table(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    best = samples(cells[0], "fps")
    head = ("strategy", "median", "least", "most", "repeats", "rate", "against the fastest")
    rows = []
    for i, cell in enumerate(cells):
        rates = samples(cell, "fps")
        three = (figure(value, "fps") for value in (middle(rates), min(rates), max(rates)))
        moved = figure(middle(samples(cell, "bytes_per_s")), "bytes_per_s")
        rows.append((name_of(cell), *three, len(rates), moved, _standing(cell, best, i == 0) or "slower"))
    return svg.figures_table(head, rows)


def absences(cells: Sequence[Cell]) -> list[Absence]:
    """Strategy, status and reason of the cells without a rate."""
    return [
        (name_of(cell), str(cell.get("status") or "without a result"), str(cell.get("reason") or "no reason given"))
        for cell in cells
        if not samples(cell, "fps")
    ]


def absent_everywhere(groups: Sequence[Sequence[Cell]]) -> list[Absence]:
    """What no group has a rate of for one and the same reason, so that once is enough to say it."""
    if len(groups) < 2:
        return []
    found = [absences(group) for group in groups]
    return [each for each in found[0] if all(each in others for others in found)]


def absent(found: Sequence[Absence]) -> str:
    """A list of what has no rate, and why; "" of nothing."""
    items = (svg.tag("b", svg.text(name)) + svg.text(f" {status}: {reason}") for name, status, reason in found)
    return svg.tag("ul", "".join(svg.tag("li", item) for item in items), class_="absent") if found else ""


# -- latencies --


def latencies(names: svg.Names, title: str, cells: Sequence[Cell]) -> str:
    """How long a frame's copy, allocation and release take by strategy, on one logarithmic axis; "" if not measured."""
    known = {
        what: [(cell, found) for cell in cells if (found := latency(cell, what))] for what in _LATENCIES
    }  # fmt: skip
    every = [value for found in known.values() for _, times in found for value in times.values()]
    if not every:
        return ""
    scale = svg.Log(every, (0, 100))
    drawn = [
        svg.tag("div", svg.tag("h4", svg.text(_LATENCIES[what])) + _latency_plot(names, title, what, found, scale))
        for what, found in known.items()
        if found
    ]
    head = ("strategy", "of", *_MARKS)
    rows = [
        (name_of(cell), _LATENCIES[what], *(figure(times.get(mark), "ms") for mark in _MARKS))
        for what, found in known.items()
        for cell, times in found
    ]
    return panel(title, svg.tag("div", "".join(drawn), class_="multiples"), svg.figures_table(head, rows))


def _latency_plot(
    names: svg.Names, title: str, what: str, found: Sequence[tuple[Cell, Mapping[str, float]]], scale: svg.Log
) -> str:
    bottom = _ROW * len(found) + 6
    drawn = svg.axis_below(scale, bottom, 24, _decade)
    for i, (cell, times) in enumerate(found):
        y = i * _ROW + 34
        said = f"{figure(times.get('p50'), 'ms')} to {figure(times.get('max'), 'ms')}"
        drawn += [_row_head(name_of(cell), "", said, i * _ROW + 18), svg.line(0, y, 100, y, "rail")]
        places = {mark: scale(value) for mark, value in times.items()}
        drawn += [svg.line(min(places.values()), y, max(places.values()), y, "reach")]
        drawn += [
            _mark(mark, places[mark], y, figure(times[mark], "ms")) for mark in reversed(_MARKS) if mark in places
        ]
    said = "; ".join(
        f"{name_of(cell)} p50 {figure(t.get('p50'), 'ms')}, p99 {figure(t.get('p99'), 'ms')}" for cell, t in found
    )
    return svg.picture(names, f"Time to {_LATENCIES[what]}, {title}", said, bottom + 24, drawn)


def _decade(value: float) -> str:
    return f"{value:g} ms" if value > 0.01 else f"{value * 1e3:g} {MICROSECONDS}"


def _mark(mark: str, x: float, y: float, said: str) -> str:
    hint = f"{mark} {said}"
    if mark == "p50":
        return svg.dot(x, y, 4.5, "mark full", hint)
    if mark == "max":
        return svg.dot(x, y, 4, "mark hollow", hint)
    shape = "M0 -7V7" if mark == "p95" else "M-5 0L0 -5L5 0L0 5Z"
    body = svg.tag(
        "path", svg.tag("title", svg.text(hint)), d=shape, class_=f"mark {'stroke' if mark == 'p95' else 'full'}"
    )
    return svg.tag("svg", body, x=f"{x:.2f}%", y=float(y), class_="inner", width=1, height=1)


def key_of_marks() -> str:
    """The shapes of `latencies` in words."""
    shapes = []
    for mark, words in zip(_MARKS, ("median (p50)", "p95", "p99", "longest"), strict=True):
        drawing = svg.tag("svg", _mark(mark, 50, 8, ""), width=16, height=16, aria_hidden="true", class_="inner")
        shapes.append(svg.tag("span", drawing + svg.text(words)))
    return svg.tag("p", "".join(shapes), class_="key")


# -- sweeps --


def sweep_panel(names: svg.Names, title: str, found: Mapping[str, Sequence[Cell]]) -> str:
    """Frames a second along each axis that was varied alone, all on one scale; "" if none was."""
    if not found:
        return ""
    most = max(max(samples(cell, "fps")) for cells in found.values() for cell in cells)
    drawn = "".join(
        svg.tag("div", svg.tag("h4", svg.text(name.replace("_", " "))) + _sweep_plot(names, title, name, cells, most))
        for name, cells in found.items()
    )
    head = ("axis", "value", "strategy", "median", "least", "most", "repeats")
    rows = []
    for name, cells in found.items():
        for cell in cells:
            rates = samples(cell, "fps")
            three = (figure(value, "fps") for value in (middle(rates), min(rates), max(rates)))
            rows.append((name, axis(cell, name), name_of(cell), *three, len(rates)))
    return panel(title, svg.tag("div", drawn, class_="multiples"), svg.figures_table(head, rows))


def _sweep_plot(names: svg.Names, title: str, name: str, cells: Sequence[Cell], most: float) -> str:
    top, bottom = 26, 150
    scale = svg.Linear(0, most, (bottom, top), 3)
    drawn = svg.axis_left(scale, number)
    step = 100 / len(cells)
    places = [step * (i + 0.5) for i in range(len(cells))]
    middles = [middle(samples(cell, "fps")) or 0.0 for cell in cells]
    numeric = [isinstance(axis(cell, name), int | float) for cell in cells]  # auto is no next step of the axis
    points = [(x, scale(y)) if known else None for x, y, known in zip(places, middles, numeric, strict=True)]
    drawn.append(svg.curve(points, bottom + 24, "join"))
    for x, cell, value in zip(places, cells, middles, strict=True):
        rates = samples(cell, "fps")
        drawn += [
            svg.line(x, scale(min(rates)), x, scale(max(rates)), "reach"),
            *(svg.dot(x, scale(rate), 2.5, "repeat near", figure(rate, "fps")) for rate in rates),
            svg.dot(x, scale(value), 4.5, "mark full", figure(value, "fps")),
            svg.label(x, scale(max(rates)) - 9, number(value), "value halo", "middle"),
            svg.label(x, bottom + 18, str(axis(cell, name)), "tick strong", "middle"),
        ]
    said = "; ".join(f"{axis(cell, name)}: {figure(value, 'fps')}" for cell, value in zip(cells, middles, strict=True))
    return svg.picture(names, f"Frames a second by {name}, {title}", said, bottom + 24, drawn, "left")
