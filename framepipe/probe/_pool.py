"""Blocks taken and given back, with a free list of exact sizes or without one."""

from __future__ import annotations

from collections.abc import Callable

from framepipe.probe._host_blocks import Block, RefusedError


class Unpooled:
    """Every block is made when it is taken and freed when it is given. Single-threaded, like `Pooled`."""

    def __init__(self, make: Callable[[int], Block]) -> None:
        self._make = make
        self.made = self.freed = 0

    def take(self, nbytes: int) -> Block:
        """A block of exactly ``nbytes``. Raises `RefusedError`."""
        block = self._make(nbytes)
        self.made += 1
        return block

    def give(self, block: Block) -> None:
        """Done with ``block``. Raises `RefusedError`."""
        block.free()
        self.freed += 1

    def close(self) -> None:
        """Free what is kept. Raises the first `RefusedError` after all have been tried."""


class Pooled(Unpooled):
    """A block that was given is kept and taken again for the same size.

    What is kept and in use together stays within ``budget_nbytes``: a new block drives out those kept longest.
    """

    def __init__(self, make: Callable[[int], Block], budget_nbytes: int) -> None:
        super().__init__(make)
        self._budget = budget_nbytes
        self._kept: list[Block] = []
        self.nbytes = 0
        """Kept and in use, together."""

    def take(self, nbytes: int) -> Block:
        for at in range(len(self._kept) - 1, -1, -1):  # the warmest first
            if self._kept[at].nbytes == nbytes:
                return self._kept.pop(at)
        while self._kept and self.nbytes + nbytes > self._budget:
            self._drop(self._kept.pop(0))
        block = super().take(nbytes)
        self.nbytes += nbytes
        return block

    def give(self, block: Block) -> None:
        self._kept.append(block)

    def close(self) -> None:
        failed: RefusedError | None = None
        while self._kept:
            try:
                self._drop(self._kept.pop())
            except RefusedError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _drop(self, block: Block) -> None:
        self.nbytes -= block.nbytes
        super().give(block)
