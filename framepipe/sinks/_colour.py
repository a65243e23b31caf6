"""From RGB pictures to what encoders take: one libavfilter graph a size, which recycles its frames."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.filter import Graph

from framepipe.errors import SinkError

if TYPE_CHECKING:
    from framepipe.frame import Frame

_TICK = Fraction(1, 1000)


@dataclass(frozen=True)
class Colour:
    """The matrix and range that RGB is converted with, and how they are tagged.

    ``matrix`` is ``bt709``, ``bt601`` or ``rgb`` (none).
    """

    matrix: str
    full_range: bool

    @staticmethod
    def of(pix_fmt: str, height: int, full_range: bool = False) -> Colour:
        """What is customary for this height: 709 from 720 lines, 601 below, as decoders assume."""
        if av.VideoFormat(pix_fmt).is_rgb:
            return Colour("rgb", True)
        return Colour("bt709" if height >= 720 else "bt601", full_range or pix_fmt.startswith("yuvj"))

    def tag(self, context: Any) -> None:
        """Say so in an encoder context (ITU-T H.273 numbers; 6 is SMPTE 170M, that is 601 of 525 lines)."""
        number = {"bt709": 1, "bt601": 6}.get(self.matrix)
        context.colorspace = 0 if number is None else number
        context.color_range = 2 if self.full_range else 1
        if number is not None:
            context.color_primaries = context.color_trc = number


class Converter:
    """Converts (H, W, 3) uint8 RGB to frames of ``pix_fmt``; ``size`` is (width, height). Never scales.

    The result is a frame of its own, within 2 codes of the formula and back.
    """

    def __init__(self, size: tuple[int, int], pix_fmt: str, colour: Colour) -> None:
        self._graph: Graph | None = None
        if pix_fmt == "rgb24":
            return
        graph = Graph()
        graph.threads = 1
        scale = f"out_range={'pc' if colour.full_range else 'tv'}:flags=area+accurate_rnd+full_chroma_inp"
        if colour.matrix != "rgb":
            scale = f"out_color_matrix={colour.matrix}:{scale}"
        graph.link_nodes(
            graph.add_buffer(width=size[0], height=size[1], format=av.VideoFormat("rgb24"), time_base=_TICK),
            graph.add("scale", scale),
            graph.add("format", f"pix_fmts={pix_fmt}"),
            graph.add("buffersink"),
        ).configure()
        self._graph = graph

    def __call__(self, image: np.ndarray) -> av.VideoFrame:
        if image.strides[1:] != (3, 1) or image.strides[0] < 3 * image.shape[1]:
            image = np.ascontiguousarray(image)
        if self._graph is None:
            # A copy: an encoder's own threads may drop the frame, which for numpy's memory takes the GIL, while
            # whoever closes the encoder waits for those threads holding it.
            return av.VideoFrame.from_ndarray(np.ascontiguousarray(image), "rgb24")
        frame = av.VideoFrame.from_numpy_buffer(image, "rgb24")
        frame.pts, frame.time_base = 0, _TICK
        self._graph.vpush(frame)
        return self._graph.vpull()


def picture(frame: Frame, sink: str) -> np.ndarray:
    """The frame's (H, W, 3) uint8 image. Raises `SinkError` where it is of another kind."""
    image = frame.numpy()
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise SinkError(
            f"{sink}: takes (height, width, 3) uint8 pictures, not {image.shape} {image.dtype}",
            source=frame.source,
            index=frame.index,
        )
    return image
