"""``framepipe doctor``: the command, and its findings in words."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from framepipe._cli_options import Debug, Overwrite
from framepipe.errors import ConfigError, FramepipeError
from framepipe.units import format_bytes

if TYPE_CHECKING:
    from framepipe.doctor.measuring import How

_WIDTH = 120
_INDENT = 17
_MEASURED = "measured now"


def doctor(
    symptom: Annotated[
        list[str] | None, typer.Argument(metavar="SYMPTOM", help="For --explain: what is seen, in words.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure nothing: a second, in place of up to half a minute.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="What SYMPTOM may mean, how to look, what helps; alone, all of them.")
    ] = False,
    save_baseline: Annotated[
        Path | None,
        typer.Option("--save-baseline", metavar="FILE", help="Measure five times and keep it, for 'compare'."),
    ] = None,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="What differs between Windows, Linux and WSL 2.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="What to measure: auto, cpu, cuda or cuda:N.")] = "auto",
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Say what this machine is, what to expect, and what to change.

    Every line says what it is: measured now (if nothing else is said), measured elsewhere, documentation of a vendor,
    or a claim that nobody has proved.
    """
    if symptom and not explain:
        raise ConfigError(f"a symptom goes with --explain: framepipe doctor --explain {' '.join(symptom)}")
    _one_of(explain=explain, capabilities=capabilities, save_baseline=save_baseline, quick=quick)
    if quick and device != "auto":
        raise ConfigError(f"--device {device} is what to measure, and --quick measures nothing: leave out one of them")
    if explain or capabilities:
        _tell(" ".join(symptom or ()), capabilities=capabilities, as_json=as_json)
    else:
        _examine(as_json=as_json, quick=quick, save=save_baseline, device=device, overwrite=overwrite)


def _one_of(**given: object) -> None:
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} are different things to do: leave out all but one of them")


def _tell(asked: str, *, capabilities: bool, as_json: bool) -> None:
    """One of the two data files, or of the one an entry."""
    if as_json:
        import json

        from framepipe.doctor import capabilities as systems
        from framepipe.doctor import explaining

        print(
            json.dumps(systems.rows() if capabilities else _entry(asked) if asked else explaining.symptoms(), indent=2)
        )
    elif capabilities:
        _print(capability_table())
    else:
        _print(explained(asked) if asked else symptoms())


def _examine(*, as_json: bool, quick: bool, save: Path | None, device: str, overwrite: bool) -> None:
    from framepipe import cli
    from framepipe._cli_progress import Silent
    from framepipe._cli_run import Interrupt
    from framepipe.doctor import examination

    if save is not None:
        examination.claim(save, overwrite=overwrite)
    facts = examination.facts()  # there is nothing to keep of it yet: Ctrl-C ends it as it ends any program
    stop = threading.Event()
    with Interrupt(stop.set, Silent()) as interrupt:
        rounds = examination.BASELINE_ROUNDS if save is not None else 1
        found = examination.examine(None if quick else _how(rounds, device, stop), facts)
        if as_json:
            sys.stdout.write(examination.as_json(found))
        else:
            _print(lines(found))
        if interrupt.code is not None:
            cli.say(f"framepipe: interrupted{f': {save} is not written' if save is not None else ''}")
            raise typer.Exit(interrupt.code)
        if save is not None:
            _save(found, save)


def _how(rounds: int, device: str, stop: threading.Event) -> How:
    from framepipe import cli
    from framepipe.doctor.measuring import How
    from framepipe.probe import children

    def run(request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        return children.run(request, timeout_s, stopped=stop.is_set)

    return How(rounds=rounds, device=device, run=run, tell=lambda words: cli.say(f"framepipe: doctor: {words}"))


def _save(found: Mapping[str, Any], path: Path) -> None:
    from framepipe import cli
    from framepipe.doctor import examination

    if not found["measures"]:
        raise FramepipeError(f"nothing could be measured, so that {path} is not written")
    try:
        examination.save(found, path)
    except OSError as error:
        raise FramepipeError(f"--save-baseline {path}: cannot be written: {error.strerror}") from error
    cli.say(f"framepipe: wrote {path}; later: framepipe compare {path} another.json")


def _print(lines: Iterable[str]) -> None:
    from framepipe.redact import redact

    for line in lines:
        print(redact(line))


# -- the examination --


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The findings for people, line by line: what the machine is, the checks in their order, and what to do."""
    yield from _facts(found)
    yield ""
    for check in found["checks"]:
        yield from _check(check)
    yield ""
    yield f"device  auto will be {found['device']}: {found['why']}"
    for advice in found["advice"]:
        yield from _wrapped(f"to do   {advice}", 8)


def _facts(found: Mapping[str, Any]) -> Iterator[str]:
    cpu, memory, video = (found[name] for name in ("cpu", "memory", "video"))
    yield f"framepipe  {found['framepipe']}, Python {found['python']}"
    yield f"system     {found['os']}{' (WSL 2)' if found['wsl2'] else ''}"
    quota = f", {cpu['quota']:g} by quota" if cpu["quota"] else ""
    usable = f", {cpu['usable']} usable" if cpu["usable"] else ""
    cores = f"{_or(cpu['physical'])} cores, {_or(cpu['logical'])} threads{usable}{quota}"
    yield f"CPU        {cpu['model'] or cpu['machine']}: {cores}"
    yield f"memory     {format_bytes(memory['total_bytes'])}, {format_bytes(memory['available_bytes'])} available"
    if video["pyav"]:
        yield f"PyAV       {video['pyav']}, FFmpeg {_or(video['ffmpeg'])}"
        yield from _wrapped(f"decoders   {' '.join(video['decoders'])}", 11)
        yield from _wrapped(f"encoders   {' '.join(video['encoders'])}", 11)


def _check(check: Mapping[str, Any]) -> Iterator[str]:
    for number, line in enumerate(check["lines"]):
        head = f"{check['status']:<8}{check['title']:<14}" if number == 0 else ""
        yield from _wrapped(f"{head:<22}{line['text']}{_ground(line)}", 22)


def _ground(line: Mapping[str, Any]) -> str:
    """Nothing for what was measured now, which is said once in the help."""
    if line["ground"] == _MEASURED:
        return ""
    return f" [{line['ground']}{': ' + line['source'] if line.get('source') else ''}]"


def _wrapped(text: str, indent: int) -> Iterator[str]:
    yield from textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _or(value: Any) -> str:
    return "unknown" if value is None else str(value)


# -- symptoms and systems --


def symptoms() -> Iterator[str]:
    """All symptoms by their short names."""
    from framepipe.doctor import explaining

    known = explaining.symptoms()
    width = max(len(entry["id"]) for entry in known)
    for entry in known:
        yield f"{entry['id']:{width}}  {entry['symptom']}"


def _entry(asked: str) -> Mapping[str, Any]:
    """The symptom that is meant. Raises `ConfigError` with the nearest ones where that is not clear."""
    from framepipe.doctor import explaining

    entry, nearest = explaining.find(asked)
    if entry is None:
        near = "; ".join(f"{each['id']} ({each['symptom']})" for each in nearest)
        every = ", ".join(each["id"] for each in explaining.symptoms())
        raise ConfigError(
            f"no symptom is clearly {asked!r}; {f'the nearest are {near}' if near else f'there are {every}'}"
        )
    return entry


def explained(asked: str) -> Iterator[str]:
    """What is known of a symptom. Raises `ConfigError` where it is not clear which is meant."""
    entry = _entry(asked)
    yield f"{entry['id']}: {entry['symptom']}"
    for head, key in (("what it may mean", "means"), ("what helps", "helps")):
        if key == "helps":
            yield from _looks(entry["look"])
        yield ""
        yield f"{head}:"
        for each in entry[key]:
            yield from _wrapped(f"  - {each['text']}{_always_ground(each)}", 4)


def _looks(looks: Iterable[Mapping[str, str]]) -> Iterator[str]:
    yield ""
    yield "how to look here:"
    for look in looks:
        yield f"  {look['run']}"
        yield from _wrapped(f"      {look['text']}", 6)


def _always_ground(line: Mapping[str, Any]) -> str:
    return f" [{line['ground']}{': ' + line['source'] if line.get('source') else ''}]"


def capability_table() -> Iterator[str]:
    """A block for each row: three systems, and where it is written."""
    from framepipe.doctor import capabilities

    for row in capabilities.rows():
        yield f"{row['what']}:"
        for key, name in capabilities.SYSTEMS.items():
            yield from _wrapped(f"  {name:<9}{row[key]}", 11)
        yield from _wrapped(f"  [{row['ground']}: {row['source']}]", 3)
