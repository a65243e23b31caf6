"""``framepipe probe``: its commands, their files, and Ctrl-C."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from framepipe._cli_options import Debug, Overwrite
from framepipe.errors import ConfigError, FramepipeError

if TYPE_CHECKING:
    from framepipe.probe.machine import Machine
    from framepipe.probe.steps import Run, Tell

app = typer.Typer(
    name="probe",
    help="Measure what page-locked memory costs on this machine.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _probe(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Kinds = Annotated[str | None, typer.Option("--kinds", metavar="A,B", help="Only these kinds of memory.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write JSON and CSV there.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table.")]


@app.command()
def pinned(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MB,MB", help="Sizes in MB, or with a unit: 512MiB.")
    ] = "512,1024,2048,4096",
    kinds: Kinds = None,
    hold: Annotated[
        float, typer.Option("--hold", metavar="SECONDS", min=0, help="Hold each block, to look with other tools.")
    ] = 0.0,
    settle: Annotated[
        float, typer.Option("--settle", metavar="SECONDS", min=0, help="Wait so long for counters to hold still.")
    ] = 10.0,
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Hold blocks of each kind of memory and read every counter.

    Before, meanwhile and after. Kinds: control, default, write_combined, mapped, portable, registered, device,
    pageable, mlock.
    """
    from framepipe import _cli_probe_table as tables
    from framepipe.guard.waiting import Patience
    from framepipe.probe import pinned as probing

    asked = _sizes(sizes, 10**6)

    def work(machine: Machine, run: Run, tell: Tell, command: str) -> dict[str, Any]:
        patience = Patience(timeout_s=settle)
        return probing.probe(
            machine, run, sizes=asked, kinds=_names(kinds), patience=patience, hold_s=hold, tell=tell, command=command
        )

    _carry_out("pinned", _Output(device, out, as_json, overwrite), work, probing.csv_rows, tables.pinned)


@app.command()
def churn(
    minutes: Annotated[float, typer.Option("--minutes", min=0.001, help="How long for each kind.")] = 1.0,
    rate: Annotated[
        float, typer.Option("--rate", min=0, metavar="N", help="Blocks a second; 0 is as many as it can.")
    ] = 200.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the sizes and their order.")] = 1,
    kinds: Kinds = None,
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Take and give many small blocks, and say what accumulates.

    Kinds: those of 'probe pinned', and each but control with -pooled behind it.
    """
    from framepipe import _cli_probe_table as tables
    from framepipe.probe import churn as probing

    def work(machine: Machine, run: Run, tell: Tell, command: str) -> dict[str, Any]:
        options: dict[str, Any] = {"seconds": minutes * 60, "per_s": rate, "seed": seed, "kinds": _names(kinds)}
        return probing.probe(machine, run, tell=tell, command=command, **options)

    _carry_out("churn", _Output(device, out, as_json, overwrite), work, probing.csv_rows, tables.churn)


@app.command()
def bandwidth(
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="SIZE,SIZE", help="64KiB to 256MiB if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measured so often; medians are shown.")] = 5,
    kinds: Kinds = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="Where this machine's baseline is kept.")
    ] = None,
    save: Annotated[
        bool | None,
        typer.Option("--save/--no-save", help="Keep it as the baseline; if neither is given, when all was measured."),
    ] = None,
    device: Device = "auto",
    out: Out = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Measure what can be copied between host and device.

    What is found is kept as this machine's baseline, for the doctor and later probes. Kinds: default, pageable,
    write_combined, mapped, registered, host_copy.
    """
    from framepipe import _cli_probe_table as tables
    from framepipe.probe import bandwidth as probing
    from framepipe.probe import baselines

    asked = probing.SIZES_NBYTES if sizes is None else _sizes(sizes, 1)
    path = baseline or baselines.default_path()
    kept = baselines.read(path)

    def work(machine: Machine, run: Run, tell: Tell, command: str) -> dict[str, Any]:
        options: dict[str, Any] = {"sizes": asked, "repeats": repeats, "kinds": _names(kinds)}
        return probing.probe(machine, run, tell=tell, command=command, **options)

    def lines(found: Mapping[str, Any]) -> Iterable[Any]:
        yield from tables.bandwidth(found)
        yield from probing.against(kept.get(baselines.key(found)), baselines.of(found))

    whole = kinds is None and sizes is None

    def keep(found: Mapping[str, Any]) -> None:
        if found["complete"] and (whole if save is None else save) and baselines.save(path, found):
            _say(f"kept as this machine's baseline in {path}")

    _carry_out("bandwidth", _Output(device, out, as_json, overwrite), work, probing.rows, lines, keep)


# -- what they have in common --


@dataclass(frozen=True)
class _Output:
    device: str
    out: Path | None
    as_json: bool
    overwrite: bool


def _carry_out(
    name: str,
    output: _Output,
    work: Callable[[Machine, Run, Tell, str], dict[str, Any]],
    csv_rows: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]],
    lines: Callable[[Mapping[str, Any]], Iterable[Any]],
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> None:
    """Probe, write, print; an interruption keeps the finished cells. Raises `typer.Exit` with the status."""
    from framepipe._cli_probe_table import show
    from framepipe._cli_progress import Silent
    from framepipe._cli_run import Interrupt
    from framepipe.probe import children, machine, record
    from framepipe.redact import without_folders

    if output.out is not None:
        record.claim(output.out, name, overwrite=output.overwrite)
    stop = threading.Event()

    def run(request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return dict(without_folders(children.run(request, timeout_s, stopped=stop.is_set, hear=_hear)))

    with Interrupt(stop.set, Silent()) as interrupt:
        there = machine.examine(output.device, run)
        if interrupt.code is not None:
            raise typer.Exit(interrupt.code)
        found = work(there, run, lambda words: _say(f"probe {name} {words}"), _command())
        failed = _keep(found, output, csv_rows, keep)
        if output.as_json:
            sys.stdout.write(record.as_json(found))
        else:
            show(found, lines(found))
    if failed is not None:
        raise FramepipeError(f"cannot be written: {failed}") from failed
    raise typer.Exit(_status(found, interrupt.code))


def _keep(
    found: Mapping[str, Any],
    output: _Output,
    csv_rows: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]],
    keep: Callable[[Mapping[str, Any]], None],
) -> OSError | None:
    """Write what is to be written. An error is returned: what was measured is to be shown all the same."""
    from framepipe.probe import record

    try:
        if output.out is not None:
            for path in record.write(found, csv_rows(found), output.out):
                _say(f"wrote {path}")
        keep(found)
    except OSError as error:
        return error
    return None


def _status(found: Mapping[str, Any], interrupted: int | None) -> int:
    if not found["complete"]:
        return interrupted or 1
    return 0 if any(cell["status"] == "ok" for cell in found["cells"]) else 1


def _hear(event: Any) -> None:
    if "holding_s" in event:
        _say(f"held for {event['holding_s']:g} s by process {event['pid']}")


def _say(words: str) -> None:
    from framepipe import cli

    cli.say(f"framepipe: {words}")


def _command() -> str:
    return shlex.join(["framepipe", *sys.argv[1:]])


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str, unit: int) -> list[int]:
    """Bytes of each size in a list with commas; a bare number counts in ``unit`` bytes."""
    from framepipe.units import parse_bytes

    try:
        return [int(size) * unit if size.isdigit() else parse_bytes(size) for size in map(str.strip, text.split(","))]
    except ValueError as error:
        raise ConfigError(f"--sizes {text}: {error}") from None
