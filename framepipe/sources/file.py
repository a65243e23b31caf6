"""A video file, stream or still, decoded by PyAV."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from framepipe.container import ContainerStream, is_url, may_stall
from framepipe.errors import ConfigError, SourceError, SourceNotFoundError
from framepipe.redact import redact
from framepipe.registry import register
from framepipe.source import Source, Stream

VIDEO = frozenset(
    [
        ".264",
        ".265",
        ".3gp",
        ".asf",
        ".av1",
        ".avi",
        ".avif",
        ".flv",
        ".gif",
        ".h264",
        ".h265",
        ".hevc",
        ".ivf",
        ".m2ts",
        ".m4v",
        ".mj2",
        ".mjpeg",
        ".mkv",
        ".mov",
        ".mp4",
        ".mpeg",
        ".mpg",
        ".mts",
        ".mxf",
        ".nut",
        ".obu",
        ".ogv",
        ".ts",
        ".vob",
        ".webm",
        ".wmv",
        ".y4m",
    ]
)
STILL = frozenset([".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"])


@register("file")
@dataclass(kw_only=True, repr=False)
class File(Source):
    """A file, folder, glob, ``%04d`` sequence, ``-`` for standard input, or a URL.

    A folder or glob of videos is a source each, in the order of their names; of stills, one sequence shown at ``rate``
    pictures a second (25 by default). An existing file wins over a pattern. ``stream`` chooses a video stream by its
    index; the default is the first that is no cover picture. ``decode`` overrides the pipeline's, ``threads`` bounds
    how many of the pipeline's decode threads work on this source at once. ``matrix`` and ``color_range`` override what
    the file says of its colour. ``rotate: none`` leaves turned and mirrored video as it is stored. ``deinterlace``
    makes whole pictures of interlaced ones (FFmpeg's bwdif), as many as there were; the source is then not decoded in
    segments. ``timeout_s`` bounds opening an address and every read from it, by the time that has passed.
    """

    uri: str
    stream: int | None = None
    threads: int | None = None
    decode: Literal["auto", "frame", "segments", "linear"] | None = None
    matrix: Literal["bt601", "bt709", "bt2020"] | None = None
    color_range: Literal["limited", "full"] | None = None
    rotate: Literal["auto", "none"] = "auto"
    deinterlace: bool = False
    rate: float | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0, and there is no way without one")

    def __repr__(self) -> str:
        values = ", ".join(f"{part.name}={getattr(self, part.name)!r}" for part in fields(self))
        return redact(f"{type(self).__name__}({values})")

    @property
    def may_stall(self) -> bool:
        """Whether a read may wait for ever, so that a thread of its own reads."""
        return may_stall(self.uri)

    def expand(self) -> list[Source]:
        try:
            return self._expand()
        except SourceError:
            raise
        except OSError as error:
            raise SourceError(f"{self.uri}: cannot be listed ({error.strerror or type(error).__name__})") from error

    def _expand(self) -> list[Source]:
        uri = self.uri
        if uri == "":
            raise SourceNotFoundError("the name of an input is empty")
        if uri == "-" or is_url(uri) or os.path.isfile(uri):
            return [self]
        if os.path.isdir(uri):
            files = sorted(p for p in Path(uri).iterdir() if p.suffix.lower() in VIDEO | STILL and p.is_file())
            if not files:
                raise SourceError(
                    f"{uri}: the folder holds no video and no picture; name a file, or a pattern such as {uri}/*.mp4"
                )
            return self._of(files)
        if any(mark in uri for mark in "*?["):
            files = sorted(Path(name) for name in glob.glob(uri, recursive=True) if os.path.isfile(name))
            if not files:
                raise SourceNotFoundError(f"{uri}: no file matches this pattern")
            return self._of(files)
        if "%" in uri:
            from framepipe.sources.images import numbered

            files = numbered(uri)
            if files:
                return self._of(files)
        return [self]

    def _of(self, files: list[Path]) -> list[Source]:
        from framepipe.sources.images import Images

        if files and all(file.suffix.lower() in STILL for file in files):
            shared = {part.name for part in fields(Images)} & {part.name for part in fields(self)} - {"rate"}
            common = {name: getattr(self, name) for name in shared}
            return [Images(files=tuple(str(f) for f in files), rate=self.rate or 25.0, **common)]
        if len(files) == 1:
            return [replace(self, uri=str(files[0]))]
        return [replace(self, uri=str(file), name=f"{self.name}-{file.stem}" if self.name else None) for file in files]

    def open(self, stopping: Callable[[], bool]) -> Stream:
        options = (
            {"framerate": str(self.rate)}
            if self.rate and self.uri.lower().endswith((".264", ".h264", ".265", ".h265", ".hevc"))
            else None
        )
        return ContainerStream(self.uri, stopping, stream=self.stream, timeout_s=self.timeout_s, options=options)
