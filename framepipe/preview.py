"""What the pictures of a source are, before any run."""

from __future__ import annotations

import os
import time
from typing import Any

from framepipe import pixfmt
from framepipe.container import ContainerStream
from framepipe.decode import DecodePool
from framepipe.errors import SourceError
from framepipe.feed import Feed
from framepipe.frame import FrameSpec
from framepipe.selecting import select

_PATIENCE_S = 30.0
_SLICE_S = 0.1  # the main thread looks for signals in between


def by_first_picture(feed: Feed) -> FrameSpec:
    """The spec of the first picture that a run would take, decoded as a run decodes it.

    ``feed`` is told how many pictures the container announces. What can be read only once (standard input, a FIFO) is
    left alone. Raises `SourceError`, or what the source does.
    """
    known = _known(feed)
    if known is not None:
        return known
    uri = getattr(feed.source, "uri", "")
    if feed.alone and not _is_address(uri):
        raise SourceError(f"{uri}: can be read only once, so it was not opened", source=feed.name)
    first = Feed(feed.source, feed.name)
    pool = DecodePool([first], threads=1, decode="linear", min_queue=1, name="framepipe-preview")
    pool.start()
    try:
        return _first(pool, first)
    finally:
        pool.stop()
        pool.join()
        feed.expected = first.expected


def by_header(feed: Feed) -> FrameSpec | None:
    """The spec as the header of a file has it: size and pixel format, and no more; None where that is not told at once.

    Headers are wrong now and then, which is why nothing is made by them.
    """
    known = _known(feed)
    if known is not None or feed.alone or feed.info.path is None:
        return known
    try:
        stream = feed.source.open(lambda: False)
    except Exception:
        return None  # a run tells
    try:
        return _of_header(stream) if isinstance(stream, ContainerStream) else None
    finally:
        stream.close()


def _of_header(stream: ContainerStream) -> FrameSpec | None:
    context = stream.stream.codec_context
    fmt = context.pix_fmt
    if fmt not in pixfmt.table() or not context.width or not context.height:
        return None
    return FrameSpec(context.width, context.height, fmt)


def _first(pool: DecodePool, feed: Feed) -> FrameSpec:
    deadline = time.monotonic() + _PATIENCE_S
    while not pool.exhausted and time.monotonic() < deadline:
        got = pool.take(_SLICE_S)
        found = None if got is None else select(*got, pool.finish)
        if found is not None:
            return found[1]
    if feed.error is not None:
        raise feed.error
    why = "no picture could be decoded" if pool.exhausted else f"no picture came within {_PATIENCE_S:g} s"
    raise SourceError(f"{feed.name}: {why}", source=feed.name)


def _known(feed: Feed) -> FrameSpec | None:
    """What a source says itself, because it makes its pictures."""
    spec: Any = getattr(feed.source, "spec", None)
    return spec if isinstance(spec, FrameSpec) else None


def _is_address(uri: str) -> bool:
    return "://" in uri and not os.path.exists(uri)
