"""``synthetic``: a drawn video whose truth is known, at any size, rate and pixel format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import av
import av.filter
from av.video.format import VideoFormat

from framepipe import pixfmt
from framepipe.errors import ConfigError
from framepipe.frame import FrameSpec
from framepipe.registry import did_you_mean, register
from framepipe.source import Source, Stream
from framepipe.sources._scene import Scene, Shape, lanes

# AVColorSpace (ITU-T H.273 table 4) of each matrix.
_COLORSPACE = {"rgb": 0, "bt709": 1, "fcc": 4, "bt601": 6, "smpte240m": 7, "bt2020": 9}
_LONGEST = 250


@register("synthetic")
@dataclass(kw_only=True)
class Synthetic(Source):
    """Rectangles and ellipses that bounce over a still background, the same for the same ``seed``.

    ``frames`` pictures of ``width`` × ``height`` come out (None: without end), ``rate`` a second (a number or
    ``"30000/1001"``), in any ``pix_fmt`` of `framepipe.pixfmt` that FFmpeg knows. The first ``empty`` of them show
    the background alone. ``noise`` is the standard deviation of noise on luma, in codes of 8 bits. ``matrix``
    (``bt601``, ``bt709``, ``bt2020``, …) and ``full_range`` are what is drawn and tagged; by default what
    `FrameSpec` assumes of an untagged picture of that size and format.

    Pictures are drawn once and then repeat without a seam, after 250 or as many as fit into ``cache_mib`` MiB, so
    that the source is never what a pipeline waits for; shapes move over shorter ways where that is few. The memory
    belongs to this object and goes with it. `truth` tells where each shape is.
    """

    width: int = 640
    height: int = 360
    pix_fmt: str = "yuv420p"
    rate: int | float | str = 25
    frames: int | None = 250
    seed: int = 0
    shapes: int = 4
    empty: int = 0
    noise: float = 0.0
    matrix: str | None = None
    full_range: bool | None = None
    cache_mib: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(self._problems())
        if problems:
            raise ConfigError(f"synthetic: {'; '.join(problems)}", problems)

    def _problems(self) -> Iterator[str]:
        for name, least in (("width", 8), ("height", 8), ("shapes", 0), ("empty", 0), ("noise", 0), ("cache_mib", 1)):
            if getattr(self, name) < least:
                yield f"{name} must be at least {least}"
        if self.shapes * 8 > self.height:
            yield f"{self.shapes} shapes need a height of {self.shapes * 8}"
        if self.frames is not None and self.frames < 0:
            yield "frames must be at least 0, or null for no end"
        matrices = sorted(set(_COLORSPACE) - {"rgb"})
        if self.matrix is not None and self.matrix not in matrices:
            yield f"matrix {self.matrix!r} is unknown{did_you_mean(self.matrix, matrices)}"
        if self.pix_fmt not in pixfmt.table() or not _known(self.pix_fmt):
            yield f"pix_fmt {self.pix_fmt!r} is unknown{did_you_mean(self.pix_fmt, pixfmt.table())}"
        try:
            if Fraction(str(self.rate)) <= 0:
                raise ValueError
        except (ValueError, ZeroDivisionError):
            yield f"rate {self.rate!r} is no positive number"

    @cached_property
    def spec(self) -> FrameSpec:
        """What every picture is: size, format and the colour that it is drawn in and tagged with."""
        blank = av.VideoFrame(self.width, self.height, self.pix_fmt)
        default = FrameSpec.of(blank, self.matrix, self.full_range)
        return FrameSpec.of(blank, default.matrix, default.full_range)  # what gets tagged is no longer assumed

    @cached_property
    def period(self) -> int:
        """After how many pictures the motion repeats."""
        return max(2, min(_LONGEST, self.cache_mib * 2**20 // self.spec.nbytes))

    @cached_property
    def _shapes(self) -> list[Shape]:
        return lanes(self.width, self.height, self.shapes, self.period, self.seed)

    @cached_property
    def _pictures(self) -> _Pictures:
        return _Pictures(Scene(self.spec, self._shapes, self.period, self.seed, self.noise))

    def truth(self, index: int) -> list[dict[str, Any]]:
        """What picture ``index`` shows: each shape's ``box`` (``x1, y1, x2, y2`` in pixels), ``label`` and ``id``."""
        if index < self.empty:
            return []
        part = (index - self.empty) % self.period / self.period
        return [
            {"box": [float(side) for side in shape.box(part)], "label": shape.label, "id": shape.id}
            for shape in self._shapes
        ]

    def open(self, stopping: Callable[[], bool]) -> Stream:
        """Start from the first picture; any number of streams may be open at once."""
        return _Drawn(self, stopping)


def _known(pix_fmt: str) -> bool:
    try:
        VideoFormat(pix_fmt)
    except ValueError:
        return False
    return True


class _Pictures:
    """The pictures of a scene, each drawn when it is first asked for and kept."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._made: dict[int | None, av.VideoFrame] = {}

    def get(self, i: int | None) -> av.VideoFrame:
        frame = self._made.get(i)
        if frame is None:
            frame = self._scene.render(i)
            frame.colorspace = _COLORSPACE[self._scene.spec.matrix]
            frame.color_range = 2 if self._scene.spec.full_range else 1
            frame = self._made.setdefault(i, frame)  # two threads may have drawn it: both take the same one
        return frame


class _Drawn(Stream):
    def __init__(self, source: Synthetic, stopping: Callable[[], bool]) -> None:
        self.rate = Fraction(str(source.rate))
        self.time_base = self._tick = 1 / self.rate
        self.expected = source.frames
        self.uri = f"synthetic:{source.width}x{source.height}"
        self._source = source
        self._stopping = stopping

    def frames(self) -> Iterator[av.VideoFrame]:
        source, share = self._source, _Share(self._source.spec)
        index = 0
        while (source.frames is None or index < source.frames) and not self._stopping():
            i = None if index < source.empty else (index - source.empty) % source.period
            frame = share(source._pictures.get(i))
            frame.pts, frame.time_base = index, self._tick
            yield frame
            index += 1


class _Share:
    """New frames over the same planes: a filter graph that does nothing passes on references, in any format and size.

    FFmpeg counts them, so whoever asks for a writable frame gets a copy.
    """

    def __init__(self, spec: FrameSpec) -> None:
        self._graph = av.filter.Graph()
        # The graph is told the colour too: a frame that differs from it is complained about.
        self._into = self._graph.add(
            "buffer",
            video_size=f"{spec.width}x{spec.height}",
            pix_fmt=spec.pix_fmt,
            time_base="1/25",
            colorspace=str(_COLORSPACE[spec.matrix]),
            range="2" if spec.full_range else "1",
        )
        self._out = self._graph.add("buffersink")
        self._graph.link_nodes(self._into, self._out).configure()

    def __call__(self, frame: av.VideoFrame) -> av.VideoFrame:
        self._into.push(frame)
        shared = self._out.pull()
        assert isinstance(shared, av.VideoFrame)
        return shared
