"""Whether a pipeline that is being opened fits into the memory there is, before anything large is made."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from framepipe import budget, limits, preview
from framepipe.budget import Setup
from framepipe.chain import Chain
from framepipe.device.base import Device
from framepipe.errors import FramepipeError
from framepipe.feed import Feed
from framepipe.frame import FrameSpec
from framepipe.limits import Limit
from framepipe.stage import Stage

_LOOKED_AT = 8
"""Headers that are read at most: a start must not wait for a folder of files."""
_LARGEST = FrameSpec(8192, 4320, "yuv420p10le")
"""Pictures that hardly any are larger than."""


def refuse_too_much(
    device: Device, setup: Setup, stages: Sequence[Stage], wanted: set[str] | None, feeds: Sequence[Feed]
) -> None:
    """Raise `ConfigError` where the run would need more than is measured free, as far as headers tell.

    A header is read only where pictures as large as there are could be too much: for most pipelines this is arithmetic.
    What is not known beforehand, such as the pictures of an address, is not held against a run.
    """
    bounds = [*limits.of_host(setup.host_kinds), *limits.of_device(device)]
    if not _may_matter(setup, stages, wanted, len(feeds), bounds):
        return
    specs: dict[FrameSpec, int] = {}
    for feed in feeds[:_LOOKED_AT]:
        spec = preview.by_header(feed)
        if spec is not None:
            specs[spec] = specs.get(spec, 0) + 1
    chains = [chain for spec in specs if (chain := _chain(stages, spec, wanted)) is not None]
    if chains:
        limits.refuse(chains, setup, specs, bounds)


def _may_matter(
    setup: Setup, stages: Sequence[Stage], wanted: set[str] | None, sources: int, bounds: Sequence[Limit]
) -> bool:
    chain = _chain(stages, _LARGEST, wanted)
    return chain is None or bool(limits.exceeded(budget.needs([chain], setup, {_LARGEST: sources}), bounds))


def _chain(stages: Sequence[Stage], spec: FrameSpec, wanted: set[str] | None) -> Chain | None:
    try:
        return Chain([copy.copy(stage) for stage in stages], spec, wanted)
    except FramepipeError:
        return None  # what cannot be planned is told when it is, with the source's name
