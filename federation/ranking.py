"""Multi-label metrics of one set of scores, as papers on multi-label recognition report them: mAP, CF1 and OF1.

They need the scores themselves, so they are for benchmarks on public or local data; what travels between sites are the
histograms of `metrics`. Everything is a fraction in [0, 1]. Source: the project's fedmpt specification, section 7.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

OFFICIAL_THRESHOLDS = tuple(step / 10 for step in range(1, 10))


class ThresholdMetrics(NamedTuple):
    """Precision, recall and F1 as means over classes (C...) and of all entries together (O...)."""

    cp: float
    cr: float
    cf1: float
    op: float
    or_: float
    of1: float


def class_average_precisions(scores: ArrayLike, targets: ArrayLike, known: ArrayLike | None = None) -> Floats:
    """Average precision of every class ``(C,) float64``, nan for a class without a known positive.

    ``scores (n, C)``, ``targets (n, C)`` 0 or 1, ``known (n, C)`` bool, None where all are. Mean over the positives of
    the precision at their rank, ranks by a stable sort: of tied scores the earlier row comes first.
    Raises ValueError for shapes that differ, scores that are nan and known targets that are neither 0 nor 1.
    """
    scores, present, known = _checked(scores, targets, known)
    order = np.argsort(np.where(known, -scores, np.inf), axis=0, kind="stable")
    hits = np.take_along_axis(present, order, axis=0)
    precision = hits.cumsum(axis=0) / np.arange(1, len(hits) + 1)[:, None]
    positives = hits.sum(axis=0)
    found = (precision * hits).sum(axis=0)
    return np.divide(found, positives, out=np.full(found.shape, np.nan), where=positives > 0)


def mean_average_precision(scores: ArrayLike, targets: ArrayLike, known: ArrayLike | None = None) -> float:
    """Mean of `class_average_precisions` over the classes that have a known positive; nan where none has.

    Choice: a class without a positive is left out; in `official_map` it counts 0.

    >>> mean_average_precision([[0.9, 0.1], [0.8, 0.7], [0.3, 0.2]], [[0, 0], [1, 0], [0, 0]])
    0.5
    """
    defined = class_average_precisions(scores, targets, known)
    defined = defined[~np.isnan(defined)]
    return float(defined.mean()) if defined.size else math.nan


def official_map(scores: ArrayLike, targets: ArrayLike) -> float:
    """Mean average precision as the authors of FedMPT compute it: a class without a positive counts 0."""
    return float(np.nan_to_num(class_average_precisions(scores, targets)).mean())


def cf1(scores: ArrayLike, targets: ArrayLike, threshold: ArrayLike = 0.5, known: ArrayLike | None = None) -> float:
    """Mean over all classes of the class F1, 0 for a class without a true positive; see `threshold_metrics`."""
    return threshold_metrics(scores, targets, threshold, known).cf1


def of1(scores: ArrayLike, targets: ArrayLike, threshold: ArrayLike = 0.5, known: ArrayLike | None = None) -> float:
    """F1 of all entries together, 0 without a true positive; see `threshold_metrics`."""
    return threshold_metrics(scores, targets, threshold, known).of1


def threshold_metrics(
    scores: ArrayLike, targets: ArrayLike, threshold: ArrayLike = 0.5, known: ArrayLike | None = None
) -> ThresholdMetrics:
    """All six, with "predicted" meaning score > threshold, a number or ``(C,)``; arrays as above.

    0 / 0 is 0, as in the authors' code. Choice: CF1 is the mean of the classes' F1, as there, not the harmonic mean of
    mean precision and mean recall, which some papers report.
    """
    scores, present, known = _checked(scores, targets, known)
    predicted = (scores > np.asarray(threshold, np.float64)) & known
    correct = (predicted & present).sum(axis=0)
    called, there = predicted.sum(axis=0), present.sum(axis=0)
    return ThresholdMetrics(
        cp=float(_share(correct, called).mean()),
        cr=float(_share(correct, there).mean()),
        cf1=float(_share(2 * correct, called + there).mean()),
        op=float(_share(correct.sum(), called.sum())),
        or_=float(_share(correct.sum(), there.sum())),
        of1=float(_share(2 * correct.sum(), called.sum() + there.sum())),
    )


def official_best(scores: ArrayLike, targets: ArrayLike) -> ThresholdMetrics:
    """The best value of each metric over thresholds 0.1 to 0.9, chosen for each on the very data it is measured on.

    What the authors report; nobody will reach it on new data, so never show it without saying so.
    """
    every = [threshold_metrics(scores, targets, threshold) for threshold in OFFICIAL_THRESHOLDS]
    return ThresholdMetrics(*(max(values) for values in zip(*every, strict=True)))


def _checked(
    scores: ArrayLike, targets: ArrayLike, known: ArrayLike | None
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
    """Scores, known positives and known entries, all (n, C)."""
    scores, targets = np.asarray(scores, np.float64), np.asarray(targets)
    known = np.ones(scores.shape, bool) if known is None else np.asarray(known).astype(bool)
    if scores.ndim != 2 or targets.shape != scores.shape or known.shape != scores.shape:
        raise ValueError(
            f"scores {scores.shape}, targets {targets.shape} and known {known.shape} must all be one (n, C)"
        )
    if np.isnan(scores[known]).any():
        raise ValueError("some scores are nan: did the model diverge?")
    if not np.isin(targets[known], (0, 1)).all():
        raise ValueError("targets of known entries must be 0 or 1; mark the others as not known")
    return scores, known & (targets == 1), known


def _share(part: ArrayLike, whole: ArrayLike) -> Floats:
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)
