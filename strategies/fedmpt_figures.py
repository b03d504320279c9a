"""What papers on multi-label recognition report, from the sites' pooled score histograms: mAP, CF1 and OF1.

Source: the project's fedmpt specification, section 7; `federation.ranking` has the same from the scores themselves,
which stay at the sites. Counts at a threshold are exact at the nearest edge of a bin, and 0.5 is an edge.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from federation.metrics import ScoreHistogram
from strategies.evaluation import PooledScores

OFFICIAL_THRESHOLDS = tuple(step / 10 for step in range(1, 10))
F1_NAMES = ("cf1", "of1")


def ranking_figures(pool: PooledScores, split: str, fitted: ArrayLike | None) -> dict[str, float | None]:
    """Headline figures of a pooled evaluation, over all labels of the federation; fractions, undefined is None.

    ``map``: mean over the labels with a positive, ``map_labels`` of them; in ``official_map``, as the authors have it,
    the others count 0. ``cf1`` and ``of1`` at 0.5; ``cf1_tuned`` and ``of1_tuned`` at ``fitted (C,)``, the thresholds
    that the selected model got on validation data (``progress.best_thresholds``); on the split ``val`` itself, at those
    just fitted on it. ``official_best_cf1_optimistic`` and ``official_best_of1_optimistic`` are what the authors
    report: the best of 0.1 to 0.9, each chosen on the very data it is measured on, which nobody reaches on new data.
    """
    histogram = pool.histogram()
    precision = histogram.average_precision()
    there = ~np.isnan(precision)
    found: dict[str, float | None] = {
        "map": float(precision[there].mean()) if there.any() else None,
        "map_labels": int(there.sum()),
        "official_map": float(np.nan_to_num(precision).mean()),
    }
    if split == "val":
        fitted = pool.best_thresholds()
    tuned = (None, None) if fitted is None else f1_of_all(histogram, fitted)
    best = np.max([f1_of_all(histogram, threshold) for threshold in OFFICIAL_THRESHOLDS], axis=0)
    for number, name in enumerate(F1_NAMES):
        found[name] = f1_of_all(histogram, 0.5)[number]
        found[f"{name}_tuned"] = tuned[number]
        found[f"official_best_{name}_optimistic"] = float(best[number])
    return found


def f1_of_all(histogram: ScoreHistogram, thresholds: ArrayLike) -> tuple[float, float]:
    """CF1 and OF1 at a threshold or at ``(C,)`` of them; 0 / 0 is 0, as in `federation.ranking.threshold_metrics`."""
    tp, fp, fn, _ = histogram.counts(thresholds)
    called = 2 * tp + fp + fn
    by_label = np.divide(2 * tp, called, out=np.zeros(len(tp)), where=called > 0)
    return float(by_label.mean()), float(2 * tp.sum() / called.sum()) if called.sum() else 0.0
