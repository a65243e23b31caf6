"""The runner thread: slots to the device, and stages onto the compute stream.

It only enqueues. Three streams: copy (uploads), compute (stages), read-back. The edges between them are events:
forward, compute waits for a slot's copy; back, the copy into a half waits for the stages that read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from framepipe.chain import Chain, Chains, Link
from framepipe.device.base import Device, Event, Stream
from framepipe.errors import FramepipeError
from framepipe.frame import Batch, FrameSpec, Item
from framepipe.report import Durations
from framepipe.ring import Ring, Slot, affordable
from framepipe.stager import Stager


class Token:
    """The right to have a batch in flight; ``done`` is recorded behind everything of it."""

    __slots__ = ("done", "stamp")

    def __init__(self, done: Event) -> None:
        self.done = done
        self.stamp: Any = None


class InFlight:
    """A batch between the runner and the sink thread; ``host`` are its small results, complete after ``token.done``."""

    __slots__ = ("batch", "chain", "host", "stamp", "token")

    def __init__(self, batch: Batch, chain: Chain, token: Token, host: dict[str, Any], stamp: Any) -> None:
        self.batch, self.chain, self.token, self.host, self.stamp = batch, chain, token, host, stamp


SOURCE_ENDED = object()
"""Put in flight to make the sink thread look for sources whose last frame has passed."""


class Runner:
    """What the runner thread works with, and the queue to the sink thread.

    ``uploaded`` counts bytes; ``waited_s`` is how long batches in flight kept another one back.
    """

    def __init__(
        self,
        device: Device,
        ring: Ring,
        stager: Stager,
        chains: Chains,
        depth: int,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.device = device
        self.ring = ring
        self.stager = stager
        self.chains = chains
        self.depth = depth
        self.copy = device.stream("copy")
        self.compute = device.stream("compute")
        self.back = device.stream("read-back")
        for slot in ring.slots:
            slot.copied = device.event(f"copied slot {slot.index}")
        self.consumed = [device.event(f"consumed half {i}") for i in range(depth)]
        self.launched = [device.event(f"launched half {i}") for i in range(depth)]
        # One batch more than halves: its upload is enqueued before its half is free, behind `consumed`.
        self._every_token = [Token(device.event(f"done {i}")) for i in range(depth + 1)]
        self.tokens: SimpleQueue[Token] = SimpleQueue()
        for token in self._every_token:
            self.tokens.put(token)
        self.in_flight: SimpleQueue[Any] = SimpleQueue()  # `InFlight`, `SOURCE_ENDED`, or None at the end
        self.durations: dict[str, Durations] = {stage.id: Durations() for stage in chains.stages}
        self.uploaded = 0
        self.waited_s = 0.0
        self._batches = 0
        self._chain: Chain | None = None  # of the batch before
        self._fail = fail

    @property
    def streams(self) -> tuple[Stream, Stream, Stream]:
        """Copy, compute, read-back."""
        return self.copy, self.compute, self.back

    def run(self) -> None:
        """The body of the runner thread."""
        try:
            with self.device.current(self.compute):
                while (slot := self.ring.get()) is not None:
                    items = slot.items
                    try:
                        self._launch(slot)
                    except BaseException as error:
                        lose(items, error)
                        raise
        except BaseException as error:
            self._fail(error)
        finally:
            self.in_flight.put(None)

    def enqueue(self, link: Link, batch: Batch, known: dict[str, Any], stream: Stream) -> None:
        """Enqueue one stage on ``stream``; ``known`` maps names to the arrays it may touch and is added to."""
        outs = link.outs(self.device, len(batch), stream)
        reads = [known[name] for name in link.stage.reads if name in known]
        in_place = [known[name] for name in link.stage.writes if name in known and name not in link.outputs]
        began = time.perf_counter()
        self.device.enqueue(stream, partial(link.run, batch, outs, stream), reads, [*outs.values(), *in_place])
        self.durations[link.stage.id].add(time.perf_counter() - began)
        known.update(outs)

    def _launch(self, slot: Slot) -> None:
        spec = slot.spec
        assert spec is not None
        token = self._token()
        self.device.observe(token.stamp)
        chain = self._chain
        if chain is None or chain.spec is not spec:
            chain, new = self.chains.get(spec)
            self._chain = chain
            if new:
                self._settle(token, spec, len(slot.items))
        for item in slot.items:
            self.chains.note(item.source, spec)
        half = self._batches % self.depth
        self._batches += 1
        if self._batches % 32 == 0:
            self.device.watch()
        items = slot.items
        self.copy.wait(self.consumed[half])  # the edge back: the half is overwritten only behind its last reader
        planes = self.stager.upload(slot, spec, half, self.copy, slot.copied)
        self.uploaded += 0 if self.stager.shares_memory else spec.nbytes * len(items)
        self.compute.wait(slot.copied)  # the edge forward
        if not self.stager.shares_memory:
            self.ring.release(slot, slot.copied)
        batch = Batch(items, planes)
        known: dict[str, Any] = {"planes": planes.slab if planes.slab is not None else []}
        for position, link in enumerate(chain.early):
            self.enqueue(link, batch, known, self.compute)
            if position == chain.last_reader:
                self.consumed[half].record(self.compute)
        if chain.last_reader < 0:
            self.consumed[half].record(self.compute)
        if self.stager.shares_memory:
            self.ring.release(slot, self.consumed[half])
        self.device.enqueue(self.compute, partial(_forget_planes, batch))
        host = self._read_back(chain.small(late=False), chain, batch, known, half)
        token.done.record(self.back if host else self.compute)
        self.device.flush(self.compute)
        self.in_flight.put(InFlight(batch, chain, token, host, self.device.stamp()))

    def _token(self) -> Token:
        try:
            return self.tokens.get_nowait()
        except Empty:
            began = time.perf_counter()
            token = self.tokens.get()
            self.waited_s += time.perf_counter() - began
            return token

    def _settle(self, mine: Token, spec: FrameSpec, batch: int) -> None:
        """A spec not seen before: device memory is planned with nothing else in flight."""
        others = [self.tokens.get() for _ in range(len(self._every_token) - 1)]
        for token in (mine, *others):
            token.done.synchronize()
        for consumed in self.consumed:
            consumed.synchronize()
        self.stager.plan_device(spec)
        self.device.trim()
        for token in others:
            self.tokens.put(token)
        if self.stager.holds_frames and self.device.host_shared:
            for number in range(len(self._every_token), affordable(2 * spec.nbytes * batch)):
                token = Token(self.device.event(f"done {number}"))
                self._every_token.append(token)
                self.tokens.put(token)

    def _read_back(
        self, names: list[str], chain: Chain, batch: Batch, known: dict[str, Any], half: int
    ) -> dict[str, Any]:
        """Enqueue the copy of small results to the host behind the stages; nothing to do where memory is shared."""
        if self.device.host_shared or not names:
            return {}
        self.launched[half].record(self.compute)
        self.back.wait(self.launched[half])
        host = {}
        for name in names:
            spec = chain.flow.arrays[name]
            host[name] = self.device.host_output((len(batch), *spec.shape), spec.dtype)
            self.device.download(host[name], known[name], self.back)
        return host


def count(item: Item, book: str, reason: str) -> None:
    """Enter one frame that will not be delivered into its source's ``dropped``, ``filtered`` or ``failed``."""
    reasons = getattr(item.handle, book)
    reasons[reason] = reasons.get(reason, 0) + 1
    item.handle.handled += 1


def lose(items: Iterable[Item], error: BaseException) -> None:
    """Enter frames that an error takes away: failed in the stage it names, or else dropped."""
    stage = error.where.get("stage") if isinstance(error, FramepipeError) else None
    for item in items:
        if stage is not None:
            count(item, "failed", str(stage))
        else:
            count(item, "dropped", "stopped")


def _forget_planes(batch: Batch) -> None:
    batch.planes = None
