"""``rgb``: the decoded planes as an upright RGB image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from framepipe.frame import Batch
from framepipe.kernels._tonemap import Tone
from framepipe.registry import register
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages._picture import Accuracy, Checks, Color, Tonemap, chosen_accuracy, compose, upright_alpha


@register("rgb")
@dataclass(kw_only=True)
class Rgb(Stage):
    """Converts planes of any format to ``image``, (N, H, W, 3) uint8 RGB, turned upright.

    ``accuracy`` is ``exact`` (within 1 code of the standards' formulas, the same bits on every device), ``fast``
    (within 3 codes at 8 bits, the same as exact above) or None for the device's default. ``chroma`` between its
    samples is repeated (``nearest``) or, in the exact conversion, interpolated (``bilinear``).

    ``alpha`` of pictures that have it is dropped (``drop``), kept as the tensor ``alpha``, (N, H, W) uint8
    (``keep``; 255 for pictures that have none), or used to put the picture on a colour: that one's red, green and
    blue. Alpha is taken as straight, as PNG, VP9 and ProRes have it; colours are mixed as codes.

    ``tonemap`` takes HDR (PQ, HLG) to SDR: by Hable's curve (``hable``, with more contrast), Reinhard's extended one
    (``reinhard``), or not at all (``none``: codes are converted as if they were SDR's, and the report says so).
    ``peak_nits`` is the luminance in cd/m2, from 203, that becomes white, as all above it does; HLG has no more than
    1000. With either, accuracy ``fast`` is ``exact``; SDR pictures stay as they are. The formulas are in
    `framepipe.kernels._tonemap`.
    """

    accuracy: Accuracy | None = None
    chroma: Literal["nearest", "bilinear"] = "nearest"
    alpha: Literal["drop", "keep"] | Color = "drop"
    tonemap: Tonemap = "none"
    peak_nits: float = 1000.0

    reads = frozenset({"planes"})
    writes = frozenset({"image"})

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.choice("accuracy", Literal[None, "exact", "fast"])
        checks.choice("chroma", Literal["nearest", "bilinear"])
        if self.accuracy == "fast" and self.chroma == "bilinear":
            checks.add("accuracy 'fast' repeats chroma; chroma 'bilinear' needs accuracy 'exact'")
        if isinstance(self.alpha, str):
            checks.choice("alpha", Literal["drop", "keep"])
        else:
            checks.color("alpha")
        checks.tonemap()
        checks.done()
        self.uses_alpha = self.alpha != "drop"
        if self.alpha == "keep":
            self.writes = frozenset({"image", "alpha"})
        self._accuracy: Accuracy = "exact"
        self._tone: Tone | None = None

    def plan(self, flow: Flow) -> Flow:
        self._accuracy = "exact" if self.chroma == "bilinear" else chosen_accuracy(self.accuracy, self.device)
        # On the host libavfilter's own frames go on as the image: a copy would cost more than the conversion.
        self._tone = Tone.of(self.tonemap, self.peak_nits, flow.spec)
        fast = self._accuracy == "fast" and self.device.kind == "cpu" and self._tone is None
        self.allocates = fast and self.device.kernels.fast_path(flow.spec)
        width, height = flow.spec.upright_size
        flow = flow.put("image", ArraySpec((height, width, 3)))
        return flow.put("alpha", ArraySpec((height, width))) if self.alpha == "keep" else flow

    def launch(self, batch: Batch) -> None:
        kernels = self.device.kernels
        if self.allocates:
            batch.out["image"] = kernels.to_rgb(batch.planes, accuracy="fast")
        else:
            how = {"accuracy": self._accuracy, "chroma": self.chroma, "tone": self._tone}
            kernels.to_rgb(batch.planes, batch.out["image"], **how)
        if self.alpha == "keep":
            self._keep(batch)
        elif not isinstance(self.alpha, str) and "A" in batch.spec.format.components:
            compose(batch, batch.out["image"], self.alpha)

    def _keep(self, batch: Batch) -> None:
        if "A" not in batch.spec.format.components:
            if self.allocates:
                batch.out["alpha"] = self.device.xp.empty((len(batch), *batch.out["image"][0].shape[:2]), "uint8")
            batch.out["alpha"][...] = 255
            return
        top = (1 << batch.spec.format.bits) - 1
        for i in range(len(batch)):
            batch.out["alpha"][i] = (upright_alpha(batch, i) * 255 + top // 2) // top
