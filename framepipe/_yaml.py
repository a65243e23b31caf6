"""YAML text to plain values that remember where they stand.

Scalars follow YAML 1.2: only ``true`` and ``false`` are booleans, ``1e-3`` is a number, ``1:30`` and ``yes``
are text. Every mistake that can be told from the text alone is collected; a syntax error ends the reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.reader import Reader, ReaderError

Key = tuple[str | int, ...]
"""The way to a value from the top: ``("stages", 1, "resize", "width")``."""

_CORE = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", re.compile(r"null|Null|NULL|~|")),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    (
        "float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ),
)
_TOO_MANY = 100_000
"""Nodes after aliases are written out: more is an alias bomb, not a pipeline."""


class Place(NamedTuple):
    """Where something was said: a file and a line from 1, or a command-line option and line 0."""

    label: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


class Problem(NamedTuple):
    """One mistake: where, in which value (``()`` for the text as such), and what is wrong with it."""

    place: Place
    key: Key
    what: str

    def __str__(self) -> str:
        path = path_text(self.key)
        return f"{self.place}: {path}: {self.what}" if path else f"{self.place}: {self.what}"


@dataclass
class Document:
    """A text's ``value`` (None after a syntax error), the ``places`` of its parts, and its ``problems``.

    ``raw`` has the text of each string in which ``${…}`` was replaced: what came from outside is never shown.
    """

    value: Any = None
    places: dict[Key, Place] = field(default_factory=dict)
    raw: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def decode(data: bytes, label: str) -> str | Problem:
    """The text of a file that must be UTF-8, with or without a BOM."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Problem(Place(label, line), (), "not UTF-8 text; save the file as UTF-8")
    if odd := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        what = f"a control character ({odd.group()!r}) in the text; is this a YAML file, saved as UTF-8?"
        return Problem(Place(label, line), (), what)
    return text


def parse(text: str, label: str, env: Mapping[str, str], *, lines: bool = True) -> Document:
    """Read one document; ``lines=False`` for a value of the command line, where a line number says little."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            document.value = _Converter(document, label, env, lines).convert(node, ())
    except yaml.MarkedYAMLError as error:
        line, what = _syntax(error, text)
        document.problems.append(Problem(Place(label, line if lines else 0), (), what))
    except ReaderError as error:
        document.problems.append(Problem(Place(label), (), f"a character that YAML does not allow: {error.reason}"))
    except RecursionError:
        document.problems.append(Problem(Place(label), (), "nested too deeply"))
    document.places.setdefault((), Place(label, 1 if lines else 0))
    return document


def scalar(text: str) -> Any:
    """What plain ``text`` is in YAML: None, a bool, a number, or text."""
    return _construct(_core_tag(text), text)


def path_text(key: Key) -> str:
    """``stages[1].width`` for ``("stages", 1, "width")``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the base class has it so

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return _core_tag(value)
        return _CORE + {yaml.ScalarNode: "str", yaml.SequenceNode: "seq"}.get(kind, "map")


def _core_tag(text: str) -> str:
    return _CORE + next((name for name, pattern in _SCALARS if pattern.fullmatch(text)), "str")


def _construct(tag: str, text: str) -> Any:
    match tag.removeprefix(_CORE):
        case "null":
            return None
        case "bool":
            return {"true": True, "false": False}[text.lower()]
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(re.sub(r"\.(?=[a-zA-Z])", "", text))
        case "str":
            return text
    raise ValueError("no plain value")


_VARIABLE = re.compile(r"\$(?:(\$)|\{([^}]*)(\}?))")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(:-(.*))?", re.DOTALL)


class _Converter:
    def __init__(self, document: Document, label: str, env: Mapping[str, str], lines: bool) -> None:
        self.document, self.label, self.env, self.lines = document, label, env, lines
        self.open: list[yaml.Node] = []
        self.count = 0

    def problem(self, node: yaml.Node, key: Key, what: str) -> None:
        self.document.problems.append(Problem(self.place(node), key, what))

    def place(self, node: yaml.Node) -> Place:
        return Place(self.label, node.start_mark.line + 1 if self.lines else 0)

    def convert(self, node: yaml.Node, key: Key, place: Place | None = None) -> Any:
        self.document.places[key] = place or self.place(node)
        self.count += 1
        if node in self.open:
            return self.problem(node, key, "an anchor that contains itself")
        if self.count == _TOO_MANY:
            self.problem(node, key, "too many values; are there aliases of aliases?")
        if self.count >= _TOO_MANY:
            return None
        self.open.append(node)
        value = self.dispatch(node, key)
        self.open.pop()
        return value

    def dispatch(self, node: yaml.Node, key: Key) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, key)
        if node.tag not in (_CORE + "map", _CORE + "seq"):
            return self.problem(node, key, f"the tag {node.tag!r} means nothing here")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key)
        return [self.convert(item, (*key, i)) for i, item in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                self.problem(name_node, key, "a key must be plain text; is a ${…} or a {…} missing its quotes?")
                continue
            name = name_node.value
            if name in out:
                first = self.document.places[(*key, name)]
                line = f", first in line {first.line}" if first.line else ""
                self.problem(name_node, (*key, name), f"given twice{line}")
                continue
            out[name] = self.convert(value_node, (*key, name), self.place(name_node))
        return out

    def scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        try:
            value = _construct(node.tag, node.value)
        except (ValueError, KeyError):
            return self.problem(node, key, f"{node.value[:40]!r} is no value for the tag or type {node.tag!r}")
        if isinstance(value, str) and "$" in value:
            expanded = _VARIABLE.sub(lambda match: self.variable(match, node, key), value)
            if "${" in value:
                self.document.raw[key] = value
            return expanded
        return value

    def variable(self, match: re.Match[str], node: yaml.Node, key: Key) -> str:
        if match[1]:
            return "$"
        name = _NAME.fullmatch(match[2])
        if name is None or not match[3]:
            self.problem(node, key, f"{match[0]!r} is no ${{NAME}} or ${{NAME:-default}}; a plain $ is written $$")
            return ""
        value = self.env.get(name[1], "")
        if value or (name[1] in self.env and not name[2]):
            return value
        if not name[2]:
            self.problem(
                node,
                key,
                f"the environment variable {name[1]} is not set; ${{{name[1]}:-x}} would give a default",
            )
        return name[3] or ""


def _syntax(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """The line and an explanation of a syntax error, in words that help more than the parser's."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    problem = error.problem or "not valid YAML"
    if "'\\t'" in problem:
        tabbed = [str(i) for i, row in enumerate(text.split("\n"), 1) if re.match(r" *\t", row)]
        where = f" (lines {', '.join(tabbed)})" if len(tabbed) > 1 else ""
        return line, f"a tab; YAML is indented with spaces{where}"
    if "escape" in problem:
        return (
            line,
            f"{problem}; a Windows path in double quotes? Write it in single quotes: 'C:\\clips\\a.mp4'",
        )
    if problem == "sequence entries are not allowed here":
        return line, f"{problem}; a lone - is written '-', in quotes"
    if problem == "mapping values are not allowed here":
        return line, f"{problem}; is the line indented wrongly, or is there a ': ' in a text without quotes?"
    if "but got '{'" in problem or "but got '}'" in problem:
        return line, f"{problem}; a ${{…}} inside {{ }} or [ ] is written in quotes: '${{NAME}}'"
    context = f" {error.context}" if error.context else ""
    return line, f"{problem}{context}"
