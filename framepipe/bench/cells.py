"""What is measured: inputs, and the cells that a bench is made of, one axis varied at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Auto = Literal["auto"]
MODES = ("staging", "pipeline")
AXES = ("batch", "depth", "slots", "fillers", "copy_threads")
"""The axes of which one at a time is varied; the strategy is the first of all."""
BASE: Mapping[str, int | Auto] = {"batch": 1, "depth": 2, "slots": "auto", "fillers": "auto", "copy_threads": 1}
_SWEEPS: Mapping[str, tuple[int, ...]] = {
    "batch": (1, 4, 16), "depth": (1, 2, 3), "fillers": (1, 2, 4, 8), "copy_threads": (1, 2, 4),
}  # fmt: skip
_FEW: Mapping[str, tuple[int, ...]] = {"batch": (1, 4), "fillers": (1, 2), "copy_threads": (1, 2)}
"""Where host and device are one: nothing is in flight there, so that depth decides little."""
_LETTER = {"batch": "b", "depth": "d", "slots": "s", "fillers": "f", "copy_threads": "c"}
_USUAL = {(1280, 720): "720p", (1920, 1080): "1080p", (2560, 1440): "1440p", (3840, 2160): "2160p"}


@dataclass(frozen=True, kw_only=True)
class Input:
    """Something to measure with.

    ``kind`` is ``clip`` (``uri`` is a video), ``size`` (pictures made in memory) or ``pipeline`` (``uri`` is a YAML
    file, which is run itself). ``width`` × ``height`` in ``pix_fmt`` with ``nbytes`` a picture are as announced, for
    planning; None where that is not known. ``staging`` and ``device`` are what a pipeline's own file says.
    ``facts`` has what is told of each video in it.
    """

    name: str
    kind: str
    uri: str | None = None
    width: int | None = None
    height: int | None = None
    pix_fmt: str | None = None
    nbytes: int | None = None
    staging: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    facts: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where a cell stands on every axis, as ``bench.json`` has it."""

    strategy: str
    mode: str
    input: str
    width: int | None
    height: int | None
    pix_fmt: str | None
    batch: int
    slots: int | Auto
    depth: int
    fillers: int | Auto
    copy_threads: int
    device: str


@dataclass(frozen=True)
class Cell:
    """One thing to measure. ``varies`` names the axes in which it differs from the base of its mode and input."""

    axes: Axes
    varies: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A name that the same cell has in every bench: ``pooled-clip-b1-d2-sauto-fauto-c1-staging``."""
        numbers = "-".join(f"{_LETTER[name]}{getattr(self.axes, name)}" for name in AXES)
        return f"{self.axes.strategy}-{self.axes.input}-{numbers}-{self.axes.mode}"

    @property
    def group(self) -> tuple[str, str]:
        """Mode and input: cells of one group do the same work, so that their outputs must agree."""
        return self.axes.mode, self.axes.input

    @property
    def slots(self) -> int:
        """How many slots of the ring to reckon with: where that is open, the most that a pipeline makes."""
        if self.axes.slots != "auto":
            return self.axes.slots
        return self.axes.depth + 1 + (4 if self.axes.fillers == "auto" else self.axes.fillers)

    def staging(self) -> dict[str, Any]:
        """The ``staging:`` block."""
        values = asdict(self.axes)
        return {"strategy": self.axes.strategy, **{name: values[name] for name in AXES}}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the command line says of the axes: values to measure, or None for a sensible few."""

    modes: tuple[str, ...] | None = None
    batch: tuple[int, ...] | None = None
    depth: tuple[int, ...] | None = None
    slots: tuple[int | Auto, ...] | None = None
    fillers: tuple[int | Auto, ...] | None = None
    copy_threads: tuple[int, ...] | None = None

    def base(self, name: str, own: Mapping[str, Any]) -> int | Auto:
        """Where the other axes stand while one is varied: the usual value, unless only others are asked for."""
        usual: int | Auto = own.get(name, BASE[name])
        values = getattr(self, name)
        return usual if values is None or usual in values else values[0]


def plan(
    inputs: Sequence[Input], strategies: Sequence[str], choice: Choice, *, device: str, shared: bool, cpus: int
) -> list[Cell]:
    """The cells in the order in which they run, each once.

    In every mode and for every input there is each of ``strategies`` on the base; then each axis is varied alone, with
    ``pooled`` if it is among them: those that ``choice`` names everywhere, the sensible few in the first group only.
    ``shared`` says that host and device memory are one, ``cpus`` bounds how many threads are tried.
    """
    cells: dict[str, Cell] = {}
    few = _FEW if shared else _SWEEPS
    first = True
    for given in inputs:
        for mode in _modes(given, choice):
            bases = {name: choice.base(name, given.staging) for name in AXES}
            chief = "pooled" if "pooled" in strategies else strategies[0]
            base = _axes(given, mode, device, chief, bases)
            found = [Cell(base), *(Cell(replace(base, strategy=s), ("strategy",)) for s in strategies if s != chief)]
            found += _sweeps(base, choice, few if first else {}, cpus)
            for cell in found:
                cells.setdefault(cell.id, cell)
            first = False
    return list(cells.values())


def _modes(given: Input, choice: Choice) -> tuple[str, ...]:
    able = {"clip": MODES, "size": ("staging",), "pipeline": ("pipeline",)}[given.kind]
    return tuple(mode for mode in able if choice.modes is None or mode in choice.modes)


def _axes(given: Input, mode: str, device: str, strategy: str, values: Mapping[str, Any]) -> Axes:
    return Axes(
        strategy=strategy,
        mode=mode,
        input=given.name,
        width=given.width,
        height=given.height,
        pix_fmt=given.pix_fmt,
        device=device,
        **values,
    )


def _sweeps(base: Axes, choice: Choice, few: Mapping[str, tuple[int, ...]], cpus: int) -> Iterator[Cell]:
    for name in AXES:
        asked = getattr(choice, name)
        values = asked if asked is not None else few.get(name, ())
        for value in values:
            many = name in ("fillers", "copy_threads") and asked is None and value > cpus
            if value != getattr(base, name) and not many:
                changed: dict[str, Any] = {name: value}
                yield Cell(replace(base, **changed), (name,))


def size_input(width: int, height: int, pix_fmt: str = "yuv420p") -> Input:
    """Pictures of one size made in memory, so that no clip is needed."""
    from framepipe.frame import FrameSpec

    name = _USUAL.get((width, height), f"{width}x{height}")
    nbytes = FrameSpec(width, height, pix_fmt).nbytes
    return Input(name=name, kind="size", width=width, height=height, pix_fmt=pix_fmt, nbytes=nbytes)


def slug(text: str) -> str:
    """``text`` as part of a `Cell.id`: letters, digits, dots and hyphens."""
    return re.sub(r"[^\w.]+", "-", text).strip("-") or "input"
