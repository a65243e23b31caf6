"""Whether a pipeline that is being opened fits into the memory there is, before anything large is made."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from framepipe import limits, preview
from framepipe.budget import Setup
from framepipe.chain import Chain
from framepipe.device.base import Device
from framepipe.errors import FramepipeError
from framepipe.feed import Feed
from framepipe.frame import FrameSpec
from framepipe.stage import Stage

_LOOKED_AT = 8
"""Headers that are read at most: a start must not wait for a folder of files."""


def refuse_too_much(
    device: Device, setup: Setup, stages: Sequence[Stage], wanted: set[str] | None, feeds: Sequence[Feed]
) -> None:
    """Raise `ConfigError` where the run would need more than is measured free, as far as headers tell.

    A header is read only where pictures of a usual size could be too much: for most pipelines this is arithmetic. What
    is not known beforehand, such as the pictures of an address, is not held against a run.
    """
    bounds = [*limits.of_host(setup.host_kinds), *limits.of_device(device)]
    if not limits.may_matter(setup, len(stages), bounds):
        return
    specs: dict[FrameSpec, int] = {}
    for feed in feeds[:_LOOKED_AT]:
        spec = preview.by_header(feed)
        if spec is not None:
            specs[spec] = specs.get(spec, 0) + 1
    try:
        chains = [Chain([copy.copy(stage) for stage in stages], spec, wanted) for spec in specs]
    except FramepipeError:
        return  # what cannot be planned is told when it is, with the source's name
    if chains:
        limits.refuse(chains, setup, specs, bounds)
