"""``normalize``: the image as a tensor of floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from framepipe.frame import Batch
from framepipe.registry import register
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages._picture import Checks, Layout, PerChannel, image_of, scale_shift


@register("normalize")
@dataclass(kw_only=True)
class Normalize(Stage):
    """Makes the tensor ``name`` of the image: ``(x * scale - mean) / std`` for each of red, green and blue.

    ``mean`` and ``std`` are one number or one a channel, in units of the scaled samples. ``dtype`` is ``float32``
    or ``float16``, ``layout`` ``nchw`` (N, 3, H, W) or ``nhwc`` (N, H, W, 3).
    """

    name: str = "tensor"
    scale: float = 1 / 255
    mean: PerChannel = 0.0
    std: PerChannel = 1.0
    dtype: Literal["float32", "float16"] = "float32"
    layout: Layout = "nchw"

    reads = frozenset({"image"})

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.array_name("name")
        checks.numbers("scale", positive=True)
        checks.numbers("mean")
        checks.numbers("std", positive=True)
        checks.choice("dtype", Literal["float32", "float16"])
        checks.choice("layout", Layout)
        checks.done()
        self.writes = frozenset({self.name})
        self._factor, self._offset = scale_shift(self.scale, self.mean, self.std)

    def plan(self, flow: Flow) -> Flow:
        image = image_of(flow, self)
        height, width = image.shape[:2]
        shape = (3, height, width) if self.layout == "nchw" else (height, width, 3)
        return flow.put(self.name, ArraySpec(shape, self.dtype, image.to_source))

    def launch(self, batch: Batch) -> None:
        self.device.kernels.normalize(
            batch.arrays["image"],
            batch.out[self.name],
            factor=self._factor,
            offset=self._offset,
            layout=self.layout,
        )
