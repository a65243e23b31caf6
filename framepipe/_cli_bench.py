"""``framepipe bench``: the command, progress with the time left, and the table."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from framepipe import _cli_options as options
from framepipe._cli_progress import Silent
from framepipe._cli_run import Interrupt
from framepipe.errors import ConfigError, FramepipeError
from framepipe.redact import redact
from framepipe.units import format_seconds

if TYPE_CHECKING:
    from framepipe.bench.options import Options, Step

_EVERY_S = 5.0
_NARROWEST = 100


def bench(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="CLIP…|PIPELINE", help="Videos, YAML files, or names of shipped pipelines."),
    ] = None,
    staging: Annotated[
        str | None, typer.Option("--staging", metavar="A,B", help="Strategies; by default every one.")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option("--size", metavar="WxH", help="Pictures made in memory. May be repeated.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="A,B", help="staging, pipeline; by default both.")
    ] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="N,…", help="Pictures in a slot.")] = None,
    depth: Annotated[str | None, typer.Option("--depth", metavar="N,…", help="Batches in flight.")] = None,
    slots: Annotated[str | None, typer.Option("--slots", metavar="N,…", help="Slots of the ring, or auto.")] = None,
    fillers: Annotated[str | None, typer.Option("--fillers", metavar="N,…", help="Filling threads, or auto.")] = None,
    copy_threads: Annotated[
        str | None, typer.Option("--copy-threads", metavar="N,…", help="Threads that copy each large picture.")
    ] = None,
    device: options.DeviceName = None,
    frames: Annotated[int, typer.Option("--frames", min=2, help="Frames counted in a repeat.")] = 300,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Repeats; from 5 on ranks are tested.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Frames before those counted.")] = 32,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")] = Path("framepipe-bench"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the bench in DIR.")] = False,
    keep_sinks: Annotated[bool, typer.Option("--keep-sinks", help="Run a pipeline with its own sinks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The record on standard output, not the table.")] = False,
    allow_code: options.AllowCode = False,
    debug: options.Debug = False,
) -> None:
    """Measure what each staging strategy costs on this machine.

    Writes bench.json, bench.csv and bench.html, and shows a table. One axis is varied at a time; lists are separated
    by commas. Every repeat runs in a process of its own, and only strategies whose outputs are right are timed. Ctrl-C
    keeps what is measured.
    """
    from framepipe.bench.cells import Choice
    from framepipe.bench.inputs import find
    from framepipe.bench.options import Options

    choice = Choice(
        modes=modes(mode),
        batch=numbers(batch, "batch"),
        depth=numbers(depth, "depth"),
        slots=numbers(slots, "slots", auto=True),
        fillers=numbers(fillers, "fillers", auto=True),
        copy_threads=numbers(copy_threads, "copy-threads"),
    )
    made = sizes(size)

    def asked(stopping: Callable[[], bool]) -> Options:
        return Options(
            inputs=find(inputs or (), made, allow_code=allow_code, stopping=stopping),
            strategies=words(staging),
            choice=choice,
            device=device,
            frames=frames,
            repeat=repeat,
            warmup=warmup,
            allow_code=allow_code,
            keep_sinks=keep_sinks,
            command=redact(shlex.join(["framepipe", *sys.argv[1:]])),
        )

    raise typer.Exit(run(asked, out, resume=resume, as_json=as_json))


def numbers(text: str | None, name: str, *, auto: bool = False) -> tuple[Any, ...] | None:
    """Whole numbers from 1, separated by commas; None for None. Raises `ConfigError`."""
    if text is None:
        return None
    found: list[Any] = []
    for word in words(text) or ():
        if auto and word == "auto":
            found.append(word)
        elif word.isdecimal() and int(word) >= 1:
            found.append(int(word))
        else:
            kind = "numbers from 1, or auto" if auto else "numbers from 1"
            raise ConfigError(f"--{name} {text}: expected {kind}, separated by commas; {word!r} is none")
    return tuple(dict.fromkeys(found)) or None


def words(text: str | None) -> tuple[str, ...] | None:
    """The words between commas."""
    if text is None:
        return None
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())) or None


def modes(text: str | None) -> tuple[str, ...] | None:
    """``--mode``. Raises `ConfigError`."""
    from framepipe.bench.cells import MODES

    found = words(text)
    for word in found or ():
        if word not in MODES:
            raise ConfigError(f"--mode {text}: {word!r} is neither of {' and '.join(MODES)}")
    return found


def sizes(texts: list[str] | None) -> list[tuple[int, int]]:
    """``--size``: WxH, several times or with commas. Raises `ConfigError`."""
    found = []
    for text in [word for each in texts or () for word in words(each) or ()]:
        width, cross, height = text.lower().partition("x")
        if not (cross and width.isdecimal() and height.isdecimal() and min(int(width), int(height)) >= 16):
            raise ConfigError(f"--size {text}: expected WIDTHxHEIGHT of 16 pixels or more, such as 1920x1080")
        found.append((int(width), int(height)))
    return list(dict.fromkeys(found))


class _Progress(Silent):
    """What `Interrupt` tells of a stop, and the bench of its steps."""

    def step(self, step: Step) -> None:
        """Show a step."""


class Lines(_Progress):
    """A line at every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0

    def step(self, step: Step) -> None:
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + _EVERY_S
            print(f"framepipe: {words_of(step, self.stopping)}", file=sys.stderr, flush=True)


def words_of(step: Step, stopping: bool) -> str:
    """A step in a line."""
    left = f", about {format_seconds(step.left_s)} left" if step.left_s is not None else ""
    return f"{step.done}/{step.total}{left}: {step.what}{', stopping' if stopping else ''}"


class Bar(_Progress):
    """A bar on a terminal, drawn when a step is shown, by no thread of its own."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[what]}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=None, left="", what="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def step(self, step: Step) -> None:
        left = f"about {format_seconds(step.left_s)} left" if step.left_s is not None else ""
        what = "stopping" if self.stopping else step.what
        self._progress.update(self._task, completed=step.done, total=step.total, left=left, what=what, refresh=True)


def run(asked: Callable[[Callable[[], bool]], Options], out: Path, *, resume: bool, as_json: bool) -> int:
    """Measure, write the files below ``out``, show the table; the exit status.

    ``asked`` makes the `framepipe.bench.options.Options`, given what tells whether to stop.
    """
    from framepipe.bench import output
    from framepipe.bench.runner import Bench

    output.check(out)
    previous = output.read(out) if resume else None
    progress = Bar() if sys.stderr.isatty() else Lines()
    stop: list[bool] = []
    with Interrupt(lambda: stop.append(True), progress) as interrupt:
        with progress:
            bench = Bench(
                asked(lambda: bool(stop)),
                stopping=lambda: bool(stop),
                progress=progress.step,
                save=lambda record: _saved(output.write_json, out, record),
                previous=previous,
            )
            record = bench.run()
        written = _saved(output.write, out, record) if record is not None else []
    if record is not None:
        _show(record, as_json=as_json)
    for path in written:
        print(redact(f"wrote {path}"), file=sys.stderr)
    if interrupt.code is not None and not (record is not None and record["complete"]):
        return interrupt.code
    return _status(record)


def _status(record: Mapping[str, Any] | None) -> int:
    """0 if there are figures and nothing failed, 1 if there are none, 3 if some are missing that should be there."""
    from framepipe.bench import table

    cells = record["cells"] if record is not None else []
    if not any(cell["status"] == "ok" for cell in cells):
        return 1
    return 3 if record is not None and table.failed(record) else 0


def _saved(write: Callable[[Path, Mapping[str, Any]], Any], out: Path, record: Mapping[str, Any]) -> Any:
    try:
        return write(out, record)
    except OSError as error:
        held = " (is it open in another program?)" if isinstance(error, PermissionError) else ""
        raise FramepipeError(f"--out {out}: cannot be written: {error.strerror}{held}") from error


def _show(record: Mapping[str, Any], *, as_json: bool) -> None:
    from framepipe.bench import table

    if as_json:
        print(json.dumps(record, indent=1))
    else:
        _print_tables(record)
    for line in _closing(record, table.closing(record)):
        print(redact(line), file=sys.stderr)


def _closing(record: Mapping[str, Any], lines: Iterator[str]) -> Iterator[str]:
    yield from (f"note: {note}" for note in record["notes"])
    yield from lines


def _print_tables(record: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from framepipe.bench import table

    console = Console(highlight=False)
    if not console.is_terminal or console.width < _NARROWEST:
        console = Console(highlight=False, width=max(console.width, 160), soft_wrap=True)
    for group in table.groups(record):
        shown = Table(title=Text(group.title), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, name in enumerate(table.COLUMNS):
            shown.add_column(name, justify="left" if number in (0, len(table.COLUMNS) - 1) else "right")
        for row in group.rows:
            style = "bold green" if row.best else "dim" if row.told else ""
            mark = ("* " if row.best else "  ") + row.texts[0]
            shown.add_row(*(Text(redact(text), style=style) for text in (mark, *row.texts[1:])))
        console.print(shown)
        console.print()
