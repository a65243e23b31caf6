"""How fast a GPU copies from and to one kind of host memory. In a child process alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import cupy as cp

from framepipe.probe._cuda_blocks import BLOCKS, DeviceAllocated, call, start
from framepipe.probe._host_blocks import Block
from framepipe.probe._host_copies import rates

TO_DEVICE, TO_HOST = "to_device", "to_host"
_FLAGS = {TO_DEVICE: 1, TO_HOST: 2}  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost
_BATCH_NBYTES = 64 << 20
_MOST_COPIES = 256
_WORD = 16
_KERNEL = r"""
extern "C" __global__ void over_the_bus(const uint4* from, uint4* to, unsigned long long count) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = from[i];
}
"""
"""Reads and writes sixteen bytes a thread; one side is memory of the host, the other the device's own."""


def measure(
    kind: str, device: int, sizes: Sequence[int], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, Any]]:
    """A row for each size and direction; the memory is taken once and the sizes are of its beginning.

    ``bytes_per_s`` is between two events around the copies, ``wall_bytes_per_s`` from the first call until the thread
    that waits for the second event goes on (events with blocking synchronisation, as a pipeline waits). ``mapped``
    memory is read and written by a kernel under the device's own address of it, the others by ``cudaMemcpyAsync``.
    Raises `RefusedError`.
    """
    start(device)
    host = BLOCKS[kind](max(sizes))
    try:
        there = DeviceAllocated(max(sizes))
        try:
            yield from _rows(_Copies(kind, host, there, clock), sizes, repeats)
        finally:
            there.free()
    finally:
        host.free()


def _rows(copies: _Copies, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    for nbytes in sizes:
        for direction in (TO_DEVICE, TO_HOST):
            yield {"direction": direction, "nbytes": nbytes, **copies.timed(direction, nbytes, repeats)}


class _Copies:
    """A stream, two events and two blocks."""

    def __init__(self, kind: str, host: Block, there: Block, clock: Callable[[], float]) -> None:
        self._host, self._there, self._clock = host, there, clock
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._begin, self._end = cp.cuda.Event(block=True), cp.cuda.Event(block=True)
        # Under unified addressing the device reaches the block under the address that the host has for it.
        self._kernel = cp.RawKernel(_KERNEL, "over_the_bus") if kind == "mapped" else None

    def timed(self, direction: str, nbytes: int, repeats: int) -> Mapping[str, Any]:
        count = max(1, min(_MOST_COPIES, _BATCH_NBYTES // nbytes))
        self._batch(direction, nbytes, count)  # the first is slower, and compiles
        found = [self._batch(direction, nbytes, count) for _ in range(repeats)]
        return {
            "count": count,
            "bytes_per_s": rates(count * nbytes, [seconds for seconds, _ in found]),
            "wall_bytes_per_s": rates(count * nbytes, [wall_s for _, wall_s in found]),
        }

    def _batch(self, direction: str, nbytes: int, count: int) -> tuple[float, float]:
        seconds, wall_s = call("copy", partial(self._copy_all, direction, nbytes, count))
        return seconds, wall_s

    def _copy_all(self, direction: str, nbytes: int, count: int) -> tuple[float, float]:
        began_s = self._clock()
        self._begin.record(self._stream)
        for _ in range(count):
            self._copy(direction, nbytes)
        self._end.record(self._stream)
        self._end.synchronize()
        wall_s = self._clock() - began_s
        return cp.cuda.get_elapsed_time(self._begin, self._end) / 1e3, wall_s

    def _copy(self, direction: str, nbytes: int) -> None:
        ends = (self._there.address, self._host.address)
        target, source = ends if direction == TO_DEVICE else ends[::-1]
        if self._kernel is None:
            cp.cuda.runtime.memcpyAsync(target, source, nbytes, _FLAGS[direction], self._stream.ptr)
            return
        words = nbytes // _WORD
        threads = 256
        grid = max(1, min(1024, -(-words // threads)))
        with self._stream:
            self._kernel((grid,), (threads,), (cp.uint64(source), cp.uint64(target), cp.uint64(words)))
