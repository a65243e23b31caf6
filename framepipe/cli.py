"""The command line. Nothing but it and its ``_cli_*`` prints or handles signals.

Exit status: 0 complete, 1 failed while running, 2 wrong usage or configuration, 3 an input was damaged or incomplete,
130 and 143 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from framepipe import __version__, _cli_bench, _cli_doctor, _cli_plan, _cli_probe, reading
from framepipe._cli_options import (
    AllowCode,
    Debug,
    DeviceName,
    Overwrite,
    PipelineName,
    Sets,
    Sources,
    Strategy,
    Threads,
)
from framepipe.errors import ConfigError, FramepipeError
from framepipe.redact import redact

# typer.BadParameter, UsageError, ClickException: typer does not export the bases, and where they live has changed.
_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="framepipe",
    help="Streaming video pipelines in bounded memory, on NumPy or a GPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would take [discard] in a help text for markup
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

_state = {"debug": False}


def _debug(on: bool) -> bool:
    _state["debug"] = _state["debug"] or on
    return on


def say(text: str) -> None:
    """A line of diagnostics, on stderr, without credentials."""
    print(redact(text), file=sys.stderr, flush=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"framepipe {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _framepipe(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def run(
    pipeline: PipelineName,
    source: Sources = None,
    sets: Sets = None,
    device: DeviceName = None,
    staging: Strategy = None,
    threads: Threads = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE.json", help="Write the run's report; - is standard output."),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark what is done when, for Nsight Systems.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run what needs more memory than is free, too.")] = False,
    pin_stacks: Annotated[
        bool, typer.Option("--pin-stacks", help="Put into the report where in the code memory was page-locked.")
    ] = False,
    guard: Annotated[
        bool | None,
        typer.Option("--guard/--no-guard", help="Watch memory and act on it, whether or not the pipeline says so."),
    ] = None,
    cuda_log: Annotated[
        str | None,
        typer.Option(
            "--cuda-log",
            metavar="FILE",
            help="Have CUDA log its errors there (drivers of CUDA 12.9 and later); a run without errors logs nothing.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline.

    Ctrl-C ends it in good order, with readable files; a second Ctrl-C at once. A report of an earlier run is
    replaced; any other existing file only with --overwrite.
    """
    from framepipe import _cli_progress, _cli_run

    if cuda_log is not None:
        _cli_run.log_cuda(cuda_log)
    given = {"device": device, "staging": staging, "threads": threads, "guard": guard, "overwrite": overwrite}
    config = _load(pipeline, source, sets, allow_code, **given)
    report_file = _cli_run.ReportFile(report, overwrite=overwrite) if report is not None else None
    made = _pipeline(config, nvtx=nvtx, pin_stacks=pin_stacks, check_memory=not force)
    to_stdout = any(str(getattr(sink, "path", "")) == "-" for sink in config.sinks)
    progress = _cli_progress.choose(quiet=quiet, results_on_stdout=to_stdout)
    with _cli_run.Interrupt(made.stop, progress) as interrupt:  # to the end: what is complete gets its report too
        error, code = _cli_run.execute(made, progress, interrupt)
        document = (
            made.report.to_dict() if made.report is not None else _cli_run.failure(error or RuntimeError("no report"))
        )
        document["pipeline"] = redact(config.path)
        words = _cli_run.source_errors if quiet else _cli_run.closing_words
        if made.report is not None:
            for line in words(document, error):
                say(line)
        if error is not None:
            _show_error(error)
        if report_file is not None:
            _write_report(report_file, document)
    raise typer.Exit(code)


def _pipeline(config: Any, **options: Any) -> Any:
    from framepipe.pipeline import Pipeline

    return Pipeline(**config.kwargs(), **options)


def _write_report(file: Any, document: dict[str, Any]) -> None:
    try:
        file.write(document)
    except OSError as error:
        held = " (is it open in another program?)" if isinstance(error, PermissionError) else ""
        raise FramepipeError(f"--report {file.path}: cannot be written: {error.strerror}{held}") from error


def _load(pipeline: str, sources: list[str] | None, sets: list[str] | None, allow_code: bool, **options: Any) -> Any:
    from framepipe import shipped
    from framepipe.config import load

    if allow_code:
        sys.path.insert(0, os.getcwd())  # where module:Class is looked for first, as with python -m
    return load(shipped.find(pipeline), sources=sources or (), sets=sets or (), allow_code=allow_code, **options)


app.command(name="bench")(_cli_bench.bench)


@app.command()
def check(
    pipeline: PipelineName,
    source: Sources = None,
    sets: Sets = None,
    device: DeviceName = None,
    staging: Strategy = None,
    threads: Threads = None,
    allow_code: AllowCode = False,
    debug: Debug = False,
) -> None:
    """Check a pipeline's configuration. Opens nothing.

    Every mistake is told, with file and line.
    """
    config = _load(pipeline, source, sets, allow_code, device=device, staging=staging, threads=threads)
    counts = ", ".join(
        f"{len(part)} {word}{'' if len(part) == 1 else 's'}"
        for word, part in (("source", config.sources), ("stage", config.stages), ("sink", config.sinks))
    )
    print(redact(f"{config.path}: ok ({counts})"))


app.command(name="plan")(_cli_plan.plan)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path(),
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Write the example pipelines and samples into a folder."""
    from framepipe import shipped

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file, not a folder")
    written = shipped.write(folder, overwrite=overwrite)
    for path in written:
        print(path)
    names = shipped.pipelines()
    name = "motion" if "motion" in names else next(iter(names), None)
    if name is None:
        raise FramepipeError("this installation has no example pipelines")
    say(f"{len(written)} files written; now: framepipe run {folder / 'pipelines' / f'{name}.yaml'}")


@app.command(name="list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="stages, sources, sinks, staging, devices.")
    ] = None,
    debug: Debug = False,
) -> None:
    """List what pipelines can name."""
    from framepipe import _cli_list

    for line in _cli_list.lines(kind):
        print(line)


@app.command()
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of pipeline files, for editors."""
    import json

    from framepipe.config import schema as make

    print(json.dumps(make(), indent=2))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A bench, run report or baseline of the doctor.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another of the same kind.")],
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="SHARE", help="Medians this near are the same.")
    ] = 0.03,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Compare two benches, run reports or baselines of the doctor.

    Each measure is better, worse, or within the noise. Exit status 1 if anything is worse in B, 2 if the two cannot be
    compared.
    """
    from framepipe import _cli_compare
    from framepipe.bench import compare as comparing

    found = comparing.compare(comparing.load(first), comparing.load(second), tolerance)
    if as_json:
        import json

        print(json.dumps(found.to_dict(), indent=2))
    else:
        for line in _cli_compare.lines(found):
            print(redact(line))
    raise typer.Exit(1 if found.count(comparing.WORSE) else 0)


app.command(name="doctor")(_cli_doctor.doctor)
app.add_typer(_cli_probe.app)


def _show_error(error: BaseException) -> None:
    """One line, unless there are several mistakes or a traceback is wanted."""
    if _state["debug"]:
        import traceback

        say("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, FramepipeError):
        say(f"framepipe: error: {error}")
    else:
        text = " ".join(str(error).split())
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        more = "" if _state["debug"] else "; run it again with --debug for the traceback"
        say(f"framepipe: error: {what}. This is a bug, in framepipe or in a component of yours{more}")
    for note in getattr(error, "__notes__", ()):
        say(f"framepipe: note: {note}")


def main(argv: Iterable[str] | None = None) -> int:
    """Run the command line and return its exit status; ``argv`` is `sys.argv` without the program by default."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a console of another code page, names of odd files
    _state["debug"] = False
    try:
        # Patterns are expanded by the sources, on every system alike.
        code = app(args=None if argv is None else list(argv), standalone_mode=False, windows_expand_args=False)
        sys.stdout.flush()
    except _CLICK_ERROR as error:
        say(f"framepipe: error: {error.format_message()}")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        say("framepipe: interrupted")
        return 130
    except BrokenPipeError:
        _silence_stdout()  # the reader of a list, such as head, has seen enough
        return 1
    except Exception as error:
        _show_error(error)
        return int(getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


def end() -> NoReturn:
    """Run the command line and end the process with its exit status, whatever a thread may still be reading."""
    code = main()
    if reading.stuck():  # its time-out may be a minute; there is nothing of ours that is not closed by now
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
