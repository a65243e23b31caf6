"""The contract of a memory model: what is pinned and allocated, what is free, and what time does to it."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from framepipe.errors import ConfigError, FramepipeError
from framepipe.memory_models.history import History
from framepipe.units import Bytes, Seconds, format_bytes

_LEAST_FPS = 0.001
"""A picture for a quarter of an hour: with one for years the history would never end."""


class PinRefusedError(FramepipeError, MemoryError):
    """A model page-locks no more; ``status`` is that of the runtime's error, cudaErrorMemoryAllocation."""

    status = 2


@dataclass(kw_only=True, eq=False)
class MemoryModel(ABC):
    """Base of the models. Sizes are bytes, times modelled seconds: nothing sleeps, and no number is of this machine.

    Fields are the parameters. ``total`` bytes of video memory are there, of which ``resident`` are in use all along
    (a network that is loaded, say). Other programs take ``others`` bytes more from ``others_from_s`` on until
    ``others_until_s``. A picture is shown for 1/``fps`` seconds: by so much the clock goes on for each one that is
    uploaded, whatever its time stamp, so that minutes of video are modelled in as long as it takes to copy them.

    ``name`` is what it is called by, ``ground`` what it rests on, ``words`` what each of `readings` is.
    Any thread may call it. ``pinned_ever``, ``pins`` and ``refusals`` count since the beginning.
    """

    total: Bytes = 12 * 10**9
    resident: Bytes = 0
    others: Bytes = 0
    others_from_s: Seconds = 0.0
    others_until_s: Seconds = math.inf
    fps: float = 30.0

    name: ClassVar[str]
    ground: ClassVar[str]
    words: ClassVar[Mapping[str, str]]

    def __post_init__(self) -> None:
        fps, start_s, end_s = self.fps, self.others_from_s, self.others_until_s
        self._check(_LEAST_FPS <= fps < math.inf, f"fps is {fps:g}; it must be {_LEAST_FPS:g} or more")
        self._check(start_s < end_s, f"others_until_s is {end_s:g}; it must be later than others_from_s, {start_s:g}")
        self._check(
            self.total > self.resident, f"resident ({self.resident} bytes) leaves nothing of total ({self.total} bytes)"
        )
        # Guards all below. Re-entrant, because the collector may drop memory, which unpins it, anywhere.
        self._lock = threading.RLock()
        self.now_s = 0.0
        self.allocated = self.pinned = self.pinned_ever = self.pins = self.refusals = 0
        self._history = History()
        self.least_free = self._free()
        self._note()

    # -- memory -------------------------------------------------------------------------------------------------

    def pin(self, nbytes: int) -> None:
        """Page-lock ``nbytes``, or raise `PinRefusedError`."""
        with self._lock:
            why = self._refusal(nbytes)
            if why is not None:
                self.refusals += 1
                self._history.mark(self.now_s, "first pin refused")
                self._refused()
                raise PinRefusedError(f"cudaErrorMemoryAllocation, modelled by {self.name}: {why}")
            self.pinned += nbytes
            self.pinned_ever += nbytes
            self.pins += 1
            self._charge(nbytes)
            self._changed()

    def unpin(self, nbytes: int) -> None:
        """Give back what one `pin` of ``nbytes`` took."""
        with self._lock:
            self.pinned -= nbytes
            self._release(nbytes)
            self._changed()

    def allocate(self, nbytes: int) -> bool:
        """Take ``nbytes`` of video memory; False, and nothing is taken, where no so many are free."""
        with self._lock:
            if nbytes > self._free():
                self._history.mark(self.now_s, "video memory exhausted")
                return False
            self.allocated += nbytes
            self._changed()
            return True

    def free(self, nbytes: int) -> None:
        """Give ``nbytes`` of `allocate` back."""
        with self._lock:
            self.allocated -= nbytes

    # -- time ---------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        with self._lock:
            end_s = self.now_s + seconds
            while self._history.due_s <= end_s:
                self._go_to(self._history.due_s)
                self._note()
            self._go_to(end_s)

    def _go_to(self, time_s: float) -> None:
        before = self._others()
        self.now_s = time_s
        self._passed()
        if self._others() != before:
            self._history.mark(self.now_s, "other programs come" if not before else "other programs go")
        self._changed()

    def _others(self) -> int:
        return self.others if self.others_from_s <= self.now_s < self.others_until_s else 0

    # -- what it tells ------------------------------------------------------------------------------------------

    def readings(self) -> dict[str, int]:
        """Bytes by the keys of ``words``: at least ``free`` and ``total`` of video memory, and ``pinned``."""
        with self._lock:
            return self._readings()

    def about(self) -> dict[str, Any]:
        """Name, ground and parameters, as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        finite = {key: value for key, value in values.items() if value != math.inf}
        return {"name": self.name, "ground": self.ground, "parameters": finite}

    def describe(self) -> dict[str, Any]:
        """`about`, and what has happened so far: counts, the readings now, and the ``timeline`` of `History`."""
        with self._lock:
            counts = {name: getattr(self, name) for name in ("pins", "refusals", "pinned_ever", "least_free")}
            now = self._readings()
            timeline = self._history.as_json(self.now_s, now)
        return {**self.about(), **counts, "now_s": round(self.now_s, 3), "readings": now, "timeline": timeline}

    def _note(self) -> None:
        self._history.add(self.now_s, self._readings())

    def _changed(self) -> None:
        self.least_free = min(self.least_free, self._free())

    def _readings(self) -> dict[str, int]:
        return {"free": self._free(), "total": self.total, "pinned": self.pinned}

    def _check(self, right: bool, problem: str) -> None:
        if not right:
            raise ConfigError(f"simulated:{self.name}: {problem}")

    # -- what models differ in; the lock is held ------------------------------------------------------------------

    @abstractmethod
    def _free(self) -> int:
        """Bytes of video memory that nobody uses now."""

    @abstractmethod
    def _refusal(self, nbytes: int) -> str | None:
        """Why so many more are not page-locked, in words with the numbers; None if they are."""

    def _charge(self, nbytes: int) -> None:  # noqa: B027
        """One allocation of ``nbytes`` was page-locked."""

    def _release(self, nbytes: int) -> None:  # noqa: B027
        """One of ``nbytes`` was given back."""

    def _refused(self) -> None:  # noqa: B027
        """A pin was refused."""

    def _passed(self) -> None:  # noqa: B027
        """Time has passed."""

    def _unused(self) -> int:
        """Bytes that neither the pipeline nor what is resident has allocated."""
        return self.total - self.resident - self.allocated

    @staticmethod
    def _too_much(wanted: int, free: int) -> str | None:
        if wanted <= free:
            return None
        return f"it would take {format_bytes(wanted)} of video memory, of which {format_bytes(free)} are free"


def whole(nbytes: int, granule: int) -> int:
    """``nbytes`` rounded up to whole granules."""
    return -(-nbytes // granule) * granule
