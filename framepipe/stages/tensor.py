"""``tensor``: planes to what a network takes, in one stage."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from framepipe.errors import ConfigError
from framepipe.frame import Batch, FrameSpec
from framepipe.kernels._tonemap import Tone
from framepipe.registry import register
from framepipe.stage import Affine, ArraySpec, Flow, Stage
from framepipe.stages._picture import (
    Accuracy,
    Checks,
    Color,
    Layout,
    Method,
    Mode,
    PerChannel,
    Placement,
    Rect,
    Tonemap,
    chosen_accuracy,
    compose,
    placement,
    scale_shift,
)


@register("tensor")
@dataclass(kw_only=True)
class Tensor(Stage):
    """Makes the tensor ``name`` straight from the planes: the bits that `rgb`, `crop`, `resize` and `normalize` make.

    ``crop`` is x, y, width and height in the upright picture; ``width``, ``height``, ``mode``, ``method``, ``color``
    and ``square_pixels`` are those of `resize`, and without ``width`` and ``height`` the size stays (with
    ``square_pixels``, the height). ``order`` of the channels is ``rgb`` or ``bgr``; ``mean`` and ``std`` follow it.
    ``dtype`` is ``float32`` or ``float16`` (``scale`` is 1/255 where it is not given), or ``uint8`` for the codes as
    they are. ``layout`` is ``nchw`` (N, 3, H, W) or ``nhwc`` (N, H, W, 3). ``alpha`` is dropped (``drop``) or used to
    put the picture on a colour, as by `rgb`, which is the stage to keep it with. ``tonemap`` and ``peak_nits`` take HDR
    to SDR as those of `rgb` do.
    """

    name: str = "tensor"
    width: int | None = None
    height: int | None = None
    mode: Mode = "stretch"
    method: Method = "auto"
    color: Color = (0, 0, 0)
    square_pixels: bool = False
    crop: Rect | None = None
    scale: float | None = None
    mean: PerChannel = 0.0
    std: PerChannel = 1.0
    dtype: Literal["float32", "float16", "uint8"] = "float32"
    layout: Layout = "nchw"
    order: Literal["rgb", "bgr"] = "rgb"
    accuracy: Accuracy | None = None
    alpha: Literal["drop"] | Color = "drop"
    tonemap: Tonemap = "none"
    peak_nits: float = 1000.0

    reads = frozenset({"planes"})

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.array_name("name")
        checks.at_least(1, "width", "height")
        for name, choices in _CHOICES.items():
            checks.choice(name, choices)
        checks.color("color")
        checks.numbers("scale", positive=True)
        checks.numbers("mean")
        checks.numbers("std", positive=True)
        if self.crop is not None and (len(self.crop) != 4 or min(self.crop) < 0 or min(self.crop[2:]) < 1):
            checks.add(f"crop is {self.crop!r}; it must be x, y (0 or more), width, height (1 or more)")
        if self.dtype == "uint8" and (self.scale, self.mean, self.std) != (None, 0.0, 1.0):
            checks.add("dtype 'uint8' takes the codes as they are; leave out scale, mean and std, or choose a float")
        alpha: Any = self.alpha
        if alpha == "keep":
            checks.add("alpha cannot be 'keep': rgb: {alpha: keep} makes a tensor of it; here it is 'drop' or a colour")
        elif isinstance(alpha, str):
            checks.choice("alpha", Literal["drop"])
        else:
            checks.color("alpha")
        checks.tonemap()
        checks.done()
        self.uses_alpha = self.alpha != "drop"
        self.writes = frozenset({self.name})
        self._arguments: dict[str, Any] = {}
        self._between: tuple[str, ...] = ()

    def plan(self, flow: Flow) -> Flow:
        width, height = flow.spec.upright_size
        x, y, w, h = self.crop or (0, 0, width, height)
        if x + w > width or y + h > height:
            raise ConfigError(
                f"{self.id or self.type_name}: crop {w}x{h} at ({x}, {y}) is not inside the picture, which is "
                f"{width}x{height}",
                stage=self.id,
            )
        aspect = flow.pixel_aspect(Affine()) if self.square_pixels else Fraction(1)
        place = placement((w, h), self.width, self.height, self.mode, aspect)
        self._arguments = self._kernel_arguments(place, x, y, flow.spec)
        self._between = ()
        if self.uses_alpha and "A" in flow.spec.format.components:
            flow = self._plan_images(flow, place)
        shape = (3, *place.size[::-1]) if self.layout == "nchw" else (*place.size[::-1], 3)
        to_source = Affine(offset_x=x, offset_y=y).after(place.to_input)
        return flow.put(self.name, ArraySpec(shape, self.dtype, to_source))

    def _plan_images(self, flow: Flow, place: Placement) -> Flow:
        """Memory for the image that is put on a colour, and for the resized one where it is to be another."""
        width, height = flow.spec.upright_size
        sizes = {f"{self.id}.image": (height, width, 3)}
        whole = (0, 0, width, height)
        if (self._arguments["source"], place.target, place.size) != (whole, whole, (width, height)):
            sizes[f"{self.id}.resized"] = (*place.size[::-1], 3)
        for name, shape in sizes.items():
            flow = flow.put(name, ArraySpec(shape))
        self._between = tuple(sizes)
        return flow

    def _kernel_arguments(self, place: Placement, x: int, y: int, spec: FrameSpec) -> dict[str, Any]:
        sx, sy, sw, sh = place.source
        floats = self.dtype != "uint8"
        scale = 1 / 255 if self.scale is None else self.scale
        factor, offset = scale_shift(scale, self.mean, self.std) if floats else (None, None)
        return {
            "accuracy": chosen_accuracy(self.accuracy, self.device),
            "method": place.method(self.method),
            "source": (x + sx, y + sy, sw, sh),
            "target": place.target,
            "color": self.color,
            "factor": factor,
            "offset": offset,
            "layout": self.layout,
            "order": self.order,
            "tone": Tone.of(self.tonemap, self.peak_nits, spec),
        }

    def launch(self, batch: Batch) -> None:
        out = batch.out[self.name]
        if not self._between:
            self.device.kernels.to_tensor(batch.planes, out, **self._arguments)
            return
        assert not isinstance(self.alpha, str)
        kernels, given = self.device.kernels, self._arguments
        how = {key: given[key] for key in ("accuracy", "tone")}
        images = kernels.to_rgb(batch.planes, batch.out[self._between[0]], **how)
        compose(batch, images, self.alpha)
        for name in self._between[1:]:
            resized = batch.out[name]
            kernels.resize(images, resized, **{key: given[key] for key in ("method", "source", "target", "color")})
            images = resized
        kernels.normalize(images, out, **{key: given[key] for key in ("factor", "offset", "layout", "order")})


_CHOICES = {
    "mode": Mode,
    "method": Method,
    "dtype": Literal["float32", "float16", "uint8"],
    "layout": Layout,
    "order": Literal["rgb", "bgr"],
    "accuracy": Literal[None, "exact", "fast"],
}
