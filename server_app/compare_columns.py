"""The columns of a comparison: their names, which side is better, and how a figure is written."""

from __future__ import annotations

import re

from server_app.compare_figures import BYTES, ROUND_SECONDS, SECONDS, WEAKEST_GAIN, WORST_LABEL, WORST_SITE
from server_app.report_words import METRIC_NAMES, data_size, metric_name

NAMES = {
    WORST_SITE: "AUROC, worst site",
    WORST_LABEL: "AUROC, worst label",
    WEAKEST_GAIN: "Weakest site's gain",
    BYTES: "Bytes a round (to the sites / back)",
    ROUND_SECONDS: "Seconds a round",
    SECONDS: "Seconds a run",
    "head_auroc": "AUROC, frequent labels",
    "tail_auroc": "AUROC, rare labels",
    "auroc_q10": "AUROC, 10 % quantile of labels",
    "site_variance": "Variance of AUROC between sites",
    "class_variance": "Variance of a label's AUROC between sites",
}
EXTRA = (WORST_SITE, WORST_LABEL, WEAKEST_GAIN, BYTES, ROUND_SECONDS, SECONDS)
"""Columns that every table of figures has beside the plan's metrics; the gain where the plan names its row."""

LOWER_IS_BETTER = re.compile(rf"(\w+_)?(loss|(site|class)_variance)$|({BYTES}|{SECONDS}|{ROUND_SECONDS})$")
HIGHER_IS_BETTER = re.compile(
    r"(\w+_)?(macro|micro|worst|head|tail)_(auroc|ap|f1|recall)$|(\w+_)?(auroc|ap|f1)_q\d+$"
    r"|(official_)?map$|[co]f1(_tuned)?$|official_best_[co]f1_optimistic$"
    rf"|(balanced_)?accuracy$|neg_loss$|({WORST_SITE}|{WEAKEST_GAIN})$"
)


def column_name(key: str) -> str:
    """A figure in words. A first part before a known name is the view that a method scored.

    >>> column_name("image_head_auroc")
    'AUROC, frequent labels (image)'
    """
    view, _, rest = key.partition("_")
    known = {**METRIC_NAMES, **NAMES}
    if key not in known and rest in known:
        return f"{known[rest]} ({view})"
    return NAMES.get(key) or metric_name(key)


def better(key: str) -> str:
    """``lower`` or ``higher``; empty for a figure that has no better side."""
    if HIGHER_IS_BETTER.match(key):
        return "higher"
    return "lower" if LOWER_IS_BETTER.match(key) else ""


def figure(key: str, value: float, *, like: float | None = None) -> str:
    """A figure as people read it, with the decimals of another one that it stands beside."""
    size = abs(value if like is None else like)
    if key == BYTES:
        return data_size(value)
    if key in (SECONDS, ROUND_SECONDS):
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    decimals = _decimals(key)
    return f"{value:.{decimals}f}" if size >= 10**-decimals or size == 0 else f"{value:.3g}"


def signed(key: str, difference: float) -> str:
    """A difference of two figures."""
    return f"{difference:+.{_decimals(key)}f}"


def _decimals(key: str) -> int:
    return 4 if key.endswith("variance") else 3
