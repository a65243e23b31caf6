"""``draw``: boxes and text of other stages on the image."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from framepipe.errors import ConfigError
from framepipe.frame import Batch, Item
from framepipe.kernels._draw import Mark
from framepipe.registry import register
from framepipe.stage import Affine, Flow, Stage


@register("draw")
@dataclass(kw_only=True)
class Draw(Stage):
    """Draws each box that stages put into ``meta`` on a copy of the image, with its label and score.

    ``stages`` are the ids whose boxes are drawn (by default all). ``color`` is ``"#rrggbb"`` or three codes. ``text``
    is True (label and score), False, or a template such as ``"{label} {id} at {time_s:.1f} s"`` with what a box has,
    and ``source``, ``index``, ``time_s`` and ``stage``; letters beyond ASCII are shown as ``?``. ``thickness`` of lines
    and ``font_scale`` (pixels a dot of the 5 × 8 font) follow the size of the image where they are not given.

    Boxes are in pixels of the upright source picture and land where that is in the image, whatever resize came
    between; what is outside is cut off.
    """

    stages: list[str] | None = None
    color: str | tuple[int, int, int] = "#39ff14"
    text: bool | str = True
    thickness: int | None = None
    font_scale: int | None = None

    reads = frozenset({"image", "meta"})
    writes = frozenset({"image"})

    def __post_init__(self) -> None:
        problems = []
        for name in ("thickness", "font_scale"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 64:
                problems.append(f"{name} must be from 1 to 64")
        try:
            self._color = _color(self.color)
        except ValueError:
            problems.append(f"color {self.color!r} is neither '#rrggbb' nor three numbers from 0 to 255")
        try:
            list(string.Formatter().parse(str(self.text)))
        except ValueError as error:
            problems.append(f"text {self.text!r} is no template: {error}")
        if problems:
            raise ConfigError(f"draw: {'; '.join(problems)}", problems)
        self._to_image = Affine()

    def plan(self, flow: Flow) -> Flow:
        if "image" not in flow.arrays:
            raise ConfigError("draw needs an image, and no stage before it makes one", stage=self.id)
        self._to_image = flow.arrays["image"].to_source.inverse()
        return super().plan(flow)

    def launch(self, batch: Batch) -> None:
        for item, image, out in zip(batch.items, batch.arrays["image"], batch.out["image"], strict=True):
            out[...] = image  # a copy: the image may be a library's own memory, or somebody may hold it
            side = min(image.shape[:2])
            thickness = self.thickness or max(1, round(side / 240))
            scale = self.font_scale or max(1, round(side / 320))
            self.device.kernels.draw_boxes(out, list(self._marks(item)), thickness, scale)

    def _marks(self, item: Item) -> Iterator[Mark]:
        for stage, found in item.meta.items():
            if not isinstance(found, list) or (self.stages is not None and stage not in self.stages):
                continue
            for entry in found:
                if isinstance(entry, Mapping) and "box" in entry:
                    x1, y1, x2, y2 = entry["box"]
                    box = (*self._to_image(x1, y1), *self._to_image(x2, y2))
                    yield Mark(box, self._color, self._words(entry, item, stage))

    def _words(self, entry: Mapping[str, Any], item: Item, stage: str) -> str:
        if not self.text:
            return ""
        known = {"source": item.source, "index": item.index, "time_s": item.time_s, "stage": stage, **entry}
        if isinstance(self.text, str):
            return _Template().vformat(self.text, (), known)
        label, score = known.get("label", ""), known.get("score")
        return str(label) if score is None else f"{label} {score:.2f}"


class _Template(string.Formatter):
    """Formats what is known; what a box lacks, or has in another type than the template wants, is shown as it is."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, IndexError, AttributeError, TypeError):
            return "", field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return str(super().format_field(value, format_spec))
        except (ValueError, TypeError):
            return str(value)


def _color(value: str | tuple[int, int, int]) -> tuple[int, int, int]:
    if isinstance(value, str):
        if len(value) != 7 or value[0] != "#":
            raise ValueError(value)
        value = (int(value[1:3], 16), int(value[3:5], 16), int(value[5:7], 16))
    red, green, blue = (int(part) for part in value)
    if not all(0 <= part <= 255 for part in (red, green, blue)):
        raise ValueError(value)
    return red, green, blue
