"""What is a difference and what is noise: one rule for tables, pages and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

TOLERANCE = 0.03
"""Medians nearer than this share of the first one never differ."""
SIGNIFICANT = 0.05
ENOUGH = 5
"""Repeats on each side from which ranks are tested; fewer can hardly reach p < 0.05."""
APART = 0.5
"""How far apart the ranges of fewer repeats must be, as a share of the wider one.

Three and three of one normal distribution have ranges that do not overlap one time in ten, and so far apart one time in
forty; where the means are five standard deviations apart, 19 times in 20 (drawn 400,000 times).
"""


def differs(first: Sequence[float], second: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Whether two series of repeats differ by more than the noise.

    They do if their medians are further apart than ``tolerance`` (a share of the first median) and, besides, their
    ranges do not overlap or, with at least `ENOUGH` repeats each, `rank_sum_p` is below `SIGNIFICANT`. With fewer
    repeats on a side there must be more between the ranges than `APART` of the wider one. One repeat a side leaves the
    tolerance alone to decide. Nothing differs from an empty series.
    """
    if not first or not second:
        return False
    here, there = median(first), median(second)
    if abs(there - here) <= tolerance * abs(here):
        return False
    between = max(min(second) - max(first), min(first) - max(second))
    if min(len(first), len(second)) < ENOUGH:
        return between > APART * max(max(each) - min(each) for each in (first, second))
    return between > 0 or rank_sum_p(first, second) < SIGNIFICANT


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of the rank-sum test (Mann and Whitney 1947), exactly, given the ties that there are.

    Every way to deal the ranks to the two series counts alike; the p is twice the share of those at least as far out
    as what was seen, 1 at most. The work grows with the fourth power of the repeats: meant for some dozens.
    """
    ranks = _doubled_ranks([*first, *second])
    seen = sum(ranks[: len(first)])
    ways = _ways(ranks, len(first))
    total = sum(ways.values())
    low = sum(count for rank_sum, count in ways.items() if rank_sum <= seen)
    high = sum(count for rank_sum, count in ways.items() if rank_sum >= seen)
    return min(1.0, 2 * min(low, high) / total)


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value: tied ones share the middle of their places, which doubled is whole."""
    below = {value: sum(other < value for other in values) for value in set(values)}
    upto = {value: sum(other <= value for other in values) for value in set(values)}
    return [below[value] + upto[value] + 1 for value in values]


def _ways(ranks: Sequence[int], size: int) -> dict[int, int]:
    """For each sum, how many choices of ``size`` of the ranks have it."""
    chosen: list[dict[int, int]] = [{0: 1}, *({} for _ in range(size))]
    for rank in ranks:
        for taken in range(size, 0, -1):  # downwards, so that a rank is taken once
            for rank_sum, count in chosen[taken - 1].items():
                chosen[taken][rank_sum + rank] = chosen[taken].get(rank_sum + rank, 0) + count
    return chosen[size]
