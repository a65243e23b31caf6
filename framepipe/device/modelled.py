"""The simulated device with memory that behaves as a model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from framepipe.device.base import memory_error
from framepipe.device.simulated import SimulatedDevice
from framepipe.memory_models.base import MemoryModel, PinRefusedError

T = TypeVar("T")


class ModelledDevice(SimulatedDevice):
    """`SimulatedDevice` whose video memory and page-locking are those of ``model``, its own from now on.

    The model's clock goes on with every picture that is uploaded (`framepipe.memory_models.base.MemoryModel`). What it
    refuses to page-lock is pageable instead, told once, as on a GPU; device memory that it has not raises
    `DeviceMemoryError`.
    """

    def __init__(self, model: MemoryModel) -> None:
        super().__init__()
        self.model = model
        self.name = f"{self.name}, memory modelled by {model.name}"
        self.refusal = f"so says the model {model.name} ({model.ground}), not this machine"
        self._free_start = model.readings()["free"]
        self._free_end: int | None = None

    def advance(self, pictures: int) -> None:
        self.model.advance(pictures / self.model.fps)

    def modelled_s(self) -> float:
        return self.model.now_s

    def vram(self) -> list[dict[str, Any]]:
        now = self.model.readings()
        run = {"free_start": self._free_start, "free_least": self.model.least_free, "free_end": self._free_end}
        return [{"source": f"model {self.model.name}", "modelled": True, "device": 0, **now, **run}]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "model": self.model.describe()}

    # -- page-locked memory --------------------------------------------------------------------------------------

    def page_lock(self, nbytes: int, lock: Callable[[], T]) -> T | None:
        def modelled() -> T:
            self.model.pin(nbytes)
            try:
                return lock()
            except BaseException:
                self.model.unpin(nbytes)
                raise

        return super().page_lock(nbytes, modelled)

    def refused(self, error: Exception) -> bool:
        return isinstance(error, PinRefusedError)

    def _forget(self, block: np.ndarray, seconds: float | None) -> None:
        locked = self.is_locked(block)
        super()._forget(block, seconds)
        if locked:
            self.model.unpin(block.nbytes)

    # -- device memory -------------------------------------------------------------------------------------------

    def keep_within_limit(self, nbytes: int, kind: str) -> None:
        super().keep_within_limit(nbytes, kind)
        if kind != "device" or self.model.allocate(nbytes):
            return
        with self.lock:
            self._pool.give_back()
        if not self.model.allocate(nbytes):
            error = memory_error(nbytes, self.ledger.bytes.get(kind, 0), self.model.readings()["free"])
            raise type(error)(f"{error}; {self.refusal}")

    def fixed_free(self, block: np.ndarray) -> None:
        super().fixed_free(block)
        self.model.free(block.nbytes)

    def _output_free(self, block: np.ndarray) -> None:
        super()._output_free(block)
        self.model.free(block.nbytes)

    def close(self) -> None:
        super().close()
        if self._free_end is None:
            self._free_end = self.model.readings()["free"]
