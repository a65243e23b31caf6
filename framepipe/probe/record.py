"""The record of a probe, schema ``framepipe.probe/1``, and its files.

A record has ``schema``, ``probe`` (its name), ``complete`` (False after an interruption), ``notes`` (first of all why
there is no GPU, if so), ``provenance``, ``parameters`` and ``cells``; sizes are bytes, times seconds, rates bytes a
second, unknown is null. Each cell has a ``status``: ``ok``, ``unavailable`` (this machine cannot do it), ``refused``
(too little memory, not tried), ``failed`` or ``unfinished``, and a ``reason`` unless it is ok.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from framepipe.errors import ConfigError, OutputExistsError
from framepipe.probe.machine import Machine
from framepipe.redact import without_folders

SCHEMA = "framepipe.probe/1"


def new(probe: str, machine: Machine, parameters: Mapping[str, Any], command: str | None = None) -> dict[str, Any]:
    """An empty record of now; ``complete`` until somebody says otherwise."""
    notes = [] if machine.device is not None else [f"no GPU was probed: {machine.reason}"]
    started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
    return {
        "schema": SCHEMA,
        "probe": probe,
        "complete": True,
        "notes": notes,
        "provenance": {"command": without_folders(command), "started": started, **machine.about},
        "parameters": dict(parameters),
        "cells": [],
    }


def as_json(record: Mapping[str, Any]) -> str:
    """The record as text; what is not finite becomes null."""
    return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with every key that any row has; empty where there is no value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
    return text.getvalue()


def paths(folder: Path, probe: str) -> tuple[Path, Path]:
    """Where JSON and CSV of a probe go."""
    return folder / f"probe-{probe}.json", folder / f"probe-{probe}.csv"


def claim(folder: Path, probe: str, *, overwrite: bool) -> None:
    """Make the folder, so that no probe is for nothing. Raises `OutputExistsError` or `ConfigError`."""
    for path in paths(folder, probe):
        if path.exists() and not overwrite:
            raise OutputExistsError(f"{path}: exists; --overwrite replaces it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None


def write(record: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write both files, each whole or not at all. Raises OSError."""
    json_path, csv_path = paths(folder, record["probe"])
    replace(json_path, as_json(record))
    replace(csv_path, as_csv(list(rows)))
    return json_path, csv_path


def replace(path: Path, text: str) -> None:
    """Put ``text`` in the place of ``path`` once it is written whole. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
