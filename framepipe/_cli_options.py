"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer


def _debug(on: bool) -> bool:
    from framepipe import cli

    return cli._debug(on)


Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback for an error.", callback=_debug)]
PipelineName = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="A YAML file, or the name of a shipped pipeline.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change a value, e.g. stages.motion.threshold=9, sinks=[discard]."
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option("--source", metavar="URL", help="Read this instead of the pipeline's sources. May be repeated."),
]
DeviceName = Annotated[str | None, typer.Option("--device", help="See 'framepipe list devices'.")]
Strategy = Annotated[str | None, typer.Option("--staging", metavar="STRATEGY", help="See 'framepipe list staging'.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads for decoding, all sources together.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Let the pipeline name module:Class and import it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
