"""Mean, spread and interval over few seeds, in float64. Undefined is None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """``count`` defined values, their mean and their standard deviation with ddof = 1."""

    count: int
    mean: float | None
    sd: float | None


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and sd of the values that are defined; the mean of none and the sd of one are None."""
    defined = [value for value in values if value is not None]
    return Spread(
        len(defined),
        statistics.fmean(defined) if defined else None,
        statistics.stdev(defined) if len(defined) > 1 else None,
    )


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's interval of a mean; None for fewer than two values.

    Choice: not a bootstrap. Of three values it redraws ten different samples, and its interval, never wider than the
    range of the three, covers far less than it promises.
    """
    found = spread(values)
    if found.mean is None or found.sd is None:
        return None
    half = t_quantile(confidence, found.count - 1) * found.sd / math.sqrt(found.count)
    return found.mean - half, found.mean + half


def t_quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| <= t) = ``confidence`` for Student's T, by bisection over the angle atan(t / sqrt(degrees)).

    >>> round(t_quantile(0.95, 2), 4)
    4.3027
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(f"confidence must be in (0, 1) and degrees at least 1, got {confidence} and {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # halves the interval to below float64 resolution
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, degrees) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _central(angle: float, degrees: int) -> float:
    """P(|T| <= tan(angle) * sqrt(degrees)): Abramowitz and Stegun 26.7.3 (odd degrees) and 26.7.4 (even)."""
    cosine, odd = math.cos(angle), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
