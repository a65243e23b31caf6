"""``framepipe plan``: the command, and the plan for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from framepipe import _cli_options as options
from framepipe.errors import ConfigError
from framepipe.redact import redact
from framepipe.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from framepipe.budget import Need
    from framepipe.limits import Limit
    from framepipe.planned import Plan, PlannedSource

_HEADS = {
    "pinned": "page-locked",
    "device": "video memory",
    "pageable": "host memory",
    "decoder": "host memory of the decoder",
    "ahead": "decoded ahead",
}
_SHOWN = 8
_WIDTH = 40

Pool = Annotated[float, typer.Option("--peak-factor", min=0, help="Rule of thumb: a pool is so many peaks.")]
Linux = Annotated[float, typer.Option("--linux-factor", min=0, help="Rule of thumb: what is needed, times this.")]
Windows = Annotated[float, typer.Option("--windows-factor", min=0, help="The same on Windows.")]
Base = Annotated[str, typer.Option("--desktop-memory", metavar="SIZE", help="Rule of thumb: taken by a desktop.")]
App = Annotated[str, typer.Option("--gui-app-memory", metavar="SIZE", help="And by each program with windows.")]
Apps = Annotated[int, typer.Option("--gui-apps", min=0, help="How many of those there are.")]


def plan(
    pipeline: options.PipelineName,
    source: options.Sources = None,
    sets: options.Sets = None,
    device: options.DeviceName = None,
    staging: options.Strategy = None,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    peak_factor: Pool = 1.5,
    linux_factor: Linux = 1.2,
    windows_factor: Windows = 1.8,
    desktop_memory: Base = "2.5GB",
    gui_app_memory: App = "0.5GB",
    gui_apps: Apps = 0,
    allow_code: options.AllowCode = False,
    debug: options.Debug = False,
) -> None:
    """Work out what memory a pipeline takes, beside what is free now.

    Runs and writes nothing; the first picture of every source is decoded. Exit status 1 if it does not fit, or nothing
    could be planned.
    """
    from framepipe import cli
    from framepipe import plan as planning
    from framepipe.planned import RulesOfThumb

    for name, factor in (("peak", peak_factor), ("linux", linux_factor), ("windows", windows_factor)):
        if not math.isfinite(factor):
            raise ConfigError(f"--{name}-factor {factor:g}: expected a finite number")
    rules = RulesOfThumb(
        pool=peak_factor,
        linux=linux_factor,
        windows=windows_factor,
        base=_nbytes("desktop-memory", desktop_memory),
        gui_app=_nbytes("gui-app-memory", gui_app_memory),
        gui_apps=gui_apps,
    )
    config = cli._load(pipeline, source, sets, allow_code, device=device, staging=staging, threads=threads)
    found = planning.plan(**config.kwargs(), rules=rules)
    if as_json:
        print(json.dumps({**found.to_dict(), "pipeline": redact(config.path)}, indent=2))
    else:
        for line in lines(found):
            print(redact(line))
    raise typer.Exit(0 if found.fits else 1)


def _nbytes(name: str, text: str) -> int:
    if text.strip() == "0":
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--{name} {text}: {error}") from None


def lines(found: Plan) -> Iterator[str]:
    """A plan for people, line by line."""
    yield from _pipeline(found)
    for kind, head in _HEADS.items():
        rows = [need for need in found.needs if need.kind == kind]
        if rows:
            yield ""
            yield from _needs(head, rows, max(_WIDTH, *(len(_owner(need)) + 3 for need in found.needs)))
    if found.needs:
        yield ""
        yield "not planned"
        yield from (f"  {words}" for words in found.unplanned)
    yield ""
    yield "there is"
    for limit in found.limits:
        yield _limit(found, limit)
    yield from _knobs(found)
    yield from _rules(found)
    yield ""
    yield from _verdict(found)


def _pipeline(found: Plan) -> Iterator[str]:
    device, staging = found.device, found.staging
    name = f", {device['name']}" if device["name"] else ""
    yield f"device     {device['kind']}{name} ({device['why']})"
    numbers = ", ".join(f"{key} {staging[key]}" for key in ("slots", "depth", "batch") if staging[key] is not None)
    yield f"staging    {staging['strategy']}, {numbers}"
    several = len({source.spec for source in found.sources if source.spec is not None}) > 1
    told = [source for source in found.sources if source.spec is not None]
    for source in told[:_SHOWN]:
        yield f"source     {source.name}: {_source(source, alone=several)}"
    if len(told) > _SHOWN:
        yield f"source     … and {len(told) - _SHOWN} more"
    silent = [source for source in found.sources if source.spec is None]
    for source in silent[:_SHOWN]:
        yield f"source     {source.name}: {(source.error or '').removeprefix(f'{source.name}: ')}"
    if len(silent) > _SHOWN:
        yield f"source     … and {len(silent) - _SHOWN} more that cannot be planned"
    for note in found.notes:
        yield f"note       {note}"


def _source(source: PlannedSource, *, alone: bool) -> str:
    spec = source.spec
    assert spec is not None
    words = f"{spec.width}x{spec.height} {spec.pix_fmt}, {format_bytes(spec.nbytes)} a picture"
    told = [f"{_HEADS[kind]} {format_bytes(nbytes)}" for kind, nbytes in source.alone.items() if nbytes]
    return f"{words}; alone {', '.join(told)}" if alone else words


def _needs(head: str, rows: list[Need], width: int) -> Iterator[str]:
    most = "" if all(need.exact for need in rows) else ", at most"
    tiers = {tier: [need.weight for need in rows if need.tier == tier] for tier in ("hot", "cold")}
    told = ", ".join(f"{tier} tier {format_bytes(sum(weights))}" for tier, weights in tiers.items() if weights)
    whole = format_bytes(sum(need.weight for need in rows))
    yield f"{f'{head} (planned{most})':<{width}} {whole:>10}  {told}".rstrip()
    for need in rows:
        asked = format_bytes(need.nbytes)
        rounding = "" if asked == format_bytes(need.weight) else f", {asked} before rounding"
        unknown = ", its allocator's rounding not known" if need.taken is None else ""
        yield f"  {_owner(need):<{width - 2}} {format_bytes(need.weight):>10}  {need.what}{rounding}{unknown}"


def _owner(need: Need) -> str:
    return f"model: {need.owner}" if need.modelled else need.owner


def _limit(found: Plan, limit: Limit) -> str:
    if limit.free is None:
        word = "no limit" if limit.unlimited else "unknown"
        return f"  {limit.name:<{_WIDTH - 2}} {word:>10}  {limit.reason or 'nobody tells'} ({limit.source})"
    of = f" of {format_bytes(limit.total)}" if limit.total is not None and limit.total != limit.free else ""
    needed = format_bytes(found.nbytes(*limit.kinds))
    free = "free" if limit.ground in ("measured now", "model") else "allowed"
    where = f"{free}{of}, {limit.ground} ({limit.source}); {needed} needed"
    return f"  {limit.name:<{_WIDTH - 2}} {format_bytes(limit.free):>10}  {where}"


def _knobs(found: Plan) -> Iterator[str]:
    told = []
    for knob in found.knobs:
        saved = [f"{format_bytes(knob.saves(kind))} {_HEADS[kind]}" for kind in _HEADS if knob.saves(kind) > 0]
        more = [f"{format_bytes(-knob.saves(kind))} more {_HEADS[kind]}" for kind in _HEADS if knob.saves(kind) < 0]
        told.append(f"  {knob.change:<{_WIDTH - 2}} {', '.join([*saved, *more])}")
    if told:
        yield ""
        yield "what would save"
        yield from told


def _rules(found: Plan) -> Iterator[str]:
    if found.rules:
        yield ""
        yield "rules of thumb of an article: without a ground that could be checked, and nothing here goes by them"
        for rule, nbytes in found.rules:
            yield f"  {format_bytes(nbytes):>10}  {rule}"


def _verdict(found: Plan) -> Iterable[str]:
    from framepipe.limits import verdict

    if found.fits is None:
        return ["nothing could be planned: no source told what its pictures are"]
    problems = [
        f"does not fit: {verdict(limit, found.needs)}, {limit.ground}{_pageable(limit)}" for limit in found.exceeded
    ]
    if found.refusal:
        problems.append(f"does not fit: {found.refusal}")
    unknown = dict.fromkeys(limit.name for limit in found.limits if limit.free is None and not limit.unlimited)
    known = {limit.name for limit in found.limits if limit.free is not None}
    missing = [name for name in unknown if name not in known]
    beside = f" as far as is known; not known: {', '.join(missing)}" if missing else ""
    silent = sum(source.spec is None for source in found.sources)
    without = f", without {silent} of {len(found.sources)} sources, which cannot be planned" if silent else ""
    return problems or [f"fits{beside}{without}"]


def _pageable(limit: Limit) -> str:
    return "; a run goes on with pageable memory there" if limit.kinds == ("pinned",) else ""
