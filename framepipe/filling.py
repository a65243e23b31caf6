"""Filling: frames of ready sources into slots.

A batch is formed a frame at a time, under a lock: the next frame is that of the ready source which holds least, and it
gets the next place in the open slot. It is copied outside the lock, behind the slot's fence; whoever is the last to
finish a slot that takes no more commits it. So pictures of one batch are copied side by side.

One thread takes: it waits for frames, for slots and for a batch's time to run out. A single filler does that, too;
for several another thread takes, and they copy. (Where each of them takes, it waits for the lock, is woken when it gets
it and then waits for the interpreter's: that took longer than to copy a picture.) With ``fillers: auto`` there are few
of them, and the decoding threads of several sources fill, too, what can be filled without waiting: a picture that was
just decoded is copied while it is in that core's cache, no thread has to be woken for it, and no more threads are busy
than the budget says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from framepipe import budget
from framepipe.chain import Chain, locate
from framepipe.decode import DecodePool
from framepipe.feed import Feed
from framepipe.frame import FrameSpec, Item
from framepipe.ring import Ring, Slot, affordable
from framepipe.selecting import select
from framepipe.stager import Stager, StagingOptions
from framepipe.tracing import OFF, Tracer
from framepipe.units import format_bytes


class _Forming:
    """A slot that is being filled: ``missing`` pictures of it are taken and not yet copied."""

    __slots__ = ("closed", "deadline", "items", "missing", "slot", "spec", "stamp")

    def __init__(self, slot: Slot, spec: FrameSpec, deadline: float, stamp: Any) -> None:
        self.slot, self.spec, self.deadline, self.stamp = slot, spec, deadline, stamp
        self.items: list[Item] = []
        self.missing = 0
        self.closed = False


class _Job:
    """Frames to be copied to a batch, from picture ``at`` on."""

    __slots__ = ("at", "batch", "frames")

    def __init__(self, batch: _Forming, at: int) -> None:
        self.batch, self.at = batch, at
        self.frames: list[Any] = []


class Fillers:
    """What the threads that fill share.

    ``threads`` are to be started. ``waited_s`` is how long the one that takes waited for decoded frames, ``replans``
    how often memory had to be made anew because the input grew.
    """

    def __init__(
        self,
        pool: DecodePool,
        ring: Ring,
        stager: Stager,
        options: StagingOptions,
        fail: Callable[[BaseException], None],
        tracer: Tracer = OFF,
    ) -> None:
        self.pool = pool
        self.ring = ring
        self.stager = stager
        self.device = stager.device
        self.options = options
        fillers = _fillers(options, pool, stager)
        self.threads = 1 if fillers == 1 else 1 + fillers
        self.waited_s = 0.0
        self.replans = 0
        self.held: tuple[Feed, Any, Item, FrameSpec] | None = None
        """A frame that was taken and has no place yet."""
        self.latest_chain: Callable[[], Chain | None] = lambda: None
        self._fail = fail
        self._fill = tracer.wrap("framepipe.fill", stager.fill)
        self._taking = threading.Lock()  # guards held, _batch, _planned, _running, the order of slots and pool.take
        self._counting = threading.Lock()  # guards _started, missing, closed and stamp of every batch; taken last
        self._batch: _Forming | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # from the one that takes to others; None at the end
        self._started = 0
        self._running = self.threads
        self._planned = False
        if options.fillers == "auto":
            pool.help = self.help

    def run(self) -> None:
        """The body of one thread."""
        with self._counting:  # the other lock may be held for as long as there is no slot
            first = not self._started
            self._started += 1
        try:
            if first:
                self._take_all()
            else:
                self._copy_all()
        except BaseException as error:
            self._fail(error)
        finally:
            self._jobs.put(None)  # the message is for everyone
            with self._taking:
                self._running -= 1
                if not self._running:
                    self.close()
                    self.ring.shutdown(drain=True)

    def _take_all(self) -> None:
        """Take frames until nothing more comes."""
        while True:
            with self._taking:
                job = self._take(self.options.batch, wait=True)
                if job is None and self._at_end():
                    return
                left_s = None if self._batch is None else max(0.0, self._batch.deadline - time.monotonic())
            if job is None:
                began = time.perf_counter()
                self.pool.wait(left_s)
                self.waited_s += time.perf_counter() - began
            elif self.threads > 1:
                self._jobs.put(job)
            else:
                self._copy(job)
            del job  # while this one waits for the next frame it must not keep another's memory

    def _copy_all(self) -> None:
        """Copy what was taken until the one that takes has ended."""
        while (job := self._jobs.get()) is not None:
            self._copy(job)
            del job

    def help(self) -> bool:
        """Fill one picture if there is one and a slot for it; False if not. Decoding threads."""
        if not self._taking.acquire(blocking=False):
            return False
        try:
            job = self._take(1, wait=False)
        except BaseException as error:
            self._fail(error)
            return False
        finally:
            self._taking.release()
        if job is None:
            if self.held is not None:
                self.pool.nudge()  # it waits in no queue any more, so nothing else tells a filler of it
            return False
        if not job.at and not job.batch.closed:
            self.pool.nudge()  # a filler has to know when the time of this batch runs out
        self._copy(job)
        return True

    def close(self) -> None:
        """The open batch takes no more. Lock held, or every thread has ended."""
        batch, self._batch = self._batch, None
        if batch is not None:
            with self._counting:
                batch.closed = True
                self._finish(batch)

    def drop(self) -> None:
        """After every thread has ended: let go of batches of which pictures were taken that nobody copies any more."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                with self._counting:
                    job.batch.missing -= len(job.frames)
                    self._finish(job.batch)

    def _at_end(self) -> bool:
        """Lock held: nothing more comes, or nobody wants it."""
        return self.ring.aborted or (self.pool.exhausted and self.held is None and self._batch is None)

    def _take(self, limit: int, *, wait: bool) -> _Job | None:
        """Lock held: up to ``limit`` frames that are there, and their place in one slot; ``wait`` for the slot."""
        job: _Job | None = None
        try:
            while job is None or (len(job.frames) < limit and not job.batch.closed):
                got = self._next()
                if got is None:
                    break
                spec, batch = got[3], self._batch
                if batch is not None and batch.spec is not spec and batch.spec != spec:
                    self.close()
                    batch = None
                self.held = got  # until it has a place: there may be none, now or at all
                if batch is None and (job is not None or (batch := self._begin(spec, wait)) is None):
                    break
                self.held = None
                if job is None:
                    job = _Job(batch, len(batch.items))
                with self._counting:
                    batch.missing += 1
                batch.items.append(got[2])
                job.frames.append(got[1])
                if len(batch.items) == self.options.batch:
                    self.close()
        except BaseException:
            if job is not None:  # nobody will copy what it has: the batch may not wait for that
                with self._counting:
                    job.batch.missing -= len(job.frames)
            raise
        if self._batch is not None and (time.monotonic() >= self._batch.deadline or self.pool.exhausted):
            self.close()
        return job

    def _next(self) -> tuple[Feed, Any, Item, FrameSpec] | None:
        """Lock held: the next frame that its source wants; None if there is none now."""
        if self.held is not None:
            got, self.held = self.held, None
            return got
        while (taken := self.pool.take(0)) is not None:
            selected = select(*taken, self.pool.finish)
            if selected is not None:
                return *taken, *selected
        return None

    def _begin(self, spec: FrameSpec, wait: bool) -> _Forming | None:
        """Lock held: open a slot for pictures of ``spec``; None if there is no slot (now), or no room in it yet."""
        fits = self._planned and self.stager.fits(spec)
        slot = self.ring.acquire(wait=wait) if fits or wait else None
        if slot is None:
            return None
        if not fits and not self._plan(slot, spec):
            self.ring.commit(slot)  # empty: the ring has ended
            return None
        slot.spec = spec
        if self.stager.holds_frames:
            slot.frames = [None] * self.options.batch
        deadline = time.monotonic() + self.options.batch_timeout_s if self.options.batch > 1 else 0.0
        self._batch = _Forming(slot, spec, deadline, self.device.stamp())
        return self._batch

    def _copy(self, job: _Job) -> None:
        """Fill a job's pictures, no lock held."""
        batch, slot = job.batch, job.batch.slot
        try:
            with self._counting:
                self.device.observe(batch.stamp)
            # Asked first: waiting lets go of the interpreter lock even for what is long done.
            if slot.fence is not None and not slot.fence.done():
                slot.fence.synchronize()
            self._fill(job.frames, job.at, slot, batch.spec)
        except BaseException as error:
            locate(error, batch.items[job.at :], self.latest_chain())  # a fence tells what stages did
            self._fail(error)  # before the commit: it ends the ring, so that nobody takes an unfilled slot
        with self._counting:
            batch.missing -= len(job.frames)
            self._finish(batch)

    def _finish(self, batch: _Forming) -> None:
        """Counting: hand on what the calling thread knows, and the batch itself once it is full and copied."""
        self.device.observe(batch.stamp)
        batch.stamp = self.device.stamp()
        if batch.closed and not batch.missing:
            batch.slot.items = batch.items
            self.ring.commit(batch.slot)

    def _plan(self, slot: Slot, spec: FrameSpec) -> bool:
        """Make slots large enough for ``spec``, with every slot idle; False once the ring is shut down."""
        others = self.ring.gather(slot)
        if others is None:
            return False
        others = self._within_limit(slot, others, spec)
        if self.stager.plan(spec, self.ring.slots) and self._planned:
            self.replans += 1
        if self.stager.holds_frames and self.options.slots == "auto":
            self.ring.grow(affordable(spec.nbytes * self.options.batch), self.stager.device.event)
        self._planned = True
        self.ring.scatter(others)
        return True

    def _within_limit(self, mine: Slot, others: list[Slot], spec: FrameSpec) -> list[Slot]:
        """Of the idle slots those that stay, where memory is short and nobody said how many there should be."""
        limit = None if self.options.slots != "auto" else budget.ring_limit(self.device, self.stager)
        each = spec.nbytes * self.options.batch
        stay = budget.slots_within(limit, each, len(others) + 1)
        if limit is None or stay > len(others):
            return others
        over = "to stay within" if stay * each <= limit.nbytes else "the least there can be, still beyond the"
        self.device.warnings.append(
            f"{limit.why}, so the ring has {stay} slots of {format_bytes(each)} instead of {len(others) + 1}, {over} "
            f"{format_bytes(limit.nbytes)} {limit.gives}; a smaller batch makes smaller slots"
        )
        others = others[: stay - 1]
        self.ring.keep([mine, *others])
        self.stager.slots = stay
        return others


def _fillers(options: StagingOptions, pool: DecodePool, stager: Stager) -> int:
    """How many threads copy.

    One copies 1,200 to 1,500 pictures of 1920x1080 a second that have left the caches (4 to 5 GB/s, on 16 CPUs of a
    server), six threads decode as many. Threads that decode several sources fill by themselves.
    """
    if options.fillers != "auto":
        return options.fillers
    return 1 if stager.holds_frames else min(4, max(1, pool.threads // (6 * len(pool.feeds))))
