"""``framepipe list``: names, and the first line of what they say of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from framepipe import registry
from framepipe.device.select import choose
from framepipe.errors import ConfigError

DEVICES = {
    "auto": "The GPU where there is one that works, the CPU otherwise.",
    "cpu": "NumPy on this machine's processor.",
    "cuda": "The first NVIDIA GPU, through CuPy; cuda:N is another one.",
    "simulated": "A GPU that is not there: checks the order of every access and raises where none is given.",
}
KINDS = ("stages", "sources", "sinks", "staging", "devices")


def lines(kind: str | None) -> Iterator[str]:
    """The lines of one kind, or of all kinds under their names."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"unknown kind {kind!r}{registry.did_you_mean(kind, KINDS)}")
    for each in (kind,) if kind else KINDS:
        if not kind:
            yield f"{each}:"
        found = DEVICES if each == "devices" else {name: _first_line(each, name) for name in registry.names(each)}
        width = max(map(len, found), default=0)
        for name, text in found.items():
            yield f"{'' if kind else '  '}{name:{width}}  {text}".rstrip()


def _first_line(kind: str, name: str) -> str:
    try:
        cls = registry.find(kind, name)
    except Exception as error:  # whatever the module of somebody else raises
        return f"(cannot be imported: {type(error).__name__}: {error})"
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
    missing = cls.missing(choose("auto").kind) if kind == "staging" else None
    return f"{text} (Not here: {missing}.)" if missing else text
