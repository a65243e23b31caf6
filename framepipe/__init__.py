"""framepipe: streaming video into GPU memory.

``import framepipe`` loads nothing heavy: names are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from framepipe.errors import FramepipeError as FramepipeError
    from framepipe.frame import Batch as Batch
    from framepipe.frame import Frame as Frame
    from framepipe.frame import FrameSpec as FrameSpec
    from framepipe.pipeline import Pipeline as Pipeline
    from framepipe.pipeline import open as open
    from framepipe.registry import register as register
    from framepipe.report import RunReport as RunReport
    from framepipe.sink import Sink as Sink
    from framepipe.source import Source as Source
    from framepipe.stage import Affine as Affine
    from framepipe.stage import ArraySpec as ArraySpec
    from framepipe.stage import Flow as Flow
    from framepipe.stage import Stage as Stage

_HOME = {
    "Affine": "stage", "ArraySpec": "stage", "Batch": "frame", "Flow": "stage", "Frame": "frame",
    "FrameSpec": "frame", "FramepipeError": "errors", "Pipeline": "pipeline", "RunReport": "report", "Sink": "sink",
    "Source": "source", "Stage": "stage", "open": "pipeline", "register": "registry",
}  # fmt: skip

__all__ = [
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'framepipe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"framepipe.{_HOME[name]}"), name)
