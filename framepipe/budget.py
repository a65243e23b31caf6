"""How much memory a pipeline takes, worked out before it runs: by owner, in bytes, for the specs that come.

The same numbers decide: `slots` is what ``slots: auto`` means, `read_back` what the runner page-locks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from framepipe.chain import Chain, Link, describe
from framepipe.device.base import Device
from framepipe.frame import FrameSpec
from framepipe.ring import affordable
from framepipe.stage import ArraySpec
from framepipe.stager import Stager, StagingOptions
from framepipe.telemetry.base import SensorUnavailableError
from framepipe.telemetry.cgroup import CgroupMemory
from framepipe.tiers import COLD, HOT
from framepipe.units import format_bytes

LEAST_SLOTS = 2
"""With one alone, nothing would be filled while it is uploaded."""
HOST = ("pinned", "pageable", "decoder")
"""Kinds of memory that are the host's."""
_CONTAINER_SHARE = 4
"""The ring takes no more than this part of what a container may have, where nobody said how many slots."""
_POOL_UNIT = 512  # CuPy's pool of device memory counts in these


def fillers(options: StagingOptions, threads: int) -> int:
    """How many slots are being filled at a time, where ``threads`` decode."""
    return min(4, max(1, threads // 4)) if options.fillers == "auto" else options.fillers


def slots(options: StagingOptions, threads: int) -> int:
    """How many slots a ring has before it is known how large they are: one a batch in flight, one, and those filled."""
    return options.depth + 1 + fillers(options, threads) if options.slots == "auto" else options.slots


class RingLimit(NamedTuple):
    """How many bytes a ring should have at most, and ``why``."""

    nbytes: int
    why: str
    gives: str


def ring_limit(device: Device, stager: Stager | type[Stager]) -> RingLimit | None:
    """What bounds a ring whose slots nobody has counted: little memory to page-lock, or a container; None without."""
    if stager.holds_frames:
        return None
    limits = []
    if device.host_limit_nbytes is not None and stager.pinned:
        why = "this system (WSL 2) page-locks little memory"
        limits.append(RingLimit(device.host_limit_nbytes, why, "that it can be expected to give"))
    container = _container_limit()
    if container is not None:
        why = f"this container may have {format_bytes(container)} of memory"
        limits.append(RingLimit(container // _CONTAINER_SHARE, why, "that are the ring's share of it"))
    return min(limits, default=None)


def slots_within(limit: RingLimit | None, nbytes: int, wanted: int) -> int:
    """How many slots of ``nbytes`` stay of those ``wanted``; never fewer than `LEAST_SLOTS` are left."""
    return wanted if limit is None else min(wanted, max(LEAST_SLOTS, limit.nbytes // max(1, nbytes)))


def _container_limit() -> int | None:
    try:
        return CgroupMemory().read()["limit"]
    except (SensorUnavailableError, OSError, ValueError):
        return None


class BackBlocks(NamedTuple):
    """``blocks`` of ``nbytes`` for an array that is read back; ``beside``: on the runner, not the sink thread."""

    name: str
    nbytes: int
    blocks: int
    beside: bool


def read_back(chain: Chain, on_host: Collection[str], batch: int, flights: int) -> list[BackBlocks]:
    """What is page-locked for results, with up to ``flights`` batches in flight; ``on_host`` are those that sinks read.

    One block for each batch in flight and one with the sinks; two of what the sink thread itself reads back.
    """
    early = chain.small(late=False)
    wanted = sorted(set(on_host) & chain.kept)
    beside = early + [name for name in wanted if name not in {*chain.late_writes, *early}]
    names = list(dict.fromkeys([*beside, *wanted, *chain.small(late=True)]))
    found = []
    for name in names:
        nbytes = batch * nbytes_of(chain.flow.arrays[name])
        found.append(BackBlocks(name, nbytes, flights + 1 if name in beside else 2, name in beside))
    return found


def nbytes_of(array: ArraySpec) -> int:
    """Bytes of one picture's array."""
    return prod(array.shape) * np.dtype(array.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of one owner, in bytes, at most at a time.

    ``kind`` is that of the ledger (``pinned``, ``pageable``, ``device``), or ``decoder`` for FFmpeg's own frames
    and ``ahead`` for those that may be decoded early, which is no need but a bound. ``taken`` is
    what it takes of the system, more than ``nbytes`` where an allocator rounds up; None where that does not say.
    ``blocks`` are the allocations of a whole run, None where every batch makes one; ``alive`` of them are there at a
    time. ``exact`` is False for a bound, ``modelled`` means that a memory model says it, and ``tier`` is that of host
    memory (`framepipe.tiers`).
    """

    owner: str
    kind: str
    nbytes: int
    taken: int | None
    blocks: int | None
    what: str
    exact: bool = True
    alive: int = 1
    modelled: bool = False
    tier: str | None = None

    @property
    def weight(self) -> int:
        """What to reckon with."""
        return self.nbytes if self.taken is None else self.taken


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What decides how much memory is taken, but for the pictures themselves.

    ``host_shared`` is the device's; ``deferred`` where it runs nothing before it is waited for. ``on_host`` are the
    arrays that sinks read on the host, ``queue`` how many frames wait for somebody who iterates, 0 without one.
    """

    options: StagingOptions
    stager: type[Stager]
    threads: int
    host_shared: bool
    deferred: bool = False
    on_host: frozenset[str] = frozenset()
    queue: int = 0
    limit: RingLimit | None = None

    def slots(self, sizes: Collection[int]) -> int:
        """Slots of the ring, at most, for pictures of so many bytes; what small ones got is there for large ones."""
        options, number = self.options, slots(self.options, self.threads)
        if options.slots != "auto":
            return number
        if self.stager.holds_frames:
            return max(number, affordable(min(sizes) * options.batch))
        return slots_within(self.limit, max(sizes) * options.batch, number)

    def flights(self, sizes: Collection[int]) -> int:
        """The most batches in flight: one more than halves, or more where nothing is made for them beforehand."""
        number = self.options.depth + 1
        if self.stager.holds_frames and self.host_shared:
            return max(number, affordable(2 * min(sizes) * self.options.batch))
        return number

    @property
    def host_kinds(self) -> tuple[str, ...]:
        """The kinds of memory that are taken of the host: all of them where the device is simulated."""
        return (*HOST, "device") if self.deferred else HOST

    @cached_property
    def held(self) -> int:
        """Batches of which somebody who iterates may hold a frame."""
        return -(-self.queue // self.options.batch) + 1 if self.queue else 0


def needs(chains: Sequence[Chain], setup: Setup, sources: Mapping[FrameSpec, int]) -> list[Need]:
    """What a run takes, whose specs are those of ``chains``; ``sources`` says how many sources have each.

    Device memory and what is pageable is an upper bound, for pictures of all specs by turns; page-locked memory is
    exact for runs long enough to use every slot, and a bound too where results are of several sizes. Specs whose arrays
    are of the same sizes share them.
    """
    largest = max((chain.spec for chain in chains), key=lambda spec: spec.nbytes)
    pictures = [chain.spec.nbytes for chain in chains]
    found = [*_ring(largest, setup.slots(pictures), setup), *_halves(largest, setup)]
    groups: dict[Any, list[Chain]] = {}
    for chain in chains:
        groups.setdefault(sizes(chain), []).append(chain)
    flights = setup.flights(pictures)
    for alike in groups.values():
        words = _words(alike) if len(chains) > 1 else ""
        found += _outputs(alike[0], setup, flights, words)
        found += _states(alike, setup, sources, words)
        if not setup.host_shared:
            found += _backs(alike[0], setup, flights, words, exact=len(groups) == 1)
    return found


def sizes(chain: Chain) -> tuple[tuple[str, int], ...]:
    """Bytes of a picture's arrays; chains that have the same ones use each other's memory."""
    return tuple((name, nbytes_of(array)) for link in chain.links for name, array in link.outputs.items())


def _words(alike: Sequence[Chain]) -> str:
    more = f" and {len(alike) - 1} like it" if len(alike) > 1 else ""
    return f" ({describe(alike[0].spec)}{more})"


def total(found: Collection[Need], *kinds: str) -> int:
    """Bytes of these kinds that are to be reckoned with."""
    return sum(need.weight for need in found if need.kind in kinds)


def _ring(spec: FrameSpec, number: int, setup: Setup) -> Iterator[Need]:
    batch = setup.options.batch
    memory = setup.stager.host_memory(spec, number, batch, host_shared=setup.host_shared)
    words = f"{number} slots x {_pictures(batch)} x {format_bytes(spec.nbytes)}"
    if memory is None:
        if setup.stager.holds_frames:
            nbytes = number * batch * spec.nbytes
            yield Need("frames on their way", "decoder", nbytes, nbytes, None, words, exact=False)
        return
    blocks = None if memory.per_batch else memory.blocks
    taken = None if memory.taken is None else memory.blocks * memory.taken
    if memory.per_batch:
        words += ", made anew for every batch"
    # As the report's account of page-locked memory names it.
    owner = f"{'frame' if memory.per_batch else 'ring slab'} ({setup.options.strategy})"
    nbytes = memory.blocks * memory.nbytes
    yield Need(owner, memory.kind, nbytes, taken, blocks, words, alive=memory.blocks, tier=HOT)


def _halves(spec: FrameSpec, setup: Setup) -> Iterator[Need]:
    if setup.stager.has_halves(host_shared=setup.host_shared):
        depth, batch = setup.options.depth, setup.options.batch
        each = batch * spec.nbytes
        words = f"depth {depth} x {_pictures(batch)} x {format_bytes(spec.nbytes)}"
        yield Need("uploads in flight", "device", depth * each, depth * _rounded(each), depth, words)


def _outputs(chain: Chain, setup: Setup, flights: int, words: str) -> Iterator[Need]:
    kind = "pageable" if setup.host_shared else "device"
    for link, name, count in _lifetimes(chain, setup, flights):
        array, stage = link.outputs[name], link.stage.id
        each = setup.options.batch * nbytes_of(array)
        taken = each if setup.host_shared else _rounded(each)
        shape = "x".join(str(side) for side in array.shape)
        what = f"{count} x {_pictures(setup.options.batch)} x {shape} {array.dtype}"
        owner = f"stage {stage}: {name.removeprefix(f'{stage}.')}{words}"
        yield Need(owner, kind, count * each, count * taken, count, what, exact=False)


def _lifetimes(chain: Chain, setup: Setup, flights: int) -> Iterator[tuple[Link, str, int]]:
    """Each array that a stage writes anew, and how many batches have one at a time."""
    order = [*chain.early, *chain.late]
    for at, link in enumerate(order):
        for name in () if link.stage.allocates else link.outputs:
            anew = next((later for later in order[at + 1 :] if name in later.outputs), None)
            last = anew or next((later for later in order[at:] if name in later.drop), None)
            held = setup.held if last is None and name in chain.kept else 0
            if link.late:  # the sink thread's, which has one batch at a time
                count = 1 + held
            elif last is None and (name in chain.kept or setup.host_shared):
                count = flights + 1 + held  # one is with the sinks; what is read back is so where it is no copy
            elif last is not None and not last.late and not setup.deferred:
                count = 1  # gone once the stage behind it is launched, and used again in order
            else:
                count = flights
            yield link, name, count


def _states(alike: Sequence[Chain], setup: Setup, sources: Mapping[FrameSpec, int], words: str) -> Iterator[Need]:
    kind = "pageable" if setup.host_shared else "device"
    counts = [sources.get(chain.spec, 1) for chain in alike]
    number = sum(counts)
    for links in zip(*(chain.links for chain in alike), strict=True):
        each = [link.stage.device_nbytes(count) for link, count in zip(links, counts, strict=True)]
        if any(each):
            what = f"{number} source{'s' if number > 1 else ''}"
            owner = f"state of {links[0].stage.id}{words}"
            yield Need(owner, kind, sum(each), sum(map(_rounded, each)), None, what, exact=False)


def _backs(chain: Chain, setup: Setup, flights: int, words: str, *, exact: bool) -> Iterator[Need]:
    batch = setup.options.batch
    for block in read_back(chain, setup.on_host, batch, flights):
        number, nbytes = block.blocks, block.blocks * block.nbytes
        what = f"{number} x {_pictures(batch)} x {format_bytes(block.nbytes // batch)}"
        owner = f"read-back of {block.name}{words}"
        yield Need(owner, "pinned", nbytes, nbytes, number, what, exact=exact, alive=number, tier=COLD)


@dataclass(frozen=True, slots=True)
class Knob:
    """A ``change`` to a pipeline, and what it takes ``before`` and ``after`` it."""

    change: str
    before: Sequence[Need]
    after: Sequence[Need]

    def saves(self, *kinds: str) -> int:
        """Bytes of these kinds that it takes less."""
        return total(self.before, *kinds) - total(self.after, *kinds)


def knobs(chains: Sequence[Chain], setup: Setup, sources: Mapping[FrameSpec, int]) -> list[Knob]:
    """What changes to the ``staging:`` block would come to; those that save nothing are not there."""
    now = needs(chains, setup, sources)
    options = setup.options
    number = setup.slots([chain.spec.nbytes for chain in chains])
    changes: list[tuple[str, dict[str, Any]]] = []
    if number > LEAST_SLOTS and not setup.stager.holds_frames:
        changes.append((f"slots: {LEAST_SLOTS}", {"slots": LEAST_SLOTS}))
    if options.depth > 1:
        changes.append(("depth: 1", {"depth": 1}))
    for size in sorted({options.batch // 2, 1} - {0, options.batch}):
        changes.append((f"batch: {size}", {"batch": size}))
    found = []
    for change, values in changes:
        other = replace(setup, options=replace(options, **values))
        found.append(Knob(change, now, needs(chains, other, sources)))
    return [knob for knob in found if knob.saves(*HOST, "device") > 0]


def _pictures(batch: int) -> str:
    return "1 picture" if batch == 1 else f"{batch} pictures"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _POOL_UNIT) * _POOL_UNIT
