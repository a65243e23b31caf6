"""The right to have a batch in flight, as a few tokens that go round between the runner and the sink thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from framepipe.device.base import Event

LEAST = 2
"""Tokens that are never held back: with one a batch would wait for the one before it to be delivered."""


class Token:
    """The right to have a batch in flight; ``done`` is recorded behind everything of it."""

    __slots__ = ("done", "stamp")

    def __init__(self, done: Event) -> None:
        self.done = done
        self.stamp: Any = None


class Tokens:
    """The runner takes them and the sink thread gives them back; a guard may hold some of them back."""

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._free: SimpleQueue[Token] = SimpleQueue()
        self._lock = threading.Lock()  # guards the rest; nobody waits inside
        self._all = 0
        self._held: list[Token] = []
        self._most: int | None = None
        self._gathering = False
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        """How many there are, free or not."""
        return self._all

    def add(self, token: Token) -> None:
        """One more, free unless so many go round that it is held back."""
        with self._lock:
            self._all += 1
        self.put(token)

    def get_nowait(self) -> Token:
        """A free one. Raises `queue.Empty`."""
        return self._free.get_nowait()

    def get(self) -> Token:
        """A free one, waited for."""
        return self._free.get()

    def put(self, token: Token) -> None:
        """Give one back."""
        with self._lock:
            if not self._gathering and len(self._held) < self._surplus():
                self._held.append(token)
                return
        self._free.put(token)

    def limit(self, most: int | None) -> None:
        """Have ``most`` of them go round from now on, but `LEAST` in any case, or all. Any thread.

        The others are held back, those in use once they are back.
        """
        with self._lock:
            self._most = most
            while len(self._held) > self._surplus():
                self._free.put(self._held.pop())
            with suppress(Empty):
                while not self._gathering and len(self._held) < self._surplus():
                    self._held.append(self._free.get_nowait())

    def _surplus(self) -> int:
        """Lock held: how many are to be held back."""
        return 0 if self._most is None else max(0, self._all - max(self._most, LEAST))

    def gather(self) -> list[Token]:
        """All but the one that the caller has, waited for; also those held back. `put` gives each of them back."""
        with self._lock:
            self._gathering = True
            others, self._held = self._held, []
        others += [self._free.get() for _ in range(self._all - 1 - len(others))]
        with self._lock:
            self._gathering = False
        return others

    def qsize(self) -> int:
        """How many are free."""
        return self._free.qsize()
