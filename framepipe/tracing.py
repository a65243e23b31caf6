"""Named ranges on a profiler's time line (NVTX), for those who ask for them.

Functions are wrapped once, when a pipeline is opened, and `OFF` gives them back as they are: what nobody traces costs
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from framepipe.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING: AbstractContextManager[None] = nullcontext()


class Tracer:
    """Marks ranges of the calling thread with ``push(name)`` and ``pop()``; without the two it marks nothing."""

    def __init__(self, push: Callable[[str], Any] | None = None, pop: Callable[[], Any] = lambda: None) -> None:
        self._push, self._pop = push, pop

    def range(self, name: str) -> AbstractContextManager[None]:
        """A range that lasts as long as the context is entered, whatever ends it. Ranges may be nested."""
        return _NOTHING if self._push is None else _Range(self._push, self._pop, name)

    def wrap(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """``function`` with a range around each of its calls; the function itself where nothing is marked."""
        if self._push is None:
            return function
        marked = _Range(self._push, self._pop, name)

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with marked:
                return function(*args, **kwargs)

        return traced


class _Range:
    """Holds no state of its own, so that one serves any number of threads."""

    __slots__ = ("_name", "_pop", "_push")

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any], name: str) -> None:
        self._push, self._pop, self._name = push, pop, name

    def __enter__(self) -> None:
        self._push(self._name)

    def __exit__(self, *error: object) -> None:
        self._pop()


OFF = Tracer()
"""Marks nothing."""


def nvtx() -> Tracer:
    """A tracer whose ranges Nsight Systems shows (``nsys profile --trace=cuda,nvtx``).

    Raises `ConfigError` where CuPy, which brings NVTX, is missing or cannot be loaded.
    """
    try:
        from cupy.cuda import nvtx as library
    except ImportError as error:
        raise ConfigError(
            f"NVTX ranges need CuPy, which cannot be imported ({error}): pip install 'framepipe[cuda12]' (or cuda13)"
        ) from None
    if not library.available:
        raise ConfigError("NVTX ranges need a CuPy that was built with NVTX, which this one was not")
    return Tracer(library.RangePush, library.RangePop)
