"""How well the whole federation and its weakest members are served, from per-class AUROCs.

Source: the project's incongruent specification, section 7. A mean over all classes hides a rare disease and a mean
over all patients hides a small hospital, hence four blocks: all classes, frequent classes, rare classes, and the
spread between sites. Undefined values are nan, are left out of every mean and are never 0 or 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def head_and_tail(positives: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Class indices of the head and of the tail: the ceil(C/3) classes with the most and with the fewest positives.

    ``positives`` (C,): positives of each class in the training data of all sites. Of equally frequent classes the one
    with the lower index counts as the more frequent. A single class is both.

    >>> head, tail = head_and_tail([5, 900, 40, 40])
    >>> head.tolist(), tail.tolist()
    ([1, 2], [3, 0])
    """
    positives = np.asarray(positives, np.float64)
    if positives.ndim != 1 or not positives.size:
        raise ValueError(f"positives must be (C,) with at least one class, got {positives.shape}")
    order = np.argsort(-positives, kind="stable")
    third = math.ceil(positives.size / 3)
    return order[:third], order[-third:]


def variance_by_class(sites: Mapping[str, ArrayLike]) -> Floats:
    """Population variance of each class's AUROC between the sites where it is defined, (C,); nan where nowhere."""
    table = np.asarray([sites[site] for site in sorted(sites)], np.float64)
    return np.array([_variance(column) for column in table.T])


def four_blocks(
    pooled: ArrayLike,
    sites: Mapping[str, ArrayLike],
    positives: ArrayLike,
    local_only: Mapping[str, ArrayLike] | None = None,
) -> dict[str, float]:
    """The four blocks and their companions as floats, nan where undefined.

    ``pooled`` (C,): AUROC of each class on the pooled test data. ``sites``: site -> (C,) on its own test data.
    ``positives`` (C,): training positives of all sites. ``local_only``: site -> (C,) of the model that the site trains
    alone, on the same test data.

    ``macro_auroc``, ``head_auroc``, ``tail_auroc``: means over classes of ``pooled``; ``worst_auroc`` its minimum,
    ``auroc_q10`` its 10 % quantile (linear), ``auroc_classes`` the number of defined classes. ``site_variance``:
    population variance of the sites' macro AUROCs. ``class_variance``: mean over classes of `variance_by_class`.
    ``weakest_gain``: macro AUROC minus local-only macro AUROC at the site where the latter is lowest (of equals the
    first by name); nan without ``local_only``. Raises ValueError where shapes or values do not fit.
    """
    head, tail = head_and_tail(positives)
    size = np.size(positives)
    pooled = _checked(pooled, size, "pooled")
    by_site = {site: _checked(sites[site], size, site) for site in sorted(sites)}
    alone = {site: _checked(value, size, f"local-only of {site}") for site, value in (local_only or {}).items()}
    defined = pooled[~np.isnan(pooled)]
    macros = {site: _mean(values) for site, values in by_site.items()}
    return {
        "macro_auroc": _mean(pooled),
        "head_auroc": _mean(pooled[head]),
        "tail_auroc": _mean(pooled[tail]),
        "site_variance": _variance(np.array(list(macros.values()))),
        "worst_auroc": float(defined.min()) if defined.size else math.nan,
        "auroc_q10": float(np.quantile(defined, 0.1)) if defined.size else math.nan,
        "auroc_classes": float(defined.size),
        "class_variance": _mean(variance_by_class(by_site)),
        "weakest_gain": _weakest_gain(macros, {site: _mean(values) for site, values in alone.items()}),
    }


def _weakest_gain(macros: Mapping[str, float], alone: Mapping[str, float]) -> float:
    measured = [site for site in sorted(set(macros) & set(alone)) if not math.isnan(alone[site])]
    if not measured:
        return math.nan
    weakest = min(measured, key=alone.__getitem__)
    return macros[weakest] - alone[weakest]


def _checked(values: ArrayLike, size: int, what: str) -> Floats:
    values = np.asarray(values, np.float64)
    if values.shape != (size,):
        raise ValueError(f"AUROCs ({what}) must be ({size},) as the positives are, got {values.shape}")
    if ((values < 0) | (values > 1)).any():
        raise ValueError(f"AUROCs ({what}) must be in [0, 1] or nan, got {values.tolist()}")
    return values


def _mean(values: Floats) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else math.nan


def _variance(values: Floats) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.var()) if defined.size else math.nan
