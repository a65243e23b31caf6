"""The parent of a bench: one child at a time, the parity gate before any timing, rounds in alternating order."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from framepipe.bench import _parity, record
from framepipe.bench._gate import Room, room_for
from framepipe.bench._launch import Launch, Outcome, launch
from framepipe.bench._pictures import distinct
from framepipe.bench.cells import Cell, plan
from framepipe.bench.options import Options, Step
from framepipe.bench.record import FAILED, OK, REFUSED, UNAVAILABLE, UNFINISHED
from framepipe.errors import ConfigError, FramepipeError
from framepipe.redact import without_folders

_PARITY_FRAMES = {"staging": (24, 96), "pipeline": (24, 48)}
"""Least and most pictures whose hashes are compared: so many that slots are used again, where that is affordable."""
_PARITY_NBYTES = 256 << 20
_SAVE_S = 5.0


class Stopped(Exception):  # it is no error
    """The bench was told to stop; what is measured is in the record."""


class Bench:
    """One bench. `run` it once; ``record`` is there from the beginning of the measurements, whatever happens.

    ``stopping`` is asked several times a second, ``progress`` told as often; ``save`` gets the record every few seconds
    and at the end. ``previous`` is the record to go on from.
    """

    def __init__(
        self,
        options: Options,
        *,
        launch: Launch = launch,
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[Step], None] = lambda step: None,
        save: Callable[[Mapping[str, Any]], None] = lambda record: None,
        previous: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        room: Callable[[], Room] = Room.now,
    ) -> None:
        self.options = options
        self.record: dict[str, Any] | None = None
        self._launch, self._stopping, self._progress, self._save = launch, stopping, progress, save
        self._previous, self._clock, self._room = previous, clock, room
        self._inputs = {given.name: given for given in options.inputs}
        self._took_s: dict[str, list[float]] = {}
        self._unchecked = 0  # children of the parity gate that are still to come
        self._done = 0
        self._saved_s = self._began_s = clock()
        self._machine: dict[str, Any] = {}
        self._cells: Sequence[Cell] = ()
        self._entries: dict[str, dict[str, Any]] = {}
        self._room_now = Room(0)

    def run(self) -> dict[str, Any] | None:
        """Measure everything; the record, which is not complete if the bench was stopped, or None if that was at once.

        Raises `ConfigError` where options, machine or the previous record do not fit.
        """
        try:
            self._machine = self._ask_machine()
            self._room_now = self._room()  # once: what is ready in memory is the same for every repeat
            cells = self._plan()
            self._begin(cells)
            self._refuse(cells)
            self._gate(cells)
            self._measure(cells)
            assert self.record is not None
            self.record["complete"] = True
        except Stopped:
            pass
        finally:
            self._finish()
        return self.record

    # -- before the first figure --

    def _ask_machine(self) -> dict[str, Any]:
        names = list(self.options.strategies or ())
        outcome = self._child(
            "machine", {"device": self.options.wanted_device, "strategies": names}, "looking at this machine"
        )
        if outcome.result is None:
            error = ConfigError if outcome.exit_code == 2 else FramepipeError
            raise error(outcome.reason or "this machine cannot be examined")
        return dict(without_folders(outcome.result))

    def _plan(self) -> list[Cell]:
        device = self._machine["device"]
        names = _working_first(self._machine["strategies"])
        cells = plan(
            self.options.inputs,
            names,
            self.options.choice,
            device=self._device,
            shared=device["shared"],
            cpus=self._machine["cpus"],
        )
        if not cells:
            raise ConfigError("there is nothing to measure: no input can be used in the modes that were asked for")
        return cells

    @property
    def _device(self) -> str:
        device = self._machine["device"]
        if "model" in device:
            return f"{device['kind']}:{device['model']['text']}"
        return f"cuda:{device['number']}" if device["kind"] == "cuda" else str(device["kind"])

    def _begin(self, cells: Sequence[Cell]) -> None:
        options = self.options
        self.record = record.new(cells, options.inputs, self._machine, options.parameters(), options.command)
        self._cells = cells
        self._entries = {each["id"]: each for each in self.record["cells"]}
        if self._previous is not None:
            found = record.differences(self._previous, self.record)
            if found:
                self.record = None  # nothing of this may replace what is there
                raise ConfigError(f"this bench cannot go on: {'; '.join(found)}", found)
            record.adopt(self.record, self._previous)

    def _refuse(self, cells: Iterable[Cell]) -> None:
        """The strategies that are not to be had, and the cells that memory does not suffice for."""
        free = (self._machine["gpu"] or {}).get("free_bytes")
        for cell in cells:
            missing = self._machine["strategies"].get(cell.axes.strategy)
            if missing is not None:
                self._end(cell, UNAVAILABLE, missing)
            elif reason := room_for(cell, self._inputs[cell.axes.input], self._distinct(cell), self._room_now, free):
                self._end(cell, REFUSED, reason)

    # -- the parity gate --

    def _gate(self, cells: Sequence[Cell]) -> None:
        """Let through what delivers the same as all others of its group."""
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            if self._is_open(cell):
                groups.setdefault(cell.group, []).append(cell)
        unknown = {
            group: [cell for cell in found if self._entry(cell)["hash"] is None] for group, found in groups.items()
        }
        self._unchecked = sum(map(len, unknown.values())) + sum(map(bool, unknown.values()))
        for group, found in unknown.items():
            if found:
                self._compare(found, groups[group])

    def _compare(self, cells: Sequence[Cell], group: Sequence[Cell]) -> None:
        limit = self._parity_frames(group)
        wanted = self._reference(cells, limit)
        hashes: dict[Cell, list[str]] = {}
        for cell in cells:
            if not self._is_open(cell):
                self._unchecked -= 1
                continue
            outcome = self._child("parity", self._request(cell, parity_frames=limit), f"parity: {cell.id}")
            if outcome.result is not None and outcome.result["hashes"]:
                hashes[cell] = outcome.result["hashes"]
            else:
                self._fail(cell, outcome)
        if wanted is None and hashes:
            wanted = _parity.usual((cell.axes.strategy, found) for cell, found in hashes.items())
        for cell, found in hashes.items():
            self._entry(cell)["hash"] = _parity.together(found)
            if found != wanted:
                self._end(cell, REFUSED, _parity.unlike(found, wanted or []))

    def _reference(self, cells: Sequence[Cell], limit: int) -> list[str] | None:
        """What every cell has to deliver, made without any strategy; None where that cannot be had."""
        cell = cells[0]
        if self._inputs[cell.axes.input].kind == "pipeline":
            self._unchecked -= 1
            return None
        request = self._request(cell, parity_frames=limit)
        outcome = self._child("reference", request, f"reference: {cell.axes.input}", "parity")
        if outcome.result is not None:
            return list(outcome.result["hashes"])
        for each in cells:
            self._fail(each, outcome)
        return None

    def _parity_frames(self, cells: Iterable[Cell]) -> int:
        least, most, each = 0, 0, 1
        for cell in cells:
            low, most = _PARITY_FRAMES[cell.axes.mode]
            least = max(least, low, (cell.slots + 1) * cell.axes.batch)
            each = self._inputs[cell.axes.input].nbytes or 1
        return max(4, min(least, most, _PARITY_NBYTES // each))

    # -- measuring --

    def _measure(self, cells: Sequence[Cell]) -> None:
        repeat = self.options.repeat
        for number in range(repeat):
            for cell in cells if number % 2 == 0 else cells[::-1]:
                if not self._is_open(cell) or len(self._entry(cell)["runs"]) > number:
                    continue
                what = f"{number + 1}/{repeat} {cell.id}"
                outcome = self._child("measure", self._request(cell), what)
                if outcome.result is None:
                    self._fail(cell, outcome)
                else:
                    self._entry(cell)["runs"].append(without_folders(outcome.result))
            self._settle_all(cells)

    def _settle_all(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            if self._is_open(cell) and len(self._entry(cell)["runs"]) >= self.options.repeat:
                self._entry(cell)["status"] = OK

    def _request(self, cell: Cell, **more: Any) -> dict[str, Any]:
        batch = cell.axes.batch
        warmup = max(self.options.warmup, 2 * cell.slots * batch)
        given = self._inputs[cell.axes.input]
        return {
            "mode": cell.axes.mode,
            "input": {name: getattr(given, name) for name in ("kind", "uri", "width", "height", "pix_fmt")},
            "staging": {**cell.staging(), **{k: v for k, v in given.staging.items() if k == "batch_timeout_s"}},
            "device": self._device,
            "device_index": self._machine["device"]["number"] if self._machine["gpu"] else None,
            "warmup": _whole(warmup, batch),
            "frames": _whole(self.options.frames, batch),
            "least_s": self.options.least_s,
            "distinct": self._distinct(cell),
            "keep_sinks": self.options.keep_sinks,
            **more,
        }

    def _distinct(self, cell: Cell) -> int:
        nbytes = self._inputs[cell.axes.input].nbytes
        if cell.axes.mode != "staging" or not nbytes:
            return 0
        return distinct(nbytes, self._machine["cache_bytes"], self._room_now.available_nbytes)

    # -- children --

    def _child(self, do: str, request: Mapping[str, Any], what: str, kind: str = "") -> Outcome:
        """Run one child to its end; its time helps to tell how long the rest will take."""
        kind = kind or do
        self._show(what)
        if self._stopping():
            raise Stopped
        began_s = self._clock()
        with tempfile.TemporaryDirectory(prefix="framepipe-", ignore_cleanup_errors=True) as folder:
            whole = {
                "do": do,
                "allow_code": self.options.allow_code,
                "path": [os.getcwd()] if self.options.allow_code else [],
                "folder": folder if request.get("keep_sinks") else None,
                **request,
            }
            outcome = self._launch(whole, lambda: self._look(what), self.options.timeout_s)
        if outcome.stopped:
            raise Stopped
        self._took_s.setdefault(kind, []).append(self._clock() - began_s)
        self._done += 1
        self._unchecked -= kind == "parity"
        if self.record is not None and self._clock() - self._saved_s >= _SAVE_S:
            self._saved_s = self._clock()
            self._save(self.record)
        return outcome

    def _look(self, what: str) -> bool:
        self._show(what)
        return self._stopping()

    def _show(self, what: str) -> None:
        left = sum(self._left.values()) if self.record is not None else 1
        self._progress(Step(self._done, self._done + left, self._left_s(), what))

    @property
    def _left(self) -> dict[str, int]:
        """How many children are still to come, the one at work included."""
        runs = [len(each["runs"]) for each in self._entries.values() if each["status"] == UNFINISHED]
        return {"parity": self._unchecked, "measure": sum(max(0, self.options.repeat - count) for count in runs)}

    def _left_s(self) -> float | None:
        """By the middle of the children so far; a repeat takes about as long as a look at parity while none was run."""
        usual = self._took_s.get("measure") or self._took_s.get("parity")
        if not usual:
            return None
        each = {kind: statistics.median(self._took_s.get(kind) or usual) for kind in ("parity", "measure")}
        return sum(count * each[kind] for kind, count in self._left.items())

    # -- the state of cells --

    def _entry(self, cell: Cell) -> dict[str, Any]:
        return self._entries[cell.id]

    def _is_open(self, cell: Cell) -> bool:
        return bool(self._entry(cell)["status"] == UNFINISHED)

    def _end(self, cell: Cell, status: str, reason: str) -> None:
        self._entry(cell).update(status=status, reason=without_folders(reason))

    def _fail(self, cell: Cell, outcome: Outcome) -> None:
        reason = outcome.reason or "nothing was delivered"
        if outcome.kind != "SizeChangedError":
            self._end(cell, FAILED, reason)
            return
        for each in self._cells:  # it is the input's doing
            if each.group == cell.group and self._is_open(each):
                self._end(each, REFUSED, reason)

    def _finish(self) -> None:
        if self.record is None:
            return
        for each in self.record["cells"]:
            # A rate over two sizes, or of a strategy that then failed, would look like any other.
            each["summary"] = record.summary(each["runs"] if each["status"] in (OK, UNFINISHED) else [])
        took_s = self._clock() - self._began_s
        self.record["provenance"]["seconds"] = round(self.record["provenance"]["seconds"] + took_s, 2)
        self._save(self.record)


def _whole(frames: int, batch: int) -> int:
    return -(-frames // batch) * batch


def _working_first(strategies: Mapping[str, str | None]) -> list[str]:
    return sorted(strategies, key=lambda name: strategies[name] is not None)
