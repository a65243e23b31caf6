"""What a picture is: `FrameSpec` (as decoded), `Planes` and `Batch` (on the way), `Frame` (as users see it).

Everywhere in framepipe: arrays are (height, width, …), configuration is width before height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe import pixfmt
from framepipe.errors import ClosedError, UnsupportedFormatError

if TYPE_CHECKING:
    import av

    from framepipe.device.base import Device

# AVColorSpace (ITU-T H.273 table 4, MatrixCoefficients) to the names used here.
_MATRIX = {1: "bt709", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}
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
    ``rgb``. ``assumed`` names what the stream did not say (``matrix``, ``range``). ``rotation`` is how far the
    picture must be turned counter-clockwise to stand upright: 0, 90, 180 or 270. ``transfer`` is ``pq``, ``hlg``
    or ``sdr``. ``sample_aspect`` is how wide and how high a pixel of the decoded picture is.
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

    @staticmethod
    def of(
        frame: av.VideoFrame,
        matrix: str | None = None,
        full_range: bool | None = None,
        *,
        turn: bool = True,
        sample_aspect: tuple[int, int] = (1, 1),
    ) -> FrameSpec:
        """The spec of a decoded frame (never of a stream header: those are wrong too often).

        ``matrix`` and ``full_range`` override what the frame says; ``turn`` False leaves it lying. Raises
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
    def nbytes(self) -> int:
        """Bytes of one picture in a slot."""
        last = self.planes[-1]
        return _up(last.offset + last.pitch * last.height, 256)

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) once turned by ``rotation``."""
        return (self.height, self.width) if self.rotation in (90, 270) else (self.width, self.height)

    @property
    def upright_aspect(self) -> tuple[int, int]:
        """``sample_aspect`` once turned by ``rotation``."""
        wide, high = self.sample_aspect
        return (high, wide) if self.rotation in (90, 270) else (wide, high)

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
    matrix: str | None,
    full_range: bool | None,
    sample_aspect: tuple[int, int],
) -> FrameSpec:
    fmt = pixfmt.table().get(pix_fmt)
    if fmt is None:
        raise UnsupportedFormatError(f"pixel format {pix_fmt!r} is not supported")
    assumed = []
    if fmt.model == "rgb":
        matrix, full_range = "rgb", True
    if matrix is None:
        matrix = _MATRIX.get(colorspace)
        if matrix is None:
            # 601 below 720 lines and 709 from there is the rule of BT.601/BT.709 themselves: SD and HD.
            matrix = "bt601" if min(width, height) < 720 else "bt709"
            assumed.append("matrix")
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
        round(rotation / 90) * 90 % 360,  # pictures are turned by right angles only
        _TRANSFER.get(color_trc, "sdr"),
        tuple(assumed) if fmt.model != "gray" else (),
        sample_aspect,
    )


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


class Planes:
    """The decoded planes of N pictures of one spec: in one slab, or the decoder's own frames.

    ``slab`` is an (N, nbytes) uint8 array on the device, or None where the frames travel themselves (``direct``
    on the CPU). ``frames`` are the decoded `av.VideoFrame`, or None. Valid only for the stages that run before
    the slot is released: whoever wants to keep a plane copies it.
    """

    __slots__ = ("_views", "frames", "n", "slab", "spec")

    def __init__(
        self, spec: FrameSpec, n: int, slab: Any = None, frames: Sequence[av.VideoFrame] | None = None
    ) -> None:
        self.spec = spec
        self.n = n
        self.slab = slab
        self.frames = frames
        self._views: tuple[Any, ...] | None = None

    def picture(self, i: int) -> tuple[Any, ...]:
        """Views of the planes of picture ``i``: (height, width) or (height, width, channels) each."""
        if self.frames is not None:
            return frame_planes(self.frames[i], self.spec)
        if self._views is None:
            self._views = self.spec.views(self.slab)
        return tuple(view[i] for view in self._views)


@dataclass(slots=True, eq=False)
class Item:
    """What travels beside one picture: where it came from, when it shows, and what stages found in it.

    ``index`` counts the pictures decoded from this source in this run, from 0. ``time_s`` is never None; where the
    stream had no time stamp it is estimated from the rate and ``estimated`` is True. ``interlaced``: odd and even rows
    are of two moments.
    """

    source: str
    index: int
    pts: int | None
    time_base: Fraction | None
    time_s: float
    estimated: bool = False
    interlaced: bool = False
    filtered_by: str | None = None
    """Set by a stage in `Stage.collect` to its id: the picture goes no further."""
    meta: dict[str, Any] = field(default_factory=dict)
    handle: Any = None
    """The pipeline's own record of the source; not for stages."""


class Batch:
    """N pictures of one spec on their way through the stages.

    ``arrays`` maps names to what stages wrote: ``image`` is (N, H, W, 3), on the CPU also a list of N (H, W, 3)
    arrays; tensors have names of their own. ``host`` holds the small results that a stage asked to have read
    back, as numpy arrays, in `Stage.collect`. ``out`` holds, in `Stage.launch`, the memory to write to.
    ``stream`` is the stream that work is to be enqueued on.
    """

    __slots__ = ("arrays", "host", "items", "out", "planes", "stream")

    def __init__(self, items: Sequence[Item], planes: Planes | None, arrays: dict[str, Any] | None = None) -> None:
        self.items = items
        self.planes = planes
        self.arrays: dict[str, Any] = arrays if arrays is not None else {}
        self.out: dict[str, Any] = {}
        self.host: dict[str, np.ndarray] = {}
        self.stream: Any = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def spec(self) -> FrameSpec:
        """Spec of the decoded pictures. Raises `ClosedError` once the planes are gone."""
        if self.planes is None:
            raise ClosedError("the planes of this batch are gone: only the first readers see them")
        return self.planes.spec


class Frame:
    """One picture as sinks and users see it: complete, of its own memory, safe to hold.

    ``image`` is the (H, W, 3) uint8 RGB picture on the pipeline's device, or None where no stage made one;
    ``tensors`` maps names to arrays; ``meta`` maps stage ids to what they found (plain JSON values).
    ``width`` and ``height`` are those of the upright source picture, in which boxes are given.
    """

    __slots__ = ("_device", "image", "item", "spec", "tensors")

    def __init__(
        self,
        item: Item,
        spec: FrameSpec,
        image: Any = None,
        tensors: dict[str, Any] | None = None,
        device: Device | None = None,
    ) -> None:
        self.item = item
        self.spec = spec
        self.image = image
        self.tensors = tensors if tensors is not None else {}
        self._device = device

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.item.source

    @property
    def index(self) -> int:
        """Number of the picture among those decoded from its source in this run."""
        return self.item.index

    @property
    def pts(self) -> int | None:
        """Presentation time stamp in ``time_base`` units, or None where the stream has none."""
        return self.item.pts

    @property
    def time_base(self) -> Fraction | None:
        """Seconds of one unit of ``pts``."""
        return self.item.time_base

    @property
    def time_s(self) -> float:
        """Presentation time in seconds, as the file has it (it need not begin at 0)."""
        return self.item.time_s

    @property
    def meta(self) -> dict[str, Any]:
        """What stages found, by stage id."""
        return self.item.meta

    @property
    def width(self) -> int:
        """Width of the upright source picture in pixels."""
        return self.spec.upright_size[0]

    @property
    def height(self) -> int:
        """Height of the upright source picture in pixels."""
        return self.spec.upright_size[1]

    def numpy(self) -> np.ndarray:
        """The picture as a numpy array (H, W, 3); on a GPU this copies and waits.

        Raises `ClosedError` where the pipeline made no image.
        """
        return self.to_host(self._picture())

    def to_host(self, array: Any) -> np.ndarray:
        """One of the frame's arrays as numpy; on a GPU this copies and waits."""
        return self._device.to_host(array) if self._device is not None else np.asarray(array)

    def release(self, stream: Any = None) -> None:
        """Give the memory back now, behind the work already enqueued on ``stream``; the frame is empty after."""
        if stream is None or self._device is None:
            self.image, self.tensors = None, {}
            return
        with self._device.using(stream):
            self.image, self.tensors = None, {}

    def _picture(self) -> Any:
        if self.image is None:
            raise ClosedError("this frame has no image: no stage made one, or it was released")
        return self.image

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack__(self, **options: Any) -> Any:
        return self._picture().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._picture().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._picture().__cuda_array_interface__

    def __repr__(self) -> str:
        shape = None if self.image is None else tuple(self.image.shape)
        return f"Frame(source={self.source!r}, index={self.index}, time_s={self.time_s:.3f}, image={shape})"
