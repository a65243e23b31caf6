"""``framepipe compare`` for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from framepipe.bench.compare import BETTER, FIRST_ONLY, NOISE, SECOND_ONLY, WORSE, Comparison, Row
from framepipe.units import format_bytes

_ORDER = (WORSE, BETTER, NOISE, FIRST_ONLY, SECOND_ONLY)


def lines(found: Comparison) -> Iterator[str]:
    """First what the two were measured with, as far as it differs; then the rows, the worst news first; then counts."""
    if found.provenance:
        yield "not the same:"
        width = max(len(name) for name, _, _ in found.provenance)
        for name, first, second in found.provenance:
            yield f"  {name:{width}}  {_word(first)} -> {_word(second)}"
        yield ""
    rows = sorted(found.rows, key=lambda row: _ORDER.index(row.verdict))
    table = [(row.verdict, row.id, row.measure, _change(row)) for row in rows]
    widths = [max(len(cells[column]) for cells in table) for column in range(3)]
    for cells in table:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(cells, [*widths, 0], strict=True)).rstrip()
    yield ""
    yield ", ".join(
        f"{found.count(verdict)} {verdict}" for verdict in _ORDER if found.count(verdict) or verdict == WORSE
    )
    rule = "single runs: their noise is not known" if found.kind == "run" else "repeats decide what is noise"
    yield f"tolerance {found.tolerance * 100:g} %; {rule}"


def _change(row: Row) -> str:
    if row.measure == "exit":
        return row.reason or ""
    text = f"{_figure(row.measure, row.first)} -> {_figure(row.measure, row.second)}"
    if row.ratio is not None:
        text += f"  ({(row.ratio - 1) * 100:+.1f} %)"
    return f"{text}  {row.reason}" if row.reason else text


def _figure(measure: str, value: float | None) -> str:
    if value is None:
        return "none"
    if "bytes" in measure:
        return f"{format_bytes(value)}/s" if measure.endswith("_per_s") else format_bytes(value)
    return f"{value:.4g} ms" if measure.endswith("_ms") else f"{value:.4g} {measure}"


def _word(value: Any) -> str:
    return "none" if value is None else str(value)
