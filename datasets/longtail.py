"""A long-tailed subset of single-label data: the first class keeps most samples, the last ``rho`` times fewer.

The draw gives one list of positions. Training and query views of the pictures must both be made of that list: drawing
once for each view pairs a position with another picture of the same class (spec section 7-a of the project's fairfal
specification).
"""

from __future__ import annotations

import numpy as np

from datasets import partition


def long_tail_counts(max_count: int, num_classes: int, rho: float) -> list[int]:
    """Class sizes int(max_count (1 / rho)^(c / (C - 1))), c = 0 the head; DataError for rho below 1 (spec 9).

    >>> long_tail_counts(500, 5, 20)
    [500, 236, 111, 52, 25]
    """
    return partition.long_tail_counts(max_count, num_classes, rho)


def long_tail_subset(labels: np.ndarray, rho: float, rng: np.random.Generator, *, num_classes: int = 0) -> np.ndarray:
    """Positions in ``labels (n,) int`` that stay, ``int64``, class by class in the order drawn (spec 9).

    Each class is shuffled in turn and its first `long_tail_counts` samples stay. ``num_classes``: 0 for the largest
    label plus 1. Choice: the head's size is the mean class size, as in the source; a class with fewer samples than its
    count keeps them all.
    """
    labels = np.asarray(labels).reshape(-1)
    num_classes = num_classes or int(labels.max(initial=-1)) + 1
    if num_classes == 0:
        return np.empty(0, dtype=np.int64)
    return partition.long_tail_rows(labels, long_tail_counts(len(labels) // num_classes, num_classes, rho), rng)
