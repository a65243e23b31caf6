"""The host as a device: everything is done when the call returns."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from framepipe import pagelock
from framepipe.device.base import Device, Event, Stream
from framepipe.memory import RecyclingPool, aligned_empty
from framepipe.tiers import HOT


class CpuEvent(Event):
    """Always done."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: Stream) -> None:
        pass

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStream(Stream):
    """Always idle."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuDevice(Device):
    """NumPy on the host.

    Memory is plain; ``pinned`` is taken as pageable and counted so, because nothing copies by DMA from it. What is
    registered is locked by the operating system.
    """

    kind = "cpu"
    xp = np
    default_staging = "direct"
    default_accuracy = "fast"

    def __init__(self) -> None:
        super().__init__()
        self.name = platform.processor() or platform.machine()
        self._pool = RecyclingPool(lambda nbytes, owner: self.fixed(nbytes), self.fixed_free)

    @property
    def kernels(self) -> ModuleType:
        return importlib.import_module("framepipe.kernels.cpu")

    def stream(self, name: str) -> CpuStream:
        return CpuStream(name)

    def event(self, name: str) -> CpuEvent:
        return CpuEvent(name)

    def host_empty(
        self,
        nbytes: int,
        *,
        pinned: bool,
        flags: int = 0,
        align: int | None = None,
        owner: str = "host memory",
        tier: str = HOT,
    ) -> np.ndarray:
        return super().host_empty(nbytes, pinned=False, align=align, owner=owner, tier=tier)

    def refused(self, error: Exception) -> bool:
        return isinstance(error, OSError)

    def _register(self, block: np.ndarray) -> None:
        pagelock.lock(block)

    def _unregister(self, block: np.ndarray) -> None:
        pagelock.unlock(block)

    def fixed(self, nbytes: int) -> np.ndarray:
        self.ledger.add("pageable", nbytes)
        return aligned_empty(nbytes)

    def fixed_free(self, block: np.ndarray) -> None:
        self.ledger.add("pageable", -block.nbytes)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> np.ndarray:
        return self._pool.empty(shape, dtype)

    def give_back(self) -> int:
        return self._pool.give_back()

    def trim(self) -> None:
        self._pool.give_back()
        self.cold.give_back()

    def upload(self, dst: Any, src: np.ndarray, stream: Stream) -> None:
        np.copyto(dst, src)

    def download(self, dst: np.ndarray, src: Any, stream: Stream) -> None:
        np.copyto(dst, src)

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def enqueue(
        self, stream: Stream, work: Callable[[], None], reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        work()

    def close(self) -> None:
        self._pool.close()
        self.cold.close()
