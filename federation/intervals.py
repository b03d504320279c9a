"""Confidence intervals computed from counts alone: of a proportion, of an AUROC, of any statistic of a histogram.

They describe the sampling of test examples at the given sites, not how another hospital or another training would do.
"""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from federation.metrics import Floats, ScoreHistogram, ratio


def wilson_interval(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Wilson's score interval of a proportion (JASA 22, 1927), two float64 arrays; nan where `trials` is 0."""
    successes, trials = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    z = _z(confidence)
    p = ratio(successes, trials)
    n = np.where(trials > 0, trials, np.nan)
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    # the bounds of 0 of n and n of n are 0 and 1 by definition, but not after rounding
    return np.where(p == 0, 0.0, centre - half), np.where(p == 1, 1.0, centre + half)


def auroc_interval(
    auroc: ArrayLike, positives: ArrayLike, negatives: ArrayLike, confidence: float = 0.95
) -> tuple[Floats, Floats]:
    """Newcombe's score interval of an AUROC ("method 5", Statistics in Medicine 25:559, 2006), two float64 arrays.

    Choice: not DeLong's, whose width is 0 at an AUROC of 1, however few the patients. nan where `auroc` is nan.
    """
    auroc, m, n = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (auroc, positives, negatives)))
    z = _z(confidence)
    size = (m + n) / 2 - 1

    def excess(theta: Floats) -> Floats:
        spread = 1 + size * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (theta - auroc) ** 2 * np.maximum(m * n, 1) - z**2 * theta * (1 - theta) * spread

    bounds = []
    for outer in (0.0, 1.0):
        inside, outside = auroc.copy(), np.full_like(auroc, outer)
        for _ in range(60):  # bisection: halves an interval of at most 1 to below float64 resolution
            middle = (inside + outside) / 2
            within = excess(middle) <= 0
            inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
        bounds.append(np.where(np.isnan(auroc), np.nan, inside))
    return bounds[0], bounds[1]


def bootstrap_interval(
    histogram: ScoreHistogram,
    statistic: Callable[[ScoreHistogram], float],
    *,
    draws: int = 200,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of a statistic over redrawn histograms; (nan, nan) where the statistic is undefined.

    Labels are redrawn independently (`ScoreHistogram.resample`): for a mean over labels that are correlated within
    patients the interval is too narrow. Raises ValueError on fewer than 2 draws.
    """
    if draws < 2:
        raise ValueError(f"a bootstrap needs at least 2 draws, got {draws}")
    generator = np.random.default_rng(seed)
    values = [statistic(histogram.resample(generator)) for _ in range(draws)]
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)
