"""A launch, and what the picture kernels know of where pixels come from and go, as the structs that they take."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from framepipe.kernels._cuda_code import Program, by_value
from framepipe.kernels._cuda_source import SOURCE, TARGET, Struct
from framepipe.kernels._resample import Color, Rect

PLACE = np.dtype(
    [
        ("total", "u8"),
        ("total_magic", "u8"),
        ("magic", "u8", 2),
        ("source", "i4", 4),
        ("target", "i4", 4),
        ("pixel", "u4", 2),
        ("step", "u4", 2),
        ("color", "i4", 3),
        ("count", "i4"),
        ("team", "i4"),
        ("group", "i4"),
    ],
    align=True,
)
"""The part ``source`` of a picture and the part ``target`` of the result: x, y, width, height.

By area, ``pixel`` and ``step`` are the lengths of a source pixel and of an output interval in units, across and down,
and ``total`` the units of an output pixel. ``magic`` numbers stand for divisors: see ``divided`` in common.cuh. A warp
makes ``count`` times 32 pixels, or by area ``count`` times as many as it has teams of ``team`` lanes, each of which
loads ``group`` source pixels at a time.
"""

JOB = np.dtype([("source", SOURCE), ("target", TARGET), ("place", PLACE)], align=True)
STRUCTS = {"Source": SOURCE, "Target": TARGET, "Place": PLACE, "Job": JOB}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch but for its arrays; ``job`` is as `framepipe.kernels._cuda_code.by_value` gives it."""

    program: Program
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    job: Struct
    shared: int = 0
    """Bytes of shared memory beside what the kernel declares."""

    def __call__(self, read: Any, out: Any) -> None:
        if self.grid[2]:
            self.program.launch(self.name, self.grid, self.block, (read, out, self.job), self.shared)


def launch(program: Program, name: str, grid: tuple[int, int, int], job: Struct, shared: int = 0) -> Launch:
    """A launch of blocks of 8 warps."""
    return Launch(program, name, grid, (32, 8, 1), by_value(job), shared)


def job_of(source: Struct, written: Struct, kind: np.dtype[Any] = JOB) -> Struct:
    """A struct of ``kind`` for these, all else being zero."""
    job = np.zeros((), kind)
    job["source"], job["target"] = source, written
    return job


def set_place(place: Struct, rect: Rect, part: Rect, color: Color, method: str) -> None:
    """Fill in all that does not depend on how the work is divided, in units of area."""
    place["source"], place["target"], place["color"] = rect, part, color
    total = 1
    for axis, (n, m) in enumerate(zip(rect[2:], part[2:], strict=True)):
        units = gcd(n, m)
        place["pixel"][axis], place["step"][axis] = m // units, n // units
        place["magic"][axis] = magic(m // units if method == "area" else 2 * m)
        total *= n // units
    place["total"], place["total_magic"] = total, magic(total)


def magic(divisor: int) -> int:
    """What ``divided`` in common.cuh multiplies by instead of dividing."""
    return 0 if divisor == 1 else -(-(1 << 64) // divisor)
