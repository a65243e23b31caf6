"""The contract of a source: where pictures come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from framepipe.registry import Component
from framepipe.units import Seconds

if TYPE_CHECKING:
    import av


@dataclass(kw_only=True)
class Source(Component):
    """Base of the sources, with the parameters that every source has.

    ``name`` appears in results and output names (by default the file's stem). ``start`` (inclusive) and ``end``
    (exclusive) are absolute seconds as in ``time_s``. ``every`` keeps each n-th picture; ``fps`` keeps at most so
    many a second by time stamp and never repeats one. ``loop`` reads the input so many times.
    """

    name: str | None = None
    start: Seconds | None = None
    end: Seconds | None = None
    every: int = 1
    fps: float | None = None
    loop: int = 1

    kind = "sources"

    def expand(self) -> list[Source]:
        """The sources this one stands for (a folder or a glob is many). The default is itself."""
        return [self]

    def open(self, stopping: Callable[[], bool]) -> Stream:
        """Open the input, on a worker thread. ``stopping()`` turns True when the pipeline stops.

        Raises `SourceError` naming the input and what would help.
        """
        raise NotImplementedError


class Stream:
    """An opened source that yields decoded pictures itself (a container does it through packets instead).

    ``rate`` is frames a second or None, ``path`` a file or None. ``may_stall`` says that a read may wait for ever,
    so that it gets a thread of its own.
    """

    uri: str = ""
    path: Path | None = None
    rate: Fraction | None = None
    time_base: Fraction | None = None
    has_audio: bool = False
    may_stall: bool = False
    expected: int | None = None
    """Pictures that the input announces, or None."""

    def frames(self) -> Iterator[av.VideoFrame]:
        """Decoded pictures in order, each with ``pts`` and ``time_base``; nobody writes to them afterwards."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up everything that opening took. Called by the thread that reads, after the iterator is dropped."""
