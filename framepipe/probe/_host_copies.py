"""How fast the processor copies memory: blocks copied by one and more threads, each with blocks of its own."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from framepipe.probe._host_blocks import Pageable

REGION_NBYTES = 256 << 20
"""Copied from and to in turn: more than the caches of most processors, so that every block comes from memory."""


def rates(nbytes: int, seconds: Sequence[float]) -> dict[str, float]:
    """Bytes a second over repeats: ``median``, ``min`` and ``max``."""
    found = [nbytes / taken_s for taken_s in seconds]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def measure(
    sizes: Sequence[int],
    threads: Sequence[int],
    repeats: int,
    region: int = REGION_NBYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """A row for each size and number of threads: ``ctypes.memmove``, which lets go of the GIL, over the whole region.

    The region holds at least the largest size. Where it does not hold a block for each thread there is no row.
    """
    region = max(region, *sizes)
    source, target = Pageable(region), Pageable(region)
    try:
        for nbytes in sizes:
            for count in threads:
                share = region // nbytes // count
                if share:
                    passes = [_one_pass(source, target, nbytes, share, count, clock) for _ in range(repeats + 1)]
                    yield {
                        "threads": count,
                        "nbytes": nbytes,
                        "bytes_per_s": rates(share * count * nbytes, passes[1:]),
                    }
    finally:
        source.free()
        target.free()


def _one_pass(
    source: Pageable, target: Pageable, nbytes: int, share: int, count: int, clock: Callable[[], float]
) -> float:
    assert source.address is not None and target.address is not None
    begin = threading.Barrier(count + 1)
    starts = [(source.address + at * nbytes, target.address + at * nbytes) for at in range(share * count)]
    workers = [
        threading.Thread(target=_copy, args=(starts[at * share : (at + 1) * share], nbytes, begin), daemon=True)
        for at in range(count)
    ]
    for worker in workers:
        worker.start()
    begin.wait()
    began_s = clock()
    for worker in workers:
        worker.join()
    return clock() - began_s


def _copy(starts: Sequence[tuple[int, int]], nbytes: int, begin: threading.Barrier) -> None:
    begin.wait()
    for source, target in starts:
        ctypes.memmove(target, source, nbytes)
