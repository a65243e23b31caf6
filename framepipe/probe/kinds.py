"""The kinds of memory that are probed, as the parent knows them without CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framepipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to get memory: ``call`` is what is called; ``host`` and ``device`` say which memory it takes."""

    name: str
    call: str
    cuda: bool = False
    host: bool = True
    device: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("control", "nothing is allocated", host=False),
        Kind("default", "cudaHostAlloc, flags 0", cuda=True),
        Kind("write_combined", "cudaHostAlloc, cudaHostAllocWriteCombined", cuda=True),
        Kind("mapped", "cudaHostAlloc, cudaHostAllocMapped", cuda=True),
        Kind("portable", "cudaHostAlloc, cudaHostAllocPortable", cuda=True),
        Kind("registered", "an anonymous mapping, every page touched, then cudaHostRegister", cuda=True),
        Kind("device", "cudaMalloc", cuda=True, host=False, device=True),
        Kind("pageable", "an anonymous mapping, every page touched"),
        Kind("mlock", "an anonymous mapping, then mlock"),
    )
}
"""All kinds by name, in the order in which they are probed."""


def chosen(names: Sequence[str] | None, allowed: Sequence[str], default: Sequence[str]) -> list[str]:
    """``names`` without repetition, or ``default``. Raises `ConfigError` for one that is not among ``allowed``."""
    wanted = list(dict.fromkeys(default if names is None else names))
    unknown = [name for name in wanted if name not in allowed]
    if unknown:
        raise ConfigError(f"there is no kind {', '.join(map(repr, unknown))}; there are {', '.join(allowed)}")
    return wanted
