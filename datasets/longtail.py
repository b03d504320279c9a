"""A long tail of classes: the first keeps most samples, the last ``rho`` times fewer (spec section 9 of fairfal)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datasets.records import DataError


def long_tail_counts(max_count: int, num_classes: int, rho: float) -> list[int]:
    """Class sizes n_c = int(max_count (1 / rho)^(c / (C - 1))), the first class the largest; DataError for rho below 1.

    >>> long_tail_counts(6000, 10, 20)
    [6000, 4301, 3083, 2210, 1584, 1135, 814, 583, 418, 300]
    """
    if rho < 1:
        raise DataError(f"long-tail ratio is head over tail and at least 1, got {rho}")
    if num_classes < 2:
        return [max_count] * num_classes
    return [int(max_count * (1 / rho) ** (label / (num_classes - 1))) for label in range(num_classes)]


def long_tail_rows(classes: np.ndarray, counts: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Positions in ``classes (n,)`` that stay: each class is shuffled in turn and its first ``counts[c]`` are kept.

    A class with fewer samples keeps them all.
    """
    kept = []
    for label, count in enumerate(counts):
        members = np.flatnonzero(classes == label)
        rng.shuffle(members)
        kept.append(members[:count])
    return np.concatenate(kept)
