"""The sink thread's work: wait for the oldest batch, collect, read back, write to sinks, hand to the consumer."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from framepipe.chain import Chain, locate, stage_error
from framepipe.decode import DecodePool
from framepipe.device.base import Device
from framepipe.errors import FramepipeError, SinkError
from framepipe.feed import Feed
from framepipe.frame import Batch, Frame, Item
from framepipe.running import InFlight, Runner, count, lose
from framepipe.sink import Sink
from framepipe.stage import ArraySpec
from framepipe.tracing import OFF, Tracer


class Delivery:
    """The bounded queue to whoever iterates. The sink thread puts, the consumer takes and gives room back."""

    def __init__(self, size: int, device: Device) -> None:
        self._frames: SimpleQueue[tuple[Frame, Any] | None] = SimpleQueue()
        self._device = device
        self._stopped = False
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
        if not room or self._stopped:  # the flag too: the consumer gives room back behind the message
            self._room.put(False)
            return False
        frame.item.handle.delivered += 1  # here, since whoever takes it may do so while another thread closes
        self._frames.put((frame, self._device.stamp()))
        return True

    def take(self, timeout_s: float) -> Frame | None:
        """The next frame, or None behind the last one. Raises `queue.Empty` after ``timeout_s``."""
        got = self._frames.get(timeout=timeout_s)
        if got is None:
            self._frames.put(None)  # for the next call
            return None
        frame, stamp = got
        self._device.observe(stamp)
        self._room.put(True)
        return frame

    def drain(self) -> None:
        """Once everything has ended: what nobody took is dropped."""
        with contextlib.suppress(Empty):
            while True:
                got = self._frames.get_nowait()
                if got is not None:
                    feed = got[0].item.handle
                    feed.delivered -= 1
                    feed.dropped["stopped"] = feed.dropped.get("stopped", 0) + 1
        self._frames.put(None)

    def stop(self) -> None:
        """Wake the sink thread; it puts nothing any more."""
        self._stopped = True
        self._room.put(False)

    def end(self) -> None:
        """Nothing more comes: the consumer finds None behind the last frame."""
        self._frames.put(None)


class Deliverer:
    """What the sink thread works with. ``waited_s`` is how long it waited for the device."""

    def __init__(
        self,
        runner: Runner,
        pool: DecodePool,
        sinks: Sequence[Sink],
        delivery: Delivery | None,
        fail: Callable[[BaseException], None],
        tracer: Tracer = OFF,
    ) -> None:
        self.runner = runner
        self.device = runner.device
        self.pool = pool
        self.sinks = list(sinks)
        self.delivery = delivery
        self.waited_s = 0.0
        self._failed = False  # a batch failed here: what comes behind it is dropped
        self._fail = fail
        self._writes = [(sink, tracer.wrap(f"framepipe.write {sink.type_name}", sink.write)) for sink in self.sinks]
        self._read_back = tracer.wrap("framepipe.read-back", self._download)
        self._ending: deque[Feed] = deque()

    def run(self) -> None:
        """Until the runner says that nothing more comes."""
        with self.device.current(self.runner.back):
            while (flight := self.runner.in_flight.get()) is not None:
                try:
                    if isinstance(flight, InFlight):
                        self._deliver(flight)
                    self._end_sources()
                except BaseException as error:
                    self._fail(error)
                del flight  # waiting for the next batch must not keep this one's memory
            self._end_sources()

    def _deliver(self, flight: InFlight) -> None:
        batch = flight.batch
        self.device.observe(flight.stamp)
        waiting = deque(batch.items)  # not yet in the books
        try:
            frames = self._finish(flight)
            while frames:
                frame, on_host = frames.popleft()
                waiting.popleft()
                self._hand_over(frame, on_host)
        except BaseException as error:
            self._failed = True
            locate(error, batch.items, flight.chain)
            lose(waiting, error)
            raise

    def _finish(self, flight: InFlight) -> deque[tuple[Frame, Frame]]:
        """The device's part, and the batch as frames: as consumers see them, and as host sinks do."""
        try:
            began = time.perf_counter()
            flight.token.done.synchronize()
            self.waited_s += time.perf_counter() - began
            if self._failed:
                raise Abandoned
            self._collect(flight.chain, flight.batch, flight.host)
            host = self._to_host(flight.chain, flight.batch, flight.host)
            for name, timer in flight.timed:
                self.runner.device_durations[name].add(timer.seconds())
        finally:
            flight.token.stamp = self.device.stamp()
            self.runner.tokens.put(flight.token)
        return self._frames(flight.chain, flight.batch, host)

    def _collect(self, chain: Chain, batch: Batch, host: dict[str, Any]) -> None:
        """Collect in order; stages that wait for meta are launched in between."""
        for link in chain.links:
            if link.late:
                self.runner.enqueue(link, batch, dict(batch.arrays), self.runner.back)
                if link.stage.readback:
                    self.runner.back.synchronize()
            if not link.collects:
                continue
            for name in link.stage.readback:
                batch.host[name] = self._small(name, chain, batch, host)
            try:
                link.collect(batch)
            except FramepipeError:
                raise
            except Exception as error:
                raise stage_error(link.stage, batch, error) from error
        if chain.late and not self.device.host_shared:
            self.runner.back.synchronize()  # they have not run yet where work is deferred, and read what goes now
        for name in [name for name in batch.arrays if name not in chain.kept]:
            del batch.arrays[name]

    def _small(self, name: str, chain: Chain, batch: Batch, host: dict[str, Any]) -> Any:
        if self.device.host_shared:
            return batch.arrays[name]
        if name not in host:
            return self._read_back(name, batch.arrays[name], chain.flow.arrays[name])
        self.device.host_access(host[name], write=False)
        return host[name]

    def _download(self, name: str, array: Any, spec: ArraySpec) -> Any:
        back = self.runner.back
        host = self.runner.host_memory(name, spec, len(array))
        self.device.download(host, array, back)
        back.synchronize()
        self.device.host_access(host, write=False)
        return host

    def _to_host(self, chain: Chain, batch: Batch, host: dict[str, Any]) -> dict[str, Any]:
        """What host sinks read, as numpy arrays; what late stages wrote is read back now."""
        if self.device.host_shared:
            return batch.arrays
        names = {name for sink in self.sinks if sink.host for name in sink.reads if name in batch.arrays}
        early = {name: array for name, array in host.items() if name not in chain.late_writes}
        return {name: self._small(name, chain, batch, early) for name in sorted(names)}

    def _frames(self, chain: Chain, batch: Batch, host: dict[str, Any]) -> deque[tuple[Frame, Frame]]:
        shared = self.device.host_shared
        frames: deque[tuple[Frame, Frame]] = deque()
        for i, item in enumerate(batch.items):
            frame = self._frame(chain, item, batch.arrays, i)
            frames.append((frame, frame if shared else _on_host(chain, item, host, i)))
        batch.arrays.clear()
        return frames

    def _frame(self, chain: Chain, item: Item, arrays: dict[str, Any], i: int) -> Frame:
        part = self.device.part
        image = arrays.get("image")
        tensors = {name: part(array, i) for name, array in arrays.items() if name != "image"}
        shown = None if image is None else part(image, i)
        return Frame(item, chain.spec, shown, tensors, self.device, chain.pixel_aspect)

    def _hand_over(self, frame: Frame, on_host: Frame) -> None:
        item = frame.item
        if item.filtered_by is not None:
            count(item, "filtered", item.filtered_by)
            return
        for sink, write in self._writes:
            try:
                write(on_host if sink.host else frame)
            except BaseException as error:
                count(item, "failed", sink.type_name)
                if isinstance(error, FramepipeError):
                    raise
                raise SinkError(
                    f"sink {sink.type_name!r} failed at frame {frame.index} of {frame.source!r}: "
                    f"{type(error).__name__}: {error}",
                    sink=sink.type_name, source=frame.source, index=frame.index, pts=frame.pts,
                ) from error  # fmt: skip
        if self.delivery is None:
            item.handle.handled += 1
            item.handle.delivered += 1
        elif self.delivery.put(frame):
            item.handle.handled += 1
        else:
            count(item, "dropped", "stopped")

    def _end_sources(self) -> None:
        """Tell sinks of sources whose last frame has passed."""
        while self.pool.finished:
            self._ending.append(self.pool.finished.popleft())
        for _ in range(len(self._ending)):
            feed = self._ending.popleft()
            if feed.in_flight:
                self._ending.append(feed)
                continue
            for sink in self.sinks:
                sink.end(feed.name)


class Abandoned(Exception):
    """A batch that came behind one that failed on the sink thread."""


def _on_host(chain: Chain, item: Item, arrays: dict[str, Any], i: int) -> Frame:
    tensors = {name: array[i] for name, array in arrays.items() if name != "image"}
    image = arrays["image"][i] if "image" in arrays else None
    return Frame(item, chain.spec, image, tensors, pixel_aspect=chain.pixel_aspect)
