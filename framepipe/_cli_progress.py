"""Progress of a run on stderr: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from framepipe.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from framepipe.report import Statistics

_EVERY_S = 5.0
_FEW = 6
"""Up to so many sources have a line of their own."""


class Silent:
    """Nothing at all; a context manager like the others."""

    show: Callable[[Statistics], None] | None = None
    stopping = False

    def tell(self, text: str) -> None:
        """Say something once, before the first frame."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class Lines(Silent):
    """A line every five seconds of the run."""

    def __init__(self) -> None:
        self._next_s = _EVERY_S
        self.show = self._show

    def _show(self, now: Statistics) -> None:
        if now.seconds < self._next_s:
            return
        self._next_s = now.seconds + _EVERY_S
        of = f"/{now.expected}" if now.expected else ""
        dropped = f", {now.dropped} dropped" if now.dropped else ""
        state = ", stopping" if self.stopping else ""
        line = f"{now.delivered}{of} frames, {now.fps:.1f} fps, {format_seconds(now.seconds)}{dropped}{state}"
        self.tell(", ".join([line, *_of_gpu(now)]))

    def tell(self, text: str) -> None:
        print(f"framepipe: {text}", file=sys.stderr, flush=True)


def _of_gpu(now: Statistics) -> list[str]:
    """Uploads and memory in a few words; nothing where there is no GPU."""
    words = []
    if now.upload_bytes_per_s is not None:
        words.append(f"upload {format_bytes(now.upload_bytes_per_s)}/s")
    if now.pinned_bytes is not None:
        words.append(f"pinned {format_bytes(now.pinned_bytes)}")
    if now.device_bytes is not None:
        free = f" (free {format_bytes(now.vram_free_bytes)})" if now.vram_free_bytes is not None else ""
        words.append(f"video memory {format_bytes(now.device_bytes)}{free}")
    return words


class Bar(Silent):
    """A bar, one for each of a few sources, and a line about a GPU; drawn when `show` is called, by no own thread."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]} frames"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._live = Live(
            self._progress,
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # results may go there
            redirect_stderr=False,
        )
        self._tasks: dict[str, Any] = {}
        self.show = self._show

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def tell(self, text: str) -> None:
        self._live.console.print(f"framepipe: {text}", markup=False, highlight=False)

    def _show(self, now: Statistics) -> None:
        from rich.console import Group
        from rich.text import Text

        of = f"/{now.expected}" if now.expected else ""
        dropped = f", {now.dropped} dropped" if now.dropped else ""
        name = "stopping" if self.stopping else "all" if self._is_split(now) else "running"
        self._update("", name, now.delivered, now.expected, f"{now.delivered}{of}", f"{now.fps:.0f} fps{dropped}")
        if self._is_split(now):
            for source, delivered in now.sources.items():
                self._update(source, source, delivered, None, str(delivered), "")
        words = " · ".join(_of_gpu(now))
        line = [Text(words, no_wrap=True, overflow="ellipsis")] if words else []
        self._live.update(Group(self._progress, *line), refresh=True)

    def _is_split(self, now: Statistics) -> bool:
        return 1 < len(getattr(now, "sources", ())) <= _FEW

    def _update(self, key: str, name: str, done: int, total: int | None, count: str, rate: str) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(_plain(name), total=total, count=count, rate=rate)
        self._progress.update(
            self._tasks[key], description=_plain(name), completed=done, total=total, count=count, rate=rate
        )


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def choose(*, quiet: bool, results_on_stdout: bool) -> Silent:
    """What suits: nothing if ``quiet``, a bar where stderr is a terminal that results are not written over."""
    if quiet:
        return Silent()
    mixed = results_on_stdout and sys.stdout.isatty()
    return Bar() if sys.stderr.isatty() and not mixed else Lines()
