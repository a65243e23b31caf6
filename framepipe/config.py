"""YAML to a checked, frozen `PipelineConfig`.

Reading opens nothing but the YAML file itself and collects every mistake before it raises. Relative inputs
belong to the folder of the YAML file, outputs and whatever the command line says to the working folder.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from framepipe import _yaml, registry
from framepipe._entries import Builder, Entry
from framepipe._parameters import Parameter, nearest, parameters, read
from framepipe._tree import Tree
from framepipe.errors import ConfigError
from framepipe.guard.options import ColdOptions, GuardOptions
from framepipe.memory_models import table as memory_models
from framepipe.redact import redact
from framepipe.sink import Sink
from framepipe.source import Source
from framepipe.stage import Stage
from framepipe.stager import StagingOptions
from framepipe.units import Bytes

VERSION = 1
STAGING: _yaml.Key = ("staging",)
GUARD: _yaml.Key = ("guard",)
KEYS = (
    "version", "device", "device_memory", "staging", "threads", "decode", "guard",
    "source_defaults", "sources", "stages", "sinks",
)  # fmt: skip
DEVICES = ("auto", "cpu", "cuda", "simulated")
Decode = Literal["auto", "frame", "segments", "linear"]

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|simulated")
_MODELLED = "simulated:"
_LARGEST = 1 << 22  # bytes; what is larger is a video, and none is read into memory
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, repr=False)
class PipelineConfig:
    """A pipeline as data: what its YAML says, checked, with defaults filled in.

    ``device_memory`` is the most bytes that it may hold on the device, or None for no limit. ``threads`` is the budget
    of decode threads of the whole pipeline, or None for as many as there are CPUs. ``guard`` watches memory, or None.
    ``path`` is the file it came from. ``overwrite`` comes from the command line alone.
    """

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...] = ()
    sinks: tuple[Sink, ...] = ()
    device: str = "auto"
    device_memory: int | None = None
    staging: StagingOptions = field(default_factory=StagingOptions)
    threads: int | None = None
    decode: Decode = "auto"
    guard: GuardOptions | None = None
    source_defaults: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    version: int = VERSION
    path: Path | None = None

    def kwargs(self) -> dict[str, Any]:
        """The arguments of `framepipe.pipeline.Pipeline`, with components of their own each time."""
        return {
            "sources": copy.deepcopy(list(self.sources)),
            "stages": copy.deepcopy(list(self.stages)),
            "sinks": copy.deepcopy(list(self.sinks)),
            "device": self.device,
            "device_memory": self.device_memory,
            "staging": self.staging,
            "threads": self.threads,
            "decode": self.decode,
            "guard": self.guard,
            "overwrite": self.overwrite,
        }

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value!r}" for name, value in self.kwargs().items())
        return redact(f"PipelineConfig({parts})")


def load(path: str | os.PathLike[str], **options: Any) -> PipelineConfig:
    """Read and check a pipeline file; ``options`` are those of `loads`.

    Raises `ConfigError` with every mistake in ``problems``, each as ``file:line: stages[1].width: what``.
    """
    label = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        if Path(path).is_dir():  # which Windows calls a lack of permission
            raise ConfigError(redact(f"{label}: is a folder, not a pipeline file")) from None
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ConfigError(redact(f"{label}: {reason}")) from None
    if len(data) > _LARGEST or (b"\0" in data and not data.startswith(_UTF16)):
        hint = "a video goes with --source, as in 'framepipe run motion --source FILE'"
        raise ConfigError(redact(f"{label}: is no pipeline file; {hint}"))
    return loads(data, path=Path(path), **options)


def loads(
    text: str | bytes,
    *,
    path: Path | None = None,
    sources: Sequence[str] = (),
    sets: Sequence[str] = (),
    device: str | None = None,
    staging: str | None = None,
    threads: int | None = None,
    guard: bool | None = None,
    overwrite: bool = False,
    allow_code: bool = False,
    env: Mapping[str, str] | None = None,
) -> PipelineConfig:
    """Check a pipeline's YAML; ``path`` names it in messages, and relative inputs belong to its folder.

    ``sources``, ``device``, ``staging`` (a strategy) and ``threads`` replace what the text says; ``sets`` are
    ``path.to.key=value``, applied last and in order. ``guard`` turns it on, with what the text says of it, or off.
    ``allow_code`` lets ``module:Class`` stand where a
    registered name does. ``env`` is what ``${VAR}`` reads, `os.environ` by default.

    Raises `ConfigError` with every mistake in ``problems``.
    """
    label = str(path) if path else "<text>"
    tree = _tree(text, label, path.parent if path else Path(), os.environ if env is None else env)
    _lay_over(tree, {"source": list(sources) or None, "device": device, "staging": staging, "threads": threads})
    if guard is False or (guard and not tree.is_mapping("guard")):
        _lay_over(tree, {"guard": guard})
    for assignment in sets:
        tree.set(assignment)
    values = _check(tree, Builder(tree, allow_code))
    if tree.problems:
        raise _error(tree, label)
    return PipelineConfig(**values, overwrite=overwrite, path=path)


def schema() -> dict[str, Any]:
    """The JSON Schema of a pipeline file, with every component that is installed, for editors."""
    from framepipe._schema import schema as make

    return make()


def _tree(text: str | bytes, label: str, folder: Path, env: Mapping[str, str]) -> Tree:
    decoded = _yaml.decode(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), label)
    if isinstance(decoded, _yaml.Problem):
        raise ConfigError(redact(decoded))
    document = _yaml.parse(decoded, label, env)
    if document.value is None and not document.problems:
        raise ConfigError(redact(f"{label}: empty; a pipeline begins with 'version: {VERSION}' and has 'sources'"))
    tree = Tree(document, folder, env)
    if document.value is None:
        raise _error(tree, label)  # a syntax error: nothing more can be told
    return tree


def _lay_over(tree: Tree, options: Mapping[str, Any]) -> None:
    keys: dict[str, _yaml.Key] = {"source": ("sources",), "staging": ("staging",)}
    if tree.is_mapping("staging"):
        keys["staging"] = ("staging", "strategy")
    for name, value in options.items():
        if value is not None:
            tree.assign(keys.get(name, (name,)), _yaml.Document(value, {(): _yaml.Place(f"--{name}")}))


def _error(tree: Tree, label: str) -> ConfigError:
    # By line, and what the command line said at the end.
    ordered = sorted(tree.problems, key=lambda problem: (not problem.place.line, problem.place.line))
    texts = [str(problem) for problem in ordered]
    if len(texts) == 1:
        return ConfigError(texts[0], texts)
    return ConfigError("\n  ".join([f"{len(texts)} mistakes in {redact(label)}", *texts]), texts)


def _check(tree: Tree, builder: Builder) -> dict[str, Any]:
    data = tree.data
    if not isinstance(data, dict):
        tree.add((), f"expected a mapping that begins with 'version: {VERSION}'")
        return {}
    for name in data.keys() - set(KEYS):
        hint = "; it is an option of the command line" if name == "overwrite" else nearest(name, KEYS)
        tree.add((name,), f"unknown key{hint or '; there are ' + ', '.join(KEYS)}")
    _check_version(tree, data)
    if not data.get("sources"):
        tree.add(("sources",), "missing: what to read, as a list of files, URLs or patterns")
    defaults = data.get("source_defaults") or {}
    if not isinstance(defaults, dict):
        tree.add(("source_defaults",), "expected parameters of sources, each as 'name: value'")
        defaults = {}
    return {
        "device": _device(tree, data),
        "device_memory": _plain(tree, data, "device_memory", Bytes | None, None),
        "staging": _staging(tree, data, builder),
        "threads": _threads(tree, data),
        "decode": _plain(tree, data, "decode", Decode, "auto"),
        "guard": _guard(tree, data, builder),
        "source_defaults": dict(defaults),
        "sources": tuple(builder.sources(data.get("sources"), defaults)),
        "stages": tuple(builder.components("stages", data.get("stages"))),
        "sinks": tuple(builder.components("sinks", data.get("sinks"))),
    }


def _check_version(tree: Tree, data: Mapping[str, Any]) -> None:
    version = data.get("version")
    if "version" not in data:
        tree.add(("version",), f"missing; write 'version: {VERSION}'")
    elif version != VERSION or isinstance(version, bool):
        tree.add(("version",), f"expected {VERSION}, the only version this framepipe knows, got {version!r}")


def _device(tree: Tree, data: Mapping[str, Any]) -> str:
    device = str(_plain(tree, data, "device", str, "auto"))
    if device.startswith(_MODELLED):
        try:
            memory_models.make(device.removeprefix(_MODELLED))
        except ConfigError as error:
            tree.add(("device",), str(error))
    elif not _DEVICE.fullmatch(device):
        alias = {"gpu": "; did you mean 'cuda'?", "nvidia": "; did you mean 'cuda'?"}.get(device.lower())
        hint = alias or nearest(device, DEVICES) or f"; there are {', '.join(DEVICES)}, cuda:N and simulated:MODEL"
        tree.add(("device",), f"unknown device {device!r}{hint}")
    return device


def _threads(tree: Tree, data: Mapping[str, Any]) -> int | None:
    threads: int | None = _plain(tree, data, "threads", int | None, None)
    if threads is not None and threads < 1:
        tree.add(("threads",), f"expected at least 1 decode thread, got {threads}")
    return threads


def _plain(tree: Tree, data: Mapping[str, Any], name: str, annotation: Any, default: Any) -> Any:
    """A top-level value of one of YAML's own types; ``default`` where it is missing or wrong."""
    if name not in data:
        return default
    value, wrong = read(Parameter.of(name, annotation), data[name], lambda inner: tree.raw((name, *inner)))
    if wrong:
        tree.add((name,), wrong)
        return default
    return value


def _staging(tree: Tree, data: Mapping[str, Any], builder: Builder) -> StagingOptions:
    said = data.get("staging", "auto")
    if isinstance(said, str):
        values, at = {"strategy": said}, {"strategy": STAGING}
    elif isinstance(said, dict):
        values, at = said, {name: (*STAGING, name) for name in said}
    else:
        tree.add(STAGING, "expected a strategy, or {strategy: …, slots: …, depth: …, batch: …}")
        return StagingOptions()
    options: StagingOptions | None = builder.build(Entry("staging", "staging", STAGING, values, at), StagingOptions)
    if options is None:
        return StagingOptions()
    known = ["auto", *registry.names("staging")]
    if options.strategy not in known:
        hint = nearest(options.strategy, known) or f"; there are {', '.join(known)}"
        tree.add(at["strategy"], f"unknown strategy {options.strategy!r}{hint}", (*STAGING, "strategy"))
    return options


def _guard(tree: Tree, data: Mapping[str, Any], builder: Builder) -> GuardOptions | None:
    options: GuardOptions | None = _block(tree, data, builder, GUARD, GuardOptions)
    return options


def _block(tree: Tree, data: Mapping[str, Any], builder: Builder, key: _yaml.Key, cls: type[Any]) -> Any:
    """What is on with ``true``, off with ``false``, and has options: an object of ``cls``, or None."""
    name = str(key[-1])
    said = data.get(name)
    if said is None or isinstance(said, bool):
        return cls() if said else None
    if not isinstance(said, dict):
        tree.add(key, f"expected true, false or {{{', '.join(f'{word}: …' for word in list(parameters(cls))[:3])}, …}}")
        return None
    values = dict(said)
    inner = values.pop("cold", None) if cls is GuardOptions else None
    cold = _block(tree, {"cold": inner}, builder, (*key, "cold"), ColdOptions)
    options = builder.build(Entry("guard", name, key, values, {word: (*key, word) for word in values}), cls)
    return dataclasses.replace(options, cold=cold) if options is not None and cold is not None else options
