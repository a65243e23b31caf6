"""The stages of a pipeline in order: what each reads and writes, and their plan for one spec."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from framepipe.errors import ConfigError, DeviceError, FramepipeError, StageError
from framepipe.frame import PICTURE, Batch, FrameSpec, Item
from framepipe.stage import ArraySpec, Flow, Stage
from framepipe.tracing import OFF, Tracer

if TYPE_CHECKING:
    from framepipe.device.base import Device, Stream


def prepare(stages: Sequence[Stage], wanted: Iterable[str], make_rgb: Callable[[], Stage]) -> list[Stage]:
    """The stages with ids, and an `rgb` stage put before the first reader of an image that nobody makes.

    ``wanted`` is what sinks and consumers read. Raises `ConfigError` where a stage reads what no earlier one writes.
    """
    stages = list(stages)
    wanted = set(wanted)
    if not any("image" in stage.writes and "image" not in stage.reads for stage in stages):
        at = next((i for i, stage in enumerate(stages) if "image" in stage.reads), None)
        if at is None and "image" in wanted:
            at = next((i for i, stage in enumerate(stages) if "meta" in stage.reads), len(stages))
        if at is not None:
            stages.insert(at, make_rgb())
    _name(stages)
    made = {"planes", "meta"}
    late: set[str] = set()
    for stage in stages:
        missing = sorted(stage.reads - made)
        if missing:
            raise ConfigError(
                f"stage {stage.id!r} reads {', '.join(missing)}, which no stage before it writes",
                stage=stage.id,
            )
        if is_late(stage, late):
            if "planes" in stage.reads:
                raise ConfigError(
                    f"stage {stage.id!r} reads planes, which are gone by the time its other inputs are there",
                    stage=stage.id,
                )
            late |= stage.writes
        made |= stage.writes
    return stages


def is_late(stage: Stage, late: set[str]) -> bool:
    """Whether a stage must wait for `Stage.collect` of others: it reads meta, or what such a stage wrote."""
    return "meta" in stage.reads or bool(stage.reads & (late - {"meta"}))


def _name(stages: Sequence[Stage]) -> None:
    taken = {stage.id for stage in stages if stage.id}
    if PICTURE in taken:
        raise ConfigError(f"a stage's id may not be {PICTURE!r}: so meta calls what is known of the picture itself")
    taken.add(PICTURE)
    for stage in stages:
        if not stage.id:
            base = stage.type_name or type(stage).__name__.lower()
            name, number = base, 2
            while name in taken:
                name, number = f"{base}-{number}", number + 1
            stage.id = name
            taken.add(name)


@dataclass(slots=True)
class Link:
    """One stage in a chain planned for a spec."""

    stage: Stage
    outputs: dict[str, ArraySpec]
    late: bool
    collects: bool
    launch: Callable[[Batch], None]
    collect: Callable[[Batch], None]
    drop: list[str] = field(default_factory=list)
    """Arrays that nobody reads after this stage."""

    def outs(self, device: Device, n: int, stream: Stream, batch: int = 1) -> dict[str, Any]:
        """Memory for what the stage writes anew: a whole ``batch``'s, so that a partial one of ``n`` needs no other."""
        if self.stage.allocates:
            return {}
        room = max(n, batch)
        made = {name: device.empty((room, *a.shape), a.dtype, stream) for name, a in self.outputs.items()}
        return made if room == n else {name: array[:n] for name, array in made.items()}

    def run(self, batch: Batch, outs: dict[str, Any], stream: Any) -> None:
        """Launch on a batch whose earlier stages were launched."""
        batch.out, batch.stream = outs, stream
        try:
            self.launch(batch)
        except FramepipeError as error:
            if isinstance(error, StageError) or "stage" in error.where:
                raise
            raise stage_error(self.stage, batch, error) from error
        except Exception as error:
            raise stage_error(self.stage, batch, error) from error
        batch.arrays.update(batch.out)
        batch.out = {}
        for name in self.drop:
            batch.arrays.pop(name, None)


class Chain:
    """The stages planned for one spec: ``early`` run on the compute stream, ``late`` behind their elders' collect."""

    def __init__(self, stages: Sequence[Stage], spec: FrameSpec, wanted: set[str] | None, tracer: Tracer = OFF) -> None:
        self.spec = spec
        self.links: list[Link] = []
        flow = Flow(spec)
        late: set[str] = set()
        for stage in stages:
            try:
                after = stage.plan(flow)
            except FramepipeError:
                raise
            except Exception as error:
                raise StageError(
                    f"stage {stage.id!r} cannot be planned for {describe(spec)}: {error}", stage=stage.id
                ) from error
            outputs = {n: a for n, a in after.arrays.items() if a is not flow.arrays.get(n)}
            behind = is_late(stage, late)
            if behind:
                late |= stage.writes
            self.links.append(
                Link(
                    stage,
                    outputs,
                    behind,
                    type(stage).collect is not Stage.collect,
                    tracer.wrap(f"framepipe.launch {stage.id}", stage.launch),
                    tracer.wrap(f"framepipe.collect {stage.id}", stage.collect),
                )
            )
            flow = after
        self.flow = flow
        public = {name for name in flow.arrays if "." not in name}
        self.kept = public if wanted is None else public & wanted
        self.pixel_aspect = self._pixel_aspect()
        self._mark_drops()
        self.early = [link for link in self.links if not link.late]
        self.late = [link for link in self.links if link.late]
        self.late_writes = {name for link in self.late for name in link.stage.writes}
        readers = [i for i, link in enumerate(self.early) if "planes" in link.stage.reads]
        self.last_reader = readers[-1] if readers else -1

    def _pixel_aspect(self) -> Fraction:
        """That of the image: as the source says where the picture kept its proportions, else taken to be square."""
        image = self.flow.arrays.get("image")
        if image is None or abs(image.to_source.scale_x / image.to_source.scale_y - 1) > 0.02:  # beyond rounding
            return Fraction(1)
        return Fraction(*self.spec.upright_aspect)

    def _mark_drops(self) -> None:
        """An array goes after the last stage that reads it, unless it is kept or has to be read back."""
        order = [link for link in self.links if not link.late] + [link for link in self.links if link.late]
        names = {name for link in order for name in link.outputs}
        back = {name for link in order for name in link.stage.readback}
        for name in names - self.kept - back:
            touching = [link for link in order if name in link.stage.reads or name in link.outputs]
            touching[-1].drop.append(name)

    def small(self, *, late: bool) -> list[str]:
        """Names of the arrays to read back for collect."""
        return [name for link in self.links if link.late == late for name in link.stage.readback]


class Chains:
    """Chains by spec. The first spec gets the stages themselves, each further one a copy of them."""

    def __init__(self, stages: Sequence[Stage], wanted: set[str] | None, tracer: Tracer = OFF) -> None:
        self.stages = list(stages)
        self._tracer = tracer
        self._wanted = wanted
        self._chains: dict[FrameSpec, Chain] = {}
        self._spec_of: dict[str, FrameSpec] = {}

    def get(self, spec: FrameSpec) -> tuple[Chain, bool]:
        """The chain for ``spec``, and whether it is new."""
        chain = self._chains.get(spec)
        if chain is not None:
            return chain, False
        stages = self.stages if not self._chains else [copy.copy(stage) for stage in self.stages]
        chain = self._chains[spec] = Chain(stages, spec, self._wanted, self._tracer)
        return chain, True

    @property
    def in_use(self) -> list[Chain]:
        """The chains for what sources had last."""
        return [self._chains[spec] for spec in set(self._spec_of.values())]

    def note(self, source: str, spec: FrameSpec) -> None:
        """Remember that ``source`` now has ``spec``; on a change, but of its pixels' shape, its state is dropped."""
        before = self._spec_of.get(source)
        if before is spec:
            return
        self._spec_of[source] = spec
        if before is not None and not before.same_pictures(spec):
            for link in self._chains[spec].links:
                link.stage.reset(source)


def stage_error(stage: Stage, batch: Batch, error: BaseException) -> StageError:
    """The error to raise for one that a stage raised: it names stage, source, index and pts."""
    item = batch.items[0]
    device = getattr(stage, "device", None)  # a stage with an `open` of its own may not have it
    told = error if device is None else device.explain(error)
    size = f" (in batches of {len(batch)})" if isinstance(told, MemoryError) else ""
    return StageError(
        f"stage {stage.id!r} failed at {_frames(batch.items)}: {type(told).__name__}: {told}{size}",
        stage=stage.id,
        source=item.source,
        index=item.index,
        pts=item.pts,
    )


def locate(error: BaseException, items: Sequence[Item], chain: Chain | None) -> None:
    """Add to a device's error that names no place what is known of it: the batch it came with, and whose work it was.

    A GPU tells late, so any stage of the chain may be the cause. With only one it is taken to be that one.
    """
    if not isinstance(error, DeviceError) or error.where:
        return
    late = chain is not None and type(error) is DeviceError  # its children are raised where it happens
    stages = [link.stage.id for link in chain.links] if chain is not None and late else []
    item = items[0]
    error.where.update(source=item.source, index=item.index, **({"stage": stages[0]} if len(stages) == 1 else {}))
    if item.pts is not None:
        error.where["pts"] = item.pts
    behind = f" behind stage{'s' if len(stages) > 1 else ''} {', '.join(map(repr, stages))}" if stages else ""
    error.args = (f"the device failed at {_frames(items)}{behind}: {error}",)


def _frames(items: Sequence[Item]) -> str:
    more = f" and {len(items) - 1} more" if len(items) > 1 else ""
    return f"frame {items[0].index} of {items[0].source!r}{more}"


def describe(spec: FrameSpec) -> str:
    """A spec in a few words."""
    return f"{spec.width}x{spec.height} {spec.pix_fmt}"
