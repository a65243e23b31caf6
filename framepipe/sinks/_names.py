"""Names of output files: templates, and sources' names made safe as parts of them."""

from __future__ import annotations

import os
import re
import string
import unicodedata
from pathlib import Path

from framepipe.errors import ConfigError

FIELDS = ("source", "index", "start")
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_RESERVED = re.compile(r"^(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(?=\s*(\.|$))", re.IGNORECASE)
_MAX_NAME = 180
"""Bytes of a source's name in a file name: file systems stop at 255, and numbers and suffixes come on top."""


def safe_name(name: str) -> str:
    """``name`` as a file name that Windows and POSIX both take; letters of any script and spaces stay."""
    text = _FORBIDDEN.sub("_", name)
    while len(text.encode("utf-8", "surrogatepass")) > _MAX_NAME:
        text = text[:-1]
    return _RESERVED.sub(r"\1_", text.rstrip(". ")) or "_"


def same_key(path: str | os.PathLike[str]) -> str:
    """A key equal for two names that some file system takes for one (case, composed letters)."""
    return unicodedata.normalize("NFC", os.path.normcase(os.path.abspath(path))).casefold()


class _Seconds(float):
    """A time in a file name: three decimals unless the template says otherwise."""

    def __format__(self, spec: str) -> str:
        return super().__format__(spec or ".3f")


class Template:
    """A path with ``{source}``, ``{index}`` and ``{start}`` in it, as `str.format` reads them.

    Raises `ConfigError` naming the field that is not one of them, or what else is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], sink: str) -> None:
        self.text = os.fspath(path)
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        try:
            parts = [(field, spec, how) for _, field, spec, how in string.Formatter().parse(self.text)]
            self.fields = frozenset(field for field, _, _ in parts if field is not None)
            for field in sorted(self.fields - set(FIELDS)):
                raise ConfigError(f"{sink}: path {self.text!r} has an unknown field {{{field}}}; known: {known}")
            self(source="x", index=0, start=0.0)
        except (ValueError, KeyError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{sink}: path {self.text!r}: {error}; fields are {known}, a brace itself is written twice"
            ) from None
        if not Path(self.text).name or self.text[-1] in "/\\":
            raise ConfigError(f"{sink}: path {self.text!r} names no file")

    def __call__(self, source: str, index: int, start: float) -> Path:
        return Path(self.text.format(source=source, index=index, start=_Seconds(start)))


class OutputNames:
    """The names of one sink's files; no two sources, and no two parts, ever get one name.

    ``shared`` says that frames of several sources may go to one file. A name given out before gets ``_0001``,
    ``_0002``, … before its suffix.
    """

    def __init__(self, path: str | os.PathLike[str], sink: str, shared: bool) -> None:
        self.template = Template(path, sink)
        self.sink = sink
        self.shared = shared and "source" not in self.template.fields
        self._safe: dict[str, str] = {}
        self._parts: dict[str, int] = {}
        self._taken: set[str] = set()

    @property
    def known(self) -> bool:
        """Whether the first file's name is known before its first frame."""
        return "start" not in self.template.fields

    def key(self, source: str) -> str:
        """What the files of a source are kept under: its name, or one key for all."""
        return "" if self.shared else source

    def safe(self, source: str) -> str:
        """The source's name as a file name, numbered where another source has it already."""
        if source not in self._safe:
            base = name = safe_name(source)
            used = {same_key(other) for other in self._safe.values()}
            number = 1
            while same_key(name) in used:
                number += 1
                name = f"{base}_{number}"
            self._safe[source] = name
        return self._safe[source]

    def require_source(self, sources: list[str]) -> None:
        """Raises `ConfigError` where several sources would need files of their own and have one name."""
        for source in sources:
            self.safe(source)
        if not self.shared and len(sources) > 1 and "source" not in self.template.fields:
            path = Path(self.template.text)
            remedy = path.with_name(f"{path.stem}_{{source}}{path.suffix}")
            raise ConfigError(
                f"{self.sink}: {len(sources)} sources cannot share the file {self.template.text!r}; "
                f"put {{source}} into the path, as in {str(remedy)!r}"
            )

    def paths(self, sources: list[str]) -> list[Path]:
        """The first file of each source (or of all), as far as known beforehand."""
        self.require_source(sources)
        if not self.known:
            return []
        named = [""] if self.shared else sources
        return [self.template(self.safe(source) if source else "", 0, 0.0) for source in named]

    def numbered(self, source: str, index: int, start: float) -> Path:
        """The name of one of very many files: ``index`` tells them apart, and they are not remembered."""
        return self.template(self.safe(source), index, start)

    def used(self, source: str) -> bool:
        """Whether a file was named for ``source`` already."""
        return self.key(source) in self._parts

    def next(self, source: str, start: float) -> Path:
        """The name of the next part."""
        number = self._parts.get(self.key(source), 0)
        self._parts[self.key(source)] = number + 1
        first = path = self.template(self.safe(source), number, start)
        while same_key(path) in self._taken:
            path = first.with_name(f"{first.stem}_{max(number, 1):04d}{first.suffix}")
            number += 1
        self._taken.add(same_key(path))
        return path
