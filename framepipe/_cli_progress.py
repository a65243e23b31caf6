"""Progress of a run on stderr: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from framepipe.units import format_seconds

if TYPE_CHECKING:
    from framepipe.report import Statistics

_EVERY_S = 5.0
_FEW = 6
"""Up to so many sources have a line of their own."""


class Silent:
    """Nothing at all; a context manager like the others."""

    show: Callable[[Statistics], None] | None = None
    stopping = False

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
        print(f"framepipe: {line}", file=sys.stderr, flush=True)


class Bar(Silent):
    """A bar, and one for each of a few sources; drawn only when `show` is called, by no thread of its own."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]} frames"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # results may go there
            redirect_stderr=False,
        )
        self._tasks: dict[str, Any] = {}
        self.show = self._show

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def _show(self, now: Statistics) -> None:
        of = f"/{now.expected}" if now.expected else ""
        dropped = f", {now.dropped} dropped" if now.dropped else ""
        name = "stopping" if self.stopping else "all" if self._is_split(now) else "running"
        self._update("", name, now.delivered, now.expected, f"{now.delivered}{of}", f"{now.fps:.0f} fps{dropped}")
        if self._is_split(now):
            for source, delivered in now.sources.items():
                self._update(source, source, delivered, None, str(delivered), "")
        self._progress.refresh()

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
