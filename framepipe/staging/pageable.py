"""Ordinary memory, allocated once; the driver stages the copy."""

from __future__ import annotations

from dataclasses import dataclass

from framepipe.registry import register
from framepipe.staging.pooled import Pooled


@register("pageable")
@dataclass(kw_only=True)
class Pageable(Pooled):
    """The ring without page-locking: no pinned byte, but the driver copies once more and the upload waits for it."""

    pinned = False
