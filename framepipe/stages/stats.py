"""``stats``: mean, minimum and maximum of each picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from framepipe.errors import ConfigError
from framepipe.frame import Batch
from framepipe.registry import register
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages._picture import Checks, image_of


@register("stats")
@dataclass(kw_only=True)
class Stats(Stage):
    """Puts ``{"mean", "min", "max"}`` of every picture into ``meta``.

    Of the ``image`` each is a list for red, green and blue. Of the ``luma`` of the decoded planes each is a number,
    in codes of 8 bits whatever the format has (an image is not needed then); pictures that are RGB as decoded have
    no luma.
    """

    of: Literal["image", "luma"] = "image"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.choice("of", Literal["image", "luma"])
        checks.done()
        self.reads = frozenset({"image" if self.of == "image" else "planes"})
        self.writes = frozenset({"meta"})
        self._samples = 1
        self._unit = 1

    @property
    def _sums(self) -> str:
        return f"{self.id}.sums"

    def plan(self, flow: Flow) -> Flow:
        self.readback = (self._sums,)
        if self.of == "image":
            height, width = image_of(flow, self).shape[:2]
            self._samples, self._unit = height * width, 1
            return flow.put(self._sums, ArraySpec((3, 3), "int64"))
        spec = flow.spec
        if spec.format.model == "rgb":
            raise ConfigError(
                f"{self.id or self.type_name}: pictures in {spec.pix_fmt} have no luma; use of: image", stage=self.id
            )
        self._samples = spec.width * spec.height
        self._unit = 1 << (spec.format.bits + spec.format.shift - 8)
        return flow.put(self._sums, ArraySpec((1, 3), "int64"))

    def launch(self, batch: Batch) -> None:
        kernels, out = self.device.kernels, batch.out[self._sums]
        if self.of == "image":
            kernels.stats(batch.arrays["image"], out)
        else:
            kernels.luma_stats(batch.planes, out)

    def collect(self, batch: Batch) -> None:
        for item, sums in zip(batch.items, batch.host[self._sums], strict=True):
            item.meta[self.id] = self._found(sums)

    def _found(self, sums: Any) -> dict[str, Any]:
        names = ("mean", "min", "max")
        units = (self._unit * self._samples, self._unit, self._unit)
        if self.of == "luma":
            return {name: float(value) / unit for name, value, unit in zip(names, sums[0], units, strict=True)}
        mean = [float(total) / self._samples for total in sums[:, 0]]
        return {"mean": mean, "min": sums[:, 1].tolist(), "max": sums[:, 2].tolist()}
