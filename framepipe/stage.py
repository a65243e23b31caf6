"""The contract of a stage: plan, open, launch, collect.

A stage is a dataclass whose fields are its YAML parameters, in one file. A small one::

    @register("invert")
    @dataclass(kw_only=True)
    class Invert(Stage):
        reads = frozenset({"image"})
        writes = frozenset({"image"})

        def launch(self, batch):
            for picture, out in zip(batch.arrays["image"], batch.out["image"]):
                self.device.xp.subtract(255, picture, out=out)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from framepipe.frame import Batch, FrameSpec
from framepipe.registry import Component

if TYPE_CHECKING:
    from framepipe.device.base import Device


@dataclass(frozen=True, slots=True)
class Affine:
    """``source = position * scale + offset``, an axis each: from pixels of an array to the upright source picture."""

    scale_x: float = 1.0
    scale_y: float = 1.0
    offset_x: float = 0.0
    offset_y: float = 0.0

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        return x * self.scale_x + self.offset_x, y * self.scale_y + self.offset_y

    def after(self, inner: Affine) -> Affine:
        """The map that applies ``inner`` first and then this one."""
        return Affine(
            self.scale_x * inner.scale_x,
            self.scale_y * inner.scale_y,
            self.scale_x * inner.offset_x + self.offset_x,
            self.scale_y * inner.offset_y + self.offset_y,
        )

    def inverse(self) -> Affine:
        """From the upright source picture to pixels of the array."""
        return Affine(1 / self.scale_x, 1 / self.scale_y, -self.offset_x / self.scale_x, -self.offset_y / self.scale_y)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array that a stage writes: ``shape`` of one picture (without N), NumPy ``dtype``, and its geometry."""

    shape: tuple[int, ...]
    dtype: str = "uint8"
    to_source: Affine = Affine()


@dataclass(frozen=True)
class Flow:
    """What is known of a batch at one point of the chain: the decoded ``spec`` and the ``arrays`` made so far."""

    spec: FrameSpec
    arrays: Mapping[str, ArraySpec] = field(default_factory=dict)

    def pixel_aspect(self, to_source: Affine) -> Fraction:
        """Width by height of the pixels of an array that is mapped so to the upright picture."""
        stretched = Fraction(to_source.scale_x / to_source.scale_y).limit_denominator(1 << 16)
        return Fraction(*self.spec.upright_aspect) * stretched

    def put(self, name: str, array: ArraySpec) -> Flow:
        """This flow with ``name`` written anew; its memory is allocated for every batch."""
        return replace(self, arrays={**self.arrays, name: array})


class Stage(Component):
    """Base of the stages.

    ``reads`` and ``writes`` name what a stage touches: ``planes``, ``image``, ``meta``, or a tensor's name; the
    planner keeps memory only as long as something later reads it. One that reads ``meta`` is launched on the sink
    thread, after every earlier stage's `collect`; all others on the runner thread.

    ``id`` is set by the pipeline before `plan` (from ``id:`` in YAML, or the stage's name) and names the stage's
    entry in ``meta``. ``device`` is set by `open`.
    """

    kind = "stages"
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    readback: tuple[str, ...] = ()
    """Names of small arrays that `collect` wants as numpy arrays in ``batch.host``; may be set by `plan`."""
    allocates: bool = False
    """True where `launch` puts memory of its own into ``batch.out`` (on the CPU, a library's recycled frames)."""
    uses_alpha: bool = False
    """Whether the alpha of pictures is used. Where no stage does the report says that it was dropped."""
    tonemap: str | None = None
    """Of stages that make RGB of planes: the curve that takes HDR to SDR, or ``none``, which the report then says."""
    id: str = ""
    device: Device

    def plan(self, flow: Flow) -> Flow:
        """Map what comes in to what goes out, before the first frame and again whenever the spec changes.

        Every array written anew is ``flow.put(name, ArraySpec(...))``; ``<id>.`` begins the names of those that nobody
        else is to see. A stage object serves one spec: where sources of several sizes meet, the pipeline copies it
        (`copy.copy`, before `plan`) for each further one. Raises `ConfigError` where the parameters do not fit. The
        default writes each array of ``writes`` anew in its present shape.
        """
        for name in sorted(self.writes - {"meta", "planes"}):
            if name in flow.arrays:
                flow = flow.put(name, replace(flow.arrays[name]))
        return flow

    def device_nbytes(self, sources: int) -> int:
        """Device memory, in bytes, that it keeps beside its results once planned, for so many sources of this spec.

        What `framepipe plan` adds up; 0 where a stage keeps none, or does not tell.
        """
        return 0

    def open(self, device: Device) -> None:
        """Take the device, once, before the first `plan`. Compile kernels here, not in `launch`."""
        self.device = device

    def launch(self, batch: Batch) -> None:
        """Enqueue the work on ``batch.stream`` (it is current).

        Reads ``batch.planes`` and ``batch.arrays``, writes to ``batch.out``.
        Never waits, never copies to the host. On ``simulated`` the whole call is deferred until somebody waits.
        """

    def collect(self, batch: Batch) -> None:
        """On the host, once the device is done: turn ``batch.host`` into ``item.meta[self.id]`` of each item."""

    def reset(self, source: str) -> None:
        """Drop what is remembered of a source: its pictures have changed, and not only the shape of their pixels."""

    def close(self) -> None:
        """Give up what `open` took. Called once, after the device is idle."""

    def state(self) -> dict[str, Any]:
        """What the stage has to tell at the end of a run, for the report (plain JSON values)."""
        return {}
