"""Label-skewed sites for single-label data as one-shot federated learning is measured on; none of them can hang.

The project's fedmitr specification, section 8. As in `datasets.partition`: pure functions of (targets, table,
generator, arguments), whole patients, val and test dealt by the mix that a site has in train. A patient counts for the
class of most of their rows.

Which one: `dirichlet_class` for sites of unequal size (DENSE); `dirichlet_client` for sites of equal size with a mix of
their own (Co-Boosting); `n_classes_per_site` for the pathological case, down to one class a site.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from datasets.partition import (
    NOWHERE,
    Partition,
    _cut_by_shares,
    _partition,
    _require_positive,
    _require_sites,
    _single_labels,
    _site_names,
    _splits,
    _unit_classes,
    dirichlet,
)
from datasets.records import SPLITS, DataError

FEW_SITES = 5


def dirichlet_class(
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    *,
    num_sites: int,
    alpha: float,
    min_size: int = 10,
) -> Partition:
    """Each class is cut among the sites by Dirichlet(alpha), a full site gets nothing more: DENSE's protocol.

    It is `dirichlet`, under the name that the fedmitr specification gives it: drawn again until every site has
    ``min_size`` training rows, DataError after 1,000 tries.
    """
    found = dirichlet(targets, table, rng, num_sites=num_sites, alpha=alpha, min_size=min_size)
    return dataclasses.replace(found, kind="dirichlet_class")


def dirichlet_client(
    targets: np.ndarray, table: pd.DataFrame, rng: np.random.Generator, *, num_sites: int, alpha: float
) -> Partition:
    """Sites of equal size whose class mixes are drawn from Dirichlet(alpha) (Co-Boosting).

    Sites take turns at random; each draws a class from its own mix and takes the next unused patient of it. Choice: a
    class that is used up is left out of the draw, and where nothing of a site's mix is left it takes any class that is
    there (the source draws again, for ever). Choice: sizes differ by at most one patient, so no row is dropped. Val and
    test are cut by the shares that the sites got of each class in train.
    """
    _require_positive("alpha", alpha)
    splits, class_of_unit = _dealt_parts(targets, table, num_sites)
    mixes = rng.dirichlet(np.full(targets.shape[1], alpha), num_sites)  # (K, C)
    of_train = class_of_unit["train"]
    turns = rng.permutation(np.arange(len(of_train)) % num_sites)
    stock = np.bincount(of_train, minlength=targets.shape[1])
    counts = np.zeros_like(mixes, dtype=np.int64)
    for site, point in zip(turns, rng.random(len(turns)), strict=True):
        chances = np.where(stock > 0, mixes[site], 0.0)
        if not chances.sum() > 0:
            chances = (stock > 0).astype(float)
        running = np.cumsum(chances)
        label = int(np.searchsorted(running, min(point * running[-1], np.nextafter(running[-1], 0)), side="right"))
        counts[site, label] += 1
        stock[label] -= 1
    arguments = {"num_sites": num_sites, "alpha": alpha}
    return _deal("dirichlet_client", arguments, counts, targets, table, rng, splits, class_of_unit)


def n_classes_per_site(
    targets: np.ndarray, table: pd.DataFrame, rng: np.random.Generator, *, num_sites: int, num_classes: int
) -> Partition:
    """Every site holds ``num_classes`` classes in train, each class cut evenly among those that hold it.

    Up to 5 sites: site i takes the classes (c i + j) mod C, j < c; more sites: c classes at random (Co-Boosting).
    Choice: there are no quotas (the source's exceed the supply and it never ends). Training rows of a class that no
    site holds are ``dropped``; its val and test rows are dealt to all sites evenly, so that the test set is the same
    for every setting. Raises DataError where a class has fewer patients than holders, or a site would have no row.
    """
    num_labels = targets.shape[1]
    if not 1 <= num_classes <= num_labels:
        raise DataError(f"a site can hold 1 to {num_labels} classes, got num_classes={num_classes}")
    splits, class_of_unit = _dealt_parts(targets, table, num_sites)
    holds = np.zeros((num_sites, num_labels), dtype=bool)
    for site in range(num_sites):
        first = np.arange(num_classes * site, num_classes * (site + 1)) % num_labels
        holds[site, first if num_sites <= FEW_SITES else rng.permutation(num_labels)[:num_classes]] = True
    supply = np.bincount(class_of_unit["train"], minlength=num_labels)
    holders = holds.sum(axis=0)
    scarce = np.flatnonzero((holders > supply) & (supply > 0))
    if len(scarce):
        label = scarce[0]
        raise DataError(
            f"class number {label} has {supply[label]} training patients for {holders[label]} sites; ask for fewer "
            f"sites or classes a site"
        )
    rank = np.cumsum(holds, axis=0) - 1
    share, rest = np.divmod(supply, np.maximum(holders, 1))
    counts = np.where(holds, share + (rank < rest), 0)
    empty = np.flatnonzero(counts.sum(axis=1) == 0)
    if len(empty):
        raise DataError(f"site number {empty[0]} would hold no training row: its classes have none in the data")
    arguments = {"num_sites": num_sites, "num_classes": num_classes}
    return _deal("n_classes_per_site", arguments, counts, targets, table, rng, splits, class_of_unit)


def _dealt_parts(targets: np.ndarray, table: pd.DataFrame, num_sites: int) -> tuple[dict, dict]:
    """The units of every split, and the class of each unit."""
    splits = _splits(table)
    _require_sites(num_sites, splits["train"], min_size=0)
    classes = _single_labels(targets)
    return splits, {name: _unit_classes(classes, targets.shape[1], part) for name, part in splits.items()}


def _deal(
    kind: str,
    arguments: dict,
    counts: np.ndarray,
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    splits: dict,
    class_of_unit: dict,
) -> Partition:
    """Train by ``counts (K, C)`` patients, val and test by the shares of them; a class without any evenly."""
    held = counts.sum(axis=0)
    shares = np.where(held > 0, counts / np.maximum(held, 1), 1 / len(counts)).T  # (C, K)
    site_of_row = np.full(len(targets), NOWHERE, dtype=np.int64)
    for name in SPLITS:
        part, of_unit = splits[name], class_of_unit[name]
        if name == "train":
            site_of_unit = np.full(part.num_units, NOWHERE, dtype=np.int64)
            for label in np.flatnonzero(held):
                members = rng.permutation(np.flatnonzero(of_unit == label))
                site_of_unit[members] = np.repeat(np.arange(len(counts)), counts[:, label])
        else:
            site_of_unit = _cut_by_shares(rng, of_unit, shares)
        site_of_row[part.rows] = site_of_unit[part.unit_of_row]
    return _partition(kind, arguments, _site_names(len(counts)), site_of_row, targets, table)
