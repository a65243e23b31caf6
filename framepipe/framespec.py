"""What a decoded picture is: size, pixel format, colour, and where its planes lie in memory (`FrameSpec`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe import pixfmt
from framepipe.errors import UnsupportedFormatError

if TYPE_CHECKING:
    import av

# AVColorSpace (ITU-T H.273 table 4, MatrixCoefficients) to the names used here.
_MATRIX = {1: "bt709", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020"}
# Those that need another formula than three weights of red, green and blue.
_OTHER_MATRIX = {
    8: "YCgCo", 10: "BT.2020 with constant luminance", 11: "YDzDx", 12: "derived from chromaticities",
    13: "derived from chromaticities, with constant luminance", 14: "ICtCp", 15: "IPT-C2", 16: "YCgCo-Re",
    17: "YCgCo-Ro",
}  # fmt: skip
_TRANSFER = {16: "pq", 18: "hlg"}
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where one plane stands in a block of ``FrameSpec.nbytes``: bytes for ``offset`` and ``pitch``."""

    offset: int
    pitch: int
    height: int
    width: int
    channels: int

    @property
    def row_samples(self) -> int:
        """Samples in a row."""
        return self.width * self.channels


@dataclass(frozen=True)
class FrameSpec:
    """Size, pixel format and colour of one decoded picture, and how its planes lie in a slot.

    ``matrix`` is ``bt601``, ``bt709``, ``bt2020``, ``smpte240m``, ``fcc`` or, for pictures that are RGB already,
    ``rgb``. ``assumed`` names what the stream did not say (``matrix``, ``range``). To stand upright the picture
    is flipped left to right if ``mirrored``, and then turned counter-clockwise by ``rotation``: 0, 90, 180 or 270.
    ``transfer`` is ``pq``, ``hlg`` or ``sdr``. ``sample_aspect`` is how wide and how high a pixel of the decoded
    picture is. ``other_matrix`` names the matrix that the stream has where ``matrix`` was assumed although it has
    one, since there is no formula for it.
    """

    width: int
    height: int
    pix_fmt: str
    matrix: str = "bt601"
    full_range: bool = False
    rotation: int = 0
    transfer: str = "sdr"
    assumed: tuple[str, ...] = ()
    sample_aspect: tuple[int, int] = (1, 1)
    other_matrix: str = ""
    mirrored: bool = False

    @staticmethod
    def of(
        frame: av.VideoFrame,
        matrix: str | None = None,
        full_range: bool | None = None,
        *,
        turn: bool = True,
        mirrored: bool = False,
        sample_aspect: tuple[int, int] = (1, 1),
    ) -> FrameSpec:
        """The spec of a decoded frame (never of a stream header: those are wrong too often).

        ``matrix`` and ``full_range`` override what the frame says; ``turn`` False leaves it lying. ``mirrored``
        is whether its display matrix mirrors it, which PyAV's ``rotation`` does not tell. Raises
        `UnsupportedFormatError` naming the pixel format.
        """
        return _spec(
            frame.width,
            frame.height,
            frame.format.name,
            int(frame.colorspace),
            int(frame.color_range),
            int(frame.color_trc),
            int(frame.rotation) if turn else 0,
            mirrored and turn,
            matrix,
            full_range,
            sample_aspect,
        )

    @cached_property
    def format(self) -> pixfmt.PixelFormat:
        """Memory layout of the pixel format."""
        return pixfmt.table()[self.pix_fmt]

    @cached_property
    def planes(self) -> tuple[PlaneLayout, ...]:
        """Where each plane stands in a slot; pitches are multiples of 64 bytes, as FFmpeg's mostly are."""
        layouts, offset = [], 0
        for plane in self.format.planes:
            width = -(-self.width >> plane.w_shift)  # ceiling: odd sizes keep their last chroma sample
            height = -(-self.height >> plane.h_shift)
            pitch = _up(width * plane.channels * self.format.itemsize, _ALIGN)
            layouts.append(PlaneLayout(offset, pitch, height, width, plane.channels))
            offset += pitch * height
        return tuple(layouts)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether a slot has bytes behind rows that are none of the picture's."""
        return any(plane.pitch != plane.row_samples * self.format.itemsize for plane in self.planes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one picture in a slot."""
        last = self.planes[-1]
        return _up(last.offset + last.pitch * last.height, 256)

    @property
    def notes(self) -> dict[str, Any]:
        """What somebody who reads results should know of the picture, as JSON values; empty for a plain one.

        ``matrix`` and ``range`` with ``assumed`` where the stream did not say them, ``transfer`` of HDR, and the
        ``sample_aspect`` of the upright picture where pixels are not square. Made anew each time: the caller's own.
        """
        told: dict[str, Any] = {}
        if self.assumed:
            ranges = "full" if self.full_range else "limited"
            told |= {"matrix": self.matrix, "range": ranges, "assumed": list(self.assumed)}
        if self.transfer != "sdr":
            told["transfer"] = self.transfer
        if self.sample_aspect != (1, 1):
            told["sample_aspect"] = list(self.upright_aspect)
        return told

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) of the upright picture."""
        return (self.height, self.width) if self.rotation in (90, 270) else (self.width, self.height)

    @property
    def upright_aspect(self) -> tuple[int, int]:
        """``sample_aspect`` of the upright picture."""
        wide, high = self.sample_aspect
        return (high, wide) if self.rotation in (90, 270) else (wide, high)

    def same_pictures(self, other: FrameSpec) -> bool:
        """Whether pictures of both are alike but for the shape of their pixels: what was learnt of them still holds."""
        return self == other or self == replace(other, sample_aspect=self.sample_aspect)

    def to_upright(self, lying: Any) -> Any:
        """A view of a decoded picture or plane, (height, width, …) of numpy or cupy, as it stands upright."""
        if self.mirrored:
            lying = lying[:, ::-1]
        if self.rotation == 180:
            return lying[::-1, ::-1]
        if self.rotation == 90:
            return lying.swapaxes(0, 1)[::-1]
        return lying.swapaxes(0, 1)[:, ::-1] if self.rotation == 270 else lying

    def to_lying(self, upright: Any) -> Any:
        """The view that `to_upright` makes ``upright`` of."""
        if self.rotation == 180:
            upright = upright[::-1, ::-1]
        elif self.rotation == 90:
            upright = upright[::-1].swapaxes(0, 1)
        elif self.rotation == 270:
            upright = upright[:, ::-1].swapaxes(0, 1)
        return upright[:, ::-1] if self.mirrored else upright

    def views(self, slab: Any) -> tuple[Any, ...]:
        """Typed views of each plane in ``slab``, an (N, ≥ nbytes) uint8 array of numpy or cupy.

        Each is (N, height, width), or (N, height, width, channels) where samples are interleaved.
        """
        n, out = slab.shape[0], []
        for plane in self.planes:
            rows = slab[:, plane.offset : plane.offset + plane.pitch * plane.height]
            rows = rows.reshape(n, plane.height, plane.pitch)
            row = rows[:, :, : plane.row_samples * self.format.itemsize].view(self.format.dtype)
            if plane.channels > 1:
                row = row.reshape(n, plane.height, plane.width, plane.channels)
            out.append(row)
        return tuple(out)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@cache
def _spec(
    width: int,
    height: int,
    pix_fmt: str,
    colorspace: int,
    color_range: int,
    color_trc: int,
    rotation: int,
    mirrored: bool,
    matrix: str | None,
    full_range: bool | None,
    sample_aspect: tuple[int, int],
) -> FrameSpec:
    fmt = pixfmt.table().get(pix_fmt)
    if fmt is None:
        raise UnsupportedFormatError(f"pixel format {pix_fmt!r} is not supported")
    assumed, other = [], ""
    if fmt.model == "rgb":
        matrix, full_range = "rgb", True
    if matrix is None:
        matrix = _MATRIX.get(colorspace)
        if matrix is None:
            # 601 below 720 lines and 709 from there is the rule of BT.601/BT.709 themselves: SD and HD.
            matrix = "bt601" if min(width, height) < 720 else "bt709"
            if colorspace == 10 or color_trc in _TRANSFER:  # BT.2100, which defines PQ and HLG, has no other
                matrix = "bt2020"
            assumed.append("matrix")
            other = _OTHER_MATRIX.get(colorspace, "")
    if full_range is None:
        if color_range in (1, 2) and not fmt.name.startswith("yuvj"):
            full_range = color_range == 2
        else:
            full_range = fmt.full_range
            if color_range not in (1, 2):
                assumed.append("range")
    return FrameSpec(
        width,
        height,
        pix_fmt,
        matrix,
        full_range,
        _right_angle(rotation, mirrored),
        _TRANSFER.get(color_trc, "sdr"),
        tuple(assumed) if fmt.model != "gray" else (),
        sample_aspect,
        other if fmt.model == "yuv" else "",
        mirrored,
    )


def _right_angle(degrees: int, mirrored: bool) -> int:
    """``rotation`` from what PyAV tells: pictures are turned by right angles only."""
    if abs(degrees) > 180:  # it could not be computed: a matrix of zeros
        degrees = 0
    # av_display_rotation_get counts a flip from left to right as half a turn.
    return (round(degrees / 90) * 90 + (180 if mirrored else 0)) % 360


def frame_planes(frame: av.VideoFrame, spec: FrameSpec) -> tuple[np.ndarray, ...]:
    """Read-only views of a decoded frame's planes, (height, width) or (height, width, channels) each.

    They keep the frame's memory alive. FFmpeg's padding at the end of rows is outside the views.
    """
    return tuple(plane_view(plane, layout, spec) for plane, layout in zip(frame.planes, spec.planes, strict=False))


def plane_view(plane: Any, layout: PlaneLayout, spec: FrameSpec) -> np.ndarray:
    """One of `frame_planes`."""
    line = abs(plane.line_size)
    rows = np.frombuffer(memoryview(plane), np.uint8, line * layout.height).reshape(layout.height, line)
    if plane.line_size < 0:  # the picture lies upside down in memory
        rows = rows[::-1]
    view = rows[:, : layout.row_samples * spec.format.itemsize].view(spec.format.dtype)
    if layout.channels > 1:
        view = view.reshape(layout.height, layout.width, layout.channels)
    view.flags.writeable = False  # the decoder still predicts later pictures from this memory
    return view
