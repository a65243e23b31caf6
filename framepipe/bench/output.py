"""``bench.json``, ``bench.csv`` and ``bench.html``: written whole, in the place of an earlier bench's."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from framepipe.bench.record import DURATIONS, PERCENTILES, RATES, SCHEMA
from framepipe.errors import ConfigError, OutputExistsError

JSON, CSV, HTML = "bench.json", "bench.csv", "bench.html"


def check(folder: Path) -> None:
    """Make the folder; raise `OutputExistsError` if it has a file of these names that is no bench's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None
    path = folder / JSON
    if path.exists():
        read(folder)
    elif taken := [name for name in (CSV, HTML) if (folder / name).exists()]:
        raise OutputExistsError(f"--out {folder}: {', '.join(taken)} exists without a {JSON}; choose another folder")


def read(folder: Path) -> dict[str, Any]:
    """The record of an earlier bench. Raises `ConfigError` where there is none that can be read."""
    path = folder / JSON
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no bench to go on with") from None
    except (OSError, ValueError) as error:
        raise OutputExistsError(f"{path}: cannot be read as a bench ({error})") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise OutputExistsError(f"{path}: is no record of a bench ({SCHEMA})")
    return found


def write_json(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write ``bench.json`` alone; raises OSError."""
    return _write(folder / JSON, json.dumps(record, indent=1, allow_nan=False) + "\n")


def write(folder: Path, record: Mapping[str, Any]) -> list[Path]:
    """Write all three; the files. Raises OSError."""
    from framepipe.bench import page

    return [
        write_json(folder, record),
        _write(folder / CSV, table(record)),
        _write(folder / HTML, page.render(dict(record))),
    ]


def table(record: Mapping[str, Any]) -> str:
    """The cells as CSV, one a row: axes, status, and the summary with the unit in each name; unknown is empty."""
    rows = [dict(_row(cell)) for cell in record["cells"]]
    text = io.StringIO()
    names = list(rows[0]) if rows else ["id"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(cell: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    summary = cell["summary"]
    yield "id", cell["id"]
    yield from cell["axes"].items()
    yield "varies", " ".join(cell["varies"])
    yield "status", cell["status"]
    yield "reason", cell["reason"]
    yield "hash", cell["hash"]
    yield "repeats", len(cell["runs"])
    for name in RATES:
        for key in ("median", "min", "max"):
            yield f"{name}_{key}", (summary[name] or {}).get(key)
    for name in DURATIONS:
        for key in PERCENTILES:
            yield f"{name.removesuffix('_ms')}_{key}_ms", (summary[name] or {}).get(key)
    known = {*RATES, *DURATIONS}
    yield from ((name, value) for name, value in summary.items() if name not in known)


def _write(path: Path, text: str) -> Path:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path
