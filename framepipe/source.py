"""The contract of a source: where pictures come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from framepipe.errors import ConfigError, SourceError
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

    ``drop`` says what happens while the rest of the pipeline is slower than the input: ``never`` makes the decoder
    wait, ``oldest`` drops decoded pictures from the front of the queue (of 2 to 32, by size), ``latest`` all but the
    newest. What is dropped was never copied, has its place in the count of ``index``, and stands in the report.
    """

    name: str | None = None
    start: Seconds | None = None
    end: Seconds | None = None
    every: int = 1
    fps: float | None = None
    loop: int = 1
    drop: Literal["never", "oldest", "latest"] = "never"

    kind = "sources"

    def __post_init__(self) -> None:
        problems = []
        if self.start is not None and self.end is not None and self.start > self.end:
            problems.append(f"start is {self.start}, behind end ({self.end})")
        for key in ("every", "loop"):
            if getattr(self, key) < 1:
                problems.append(f"{key} is {getattr(self, key)}; it must be at least 1")
        if self.drop not in ("never", "oldest", "latest"):
            problems.append(f"drop is {self.drop!r}; it must be never, oldest or latest")
        if self.fps is not None and self.fps <= 0:
            problems.append(f"fps is {self.fps}; it must be above 0")
        if problems:
            raise ConfigError("; ".join(problems), problems)

    @property
    def may_stall(self) -> bool:
        """Whether the next picture may take as long as it likes: a camera, a network, a queue that others fill.

        A source of your own that is such a one says ``may_stall = True`` in its class. It gets a thread of its own, and
        every picture is handed on at once; of others small ones are handed on by the dozen, up to 0.05 s late.
        """
        return False

    def expand(self) -> list[Source]:
        """The sources this one stands for (a folder or a glob is many). The default is itself."""
        return [self]

    def open(self, stopping: Callable[[], bool]) -> Stream:
        """Open the input, on a worker thread. ``stopping()`` turns True when the pipeline stops.

        Raises `SourceError` naming the input and what would help.
        """
        raise NotImplementedError


@dataclass(kw_only=True)
class Unlisted(Source):
    """Stands for a source whose `Source.expand` failed: opened it fails alone, as a file does that is not there."""

    uri: str
    error: SourceError

    def open(self, stopping: Callable[[], bool]) -> Stream:
        raise self.error


class Stream:
    """An opened source that yields decoded pictures itself (a container does it through packets instead).

    ``rate`` is frames a second or None, ``path`` a file or None.
    """

    uri: str = ""
    path: Path | None = None
    rate: Fraction | None = None
    time_base: Fraction | None = None
    has_audio: bool = False
    expected: int | None = None
    """Pictures that the input announces, or None."""
    expected_end_s: float | None = None
    """Up to which time the input says that its pictures go, or None."""
    sample_aspect: tuple[int, int] = (1, 1)
    """How wide and how high a pixel is."""
    warnings: tuple[str, ...] = ()
    """What should be known of the input, found out when it was opened."""

    def frames(self) -> Iterator[av.VideoFrame]:
        """Decoded pictures in order, each with ``pts`` and ``time_base``; nobody writes to them afterwards."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up everything that opening took. Called by the thread that reads, after the iterator is dropped."""
