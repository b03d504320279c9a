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


@dataclass(frozen=True)
class Paired:
    """Paired differences over seeds: how many, which share of them is above 0, and which half they are in.

    ``p_below``: one-sided Wilcoxon signed-rank p that the differences are not below 0; ``p_above`` the other side.
    ``shift``: the Hodges-Lehmann estimate, the median of the means of all two differences, each with itself too.
    """

    count: int
    share_above: float | None
    p_below: float | None
    p_above: float | None
    shift: float | None


def paired(differences: Sequence[float]) -> Paired:
    """The comparison of two rows over the seeds that both have (the project's fairfal specification, section 10).

    The p is exact: all signs of the ranks are counted. Choice: differences of 0 leave the ranks, as Wilcoxon has it,
    and count as not above 0. With 3 pairs the smallest p is 1/8, with 5 it is 1/32.
    """
    values = [float(value) for value in differences]
    if not values:
        return Paired(0, None, None, None, None)
    walsh = [(a + b) / 2 for place, a in enumerate(values) for b in values[place:]]
    share = sum(value > 0 for value in values) / len(values)
    ranks = _double_ranks([abs(value) for value in values if value])
    signs = [value > 0 for value in values if value]
    above = sum(rank for rank, is_above in zip(ranks, signs, strict=True) if is_above)
    p_above = _signed_rank_tail(ranks, above)
    p_below = _signed_rank_tail(ranks, sum(ranks) - above)
    return Paired(len(values), share, p_below, p_above, statistics.median(walsh))


def _double_ranks(sizes: Sequence[float]) -> list[int]:
    """Twice the rank of each value, 1 for the smallest; equal values share the mean of their ranks."""
    return [sum(other < size for other in sizes) + sum(other <= size for other in sizes) + 1 for size in sizes]


def _signed_rank_tail(ranks: Sequence[int], found: int) -> float:
    """Share of all choices of signs whose positive ranks sum to at least ``found``."""
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    return sum(ways[found:]) / 2 ** len(ranks)


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
