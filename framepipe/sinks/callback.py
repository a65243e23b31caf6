"""Results handed to a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from framepipe.errors import ConfigError
from framepipe.frame import Frame
from framepipe.registry import register
from framepipe.sink import Sink


@register("callback")
@dataclass(kw_only=True)
class Callback(Sink):
    """Calls ``function(frame)`` for every picture, on the sink thread; it may keep the frame.

    ``reads`` says what the function needs (``image``, ``meta``, tensor names), ``host`` whether as numpy arrays
    or on the device. An error that it raises ends the run. Python only: YAML cannot hold a function.
    """

    function: Callable[[Frame], Any]
    reads: Iterable[str] = frozenset({"image", "meta"})  # type: ignore[assignment]
    host: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError("callback: function must be a Python function; YAML cannot hold one")
        self.reads: frozenset[str] = frozenset({self.reads} if isinstance(self.reads, str) else self.reads)
        self._frames = 0

    def write(self, frame: Frame) -> None:
        self.function(frame)
        self._frames += 1

    def state(self) -> dict[str, Any]:
        return {"paths": [], "frames": self._frames}
