"""The house as `framepipe.__doc__` draws it: who may import whom, what is documented, what a name in YAML finds."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import framepipe
from framepipe import registry

PACKAGE = Path(framepipe.__file__).parent
MAX_LINES = 400
OPTIONAL = ("cupy", "pyarrow")


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# ``stages.motion`` for framepipe/stages/motion.py; the package itself is the empty name and stands above all.
MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_shipped" not in path.parts}
PUBLIC = [name for name in MODULES if not any(part.startswith("_") for part in name.split("."))]


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> dict[str, bool]:
    """The modules of framepipe that ``name`` imports anywhere, and whether it does so when it is imported itself."""
    found: dict[str, bool] = {}
    for node, lazy in _walk(_tree(name), False):
        for target in _targets(node):
            found[target] = found.get(target, False) or not lazy
    return found


def _walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        late = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            late = True
        yield child, late
        yield from _walk(child, late)


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        wanted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        # ``from framepipe import x`` means a module where there is one, else a name of the package.
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        wanted = [name if _inner(name) in MODULES else str(node.module) for name in names]
    else:
        return
    yield from (_inner(full) for full in wanted if full.split(".")[0] == "framepipe")


def _inner(full: str) -> str:
    return full.removeprefix("framepipe").lstrip(".")


@cache
def layers() -> tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]:
    """The table of the package's docstring from the top down: each row's name and its columns of patterns."""
    table = framepipe.__doc__.split("The house\n", 1)[1].split("\n=========  ")[1]
    rows = [line.split(maxsplit=1) for line in table.splitlines()[1:]]
    return tuple((name, tuple(tuple(part.split()) for part in columns.split("|"))) for name, columns in rows)


def place(name: str) -> tuple[int, int]:
    """Row and column of a module."""
    top = name.split(".")[0]
    pattern = f"{top}/" if (PACKAGE / top).is_dir() else top
    found = [
        (row, column)
        for row, (_, columns) in enumerate(layers())
        for column, patterns in enumerate(columns)
        if any(fnmatch.fnmatchcase(pattern, each) for each in patterns)
    ]
    assert len(found) == 1, f"{name} must stand once in the table of framepipe.__doc__, not {len(found)} times"
    return found[0]


# -- imports --


def test_the_table_is_read():
    names = [name for name, _ in layers()]
    assert names[0] == "commands"
    assert names[-1] == "ground"
    assert place("cli") == (0, 0)
    assert place("stages._blobs") == place("stages.motion") != place("sinks.video")
    for _, columns in layers():
        for pattern in (each for column in columns for each in column):
            there = [name for name in MODULES if fnmatch.fnmatchcase(name.split(".")[0], pattern.rstrip("/"))]
            assert there, f"{pattern} of the table matches no module"


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_go_down_only(name):
    row, column = place(name)
    for target in imports(name):
        if not target:
            continue  # framepipe itself is looked at below
        there = place(target)
        assert there[0] > row or there == (row, column), f"{name} imports {target}, which stands above or beside it"


def test_nothing_inside_uses_the_names_meant_for_users():
    for name in filter(None, MODULES):
        for node in ast.walk(_tree(name)):
            if isinstance(node, ast.ImportFrom) and node.module == "framepipe":
                taken = {alias.name for alias in node.names} - {"__version__"}
                assert taken <= MODULES.keys(), f"{name} imports {taken - MODULES.keys()} from framepipe itself"


def test_no_module_needs_itself_to_be_imported():
    graph = {name: {target for target, now in imports(name).items() if now and target} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


# -- size and words --


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_of_one_thing_and_says_which(name):
    lines = MODULES[name].read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{name} has {lines} lines: is there a second thing in it?"
    assert ast.get_docstring(_tree(name)), f"{name} has no docstring"


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_is_documented(name):
    try:
        module = importlib.import_module(f"framepipe.{name}".rstrip("."))
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    bare = [what for what, words in _documented(module) if not words]
    assert not bare, f"no docstring: {', '.join(bare)}"


def _documented(module: ModuleType) -> Iterator[tuple[str, str | None]]:
    """Public functions and classes made in ``module`` with their docstrings; of a method an inherited one will do."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing):
            yield name, thing.__doc__
        elif inspect.isclass(thing):
            yield name, _own_words(thing)
            for inner, member in vars(thing).items():
                if not inner.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{name}.{inner}", inspect.getdoc(getattr(thing, inner))


def _own_words(cls: type) -> str:
    """A class's docstring; a dataclass that has none gets its signature in its place."""
    words = vars(cls).get("__doc__") or ""
    return "" if words.startswith(f"{cls.__name__}(") else words


# -- names --


def test_every_public_name_is_there():
    assert sorted(framepipe.__all__) == sorted(set(framepipe.__all__))
    for name in framepipe.__all__:
        assert getattr(framepipe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        framepipe.Pipelin  # noqa: B018


def test_names_are_declared_for_type_checkers_as_they_are_looked_up():
    declared = {
        alias.asname: node.module.removeprefix("framepipe.")
        for node in ast.walk(_tree(""))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("framepipe.")
        for alias in node.names
    }
    assert declared == framepipe._HOME


BUILT_IN = [
    (kind, path.stem)
    for kind in registry.KINDS
    for path in sorted((PACKAGE / kind).glob("*.py"))
    if not path.stem.startswith("_")
]


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_an_extension_is_one_class_in_a_file_of_its_name(kind, name):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    cls = registry.find(kind, name)
    assert (cls.type_name, cls.kind, cls.__module__) == (name, kind, f"framepipe.{kind}.{name}")
    assert dataclasses.is_dataclass(cls)
    assert "__init__" in vars(cls), "a dataclass of its own, not one that inherits its base's fields"
    assert all(field.kw_only for field in dataclasses.fields(cls) if field.init)
    assert _own_words(cls).split("\n\n")[0].rstrip().endswith((".", "?")), (
        "the first paragraph is what `framepipe list` shows"
    )
    module = importlib.import_module(cls.__module__)
    others = [
        other
        for other in vars(module).values()
        if inspect.isclass(other) and other.__module__ == cls.__module__ and issubclass(other, registry.Component)
    ]
    assert others == [cls]


def test_every_kind_has_extensions():
    assert {kind for kind, _ in BUILT_IN} == set(registry.KINDS)
