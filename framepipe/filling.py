"""Filler threads: frames of ready sources into slots.

A filler owns a whole slot: it takes frames of the ready source that holds least until the slot's batch is full,
another spec comes, or the batch has waited long enough; then it waits for the slot's fence and copies, outside any
lock, and commits. One filler at a time takes frames; several copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from framepipe.decode import DecodePool
from framepipe.feed import Feed
from framepipe.frame import FrameSpec, Item
from framepipe.ring import Ring, Slot, affordable
from framepipe.stager import Stager, StagingOptions


class Fillers:
    """What the filler threads share.

    ``waited_s`` is how long they waited for decoded frames, ``replans`` how often memory had to be made anew because
    the input grew.
    """

    def __init__(
        self,
        pool: DecodePool,
        ring: Ring,
        stager: Stager,
        options: StagingOptions,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.pool = pool
        self.ring = ring
        self.stager = stager
        self.options = options
        self.waited_s = 0.0
        self.replans = 0
        self.held: tuple[Feed, Any, Item, FrameSpec] | None = None
        """A frame that was taken and did not fit the batch before it."""
        self._fail = fail
        self._forming = threading.Lock()  # guards held, the order of slots, and the calls to pool.take
        self._open = options.fillers
        self._planned = False

    def run(self) -> None:
        """The body of one filler thread."""
        try:
            while True:
                with self._forming:
                    formed = self._form()
                if formed is None:
                    return
                slot, frames, spec = formed
                try:
                    # Asked first: waiting lets go of the interpreter lock even for what is long done.
                    if slot.fence is not None and not slot.fence.done():
                        slot.fence.synchronize()
                    self.stager.fill(frames, slot, spec)
                except BaseException as error:
                    self._fail(error)  # before the commit: it ends the ring, so that nobody takes an unfilled slot
                    return
                finally:
                    del formed, frames  # a filler that waits for the next frame must not keep this one's memory
                    self.ring.commit(slot)
        except BaseException as error:
            self._fail(error)
        finally:
            with self._forming:
                self._open -= 1
                if not self._open:
                    self.ring.shutdown(drain=True)

    def _form(self) -> tuple[Slot, list[Any], FrameSpec] | None:
        """A slot and the frames for it, its memory planned; None at the end."""
        slot = self.ring.acquire()
        if slot is None:
            return None
        frames: list[Any] = []
        items: list[Item] = []
        ready = False
        try:
            spec = self._gather(frames, items)
            if spec is not None:
                slot.spec = spec
                ready = (self._planned and self.stager.fits(spec)) or self._plan(slot, spec)
        except BaseException as error:
            self._fail(error)
        slot.items = items
        if not ready or spec is None:
            self.ring.commit(slot)  # empty at the end; else the ring has ended, and what is in it is dropped
            return None
        return slot, frames, spec

    def _gather(self, frames: list[Any], items: list[Item]) -> FrameSpec | None:
        """Take frames for one batch: a full one, or a partial one at a change of spec, a time-out or the end."""
        spec: FrameSpec | None = None
        deadline = 0.0
        while len(frames) < self.options.batch:
            if self.held is not None:
                (feed, frame, item, own), self.held = self.held, None
            else:
                left = max(0.0, deadline - time.monotonic()) if frames else None
                began = time.perf_counter()
                got = self.pool.take(left)
                self.waited_s += time.perf_counter() - began
                if got is None:
                    if frames or self.pool.stopping or self.pool.exhausted:
                        break
                    continue
                feed, frame = got
                selected = select(self.pool, feed, frame)
                if selected is None:
                    continue
                item, own = selected
            if spec is not None and own is not spec and own != spec:
                self.held = (feed, frame, item, own)
                break
            if spec is None:
                spec = own
                if self.options.batch > 1:
                    deadline = time.monotonic() + self.options.batch_timeout_s
            frames.append(frame)
            items.append(item)
        return spec

    def _plan(self, slot: Slot, spec: FrameSpec) -> bool:
        """Make slots large enough for ``spec``, with every slot idle; False once the ring is shut down."""
        others = self.ring.gather(slot)
        if others is None:
            return False
        if self.stager.plan(spec, self.ring.slots) and self._planned:
            self.replans += 1
        if self.stager.holds_frames and self.options.slots == "auto":
            self.ring.grow(affordable(spec.nbytes * self.options.batch), self.stager.device.event)
        self._planned = True
        self.ring.scatter(others)
        return True


def select(pool: DecodePool, feed: Feed, frame: Any) -> tuple[Item, FrameSpec] | None:
    """Give a decoded frame its index and time, and decide whether its source wants it; the filler's books."""
    index = feed.decoded
    base = feed.time_base
    if base is None:
        base = feed.time_base = _time_base(feed, frame)
    pts = frame.pts
    if pts is None:
        time_s, estimated = float(index / feed.rate), True
    else:
        pts += feed.shift
        time_s, estimated = pts * base.numerator / base.denominator, False
    reason = _unwanted(pool, feed, index, time_s)
    if reason is not None:
        feed.decoded += 1
        feed.skipped[reason] = feed.skipped.get(reason, 0) + 1
        return None
    source = feed.source
    spec = FrameSpec.of(frame, getattr(source, "matrix", None), feed.full_range)
    feed.decoded += 1
    if feed.first_time_s is None:
        feed.first_time_s = time_s
        feed.spec = spec
    feed.last_time_s = time_s
    feed.taken += 1
    return Item(feed.name, index, pts, base, time_s, estimated, handle=feed), spec


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


def _unwanted(pool: DecodePool, feed: Feed, index: int, time_s: float) -> str | None:
    """Why a source does not want this frame, by ``start``, ``end``, ``every`` and ``fps``; None where it does."""
    source = feed.source
    if source.start is not None and time_s < source.start:
        return "start"
    if source.end is not None and time_s >= source.end:
        pool.finish(feed)
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
