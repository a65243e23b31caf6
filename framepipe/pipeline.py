"""`Pipeline`: plan, open, run or iterate, stop, close; and `open`, the short way to frames."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from queue import Empty
from types import TracebackType
from typing import Any, Literal

from framepipe import alive, budget, chain, guarding, parts, registry, tracing
from framepipe.decode import DecodePool
from framepipe.delivering import Delivery
from framepipe.device import select
from framepipe.engine import Engine
from framepipe.errors import ClosedError, ConfigError, FramepipeError
from framepipe.feed import Feed
from framepipe.fitting import refuse_too_much
from framepipe.frame import Frame
from framepipe.guard.monitor import Record
from framepipe.guard.options import GuardOptions, make_guard
from framepipe.holdings import Holdings
from framepipe.report import RunReport, Statistics
from framepipe.sink import Sink, SinkContext, SourceInfo
from framepipe.sinks._output import check_outputs
from framepipe.source import Source
from framepipe.stage import Stage
from framepipe.stager import TIMINGS, StagingOptions
from framepipe.summary import Snapshots, Summary

_SLICE_S = 0.1
"""The main thread never waits longer in one go: before Python 3.14 a lock wait on Windows ignores Ctrl-C."""
_numbers = count(1)
_log = logging.getLogger("framepipe")


class Pipeline:
    """Sources → stages → sinks, run once.

    Use it in one of three ways: `run` it to its end; iterate it (``for frame in pipeline``, ``async for`` too) for
    its frames; or both sinks and iteration. It is a context manager; `close` is idempotent. ``stop()`` may be
    called from any thread and from signal handlers. ``report`` is there once it has ended, in whatever way.

    ``sources`` are `Source` objects, or strings as in YAML; ``stages`` and ``sinks`` are objects, or names of ones
    that need no parameter; a callable among ``sinks`` gets every frame. ``staging`` is a strategy's name, the
    ``staging:`` block as a mapping, or `StagingOptions`. ``device_memory`` is the most that it may hold on the device,
    in bytes or as in ``"4GB"``. ``threads`` is the budget of decoding threads (by default as many as the process may
    use CPUs; beside a GPU one in eight is left free), ``decode`` how one file is decoded (auto, segments, frame,
    linear). ``nvtx`` marks what the threads do for Nsight Systems, as ranges named ``framepipe.…``; it needs CuPy.
    ``pin_stacks`` puts into the report where in the code memory was page-locked, for some 20 µs an allocation.
    ``guard`` watches memory while it runs and acts by its options: True, the ``guard:`` block as a mapping, or
    `GuardOptions`; ``on_guard`` gets every decision as a `framepipe.guard.monitor.Record`, on a thread of the pipeline,
    and what it raises ends the run.
    What needs more memory than is measured free is not begun, unless ``check_memory`` is False.

    Raises `ConfigError` where the parts do not fit, before anything is opened.
    """

    def __init__(
        self,
        sources: Sequence[Source | str | os.PathLike[str]],
        stages: Sequence[Stage | str] = (),
        sinks: Sequence[Sink | str | Callable[[Frame], Any]] = (),
        *,
        device: str = "auto",
        device_memory: int | str | None = None,
        staging: str | Mapping[str, Any] | StagingOptions = "auto",
        threads: int | None = None,
        decode: Literal["auto", "segments", "frame", "linear"] = "auto",
        overwrite: bool = False,
        queue: int = 4,
        ahead_bytes: int | None = None,
        name: str | None = None,
        nvtx: bool = False,
        guard: bool | Mapping[str, Any] | GuardOptions | None = None,
        on_guard: Callable[[Record], Any] | None = None,
        pin_stacks: bool = False,
        check_memory: bool = True,
    ) -> None:
        self.name = name or f"framepipe-{next(_numbers)}"
        self.report: RunReport | None = None
        self._sources = [parts.make_source(source) for source in sources]
        if not self._sources:
            raise ConfigError("a pipeline needs at least one source")
        self._stages = [parts.make_stage(stage) for stage in stages]
        self._sinks: list[Sink] = [parts.make_sink(sink) for sink in sinks]
        self._device = select.choose(device)  # an unknown or absent one is a mistake now, not at the first frame
        self._device_memory = parts.make_device_memory(device_memory)
        self._options = parts.make_options(staging)
        parts.check_staging(self._options, self._device.kind, self._stages, self._sinks)
        self._threads = parts.decode_threads(self._device.kind, len(self._sources)) if threads is None else threads
        if self._threads < 1:
            raise ConfigError(f"threads is {self._threads}; it must be at least 1")
        self._guard = make_guard(guard)
        if on_guard is not None and self._guard is None:
            raise ConfigError("on_guard is given and no guard; give guard=True, or its options")
        self._on_guard = on_guard
        self._decode = decode
        self._overwrite = overwrite
        self._queue = queue
        self._check_memory = check_memory
        self._ahead = ahead_bytes if ahead_bytes is not None else parts.ahead_nbytes(self._threads)
        self._engine: Engine | None = None
        self._feeds: list[Feed] = []
        self._infos: dict[str, SourceInfo] = {}
        self._summary: Summary | None = None
        self._snapshots = Snapshots()
        self._pin_stacks = pin_stacks
        self._tracer = tracing.nvtx() if nvtx else tracing.OFF
        self._tell: Callable[[str], None] = _log.info
        self._stopped = False
        self._closed = False
        self._iterating = False
        self._lock = threading.RLock()  # guards starting and _closed, _iterating and report; never needed to stop

    # -- running ------------------------------------------------------------------------------------------------

    def run(
        self,
        progress: Callable[[Statistics], None] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> RunReport:
        """Run to the end and return the report.

        ``progress`` is called about four times a second, ``tell`` with a line of text where something takes long
        before the first frame (by default the logger ``framepipe`` hears of it, at INFO) and with each decision of a
        guard (which the logger ``framepipe.guard`` hears of in any case); both in this thread. Raises
        the first error of a stage, sink or the machine; a source that fails is only in the report, unless nothing was
        delivered at all.
        """
        self._tell = tell or self._tell
        engine = self._start(iterating=False)
        try:
            last = 0.0
            while engine is not None and not engine.finished.wait(_SLICE_S):
                now = time.monotonic()
                if progress is not None and now - last >= 0.25:
                    last = now
                    progress(self.statistics())
                engine.pass_on(tell)
            if progress is not None:
                progress(self.statistics())
            if engine is not None:
                engine.pass_on(tell)
        except BaseException:
            self.close()
            raise
        return self._result()

    def stop(self) -> None:
        """End soon: what is in flight is delivered, the rest dropped. Any thread, signal handlers, any time."""
        # No lock: a signal handler must not wait for whoever holds it. Starting sets the engine and then looks whether
        # it was stopped, this does it the other way round, so one of them sees the other.
        self._stopped = True
        engine = self._engine
        if engine is not None:
            engine.stop()

    def close(self) -> None:
        """Stop, wait for every thread, and give everything back. Idempotent.

        Raises `FramepipeError` when called from a callback, sink or stage: those run on threads that it waits for.
        """
        with self._lock:  # another thread may be starting it
            engine = self._engine
            if engine is not None and threading.current_thread() in engine.members:
                raise FramepipeError(
                    "close() was called from inside a stage, sink or callback, on a thread of this pipeline that it "
                    "would wait for; call stop() there, and close() after run() or the loop has returned"
                )
            self._closed = self._stopped = True
        if engine is not None:
            self.stop()
            while not engine.finished.wait(_SLICE_S):
                pass
            engine.join()
            self._conclude(engine)

    def statistics(self) -> Statistics:
        """A snapshot of the run so far. Any thread."""
        return self._snapshots.take(self._engine, self._feeds)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- iterating ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Frame]:
        self._start_iterating()
        return self

    def __next__(self) -> Frame:
        engine = self._start_iterating()
        if engine is None:
            raise StopIteration
        delivery = engine.delivery
        assert delivery is not None
        while True:
            try:
                frame = delivery.take(_SLICE_S)
            except Empty:
                continue  # and look for signals in between
            if frame is None:
                self._result()
                raise StopIteration
            return frame

    def __aiter__(self) -> AsyncIterator[Frame]:
        self._start_iterating()
        return self

    async def __anext__(self) -> Frame:
        try:
            frame = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self.stop()
            raise
        if frame is None:
            raise StopAsyncIteration
        return frame

    def _start_iterating(self) -> Engine | None:
        with self._lock:
            if self._iterating:
                return self._engine
            engine = self._start(iterating=True)
            self._iterating = True
            return engine

    # -- opening ------------------------------------------------------------------------------------------------

    def _start(self, *, iterating: bool) -> Engine | None:
        with self._lock:
            if self._closed:
                raise ClosedError("this pipeline is closed; make a new one")
            if self._engine is not None or self.report is not None:
                raise ClosedError("this pipeline has run already; make a new one for another run")
            if self._stopped:
                self.report = RunReport(exit="stopped", fps=None)
                return None
            engine = self._open(iterating)
            self._engine = engine
            alive.watch(self, engine, self.name)
            if self._stopped:  # meanwhile: see `stop`
                engine.stop()
            engine.start()
            return engine

    def _open(self, iterating: bool) -> Engine:
        """Plan everything, then open in order; what was opened is closed again if something fails."""
        self._feeds = parts.make_feeds(self._sources)
        self._infos = {feed.name: feed.info for feed in self._feeds}
        wanted = {name for sink in self._sinks for name in sink.reads}
        stages = chain.prepare(
            self._stages, wanted | ({"image"} if iterating and not self._stages else set()), parts.make_rgb
        )
        self._check_outputs()
        holdings = Holdings(self._device.kind)
        device = self._device.make()
        device.ledger.stacks = self._pin_stacks
        opened: list[Callable[[], None]] = [device.close]
        try:
            if self._device_memory is not None:
                device.limit_memory(self._device_memory)
            device.prepare(self._tell)
            options = self._options
            if options.strategy == "auto":
                options = replace(options, strategy=device.default_staging)
            slots = budget.slots(options, self._threads)
            stager = registry.find("staging", options.strategy)()
            stager.copy_threads = options.copy_threads
            stager.timings = {what: [] for what in TIMINGS} if options.measure else None
            stager.open(device, slots, options.batch, options.depth)
            opened.append(stager.close)
            for stage in stages:
                with device.bound():
                    stage.open(device)
                opened.append(stage.close)
            if self._check_memory:
                setup = parts.make_setup(device, options, self._threads, self._sinks, self._queue if iterating else 0)
                refuse_too_much(device, setup, stages, None if iterating else wanted, self._feeds)
            context = SinkContext(self._infos, self._overwrite, device=device)
            for sink in self._sinks:
                sink.open(context)
                opened.append(sink.close)
            pool = DecodePool(
                self._feeds,
                threads=self._threads,
                decode=self._decode,
                ahead_nbytes=self._ahead,
                min_queue=max(2, options.batch),
                name=self.name,
                tracer=self._tracer,
            )
            engine = Engine(
                device=device,
                holdings=holdings,
                pool=pool,
                stager=stager,
                options=options,
                slots=slots,
                stages=stages,
                sinks=self._sinks,
                context=context,
                wanted=None if iterating else wanted,
                delivery=Delivery(self._queue, device) if iterating else None,
                name=self.name,
                tracer=self._tracer,
            )
            if self._guard is not None:
                guarding.attach(self._guard, engine, self._on_guard)
        except BaseException as error:
            for close in reversed(opened):
                try:
                    close()
                except Exception as later:
                    error.add_note(f"then: {type(later).__name__}: {later}")
            raise
        self._summary = Summary(why=self._device.why, strategy=options.strategy)
        return engine

    def _check_outputs(self) -> None:
        names = [feed.name for feed in self._feeds]
        paths = [path for sink in self._sinks for path in sink.paths(names)]
        paths += [self._guard.file] if self._guard and self._guard.file else []
        check_outputs(paths, self._overwrite, [info.path for info in self._infos.values()])

    # -- ending -------------------------------------------------------------------------------------------------

    def _result(self) -> RunReport:
        """The report of an ended run, or its error."""
        engine = self._engine
        if engine is None:
            assert self.report is not None
            return self.report
        engine.join()
        report = self._conclude(engine)
        if engine.error is not None:
            raise engine.error
        if report.exit == "failed":
            for feed in self._feeds:
                if feed.error is not None:
                    raise feed.error
            raise FramepipeError(report.error or "nothing was delivered")
        return report

    def _conclude(self, engine: Engine) -> RunReport:
        with self._lock:
            if self.report is None and engine.abandoned:
                self.report = RunReport(exit="failed", error=str(engine.error), fps=None)
            if self.report is None:
                assert self._summary is not None
                if engine.delivery is not None:
                    engine.delivery.drain()
                self.report = self._summary.report(engine, self._feeds, self._stopped or engine.stopping)
            return self.report


def open(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source],
    *,
    device: str = "auto",
    stages: Sequence[Stage | str] | None = None,
    staging: str | Mapping[str, Any] | StagingOptions = "auto",
    accuracy: Literal["exact", "fast"] | None = None,
    tonemap: Literal["hable", "reinhard", "none"] = "none",
    **options: Any,
) -> Pipeline:
    """The frames of one or several inputs: ``with framepipe.open("clip.mp4") as frames: for frame in frames: …``.

    Without ``stages`` every ``frame.image`` is the upright picture as RGB uint8 (H, W, 3) on the device, converted
    with ``accuracy`` (``exact`` is within 1 code of the standard's formula, ``fast`` within 3; by default fast on
    the CPU), HDR by the curve ``tonemap``. ``start``, ``end``, ``every``, ``fps``, ``loop``, ``stream`` and the like go
    to each source given by its name; everything else to `Pipeline`.
    """
    from framepipe.sources.file import File
    from framepipe.stages.rgb import Rgb

    given = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    fields = set(File.__dataclass_fields__) - {"uri", "name", "decode"}
    for_source = {key: options.pop(key) for key in list(options) if key in fields}
    sources = [s if isinstance(s, Source) else replace(parts.make_source(s), **for_source) for s in given]
    if stages is None:
        stages = [Rgb(accuracy=accuracy, tonemap=tonemap)]
    elif accuracy is not None or tonemap != "none":
        name = "tonemap" if accuracy is None else "accuracy"
        raise ConfigError(f"{name} goes with the default stages; give it to your own rgb or tensor stage instead")
    return Pipeline(sources, stages, device=device, staging=staging, **options)
