"""Clips and pipelines as inputs of a bench: what they announce, and the fingerprint of each file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from framepipe import parts, shipped
from framepipe.bench.cells import BASE, Input, size_input, slug
from framepipe.config import load
from framepipe.container import ContainerStream, may_stall
from framepipe.errors import ConfigError, UnsupportedFormatError
from framepipe.frame import FrameSpec
from framepipe.redact import redact
from framepipe.source import Source

_BLOCK = 1 << 22


def find(
    names: Sequence[str],
    sizes: Iterable[tuple[int, int]] = (),
    *,
    allow_code: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Input, ...]:
    """An input for each clip, pipeline (a YAML file, or the name of a shipped one) and size, each with its own name.

    Files are opened and read through for their hash, until ``stopping``. Raises `ConfigError` and `SourceError`.
    """
    found: list[Input] = []
    for name in names:
        if _is_pipeline(name):
            found.append(_pipeline(name, allow_code, stopping))
        else:
            found += [_clip(source, stopping) for source in parts.make_source(name).expand()]
    found += [size_input(width, height) for width, height in sizes]
    return tuple(_named_apart(found))


def _is_pipeline(name: str) -> bool:
    path = Path(name)
    return path.suffix.lower() in (".yaml", ".yml") or (not path.exists() and name in shipped.pipelines())


def _named_apart(found: Iterable[Input]) -> Iterable[Input]:
    taken: set[str] = set()
    for given in found:
        name, number = given.name, 2
        while name in taken:
            name, number = f"{given.name}-{number}", number + 1
        taken.add(name)
        yield dataclasses.replace(given, name=name)


def _clip(source: Source, stopping: Callable[[], bool]) -> Input:
    uri = str(getattr(source, "uri", ""))
    if not uri or may_stall(uri):
        raise ConfigError(f"{redact(uri) or 'a sequence of pictures'}: a bench reads its clip many times: give a file")
    facts = _facts(uri, stopping)
    path = Path(uri).absolute()
    size = {name: facts[name] for name in ("width", "height", "pix_fmt")}
    return Input(name=slug(path.stem), kind="clip", uri=str(path), nbytes=_nbytes(**size), facts=(facts,), **size)


def _pipeline(name: str, allow_code: bool, stopping: Callable[[], bool]) -> Input:
    path = shipped.find(name).absolute()
    config = load(path, allow_code=allow_code)
    sources = [part for source in config.sources for part in source.expand()]
    facts = tuple(_facts(uri, stopping) for part in sources if (uri := getattr(part, "uri", "")) and not may_stall(uri))
    first = facts[0] if len(facts) == 1 else {}
    size = {name: first.get(name) for name in ("width", "height", "pix_fmt")}
    usual = type(config.staging)()
    own = {key: getattr(config.staging, key) for key in (*BASE, "batch_timeout_s")}
    staging = {key: value for key, value in own.items() if value != getattr(usual, key)}
    return Input(
        name=slug(path.stem),
        kind="pipeline",
        uri=str(path),
        nbytes=max((nbytes for each in facts if (nbytes := _nbytes(**_size(each)))), default=None),
        staging=staging,
        device=config.device,
        facts=facts,
        **size,
    )


def _size(facts: Any) -> dict[str, Any]:
    return {name: facts[name] for name in ("width", "height", "pix_fmt")}


def _nbytes(width: int | None, height: int | None, pix_fmt: str | None) -> int | None:
    """Bytes of a picture in a slot; None where the header does not tell, or tells of a format that nobody takes."""
    if not width or not height or not pix_fmt:
        return None
    try:
        return FrameSpec(width, height, pix_fmt).nbytes
    except (UnsupportedFormatError, KeyError):
        return None


def _facts(uri: str, stopping: Callable[[], bool]) -> dict[str, Any]:
    """What the header announces of one video; what it does not say is None."""
    stream = ContainerStream(uri, stopping)
    try:
        video, context = stream.stream, stream.stream.codec_context
        seconds = float(video.duration * video.time_base) if video.duration and video.time_base else None
        return {
            "name": Path(uri).name,
            "sha256": _sha256(Path(uri), stopping),
            "width": context.width or None,
            "height": context.height or None,
            "pix_fmt": context.pix_fmt,
            "codec": context.name,
            "frames": video.frames or None,
            "seconds": seconds,
        }
    finally:
        stream.close()


def _sha256(path: Path, stopping: Callable[[], bool]) -> str | None:
    """The hash of a file; None if told to stop."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            if stopping():
                return None
            digest.update(block)
    return digest.hexdigest()
