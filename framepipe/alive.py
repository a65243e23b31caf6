"""The engines that run in this process, and what ends them when nobody does: exit, fork, a forgotten pipeline."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref

from framepipe.engine import Engine

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def watch(owner: object, engine: Engine, name: str) -> None:
    """Look after ``engine`` from now on; it is ended, with a ResourceWarning, once nobody holds its ``owner``."""
    _engines.add(engine)
    weakref.finalize(owner, _forgotten, engine, name).atexit = False


def _forgotten(engine: Engine, name: str) -> None:
    """A pipeline was collected without close: end its threads (they hold the engine alone)."""
    if not engine.finished.is_set():
        engine.stop()
        warnings.warn(f"pipeline {name!r} was never closed; use it in a with statement", ResourceWarning, stacklevel=2)


@atexit.register
def _end_all() -> None:
    for engine in list(_engines):
        engine.stop()
    for engine in list(_engines):
        engine.join(5.0)


def _forked() -> None:
    for engine in list(_engines):
        engine.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
