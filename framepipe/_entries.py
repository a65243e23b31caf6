"""Entries of ``sources``, ``stages`` and ``sinks`` to components; mistakes go into the `Tree`."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from framepipe import registry
from framepipe._parameters import Parameter, nearest, parameters, read
from framepipe._tree import Tree, ids, is_id
from framepipe._yaml import Key
from framepipe.errors import ConfigError
from framepipe.frame import PICTURE

_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SINGULAR = {"sources": "source", "stages": "stage", "sinks": "sink"}


@dataclass
class Entry:
    """One component as it is written: its registered ``name``, its parameters and the key of each.

    ``key`` is what messages call it, ``("stages", 1)``; the parameters may stand one level deeper.
    """

    kind: str
    name: str
    key: Key
    values: dict[str, Any]
    at: dict[str, Key]
    id: str | None = None


class Builder:
    """Makes components of one pipeline. ``allow_code`` lets ``module:Class`` import what it names."""

    def __init__(self, tree: Tree, allow_code: bool) -> None:
        self.tree = tree
        self.allow_code = allow_code

    def sources(self, entries: Any, defaults: dict[str, Any]) -> list[Any]:
        """The sources, each with those of ``defaults`` that it has parameters for and does not set itself."""
        found = [self._source(entry, ("sources", i)) for i, entry in self._list("sources", entries)]
        classes = [(entry, cls) for entry in found if entry and (cls := self._class(entry))]
        self._check_defaults(defaults, [cls for _, cls in classes])
        built = []
        for entry, cls in classes:
            for name in parameters(cls).keys() & defaults.keys() - entry.values.keys():
                entry.values[name] = defaults[name]
                entry.at[name] = ("source_defaults", name)
            built.append(self.build(entry, cls))
        self._check_names([entry for entry, _ in classes])
        return [source for source in built if source is not None]

    def components(self, section: str, entries: Any) -> list[Any]:
        """The stages or the sinks, each with its ``id``."""
        listed = self._list(section, entries)
        names = ids([entry for _, entry in listed])
        built = []
        for (i, item), name in zip(listed, names, strict=True):
            entry = self._named(section, item, (section, i))
            if entry is None:
                continue
            self._check_id(entry, item, names, i)
            cls = self._class(entry)
            component = cls and self.build(entry, cls)
            if component is not None:
                component.id = name
                built.append(component)
        return built

    def _list(self, section: str, entries: Any) -> list[tuple[int, Any]]:
        if entries is None:
            return []
        if not isinstance(entries, list):
            self.tree.add((section,), "expected a list: [ …, … ], or a line that begins with '- ' for each")
            return []
        return list(enumerate(entries))

    # -- what an entry says --

    def _source(self, item: Any, key: Key) -> Entry | None:
        if isinstance(item, str):
            if self.tree.is_registered_source(item, key):
                return Entry("sources", item, key, {}, {})
            return Entry("sources", "file", key, {"uri": item}, {"uri": key})
        if not isinstance(item, dict) or not item:
            self.tree.add(key, "expected a file, URL or pattern, {uri: …, …}, or the name of a kind of source")
            return None
        if "uri" not in item and len(item) == 1:
            (name, inner) = next(iter(item.items()))
            if isinstance(inner, dict | None) and not self._is_file_parameter(name):
                return self._named("sources", item, key)
        return Entry("sources", "file", key, dict(item), {name: (*key, name) for name in item})

    def _is_file_parameter(self, name: str) -> bool:
        try:
            return name in parameters(registry.find("sources", "file"))
        except ConfigError:
            return False

    def _named(self, section: str, item: Any, key: Key) -> Entry | None:
        what = _SINGULAR[section]
        if isinstance(item, str) and item:
            return Entry(section, item, key, {}, {})
        names = [name for name in item if name != "id"] if isinstance(item, dict) else []
        if not names:
            self.tree.add(key, f"expected the name of a {what}, or the name with its parameters below it")
            return None
        if len(names) > 1:
            beside = ", ".join(map(repr, names[1:]))
            self.tree.add(key, f"{beside} beside {names[0]!r}: indent parameters further than the {what}'s name")
            return None
        inner = item[names[0]]
        if not isinstance(inner, dict | None):
            said = f"expected the parameters of {names[0]!r}, each as 'name: value'{self._example(section, names[0])}"
            self.tree.add((*key, names[0]), said, key)
            return None
        at = {name: (*key, names[0], name) for name in inner or {}}
        return Entry(section, names[0], key, dict(inner or {}), at)

    @staticmethod
    def _example(section: str, name: Any) -> str:
        """Which parameter was meant, most likely: the first."""
        try:
            first = next(iter(parameters(registry.find(section, name))))
        except (ConfigError, StopIteration):
            return ""
        return f", such as {{{first}: …}}"

    # -- its class --

    def _class(self, entry: Entry) -> type[Any] | None:
        try:
            if _CODE.fullmatch(entry.name):
                return self._code(entry)
            return registry.find(entry.kind, entry.name)
        except ConfigError as error:
            known = registry.names(entry.kind)
            text = (
                nearest(entry.name, known)
                and f"unknown {_SINGULAR[entry.kind]} {entry.name!r}{nearest(entry.name, known)}"
            )
            self.tree.add(entry.key, text or str(error))
        except Exception as error:  # whatever the module of somebody else raises
            self.tree.add(entry.key, f"{entry.name!r} cannot be imported: {type(error).__name__}: {error}")
        return None

    def _code(self, entry: Entry) -> type[Any]:
        if not self.allow_code:
            raise ConfigError(
                f"{entry.name!r} is Python code to import; allow that with --allow-code (allow_code=True)"
            )
        module, _, name = entry.name.partition(":")
        cls = getattr(importlib.import_module(module), name, None)
        if not isinstance(cls, type) or getattr(cls, "kind", "") != entry.kind or not dataclasses.is_dataclass(cls):
            raise ConfigError(f"{entry.name!r} is no dataclass derived from framepipe.{_SINGULAR[entry.kind].title()}")
        return cls

    # -- its parameters --

    def build(self, entry: Entry, cls: type[Any]) -> Any:
        """An object of ``cls`` with the parameters of ``entry``, or None after noting what is wrong."""
        known = parameters(cls)
        before = len(self.tree.problems)
        unknown = [name for name in entry.values if name not in known]
        for name in unknown:
            self._unknown(entry, name, list(known))
        for name, parameter in known.items():
            misspelt = any(nearest(word, [name]) for word in unknown)
            if parameter.required and name not in entry.values and not misspelt:
                self.tree.add((*entry.key, name), f"missing; {entry.name!r} needs it")
        values = {name: self._value(entry, known[name]) for name in known if name in entry.values}
        if len(self.tree.problems) > before:
            return None
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            self._refused(entry, error)
        return None

    def _unknown(self, entry: Entry, name: str, known: list[str]) -> None:
        hint = nearest(name, known) or (f"; there are {', '.join(known)}" if known else f"; {entry.name!r} has none")
        if name == "id" and entry.kind != "sources":
            hint = f"; 'id' stands beside {entry.name!r}, not below it"
        self.tree.add(entry.at[name], f"unknown parameter{hint}", (*entry.key, name))

    def _value(self, entry: Entry, parameter: Parameter) -> Any:
        key = entry.at[parameter.name]
        shown = key if key[0] == "source_defaults" else (*entry.key, parameter.name)
        value, wrong = read(parameter, entry.values[parameter.name], lambda inner: self.tree.raw(key + inner))
        if not wrong and parameter.is_path:
            wrong = next(filter(None, (_odd_path(text, entry.kind) for text in _texts(value))), "")
            value = self._located(value, key) if entry.kind in ("sources", "stages") and not wrong else value
        if wrong:
            self.tree.add(key, wrong, shown)
        return value

    def _located(self, value: Any, key: Key) -> Any:
        """Relative inputs, a path or a list of them, put below the folder they belong to."""
        if isinstance(value, list | tuple):
            return type(value)(self._located(each, key) for each in value)
        text = str(value)
        base = self.tree.base(key)
        if not isinstance(value, str | Path) or base == Path() or text == "-" or _is_absolute(text):
            return value
        whole = os.path.join(base, text)
        if not os.path.exists(whole):
            if _is_url(text):
                return value
            if glob.has_magic(text):  # it must not begin to match in the folder's own name
                whole = os.path.join(glob.escape(str(base)), text)
        return type(value)(whole)

    def _refused(self, entry: Entry, error: Exception) -> None:
        """What the class itself says against its parameters, each at the parameter it begins with."""
        rest = []
        for problem in getattr(error, "problems", ()) or [str(error)]:
            text = problem.removeprefix(f"{entry.name}: ")
            name, _, what = text.partition(" ")
            if name in entry.at:
                self.tree.add(entry.at[name], what, (*entry.key, name))
            else:
                rest.append(text)
        if rest:
            self.tree.add(entry.key, "; ".join(rest))

    # -- what holds between entries --

    def _check_id(self, entry: Entry, item: Any, names: list[str | None], index: int) -> None:
        if not isinstance(item, dict) or "id" not in item:
            return
        key = (*entry.key, "id")
        if not is_id(item["id"]):
            self.tree.add(key, "expected a word of letters, digits, _ and -, beginning with a letter")
        elif item["id"] == PICTURE:
            self.tree.add(key, f"no stage may be called {PICTURE!r}: so meta calls what is known of the picture itself")
        elif item["id"] in names[:index]:
            first = f"{entry.key[0]}[{names.index(item['id'])}]"
            self.tree.add(key, f"the id {item['id']!r} is already that of {first}")

    def _check_names(self, entries: list[Entry]) -> None:
        seen: dict[str, Key] = {}
        for entry in entries:
            name = entry.values.get("name")
            if not isinstance(name, str) or entry.at["name"][0] == "source_defaults":
                continue
            if name in seen:
                first = f"{seen[name][0]}[{seen[name][1]}]"
                self.tree.add(entry.at["name"], f"{name!r} is already the name of {first}", (*entry.key, "name"))
            seen.setdefault(name, entry.key)

    def _check_defaults(self, defaults: dict[str, Any], classes: list[type[Any]]) -> None:
        with contextlib.suppress(ConfigError):
            classes = [*classes, registry.find("sources", "file")]
        known = {name for cls in classes for name in parameters(cls)}
        for name in defaults.keys() - known:
            self.tree.add(("source_defaults", name), f"unknown parameter{nearest(name, sorted(known))}")


def _texts(value: Any) -> list[str]:
    items = value if isinstance(value, list | tuple) else [value]
    return [str(item) for item in items if isinstance(item, str | Path)]


def _is_absolute(text: str) -> bool:
    return os.path.isabs(text) or PureWindowsPath(text).is_absolute()


def _is_url(text: str) -> bool:
    r"""Whether ``text`` begins with a scheme, ``C:`` being none; the caller knows of a file named so."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.\-]+:", text) is not None


def _odd_path(text: str, kind: str) -> str:
    """What is wrong with the text of a path, or ""."""
    if not text and kind == "sources":
        return "the name of an input is empty"
    odd = next((char for char in text if unicodedata.category(char) in ("Cc", "Zl", "Zp")), None)
    if odd is None:
        return ""
    return (
        f"the control character {odd!r} in a path; in double quotes YAML takes \\ and a letter for one: "
        r"write a Windows path in single quotes, 'C:\new\table.mp4'"
    )
