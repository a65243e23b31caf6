"""The parity gate: every output of a few pictures as hashes, made in a child, and what they say."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from framepipe.frame import PICTURE, Batch, Frame, FrameSpec, frame_planes
from framepipe.stage import ArraySpec, Flow, Stage

PACKED = "bench_planes"


@dataclass(kw_only=True)
class Packed(Stage):
    """Puts the rows of all planes, as they arrived on the device, one behind another into a tensor."""

    reads = frozenset({"planes"})
    writes = frozenset({PACKED})

    def plan(self, flow: Flow) -> Flow:
        spec = flow.spec
        nbytes = sum(plane.height * plane.row_samples for plane in spec.planes) * spec.format.itemsize
        return flow.put(PACKED, ArraySpec((nbytes,)))

    def launch(self, batch: Batch) -> None:
        assert batch.planes is not None
        for i, out in enumerate(batch.out[PACKED]):
            at = 0
            for plane in batch.planes.picture(i):
                end = at + plane.size * plane.dtype.itemsize
                out[at:end].view(plane.dtype).reshape(plane.shape)[...] = plane
                at = end


class Hashes:
    """Takes frames as a sink's callback does; ``of`` has one hash for each, in the order of source and index."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[tuple[str, int], str] = {}

    def __call__(self, frame: Frame) -> None:
        if frame.index < self._limit:
            self._seen[frame.source, frame.index] = _hash(frame)

    @property
    def of(self) -> list[str]:
        """The hashes so far."""
        return [self._seen[key] for key in sorted(self._seen)]


def _hash(frame: Frame) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(frame.tensors.items()):
        digest.update(name.encode())
        digest.update(np.asarray(array).tobytes())
    if frame.image is not None:
        digest.update(frame.numpy().tobytes())
    found = {stage: what for stage, what in frame.meta.items() if stage != PICTURE}
    if found:
        digest.update(json.dumps(found, sort_keys=True).encode())
    return digest.hexdigest()


def expected(frames: Sequence[Any]) -> list[str]:
    """The hashes that `Packed` must give, from the decoder's own frames, without any pipeline."""
    found = []
    for frame in frames:
        planes = frame_planes(frame, FrameSpec.of(frame))
        digest = hashlib.sha256(PACKED.encode())
        for plane in planes:
            digest.update(plane.tobytes())
        found.append(digest.hexdigest())
    return found


def together(hashes: Iterable[str]) -> str:
    """One hash of all of them."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def usual(delivered: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """The hashes that most strategies deliver, from pairs of strategy and hashes."""
    votes = {(strategy, tuple(found)) for strategy, found in delivered}
    ranked = Counter(found for _, found in sorted(votes))
    return list(ranked.most_common(1)[0][0])


def unlike(found: Sequence[str], wanted: Sequence[str]) -> str:
    """What is wrong with hashes that are not those wanted."""
    wrong = [number for number, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other]
    if wrong:
        return f"its outputs are wrong: {len(wrong)} of {len(wanted)} pictures differ, the first is picture {wrong[0]}"
    return f"its outputs are wrong: {len(found)} pictures came instead of {len(wanted)}"
