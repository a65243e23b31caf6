"""``crop``: a part of the image."""

from __future__ import annotations

from dataclasses import dataclass

from framepipe.errors import ConfigError
from framepipe.frame import Batch
from framepipe.registry import register
from framepipe.stage import Affine, ArraySpec, Flow, Stage
from framepipe.stages._picture import Checks, image_of


@register("crop")
@dataclass(kw_only=True)
class Crop(Stage):
    """Keeps the rectangle of ``width`` × ``height`` pixels whose top left corner is (``x``, ``y``) in the image."""

    width: int
    height: int
    x: int = 0
    y: int = 0

    reads = frozenset({"image"})
    writes = frozenset({"image"})

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "x", "y")
        checks.at_least(1, "width", "height")
        checks.done()

    def plan(self, flow: Flow) -> Flow:
        image = image_of(flow, self)
        height, width = image.shape[:2]
        if self.x + self.width > width or self.y + self.height > height:
            raise ConfigError(
                f"{self.id or self.type_name}: {self.width}x{self.height} at ({self.x}, {self.y}) is not inside the "
                f"image, which is {width}x{height}",
                stage=self.id,
            )
        to_source = image.to_source.after(Affine(offset_x=self.x, offset_y=self.y))
        return flow.put("image", ArraySpec((self.height, self.width, 3), to_source=to_source))

    def launch(self, batch: Batch) -> None:
        rows, columns = slice(self.y, self.y + self.height), slice(self.x, self.x + self.width)
        for picture, out in zip(batch.arrays["image"], batch.out["image"], strict=True):
            self.device.xp.copyto(out, picture[rows, columns])
