"""How fast copies were on each machine that was measured: a JSON file of the user's, schema ``framepipe.baseline/1``.

``machines`` maps `framepipe.probe.machine.identity` to a baseline: ``ceiling`` has the fastest median of each
direction, of any kind of memory and size, and of host copies, in bytes a second; ``rates`` has all of them by kind.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from framepipe.errors import ConfigError
from framepipe.probe.machine import cpu_identity, gpu_identity
from framepipe.probe.record import replace

SCHEMA = "framepipe.baseline/1"
NAME = "baseline.json"


def default_path(
    system: str = sys.platform, environment: Mapping[str, str] = os.environ, home: Path | None = None
) -> Path:
    """Where the file is: below XDG_DATA_HOME (or ~/.local/share), ~/Library/Application Support or %LOCALAPPDATA%."""
    home = home or Path.home()
    if system == "win32":
        folder = Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif system == "darwin":
        folder = home / "Library" / "Application Support"
    else:
        given = environment.get("XDG_DATA_HOME", "")
        # The XDG Base Directory Specification: a path that is not absolute is to be ignored.
        folder = Path(given) if os.path.isabs(given) else home / ".local" / "share"
    return folder / "framepipe" / NAME


def read(path: Path) -> dict[str, Any]:
    """The baselines of all machines in ``path``; none where there is no file. Raises `ConfigError` for another file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a baseline: {error}") from None
    machines = found.get("machines") if isinstance(found, dict) and found.get("schema") == SCHEMA else None
    if not isinstance(machines, dict):
        raise ConfigError(f"{path}: is no file of baselines ({SCHEMA})")
    return machines


def save(path: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keep what ``record`` of ``probe bandwidth`` measured, in place of an older one of this machine.

    The baseline that was kept; None where nothing was measured. Raises `ConfigError` and OSError.
    """
    made = of(record)
    if made is None:
        return None
    machines = read(path)
    machines[key(record)] = made
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps({"schema": SCHEMA, "machines": machines}, indent=2) + "\n")
    return made


def key(record: Mapping[str, Any]) -> str:
    """What the machine of a record is kept under."""
    gpu = record["provenance"].get("gpu")
    return gpu_identity(gpu["uuid"], gpu["driver"]) if gpu else cpu_identity()


def of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The baseline that a record of ``probe bandwidth`` comes to, or None if no cell was measured."""
    found = list(_medians(record))
    if not found:
        return None
    about = record["provenance"]
    ceiling: dict[str, Any] = {}
    for name in ("to_device", "to_host", "host_copy"):
        own = [each for each in found if each["what"] == name]
        ceiling[f"{name}_bytes_per_s"] = max((each["bytes_per_s"] for each in own), default=None)
    return {
        "measured": about["started"],
        "gpu": {name: about["gpu"][name] for name in ("name", "uuid", "driver")} if about.get("gpu") else None,
        "cpu": about.get("cpu"),
        "framepipe": about.get("versions", {}).get("framepipe"),
        "ceiling": ceiling,
        "rates": found,
    }


def _medians(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for cell in record["cells"]:
        for row in cell.get("rows", ()):
            yield {
                "what": row.get("direction", "host_copy"),
                "kind": cell["kind"],
                "threads": row.get("threads"),
                "nbytes": row["nbytes"],
                "bytes_per_s": row["bytes_per_s"]["median"],
            }
