"""A straight line through readings, with the interval that its slope lies in, and percentiles.

Least squares and the standard error of the slope: NIST/SEMATECH e-Handbook of Statistical Methods, 4.4.3.1 and
4.4.3.2 (linear least squares, one predictor). Student's distribution for whole degrees of freedom: Abramowitz and
Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Slope:
    """``per_s`` and the ends of its interval of `CONFIDENCE`, over ``count`` readings."""

    per_s: float
    low: float
    high: float
    count: int


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """The slope of ``values`` over time; None for fewer than three readings, or all of one time.

    The interval supposes errors that are independent of each other. Readings of a counter that moves in steps are
    not, and it is then too narrow: compare with the slope of a control.
    """
    n = len(times_s)
    if n < 3:
        return None
    mean_t, mean_v = math.fsum(times_s) / n, math.fsum(values) / n
    spread = math.fsum((t - mean_t) ** 2 for t in times_s)
    if not spread:
        return None
    per_s = math.fsum((t - mean_t) * (v - mean_v) for t, v in zip(times_s, values, strict=True)) / spread
    residual = math.fsum((v - mean_v - per_s * (t - mean_t)) ** 2 for t, v in zip(times_s, values, strict=True))
    half = t_quantile(CONFIDENCE, n - 2) * math.sqrt(residual / (n - 2) / spread)
    return Slope(per_s, per_s - half, per_s + half, n)


def t_quantile(confidence: float, degrees: int) -> float:
    """The t that a Student variable of ``degrees`` of freedom stays within, on both sides, with ``confidence``."""
    low, high = 0.0, 1.0
    while within(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def within(t: float, degrees: int) -> float:
    """The probability that a Student variable of ``degrees`` of freedom lies between -t and t."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | int] | None:
    """``count``, ``p50_ms``, ``p95_ms``, ``p99_ms`` and ``max_ms``, by nearest rank; None without any."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {f"p{p}_ms": ordered[math.ceil(p / 100 * len(ordered)) - 1] * 1e3 for p in (50, 95, 99)}
    return {"count": len(ordered), **ranks, "max_ms": ordered[-1] * 1e3}
