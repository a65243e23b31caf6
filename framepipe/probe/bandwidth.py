"""``probe bandwidth``: copies between host and device, by kind of memory and size, and copies by the processor alone.

The fastest is this machine's ceiling, and kept as its baseline (`framepipe.probe.baselines`), which others measure
themselves against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from framepipe.errors import ConfigError
from framepipe.hardware import cpus
from framepipe.probe import baselines, record
from framepipe.probe._host_copies import REGION_NBYTES
from framepipe.probe.kinds import KINDS, Kind, chosen
from framepipe.probe.machine import Available, Machine, available, identity
from framepipe.probe.steps import Run, Step, Tell, carry_out
from framepipe.units import format_bytes

SIZES_NBYTES = tuple((64 << 10) * 4**step for step in range(7))
"""64 KiB to 256 MiB."""
THREADS = (1, 2, 4, 8)
HOST_COPY = "host_copy"
NAMES = ("default", "pageable", "write_combined", "mapped", "registered", HOST_COPY)
_PROCESSOR = Kind(HOST_COPY, "two anonymous mappings, every page touched")
_COPY = {
    "mapped": "a kernel reads and writes it over the bus",
    HOST_COPY: "ctypes.memmove, every thread blocks of its own",
}
_TIMEOUT_S = 300.0
_WORD = 16


def probe(
    machine: Machine,
    run: Run,
    *,
    sizes: Sequence[int] = SIZES_NBYTES,
    threads: Sequence[int] = THREADS,
    repeats: int = 5,
    kinds: Sequence[str] | None = None,
    region: int = REGION_NBYTES,
    tell: Tell = lambda words: None,
    memory: Callable[[], Available] = available,
    command: str | None = None,
) -> dict[str, Any]:
    """The record: a cell for each of ``kinds`` (of `NAMES`), whose ``rows`` are sizes and directions, or threads.

    Rates are medians of ``repeats``, after one that is not counted. More threads than this process has CPUs are left
    out, with a note. The processor copies within ``region``, which is to be larger than its caches; sizes that do not
    fit it once for each thread are left out. Raises `ConfigError`; ``run`` is as in `framepipe.probe.pinned.probe`.
    """
    names = chosen(kinds, NAMES, NAMES)
    if not sizes or any(nbytes < _WORD or nbytes % _WORD for nbytes in sizes):
        raise ConfigError(f"a size is a multiple of {_WORD} bytes")
    if repeats < 1 or not threads or min(threads) < 1:
        raise ConfigError("there is at least one repeat, and one thread")
    able = [count for count in threads if count <= cpus()] or [1]
    parameters = {"sizes": list(sizes), "threads": able, "repeats": repeats, "kinds": names, "region": region}
    found = record.new("bandwidth", machine, parameters, command)
    if len(able) < len(threads):
        found["notes"].append(f"copies by more than {max(able)} threads left out: this process may use {cpus()} CPUs")
    request = {"probe": "bandwidth", "sizes": list(sizes), "threads": able, "repeats": repeats, "region": region}
    carry_out(found, [_step(name, request) for name in names], machine, run, tell, memory)
    return found


def _step(name: str, request: Mapping[str, Any]) -> Step:
    kind, most = KINDS.get(name, _PROCESSOR), max(request["sizes"])
    return Step(
        label=name,
        cell={"kind": name, "call": kind.call, "copy": _COPY.get(name, "cudaMemcpyAsync")},
        request={**request, "kind": name},
        timeout_s=_TIMEOUT_S,
        # Every copy but the processor's has the GPU at its other end, whatever the memory is.
        kind=replace(kind, cuda=name != HOST_COPY),
        nbytes=2 * max(request["region"], most) if name == HOST_COPY else most,
    )


def baseline(path: str | Path | None = None, *, key: str | None = None) -> dict[str, Any] | None:
    """What `probe bandwidth` last measured on this machine (`framepipe.probe.baselines`), or None.

    ``path`` is the file, by default the user's. ``key`` is that of `framepipe.probe.machine.identity`, by default of
    the first GPU under its driver; looking that up initialises the CUDA driver and makes no context. Raises
    `ConfigError` for a file that is something else.
    """
    machines = baselines.read(baselines.default_path() if path is None else Path(path))
    if not machines:
        return None
    found: dict[str, Any] | None = machines.get(identity() if key is None else key)
    return found


def rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each kind, direction or threads, and size; one for a cell that could not be."""
    for cell in found["cells"]:
        known = cell.get("rows", ())
        for row in known:
            yield {
                "kind": cell["kind"],
                "direction": row.get("direction"),
                "threads": row.get("threads"),
                "nbytes": row["nbytes"],
                "status": "ok",
                **{f"bytes_per_s_{key}": rate for key, rate in row["bytes_per_s"].items()},
                **{f"wall_bytes_per_s_{key}": rate for key, rate in row.get("wall_bytes_per_s", {}).items()},
                "reason": None,
            }
        if cell["status"] != "ok":
            yield {"kind": cell["kind"], "status": cell["status"], "reason": cell.get("reason")}


def against(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> Iterator[str]:
    """In words what each ceiling is, and what it was when the older baseline was measured."""
    words = {"to_device": "host to device", "to_host": "device to host", "host_copy": "host to host"}
    for name, said in words.items():
        column = f"{name}_bytes_per_s"
        rate = new["ceiling"].get(column) if new else None
        was = old["ceiling"].get(column) if old else None
        if rate is not None:
            before = f" (was {format_bytes(was)}/s, {old['measured']})" if was and old else ""
            yield f"{said}: {format_bytes(rate)}/s{before}"
