"""Results as a Parquet table, for pandas, DuckDB, Polars and the like."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framepipe.errors import ConfigError, SinkError
from framepipe.frame import Frame
from framepipe.registry import register
from framepipe.sink import Sink, SinkContext
from framepipe.sinks._json import to_json
from framepipe.sinks._names import OutputNames
from framepipe.sinks._output import Outputs, PartFile, sink_error

_ROWS = 8192
_NBYTES = 16 << 20
"""A row group is written at so many rows or so many bytes of JSON, whichever comes first."""


@register("parquet")
@dataclass(kw_only=True)
class Parquet(Sink):
    """A row a picture: ``source, index, pts, time_s, width, height, meta`` (JSON text).

    With ``boxes`` a row a box instead: ``stage, x1, y1, x2, y2, score, label`` in place of ``meta``, in pixels of
    the upright source picture; pictures without boxes have no row. ``path`` and ``rotate_s`` are as for
    ``jsonl``. A table takes its name when it is whole; a process that is killed leaves none, which ``rotate_s``
    bounds. Needs ``pip install "framepipe[parquet]"``.
    """

    path: str
    boxes: bool = False
    rotate_s: float | None = None

    reads = frozenset({"meta"})

    def __post_init__(self) -> None:
        if self.rotate_s is not None and self.rotate_s <= 0:
            raise ConfigError("parquet: rotate_s takes seconds above 0")
        self._names = OutputNames(self.path, "parquet", shared=True)
        self._outputs = Outputs(self._names, self._file, self.rotate_s)
        self._context = SinkContext({})
        self._rows = 0

    def paths(self, sources: list[str]) -> list[Path]:
        return self._names.paths(sources)

    def open(self, context: SinkContext) -> None:
        self._context = context
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ConfigError(f'the parquet sink needs pyarrow: pip install "framepipe[parquet]" ({error})') from error
        if self._names.shared and self._names.known:
            self._outputs.get("", 0.0)  # a run that finds nothing leaves a table without rows

    def write(self, frame: Frame) -> None:
        common = {
            "source": frame.source,
            "index": frame.index,
            "pts": frame.pts,
            "time_s": frame.time_s if math.isfinite(frame.time_s) else None,
            "width": frame.width,
            "height": frame.height,
        }
        try:
            rows = list(_boxes(frame.meta)) if self.boxes else [{"meta": to_json(frame.meta)}]
        except (TypeError, ValueError) as error:
            raise SinkError(
                f"parquet: meta of picture {frame.index} of {frame.source!r}: {error}",
                source=frame.source,
                index=frame.index,
            ) from error
        table = self._outputs.get(frame.source, frame.time_s)
        for row in rows:
            table.row({**common, **row})
        self._rows += len(rows)

    def end(self, source: str) -> None:
        if not self._names.shared and self._names.known and not self._names.used(source):
            self._outputs.get(source, 0.0)
        self._outputs.end(source)

    def close(self) -> None:
        self._outputs.close()

    def state(self) -> dict[str, Any]:
        return {"paths": [str(path) for path in self._outputs.paths], "rows": self._rows}

    def _file(self, path: Path, source: str, frame: Frame | None) -> _Table:
        return _Table(path, self._context, self.boxes)


def _boxes(meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for stage, found in meta.items():
        for item in found if isinstance(found, (list, tuple)) else ():
            if isinstance(item, dict) and "box" in item:
                x1, y1, x2, y2 = (float(side) for side in item["box"])
                score, label = item.get("score"), item.get("label")
                yield {
                    "stage": stage,
                    "x1": x1,
                    "y1": y1,
                    "x2": x2,
                    "y2": y2,
                    "score": None if score is None else float(score),
                    "label": None if label is None else str(label),
                }


class _Table:
    """One Parquet file: rows are gathered into row groups, the end of the file is written by `finish`."""

    def __init__(self, path: Path, context: SinkContext, boxes: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = [
            ("source", pa.string()),
            ("index", pa.int64()),
            ("pts", pa.int64()),
            ("time_s", pa.float64()),
        ]
        fields += [("width", pa.int32()), ("height", pa.int32())]
        if boxes:
            fields += [("stage", pa.string()), *((side, pa.float64()) for side in ("x1", "y1", "x2", "y2"))]
            fields += [("score", pa.float64()), ("label", pa.string())]
        else:
            fields.append(("meta", pa.string()))
        self._schema = pa.schema(fields)
        self._rows: list[dict[str, Any]] = []
        self._nbytes = 0
        self._file = PartFile(path, context)
        try:
            self._writer: Any = pq.ParquetWriter(self._file, self._schema)
        except BaseException:
            self._file.discard()
            raise

    def row(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._nbytes += len(row.get("meta", ""))
        if len(self._rows) >= _ROWS or self._nbytes >= _NBYTES:
            with self._failing():
                self._flush()

    def finish(self) -> None:
        if self._writer is not None:
            with self._failing():
                self._flush()
                self._writer.close()
            self._writer = None
            self._file.commit()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._writer is not None and self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._nbytes = [], 0

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            writer, self._writer = self._writer, None
            with contextlib.suppress(Exception):  # tell pyarrow that no more will come, or it warns later
                writer.close()
            self._file.discard()
            left = "the unfinished table cannot be read and was removed"
            raise sink_error(error, self._file.path, left) from error
