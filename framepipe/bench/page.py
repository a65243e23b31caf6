"""bench.html: a bench record as one page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from framepipe.bench import _plots, _plots_memory, _plots_model, _verdict
from framepipe.bench import _svg as svg
from framepipe.bench._reading import (
    DASH,
    Cell,
    axis,
    base_cells,
    cells,
    figure,
    groups,
    latency,
    leaves,
    middle,
    plain,
    samples,
    sweeps,
)
from framepipe.bench.noise import APART, ENOUGH, SIGNIFICANT, TOLERANCE
from framepipe.units import format_bytes

# Which reading is looked at first, where there is a choice: the process's own before everybody's.
_PREFERRED = ("nvml.process_used", "wddm.local_usage", "cuda.free", "procfs.rss_shmem", "procfs.rss_anon")


def render(record: Mapping[str, Any]) -> str:
    """The page of a bench record (``framepipe.bench/1``): HTML in one piece, to be written as UTF-8.

    It loads nothing, which its content security policy enforces, and carries the record for download. Whatever the
    record lacks is left out or shown as unknown; text in it may be anything.
    """
    names = svg.Names()
    style, script = _asset("_page.css"), _asset("_page.js")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{_sha256(style)}'; script-src 'sha256-{_sha256(script)}'"
    )
    main = "".join((*_top(record), *_facts(record), *_plots_of(names, record), *_all(record)))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{svg.text(_title(record))}</title>\n<style>{style}</style></head>\n"
        f"<body>{svg.tag('main', main)}\n<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(words: str) -> str:
    return base64.b64encode(hashlib.sha256(words.encode()).digest()).decode()


def _section(title: str, how: str, *parts: str) -> str:
    head = svg.tag("h2", svg.text(title)) + (svg.tag("p", svg.text(how), class_="how") if how else "")
    return svg.tag("section", head + "".join(parts))


# -- what it says --


def _provenance(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("provenance")
    return found if isinstance(found, Mapping) else {}


def _title(record: Mapping[str, Any]) -> str:
    gpu = _provenance(record).get("gpu") or {}
    where = gpu.get("name") or _provenance(record).get("cpu")
    return f"framepipe bench: {where}" if where else "framepipe bench"


def _top(record: Mapping[str, Any]) -> Iterator[str]:
    yield svg.tag(
        "header", svg.tag("h1", svg.text("What staging costs")) + svg.tag("p", _subtitle(record), class_="lead")
    )
    notes = [str(note) for note in record.get("notes") or ()]
    if record.get("complete") is False:
        done = sum(cell.get("status") != "unfinished" for cell in cells(record))
        notes.append(f"Stopped early: {done} of {len(cells(record))} cells are finished.")
    if notes:
        yield svg.tag(
            "ul", "".join(svg.tag("li", svg.text(note)) for note in notes), class_="notes", aria_label="Notes"
        )
    verdicts = [
        _verdict_box(title, [*_verdict.sentences(group), *_plots_model.sentences(base_cells(group))])
        for title, group in groups(record).items()
    ]
    how = (
        f"Medians of repeats measured here. They differ where they are more than {TOLERANCE * 100:g} % apart and the "
        f"ranges of the repeats do not overlap or a rank-sum test finds p below {SIGNIFICANT:g}; with fewer than "
        f"{ENOUGH} repeats the ranges must be apart by more than {APART:g} of the wider one. All else is noise."
    )
    if verdicts:
        yield _section("In words", how, svg.tag("div", "".join(verdicts), class_="verdicts"))
    else:
        yield _section("In words", "The record has no cells.")


def _subtitle(record: Mapping[str, Any]) -> str:
    found = _provenance(record)
    gpu = found.get("gpu") or {}
    clips = [str(clip.get("name")) for clip in found.get("clips") or () if isinstance(clip, Mapping)]
    parts = [f"framepipe {found.get('framepipe') or 'of an unknown version'}", gpu.get("name"), found.get("cpu")]
    parts += [found.get("os"), found.get("started"), ", ".join(clips)]
    return svg.text("\u00a0\u00b7 ".join(str(part) for part in parts if part))


def _verdict_box(title: str, sentences: Sequence[str]) -> str:
    first, *others = sentences
    body = svg.tag("h3", svg.text(title)) + svg.tag("p", svg.text(first), class_="big")
    return svg.tag("div", body + "".join(svg.tag("p", svg.text(each)) for each in others), class_="verdict")


# -- where it comes from --


def _facts(record: Mapping[str, Any]) -> Iterator[str]:
    """Every field of the provenance: plain ones first, then a list for each that has parts."""
    found = _provenance(record)
    here: dict[str, Any] = {}
    lists: list[tuple[str, dict[str, Any]]] = [("this bench", here)]
    for name, value in found.items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            lists += [(f"{name} {i}", dict(leaves(each))) for i, each in enumerate(value, 1)]
        elif isinstance(value, Mapping):
            lists.append((name, dict(leaves(value))))
        else:
            here[name] = ", ".join(map(str, value)) if isinstance(value, list) else value
    boxes = [_list(name, values) for name, values in lists if values]
    words = "What the figures were measured on and with." if boxes else "The record does not say."
    yield _section("Where the figures come from", words, svg.tag("div", "".join(boxes), class_="facts"))


def _list(name: str, values: Mapping[str, Any]) -> str:
    pairs = (
        svg.tag("dt", svg.text(key.replace("_", " "))) + svg.tag("dd", svg.text(plain(key, value)))
        for key, value in values.items()
    )
    return svg.tag("div", svg.tag("h4", svg.text(name)) + svg.tag("dl", "".join(pairs)))


# -- plots --


def _plots_of(names: svg.Names, record: Mapping[str, Any]) -> Iterator[str]:
    work = groups(record)
    base = {title: base_cells(group) for title, group in work.items()}
    shared = _plots.absent_everywhere(list(base.values()))
    yield _figures(
        "Throughput by strategy",
        "Measured here. A dot is one repeat, the upright bar their median, the band reaches from least to most.",
        (_plots.throughput(names, title, group, shared) for title, group in base.items()),
        after=_plots.absent(shared),
    )
    yield _memory(names, base)
    if modelled := _plots_model.section(names, _provenance(record), base):
        yield _section("Memory under a model", "", *modelled)
    yield _figures(
        "Latency",
        "Measured here for every frame; medians over the repeats. The figures named are the median and the longest. "
        "The axis is logarithmic.",
        (_plots.latencies(names, title, group) for title, group in base.items()),
        _plots.key_of_marks(),
        wide=True,
    )
    yield _figures(
        "Throughput against page-locked memory",
        "Measured here. Up is faster, left is less memory. Rings are cells in which another axis was varied.",
        (
            _plots_memory.against_rate(names, title, group, [cell for cell in work[title] if cell not in group])
            for title, group in base.items()
        ),
    )
    yield _figures(
        "One axis at a time",
        "Measured here. Dots are repeats, the big one their median; everything but the axis named stays as it was.",
        (_plots.sweep_panel(names, title, sweeps(group)) for title, group in work.items()),
        wide=True,
    )


def _figures(title: str, how: str, panels: Iterator[str], before: str = "", after: str = "", wide: bool = False) -> str:
    drawn = [panel for panel in panels if panel]
    if not drawn:
        return _section(title, "Not measured in this bench.", after)
    panels_ = svg.tag("div", "".join(drawn), class_="panels wide" if wide else "panels")
    return _section(title, how, before, panels_, after)


def _memory(names: svg.Names, base: Mapping[str, Sequence[Cell]]) -> str:
    seen = {title: found for title, group in base.items() if (found := _plots_memory.columns(group))}
    if not seen:
        return _section("Memory over time", "Not measured in this bench.")
    drawn = [
        svg.tag(
            "div", _plots_memory.over_time(names, title, column, base[title]), class_="choice", data_work=title,
            data_column=column,
        )
        for title, found in seen.items()
        for column in found
    ]  # fmt: skip
    moving = {
        column for title, found in seen.items() for column in found if not _plots_memory.is_flat(base[title], column)
    }
    every = sorted(
        {column for found in seen.values() for column in found}, key=lambda c: (c not in moving, *_preference(c))
    )
    picks = _select("Reading", "column", every) + _select("Work", "work", list(seen))
    how = (
        "Measured here, while a repeat ran: of each strategy the one nearest to its median rate. The scales of one "
        "reading are the same for all strategies and do not begin at 0."
    )
    panels = svg.tag("div", "".join(drawn), class_="panels wide")
    return _section("Memory over time", how, f'<div class="pick" hidden="">{picks}</div>', panels)


def _preference(column: str) -> tuple[int, str]:
    return (_PREFERRED.index(column) if column in _PREFERRED else len(_PREFERRED)), column


def _select(words: str, name: str, values: Sequence[str]) -> str:
    options = "".join(svg.tag("option", svg.text(value), value=value) for value in values)
    return svg.tag("label", svg.text(words) + svg.tag("select", options, name=name))


# -- everything --


def _all(record: Mapping[str, Any]) -> Iterator[str]:
    head = (
        *("cell", "status", "median", "least", "most", "repeats", "rate", "copy p50", "copy p99", "allocate p50"),
        *("CPU per 1000 frames", "page-locked", "VRAM peak", "start", "bottleneck", "outputs (SHA-256)", "reason"),
    )
    document = json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode()
    address = f"data:application/json;base64,{base64.b64encode(document).decode()}"
    link = svg.tag("a", svg.text("Download the record, bench.json"), href=address, download="bench.json")
    yield _section(
        "Every cell",
        f"{len(cells(record))} cells, as measured here; {DASH} is unknown.",
        svg.table(head, map(_row, cells(record)), "Every cell"),
        svg.tag("p", f"{link} ({svg.text(format_bytes(len(document)))})", class_="download"),
    )
    apart = "but those under “Memory under a model” " if _is_modelled(record) else ""
    none = "none is cited" if apart else "none is modelled or cited"
    words = (
        f"Every figure on this page {apart}was measured on the machine described above; {none}. "
        "Rates leave the start of a run out. 1 GB is 10⁹ bytes."
    )
    yield svg.tag("footer", svg.text(words))


def _is_modelled(record: Mapping[str, Any]) -> bool:
    return any(_plots_model.runs(cells(record)))


def _row(cell: Cell) -> tuple[object, ...]:
    rates = samples(cell, "fps")
    summary = cell.get("summary") or {}
    copy, allocate = latency(cell, "copy_ms"), latency(cell, "allocate_ms")
    bottlenecks = sorted({str(run["bottleneck"]) for run in cell.get("runs") or () if run.get("bottleneck")})
    return (
        cell.get("id") or axis(cell, "strategy") or DASH,
        cell.get("status") or DASH,
        *(figure(value, "fps") for value in (middle(rates), min(rates, default=None), max(rates, default=None))),
        len(rates),
        figure(middle(samples(cell, "bytes_per_s")), "bytes_per_s"),
        *(figure(value, "ms") for value in (copy.get("p50"), copy.get("p99"), allocate.get("p50"))),
        figure(summary.get("cpu_s_per_1000"), "s"),
        figure(middle(samples(cell, "pinned_bytes_taken")), "bytes"),
        figure(summary.get("vram_peak_bytes"), "bytes"),
        figure(middle(samples(cell, "start_s")), "s"),
        ", ".join(bottlenecks) or DASH,
        str(cell.get("hash") or DASH)[:12],
        cell.get("reason") or DASH,
    )
