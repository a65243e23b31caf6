"""What a pipeline will take of memory, beside what there is: worked out from the first picture of each source.

Nothing is run, page-locked or written. Every number says whether it is planned, measured now, or what a model or a rule
of thumb makes of it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from framepipe import budget, chain, limits, parts, preview, registry
from framepipe.budget import HOST, Knob, Need, Setup
from framepipe.chain import Chain
from framepipe.device import select
from framepipe.device.base import Device
from framepipe.errors import ConfigError, DeviceError, DeviceUnavailableError, FramepipeError
from framepipe.feed import Feed
from framepipe.frame import FrameSpec
from framepipe.limits import Limit
from framepipe.planned import KINDS, Plan, PlannedSource, RulesOfThumb
from framepipe.redact import redact
from framepipe.sink import Sink
from framepipe.source import Source
from framepipe.stage import Stage
from framepipe.stager import HostMemory, StagingOptions
from framepipe.telemetry.sensors import close_sensors, open_sensors

_MOST_PINS = 4096
"""Blocks that a model is asked to page-lock at most."""


def plan(
    sources: Sequence[Any],
    stages: Sequence[Any] = (),
    sinks: Sequence[Any] = (),
    *,
    device: str = "auto",
    device_memory: int | str | None = None,
    staging: str | Mapping[str, Any] | StagingOptions = "auto",
    threads: int | None = None,
    rules: RulesOfThumb | None = None,
    **_: Any,
) -> Plan:
    """The plan of a pipeline with these arguments, which are those of `framepipe.Pipeline`; others are ignored.

    A GPU that is not there, sources that cannot be opened and readings that nobody has are noted, and the rest is
    planned. Raises `ConfigError` for a pipeline that cannot be.
    """
    made = [parts.make_stage(stage) for stage in stages]
    outputs = [parts.make_sink(sink) for sink in sinks]
    options = parts.make_options(staging)
    place = _place(device)
    try:
        if not place.missing:
            parts.check_staging(options, place.kind, made, outputs)
        if options.strategy == "auto":
            options = replace(options, strategy=place.device.default_staging)
        wanted = {name for sink in outputs for name in sink.reads}
        prepared = chain.prepare(made, wanted, parts.make_rgb)
        workers = threads if threads is not None else parts.decode_threads(place.kind, len(sources))
        setup = parts.make_setup(place.device, options, workers, outputs)
        setup = replace(setup, deferred=place.kind == "simulated")
        memory = parts.make_device_memory(device_memory)
        planner = _Planner(place, setup, prepared, wanted, memory, rules or RulesOfThumb())
        planner.unplanned = _unplanned(place.kind, outputs)
        return planner.plan([parts.make_source(source) for source in sources])
    finally:
        place.device.close()


@dataclass(frozen=True)
class _Place:
    """Where it is to run; ``missing`` says why a GPU that was asked for cannot, and ``device`` only stands for it."""

    kind: str
    device: Device
    why: str
    missing: str = ""
    number: int = 0


def _place(name: str) -> _Place:
    from framepipe.device.simulated import SimulatedDevice

    try:
        choice = select.choose(name)
        return _Place(choice.kind, choice.make(), choice.why, number=choice.number)
    except (DeviceUnavailableError, DeviceError) as error:
        return _Place("cuda", SimulatedDevice(), "auto" if name == "auto" else "asked for", str(error))


def _unplanned(kind: str, sinks: Sequence[Sink]) -> list[str]:
    """What takes memory that nobody can tell beforehand."""
    found = ["what FFmpeg's decoders and encoders keep for themselves (host memory; decoding takes no video memory)"]
    on_gpu = sorted({codec for sink in sinks if (codec := str(getattr(sink, "codec", ""))).endswith("_nvenc")})
    found += [f"sessions of {codec}, one for each file that is written at a time (video memory)" for codec in on_gpu]
    return [*found, "CUDA's own context and kernels (video memory)"] if kind == "cuda" else found


class _Planner:
    """One plan in the making."""

    def __init__(
        self,
        place: _Place,
        setup: Setup,
        stages: list[Stage],
        wanted: set[str],
        memory: int | None,
        rules: RulesOfThumb,
    ) -> None:
        self.place, self.setup, self.stages, self.wanted = place, setup, stages, wanted
        self.memory, self.rules = memory, rules
        self.notes: list[str] = [place.missing] if place.missing else []
        self.unplanned: list[str] = []
        self.chains: dict[FrameSpec, Chain] = {}
        self.whole: list[int | None] = []
        """Bytes of each source's pictures together, where the container announces how many there are."""

    def plan(self, sources: list[Source]) -> Plan:
        opened: list[Callable[[], None]] = []
        try:
            self._open_stages(opened)
            found = [self._source(feed) for feed in parts.make_feeds(sources)]
        finally:
            for close in reversed(opened):
                with suppress(Exception):
                    close()
        return self._plan(found)

    def _plan(self, found: list[PlannedSource]) -> Plan:
        chains = list(self.chains.values())
        specs = [source.spec for source in found if source.spec is not None]
        counts = {spec: specs.count(spec) for spec in self.chains}
        needs = budget.needs(chains, self.setup, counts) if chains else []
        bounds = self._limits(needs)
        if chains and not self.setup.stager.holds_frames and self._host_memory(chains[0].spec) is None:
            self.notes.append(f"staging {self.setup.options.strategy} does not tell what it takes on the host")
        charged, refusal = _modelled(self.place.device, needs)
        largest = max((spec.nbytes for spec in self.chains), default=0)
        return Plan(
            device=self._device(),
            staging={
                "strategy": self.setup.options.strategy,
                "slots": self.setup.slots([spec.nbytes for spec in self.chains]) if chains else None,
                "depth": self.setup.options.depth,
                "batch": self.setup.options.batch,
            },
            sources=found,
            needs=[*needs, *charged, *self._ahead()] if chains else [],
            limits=bounds,
            knobs=[*budget.knobs(chains, self.setup, counts), *self._other_knobs(chains, counts)] if chains else [],
            rules=self.rules.of(needs, self.setup, largest) if chains else [],
            notes=self.notes,
            unplanned=self.unplanned,
            refusal=refusal,
        )

    def _host_memory(self, spec: FrameSpec) -> HostMemory | None:
        setup = self.setup
        return setup.stager.host_memory(spec, 1, setup.options.batch, host_shared=setup.host_shared)

    def _ahead(self) -> list[Need]:
        workers = self.setup.threads
        if workers == 1:
            return []  # nothing is decoded before its turn
        nbytes, what = parts.ahead_nbytes(workers), f"of {workers} decoding threads"
        known = [each for each in self.whole if each is not None]
        if len(known) == len(self.whole) and sum(known) < nbytes:
            nbytes, what = sum(known), "all pictures, which are few"
        return [Need("segments before their turn", "ahead", nbytes, nbytes, None, what, exact=False)]

    def _device(self) -> dict[str, Any]:
        device = self.place.device
        told = {"kind": self.place.kind, "name": None if self.place.missing else device.name, "why": self.place.why}
        model = getattr(device, "model", None)
        return told if model is None else {**told, "model": model.about()}

    def _open_stages(self, opened: list[Callable[[], None]]) -> None:
        for stage in self.stages:
            try:
                with self.place.device.bound():
                    stage.open(self.place.device)
            except Exception as error:
                told = f"stage {stage.id!r} cannot be opened to be planned: {error}"
                if not self.place.missing:
                    raise ConfigError(told) from error
                self.notes.append(told)  # it may be the GPU that it misses
            else:
                opened.append(stage.close)

    # -- sources ------------------------------------------------------------------------------------------------

    def _source(self, feed: Feed) -> PlannedSource:
        uri = redact(feed.info.uri)
        try:
            spec = preview.by_first_picture(feed)
            planned = self._chain(spec)
        except FramepipeError as error:
            return PlannedSource(feed.name, uri, error=redact(str(error)))
        alone = budget.needs([planned], self.setup, {spec: 1})
        self.whole.append(feed.expected and feed.expected * feed.loops_left * spec.nbytes)
        return PlannedSource(feed.name, uri, spec, {kind: budget.total(alone, kind) for kind in KINDS})

    def _chain(self, spec: FrameSpec) -> Chain:
        if spec not in self.chains:
            self.chains[spec] = self._planned(spec)
        return self.chains[spec]

    def _planned(self, spec: FrameSpec) -> Chain:
        return Chain([copy.copy(stage) for stage in self.stages], spec, self.wanted)

    # -- what there is ------------------------------------------------------------------------------------------

    def _limits(self, needs: Sequence[Need]) -> list[Limit]:
        found = limits.of_host(self.setup.host_kinds)
        if self.place.kind == "cuda":
            found += self._video_memory()
        else:
            found += limits.of_device(self.place.device)
        found += limits.of_locking(self.setup, needs)
        if self.memory is not None and not self.setup.host_shared:
            found.append(Limit("device_memory", self.memory, self.memory, ("device",), "set", "the pipeline itself"))
        return found

    def _video_memory(self) -> list[Limit]:
        if self.place.missing:
            reason = "there is no GPU that could be used"
            return [Limit("video memory", None, None, ("device",), "measured now", "cudaMemGetInfo", reason)]
        sensors = open_sensors(self.place.number, names=("nvml", "wddm"))
        try:
            return [*limits.of_device(self.place.device), *(row for each in sensors for row in limits.of_sensor(each))]
        finally:
            close_sensors(sensors)

    # -- beside it ----------------------------------------------------------------------------------------------

    def _other_knobs(self, chains: Sequence[Chain], counts: Mapping[FrameSpec, int]) -> Iterator[Knob]:
        now = budget.needs(chains, self.setup, counts)
        changes: list[tuple[str, Callable[[], list[Need]]]] = [
            ("pictures of half the width and height", lambda: self._smaller(counts))
        ]
        if self.setup.stager.pinned and not self.setup.host_shared:
            for name in ("pageable", "mapped"):
                if name != self.setup.options.strategy:
                    changes.append((f"staging: {name}", partial(self._staged, name, chains, counts)))
        for change, make in changes:
            with suppress(FramepipeError):  # a crop, say, that does not fit into smaller ones
                knob = Knob(change, now, make())
                if knob.saves("pinned") > 0 or knob.saves("device") > 0 or knob.saves(*HOST) > 0:
                    yield knob

    def _smaller(self, counts: Mapping[FrameSpec, int]) -> list[Need]:
        half: Counter[FrameSpec] = Counter()
        for spec, number in counts.items():
            half[replace(spec, width=max(2, spec.width // 2), height=max(2, spec.height // 2))] += number
        return budget.needs([self._planned(spec) for spec in half], self.setup, half)

    def _staged(self, name: str, chains: Sequence[Chain], counts: Mapping[FrameSpec, int]) -> list[Need]:
        options = replace(self.setup.options, strategy=name)
        return budget.needs(chains, replace(self.setup, options=options, stager=registry.find("staging", name)), counts)


def _modelled(device: Device, needs: Sequence[Need]) -> tuple[list[Need], str | None]:
    """What a memory model takes of video memory for what would be page-locked, and what it refuses."""
    model: Any = getattr(device, "model", None)
    if model is None:
        return [], None
    before, refusal = model.readings()["free"], None
    pins = [need.nbytes // need.alive for need in needs if need.kind == "pinned" for _ in range(need.alive)]
    try:
        for nbytes in pins[:_MOST_PINS]:
            model.pin(nbytes)
    except FramepipeError as error:
        refusal = str(error)
    charged = before - model.readings()["free"]
    what = f"by the model {model.name} ({model.ground})"
    rows = [Need("page-locked memory's part", "device", charged, charged, None, what, modelled=True)] if charged else []
    return rows, refusal
