"""Two benches, run reports or records of the doctor: what got better, what got worse, and what is noise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from framepipe.bench._reading import leaves, middle, samples
from framepipe.bench.noise import TOLERANCE, differs
from framepipe.errors import ConfigError

SCHEMA = "framepipe.compare/1"
BENCH, RUN, DOCTOR = "framepipe.bench/1", "framepipe.run/1", "framepipe.doctor/1"
_KINDS = {BENCH: "bench", RUN: "run", DOCTOR: "doctor"}
BETTER, WORSE, NOISE = "better", "worse", "within noise"
FIRST_ONLY, SECOND_ONLY = "only in first", "only in second"

# What differs between any two benches and explains nothing.
_PASSING = (
    *("command", "started", "seconds", "load", "gpu.bus_bytes_per_s"),
    *("versions.framepipe", "versions.python", "versions.os"),  # said outside of versions as well
)
# Durations that a run report has among the parameters of its staging.
_MEASURED = tuple(f"staging.{name}" for name in ("copy_ms", "allocate_ms", "release_ms", "upload_ms"))
_MEASURES = {"fps": True, "pinned_bytes_taken": False, "vram_peak_bytes": False}
"""What is judged of a cell, and whether more of it is better."""


@dataclass(frozen=True)
class Row:
    """One measure of one cell (or of a run, or a machine) on both sides.

    ``first`` and ``second`` are medians, None where there is none; ``ratio`` is second to first. ``verdict`` is
    ``better``, ``worse``, ``within noise``, ``only in first`` or ``only in second``; ``reason`` says more, or is None.
    """

    id: str
    measure: str
    first: float | None
    second: float | None
    ratio: float | None
    verdict: str
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    ``kind`` is ``bench``, ``run`` or ``doctor``; ``provenance`` has name, first and second value of what was not the
    same.
    """

    kind: str
    tolerance: float
    provenance: tuple[tuple[str, Any, Any], ...]
    rows: tuple[Row, ...]

    def count(self, verdict: str) -> int:
        """How many rows have this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, schema ``framepipe.compare/1``."""
        verdicts = (WORSE, BETTER, NOISE, FIRST_ONLY, SECOND_ONLY)
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "tolerance": self.tolerance,
            "provenance": [{"name": name, "first": first, "second": second} for name, first, second in self.provenance],
            "counts": {verdict: self.count(verdict) for verdict in verdicts},
            "rows": [asdict(row) for row in self.rows],
        }


def load(path: str | Path) -> dict[str, Any]:
    """A bench record, a run report or a doctor's baseline from its file; `ConfigError` for anything else."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    schema = record.get("schema") if isinstance(record, dict) else None
    if not isinstance(record, dict) or schema not in _KINDS:
        known = f"neither a bench ({BENCH}), a run report ({RUN}) nor a baseline of the doctor ({DOCTOR})"
        other = f"its schema is {schema!r}" if schema is not None else "it has no schema"
        raise ConfigError(f"{path}: is {known}: {other}")
    return record


def compare(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float = TOLERANCE) -> Comparison:
    """Compare two records of one schema, the second with the first.

    Cells of benches are matched by id and judged by `framepipe.bench.noise.differs`, from their repeats; so are the
    measures of a doctor's baseline. Run reports have no repeats, so that ``tolerance`` (a share of the first figure)
    alone decides. Raises `ConfigError` where the
    schemas differ or nothing is in both, and for a tolerance below 0.
    """
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"the tolerance is a share of 0 or more, such as 0.03, not {tolerance}")
    if first.get("schema") != second.get("schema"):
        kinds = f"{first.get('schema')} and {second.get('schema')}"
        raise ConfigError(f"{kinds} cannot be compared: give two records of one kind")
    kind = _KINDS[str(first["schema"])]
    find_rows, find_provenance = {
        "bench": (_bench_rows, _bench_provenance),
        "run": (_run_rows, _run_provenance),
        "doctor": (_doctor_rows, _doctor_provenance),
    }[kind]
    try:
        rows = tuple(find_rows(first, second, tolerance))
        provenance = tuple(find_provenance(first, second))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a record is not as its schema says: {type(error).__name__}: {error}") from error
    if not any(row.verdict in (BETTER, WORSE, NOISE) for row in rows):
        raise ConfigError("the two have nothing in common that could be compared")
    return Comparison(kind, tolerance, provenance, rows)


# -- benches --


def _bench_rows(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float) -> Iterator[Row]:
    here, there = ({cell["id"]: cell for cell in record["cells"]} for record in (first, second))
    for name in [*here, *(name for name in there if name not in here)]:
        yield from _cell_rows(name, here.get(name), there.get(name), tolerance)


def _cell_rows(
    name: str, first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, tolerance: float
) -> Iterator[Row]:
    here, there = _status(first), _status(second)
    if here == there == "ok":
        assert first is not None and second is not None
        for measure, more_is_better in _MEASURES.items():
            yield from _judged(
                name, measure, samples(first, measure), samples(second, measure), more_is_better, tolerance
            )
    elif "ok" in (here, there):
        yield _one_sided(name, first, second, here, there)


def _one_sided(
    name: str, first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, here: str, there: str
) -> Row:
    """A cell that was measured on one side: worse or better if it was tried on the other and did not work."""
    lost = here == "ok"
    other, status = (second, there) if lost else (first, here)
    reason = None if other is None else f"{status}: {other.get('reason') or 'no reason given'}"
    tried = (WORSE, BETTER) if status in ("failed", "refused") else (FIRST_ONLY, SECOND_ONLY)
    figures = [None if cell is None else middle(samples(cell, "fps")) for cell in (first, second)]
    return Row(name, "fps", figures[0], figures[1], None, tried[0 if lost else 1], reason)


def _status(cell: Mapping[str, Any] | None) -> str:
    return "absent" if cell is None else str(cell.get("status"))


# -- run reports --


def _run_rows(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float) -> Iterator[Row]:
    here, there = _run_measures(first), _run_measures(second)
    for name in [*here, *(name for name in there if name not in here)]:
        owner, measure, more_is_better = name
        one, other = ([value] if (value := side.get(name)) is not None else [] for side in (here, there))
        yield from _judged(owner, measure, one, other, more_is_better, tolerance)
    ends = [str(record.get("exit")) for record in (first, second)]
    if ends[0] != ends[1] and "complete" in ends:
        verdict = WORSE if ends[0] == "complete" else BETTER
        yield Row("run", "exit", None, None, None, verdict, f"{ends[0]}, then {ends[1]}")


def _run_measures(report: Mapping[str, Any]) -> dict[tuple[str, str, bool], float | None]:
    """Figures by owner, measure and whether more is better."""
    found: dict[tuple[str, str, bool], float | None] = {("run", "fps", True): report.get("fps")}
    for name in _MEASURED:
        times = (report.get("staging") or {}).get(name.removeprefix("staging.")) or {}
        found["staging", f"{name.removeprefix('staging.').removesuffix('_ms')} p50_ms", False] = times.get("p50_ms")
    for stage, times in (report.get("stages") or {}).items():
        for at in ("p50_ms", "p95_ms"):
            found[f"stage {stage}", at, False] = times.get(at)
            found[f"stage {stage}", f"device {at}", False] = (times.get("device") or {}).get(at)
    memory = report.get("memory") or {}
    for name in ("pinned_bytes", "pinned_bytes_taken", "pageable_bytes", "device_bytes_peak", "rss_peak_bytes"):
        found["memory", name, False] = memory.get(name)
    return found


# -- baselines of the doctor --


def _doctor_rows(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float) -> Iterator[Row]:
    """The measures that a record has under ``measures``, each with its samples, by id and name."""
    here, there = ({(each["id"], each["measure"]): each for each in record["measures"]} for record in (first, second))
    for key in [*here, *(key for key in there if key not in here)]:
        known = here.get(key) or there[key]
        one, other = (side[key]["samples"] if key in side else () for side in (here, there))
        once = min(len(one), len(other)) < 2
        for row in _judged(*key, one, other, known["more_is_better"], tolerance, known.get("least", 0)):
            told = once and row.verdict in (BETTER, WORSE)
            yield replace(row, reason="measured once: its noise is not known") if told else row


def _doctor_provenance(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from _differences(first["fingerprint"], second["fingerprint"])


# -- all --


def _judged(
    name: str,
    measure: str,
    first: Sequence[float],
    second: Sequence[float],
    more_is_better: bool,
    tolerance: float,
    least: float = 0,
) -> Iterator[Row]:
    """The row of one measure, if it is on either side; medians less than ``least`` apart are within the noise."""
    here, there = middle(first), middle(second)
    if here is None and there is None:
        return
    if here is None or there is None:
        yield Row(name, measure, here, there, None, SECOND_ONLY if here is None else FIRST_ONLY)
        return
    verdict = NOISE
    if abs(there - here) >= least and differs(first, second, tolerance):
        verdict = BETTER if (there > here) == more_is_better else WORSE
    yield Row(name, measure, here, there, there / here if here else None, verdict)


def _bench_provenance(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from _differences(first.get("provenance"), second.get("provenance"), skip=_PASSING)
    here, there = ({cell["id"]: cell.get("hash") for cell in record["cells"]} for record in (first, second))
    for name in here:
        if here[name] and there.get(name) and here[name] != there[name]:
            yield f"outputs of {name}", here[name], there[name]


def _run_provenance(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in ("pipeline", "device", "staging", "versions"):
        yield from _differences(first.get(name), second.get(name), prefix=name, skip=_MEASURED)
    uris = [[source.get("uri") for source in record.get("sources") or ()] for record in (first, second)]
    yield from _differences(uris[0], uris[1], prefix="sources")
    frames = [(record.get("frames") or {}).get("delivered") for record in (first, second)]
    yield from _differences(frames[0], frames[1], prefix="frames.delivered")


def _differences(first: Any, second: Any, prefix: str = "", skip: Sequence[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Leaves of two JSON values that are not equal, with their dotted names."""
    here, there = dict(leaves(first, prefix)), dict(leaves(second, prefix))
    for name in [*here, *(name for name in there if name not in here)]:
        if here.get(name) != there.get(name) and not any(name == each or name.startswith(f"{each}.") for each in skip):
            yield name, here.get(name), there.get(name)
