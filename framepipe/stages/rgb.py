"""``rgb``: the decoded planes as an upright RGB image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from framepipe.frame import Batch
from framepipe.registry import register
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages._picture import Accuracy, Checks, chosen_accuracy


@register("rgb")
@dataclass(kw_only=True)
class Rgb(Stage):
    """Converts planes of any format to ``image``, (N, H, W, 3) uint8 RGB, turned upright; alpha is dropped.

    ``accuracy`` is ``exact`` (within 1 code of the standards' formulas, the same bits on every device), ``fast``
    (within 3 codes at 8 bits, the same as exact above) or None for the device's default. ``chroma`` between its
    samples is repeated (``nearest``) or, in the exact conversion, interpolated (``bilinear``).
    """

    accuracy: Accuracy | None = None
    chroma: Literal["nearest", "bilinear"] = "nearest"

    reads = frozenset({"planes"})
    writes = frozenset({"image"})

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.choice("accuracy", Literal[None, "exact", "fast"])
        checks.choice("chroma", Literal["nearest", "bilinear"])
        if self.accuracy == "fast" and self.chroma == "bilinear":
            checks.add("accuracy 'fast' repeats chroma; chroma 'bilinear' needs accuracy 'exact'")
        checks.done()
        self._accuracy: Accuracy = "exact"

    def plan(self, flow: Flow) -> Flow:
        self._accuracy = "exact" if self.chroma == "bilinear" else chosen_accuracy(self.accuracy, self.device)
        # On the host libavfilter's own frames go on as the image: a copy would cost more than the conversion.
        fast = self._accuracy == "fast" and self.device.kind == "cpu"
        self.allocates = fast and self.device.kernels.fast_path(flow.spec)
        width, height = flow.spec.upright_size
        return flow.put("image", ArraySpec((height, width, 3)))

    def launch(self, batch: Batch) -> None:
        kernels = self.device.kernels
        if self.allocates:
            batch.out["image"] = kernels.to_rgb(batch.planes, accuracy="fast")
        else:
            kernels.to_rgb(batch.planes, batch.out["image"], accuracy=self._accuracy, chroma=self.chroma)
