"""A bench in words: what is fastest, what cannot be told from it, and what pinning a buffer for every frame costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from framepipe.bench._plots import measured, name_of
from framepipe.bench._reading import NO_BREAK, TIMES, Cell, base_cells, figure, middle, number, samples
from framepipe.bench.noise import TOLERANCE, differs

_PER_FRAME = "per_frame"
"""How the names of strategies end that allocate for every frame; before it stands the one that allocates once."""
_POOLED = "pooled"


def sentences(group: Sequence[Cell]) -> list[str]:
    """What the cells of one kind of work say, the main thing first and there is always one."""
    cells = measured(base_cells(group))
    if not cells:
        return ["Nothing was measured."]
    return [_fastest(cells), *_near(cells), *_per_frame(cells), *_few(cells)]


def _fastest(cells: Sequence[Cell]) -> str:
    rate, moved = (middle(samples(cells[0], measure)) for measure in ("fps", "bytes_per_s"))
    also = f", {figure(moved, 'bytes_per_s')}" if moved else ""
    ranked = "is fastest" if len(cells) > 1 else "ran alone"
    return f"{name_of(cells[0])} {ranked}: {figure(rate, 'fps')}{also}."


def _near(cells: Sequence[Cell]) -> Iterator[str]:
    if len(cells) < 2:
        return
    best = samples(cells[0], "fps")
    near = [name_of(cell) for cell in cells[1:] if not differs(best, samples(cell, "fps"))]
    if near:
        yield f"Within noise of it: {', '.join(near)}."
    else:
        yield "Every other strategy is slower by more than the noise."


def _per_frame(cells: Sequence[Cell]) -> Iterator[str]:
    """Allocating and page-locking for every frame, as against once: in rate and in bytes."""
    named = {name_of(cell): cell for cell in cells}
    for name, each in named.items():
        partner = name.removesuffix(_PER_FRAME).rstrip("_") or _POOLED
        if name.endswith(_PER_FRAME) and partner in named:
            yield _cost(named[partner], each)


def _cost(pooled: Cell, each: Cell) -> str:
    once, often = (middle(samples(cell, "fps")) or 0.0 for cell in (pooled, each))
    what = f"A buffer for every frame ({name_of(each)})"
    if not differs(samples(pooled, "fps"), samples(each, "fps")):
        cost = f"{what} costs no rate that could be told from noise"
    elif often < once:
        ratio = f"{number(once / often)}{NO_BREAK}{TIMES}" if often else "infinitely"
        cost = (
            f"{what} makes it {ratio} slower: {figure(often, 'fps')} where {name_of(pooled)} has {figure(once, 'fps')}"
        )
    else:
        cost = f"{what} is {number(often / once)}{NO_BREAK}{TIMES} as fast as {name_of(pooled)}"
    return f"{cost}{_bytes(pooled, each)}."


def _bytes(pooled: Cell, each: Cell) -> str:
    once, often = (middle(samples(cell, "pinned_bytes_taken")) for cell in (pooled, each))
    if once is None or often is None:
        return "; what either page-locks was not measured"
    if not once and not often:
        return "; neither page-locks anything here"
    if abs(often - once) <= TOLERANCE * once:
        return f"; both page-lock {figure(once, 'bytes')}"
    way = "more" if often > once else "less"
    both = f"{figure(often, 'bytes')} against {figure(once, 'bytes')}"
    return f", and page-locks {figure(abs(often - once), 'bytes')} {way} ({both})"


def _few(cells: Sequence[Cell]) -> Iterator[str]:
    least = min(len(samples(cell, "fps")) for cell in cells)
    if least < 2:
        yield f"One repeat: the noise is unknown, and medians within {TOLERANCE * 100:g}{NO_BREAK}% count as equal."
