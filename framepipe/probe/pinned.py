"""``probe pinned``: what holding a large block of each kind does to every counter, and when it is undone.

Each block is held in a child process of its own: a refused pin has been seen to make later ones fail in the same
process. Before the blocks of a size comes a control, a process that does the same and allocates nothing; ``net`` and
``net_left`` are a cell's deltas less the control's of its size, so that what others did meanwhile can be seen beside
it. Two things that moved together are not thereby cause and effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from framepipe.errors import ConfigError
from framepipe.guard.waiting import Patience
from framepipe.probe import record
from framepipe.probe.counters import difference
from framepipe.probe.kinds import KINDS, Kind, chosen
from framepipe.probe.machine import Available, Machine, available
from framepipe.probe.steps import Run, Step, Tell, carry_out
from framepipe.units import format_bytes

SIZES_NBYTES = tuple(size * 10**6 for size in (512, 1024, 2048, 4096))
_START_S, _SECONDS_PER_GB = 120.0, 30.0
CONTROL = "control"


def probe(
    machine: Machine,
    run: Run,
    *,
    sizes: Sequence[int] = SIZES_NBYTES,
    kinds: Sequence[str] | None = None,
    patience: Patience | None = None,
    hold_s: float = 0.0,
    tell: Tell = lambda words: None,
    memory: Callable[[], Available] = available,
    command: str | None = None,
) -> dict[str, Any]:
    """The record: a cell for each size and kind. Raises `ConfigError` for a kind or size that cannot be.

    ``run`` does a request in a child process (`framepipe.probe.children.run`), one at a time; what it leaves unfinished
    ends the probe, and the cells before it are kept. Cells that need a GPU where there is none, and sizes beyond
    ``memory``, are rows that say why.
    """
    patience = patience or Patience()
    wanted = [CONTROL, *(name for name in chosen(kinds, list(KINDS), _default(machine)) if name != CONTROL)]
    if not sizes or min(sizes) < 1:
        raise ConfigError("a size has at least one byte")
    parameters = {"sizes": list(sizes), "kinds": wanted, "patience": asdict(patience), "hold_s": hold_s}
    found = record.new("pinned", machine, parameters, command)
    steps = [
        _step(KINDS[name], nbytes, patience, 0.0 if name == CONTROL else hold_s)
        for nbytes in dict.fromkeys(sizes)
        for name in wanted
    ]
    carry_out(found, steps, machine, run, tell, memory)
    _against_control(found["cells"])
    return found


def _default(machine: Machine) -> list[str]:
    """All kinds; pages locked by the kernel itself only where no GPU's are measured."""
    return [name for name in KINDS if name != "mlock" or machine.device is None]


def _step(kind: Kind, nbytes: int, patience: Patience, hold_s: float) -> Step:
    return Step(
        label=f"{kind.name} {format_bytes(nbytes)}",
        cell={"kind": kind.name, "call": kind.call, "nbytes": nbytes},
        request={
            "probe": "pinned",
            "kind": kind.name,
            "nbytes": nbytes,
            "patience": asdict(patience),
            "hold_s": hold_s,
        },
        timeout_s=_START_S + 4 * patience.timeout_s + hold_s + _SECONDS_PER_GB * nbytes / 1e9,
        kind=kind,
        nbytes=nbytes if kind.host else 0,
    )


def _against_control(cells: Sequence[dict[str, Any]]) -> None:
    """Add ``net`` and ``net_left`` to each cell that was measured, as its control of that size was."""
    controls = {cell["nbytes"]: cell for cell in cells if cell["kind"] == CONTROL and "deltas" in cell}
    for cell in cells:
        control = controls.get(cell["nbytes"])
        if "deltas" in cell and cell["kind"] != CONTROL and control is not None:
            cell["net"] = difference(cell["deltas"], control["deltas"])
            cell["net_left"] = difference(cell["left"], control["left"])


# -- the table --

COLUMNS = {
    "free": ("cuda.free",),
    "local": ("wddm.local_usage", "pdh.process_local"),
    "non_local": ("wddm.non_local_usage", "pdh.process_non_local"),
    "dedicated": ("pdh.adapter_dedicated", "nvml.used"),
    "shared": ("pdh.adapter_shared",),
    "rss_shmem": ("procfs.rss_shmem",),
    "rss": ("process.rss",),
}
"""Columns of the table, and which counter each is of: the first of them that has a number."""


def source_of(name: str, cells: Sequence[Mapping[str, Any]]) -> str | None:
    """The counter behind a column of the table for all ``cells``, or None where no cell has a number."""
    for column in COLUMNS[name]:
        if any(cell.get("deltas", {}).get(column) is not None for cell in cells):
            return column
    return None


def rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a cell: what was asked, the deltas of `COLUMNS` less the control's, what was left, and times."""
    cells = found["cells"]
    sources = {name: source_of(name, cells) for name in COLUMNS}
    for cell in cells:
        net, left = (cell.get(key, {}) for key in _keys(cell))
        yield {
            "kind": cell["kind"],
            "requested": cell["nbytes"],
            "status": cell["status"],
            **{name: net.get(source) if source else None for name, source in sources.items()},
            "free_after": left.get("cuda.free"),
            "recovery_s": cell.get("recovery_s"),
            "allocate_s": sum(cell["steps_s"].values()) if cell.get("steps_s") else None,
            "free_s": cell.get("free_s"),
            "reason": cell.get("reason"),
        }


def _keys(cell: Mapping[str, Any]) -> tuple[str, str]:
    return ("deltas", "left") if cell["kind"] == CONTROL else ("net", "net_left")


def csv_rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the table, and beside them every counter before, held, after and net of the control."""
    for row, cell in zip(rows(found), found["cells"], strict=True):
        more = {
            f"{when} {column}": nbytes
            for when, numbers in (*cell.get("readings", {}).items(), ("net", cell.get("net", {})))
            for column, nbytes in numbers.items()
        }
        yield {**row, **more}
