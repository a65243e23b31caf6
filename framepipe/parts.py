"""The parts of a pipeline as a caller may give them (names, paths, mappings), made into objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from framepipe import limits, registry
from framepipe.budget import Setup, ring_limit
from framepipe.container import is_url
from framepipe.device.base import Device
from framepipe.errors import ConfigError, SourceError
from framepipe.feed import Feed
from framepipe.hardware import cpus
from framepipe.redact import HIDDEN, redact
from framepipe.sink import Sink, SourceInfo
from framepipe.source import Source, Unlisted
from framepipe.stage import Stage
from framepipe.stager import Stager, StagingOptions
from framepipe.units import parse_bytes


def decode_threads(device: str, sources: int) -> int:
    """How many threads decode if nobody says so: one a CPU.

    Beside a GPU some CPUs are left to the threads that feed it: where all are taken, a thread that wakes up waits for a
    time slice, with the interpreter lock in its hand. That is one in eight for a source alone and one in sixteen for
    several, whose decoding threads fill, too (measured on 16 CPUs: 14 threads deliver more than 16 of one file, and 15
    more than 14 and 16 of 16 files).
    """
    if device != "cuda":
        return cpus()
    spare = cpus() // 8
    return cpus() - (spare if sources == 1 else (spare + 1) // 2)


def ahead_nbytes(threads: int) -> int:
    """Bytes that segments may hold decoded ahead: delivery in order wants a segment a thread, memory bounds it.

    Threads are half a segment ahead on the average: 30 pictures of 1920x1080 in one of 60 have 93 MB (on 16 CPUs, a
    clip with key frames 33 pictures apart came 8 % faster with 96 MB a thread than with 64, and as fast with 144).
    """
    free = [limit.free // 8 for limit in limits.of_host() if limit.free is not None]
    return max(1, min((96 << 20) * max(1, threads - 1), 2 << 30, *free))


def make_rgb() -> Stage:
    """The stage that makes pictures where nobody asked for one and somebody reads them."""
    made: Stage = registry.find("stages", "rgb")()
    return made


def make_stage(stage: Stage | str) -> Stage:
    """A stage, or the one of that name with its defaults."""
    if isinstance(stage, str):
        made: Stage = registry.find("stages", stage)()
        return made
    return stage


def make_source(source: Source | str | os.PathLike[str]) -> Source:
    """A source, the registered one of that name, or the file of that name (which wins)."""
    if isinstance(source, Source):
        return source
    from framepipe.sources.file import File

    text = os.fspath(source)
    if text in registry.names("sources") and text not in ("file", "images") and not os.path.exists(text):
        made: Source = registry.find("sources", text)()
        return made
    return File(uri=text)


def make_sink(sink: Any) -> Sink:
    """A sink, the one of that name with its defaults, or a callable as one."""
    if isinstance(sink, Sink):
        return sink
    if isinstance(sink, str):
        made: Sink = registry.find("sinks", sink)()
        return made
    if callable(sink):
        from framepipe.sinks.callback import Callback

        return Callback(function=sink)
    raise ConfigError(f"{sink!r} is no sink: give a Sink, the name of one, or a callable")


def make_device_memory(device_memory: int | str | None) -> int | None:
    """The limit of device memory in bytes, from a number or text with a unit; None is none."""
    if device_memory is None:
        return None
    try:
        return parse_bytes(device_memory)
    except ValueError as error:
        raise ConfigError(f"device_memory: {error}, got {device_memory!r}") from None


def make_options(staging: str | Mapping[str, Any] | StagingOptions) -> StagingOptions:
    """Staging options from a strategy's name or the ``staging:`` block, checked."""
    if isinstance(staging, str):
        staging = StagingOptions(strategy=staging)
    elif isinstance(staging, Mapping):
        known = StagingOptions.__dataclass_fields__
        for key in staging:
            if key not in known:
                raise ConfigError(f"staging has no {key!r}{registry.did_you_mean(key, known)}")
        staging = StagingOptions(**staging)
    if staging.strategy != "auto":
        registry.find("staging", staging.strategy)
    return staging


def check_staging(options: StagingOptions, device_kind: str, stages: Iterable[Stage], sinks: Iterable[Sink]) -> None:
    """Raise `ConfigError` where the strategy cannot work here, or the host would read what it must not."""
    if options.strategy == "auto":
        return
    stager: type[Stager] = registry.find("staging", options.strategy)
    reason = stager.missing(device_kind)
    if reason is not None:
        raise ConfigError(f"staging {options.strategy!r} cannot be used on {device_kind}: {reason}")
    if stager.host_readable:
        return
    on_host = device_kind == "cpu"  # what stages do happens there
    readers = [
        f"stage {stage.id or stage.type_name!r}"
        for stage in stages
        if "planes" in stage.readback or (on_host and "planes" in stage.reads)
    ]
    readers += [f"sink {sink.id or sink.type_name!r}" for sink in sinks if "planes" in sink.reads and sink.host]
    if readers:
        raise ConfigError(
            f"{', '.join(readers)} would read planes on the host, and staging {options.strategy!r} has them in memory "
            "that the host must not read; use pooled"
        )


def make_setup(device: Device, options: StagingOptions, threads: int, sinks: Iterable[Sink], queue: int = 0) -> Setup:
    """What decides how much memory a pipeline takes; ``options`` name a strategy, ``queue`` is 0 if nobody iterates."""
    stager: type[Stager] = registry.find("staging", options.strategy)
    return Setup(
        options=options,
        stager=stager,
        threads=threads,
        host_shared=device.host_shared,
        deferred=device.kind == "simulated",
        on_host=frozenset(name for sink in sinks if sink.host for name in sink.reads),
        queue=queue,
        limit=ring_limit(device, stager),
    )


def make_feeds(sources: Sequence[Source]) -> list[Feed]:
    """A feed for every source, folders and patterns expanded, with names of their own; one that has none is to fail."""
    if sum(getattr(source, "uri", None) == "-" for source in sources) > 1:
        raise ConfigError("standard input (-) can be the input of one source alone")
    feeds: list[Feed] = []
    taken: set[str] = set()
    for group, source in enumerate(sources, 1):
        try:
            expanded = source.expand()
        except SourceError as error:
            uri = redact(getattr(source, "uri", "")) or source.type_name
            expanded = [Unlisted(name=source.name or uri, uri=uri, error=error)]
        for part in expanded:
            base = part.name or _stem(part)
            name, number = base, 2
            while name in taken:
                name, number = f"{base}-{number}", number + 1
            taken.add(name)
            feed = Feed(part, name, group if len(expanded) > 1 else 0)
            feed.info = _info(part, name)
            feeds.append(feed)
    return feeds


def _stem(source: Source) -> str:
    uri = getattr(source, "uri", "")
    if uri == "-":
        return "stdin"
    if uri and is_url(uri):
        host, *path = redact(uri).split("://", 1)[-1].split("?")[0].split("/")
        path = [part for part in path if part and HIDDEN not in part]
        if not path:
            return host.rpartition("@")[2].replace(":", "-") or "source"
        uri = path[-1]
    return Path(uri).stem if uri else source.type_name or "source"


def _info(source: Source, name: str) -> SourceInfo:
    uri = getattr(source, "uri", "")
    path = Path(uri) if uri and uri != "-" and not is_url(uri) else None
    return SourceInfo(
        name, (redact(uri) if is_url(uri) else uri) or source.type_name, path, start=source.start, end=source.end
    )
