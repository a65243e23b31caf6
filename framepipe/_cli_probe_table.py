"""The tables of ``framepipe probe``: every column says what it was read from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from framepipe.probe import bandwidth as _bandwidth
from framepipe.probe import churn as _churn
from framepipe.probe import pinned as _pinned
from framepipe.redact import redact
from framepipe.units import format_bytes

_WIDTH = 150
"""Of a table that goes to a file or a pipe."""
_HEADS = {
    "free": "free",
    "local": "local",
    "non_local": "non-local",
    "dedicated": "dedicated",
    "shared": "shared",
    "rss_shmem": "RssShmem",
    "rss": "RSS",
}


def show(found: Mapping[str, Any], lines: Iterable[Any]) -> None:
    """Print the notes of a record and then ``lines``: tables and sentences."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for line in (*found["notes"], *lines):
        console.print(Text(redact(line)) if isinstance(line, str) else line, soft_wrap=isinstance(line, str))


def pinned(found: Mapping[str, Any]) -> Iterator[Any]:
    """Deltas while the block was held, less the control's, where there is a counter."""
    cells = found["cells"]
    sources = {name: _pinned.source_of(name, cells) for name in _pinned.COLUMNS}
    known = [name for name, source in sources.items() if source]
    later = ["free later"] if "free" in known else []
    table = _table("kind", "asked", *(_HEADS[name] for name in known), *later, "back after", "taking", "giving")
    for row in _pinned.rows(found):
        if row["status"] == "ok":
            deltas = [_signed(row[name]) for name in known]
            times = [_ms(row[name], 1e3) for name in ("recovery_s", "allocate_s", "free_s")]
            after = [_signed(row["free_after"]) for _ in later]
            table.add_row(row["kind"], format_bytes(row["requested"]), *deltas, *after, *times)
    if table.row_count:
        yield table
        yield from _pinned_sources(cells, {_HEADS[name]: sources[name] for name in known})
    yield from _reasons((cell["kind"], format_bytes(cell["nbytes"]), cell) for cell in cells)


def _pinned_sources(cells: Sequence[Mapping[str, Any]], columns: Mapping[str, str | None]) -> Iterator[str]:
    words: dict[str, str] = {}
    for cell in cells:
        words.update(cell.get("sources", {}))
    yield "Deltas while the block was held, against before; the control's as read, the others less the control's."
    yield "\n".join(f"  {head}: {column} ({words.get(column or '', '')})" for head, column in columns.items())
    if "free" in columns:
        yield "  free later: cuda.free when waiting for everything to come back ended, against before"
    yield (
        "  back after: from the release until every counter that had moved was back, none if one was not\n"
        "  taking, giving: perf_counter around the calls, touching included\n"
        "Times are in ms."
    )


def churn(found: Mapping[str, Any]) -> Iterator[Any]:
    """Rates, latencies, errors; then what moves."""
    table = _table("kind", "taken/s", "allocated/s", "freed/s", *(f"take {p}" for p in ("p50", "p95", "p99", "max")),
                   *(f"give {p}" for p in ("p50", "p99", "max")), "errors")  # fmt: skip
    for row in _churn.rows(found):
        if row["takes_per_s"] is not None:
            rates = [f"{row[f'{name}_per_s'] or 0:.1f}" for name in ("takes", "allocations", "frees")]
            takes = [_ms(row[f"take_{key}_ms"]) for key in ("p50", "p95", "p99", "max")]
            gives = [_ms(row[f"give_{key}_ms"]) for key in ("p50", "p99", "max")]
            table.add_row(row["kind"], *rates, *takes, *gives, row["errors"] or "none")
    if table.row_count:
        yield table
        yield "Timed by perf_counter around each call, in ms; with a pool a take may be a look into its list."
        yield from _slopes(found)
    yield from _reasons((cell["kind"], "", cell) for cell in found["cells"])


def _slopes(found: Mapping[str, Any]) -> Iterator[Any]:
    table = _table("kind", "counter", "a second", "from", "to", "control: a second", "from", "to")
    for line in _churn.moving(found):
        of_control = line["control"] or {}
        numbers = [_signed(each.get(key)) for each in (line, of_control) for key in ("per_s", "low", "high")]
        table.add_row(line["kind"], line["column"], *numbers)
    if not table.row_count:
        yield "No counter's slope differs from zero with 95 % confidence."
        return
    yield table
    yield (
        "Slopes by least squares, the first tenth of the time left out, with their 95 % intervals, where these leave\n"
        "zero out. A slope is of the time measured, and says nothing about why."
    )


def bandwidth(found: Mapping[str, Any]) -> Iterator[Any]:
    """Medians by size, in GB/s."""
    sizes = found["parameters"]["sizes"]
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for row in _bandwidth.rows(found):
        if row["status"] == "ok":
            what = row["direction"] or f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}"
            rates.setdefault((row["kind"], what), {})[row["nbytes"]] = row["bytes_per_s_median"]
    table = _table("kind", "", *(_binary(nbytes) for nbytes in sizes))
    for (kind, what), known in rates.items():
        table.add_row(kind, what, *(f"{known[nbytes] / 1e9:.2f}" if nbytes in known else "-" for nbytes in sizes))
    if table.row_count:
        yield table
        yield (
            f"GB/s (10^9 bytes a second), medians of {found['parameters']['repeats']}; {_bandwidth.HOST_COPY} by "
            "perf_counter, all others between two CUDA events."
        )
    yield from _reasons((cell["kind"], "", cell) for cell in found["cells"])


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in ("kind", "counter", "", "errors") else "right")
    return table


def _reasons(cells: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Iterator[str]:
    """A line for each reason, with the kinds that have it, and the sizes if there are any."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for kind, size, cell in cells:
        if cell["status"] != "ok":
            kinds.setdefault((size, f"{cell['status']}: {cell.get('reason')}"), []).append(kind)
    sizes: dict[tuple[str, str], list[str]] = {}
    for (size, reason), names in kinds.items():
        sizes.setdefault((", ".join(names), reason), []).append(size)
    for (names_, reason), found in sizes.items():
        yield ": ".join([f"{names_} of {', '.join(found)}" if any(found) else names_, reason])


def _signed(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{'+' if nbytes > 0 else ''}{format_bytes(nbytes)}"


def _ms(number: float | None, factor: float = 1.0) -> str:
    return "-" if number is None else f"{number * factor:.3f}"


def _binary(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and not nbytes % (1 << shift):
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
