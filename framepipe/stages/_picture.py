"""What the picture stages share: where pixels come from when a picture is fitted into a size, and checks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from framepipe.errors import ConfigError
from framepipe.frame import Batch
from framepipe.kernels._colour import component
from framepipe.kernels._tonemap import PQ_PEAK_NITS, SDR_WHITE_NITS
from framepipe.registry import did_you_mean
from framepipe.stage import Affine, ArraySpec, Flow, Stage

if TYPE_CHECKING:
    from framepipe.device.base import Device

Accuracy = Literal["exact", "fast"]
Mode = Literal["stretch", "fit", "fill", "letterbox"]
Method = Literal["nearest", "bilinear", "area", "auto"]
Layout = Literal["nchw", "nhwc"]
Tonemap = Literal["hable", "reinhard", "none"]
Rect = tuple[int, int, int, int]
"""x, y, width, height in pixels."""
Color = tuple[int, int, int]
"""Red, green, blue, 0 to 255."""
PerChannel = float | tuple[float, float, float]
"""One number for all three channels, or one each."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The part ``source`` of a picture becomes the part ``target`` of one of ``size`` (width, height)."""

    size: tuple[int, int]
    source: Rect
    target: Rect

    @property
    def to_input(self) -> Affine:
        """From pixels of the result to pixels of the picture."""
        (sx, sy, sw, sh), (tx, ty, tw, th) = self.source, self.target
        return Affine(sw / tw, sh / th, sx - tx * sw / tw, sy - ty * sh / th)

    def method(self, method: Method) -> Literal["nearest", "bilinear", "area"]:
        """``auto`` resolved: the average of what a pixel covers where no side grows, else bilinear."""
        if method != "auto":
            return method
        shrinks = self.target[2] <= self.source[2] and self.target[3] <= self.source[3]
        return "area" if shrinks else "bilinear"


def placement(
    picture: tuple[int, int], width: int | None, height: int | None, mode: Mode, aspect: Fraction = Fraction(1)
) -> Placement:
    """Where a picture of (width, height) goes in a result; a side that is None follows from the other.

    ``aspect`` is that of the picture's pixels; the result's are square. With neither side given the height stays.
    Sides that follow are rounded to the nearest pixel, at least 1.
    """
    w, h = picture[0] * aspect.numerator, picture[1] * aspect.denominator  # only their ratio counts from here on
    if width is None and height is None:
        width, height = _rounded(picture[1] * w, h), picture[1]
    elif width is None:
        assert height is not None
        width = _rounded(w * height, h)
    elif height is None:
        height = _rounded(h * width, w)
    assert width is not None
    assert height is not None
    wider = width * h >= w * height  # the result is wider than the picture
    whole = (0, 0, *picture)
    if mode == "fill":
        cut_w, cut_h = picture
        if wider:
            cut_h = min(cut_h, _rounded(cut_h * w * height, h * width))
        else:
            cut_w = min(cut_w, _rounded(cut_w * h * width, w * height))
        source = ((picture[0] - cut_w) // 2, (picture[1] - cut_h) // 2, cut_w, cut_h)
        return Placement((width, height), source, (0, 0, width, height))
    if mode == "stretch":
        return Placement((width, height), whole, (0, 0, width, height))
    inner = (min(width, _rounded(w * height, h)), height) if wider else (width, min(height, _rounded(h * width, w)))
    if mode == "fit":
        return Placement(inner, whole, (0, 0, *inner))
    at = ((width - inner[0]) // 2, (height - inner[1]) // 2)
    return Placement((width, height), whole, (*at, *inner))


def _rounded(above: int, below: int) -> int:
    return max(1, (2 * above + below) // (2 * below))


def scale_shift(scale: float, mean: PerChannel, std: PerChannel) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """float32 factor and offset, three each, so that ``x * factor + offset`` is ``(x * scale - mean) / std``.

    Worked out in float64 and rounded once: the numbers that every device multiplies by and adds.
    """
    deviation = np.broadcast_to(np.asarray(std, np.float64), 3)
    factor = scale / deviation
    offset = -np.broadcast_to(np.asarray(mean, np.float64), 3) / deviation + 0.0  # + 0.0: no negative zero
    return factor.astype(np.float32), offset.astype(np.float32)


def image_of(flow: Flow, stage: Stage) -> ArraySpec:
    """The image that ``stage`` reads. Raises `ConfigError` where there is none."""
    image = flow.arrays.get("image")
    if image is None:
        raise ConfigError(
            f"{stage.id or stage.type_name} needs an image, and no stage before it makes one", stage=stage.id
        )
    return image


def chosen_accuracy(accuracy: Accuracy | None, device: Device) -> Accuracy:
    """What was asked for, or the device's default."""
    return accuracy or ("fast" if device.default_accuracy == "fast" else "exact")


def upright_alpha(batch: Batch, i: int) -> Any:
    """The alpha of picture ``i`` of a batch, upright: (H, W) uint32, since 16 bits times a code must fit."""
    assert batch.planes is not None
    spec = batch.spec
    plane = component(batch.planes.picture(i), spec, "A")
    return spec.to_upright(plane).astype("uint32") >> spec.format.shift


def compose(batch: Batch, images: Any, color: Color) -> None:
    """Put the upright RGB ``images`` of a batch that has alpha on a colour, in place."""
    top = (1 << batch.spec.format.bits) - 1
    for i, picture in enumerate(images):
        alpha = upright_alpha(batch, i)
        for channel, code in enumerate(color):  # numbers, since an array would have to be uploaded
            over = picture[..., channel]
            over[...] = (over * alpha + code * (top - alpha) + top // 2) // top


class Checks:
    """Collects what is wrong with the parameters of a stage; `done` raises it all as one `ConfigError`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.problems: list[str] = []

    def choice(self, name: str, choices: Any) -> None:
        """One of a Literal's values (or None where the parameter may be that)."""
        value, known = getattr(self._stage, name), get_args(choices)
        if value not in known:
            hint = did_you_mean(str(value), [str(each) for each in known])
            self.problems.append(f"{name} cannot be {value!r}{hint}")

    def at_least(self, least: int, *names: str) -> None:
        """Numbers with a lower bound; None passes."""
        for name in names:
            value = getattr(self._stage, name)
            if value is not None and value < least:
                self.problems.append(f"{name} is {value}; it must be at least {least}")

    def color(self, name: str) -> None:
        """Three codes."""
        value = getattr(self._stage, name)
        if len(value) != 3 or not all(0 <= code <= 255 for code in value):
            self.problems.append(f"{name} is {value!r}; it must be three codes from 0 to 255")

    def numbers(self, name: str, *, positive: bool = False) -> None:
        """One finite number or three; None passes."""
        value = getattr(self._stage, name)
        if value is None:
            return
        values = np.asarray(value, np.float64)
        if values.shape not in ((), (3,)) or not np.isfinite(values).all() or (positive and (values <= 0).any()):
            kind = "above 0" if positive else "finite"
            self.problems.append(
                f"{name} is {value!r}; it must be one number {kind}, or one for each of three channels"
            )

    def tonemap(self) -> None:
        """The parameters ``tonemap`` and ``peak_nits``."""
        self.choice("tonemap", Tonemap)
        peak = getattr(self._stage, "peak_nits", None)
        if peak is None or not SDR_WHITE_NITS <= peak <= PQ_PEAK_NITS:
            least, most = f"{SDR_WHITE_NITS:g}", f"{PQ_PEAK_NITS:g}"
            self.problems.append(f"peak_nits is {peak}; it must be from {least} (the white of SDR) to {most}")

    def array_name(self, name: str) -> None:
        """The name of a tensor: not one that means something else."""
        value = getattr(self._stage, name)
        if not value or "." in value or value in ("image", "planes", "meta"):
            self.problems.append(f"{name} cannot be {value!r}: it must be a name of its own, without a full stop")

    def add(self, problem: str) -> None:
        """Something else."""
        self.problems.append(problem)

    def done(self) -> None:
        """Raise `ConfigError` if anything was wrong."""
        if self.problems:
            where = self._stage.id or self._stage.type_name
            raise ConfigError(f"{where}: {'; '.join(self.problems)}", self.problems, stage=self._stage.id)
