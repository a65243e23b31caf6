"""What is measured for the checks: rates of the bus, pinning and freeing, and what holding a pinned block moves.

These are short runs of the probes (`framepipe.probe`), each in child processes. `measures` makes of them what two
records are compared by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from framepipe.errors import DeviceUnavailableError
from framepipe.guard.waiting import Patience
from framepipe.probe import bandwidth, baselines, children, churn, machine, pinned
from framepipe.probe.machine import RESERVE_NBYTES, Available, Machine
from framepipe.units import format_bytes

Run = Callable[[Mapping[str, Any], float], dict[str, Any]]
_COPY_NBYTES = 64 << 20
_PINNED_NBYTES, _HOST_NBYTES = 1 << 30, 256 << 20
_PINNED_WSL2_NBYTES = (256 << 20, 512 << 20, 1 << 30)
"""Users of WSL 2 report limits between these (microsoft/WSL#14078); the largest that can be had says where it is."""
_CHURN_S = 0.5
_PATIENCE = Patience(window_s=0.3, timeout_s=5.0)
_WORDS = {"to_device": "host to device", "to_host": "device to host", "host_copy": "host to host"}
_NO_DIFFERENCE = {"take_p50_ms": 0.02, "free_lost_bytes": 8 << 20, "not_back_bytes": 8 << 20, "context_bytes": 16 << 20}
"""Differences below these are never told: the counters of a whole device move by as much on their own."""


def silent(words: str) -> None:
    """Say nothing of what is being measured."""


@dataclass(frozen=True)
class How:
    """``rounds`` of everything, of the GPU that ``device`` names; ``run`` and ``memory`` are played in tests."""

    rounds: int = 1
    device: str = "auto"
    run: Run = children.run
    tell: Callable[[str], None] = silent
    memory: Callable[[], Available] = machine.available
    clock: Callable[[], float] = time.perf_counter


def measure(how: How, *, wsl2: bool, used_bytes: Mapping[str, int | None]) -> dict[str, Any]:
    """What was measured, plain values: ``seconds``, ``complete``, ``machine``, ``device`` as it was asked for, and
    lists with an item a round.

    ``rates`` are those of `framepipe.probe.baselines.of`, ``churn`` and ``pinned`` rows of these probes, with the
    counters of the last ``control`` as ``counters`` and their ``sources``. ``used_bytes`` is what was used of each GPU,
    by its UUID, before any of our processes was on it. A GPU that was asked for and is not there is a ``reason``.
    """
    began_s = how.clock()
    try:
        there, reason = machine.examine(how.device, how.run), None
    except DeviceUnavailableError as error:
        there, reason = machine.examine("cpu", how.run), str(error)
    found: dict[str, Any] = {"rounds": how.rounds, "device": how.device, "machine": there.about}
    found["reason"] = reason or there.reason
    lists: dict[str, list[Any]] = {"rates": [], "churn": [], "pinned": []}
    counters: dict[str, Any] = {"counters": {}, "sources": {}, "missing": {}}
    complete = True
    for number in range(1, how.rounds + 1):
        records = list(_round(there, how, wsl2, f" ({number}/{how.rounds})" if how.rounds > 1 else ""))
        for (name, read), record in zip(_READ.items(), records, strict=False):
            lists[name].append(read(record))
            complete = complete and record["complete"]
        if len(records) == len(_READ):
            counters = _counters(records[-1]) or counters
        if not complete:
            break
    context = _context_bytes(there, counters["counters"], used_bytes)
    seconds = round(how.clock() - began_s, 1)
    return {**found, "seconds": seconds, "complete": complete, **lists, **counters, "context_bytes": context}


def _round(there: Machine, how: How, wsl2: bool, which: str) -> Iterator[dict[str, Any]]:
    """The records of one round; an interrupted one is the last."""
    gpu = there.device is not None
    kinds = ["default", "pageable", bandwidth.HOST_COPY] if gpu else [bandwidth.HOST_COPY]
    pins = "default" if gpu else "pageable"
    steps: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: bandwidth.probe(
            there, how.run, sizes=(_COPY_NBYTES,), threads=(1,), repeats=3, kinds=kinds, memory=how.memory
        ),
        lambda: churn.probe(
            there, how.run, seconds=_CHURN_S, per_s=0, kinds=[pins, f"{pins}-pooled"], memory=how.memory
        ),
        lambda: pinned.probe(
            there, how.run, sizes=_sizes(gpu, wsl2, how.memory()), kinds=[pins], patience=_PATIENCE, memory=how.memory
        ),
    )
    for words, step in zip(("copies", "pinning and freeing", "a pinned block"), steps, strict=True):
        how.tell(f"measuring {words}{which}")
        record = step()
        yield record
        if not record["complete"]:
            return


def _sizes(gpu: bool, wsl2: bool, has: Available) -> tuple[int, ...]:
    """As large as a page table's cost can be seen by, and no more than half of what there is."""
    wanted: tuple[int, ...] = (_PINNED_NBYTES if gpu else _HOST_NBYTES,)
    if wsl2 and gpu:
        wanted = _PINNED_WSL2_NBYTES
    most = max(16 << 20, (has.nbytes - RESERVE_NBYTES) // 2 >> 20 << 20)
    return tuple(dict.fromkeys(min(nbytes, most) for nbytes in wanted))


def _rates(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    made = baselines.of(record)
    return made["rates"] if made else []


def _pinned_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in pinned.rows(record) if row["kind"] != pinned.CONTROL]


def _churn_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in churn.rows(record) if row["kind"] != pinned.CONTROL]


_READ: dict[str, Callable[[Mapping[str, Any]], list[dict[str, Any]]]] = {
    "rates": _rates,
    "churn": _churn_rows,
    "pinned": _pinned_rows,
}


def _counters(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every counter of one moment in a process that has a context and nothing else."""
    control = record["cells"][0]
    if "readings" not in control:
        return None
    return {
        "counters": control["readings"]["before"],
        "sources": dict(control["sources"]),
        "missing": dict(control["missing"]),
    }


def _context_bytes(there: Machine, counters: Mapping[str, Any], used_bytes: Mapping[str, int | None]) -> int | None:
    """Device memory that a process takes with its context alone: NVML's ``used`` then less what it was before."""
    gpu = there.gpu
    before = used_bytes.get(f"GPU-{gpu['uuid']}") if gpu else None
    then = counters.get("nvml.used")
    return max(0, then - before) if before is not None and then is not None else None


# -- what two records are compared by --


def measures(measured: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """``id``, ``measure``, ``samples`` (one a round), ``more_is_better``, and the ``least`` difference that is told."""
    if not measured:
        return []
    return [*_rate_measures(measured), *_churn_measures(measured), *_pinned_measures(measured)]


def _measure(name: str, measure: str, samples: Sequence[float | None], *, more: bool = False) -> Iterator[Any]:
    known = [float(sample) for sample in samples if sample is not None]
    if known:
        least = _NO_DIFFERENCE.get(measure, 0)
        yield {"id": name, "measure": measure, "samples": known, "more_is_better": more, "least": least}


def _rate_measures(measured: Mapping[str, Any]) -> Iterator[Any]:
    series: dict[tuple[str, str, int], list[float]] = {}
    for rates in measured["rates"]:
        for rate in rates:
            series.setdefault((rate["what"], rate["kind"], rate["nbytes"]), []).append(rate["bytes_per_s"])
    for (what, kind, nbytes), samples in series.items():
        of = "" if kind == bandwidth.HOST_COPY else f", {kind}"
        yield from _measure(f"copy {_WORDS[what]}{of}, {format_bytes(nbytes)}", "bytes_per_s", samples, more=True)


def _churn_measures(measured: Mapping[str, Any]) -> Iterator[Any]:
    for kind in dict.fromkeys(row["kind"] for rows in measured["churn"] for row in rows):
        own = [row["take_p50_ms"] for rows in measured["churn"] for row in rows if row["kind"] == kind]
        yield from _measure(f"take a block, {kind}", "take_p50_ms", own)


def _pinned_measures(measured: Mapping[str, Any]) -> Iterator[Any]:
    for key in dict.fromkeys((row["kind"], row["requested"]) for rows in measured["pinned"] for row in rows):
        own = [row for rows in measured["pinned"] for row in rows if (row["kind"], row["requested"]) == key]
        name = f"hold {format_bytes(key[1])}, {key[0]}"
        yield from _measure(name, "free_lost_bytes", [_less(row["free"]) for row in own])
        yield from _measure(name, "not_back_bytes", [_less(row["free_after"]) for row in own])
        yield from _measure(name, "refused", [float(row["status"] == "failed") for row in own])
    yield from _measure("a CUDA context", "context_bytes", [measured["context_bytes"]])


def _less(nbytes: int | None) -> int | None:
    return None if nbytes is None else max(0, -nbytes)


# -- for the checks --


def rate(measured: Mapping[str, Any] | None, what: str, kind: str) -> float | None:
    """The median rate of one direction and kind of memory, in bytes a second, or None."""
    rates = measured["rates"] if measured else []
    own = [each["bytes_per_s"] for some in rates for each in some if (each["what"], each["kind"]) == (what, kind)]
    return median(own) if own else None


def churn_row(measured: Mapping[str, Any] | None, *, pooled: bool) -> Mapping[str, Any] | None:
    """The last row of blocks that were pinned (on a CPU: mapped) and freed each time, or of the pooled ones."""
    rows = [row for rows in (measured["churn"] if measured else []) for row in rows]
    own = [row for row in rows if row["kind"].endswith("-pooled") == pooled]
    return own[-1] if own else None


def pinned_rows(measured: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The rows of pinned blocks of the last round."""
    return list(measured["pinned"][-1]) if measured and measured["pinned"] else []
