"""A pipeline's YAML with what the command line lays over it, and the account of every mistake in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from framepipe import _yaml, registry
from framepipe._parameters import nearest
from framepipe._yaml import Key, Place, Problem, path_text
from framepipe.redact import redact

_SECTIONS = ("sources", "stages", "sinks")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_ID = re.compile(r"[^\W\d][\w\-]*")


class Tree:
    """The values by key, where each was said, and the problems found so far.

    ``folder`` is where relative inputs of the file are looked for. What the command line says is laid
    over by `assign` and `set`: its place is the option, and its relative inputs belong to the working folder.
    """

    def __init__(self, document: _yaml.Document, folder: Path, env: Mapping[str, str]) -> None:
        self.data: Any = document.value
        self.folder = folder
        self.env = env
        self.problems: list[Problem] = []
        self._documents = [document]
        self._over: dict[Key, int] = {}  # keys said on the command line, and their documents
        self._faulty: set[Key] = set()
        self._take([problem._replace(key=self._shown(problem.key)) for problem in document.problems])

    def add(self, key: Key, what: str, shown: Key | None = None) -> None:
        """Note a mistake at ``key``, called ``shown`` in the message; one a parameter."""
        self._take([Problem(self.place(key), self._shown(key) if shown is None else shown, what)])

    def _refuse(self, label: str, what: str) -> None:
        self._take([Problem(Place(label), (), what)])

    def _shown(self, key: Key) -> Key:
        """What a message calls ``key``: the name of a component is left out before its parameters."""
        if len(key) < 4 or key[0] not in _SECTIONS or "uri" in (self._get(*key[:2]) or ()):
            return key
        return key[:2] + key[3:]

    def _take(self, problems: Sequence[Problem]) -> None:
        for place, key, what in problems:
            if key not in self._faulty or not key:
                self.problems.append(Problem(Place(redact(place.label), place.line), key, redact(what)))
            self._faulty.add(key)

    def place(self, key: Key) -> Place:
        """Where ``key``, or the nearest thing around it, was said."""
        document, inner = self._home(key)
        if inner == key and key not in document.places:
            within = next((over for over in self._over if over[: len(key)] == key), None)
            if within is not None:
                return self.place(within)
        while inner and inner not in document.places:
            inner = inner[:-1]
        return document.places[inner]

    def raw(self, key: Key) -> str | None:
        """The text at ``key`` before ``${…}`` in it was replaced, or None if there was none."""
        document, inner = self._home(key)
        return document.raw.get(inner)

    def from_command_line(self, key: Key) -> bool:
        """Whether ``key`` was said on the command line."""
        return self._home(key)[0] is not self._documents[0]

    def _home(self, key: Key) -> tuple[_yaml.Document, Key]:
        for cut in range(len(key), 0, -1):
            if key[:cut] in self._over:
                return self._documents[self._over[key[:cut]]], key[cut:]
        return self._documents[0], key

    def is_mapping(self, name: str) -> bool:
        """Whether the top-level ``name`` is written as a mapping."""
        return isinstance(self._get(name), dict)

    def set(self, assignment: str) -> None:
        """Apply ``path.to.key=value``; the value is YAML, stages and sinks are found by id or position."""
        label = f"--set {assignment}"
        path, equals, text = assignment.partition("=")
        steps = [int(step[1]) if step[1] else step[2] for step in _STEP.finditer(path.strip())]
        if not equals or not steps or _STEP.sub("", path.strip()).strip("."):
            self._refuse(label, "expected PATH.TO.KEY=VALUE")
            return
        # A lone dash is standard input or output, and the start of a list in YAML.
        document = _yaml.parse("'-'" if text.strip() == "-" else text, label, self.env, lines=False)
        key = self._locate(steps, label)
        if key is not None and not self.assign(key, document) and isinstance(self.data, dict):
            self._refuse(label, f"{path_text(tuple(steps[:-1]))} has no parameters to set")

    def assign(self, key: Key, document: _yaml.Document) -> bool:
        """Put what the command line says in the place of what is at ``key``; False if there can be nothing."""
        holder = self._holder(key)
        if holder is None:
            return False
        holder[key[-1]] = document.value
        for old in [old for old in self._over if old[: len(key)] == key]:
            del self._over[old]
        self._documents.append(document)
        self._over[key] = len(self._documents) - 1
        self._take([each._replace(key=self._shown(key + each.key)) for each in document.problems])
        return True

    def _holder(self, key: Key) -> Any:
        """The mapping or list that holds ``key``, made where nothing or a switch is; None where neither can be."""
        if self.data is None:
            self.data = {}
        at = self.data
        for step, after in pairwise(key):
            if not _holds(at, step):
                return None
            if isinstance(at, dict) and isinstance(at.get(step), bool | None) and isinstance(after, str):
                at[step] = {}
            at = at.get(step) if isinstance(at, dict) else at[step]
        return at if _holds(at, key[-1]) else None

    def _locate(self, steps: list[str | int], label: str) -> Key | None:
        """The key of a dotted path; entries on the way are written out as mappings, so that there is room."""
        top = steps[0]
        if top == "staging" and len(steps) > 1 and isinstance(self._get("staging"), str):
            self.data["staging"] = {"strategy": self.data["staging"]}
        if top not in _SECTIONS or len(steps) == 1:
            return tuple(steps)
        key = self._entry(str(top), steps[1], label)
        if key is not None and len(steps) == 2:
            self._refuse(label, f"say {top}.{steps[1]}.PARAMETER=… for one parameter, or {top}=[…] for all")
            return None
        return key and (*key, *steps[2:])

    def _get(self, *steps: str | int) -> Any:
        at: Any = self.data
        for step in steps:
            there = _holds(at, step) and (not isinstance(at, dict) or step in at)
            at = at[step] if there else None
        return at

    def _entry(self, section: str, wanted: str | int, label: str) -> Key | None:
        entries = self._get(section)
        entries = entries if isinstance(entries, list) else []
        found = ids(entries) if section != "sources" else [_source_name(entry) for entry in entries]
        if isinstance(wanted, str) and wanted.isdigit() and wanted not in found:
            wanted = int(wanted)
        index = wanted if isinstance(wanted, int) else found.index(wanted) if wanted in found else None
        if index is None or index >= len(entries):
            known = [name for name in found if name] or [f"[{i}]" for i in range(len(entries))]
            there = f"; there are {', '.join(known)}" if known else f"; there are no {section}"
            self._refuse(label, f"no {section.rstrip('s')} {wanted!r}{nearest(str(wanted), known) or there}")
            return None
        return self._parameters_of(section, index, entries)

    def _parameters_of(self, section: str, index: int, entries: list[Any]) -> Key:
        """Where the parameters of an entry are, after a bare name became a mapping."""
        entry = entries[index]
        if isinstance(entry, str):
            named = section != "sources" or self.is_registered_source(entry, (section, index))
            written: dict[str, Any] = {entry: {}} if named else {"uri": entry}
            entry = entries[index] = written
        if not isinstance(entry, dict) or (section == "sources" and "uri" in entry):
            return (section, index)
        name = next((key for key in entry if key != "id"), None)
        return (section, index) if name is None else (section, index, name)

    def base(self, key: Key) -> Path:
        """The folder that a relative input said at ``key`` belongs to."""
        return Path() if self.from_command_line(key) else self.folder

    def is_registered_source(self, name: str, key: Key) -> bool:
        """Whether a bare ``name`` is a kind of source; an existing file of that name wins."""
        return name in registry.names("sources") and not os.path.exists(self.base(key) / name)


def _holds(at: Any, step: str | int) -> bool:
    """Whether ``step`` can be a key of ``at``, or is an index of it."""
    if isinstance(step, int):
        return isinstance(at, list) and step < len(at)
    return isinstance(at, dict)


def _source_name(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return None
    inner = entry if "uri" in entry else next(iter(entry.values()), None)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def ids(entries: Sequence[Any]) -> list[str | None]:
    """The id of each stage or sink: what ``id:`` says, or its name, numbered from the second one on."""
    said = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
    taken = {each for each in said if isinstance(each, str)}
    out: list[str | None] = []
    for entry, own in zip(entries, said, strict=True):
        if not isinstance(own, str):
            own = _free(_name_of(entry), taken)
            taken.add(own or "")
        out.append(own)
    return out


def _name_of(entry: Any) -> str | None:
    name = next((key for key in entry if key != "id"), None) if isinstance(entry, dict) else entry
    return name.rpartition(":")[2] if isinstance(name, str) else None


def _free(name: str | None, taken: set[str]) -> str | None:
    if name is None:
        return None
    number, out = 1, name
    while out in taken:
        number += 1
        out = f"{name}-{number}"
    return out


def is_id(text: Any) -> bool:
    """Whether ``text`` can name a stage: a word of letters, digits, _ and -."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None
