"""What differs between Windows, Linux and WSL 2: the data file ``capabilities.yaml`` beside this, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml

_FILE = Path(__file__).with_name("capabilities.yaml")
SYSTEMS = {"windows": "Windows", "linux": "Linux", "wsl2": "WSL 2"}


@cache
def rows() -> tuple[Mapping[str, str], ...]:
    """Each with ``what``, a cell for each of `SYSTEMS`, ``ground`` and ``source``."""
    return tuple(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def markdown() -> Iterator[str]:
    """The table's lines in Markdown, its sources included."""
    yield f"| what | {' | '.join(SYSTEMS.values())} | ground: source |"
    yield f"|{'---|' * (len(SYSTEMS) + 2)}"
    for row in rows():
        yield f"| {row['what']} | {' | '.join(row[key] for key in SYSTEMS)} | {row['ground']}: {row['source']} |"
