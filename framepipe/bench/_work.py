"""The pipeline of one cell, made in its child process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from framepipe import registry
from framepipe.bench import _parity, _pictures
from framepipe.container import may_stall
from framepipe.errors import ConfigError
from framepipe.frame import Frame
from framepipe.pipeline import Pipeline
from framepipe.sink import Sink
from framepipe.sinks.callback import Callback
from framepipe.source import Source
from framepipe.sources.file import File
from framepipe.stages.rgb import Rgb
from framepipe.testing import FrameList

if TYPE_CHECKING:
    from framepipe.config import PipelineConfig

ENDLESS = 1_000_000
"""Rounds through an input that a bench stops by itself."""


@dataclass(frozen=True)
class Work:
    """What a cell runs: sources, stages and further sinks, and what its own sink ``reads`` of each frame."""

    sources: list[Source]
    stages: list[Any] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    reads: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    def pipeline(self, sink: Callable[[Frame], None], *, host: bool, device: str, staging: Any) -> Pipeline:
        """A pipeline whose last sink calls ``sink`` for every frame, with results on the host or left on the device."""
        sinks = [*self.sinks, Callback(function=sink, reads=self.reads, host=host)]
        return Pipeline(self.sources, self.stages, sinks, device=device, staging=staging, **self.options)


def strategy(name: str, *, allow_code: bool) -> str:
    """The registered name of a strategy; ``module:Class`` is imported first, if that is allowed."""
    module, found, cls = name.partition(":")
    if not found:
        registry.find("staging", name)
        return name
    if not allow_code:
        raise ConfigError(f"{name!r} is Python code to import; allow that with --allow-code")
    made = getattr(importlib.import_module(module), cls, None)
    if getattr(made, "kind", "") != "staging" or not getattr(made, "type_name", ""):
        raise ConfigError(f"{name!r} is no registered staging strategy")
    return str(made.type_name)  # type: ignore[union-attr]


def staging(request: Mapping[str, Any], *, measure: bool) -> dict[str, Any]:
    """The ``staging:`` block that a request asks for."""
    block = dict(request["staging"])
    block["strategy"] = strategy(block["strategy"], allow_code=request["allow_code"])
    return {**block, "measure": measure}


def frames(request: Mapping[str, Any], count: int) -> list[Any]:
    """``count`` pictures of the request's input, ready in memory."""
    given = request["input"]
    if given["kind"] == "size":
        return _pictures.of_size(given["width"], given["height"], given["pix_fmt"], count)
    return _pictures.of_clip(given["uri"], count)


def staging_work(ready: list[Any], *, rounds: int, parity: bool) -> Work:
    """Pictures in memory, through ring and runner to the device, and no further."""
    source = FrameList(name="ready", frames=ready, loop=rounds)
    if parity:
        return Work([source], [_parity.Packed()], reads=frozenset({_parity.PACKED}))
    return Work([source])


def pipeline_work(request: Mapping[str, Any], *, parity: bool, rounds: int) -> Work:
    """Decode to result: the person's own pipeline, or a clip to RGB that stays on the device."""
    given = request["input"]
    if given["kind"] == "pipeline":
        from framepipe.config import load  # not for every clip: checking YAML takes a library that is slow to load

        return _own(load(given["uri"], allow_code=request["allow_code"]), request, parity=parity, rounds=rounds)
    stage = Rgb(accuracy="exact") if parity else Rgb()
    return Work([File(uri=given["uri"], loop=rounds)], [stage], reads=frozenset({"image"}))


def _own(config: PipelineConfig, request: Mapping[str, Any], *, parity: bool, rounds: int) -> Work:
    parts = config.kwargs()
    found = [part for source in parts["sources"] for part in source.expand()]
    sources = [part if may_stall(getattr(part, "uri", "")) else _round(part, rounds) for part in found]
    reads = frozenset(name for sink in parts["sinks"] for name in sink.reads)
    if parity and reads <= {"meta"}:
        reads |= {"image"}  # what moves through the pipeline may change no result of it
    kept = parts["sinks"] if request["keep_sinks"] and not parity else []
    return Work(
        sources,
        parts["stages"],
        kept,
        reads or frozenset({"meta"}),
        {name: parts[name] for name in ("device_memory", "threads", "decode")},
    )


def _round(source: Source, rounds: int) -> Source:
    return replace(source, loop=max(source.loop, rounds))


def prepare(request: Mapping[str, Any]) -> None:
    """Let modules be found where the command was given, and results of kept sinks go to the folder that is meant."""
    for folder in reversed(request["path"]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if request.get("folder"):
        os.chdir(request["folder"])
