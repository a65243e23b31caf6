"""The threads of a running pipeline: fillers, runner, sink.

The threads hold the `Engine`, never the `Pipeline`, so that a forgotten pipeline is collected and stops its engine.
The sink thread ends last: it joins the others and closes everything in reverse order of opening.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from framepipe.chain import Chain, Chains, Link, stage_error
from framepipe.decode import DecodePool, Feed
from framepipe.device.base import Device, Event
from framepipe.errors import FramepipeError, SinkError
from framepipe.frame import Batch, Frame, FrameSpec, Item
from framepipe.report import Durations
from framepipe.ring import Ring, Slot
from framepipe.sink import Sink, SinkContext
from framepipe.stage import Stage
from framepipe.stager import Stager, StagingOptions


class _InFlight:
    """A batch between runner and sink thread: its token, the event to wait for, and small results on the host."""

    __slots__ = ("batch", "chain", "host", "stamp", "token")

    def __init__(self, batch: Batch, chain: Chain, token: _Token, host: dict[str, Any], stamp: Any) -> None:
        self.batch, self.chain, self.token, self.host, self.stamp = batch, chain, token, host, stamp


class _Token:
    """The right to have a batch in flight."""

    __slots__ = ("done", "stamp")

    def __init__(self, done: Event) -> None:
        self.done = done
        self.stamp: Any = None


class Delivery:
    """The bounded queue to whoever iterates. The sink thread puts, the consumer takes and gives room back."""

    def __init__(self, size: int) -> None:
        self.frames: SimpleQueue[Frame | None] = SimpleQueue()
        self.waited_s = 0.0
        self._room: SimpleQueue[bool] = SimpleQueue()
        for _ in range(size):
            self._room.put(True)

    def put(self, frame: Frame) -> bool:
        """Wait for room and hand a frame over; False once stopped."""
        try:
            room = self._room.get_nowait()
        except Empty:
            began = time.perf_counter()
            room = self._room.get()
            self.waited_s += time.perf_counter() - began
        if not room:
            self._room.put(False)
            return False
        self.frames.put(frame)
        return True

    def took(self) -> None:
        """A frame was taken."""
        self._room.put(True)

    def stop(self) -> None:
        """Wake the sink thread; it puts nothing any more."""
        self._room.put(False)


class Engine:
    """Everything that runs. Built by `Pipeline`, which opens it; ended by its own sink thread.

    ``finished`` is set when all threads but the sink's have been joined and everything is closed. ``error`` is the
    first error; later ones are notes on it.
    """

    def __init__(
        self,
        *,
        device: Device,
        pool: DecodePool,
        stager: Stager,
        options: StagingOptions,
        slots: int,
        stages: Sequence[Stage],
        sinks: Sequence[Sink],
        context: SinkContext,
        wanted: set[str] | None,
        delivery: Delivery | None,
        name: str,
    ) -> None:
        self.device = device
        self.pool = pool
        self.stager = stager
        self.options = options
        self.chains = Chains(stages, wanted)
        self.sinks = list(sinks)
        self.context = context
        self.delivery = delivery
        self.name = name
        self.ring = Ring(slots, device.stamp, device.observe)
        self.copy = device.stream("copy")
        self.compute = device.stream("compute")
        self.back = device.stream("read-back")
        for slot in self.ring.slots:
            slot.copied = device.event(f"copied slot {slot.index}")
        self.consumed = [device.event(f"consumed half {i}") for i in range(options.depth)]
        self.launched = [device.event(f"launched half {i}") for i in range(options.depth)]
        self.tokens: SimpleQueue[_Token] = SimpleQueue()
        self.in_flight: SimpleQueue[_InFlight | None] = SimpleQueue()
        # One batch more than halves: its upload is enqueued before the half is free, behind `consumed`.
        self._all_tokens = [_Token(device.event(f"done {i}")) for i in range(options.depth + 1)]
        for token in self._all_tokens:
            self.tokens.put(token)
        self.error: BaseException | None = None
        self.stopping = False
        self.failed = False
        self.finished = threading.Event()
        self.started_s = 0.0
        self.seconds = 0.0
        self.replans = 0
        self.uploaded = 0
        self.device_waited_s = 0.0
        self.filler_waited_s = 0.0
        self.durations: dict[str, Durations] = {stage.id: Durations() for stage in stages}
        self.on_close: Callable[[], None] = lambda: None
        self._batches = 0
        self._forming = threading.Lock()  # one filler at a time takes frames; guards _held and slot order
        self._held: tuple[Feed, Any, Item, FrameSpec] | None = None
        self._planned = False
        self._error_lock = threading.RLock()  # guards error and failed
        self._open_fillers = options.fillers
        self._threads: list[threading.Thread] = []
        self._ending: deque[Feed] = deque()

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every thread."""
        self.started_s = time.perf_counter()
        self.pool.start()
        for number in range(self.options.fillers):
            self._spawn(f"filler-{number}", self._fill)
        self._spawn("runner", self._run)
        self._spawn("sink", self._sink)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"{self.name}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """End soon: what is in flight is still delivered, what is not yet launched is dropped. Any thread, signals too."""
        self.stopping = True
        self.pool.stop()
        self.ring.shutdown(drain=False)
        if self.delivery is not None:
            self.delivery.stop()

    def fail(self, error: BaseException) -> None:
        """Keep the first error, note later ones on it, and stop."""
        with self._error_lock:
            if self.error is None:
                self.error = error
                self.failed = True
            elif error is not self.error and not isinstance(error, type(self.error)):
                self.error.add_note(f"then: {type(error).__name__}: {error}")
        self.stop()

    @property
    def idents(self) -> set[int | None]:
        """Identities of every thread of this engine."""
        return {thread.ident for thread in self._threads} | self.pool.idents

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the sink thread, which waits for the others."""
        for thread in self._threads:
            thread.join(timeout_s)

    # -- filler -------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        try:
            while True:
                with self._forming:
                    formed = self._form()
                if formed is None:
                    return
                slot, frames, spec = formed
                try:
                    if slot.fence is not None:
                        slot.fence.synchronize()
                    self.stager.fill(frames, slot, spec)
                finally:
                    formed = frames = None
                    self.ring.commit(slot)
        except BaseException as error:
            self.fail(error)
        finally:
            with self._forming:
                self._open_fillers -= 1
                if not self._open_fillers:
                    self.ring.shutdown(drain=True)

    def _form(self) -> tuple[Slot, list[Any], FrameSpec] | None:
        """Take a slot and the frames for it: a full batch, or a partial one at a change of spec, a time-out or the end."""
        slot = self.ring.acquire()
        if slot is None:
            return None
        frames: list[Any] = []
        items: list[Item] = []
        spec: FrameSpec | None = None
        deadline = 0.0
        while len(frames) < self.options.batch:
            if self._held is not None:
                (feed, frame, item, own), self._held = self._held, None
            else:
                left = max(0.0, deadline - time.monotonic()) if frames else None
                began = time.perf_counter()
                got = self.pool.take(left)
                self.filler_waited_s += time.perf_counter() - began
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
                self._held = (feed, frame, item, own)
                break
            if spec is None:
                spec = own
                if self.options.batch > 1:
                    deadline = time.monotonic() + self.options.batch_timeout_s
            frames.append(frame)
            items.append(item)
        if spec is None:
            self.ring.abort(slot)
            return None
        slot.items, slot.spec = items, spec
        if not (self._planned and self.stager.fits(spec)) and not self._plan(slot, spec):
            self.ring.abort(slot)
            return None
        return slot, frames, spec

    def _plan(self, slot: Slot, spec: FrameSpec) -> bool:
        """Make slots large enough for ``spec``, with every slot idle; False once the ring is shut down."""
        others = self.ring.gather(slot)
        if others is None:
            return False
        if self.stager.plan(spec, self.ring.slots) and self._planned:
            self.replans += 1
        self._planned = True
        self.ring.scatter(others)
        return True

    # -- runner -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.device.current(self.compute):
                while (slot := self.ring.get()) is not None:
                    self._launch(slot)
        except BaseException as error:
            self.fail(error)
        finally:
            self.in_flight.put(None)

    def _launch(self, slot: Slot) -> None:
        spec = slot.spec
        assert spec is not None
        token = self.tokens.get()
        self.device.observe(token.stamp)
        chain, new = self.chains.get(spec)
        if new:
            self._settle(token, spec)
        for item in slot.items:
            self.chains.note(item.source, spec)
        half = self._batches % self.options.depth
        self._batches += 1
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
            self._enqueue(link, batch, known, self.compute)
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
        self.in_flight.put(_InFlight(batch, chain, token, host, self.device.stamp()))

    def _settle(self, mine: _Token, spec: FrameSpec) -> None:
        """A spec not seen before: device memory is planned with nothing else in flight."""
        others = [self.tokens.get() for _ in range(len(self._all_tokens) - 1)]
        for token in (mine, *others):
            token.done.synchronize()
        for consumed in self.consumed:
            consumed.synchronize()
        self.stager.plan_device(spec)
        for token in others:
            self.tokens.put(token)

    def _enqueue(self, link: Link, batch: Batch, known: dict[str, Any], stream: Any) -> None:
        outs = link.outs(self.device, len(batch), stream)
        reads = [known[name] for name in link.stage.reads if name in known]
        in_place = [known[name] for name in link.stage.writes if name in known and name not in link.outputs]
        began = time.perf_counter()
        self.device.enqueue(stream, partial(link.run, batch, outs, stream), reads, [*outs.values(), *in_place])
        self.durations[link.stage.id].add(time.perf_counter() - began)
        known.update(outs)

    def _read_back(self, names: list[str], chain: Chain, batch: Batch, known: dict[str, Any], half: int) -> dict[str, Any]:
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

    # -- sink ---------------------------------------------------------------------------------------------------

    def _sink(self) -> None:
        try:
            with self.device.current(self.back):
                while (flight := self.in_flight.get()) is not None:
                    try:
                        self._deliver(flight)
                    except BaseException as error:
                        self._count_failed(flight, error)
                        self.fail(error)
                    flight = None  # type: ignore[assignment]
        except BaseException as error:  # pragma: no cover - the loop above catches what stages and sinks raise
            self.fail(error)
        finally:
            self._end()

    def _deliver(self, flight: _InFlight) -> None:
        batch, chain, token = flight.batch, flight.chain, flight.token
        self.device.observe(flight.stamp)
        try:
            began = time.perf_counter()
            token.done.synchronize()
            self.device_waited_s += time.perf_counter() - began
            if self.failed:
                for item in batch.items:
                    _drop(item, "stopped")
                return
            self._collect(chain, batch, flight.host)
            host = self._to_host(chain, batch)
        finally:
            token.stamp = self.device.stamp()
            self.tokens.put(token)
        frames = self._frames(chain, batch, host)
        while frames:
            frame = frames.popleft()
            if frame.item.filtered_by is not None:
                handle = frame.item.handle
                handle.filtered[frame.item.filtered_by] = handle.filtered.get(frame.item.filtered_by, 0) + 1
                handle.handled += 1
                continue
            try:
                self._write(frame)
            except BaseException:
                for rest in frames:
                    _drop(rest.item, "stopped")
                raise
        self._end_sources()

    def _collect(self, chain: Chain, batch: Batch, host: dict[str, Any]) -> None:
        """Collect in order; stages that wait for meta are launched in between."""
        for link in chain.links:
            if link.late:
                self._enqueue(link, batch, dict(batch.arrays), self.back)
                if link.stage.readback:
                    self.back.synchronize()
            if not link.collects:
                continue
            for name in link.stage.readback:
                if name in host:
                    self.device.host_access(host[name], write=False)
                    batch.host[name] = host[name]
                else:
                    batch.host[name] = self._download(batch.arrays[name]) if not self.device.host_shared else batch.arrays[name]
            try:
                link.stage.collect(batch)
            except FramepipeError:
                raise
            except Exception as error:
                raise stage_error(link.stage, batch, error) from error
        for name in [name for name in batch.arrays if name not in chain.kept]:
            del batch.arrays[name]

    def _download(self, array: Any) -> Any:
        host = self.device.host_output(array.shape, array.dtype)
        self.device.download(host, array, self.back)
        self.back.synchronize()
        self.device.host_access(host, write=False)
        return host

    def _to_host(self, chain: Chain, batch: Batch) -> dict[str, Any]:
        """What host sinks read, as numpy arrays; late stages are complete after it."""
        if self.device.host_shared:
            return batch.arrays
        if chain.late:
            self.back.synchronize()
        names = {name for sink in self.sinks if sink.host for name in sink.reads if name in batch.arrays}
        return {name: self._download(batch.arrays[name]) for name in sorted(names)}

    def _frames(self, chain: Chain, batch: Batch, host: dict[str, Any]) -> deque[Frame]:
        frames: deque[Frame] = deque()
        images = batch.arrays.get("image")
        tensors = [name for name in batch.arrays if name != "image"]
        for i, item in enumerate(batch.items):
            frame = Frame(
                item,
                chain.spec,
                images[i] if images is not None else None,
                {name: batch.arrays[name][i] for name in tensors},
                host=None if self.device.host_shared else self._download,
            )
            frame.on_host = frame if self.device.host_shared else Frame(
                item,
                chain.spec,
                host["image"][i] if "image" in host else None,
                {name: host[name][i] for name in host if name != "image"},
            )
            frames.append(frame)
        batch.arrays.clear()
        return frames

    def _write(self, frame: Frame) -> None:
        feed = frame.item.handle
        for sink in self.sinks:
            try:
                sink.write(frame.on_host if sink.host else frame)
            except FramepipeError:
                _fail(frame.item, sink.type_name)
                raise
            except Exception as error:
                _fail(frame.item, sink.type_name)
                raise SinkError(
                    f"sink {sink.type_name!r} failed at frame {frame.index} of {frame.source!r}: "
                    f"{type(error).__name__}: {error}",
                    sink=sink.type_name, source=frame.source, index=frame.index, pts=frame.pts,
                ) from error  # fmt: skip
        frame.on_host = None
        if self.delivery is not None and not self.delivery.put(frame):
            _drop(frame.item, "stopped")
            return
        feed.handled += 1
        if self.delivery is None:
            feed.delivered += 1

    def _count_failed(self, flight: _InFlight, error: BaseException) -> None:
        for item in flight.batch.items:
            feed = item.handle
            if getattr(error, "where", {}).get("stage") is not None:
                _fail(item, error.where["stage"])  # type: ignore[attr-defined]
            elif feed.in_flight and not isinstance(error, SinkError):
                _drop(item, "stopped")

    def _end_sources(self) -> None:
        while self.pool.finished:
            self._ending.append(self.pool.finished.popleft())
        for _ in range(len(self._ending)):
            feed = self._ending.popleft()
            if feed.in_flight:
                self._ending.append(feed)
                continue
            for sink in self.sinks:
                sink.end(feed.name)

    def _end(self) -> None:
        """Join the others, then close everything in reverse order of opening; an error does not keep the rest open."""
        self.pool.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._held = self._count_held()
        for slot in self.ring.leftover():
            for item in slot.items:
                _drop(item, "stopped")
        steps: list[Callable[[], None]] = [self.pool.join]
        steps += [sink.close for sink in self.sinks]
        steps += [self.copy.synchronize, self.compute.synchronize, self.back.synchronize]
        steps += [stage.close for stage in self.chains.stages]
        steps += [self.stager.close, self.device.close, self.on_close]
        for step in steps:
            try:
                step()
            except BaseException as error:
                self.fail(error)
        self.seconds = time.perf_counter() - self.started_s
        if self.delivery is not None:
            self.delivery.frames.put(None)
        self.finished.set()

    def _count_held(self) -> None:
        if self._held is not None:
            _drop(self._held[2], "stopped")


def _forget_planes(batch: Batch) -> None:
    batch.planes = None


def _drop(item: Item, reason: str) -> None:
    feed = item.handle
    feed.dropped[reason] = feed.dropped.get(reason, 0) + 1
    feed.handled += 1


def _fail(item: Item, name: str) -> None:
    feed = item.handle
    feed.failed[name] = feed.failed.get(name, 0) + 1
    feed.handled += 1


def select(pool: DecodePool, feed: Feed, frame: Any) -> tuple[Item, FrameSpec] | None:
    """Give a decoded frame its index and time, and decide whether its source wants it; the filler's books."""
    index = feed.decoded
    feed.decoded += 1
    base = feed.time_base
    if base is None:
        base = feed.time_base = _time_base(feed, frame)
    pts = frame.pts
    if pts is None:
        time_s, estimated = float(index / feed.rate), True
    else:
        time_s, estimated = pts * base.numerator / base.denominator, False
    reason = _unwanted(pool, feed, index, time_s)
    if reason is not None:
        feed.skipped[reason] = feed.skipped.get(reason, 0) + 1
        return None
    source = feed.source
    spec = FrameSpec.of(frame, getattr(source, "matrix", None), feed.full_range)
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
