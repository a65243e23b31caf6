"""The decode pool: a fixed number of threads that decode every source of a pipeline.

Each source is a `Feed` with one or more `Unit`. A unit is a decoder with the packets it is to decode, and only the
first unit of a feed (the head) is being delivered; later ones decode ahead. No worker ever waits inside a unit: one
that has no room is put down and taken up again, by whichever worker comes by, when there is room. So slow consumers
and stalled sources hold no thread, and the number of threads is the budget.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from framepipe.decoding import MISSES, Decoding
from framepipe.errors import FramepipeError
from framepipe.feed import Feed, Unit
from framepipe.tracing import OFF, Tracer

_ANNOUNCE_S, _PATIENCE_S = 0.01, 0.05  # the latter of takers: a worker may stall behind what it kept back
_LARGE = 1 << 20
"""Bytes of a picture that takes much longer to decode than its taker to wake up."""


class DecodePool(Decoding):
    """Decodes ``feeds`` with ``threads`` workers; the filler takes frames with `take`.

    ``ahead_nbytes`` bounds what units behind the heads hold, ``queue_nbytes`` what all heads do. ``decode`` is
    ``auto``, ``segments``, ``frame`` or ``linear``. At most ``threads`` sources of one ``group`` above 0 (a
    folder) are open at a time. Sources that may stall have a thread each beside the budget: they mostly wait.
    ``crash``, if set, is called with what no source is to blame for; ``tell`` when ``finished`` has got another one.
    ``help`` takes a frame if it can without waiting and does with it what a taker would; workers call it, inside
    ``bound()``.
    """

    def __init__(
        self,
        feeds: list[Feed],
        *,
        threads: int,
        decode: str = "auto",
        ahead_nbytes: int = 128 << 20,
        queue_nbytes: int = 256 << 20,
        min_queue: int = 2,
        min_segment: int | None = None,
        name: str = "framepipe",
        tracer: Tracer = OFF,
    ) -> None:
        self.feeds = feeds
        self.threads = threads
        self.decode = decode
        self.ahead_nbytes = ahead_nbytes
        self.queue_nbytes = queue_nbytes
        self.min_queue = min_queue
        self.min_segment = min_segment
        self.stopping = False
        self.waited_s = 0.0
        self.crash: Callable[[BaseException], None] | None = None
        self.tell: Callable[[], None] = lambda: None
        self.help: Callable[[], bool] = lambda: False
        self.bound: Callable[[], AbstractContextManager[None]] = nullcontext
        self._name = name
        self._decode_step = tracer.wrap("framepipe.decode", self._step)
        # Guards units, busy, claimed, ended, _active and the two conditions; re-entrant because a signal handler
        # may call `stop` while the same thread is in it.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._frames = threading.Condition(self._lock)
        self._workers_waiting = 0
        self._alone = any(feed.alone for feed in feeds)
        self._takers_waiting = 0
        self._turn = 0
        self._nudged = False
        self._served = 0  # the takers' alone
        self._announced_s = 0.0
        self._active = list(feeds)
        self.finished: deque[Feed] = deque()
        """Feeds of which everything was taken, for the sink thread to pick up."""
        self._threads: list[threading.Thread] = []

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers."""
        for feed in self.feeds:
            if feed.alone:
                self._spawn(f"decode-{feed.name}", [feed])
        shared = [feed for feed in self.feeds if not feed.alone]
        if shared:
            for number in range(self.threads):
                self._spawn(f"decode-{number}", shared)

    def _spawn(self, name: str, feeds: list[Feed]) -> None:
        thread = threading.Thread(target=self._guarded, args=(feeds,), name=f"{self._name}-{name}", daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            self._threads.remove(thread)
            raise

    def _guarded(self, feeds: list[Feed]) -> None:
        try:
            with self.bound():
                self._serve(feeds)
        except BaseException as error:
            if self.crash is None:
                raise
            self.crash(error)

    def stop(self) -> None:
        """Make every worker and taker return soon. Any thread; idempotent."""
        self.stopping = True
        with self._lock:
            self._work.notify_all()
            self._frames.notify_all()

    def join(self) -> None:
        """Wait for the workers, then close what they had open; frames left over are counted as dropped."""
        for thread in self._threads:
            thread.join()
        for feed in self.feeds:
            feed.count_dropped()
            for unit in feed.units:
                if unit.out and not unit.cancelled:
                    feed.decoded += len(unit.out)
                    feed.dropped["stopped"] = feed.dropped.get("stopped", 0) + len(unit.out)
                unit.out.clear()
            feed.units.clear()
            feed.close()

    @property
    def members(self) -> list[threading.Thread]:
        """The workers."""
        return self._threads

    # -- taking frames --------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None = None) -> tuple[Feed, Any] | None:
        """The next frame of the ready source that holds least; takers serialise the calls.

        None after ``timeout_s``, once the pool stops, or when all is ``exhausted``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.stopping:
            feed, stale = self._pick()
            if feed is None or stale:
                with self._lock:
                    self._advance()
                    feed, _ = self._pick()
            if feed is not None:
                return self._pop(feed)
            left = None if deadline is None else deadline - time.monotonic()
            if not self._active or (left is not None and left <= 0):
                break
            self.wait(left)
        return None

    def _pop(self, feed: Feed) -> tuple[Feed, Any]:
        self._served += 1  # of those that hold as little, the next time another one
        head = feed.units[0]
        feed.shift = head.offset
        if feed.drop != "never":
            with self._lock:
                return feed, feed.take_counted()
        frame, feed.shape = head.out.popleft()
        if self._workers_waiting and len(head.out) <= feed.limit // 2:
            with self._lock:
                self._wake()
        return feed, frame

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a frame to take, the end of all, `nudge` or the time; it may return early. Any thread."""
        with self._lock:
            self._advance()
            self._takers_waiting += 1
            if not (self._nudged or self.stopping or not self._active or self._pick()[0] is not None):
                if not all(feed.alone for feed in self._active):
                    timeout_s = _PATIENCE_S if timeout_s is None else min(timeout_s, _PATIENCE_S)
                self._frames.wait(timeout_s)
            self._takers_waiting -= 1
            self._nudged = False

    def nudge(self) -> None:
        """Make one thread return from `wait`, now or the next time."""
        with self._lock:
            self._nudged = True
            self._frames.notify()

    @property
    def exhausted(self) -> bool:
        """Every source has ended and everything was taken."""
        return not self._active

    def finish(self, feed: Feed) -> None:
        """Nothing more of this source is wanted (its ``end`` was passed)."""
        with self._lock:
            feed.over = True
            feed.loops_left = 0
            for unit in feed.units:
                unit.cancelled = unit.done = True
                unit.out.clear()
            feed.input_ended = True
            self._work.notify_all()

    def _pick(self) -> tuple[Feed | None, bool]:
        best: Feed | None = None
        least, stale = 0, False
        active = self._active  # replaced as a whole when a feed ends
        for offset in range(len(active)):
            feed = active[(self._served + offset) % len(active)]
            units = feed.units
            if not units:
                stale = stale or feed.ended
                continue
            head = units[0]
            done = head.done  # before `out`: the worker appends first and says done afterwards
            if head.out:
                in_flight = feed.in_flight
                if best is None or in_flight < least:
                    best, least = feed, in_flight
            elif done:
                stale = True
        return best, stale

    def _advance(self) -> None:
        """Lock held: remove finished heads and finished feeds; their successors may go on now."""
        changed = False
        for feed in list(self._active):
            while feed.units and feed.units[0].done and not feed.units[0].out and not feed.units[0].busy:
                feed.units.popleft()
                changed = True
            while feed.retired and all(unit.stream is not feed.retired[0] for unit in feed.units):
                feed.put_away(feed.retired.pop(0))
            self._settle(feed)
            if feed.ended and not feed.units and not feed.claimed:
                self._active = [other for other in self._active if other is not feed]
                feed.close()
                self.finished.append(feed)
                self.tell()
                changed = True
        if changed:
            self._work.notify_all()

    def _settle(self, feed: Feed) -> None:
        """Lock held: note whether nothing more can come.

        Once the pool stops an end tells nothing: sources end because of it.
        """
        if feed.input_ended and not feed.loops_left and not self.stopping and all(unit.done for unit in feed.units):
            feed.ended = True

    # -- workers ------------------------------------------------------------------------------------------------

    def _serve(self, feeds: list[Feed]) -> None:
        while True:
            with self._lock:
                while (job := self._claim(feeds)) is None:
                    if self.stopping or all(feed.ended for feed in feeds):
                        self._work.notify_all()
                        return
                    crowded = any(feed.units and len(feed.units[0].out) >= feed.limit for feed in feeds)
                    self._workers_waiting += 1
                    # A taker removes a frame without the lock and then looks at the counter: look once more.
                    if (job := self._claim(feeds)) is None:
                        began = time.perf_counter()
                        self._work.wait()
                        if crowded:
                            self.waited_s += time.perf_counter() - began
                    self._workers_waiting -= 1
                    if job is not None:
                        break
                if self.stopping:
                    return
                self._wake()  # the others look for more; whoever finds nothing leaves it at that
            feed, unit = job
            try:
                if unit is not None:
                    self._decode_step(feed, unit)
                elif feed.cutter is None or feed.input_ended:
                    self._open(feed)
                else:
                    self._cut(feed)
            except FramepipeError as error:
                self._give_up(feed, error, unit)
            finally:
                self._unclaim(feed, unit)
            job = unit = None

    def _claim(self, feeds: list[Feed]) -> tuple[Feed, Unit | None] | None:
        """Lock held: the next thing to do, marked as taken. Sources take turns."""
        for offset in range(len(feeds)):
            at = (self._turn + offset) % len(feeds)
            feed = feeds[at]
            if feed.ended:
                continue
            for position, unit in enumerate(feed.units):
                if not unit.busy and not unit.done and self._runnable(feed, unit, position):
                    unit.busy = True
                    self._turn = at + 1
                    return feed, unit
            if not feed.claimed and self._may_begin(feed):
                feed.claimed = True
                self._turn = at + 1
                return feed, None
        return None

    def _may_begin(self, feed: Feed) -> bool:
        """Lock held: whether another unit may be begun: the source opened, opened again, or a segment cut."""
        if feed.stream is None or feed.input_ended:
            if not feed.loops_left or not self._may_go_round(feed):
                return False
            if not feed.group or feed.stream is not None:
                return True
            busy = sum(f.group == feed.group and (f.stream is not None or f.claimed) for f in self._active)
            return busy < self.threads
        if feed.cutter is None:
            return False
        if feed.units and feed.misses >= MISSES and feed.units[-1].verified:
            return False  # its last unit will go on linearly
        if feed.units and feed.units[-1].at_tail:
            return True  # it waits for the first picture of the segment behind it
        return len(feed.units) < self._width(feed) and self._has_room_ahead(feed)

    def _may_go_round(self, feed: Feed) -> bool:
        """Lock held: the segments of a loop's next round begin beside the last ones of this; all else behind it."""
        running = [unit for unit in feed.units if not unit.done]
        if not running:
            return feed.drop != "never" or sum(len(unit.out) for unit in feed.units) < feed.limit
        segments = all(unit.segment is not None for unit in running)
        return segments and len(feed.units) < self._width(feed) and self._has_room_ahead(feed)

    def _runnable(self, feed: Feed, unit: Unit, position: int) -> bool:
        if unit.cancelled:
            return True  # to be put away
        if not self._room(feed, unit) or unit.verified is False:
            return False  # full, or to be taken over by the unit before it
        if not unit.at_tail or unit.segment is None or unit.segment.last:
            return True
        if position + 1 >= len(feed.units):
            return bool(feed.misses >= MISSES and unit.verified and not feed.claimed)
        following = feed.units[position + 1]
        # One to be taken over must have been put down: nobody may be at work on what is no longer in ``units``.
        return following.verified is not None and (following.verified or not following.busy)

    def _room(self, feed: Feed, unit: Unit) -> bool:
        if feed.drop != "never":
            return True
        units = tuple(feed.units)  # a copy, made in one go: takers remove heads without the lock that adds units
        if units and units[0] is unit:
            return len(unit.out) < feed.limit
        if unit.segment is None:  # the next round of a loop
            return sum(len(other.out) for other in units) < feed.limit
        return unit.verified is None or self._has_room_ahead(feed)

    def _has_room_ahead(self, feed: Feed) -> bool:
        waiting = sum(len(unit.out) for unit in tuple(feed.units)[1:])
        return waiting * feed.frame_nbytes < self.ahead_nbytes

    def _unclaim(self, feed: Feed, unit: Unit | None) -> None:
        with self._lock:
            if unit is None:
                feed.claimed = False
            else:
                unit.busy = False
            self._settle(feed)
            if self._takers_waiting:
                self._frames.notify_all()

    def _wake(self) -> None:
        """Lock held: one more worker may have something to do. It wakes the next one if it finds something."""
        if self._workers_waiting:
            # Threads that serve one source alone wait here too, and would keep the message to themselves.
            self._work.notify(len(self._threads) if self._alone else 1)

    def _announce(self, feed: Feed, unit: Unit) -> None:
        # Waking the three threads behind costs as much as decoding a small picture, so small ones are handed on by the
        # dozen: when the queues are half full, when the worker puts the unit down, or after a hundredth of a second.
        if feed.frame_nbytes < _LARGE and not feed.alone:
            now = time.monotonic()
            if now - self._announced_s < _ANNOUNCE_S and self._waiting() < feed.limit // 2:
                return
            self._announced_s = now
        if len(self._active) > 1:  # one file's threads decode ahead, and have better things to do
            for _ in range(4 if feed.frame_nbytes >= _LARGE else feed.limit):
                if not unit.out or not self.help():
                    break
        # What others put out they announce themselves: to look through all sources costs more than a small picture.
        if unit.out and self._takers_waiting and self._pick()[0] is not None:
            with self._lock:
                self._frames.notify()

    def _waiting(self) -> int:
        """Frames that can be taken now (a copy of the units, since takers remove heads meanwhile)."""
        return sum(len(unit.out) for feed in self._active for unit in tuple(feed.units)[:1])
