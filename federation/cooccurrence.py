"""Whether a label is called where it is absent more often when another that goes with it is there.

Source: the project's incongruent specification, section 3.5 (``cooc_fp_lift``). A model that has learnt which findings
go together must not take one for the cause of the other. Everything a site tells is a count, which adds up over sites.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

PAIR_COUNTS = dict.fromkeys(("with_i", "with_i_called", "without_i", "without_i_called"), "counts")
"""The counts of `absent_label_counts` in its order, as a payload declares them: each ``(C * C)``, -1 where hidden."""
LIKELY = 1.0
"""Pairs (i, j) enter the mean where the prior, a logarithm, says more than this of j given i."""
MAX_LIFT = 2.0
"""Above it the prior is taken to act as a cause."""


def absent_label_counts(called: NDArray[np.bool_], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Samples without label j and how many of them are called j, at [i, j]; ``(4, C, C)`` in order of `PAIR_COUNTS`.

    ``called (n, C)``: score above the threshold; ``targets (n, C)`` of 1, 0 and -1. Only samples count that are known
    in both labels: the first two counts are over those that have label i, the others over those that have neither.
    """
    there, absent = ((targets == value).astype(np.int64) for value in (1, 0))
    false = absent * called
    return np.stack([other.T @ part for other in (there, absent) for part in (absent, false)])


def false_positive_lift(counts: NDArray[np.int64], prior: NDArray[np.float64]) -> tuple[float, int, int]:
    """Mean of FPR(j | i present) / FPR(j | i absent) over pairs with prior above `LIKELY`, of how many, how many not.

    ``counts (4, C, C)`` as of `absent_label_counts`, ``prior (C, C)``. A pair without samples on a side, or without a
    false positive where i is absent, has no ratio and is left out of the mean, which is nan where no pair has one.

    >>> false_positive_lift(np.array([[[0, 10]] * 2, [[0, 6]] * 2, [[0, 40]] * 2, [[0, 8]] * 2]), [[0, 1.5], [0, 0]])
    (3.0, 1, 0)
    """
    likely = np.asarray(prior) > LIKELY
    present, present_called, absent, absent_called = (part[likely].astype(np.float64) for part in counts)
    there = present * absent_called > 0
    ratios = present_called[there] * absent[there] / (present[there] * absent_called[there])
    return float(ratios.mean()) if there.any() else math.nan, int(there.sum()), int((~there).sum())
