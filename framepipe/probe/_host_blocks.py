"""Blocks of host memory that need no CUDA: nothing at all, pages of one's own, and pages locked by the kernel."""

from __future__ import annotations

import errno
import mmap
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from framepipe import pagelock
from framepipe.memory import PAGE


class RefusedError(Exception):
    """The system or CUDA refused: ``code`` and ``name`` as it told them; no code where it was not even asked."""

    def __init__(self, call: str, code: int | None, name: str, text: str) -> None:
        said = name if code is None else f"{code} {name}"
        super().__init__(f"{call}: {said}{f' ({text})' if text else ''}")
        self.call, self.code, self.name = call, code, name

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"call": self.call, "code": self.code, "name": self.name, "text": str(self)}


class Block(ABC):
    """``nbytes`` of memory from making it until `free`; ``steps_s`` are the seconds of each step of making it.

    ``address`` is None where there is no memory. Making and freeing raise `RefusedError`; who makes it frees it, once.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address: int | None = None
        self.steps_s: dict[str, float] = {}

    def timed(self, step: str, call: Callable[[], Any]) -> Any:
        """The result of ``call``, whose seconds are kept under ``step``."""
        began_s = time.perf_counter()
        try:
            return call()
        finally:
            self.steps_s[step] = time.perf_counter() - began_s

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""


class Nothing(Block):
    """The control: no memory."""

    def free(self) -> None:
        pass


class Pageable(Block):
    """An anonymous mapping, private where the system lets one choose, every page of it touched.

    A mapping goes back to the system when it is freed, which memory of an allocator may not.
    """

    def __init__(self, nbytes: int, *, touch: bool = True) -> None:
        super().__init__(nbytes)
        self._map = self.timed("map", lambda: _mapping(nbytes))
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        if touch:
            self.timed("touch", self._touch)

    def _touch(self) -> None:
        np.frombuffer(self._map, np.uint8)[::PAGE] = 1

    def free(self) -> None:
        self._map.close()


class Locked(Pageable):
    """A mapping that ``mlock`` brings in and keeps, as far as RLIMIT_MEMLOCK lets it; ``munmap`` unlocks (mlock(2))."""

    def __init__(self, nbytes: int) -> None:
        if sys.platform == "win32":
            raise RefusedError("mlock", errno.ENOSYS, "ENOSYS", "Windows does not have it")
        super().__init__(nbytes, touch=False)
        refused = self.timed("lock", self._lock)
        if refused is not None:
            self.free()
            raise refused

    def _lock(self) -> RefusedError | None:
        # Returned: as long as the error that it comes of is handled, its traceback keeps the array, and so the mapping.
        try:
            pagelock.lock(np.frombuffer(self._map, np.uint8))
        except OSError as error:
            return _refused("mlock", error)
        return None


def _mapping(nbytes: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused("mmap", error) from error


def _refused(call: str, error: OSError) -> RefusedError:
    code, text = error.errno or 0, str(error.strerror).removeprefix(f"{call}: ")
    return RefusedError(call, code, errno.errorcode.get(code, "unknown"), text)


BLOCKS: dict[str, Callable[[int], Block]] = {"control": Nothing, "pageable": Pageable, "mlock": Locked}
"""By the names of `framepipe.probe.kinds`."""
