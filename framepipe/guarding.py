"""What a guard may do to a running engine, and which memory it watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from framepipe.device.base import Device
from framepipe.engine import Engine
from framepipe.guard.monitor import Guard, Record
from framepipe.guard.options import GuardOptions
from framepipe.guard.readings import DeviceMemory, Memory, SystemMemory
from framepipe.sinks._output import sink_error
from framepipe.tiers import COLD


def attach(options: GuardOptions, engine: Engine, callback: Callable[[Record], Any] | None = None) -> Guard:
    """A guard that watches ``engine`` from its start to its end. Raises `SinkError` where its file cannot be made.

    It has a thread of its own. Where time is modelled it goes by that: the runner ticks it, a batch at a time.
    """
    device = engine.device
    modelled = device.modelled_s() is not None
    clock = partial(_modelled_s, device) if modelled else time.perf_counter
    guard = Guard(options, partial(_memory, device), EngineControls(engine), callback=callback, clock=clock)
    try:
        guard.open()
    except OSError as error:
        assert options.file is not None
        raise sink_error(error, options.file, doing="make it") from error
    engine.guard = guard
    if modelled:
        engine.runner.passed = guard.tick
    return guard


def _modelled_s(device: Device) -> float:
    return device.modelled_s() or 0.0


def _memory(device: Device) -> Memory:
    """What is measured, or what is modelled: never both."""
    if device.kind == "cuda":
        return SystemMemory(getattr(device, "number", 0))
    memory = DeviceMemory(device)
    return memory if memory.read() or device.modelled_s() is not None else SystemMemory()


class EngineControls:
    """`framepipe.guard.monitor.Controls` of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.depth = engine.runner.depth

    def pinned(self) -> tuple[int, int]:
        """Bytes page-locked now, and in all since the start."""
        ledger = self._engine.device.ledger
        return ledger.bytes.get("pinned", 0), ledger.pinned_total

    def cold(self) -> tuple[int, int]:
        """Bytes of the cold tier, and how many of them somebody holds."""
        state = self._engine.device.tiers()[COLD]
        return state.bytes, state.in_use_bytes

    def give_back(self) -> int:
        """Give what nobody uses of the cold tier back, but what is reserved for the run; how many bytes."""
        with self._engine.device.bound():
            return self._engine.device.cold.give_back()

    def give_back_device(self) -> int:
        """Give what is kept for stages' results, and nobody holds, back to the system; how many bytes."""
        with self._engine.device.bound():
            return self._engine.device.give_back()

    def grow(self, nbytes: int) -> int:
        """Let the cold tier grow by the whole blocks of which most are in use that ``nbytes`` hold; by how many."""
        with self._engine.device.bound():
            return self._engine.device.cold.grow_by(nbytes)

    def set_depth(self, depth: int) -> None:
        """Have ``depth`` batches in flight at most, beside one that is about to be; halves and slots stay as they are.

        Where host and device are one more than the configured depth are, as long as it is not lowered.
        """
        self._engine.runner.tokens.limit(depth + 1 if depth < self.depth else None)

    def stop_page_locking(self, why: str) -> None:
        """Page-lock nothing more; what is page-locked stays so."""
        self._engine.device.stop_page_locking(why)

    def warn(self, text: str) -> None:
        """Put a warning into the report."""
        self._engine.device.warnings.append(text)

    def stop(self) -> None:
        """End the run as `framepipe.pipeline.Pipeline.stop` does."""
        self._engine.stop()
