"""Pictures between decoder and slot: deinterlaced when asked for, and in a format that is taken.

All of it is FFmpeg's work, on planes and in the worker that decoded them. Turned and mirrored pictures are left alone:
the device brings them upright, and only has to be told which are mirrored.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import av
import av.error
import av.filter
import numpy as np
from av.sidedata.sidedata import Type

from framepipe.errors import UnsupportedFormatError
from framepipe.source import Source

_Step = tuple[str, str | None]


class PictureFilter:
    """The ``steps`` (name and arguments of filters) for the pictures of one decoder, in its order.

    As many pictures come out as go in, with the time stamps that they had; deinterlacing holds one back. The graph is
    made anew when size, format or colour change.
    """

    def __init__(self, steps: list[_Step]) -> None:
        self.deinterlaced = 0
        """Interlaced pictures that were put in to be deinterlaced."""
        self._steps = steps
        self._deinterlaces = any(name == "bwdif" for name, _ in steps)
        self._kind: tuple[Any, ...] = ()
        self._graph: Any = None
        self._source: Any = None
        self._sink: Any = None
        self._times: deque[tuple[int | None, Any]] = deque()

    def push(self, frame: Any) -> list[Any]:
        """Put a picture in and return those that are ready. Raises PyAV's errors."""
        kind = (frame.width, frame.height, frame.format.name, int(frame.colorspace), int(frame.color_range))
        ready: list[Any] = []
        if kind != self._kind:
            ready += self.flush()
            self._make(*kind)
            self._kind = kind
        if self._deinterlaces and frame.interlaced_frame:
            self.deinterlaced += 1
        self._times.append((frame.pts, frame.time_base))
        self._source.push(frame)
        return ready + self._pull()

    def flush(self) -> list[Any]:
        """What the filters still hold; the next picture begins anew."""
        if self._graph is None:
            return []
        self._source.push(None)
        ready = self._pull()
        self._graph = self._source = self._sink = None
        self._kind = ()
        return ready

    def _make(self, width: int, height: int, pix_fmt: str, colorspace: int, color_range: int) -> None:
        graph = av.filter.Graph()
        graph.threads = 1  # the pipeline's threads are the decoder's
        told = f"video_size={width}x{height}:pix_fmt={pix_fmt}:time_base=1/1000:pixel_aspect=1/1"
        named = 2 if colorspace == 3 else colorspace  # FFmpeg refuses 3, which is reserved and means as little
        source = graph.add("buffer", f"{told}:colorspace={named}:range={color_range}")
        sink = graph.add("buffersink")
        graph.link_nodes(source, *(graph.add(*step) for step in self._steps), sink)
        graph.configure()
        self._graph, self._source, self._sink = graph, source, sink

    def _pull(self) -> list[Any]:
        ready: list[Any] = []
        while True:
            try:
                frame = self._sink.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return ready
            frame.pts, base = self._times.popleft()
            if base is not None:
                frame.time_base = base
            ready.append(frame)


def filter_steps(source: Source) -> list[_Step]:
    """The filters for the pictures of a source; empty where they go on as they are."""
    return [("bwdif", "mode=send_frame:deint=interlaced")] if getattr(source, "deinterlace", False) else []


def is_mirrored(frame: Any) -> bool:
    """Whether the display matrix (libavutil/display.h) of a frame mirrors it."""
    data = _display_matrix(frame)
    if data is None:
        return False
    a, b, _, c, d = (int(value) for value in np.frombuffer(data, np.int32)[:5])
    return a * d < b * c


def _display_matrix(frame: Any) -> Any:
    for _ in range(8):
        try:
            return frame.side_data.get(Type.DISPLAYMATRIX)
        except ValueError as error:
            # PyAV 18 gives nothing at all where one kind is new to it (Exif), which it names.
            unknown = re.match(r"\d+", str(error))
            if unknown is None:
                break
            strip = PictureFilter([("sidedata", f"mode=delete:type={unknown[0]}")])
            (frame,) = strip.push(frame)
    return None


def convert(converter: Any, name: str, frame: Any) -> Any:
    """A frame in the nearest format that framepipe takes (palettes, packed 4:2:2, big endian).

    ``name`` is that of the source. Raises `UnsupportedFormatError` naming the format.
    """
    fmt = frame.format
    deep = max(component.bits for component in fmt.components) > 8
    if fmt.is_rgb or fmt.has_palette or fmt.is_bit_stream:
        nearest = "gbrp16le" if deep else "rgb24"
    else:
        nearest = "yuv444p16le" if deep else "yuv444p"
    try:
        if fmt.name.endswith("555be"):  # FFmpeg's own way to bytes loses bits of green
            frame = converter.reformat(frame, format=fmt.name.replace("be", "le"), threads=1)
        return converter.reformat(frame, format=nearest, threads=1)
    except (av.error.FFmpegError, ValueError) as error:
        raise UnsupportedFormatError(
            f"{name}: pictures in {fmt.name} cannot be converted ({error})", source=name
        ) from error
