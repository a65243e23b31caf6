"""``motion``: boxes around what moves before a still background."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from framepipe.errors import ConfigError
from framepipe.frame import Batch, FrameSpec
from framepipe.kernels._colour import component
from framepipe.kernels._difference import CELL, COUNTS
from framepipe.registry import register
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages._blobs import Blob, find_blobs


@dataclass(slots=True)
class _State:
    """What is known of one source's background ((4, H // shrink, W // shrink) uint16 on the device), for which spec.

    The kernel's ``scratch`` is kept with it: taken anew for each picture, it would leave gaps in the device's pool.
    """

    spec: FrameSpec
    layers: Any
    scratch: Any
    seen: int = 0


@register("motion")
@dataclass(kw_only=True)
class Motion(Stage):
    """Finds what moves before a still camera: the difference of luma from a background that is learnt, a source each.

    ``meta`` is a list of ``{"box": [x1, y1, x2, y2], "score", "label"}``, boxes in pixels of the upright source
    picture, the largest first; ``score`` is the share of the box that changed, 0 to 1.

    ``threshold`` is in luma codes of 8 bits, whatever the format. The first ``warmup`` pictures only teach the
    background, which then follows the picture by ``update`` of the difference at each (rounded to a power of 1/2).
    What has stood still for ``hold`` pictures, or for half of all pictures so far, becomes background; what was there
    before is remembered, so that nothing is found where it leaves. Changes of light are followed; where more than
    ``cut`` of the picture changes at once, the background is learnt anew. What covers less than ``min_area`` pixels
    (by default 1/2000 of the picture) is left out, and what is nearer than ``merge`` pixels (by default 1/100 of the
    longer side) is one object. The picture is compared shrunk, by a power of two, to at most ``max_side`` pixels on
    its longer side.

    It knows luma alone: shadows count, those who touch in the picture are one box, and a camera that moves by more
    than a pixel of the shrunk picture makes boxes of everything.
    """

    threshold: float = 12.0
    min_area: float | None = None
    merge: float | None = None
    warmup: int = 25
    update: float = 0.0625
    hold: int = 200
    cut: float = 0.6
    max_side: int = 480
    label: str = "motion"

    reads = frozenset({"planes"})
    writes = frozenset({"meta"})

    def __post_init__(self) -> None:
        ranges = {
            "threshold": (1, 127), "min_area": (0, None), "merge": (0, None), "warmup": (0, None),
            "update": (2**-14, 0.5), "hold": (1, 65535), "cut": (0, 1), "max_side": (16, 4096),
        }  # fmt: skip
        problems = []
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= (value if high is None else high):
                problems.append(f"{name} must be {low} or more" if high is None else f"{name} must be {low} to {high}")
        if problems:
            raise ConfigError(f"motion: {'; '.join(problems)}", problems)
        self._states: dict[str, _State] = {}

    def plan(self, flow: Flow) -> Flow:
        self._spec = spec = flow.spec
        self._shrink = _shrink(spec, self.max_side)
        self._small = spec.height // self._shrink, spec.width // self._shrink
        self._mask = f"{self.id}.mask"
        self.readback = (self._mask,)
        return flow.put(self._mask, ArraySpec(tuple(-(-side // CELL) for side in self._small)))

    def device_nbytes(self, sources: int) -> int:
        pixels = math.prod(self._small)
        return sources * (4 * 2 * pixels + 4 * (pixels + COUNTS))  # uint16 layers, and the scratch

    def launch(self, batch: Batch) -> None:
        assert batch.planes is not None
        for i, item in enumerate(batch.items):
            self._compare(batch.planes.picture(i), self._state(item.source), batch.out[self._mask][i])

    def _state(self, source: str) -> _State:
        """What is known of a source; begun anew when its spec changed (copies of this stage share them all)."""
        state = self._states.get(source)
        if state is None or not state.spec.same_pictures(self._spec):
            layers = self.device.xp.zeros((4, *self._small), np.uint16)
            scratch = self.device.kernels.difference_scratch(*self._small)
            state = self._states[source] = _State(self._spec, layers, scratch)
        return state

    def _compare(self, planes: tuple[Any, ...], state: _State, mask: Any) -> None:
        fmt = self._spec.format
        self.device.kernels.difference(
            [component(planes, self._spec, letter) for letter in ("RGB" if fmt.model == "rgb" else "Y")],
            state.layers,
            mask,
            state.scratch,
            shrink=self._shrink,
            extra_bits=fmt.bits + fmt.shift - 8,
            threshold=round(self.threshold * 256),
            limit=round(self.cut * self._small[0] * self._small[1]),
            slow=round(-math.log2(self.update)),
            hold=min(self.hold, state.seen // 2 + 1),
            first=state.seen == 0,
        )
        if state.seen < self.warmup:
            mask[...] = 0
        state.seen += 1

    def collect(self, batch: Batch) -> None:
        for item, mask in zip(batch.items, batch.host[self._mask], strict=True):
            item.meta[self.id] = self._found(mask)

    def _found(self, mask: np.ndarray) -> list[dict[str, Any]]:
        width, height = self._spec.width, self._spec.height
        cell = self._shrink * CELL
        merge = max(width, height) / 100 if self.merge is None else self.merge
        least = width * height / 2000 if self.min_area is None else self.min_area
        blobs = find_blobs(mask, reach=round(merge / cell / 2))
        blobs = [blob for blob in blobs if blob.area * self._shrink**2 >= least]
        return [self._result(blob, cell) for blob in sorted(blobs, key=lambda blob: -blob.area)]

    def _result(self, blob: Blob, cell: int) -> dict[str, Any]:
        x1, y1, x2, y2 = (side * cell for side in blob.box)
        box = (x1, y1, min(x2, self._spec.width), min(y2, self._spec.height))
        upright = [round(side, 2) for side in _upright(box, self._spec)]
        return {"box": upright, "score": round(blob.fill, 3), "label": self.label}

    def reset(self, source: str) -> None:
        self._states.pop(source, None)

    def close(self) -> None:
        self._states.clear()


def _shrink(spec: FrameSpec, most: int) -> int:
    """By how much to shrink pictures so that the longer side is at most ``most``: a power of two up to 16."""
    shrink = 1
    while shrink < 16 and max(spec.width, spec.height) > most * shrink and 2 * shrink <= min(spec.width, spec.height):
        shrink *= 2
    return shrink


def _upright(box: tuple[float, float, float, float], spec: FrameSpec) -> tuple[float, float, float, float]:
    """A box of the decoded picture in the upright one."""
    x1, y1, x2, y2 = box
    if spec.mirrored:
        x1, x2 = spec.width - x2, spec.width - x1
    if spec.rotation == 90:
        return y1, spec.width - x2, y2, spec.width - x1
    if spec.rotation == 180:
        return spec.width - x2, spec.height - y2, spec.width - x1, spec.height - y1
    if spec.rotation == 270:
        return spec.height - y2, x1, spec.height - y1, x2
    return x1, y1, x2, y2
