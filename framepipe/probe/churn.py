"""``probe churn``: small blocks of mixed sizes taken and given back for a while, and what accumulates meanwhile.

Each cell is a child process that holds a few blocks, gives the oldest back and takes another, so many a second: from a
free list of exact sizes (``-pooled``), or made and freed every time. Beside the cells stands a control that allocates
nothing and reads the same counters. A slope is a description of the time measured, no forecast and no cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from framepipe.errors import ConfigError
from framepipe.probe import record
from framepipe.probe._churn_cell import BUDGET_NBYTES
from framepipe.probe.kinds import KINDS, chosen
from framepipe.probe.machine import Available, Machine, available
from framepipe.probe.pinned import CONTROL
from framepipe.probe.steps import Run, Step, Tell, carry_out
from framepipe.units import format_seconds

_POOLED = "-pooled"
_HOST_NAMES = [CONTROL, *(f"{name}{how}" for name in ("pageable", "mlock") for how in ("", _POOLED))]
_GPU_NAMES = [CONTROL, "default", "default-pooled", "registered", "registered-pooled"]
NAMES = [CONTROL, *(f"{name}{how}" for name in KINDS if name != CONTROL for how in ("", _POOLED))]
"""All cells that can be asked for."""
_START_S = 120.0


def probe(
    machine: Machine,
    run: Run,
    *,
    seconds: float = 60.0,
    per_s: float = 200.0,
    seed: int = 1,
    kinds: Sequence[str] | None = None,
    tell: Tell = lambda words: None,
    memory: Callable[[], Available] = available,
    command: str | None = None,
) -> dict[str, Any]:
    """The record: a cell for each of ``kinds`` (of `NAMES`), ``seconds`` each. Raises `ConfigError`.

    ``per_s`` blocks a second are taken, as far as that can be kept up; 0 is as many as it can. The same ``seed`` gives
    the same sizes in the same order. ``run`` is as in `framepipe.probe.pinned.probe`.
    """
    if seconds <= 0 or per_s < 0:
        raise ConfigError("churning takes some time, and a rate of 0 (as fast as it can) or more a second")
    names = chosen(kinds, NAMES, _HOST_NAMES if machine.device is None else _GPU_NAMES)
    names = [CONTROL, *(name for name in names if name != CONTROL)]
    found = record.new("churn", machine, {"seconds": seconds, "per_s": per_s, "seed": seed, "kinds": names}, command)
    steps = [_step(name, {"seconds": seconds, "per_s": per_s, "seed": seed}) for name in names]
    carry_out(found, steps, machine, run, tell, memory)
    return found


def _step(name: str, parameters: Mapping[str, Any]) -> Step:
    kind, pooled = KINDS[name.removesuffix(_POOLED)], name.endswith(_POOLED)
    return Step(
        label=f"{name} for {format_seconds(parameters['seconds'])}",
        cell={"kind": name, "call": kind.call, "pooled": pooled},
        request={"probe": "churn", "kind": kind.name, "pooled": pooled, **parameters},
        timeout_s=_START_S + 1.5 * parameters["seconds"],
        kind=kind,
        nbytes=BUDGET_NBYTES if kind.host else 0,
    )


def rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a cell: rates a second, latencies in ms, and errors."""
    for cell in found["cells"]:
        yield {
            "kind": cell["kind"],
            "status": cell["status"],
            "seconds": cell.get("seconds"),
            **{key: cell.get(key) for key in ("takes_per_s", "allocations_per_s", "frees_per_s")},
            **{f"{what}_{key}": number for what in ("take", "give") for key, number in _latency(cell, what).items()},
            "errors": "; ".join(f"{count} x {name}" for name, count in cell.get("errors", {}).items()) or None,
            "reason": cell.get("reason"),
        }


def _latency(cell: Mapping[str, Any], what: str) -> dict[str, Any]:
    known = cell.get(what) or {}
    return {key: known.get(key) for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms")}


def csv_rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the table, and beside them the slope of every counter with its interval."""
    for row, cell in zip(rows(found), found["cells"], strict=True):
        more = {
            f"{column} {key}": number
            for column, line in cell.get("slopes", {}).items()
            for key, number in line.items()
            if key != "count"
        }
        yield {**row, **more}


def moving(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The counters whose interval leaves zero out, cell by cell, and the control's slope of each beside it."""
    control: Mapping[str, Any] = next(
        (cell.get("slopes", {}) for cell in found["cells"] if cell["kind"] == CONTROL), {}
    )
    for cell in found["cells"]:
        for column, line in cell.get("slopes", {}).items():
            if line["low"] > 0 or line["high"] < 0:
                yield {"kind": cell["kind"], "column": column, **line, "control": control.get(column)}
