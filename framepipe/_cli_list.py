"""``framepipe list``: names, and the first line of what they say of themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from framepipe import registry
from framepipe.device.select import choose
from framepipe.errors import ConfigError
from framepipe.memory_models import table

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
        found = _devices() if each == "devices" else {name: _first_line(each, name) for name in registry.names(each)}
        width = max(map(len, found), default=0)
        for name, text in found.items():
            yield f"{'' if kind else '  '}{name:{width}}  {text}".rstrip()


def _devices() -> dict[str, str]:
    models = {f"simulated:{name}": f"{_summary(table.find(name))} Keys: {_keys(name)}." for name in table.NAMES}
    return {**DEVICES, **models}


def _keys(name: str) -> str:
    return ", ".join(table.defaults(name))


def _summary(cls: type) -> str:
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


def _first_line(kind: str, name: str) -> str:
    try:
        cls = registry.find(kind, name)
    except Exception as error:  # whatever the module of somebody else raises
        return f"(cannot be imported: {type(error).__name__}: {error})"
    text = _summary(cls)
    missing = cls.missing(choose("auto").kind) if kind == "staging" else None
    return f"{text} (Not here: {missing}.)" if missing else text
