"""What a memory model makes of each strategy: apart from all that is measured, and said to be modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framepipe.bench import _plots_memory
from framepipe.bench import _svg as svg
from framepipe.bench._plots import name_of, panel
from framepipe.bench._reading import DASH, NO_BREAK, Cell, figure, plain, typical_run

_FIRST = "model.free"
_SIZES = {"total", "resident", "others", "ram", "granularity", "metadata", "tables", "step"}
_UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
Run = tuple[Cell, Mapping[str, Any]]


def runs(cells: Sequence[Cell]) -> list[Run]:
    """The cells that have something modelled, with it: that of the repeat nearest to the median rate."""
    found = [(cell, _modelled(cell)) for cell in cells]
    return [(cell, modelled) for cell, modelled in found if modelled.get("t_s") and modelled.get("columns")]


def sentences(cells: Sequence[Cell]) -> list[str]:
    """What the model makes of each strategy, in words; empty if nothing is modelled."""
    return [_sentence(name_of(cell), modelled) for cell, modelled in runs(cells)]


def _sentence(strategy: str, modelled: Mapping[str, Any]) -> str:
    least, now = figure(modelled.get("least_free"), "bytes"), figure(modelled.get("now_s"), "s")
    refused = "none refused"
    if modelled.get("refusals"):  # the pipeline asks for no more then
        refused = "then one refused, and memory is pageable from there on"
    return (
        f"Modelled by {modelled.get('name')}, not measured: with {strategy} {least} stay free in {now} of video; "
        f"pins: {modelled.get('pins', DASH)}, {refused}."
    )


def _modelled(cell: Cell) -> Mapping[str, Any]:
    run = typical_run(cell) or next(iter(cell.get("runs") or ()), {})
    return run.get("modelled") or {}


def section(names: svg.Names, provenance: Mapping[str, Any], base: Mapping[str, Sequence[Cell]]) -> list[str]:
    """The body of the section: words, parameters, and for each kind of work its curves; empty if nothing is modelled.

    ``base`` has the cells that differ in their strategy alone, by what they had to do.
    """
    work = {title: found for title, cells in base.items() if (found := runs(cells))}
    if not work:
        return []
    model = (provenance.get("device") or {}).get("model") or {}
    sensors = provenance.get("sensors") or {}
    tables = [_table(title, found) for title, found in work.items()]
    panels = [
        _plots_memory.traces(names, title, column, shown, _words(column, sensors))
        for title, found in work.items()
        for column in _columns(found)
        if (shown := [run for run in found if _values(run, column)])
    ]
    return [
        svg.tag("p", svg.text(_what(model)), class_="how"),
        svg.tag("div", _parameters(model), class_="facts"),
        svg.tag("div", "".join([*tables, *panels]), class_="panels wide"),
    ]


def _what(model: Mapping[str, Any]) -> str:
    name, ground = model.get("name") or "a model of unknown name", model.get("ground") or "its ground is unknown"
    fps = (model.get("parameters") or {}).get("fps")
    clock = f"a picture is shown for 1/{fps:g} s" if isinstance(fps, int | float) else "as pictures are shown"
    return (
        f"This is a model, not a measurement: {name} ({ground}). Its numbers are arithmetic on what the pipeline "
        f"page-locks and allocates, with the parameters below, and no GPU was asked. Seconds are those of the video "
        f"({clock}), not those that the run took. The scales of one reading are the same for all strategies and do "
        "not begin at 0."
    )


def _parameters(model: Mapping[str, Any]) -> str:
    values = {"model": model.get("name"), "ground": model.get("ground"), **(model.get("parameters") or {})}
    pairs = "".join(
        svg.tag("dt", svg.text(key.replace("_", " "))) + svg.tag("dd", svg.text(_parameter(key, value)))
        for key, value in values.items()
    )
    return svg.tag("div", svg.tag("h4", "parameters of the model") + svg.tag("dl", pairs))


def _parameter(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _exactly(value) if key in _SIZES and isinstance(value, int) else plain(key, value)


def _exactly(nbytes: int) -> str:
    """All digits of a size, in the unit that needs the fewest: it is what somebody chose, 11.95 GB and not 12."""
    units = [(unit, size) for unit, size in _UNITS.items() if nbytes >= size] or [("B", 1)]
    return min((f"{nbytes / size:.13g}{NO_BREAK}{unit}" for unit, size in units), key=len)


def _columns(found: Sequence[Run]) -> list[str]:
    """The reading of free memory, and the others that move."""
    every = dict.fromkeys(column for _, modelled in found for column in modelled["columns"])
    moving = [column for column in every if len({value for run in found for value in _values(run, column)}) > 1]
    return [column for column in every if column == _FIRST or column in moving]


def _values(run: Run, column: str) -> list[float]:
    return [value for value in run[1]["columns"].get(column) or () if value is not None]


def _words(column: str, sensors: Mapping[str, Any]) -> str:
    what = sensors.get(column)
    return svg.tag("p", svg.text(f"Modelled, by {what}."), class_="how") if what else ""


def _table(title: str, found: Sequence[Run]) -> str:
    head = ("strategy", "modelled time", "free at least", "pins", "page-locked in all", "pins refused")
    rows = [
        (
            name_of(cell),
            figure(modelled.get("now_s"), "s"),
            figure(modelled.get("least_free"), "bytes"),
            modelled.get("pins", DASH),
            figure(modelled.get("pinned_ever"), "bytes"),
            modelled.get("refusals", DASH),
        )
        for cell, modelled in found
    ]
    happened = (
        svg.tag("p", svg.text(f"{name_of(cell)}: {words}."))
        for cell, modelled in found
        if (words := _happened(modelled))
    )
    return panel(title, svg.table(head, rows, f"Modelled, {title}") + "".join(happened))


def _happened(modelled: Mapping[str, Any]) -> str:
    marks = _plots_memory.readable(modelled.get("marks") or ())
    return ", ".join(f"{label} at {figure(time_s, 's')}" for time_s, label in marks)
