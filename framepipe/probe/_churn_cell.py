"""One cell of ``probe churn``, in its child process: blocks taken and given for a while, counters read beside it."""

from __future__ import annotations

import math
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from framepipe import pagelock
from framepipe.guard.waiting import REAL, Clock
from framepipe.memory import PAGE
from framepipe.probe import fit
from framepipe.probe._host_blocks import Block, RefusedError
from framepipe.probe._pinned_cell import Tell, makers_of
from framepipe.probe._pool import Pooled, Unpooled
from framepipe.probe.counters import Counters, Row, difference, open_counters

LEAST_NBYTES, MOST_NBYTES = 64 << 10, 8 << 20
BUDGET_NBYTES = 256 << 20
_SIZES, _HELD, _KEPT = 24, 16, 4
_SAMPLES = 60
_WARM_UP = 0.1
_GIVE_UP = 10
"""Refusals in a row after which a cell ends: more of the same would say nothing new."""


def run(request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """The cell that ``request`` describes (`framepipe.probe.churn`), with real counters and real memory."""
    budget = budget_nbytes(request["kind"])
    if budget < 2 * LEAST_NBYTES:
        return {"status": "unavailable", "reason": f"RLIMIT_MEMLOCK lets this process lock {budget} bytes"}
    make = makers_of(request["device"])[request["kind"]]
    counters = open_counters(request["device"], os.getpid())
    try:
        return measure(request, counters, make, budget)
    finally:
        counters.close()


def budget_nbytes(kind: str) -> int:
    """How much a cell holds at most, kept blocks included: of locked memory no more than the process may lock."""
    limit = pagelock.limit_bytes() if kind == "mlock" else None
    return BUDGET_NBYTES if limit is None else min(BUDGET_NBYTES, limit)


def draw_sizes(random_: random.Random, budget: int) -> list[int]:
    """Sizes spread evenly over their logarithms, in whole pages.

    They are few, and all of them some times over are within the budget, so that a free list of exact sizes can serve.
    """
    low, high = math.log(LEAST_NBYTES), math.log(max(LEAST_NBYTES, min(MOST_NBYTES, budget // 8)))
    sizes = [round(math.exp(random_.uniform(low, high)) / PAGE) * PAGE for _ in range(_SIZES)]
    while len(sizes) > 2 and _KEPT * sum(sizes) > budget:
        sizes.pop()
    return sizes


def measure(
    request: Mapping[str, Any],
    counters: Counters,
    make: Callable[[int], Block],
    budget: int = BUDGET_NBYTES,
    clock: Clock = REAL,
) -> dict[str, Any]:
    """Churn for ``seconds`` at ``per_s`` blocks a second (0: as many as it can), the sizes by ``seed``."""
    random_ = random.Random(request["seed"])
    sizes = draw_sizes(random_, budget)
    before = counters.read()
    source = Pooled(make, budget) if request["pooled"] else Unpooled(make)
    churn = _Churn(source, budget, clock)
    samples = churn.go(request["seconds"], request["per_s"], lambda: random_.choice(sizes), counters.read)
    missing = dict(counters.missing)
    churn.end()
    return {
        **churn.found(),
        "sizes": sorted(sizes),
        "slopes": slopes(samples, request["seconds"]),
        "left": difference(counters.read(), before),
        "samples": {
            "t_s": [round(time_s, 3) for time_s, _ in samples],
            "columns": {column: [row.get(column) for _, row in samples] for column in before},
        },
        "missing": missing,
        "sources": counters.sources,
    }


class _Churn:
    """Blocks held, the oldest given back first, and the books of it."""

    def __init__(self, source: Unpooled, budget: int, clock: Clock) -> None:
        self._source, self._budget, self._clock = source, budget, clock
        self._held: deque[Block] = deque()
        self._nbytes = 0
        self._take_s: list[float] = []
        self._give_s: list[float] = []
        self._errors: Counter[str] = Counter()
        self._in_a_row = 0
        self._seconds = 0.0

    def go(
        self, seconds: float, per_s: float, size: Callable[[], int], read: Callable[[], Row]
    ) -> list[tuple[float, Row]]:
        began_s = due_s = sample_s = self._clock.now()
        samples = []
        while (now_s := self._clock.now()) - began_s < seconds and self._in_a_row < _GIVE_UP:
            if now_s >= sample_s:
                samples.append((now_s - began_s, read()))
                sample_s = max(sample_s + seconds / _SAMPLES, now_s)
            self._one(size())
            if per_s:
                due_s = max(due_s + 1 / per_s, now_s)  # what was missed is not caught up with in a rush
                self._wait(min(due_s, began_s + seconds))
        self._seconds = self._clock.now() - began_s
        return samples

    def _wait(self, until_s: float) -> None:
        left_s = until_s - self._clock.now()
        if left_s > 0:
            self._clock.sleep(left_s)

    def _one(self, nbytes: int) -> None:
        while self._held and (len(self._held) >= _HELD or self._nbytes + nbytes > self._budget):
            self._give()
        began_s = self._clock.now()
        try:
            block = self._source.take(nbytes)
        except RefusedError as error:
            self._note(error)
            self._in_a_row += 1
            return
        self._take_s.append(self._clock.now() - began_s)
        self._in_a_row = 0
        self._held.append(block)
        self._nbytes += nbytes

    def _give(self) -> None:
        block = self._held.popleft()
        self._nbytes -= block.nbytes
        began_s = self._clock.now()
        try:
            self._source.give(block)
        except RefusedError as error:
            self._note(error)
            return
        self._give_s.append(self._clock.now() - began_s)

    def _note(self, error: RefusedError) -> None:
        self._errors[f"{error.call}: {error.code} {error.name}"] += 1

    def end(self) -> None:
        """Give everything back; not part of the rates."""
        self._rates = self._counts()
        while self._held:
            self._give()
        try:
            self._source.close()
        except RefusedError as error:
            self._note(error)

    def _counts(self) -> dict[str, Any]:
        counts = {
            "takes": len(self._take_s),
            "gives": len(self._give_s),
            "allocations": self._source.made,
            "frees": self._source.freed,
        }
        rates = {f"{name}_per_s": count / self._seconds if self._seconds else None for name, count in counts.items()}
        latencies = {"take": fit.percentiles_ms(self._take_s), "give": fit.percentiles_ms(self._give_s)}
        return {**counts, **rates, **latencies, "seconds": round(self._seconds, 3)}

    def found(self) -> dict[str, Any]:
        gave_up = self._in_a_row >= _GIVE_UP
        reason = f"{_GIVE_UP} refusals in a row: {', '.join(self._errors)}" if gave_up else None
        errors = dict(self._errors)
        return {"status": "failed" if gave_up else "ok", "reason": reason, "errors": errors, **self._rates}


def slopes(samples: Sequence[tuple[float, Row]], seconds: float) -> dict[str, dict[str, Any]]:
    """Of each counter: bytes a second and the interval of 95 %, the first tenth of the time left out."""
    kept = [(time_s, row) for time_s, row in samples if time_s >= _WARM_UP * seconds]
    found = {}
    for column in kept[-1][1] if kept else ():
        points = [(time_s, number) for time_s, row in kept if (number := row.get(column)) is not None]
        line = fit.slope([time_s for time_s, _ in points], [number for _, number in points])
        if line is not None:
            found[column] = {"per_s": line.per_s, "low": line.low, "high": line.high, "count": line.count}
    return found
