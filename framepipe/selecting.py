"""Which of a source's decoded frames are wanted, and their place in it: index, time and spec."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from framepipe.feed import Feed
from framepipe.frame import PICTURE, FrameSpec, Item


def select(feed: Feed, frame: Any, finish: Callable[[Feed], None]) -> tuple[Item, FrameSpec] | None:
    """Give a decoded frame its index and time, and decide whether its source wants it; the filler's books.

    ``finish`` is called for a source that wants nothing more.
    """
    index = feed.decoded
    base = feed.time_base
    if base is None:
        base = feed.time_base = _time_base(feed, frame)
    pts = frame.pts
    if pts is not None:
        pts += feed.shift
    time_s = feed.clock.time_s(pts, base, feed.rate)
    interlaced = bool(frame.interlaced_frame)
    if interlaced:
        feed.interlaced += 1
    reason = _unwanted(feed, index, time_s, finish)
    if reason is not None:
        feed.decoded += 1
        feed.skipped[reason] = feed.skipped.get(reason, 0) + 1
        return None
    source = feed.source
    matrix = getattr(source, "matrix", None)
    aspect, mirrored = feed.shape
    spec = FrameSpec.of(frame, matrix, feed.full_range, turn=feed.turn, mirrored=mirrored, sample_aspect=aspect)
    if spec is not feed.latest and spec != feed.latest:
        feed.note(spec)
    feed.decoded += 1
    if feed.first_time_s is None:
        feed.first_time_s = time_s
        feed.spec = spec
    feed.last_time_s = time_s
    feed.taken += 1
    item = Item(feed.name, index, pts, base, time_s, pts is None, interlaced, handle=feed)
    notes = spec.notes
    if interlaced:
        notes["interlaced"] = True
    if notes:
        item.meta[PICTURE] = notes
    return item, spec


def _time_base(feed: Feed, frame: Any) -> Fraction:
    stream = feed.stream
    rate = stream.rate if stream is not None else None
    feed.rate = rate or Fraction(25)
    if stream is not None:
        feed.info.rate, feed.info.has_audio = rate, stream.has_audio
    base = stream.time_base if stream is not None else None
    if base is None and frame.time_base:
        base = Fraction(frame.time_base.numerator, frame.time_base.denominator)
    feed.info.time_base = base or 1 / feed.rate
    return feed.info.time_base


def _unwanted(feed: Feed, index: int, time_s: float, finish: Callable[[Feed], None]) -> str | None:
    """Why a source does not want this frame, by ``start``, ``end``, ``every`` and ``fps``; None where it does."""
    source = feed.source
    if source.start is not None and time_s < source.start:
        return "start"
    if source.end is not None and time_s >= source.end:
        finish(feed)
        return "end"
    if source.every > 1:
        feed.nth += 1
        if (feed.nth - 1) % source.every:
            return "every"
    if source.fps is not None:
        if feed.due_s is None:
            feed.due_s = feed.fps_origin_s = time_s
        if time_s < feed.due_s - 1e-9:
            return "fps"
        # Times of the grid, not of the last frame kept: the rate holds on average for uneven time stamps too.
        steps = int((time_s - feed.fps_origin_s) * source.fps + 1e-6) + 1
        feed.due_s = feed.fps_origin_s + steps / source.fps
    return None
