"""A sequence of still pictures as one video."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import av.error

from framepipe.errors import ConfigError, SourceError, SourceNotFoundError
from framepipe.registry import register
from framepipe.source import Source, Stream


@register("images")
@dataclass(kw_only=True)
class Images(Source):
    """The pictures ``files`` in their order, shown at ``rate`` a second. They may differ in size and format.

    A folder, a glob or a ``%04d`` pattern of stills given as a plain source becomes one of these. ``matrix``,
    ``color_range`` and ``rotate`` are those of a file.
    """

    files: tuple[str, ...]
    rate: float = 25.0
    matrix: Literal["bt601", "bt709", "bt2020"] | None = None
    color_range: Literal["limited", "full"] | None = None
    rotate: Literal["auto", "none"] = "auto"

    def open(self, stopping: Callable[[], bool]) -> Stream:
        if not self.files:
            raise SourceNotFoundError("an image sequence needs at least one file")
        if self.rate <= 0:
            raise ConfigError(f"rate is {self.rate}; it must be above 0")
        return _Pictures(self.files, Fraction(self.rate).limit_denominator(1001))


class _Pictures(Stream):
    def __init__(self, files: tuple[str, ...], rate: Fraction) -> None:
        self.uri = files[0]
        self.rate = self._rate = rate
        self.time_base = 1 / rate
        self.expected = len(files)
        self._files = files

    def frames(self) -> Iterator[Any]:
        for number, file in enumerate(self._files):
            try:
                with av.open(str(Path(file).absolute())) as container:
                    frame = next(container.decode(video=0))
            except FileNotFoundError as error:
                raise SourceNotFoundError(f"{file}: no such file") from error
            except (av.error.FFmpegError, StopIteration, IndexError) as error:
                raise SourceError(f"{file}: holds no picture that FFmpeg can decode ({error})") from error
            frame.pts = number
            frame.time_base = 1 / self._rate
            yield frame


def numbered(pattern: str) -> list[Path]:
    """The files of a ``name_%04d.png`` pattern in the order of their numbers, wherever these begin."""
    path = Path(pattern)
    found = re.search(r"%(0?)(\d*)d", path.name)
    if found is None or not path.parent.is_dir():
        return []
    digits = rf"\d{{{int(found[2])},}}" if found[2] else r"\d+"
    before, after = path.name[: found.start()], path.name[found.end() :]
    name = re.compile(f"{re.escape(before)}({digits}){re.escape(after)}")
    matches = ((name.fullmatch(file.name), file) for file in path.parent.iterdir())
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match is not None)]
