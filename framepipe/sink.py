"""The contract of a sink: where results go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.frame import Frame
from framepipe.registry import Component

if TYPE_CHECKING:
    from framepipe.device.base import Device


@dataclass(slots=True)
class SourceInfo:
    """What a sink may know of a source: filled in when the source opens, before its first frame reaches a sink.

    ``rate`` is frames a second as the container has it, or None. ``path`` is None for inputs that are no file.
    """

    name: str
    uri: str
    path: Path | None = None
    rate: Fraction | None = None
    time_base: Fraction | None = None
    start: float | None = None
    end: float | None = None
    has_audio: bool = False


@dataclass(slots=True)
class SinkContext:
    """What a sink gets at `Sink.open`: the sources by name, and whether existing files may be replaced.

    ``device`` is the pipeline's, or None where a sink is used without one.
    """

    sources: Mapping[str, SourceInfo]
    overwrite: bool = False
    warnings: list[str] = field(default_factory=list)
    """A sink appends what the user should know (sound left out, a time stamp moved); shown once, and in the report."""
    device: Device | None = None

    def host_output(self, shape: tuple[int, ...], dtype: Any, owner: str) -> np.ndarray:
        """An uninitialised array of the pipeline's cold tier (`Device.host_output`): recycled, page-locked for a GPU.

        It is for large and rare buffers; ``owner`` is the name under which the report has it.
        """
        return np.empty(shape, dtype) if self.device is None else self.device.host_output(shape, dtype, owner)


class Sink(Component):
    """Base of the sinks: a dataclass whose fields are its YAML parameters. All calls come from one thread.

    ``reads`` says what it needs (``image``, ``meta``, tensor names): memory that nobody reads is never made. With
    ``host`` True arrays arrive as numpy, otherwise on the device.
    """

    kind = "sinks"
    reads: frozenset[str] = frozenset({"meta"})
    host: bool = True
    id: str = ""
    """Set from ``id:`` in YAML, or by the pipeline to the sink's name."""

    def paths(self, sources: list[str]) -> list[Path]:
        """Every file known beforehand that would be written for these sources, checked before anything opens.

        Raises `ConfigError` where a template cannot tell sources apart that need files of their own.
        """
        return []

    def open(self, context: SinkContext) -> None:
        """Take the context, once, before the first frame."""

    def write(self, frame: Frame) -> None:
        """Take one frame; frames of one source come in order. Raises OSError or `SinkError`."""
        raise NotImplementedError

    def end(self, source: str) -> None:
        """No more frames will come of this source: whatever belongs to it alone can be finished now."""

    def close(self) -> None:
        """Finish every output so that it is whole and readable. Idempotent; called after an error and a stop too."""

    def state(self) -> dict[str, Any]:
        """What the sink has to tell at the end, for the report (``paths`` written, at least)."""
        return {}
