"""Pipelines and samples that come with framepipe: in a checkout its folders, in a wheel copies inside the package."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from framepipe.errors import ConfigError, FramepipeError, OutputExistsError
from framepipe.registry import did_you_mean

KINDS = ("pipelines", "samples")
_NOT_SHIPPED = (".", "__pycache__", "reports")
"""How files and folders begin that stay in a checkout; reports are there to be read, and large."""


def folder(kind: str) -> Path | None:
    """Where the shipped ``pipelines`` or ``samples`` are, or None where there are none."""
    package = Path(str(importlib.resources.files("framepipe")))
    for place in (package / "_shipped" / kind, package.parent / kind):
        # Beside the package only in a checkout: site-packages may hold anything of that name.
        if place.is_dir() and (place.parent != package.parent or (package.parent / "pyproject.toml").is_file()):
            return place
    return None


def pipelines() -> dict[str, Path]:
    """The shipped pipelines by name, ``motion`` for ``motion.yaml``."""
    place = folder("pipelines")
    return {path.stem: path for path in sorted(place.glob("*.yaml"))} if place else {}


def find(name: str) -> Path:
    """The pipeline file that ``name`` means: a file, or the name of a shipped one; a file wins.

    Raises `ConfigError` saying what there is.
    """
    path = Path(name)
    known = pipelines()
    if path.exists() and not (path.is_dir() and name in known):
        return path
    if name in known:
        return known[name]
    if "://" in name:
        raise ConfigError(
            f"{name}: is no pipeline file; an address goes with --source, as in 'run motion --source URL'"
        )
    hint = did_you_mean(name.removesuffix(".yaml"), known)
    raise ConfigError(f"{name}: no such file, and no shipped pipeline of that name{hint}")


def write(target: Path, *, overwrite: bool = False) -> list[Path]:
    """Copy the shipped pipelines and samples below ``target``; the files written.

    Files that are there already with the same content are left alone. Raises `OutputExistsError` naming every other
    one, before anything is written, unless ``overwrite``; `FramepipeError` where a file cannot be written.
    """
    plan = {target / kind / file: content for kind in KINDS for file, content in _contents(kind).items()}
    fresh = {path: content for path, content in plan.items() if not _same(path, content)}
    taken = [str(path) for path in fresh if path.exists()]
    if taken and not overwrite:
        raise OutputExistsError(f"{', '.join(taken)}: exists already and differs; --overwrite replaces it")
    for path, content in fresh.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise FramepipeError(f"{path}: cannot be written: {error.strerror or error}") from error
    return list(fresh)


def _contents(kind: str) -> dict[Path, bytes]:
    place = folder(kind)
    if place is None:
        return {}
    files = sorted(path for path in place.rglob("*") if path.is_file())
    inner = {path.relative_to(place): path for path in files}
    return {
        name: path.read_bytes()
        for name, path in inner.items()
        if not any(part.startswith(_NOT_SHIPPED) for part in name.parts)
    }


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
