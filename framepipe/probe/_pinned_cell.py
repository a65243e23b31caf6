"""One cell of ``probe pinned``, in its child process: every counter before, while a block is held, and afterwards."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from framepipe.guard.waiting import REAL, Clock, Patience, Settled
from framepipe.probe._host_blocks import Block, RefusedError
from framepipe.probe.counters import Counters, back_s, decides, difference, open_counters, settle

Tell = Callable[[Any], None]
_SLICE_S = 0.5


def run(request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """The cell that ``request`` describes (`framepipe.probe.pinned`), with real counters and real memory."""
    device = request["device"]
    makers = makers_of(device)
    counters = open_counters(device, os.getpid())
    try:
        return measure(request, tell, counters, makers[request["kind"]])
    finally:
        counters.close()


def makers_of(device: int | None) -> Mapping[str, Callable[[int], Block]]:
    """What makes the blocks, by kind; with a device its context is made first."""
    if device is None:
        host: Mapping[str, Callable[[int], Block]] = importlib.import_module("framepipe.probe._host_blocks").BLOCKS
        return host
    cuda = importlib.import_module("framepipe.probe._cuda_blocks")
    cuda.start(device)
    found: Mapping[str, Callable[[int], Block]] = cuda.BLOCKS
    return found


def measure(
    request: Mapping[str, Any], tell: Tell, counters: Counters, make: Callable[[int], Block], clock: Clock = REAL
) -> dict[str, Any]:
    """Read, allocate, read, hold, release, read until everything is back; a refusal is measured like a success."""
    patience = Patience(**request["patience"])
    before = settle(counters.read, patience, clock=clock)
    block, error = _attempt(make, request["nbytes"])
    held = settle(counters.read, patience, clock=clock)
    missing = dict(counters.missing)
    if block is not None and request["hold_s"]:
        _hold(request["hold_s"], tell, clock)
    began_s = clock.now()
    failed = _release(block)
    free_s = clock.now() - began_s
    after = settle(counters.read, patience, target=before.row, began_s=began_s, clock=clock)
    return {
        **_verdict(block, error, failed),
        "steps_s": {} if block is None else {step: round(seconds, 6) for step, seconds in block.steps_s.items()},
        "free_s": None if block is None else round(free_s, 6),
        **_readings(before, held, after, patience),
        "missing": missing,
        "sources": counters.sources,
        "curve": after.curve(),
    }


def _attempt(make: Callable[[int], Block], nbytes: int) -> tuple[Block | None, RefusedError | None]:
    try:
        return make(nbytes), None
    except RefusedError as error:
        return None, error


def _release(block: Block | None) -> RefusedError | None:
    try:
        if block is not None:
            block.free()
    except RefusedError as error:
        return error
    return None


def _verdict(block: Block | None, refused: RefusedError | None, failed: RefusedError | None) -> dict[str, Any]:
    error = refused or failed
    if error is None:
        return {"status": "ok", "reason": None, "error": None}
    status = "refused" if refused is not None and refused.code is None else "failed"
    return {"status": status, "reason": str(error), "error": error.as_json()}


def _hold(seconds: float, tell: Tell, clock: Clock) -> None:
    end_s = clock.now() + seconds
    tell({"holding_s": seconds, "pid": os.getpid()})
    while (left_s := end_s - clock.now()) > 0:
        clock.sleep(min(left_s, _SLICE_S))


def _readings(before: Settled, held: Settled, after: Settled, patience: Patience) -> dict[str, Any]:
    deltas = difference(held.row, before.row)
    moved = [column for column, delta in deltas.items() if _counts(column, delta, patience)]
    back = {column: back_s(after.rows, before.row, column, patience.eps_nbytes) for column in moved}
    return {
        "readings": {"before": before.row, "held": held.row, "after": after.row},
        "waits": {"before": before.as_json(), "held": held.as_json(), "after": after.as_json()},
        "deltas": deltas,
        "left": difference(after.row, before.row),
        "back_s": {column: None if time_s is None else round(time_s, 4) for column, time_s in back.items()},
        "recovery_s": _last(back),
    }


def _counts(column: str, delta: int | None, patience: Patience) -> bool:
    return decides(column) and delta is not None and abs(delta) > patience.eps_nbytes


def _last(back: Mapping[str, float | None]) -> float | None:
    """When the last of the counters that had moved was back; None if none moved or one is still away."""
    times = list(back.values())
    return round(max(known), 4) if times and len(known := [t for t in times if t is not None]) == len(times) else None
