"""``resize``: the image in another size."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from framepipe.frame import Batch
from framepipe.registry import register
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.stages._picture import Checks, Color, Method, Mode, Placement, image_of, placement


@register("resize")
@dataclass(kw_only=True)
class Resize(Stage):
    """Resamples the image to ``width`` × ``height`` pixels; a side that is not given keeps the aspect ratio.

    ``mode`` says what becomes of the aspect ratio where both are given: ``stretch`` ignores it, ``fit`` makes the
    largest picture that fits inside, ``fill`` covers the size and cuts off what hangs over on both sides, and
    ``letterbox`` is ``fit`` with borders of ``color`` up to exactly the size. ``method`` is ``nearest``,
    ``bilinear``, ``area`` (the average of what a pixel covers) or ``auto``: area where no side grows, else
    bilinear.

    ``square_pixels`` makes square ones of pixels that are not, as the source says it of them: the aspect ratio that is
    kept is then that of the picture as it is to be seen, and without ``width`` and ``height`` the width follows from
    the height. With ``stretch`` to a given size there is nothing to keep.
    """

    width: int | None = None
    height: int | None = None
    mode: Mode = "stretch"
    method: Method = "auto"
    color: Color = (0, 0, 0)
    square_pixels: bool = False

    reads = frozenset({"image"})
    writes = frozenset({"image"})

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.width is None and self.height is None and not self.square_pixels:
            checks.add("width and height are both missing; give at least one")
        checks.at_least(1, "width", "height")
        checks.choice("mode", Mode)
        checks.choice("method", Method)
        checks.color("color")
        checks.done()
        self._placement: Placement | None = None

    def plan(self, flow: Flow) -> Flow:
        image = image_of(flow, self)
        size = image.shape[1], image.shape[0]
        aspect = flow.pixel_aspect(image.to_source) if self.square_pixels else Fraction(1)
        place = placement(size, self.width, self.height, self.mode, aspect)
        if place.size == size and place.source == place.target:
            self._placement = None  # the image is that already and goes on as it is
            return flow
        self._placement = place
        shape = (place.size[1], place.size[0], 3)
        return flow.put("image", ArraySpec(shape, to_source=image.to_source.after(place.to_input)))

    def launch(self, batch: Batch) -> None:
        place = self._placement
        if place is not None:
            self.device.kernels.resize(
                batch.arrays["image"],
                batch.out["image"],
                method=place.method(self.method),
                source=place.source,
                target=place.target,
                color=self.color,
            )
