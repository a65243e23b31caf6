"""What to measure, as the command line says it, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from framepipe.bench.cells import Choice, Input
from framepipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    ``strategies`` are names, ``module:Class`` with ``allow_code``, or None for every one. ``frames`` are counted in a
    repeat (more if they take less than ``least_s`` seconds) behind a warm-up of ``warmup``, both rounded up to whole
    batches; a warm-up fills every slot twice. ``keep_sinks`` runs a person's own pipeline with its sinks, whose
    relative paths belong to a folder that is thrown away. Without ``device`` a pipeline's own counts, else ``auto``.
    """

    inputs: tuple[Input, ...]
    strategies: tuple[str, ...] | None = None
    choice: Choice = field(default_factory=Choice)
    device: str | None = None
    frames: int = 300
    repeat: int = 3
    warmup: int = 32
    least_s: float = 0.5
    timeout_s: float = 300.0
    allow_code: bool = False
    keep_sinks: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least {least}"
            for name, least in (("frames", 2), ("repeat", 1), ("warmup", 1))
            if getattr(self, name) < least
        ]
        if not self.inputs:
            problems.append("there is nothing to measure: give a clip, a pipeline or a size")
        if problems:
            raise ConfigError("; ".join(problems), problems)

    def parameters(self) -> dict[str, Any]:
        """What decides how a cell is measured."""
        names = ("frames", "repeat", "warmup", "least_s", "keep_sinks")
        return {"device": self.wanted_device, **{name: getattr(self, name) for name in names}}

    @property
    def wanted_device(self) -> str:
        """What the device is chosen from."""
        return self.device or next((given.device for given in self.inputs if given.device), "auto")


@dataclass(frozen=True)
class Step:
    """Where a bench stands: children done of all, the seconds left if they can be told, and what runs now."""

    done: int
    total: int
    left_s: float | None
    what: str
