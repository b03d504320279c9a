"""Headline figures and per class tables of histograms and confusion matrices: plain JSON values, undefined is None.

Choice: an undefined value is left out of every average and counted; the fednca specification, section 6, gives a class
without positives the F1 0, here it has none.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from federation.intervals import auroc_interval, bootstrap_interval, wilson_interval
from federation.metrics import ScoreHistogram, none_if_nan


def summarise(
    histogram: ScoreHistogram,
    labels: Sequence[str],
    *,
    thresholds: ArrayLike = 0.5,
    excluded: Collection[str] = (),
    bootstrap_draws: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Headline figures over the labels that are not in `excluded`; every undefined one is None.

    For each of auroc, ap, f1: `macro_*`, `micro_*`, `worst_*` with `worst_*_label`, the quantiles over classes `*_q10`,
    `*_q50`, `*_q90`, and `*_classes`, the number of classes averaged. `undefined_labels` are headline labels without an
    AUROC, `excluded_labels` those kept out. With `bootstrap_draws` the macro AUROC gets `macro_auroc_low` and `_high`.
    """
    headline = _headline(histogram, labels, excluded)
    chosen = np.flatnonzero(headline)
    summary: dict[str, Any] = {}
    pooled = histogram.subset(chosen).pooled() if chosen.size else ScoreHistogram(1, histogram.bins)
    counts = histogram.counts(thresholds)
    tp, fp, fn = (int(count[chosen].sum()) for count in (counts.tp, counts.fp, counts.fn))
    micro_f1 = 2 * tp / (2 * tp + fp + fn) if tp + fn else None
    auroc = histogram.auroc()
    for name, values, micro in (
        ("auroc", auroc, pooled.auroc()[0]),
        ("ap", histogram.average_precision(), pooled.average_precision()[0]),
        ("f1", histogram.f1(thresholds), micro_f1),
    ):
        defined = [label for label in chosen if not np.isnan(values[label])]
        worst = min(defined, key=lambda label: values[label], default=None)
        summary[f"macro_{name}"] = float(values[defined].mean()) if defined else None
        summary[f"micro_{name}"] = none_if_nan(micro)
        summary[f"worst_{name}"] = None if worst is None else float(values[worst])
        summary[f"worst_{name}_label"] = None if worst is None else labels[worst]
        for percent in (10, 50, 90):
            summary[f"{name}_q{percent}"] = float(np.percentile(values[defined], percent)) if defined else None
        summary[f"{name}_classes"] = len(defined)
    summary["undefined_labels"] = [labels[label] for label in chosen if np.isnan(auroc[label])]
    summary["excluded_labels"] = [label for label, used in zip(labels, headline, strict=True) if not used]
    if bootstrap_draws:
        low, high = _macro_auroc_interval(histogram, chosen, bootstrap_draws, seed)
        summary["macro_auroc_low"], summary["macro_auroc_high"] = none_if_nan(low), none_if_nan(high)
    return summary


def per_class_table(
    histogram: ScoreHistogram,
    labels: Sequence[str],
    *,
    thresholds: ArrayLike = 0.5,
    excluded: Collection[str] = (),
    confidence: float = 0.95,
) -> list[dict[str, Any]]:
    """One JSON-ready row a label, in label order; undefined values are None, `in_headline` False for excluded labels.

    `suppressed_sites` counts the sites whose part of the class was blanked for its small counts.
    """
    headline = _headline(histogram, labels, excluded)
    tp, fp, fn, tn = histogram.counts(thresholds)
    auroc = histogram.auroc()
    auroc_low, auroc_high = auroc_interval(auroc, tp + fn, fp + tn, confidence)
    sensitivity_low, sensitivity_high = wilson_interval(tp, tp + fn, confidence)
    specificity_low, specificity_high = wilson_interval(tn, tn + fp, confidence)
    columns: dict[str, Sequence[Any] | NDArray[Any]] = {
        "label": list(labels),
        "positives": tp + fn,
        "negatives": fp + tn,
        "suppressed_sites": histogram.suppressed,
        "auroc": auroc,
        "auroc_low": auroc_low,
        "auroc_high": auroc_high,
        "ap": histogram.average_precision(),
        "f1": histogram.f1(thresholds),
        "sensitivity": histogram.sensitivity(thresholds),
        "sensitivity_low": sensitivity_low,
        "sensitivity_high": sensitivity_high,
        "specificity": histogram.specificity(thresholds),
        "specificity_low": specificity_low,
        "specificity_high": specificity_high,
        "ppv": histogram.ppv(thresholds),
        "threshold": histogram.snap(thresholds),
        "in_headline": headline,
    }
    lists = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values())
    return [
        {name: none_if_nan(value) for name, value in zip(columns, row, strict=True)} for row in zip(*lists, strict=True)
    ]


def summarise_confusion(
    matrix: ArrayLike, labels: Sequence[str], *, excluded: Collection[str] = ()
) -> dict[str, float | int | str | None]:
    """Accuracy, balanced accuracy (mean recall), macro F1 and worst recall of a (C, C) confusion matrix.

    Class means run over the labels that have examples and are not in `excluded`; `recall_classes` says how many.
    Accuracy counts the examples of all labels that are not excluded. None where there is no such example.
    """
    matrix = np.asarray(matrix)
    if matrix.shape != (len(labels), len(labels)):
        raise ValueError(f"{len(labels)} labels need a ({len(labels)}, {len(labels)}) matrix, got {matrix.shape}")
    _check_excluded(labels, excluded)
    rows = np.array([row for row, label in enumerate(labels) if label not in excluded and matrix[row].sum()], np.int64)
    if not rows.size:
        names = ("accuracy", "balanced_accuracy", "macro_f1", "worst_recall", "worst_recall_label")
        return {**dict.fromkeys(names), "recall_classes": 0}
    hits, true = matrix.diagonal()[rows], matrix[rows].sum(1)
    recall = hits / true
    worst = int(recall.argmin())
    return {
        "accuracy": float(hits.sum() / true.sum()),
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float((2 * hits / (true + matrix.sum(0)[rows])).mean()),
        "worst_recall": float(recall[worst]),
        "worst_recall_label": labels[rows[worst]],
        "recall_classes": int(rows.size),
    }


def recalls(matrix: ArrayLike) -> list[float | None]:
    """Recall of each class of a (C, C) confusion matrix, true labels in rows; None for a class without examples.

    >>> recalls([[3, 1], [0, 0]])
    [0.75, None]
    """
    matrix = np.asarray(matrix)
    pairs = zip(matrix.diagonal().tolist(), matrix.sum(axis=1).tolist(), strict=True)
    return [hits / true if true else None for hits, true in pairs]


def _macro_auroc_interval(
    histogram: ScoreHistogram, chosen: NDArray[np.integer], draws: int, seed: int
) -> tuple[float, float]:
    defined = chosen[~np.isnan(histogram.auroc()[chosen])]
    if not defined.size:
        return float("nan"), float("nan")
    return bootstrap_interval(
        histogram.subset(defined), lambda drawn: float(drawn.auroc().mean()), draws=draws, seed=seed
    )


def _headline(histogram: ScoreHistogram, labels: Sequence[str], excluded: Collection[str]) -> NDArray[np.bool_]:
    """Which labels are not excluded, (C,) bool; raises ValueError on a wrong number of labels or an unknown name."""
    if len(labels) != histogram.num_classes:
        raise ValueError(f"{len(labels)} labels for {histogram.num_classes} classes")
    _check_excluded(labels, excluded)
    return np.array([label not in excluded for label in labels])


def _check_excluded(labels: Sequence[str], excluded: Collection[str]) -> None:
    unknown = sorted(set(excluded) - set(labels))
    if unknown:
        raise ValueError(f"excluded labels {unknown} are not among the labels {list(labels)}")
