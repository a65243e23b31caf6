"""The runner thread: slots to the device, and stages onto the compute stream.

It only enqueues. Three streams: copy (uploads), compute (stages), read-back. The edges between them are events:
forward, compute waits for a slot's copy; back, the copy into a half waits for the stages that read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from framepipe import budget
from framepipe.chain import Chain, Chains, Link, locate, stage_error
from framepipe.device.base import Device, Event, Stream, Timer
from framepipe.errors import DeviceError, FramepipeError
from framepipe.frame import Batch, FrameSpec, Item
from framepipe.report import Durations
from framepipe.ring import Ring, Slot, affordable
from framepipe.stage import ArraySpec
from framepipe.stager import Stager
from framepipe.tokens import Token, Tokens
from framepipe.tracing import OFF, Tracer


class InFlight:
    """A batch between the runner and the sink thread; ``host`` is what was read back, complete after ``token.done``."""

    __slots__ = ("batch", "chain", "host", "stamp", "timed", "token")

    def __init__(
        self, batch: Batch, chain: Chain, token: Token, host: dict[str, Any], stamp: Any, timed: list[tuple[str, Timer]]
    ) -> None:
        self.batch, self.chain, self.token, self.host, self.stamp = batch, chain, token, host, stamp
        self.timed = timed
        """Stages whose time on the device was taken in this batch."""


_SAMPLE = 32
"""Of so many batches one is timed on the device, and its free memory read: both cost microseconds."""
SOURCE_ENDED = object()
"""Put in flight to make the sink thread look for sources whose last frame has passed."""


class Runner:
    """What the runner thread works with, and the queue to the sink thread.

    ``on_host`` names what sinks read as numpy arrays. ``uploaded`` counts bytes; ``waited_s`` is how long batches in
    flight kept another one back, ``ran_s`` how long the thread lived.
    """

    def __init__(
        self,
        device: Device,
        ring: Ring,
        stager: Stager,
        chains: Chains,
        depth: int,
        fail: Callable[[BaseException], None],
        on_host: Collection[str] = (),
        tracer: Tracer = OFF,
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
        self._consumed = [device.event(f"consumed half {i}") for i in range(depth)]
        self.consumed: list[Event] = list(self._consumed)
        """Behind which each half may be overwritten."""
        self.launched = [device.event(f"launched half {i}") for i in range(depth)]
        # One batch more than halves: its upload is enqueued before its half is free, behind `consumed`.
        self.tokens = Tokens(Token(device.event(f"done {i}")) for i in range(depth + 1))
        self.in_flight: SimpleQueue[Any] = SimpleQueue()  # `InFlight`, `SOURCE_ENDED`, or None at the end
        self.durations: dict[str, Durations] = {stage.id: Durations() for stage in chains.stages}
        self.device_durations: dict[str, Durations] = {stage.id: Durations() for stage in chains.stages}
        """The device's own time, of a sample of the batches; the sink thread adds."""
        self._timing: list[tuple[str, Timer]] | None = None
        self._on_host = set(on_host)
        self._back: dict[FrameSpec, list[str]] = {}
        self._planned: dict[Any, list[budget.BackBlocks]] = {}
        """By sizes of a chain's arrays, what is reserved to read them back to."""
        self.uploaded = 0
        self.waited_s = 0.0
        self.ran_s = 0.0
        self._batches = 0
        self.chain: Chain | None = None  # of the batch before
        self.passed: Callable[[], None] = _nothing
        """Called once the device's time has gone on by a batch; a guard's, where time is modelled."""
        self._fail = fail
        self._upload = tracer.wrap("framepipe.upload", stager.upload)
        self._download = tracer.wrap("framepipe.read-back", device.download)

    @property
    def streams(self) -> tuple[Stream, Stream, Stream]:
        """Copy, compute, read-back."""
        return self.copy, self.compute, self.back

    def run(self) -> None:
        """The body of the runner thread."""
        began = time.perf_counter()
        try:
            with self.device.current(self.compute):
                while (slot := self.ring.get()) is not None:
                    items = slot.items
                    try:
                        self._launch(slot)
                    except BaseException as error:
                        locate(error, items, self.chain)
                        lose(items, error)
                        raise
        except BaseException as error:
            self._fail(error)
        finally:
            self.ran_s = time.perf_counter() - began
            self.in_flight.put(None)

    def enqueue(self, link: Link, batch: Batch, known: dict[str, Any], stream: Stream) -> None:
        """Enqueue one stage on ``stream``; ``known`` maps names to the arrays it may touch and is added to."""
        try:
            outs = link.outs(self.device, len(batch), stream, self.stager.batch)
        except (DeviceError, MemoryError) as error:
            raise stage_error(link.stage, batch, error) from error
        reads = [known[name] for name in link.stage.reads if name in known]
        in_place = [known[name] for name in link.stage.writes if name in known and name not in link.outputs]
        timer = self.device.timer() if self._timing is not None and not link.late else None
        if timer is not None and self._timing is not None:
            timer.start(stream)
            self._timing.append((link.stage.id, timer))
        began = time.perf_counter()
        self.device.enqueue(stream, partial(link.run, batch, outs, stream), reads, [*outs.values(), *in_place])
        self.durations[link.stage.id].add(time.perf_counter() - began)
        if timer is not None:
            timer.stop(stream)
        known.update(outs)

    def _launch(self, slot: Slot) -> None:
        spec = slot.spec
        assert spec is not None
        token = self._token()
        self.device.observe(token.stamp)
        chain = self.chain
        if chain is None or chain.spec is not spec:
            chain, new = self.chains.get(spec)
            self.chain = chain
            if new:
                self._settle(token, chain)
        for item in slot.items:
            self.chains.note(item.source, spec)
        half = self._batches % self.depth
        self._batches += 1
        if self._batches % _SAMPLE == 0:
            self.device.watch()
            self._timing = []
        items = slot.items
        self.device.advance(len(items))
        self.passed()
        self.copy.wait(self.consumed[half])  # the edge back: the half is overwritten only behind its last reader
        with self.stager.timed("upload"):
            planes = self._upload(slot, spec, half, self.copy, slot.copied)
        self.uploaded += 0 if self.stager.shares_memory else spec.nbytes * len(items)
        self.compute.wait(slot.copied)  # the edge forward
        if not self.stager.shares_memory:
            self.ring.release(slot, slot.copied)
        batch = Batch(items, planes)
        known: dict[str, Any] = {"planes": planes.slab if planes.slab is not None else []}
        back = [] if self.device.host_shared else self._back[spec]
        # Every call to the driver lets go of the interpreter lock, and getting it back may take long: so one event does
        # for two that would say the same.
        same = not back and chain.last_reader == len(chain.early) - 1
        consumed = self.consumed[half] = token.done if same else self._consumed[half]
        behind = [] if same else [consumed]  # recorded behind the last stage that reads the planes
        mapped = self.stager.shares_memory and not self.device.host_shared
        if mapped:  # the slot's own, since the half's is recorded again while the slot may not be taken yet
            behind.append(slot.copied)
        if chain.last_reader < 0:
            _record(behind, self.compute)
        for position, link in enumerate(chain.early):
            self.enqueue(link, batch, known, self.compute)
            if position == chain.last_reader:
                _record(behind, self.compute)
        self.device.enqueue(self.compute, partial(_forget_planes, batch))
        host = self._read_back(back, chain, batch, known, half) if back else {}
        token.done.record(self.back if host else self.compute)
        if self.stager.shares_memory:
            self.ring.release(slot, slot.copied if mapped else consumed)
        self.device.flush(self.compute)
        self.in_flight.put(InFlight(batch, chain, token, host, self.device.stamp(), self._take_timed()))

    def _take_timed(self) -> list[tuple[str, Timer]]:
        timed, self._timing = self._timing or [], None
        return timed

    def _token(self) -> Token:
        try:
            return self.tokens.get_nowait()
        except Empty:
            began = time.perf_counter()
            token = self.tokens.get()
            self.waited_s += time.perf_counter() - began
            return token

    def _settle(self, mine: Token, chain: Chain) -> None:
        """A spec not seen before: device memory is planned with nothing else in flight."""
        spec = chain.spec
        others = self.tokens.gather()
        for token in (mine, *others):
            token.done.synchronize()
        for consumed in self.consumed:
            consumed.synchronize()
        self.stager.plan_device(spec)
        sizes = budget.sizes(chain)
        new = sizes not in self._planned  # else what there is fits
        if new:
            self._unreserve()
            self.device.trim()
            self._planned[sizes] = []
        if not self.device.host_shared:
            self._plan_read_back(chain, reserve=new)
        for token in others:
            self.tokens.put(token)
        if self.stager.holds_frames and self.device.host_shared:
            for number in range(len(self.tokens), affordable(2 * spec.nbytes * self.stager.batch)):
                self.tokens.add(Token(self.device.event(f"done {number}")))

    def _read_back(
        self, names: list[str], chain: Chain, batch: Batch, known: dict[str, Any], half: int
    ) -> dict[str, Any]:
        """Enqueue the copy of results to the host behind the stages."""
        self.launched[half].record(self.compute)
        self.back.wait(self.launched[half])
        host = {}
        for name in names:
            host[name] = self.host_memory(name, chain.flow.arrays[name], len(batch))
            self._download(host[name], known[name], self.back)
        return host

    def host_memory(self, name: str, array: ArraySpec, n: int) -> Any:
        """Memory to read ``n`` pictures' arrays back to: a whole batch's, so that a partial one needs no other."""
        memory = self.device.host_output((max(n, self.stager.batch), *array.shape), array.dtype, f"read-back of {name}")
        return memory if len(memory) == n else memory[:n]

    def _plan_read_back(self, chain: Chain, *, reserve: bool) -> None:
        """Page-lock what results are read back to, before the first batch needs it."""
        blocks = budget.read_back(chain, self._on_host, self.stager.batch, len(self.tokens))
        self._back[chain.spec] = [block.name for block in blocks if block.beside]
        if reserve:
            self._planned[budget.sizes(chain)] = blocks
            for block in blocks:
                self.device.host_reserve(block.nbytes, block.blocks, f"read-back of {block.name}")

    def _unreserve(self) -> None:
        """Keep nothing page-locked for sizes that no source has any more: a folder of pictures may have many."""
        for sizes in self._planned.keys() - set(map(budget.sizes, self.chains.in_use)):
            for block in self._planned.pop(sizes):
                self.device.host_unreserve(block.nbytes, block.blocks)


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


def _nothing() -> None:
    pass


def _record(events: Iterable[Event], stream: Stream) -> None:
    for event in events:
        event.record(stream)


def _forget_planes(batch: Batch) -> None:
    batch.planes = None
