"""The benchmarks of multi-label prompt tuning: sites by label co-occurrence, and labels that nobody wrote down.

Pure functions of (targets, arguments, seed or generator). Source: the project's fedmpt specification, section 6.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from datasets.partition import (
    NOWHERE,
    Partition,
    _partition,
    _require_sites,
    _site_names,
    _splits,
    _unit_positives,
)
from datasets.records import ABSENT, PRESENT, SPLITS, UNKNOWN, DataError

MaskMode = Literal["drop_positive", "unknown_entries"]
CLUSTER_SEED = 42


def clusters_for(share: float, num_classes: int) -> int:
    """How many clusters, one a site, a share t of the classes makes: max(1, round(t C)); DataError unless 0 < t <= 1.

    >>> clusters_for(0.1, 20), clusters_for(0.1, 80), clusters_for(1.0, 20)
    (2, 8, 20)
    """
    if not 0 < share <= 1:
        raise DataError(f"the share of classes is {share}, expected a number above 0, at most 1")
    return max(1, round(share * num_classes))


def label_features(targets: np.ndarray) -> NDArray[np.float64]:
    """Softmax over the classes of each row's 0/1 labels ``(n, C)``; unknown labels (-1) count as absent.

    With k positives of C a positive has e / (k e + C - k), an absent label 1 / (k e + C - k).
    """
    weights = np.where(np.asarray(targets) == PRESENT, np.e, 1.0)
    return weights / weights.sum(axis=1, keepdims=True)


def label_clusters(
    targets: np.ndarray, num_clusters: int, *, fit_on: np.ndarray | None = None, seed: int = CLUSTER_SEED
) -> NDArray[np.int64]:
    """Cluster of every row ``(n,) int64``: k-means on `label_features`; cluster j is the data of site j.

    ``fit_on (n,) bool``: the rows that the centres are made from, normally the training rows; the others go to the
    nearest centre, so that a site is tested on the kind of pictures it was trained on. None for all. No cluster is
    empty on those rows: where k-means leaves one, it gets the row of the largest cluster that is farthest from that
    cluster's centre (ties: the lower row).

    Choice: scikit-learn's k-means, as the authors use, with 10 starts. Raises DataError for more clusters than rows.
    """
    features = label_features(targets)
    fitted = np.arange(len(features)) if fit_on is None else np.flatnonzero(fit_on)
    if not 1 <= num_clusters <= len(fitted):
        raise DataError(f"{len(fitted)} rows make no {num_clusters} clusters; ask for 1 to {len(fitted)}")
    from sklearn.cluster import KMeans  # heavy, and only simulations come here
    from sklearn.exceptions import ConvergenceWarning

    means = KMeans(n_clusters=num_clusters, n_init=10, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct label sets than clusters: filled below
        means.fit(features[fitted])
    clusters = means.predict(features).astype(np.int64)
    clusters[fitted] = _filled(clusters[fitted], features[fitted], means.cluster_centers_)
    return clusters


def by_label_clusters(
    targets: np.ndarray, table: pd.DataFrame, *, num_sites: int, seed: int = CLUSTER_SEED
) -> Partition:
    """One site a cluster of label sets that occur together: `label_clusters` of whole patients.

    A patient's label set is the union of the positives of their rows (a row without a patient is one of its own). The
    centres come from training patients; those of val and test go to the nearest, so that a site is tested on its own
    kind of pictures (the authors' test rows follow the training rows' clusters by position; spec section 6).
    Raises DataError for more sites than training patients.
    """
    splits = _splits(table)
    _require_sites(num_sites, splits["train"], min_size=0)
    positives = np.concatenate([_unit_positives(targets, splits[name]) for name in SPLITS])
    in_train = np.arange(len(positives)) < splits["train"].num_units
    clusters = label_clusters(positives, num_sites, fit_on=in_train, seed=seed)
    site_of_row = np.full(len(targets), NOWHERE, dtype=np.int64)
    first = 0
    for name in SPLITS:
        part = splits[name]
        site_of_row[part.rows] = clusters[first : first + part.num_units][part.unit_of_row]
        first += part.num_units
    arguments = {"num_sites": num_sites, "cluster_seed": seed}
    return _partition("label_clusters", arguments, _site_names(num_sites), site_of_row, targets, table)


def mask_labels(targets: np.ndarray, share: float, mode: MaskMode, rng: np.random.Generator) -> NDArray[np.int8]:
    """A copy of training ``targets (n, C) int8`` of which a share is lost, each entry independently.

    ``drop_positive``: a positive reads absent with probability ``share``, the published benchmark. ``unknown_entries``:
    any known entry reads -1 with that probability. Mask training rows only: masked test labels measure nothing.
    Choice: both modes draw one number an entry in row-major order, so the masks of two shares are nested.
    """
    if not 0 <= share <= 1:
        raise DataError(f"the share of lost labels is {share}, expected a number from 0 to 1")
    if mode not in get_args(MaskMode):
        raise DataError(f"mask mode {mode!r} is unknown; there are {', '.join(get_args(MaskMode))}")
    lost = rng.random(np.shape(targets)) < share
    masked = np.array(targets, np.int8)
    if mode == "drop_positive":
        masked[lost & (masked == PRESENT)] = ABSENT
    else:
        masked[lost] = UNKNOWN
    return masked


def _filled(clusters: NDArray[np.int64], features: np.ndarray, centres: np.ndarray) -> NDArray[np.int64]:
    clusters = clusters.copy()
    for empty in np.setdiff1d(np.arange(len(centres)), clusters):
        largest = np.bincount(clusters).argmax()
        members = np.flatnonzero(clusters == largest)
        distances = np.linalg.norm(features[members] - centres[largest], axis=1)
        clusters[members[distances.argmax()]] = empty
    return clusters
