"""A picture: `Planes` (as decoded, by `FrameSpec`) and `Batch` (on the way), `Frame` (as users see it).

Everywhere in framepipe: arrays are (height, width, …), configuration is width before height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from framepipe.errors import ClosedError
from framepipe.framespec import FrameSpec as FrameSpec
from framepipe.framespec import PlaneLayout as PlaneLayout
from framepipe.framespec import frame_planes as frame_planes
from framepipe.framespec import plane_view as plane_view

if TYPE_CHECKING:
    import av

    from framepipe.device.base import Device

PICTURE = "picture"
"""Under this key, which no stage's id may be, ``meta`` has what is to be known of the picture: `FrameSpec.notes`."""


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
    """What stages found, by their ids; under `PICTURE` what is to be known of the picture itself."""
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
    ``tensors`` maps names to arrays; ``meta`` maps stage ids to what they found (plain JSON values),
    and ``picture`` to what of it was assumed or is odd (`FrameSpec.notes`, ``interlaced``), if anything is.
    ``width`` and ``height`` are those of the upright source picture, in which boxes are given. ``pixel_aspect`` is
    width by height of a pixel of ``image``.
    """

    __slots__ = ("_device", "image", "item", "pixel_aspect", "spec", "tensors")

    def __init__(
        self,
        item: Item,
        spec: FrameSpec,
        image: Any = None,
        tensors: dict[str, Any] | None = None,
        device: Device | None = None,
        pixel_aspect: Fraction = Fraction(1),
    ) -> None:
        self.item = item
        self.pixel_aspect = pixel_aspect
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
    def estimated(self) -> bool:
        """Whether the stream had no time stamp, so that ``time_s`` is estimated."""
        return self.item.estimated

    @property
    def interlaced(self) -> bool:
        """Whether odd and even rows of the picture are of two moments."""
        return self.item.interlaced

    @property
    def meta(self) -> dict[str, Any]:
        """What stages found, by stage id, and under ``picture`` what is to be known of the picture itself."""
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
