"""The threads of a running pipeline: decode workers, fillers, runner, sink.

The threads hold the `Engine`, never the `Pipeline`, so that a forgotten pipeline is collected and stops its engine.
The sink thread is the first and the last: it starts the others, joins them, and closes everything in reverse order of
opening. So whatever starting them meets ends like any other error, and an interrupt in the caller's thread leaves none
half started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from framepipe.chain import Chains
from framepipe.decode import DecodePool
from framepipe.delivering import Abandoned, Deliverer, Delivery
from framepipe.device.base import Device
from framepipe.errors import FramepipeError
from framepipe.filling import Fillers
from framepipe.guard.monitor import Guard
from framepipe.holdings import Holdings
from framepipe.ring import Ring
from framepipe.running import SOURCE_ENDED, Runner, count
from framepipe.sink import Sink, SinkContext
from framepipe.stage import Stage
from framepipe.stager import Stager, StagingOptions
from framepipe.tracing import OFF, Tracer


class Engine:
    """Everything that runs. Built and opened by `Pipeline`; ended by its own sink thread.

    ``finished`` is set when every other thread has been joined and everything is closed. ``error`` is the first
    error; later ones are notes on it. ``wanted`` are the arrays that sinks read, or None to keep them all.
    """

    def __init__(
        self,
        *,
        device: Device,
        holdings: Holdings,
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
        tracer: Tracer = OFF,
    ) -> None:
        self.device = device
        self.holdings = holdings
        self.pool = pool
        self.stager = stager
        self.options = options
        self.context = context
        self.delivery = delivery
        self.name = name
        self.chains = Chains(stages, wanted, tracer)
        self.ring = Ring(slots, device.stamp, device.observe)
        self.fillers = Fillers(pool, self.ring, stager, options, self.fail, tracer)
        on_host = {name for sink in sinks if sink.host for name in sink.reads}
        self.runner = Runner(device, self.ring, stager, self.chains, options.depth, self.fail, on_host, tracer)
        self.deliverer = Deliverer(self.runner, pool, sinks, delivery, self.fail, tracer)
        self.fillers.latest_chain = lambda: self.runner.chain
        self.guard: Guard | None = None
        """Watches memory from the start to the end; set before `start`."""
        self.error: BaseException | None = None
        self.stopping = False
        self.abandoned = False
        self.finished = threading.Event()
        self.started_s = 0.0
        self.seconds = 0.0
        self._lock = threading.RLock()  # guards error
        self._threads: list[threading.Thread] = []  # all but the sink thread
        self._sink = self._thread("sink", self._run)
        pool.crash = self.fail
        pool.bound = device.bound
        pool.tell = lambda: self.runner.in_flight.put(SOURCE_ENDED)

    def start(self) -> None:
        """Start the sink thread, which starts the others."""
        self.started_s = time.perf_counter()
        try:
            self._sink.start()
        except RuntimeError as error:  # the system has no thread left
            self.fail(error)
            self._end()

    def _start_others(self) -> None:
        if self.guard is not None and self.device.modelled_s() is None:
            self._spawn("guard", self._watch)
        self.pool.start()
        for number in range(self.fillers.threads):
            self._spawn(f"filler-{number}", self.fillers.run)
        self._spawn("runner", self.runner.run)  # last: it needs the sink thread at work

    def _watch(self) -> None:
        assert self.guard is not None
        try:
            self.guard.run()
        except BaseException as error:
            self.fail(error)

    def pass_on(self, tell: Callable[[str], None] | None) -> None:
        """Let ``tell`` hear of what the guard has decided since the last call; one thread at a time."""
        if self.guard is not None and tell is not None:
            for line in self.guard.news():
                tell(line)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = self._thread(name, target)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)
            raise

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            with self.device.bound():
                target()

        # Daemons, because the interpreter joins others before it runs our exit hook, which ends these.
        return threading.Thread(target=run, name=f"{self.name}-{name}", daemon=True)

    def stop(self) -> None:
        """End soon: what is in flight is still delivered, the rest dropped. Any thread, signal handlers too."""
        self.stopping = True
        if self.finished.is_set():
            return
        self._halt()
        if self.delivery is not None:
            self.delivery.stop()

    def _halt(self) -> None:
        self.pool.stop()
        self.ring.shutdown(drain=False)

    def fail(self, error: BaseException) -> None:
        """Keep the first error, note later ones on it, and end; a consumer still gets what came before it."""
        self._halt()
        with self._lock:
            if self.error is None and not isinstance(error, Abandoned):
                self.error = error
            elif self.error is not None and error is not self.error and not isinstance(error, Abandoned):
                self.error.add_note(f"then: {_told(error)}")

    @property
    def members(self) -> list[threading.Thread]:
        """Every thread of this engine (not their numbers, which the system gives to others once they have ended)."""
        return [self._sink, *self._threads, *self.pool.members]

    def abandon(self) -> None:
        """In a process that was forked off meanwhile: its threads stayed behind, so nothing more comes."""
        if self.finished.is_set():
            return
        # Locks are as some thread of the other process held them: new ones, and no use of those of pool and device.
        self._lock, self.finished = threading.RLock(), threading.Event()
        self.abandoned = True
        self.error = FramepipeError(
            f"{self.name} runs in the process that this one was forked from; run a pipeline of its own here, in a "
            "process that multiprocessing.get_context('spawn') started"
        )
        if self.delivery is not None:
            self.delivery.end()
        self.finished.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the sink thread, which waits for the others."""
        if self.finished.wait(timeout_s) and self._sink.ident is not None:
            self._sink.join(timeout_s)

    def _run(self) -> None:
        try:
            self._start_others()
            self.deliverer.run()
        except BaseException as error:
            self.fail(error)
        finally:
            self._end()

    def _end(self) -> None:
        """Join the others, then close everything in reverse order of opening; an error does not keep the rest open."""
        guard = [self.guard] if self.guard is not None else []
        steps: list[Callable[[], None]] = [self.pool.stop, *(each.stop for each in guard)]
        steps += [thread.join for thread in self._threads]
        steps += [self.pool.join, self._drop_the_rest, *(each.close for each in guard)]
        steps += [sink.close for sink in self.deliverer.sinks]
        steps += [stream.synchronize for stream in self.runner.streams]
        steps += [partial(self.holdings.look, self.device)]
        steps += [stage.close for stage in self.chains.stages]
        steps += [self.stager.close, self.device.close]
        try:
            for step in steps:
                try:
                    step()
                except BaseException as error:
                    self.fail(error)
        finally:
            self.seconds = time.perf_counter() - self.started_s
            if self.delivery is not None:
                self.delivery.end()
            self.finished.set()

    def _drop_the_rest(self) -> None:
        """Enter what was taken and came no further."""
        self.fillers.close()
        self.fillers.drop()
        if self.fillers.held is not None:
            count(self.fillers.held[2], "dropped", "stopped")
            self.fillers.held = None
        for slot in self.ring.leftover():
            for item in slot.items:
                count(item, "dropped", "stopped")
            slot.items, slot.frames = (), []


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own `__str__` fails, which must not keep anything open
        return type(error).__name__
