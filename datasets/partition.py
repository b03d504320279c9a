"""Which site holds which row: real sites by their columns, and simulated ones by seeded protocols.

Every protocol is a pure function of (targets, table, generator, arguments) and deals train, val and test by the same
mechanism. It deals whole patients: rows of one patient never part, except where the site columns of `by_site` say so;
rows without a patient are dealt one by one. Rows are numbers of the manifest.

Which one to use: `by_site` where the data knows its hospitals; `beta_gamma` for multi-label data; `dirichlet` and
`long_tail` for single-label data, `equal_sites` where sites shall be of one size, `listed` where the rows are given;
`iid` to see what skew costs; `pooled_train` on top of any for the upper bound.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from datasets.balanced import dirichlet_balanced as dirichlet_balanced
from datasets.longtail import long_tail_counts, long_tail_rows
from datasets.records import ABSENT, PRESENT, SPLITS, DataError
from datasets.site import class_counts

InvisibleLabels = Literal["keep", "zero", "drop"]
Rows = dict[str, np.ndarray]

POOLED = "pooled"
NOWHERE = -1
FORMAT = 1
DIRICHLET_TRIES = 1000


@dataclass(frozen=True)
class Partition:
    """The rows of every site, and what the protocol did to reach them.

    ``sites`` maps a site name (sorted) to train, val and test rows, ``(n,) int64`` ascending.
    ``visible`` is ``(K, C) bool`` in the order of ``sites`` for `beta_gamma`, else None.
    ``exceptions`` and ``hidden`` are ``(m, 2) int64`` pairs (row, label): positives of labels that their site does
    not see, and those of them that the site is to read as absent (`hide_labels`).
    ``dropped`` are rows that belong to no site. ``counts`` holds per site and split the samples, and per class the
    positives, negatives and unknowns of the source.
    """

    kind: str
    arguments: Mapping[str, object]
    sites: Mapping[str, Rows]
    counts: Mapping[str, Mapping[str, Mapping[str, object]]]
    visible: np.ndarray | None = None
    exceptions: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    hidden: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    dropped: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def to_json(self, *, seed: int | None = None) -> str:
        """The partition as JSON text, the same text for the same partition; ``seed`` is recorded as given."""
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "seed": seed,
            "arguments": dict(self.arguments),
            "sites": {
                site: {split: part.tolist() for split, part in rows.items()} for site, rows in self.sites.items()
            },
            "counts": self.counts,
            "visible": None if self.visible is None else self.visible.astype(int).tolist(),
            "exceptions": self.exceptions.tolist(),
            "hidden": self.hidden.tolist(),
            "dropped": self.dropped.tolist(),
        }
        return json.dumps(content)

    def write(self, path: str | Path, *, seed: int | None = None) -> None:
        """Writes `to_json` to ``path``; a reader meets the old file or the whole new one, never a part."""
        path = Path(path)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.to_json(seed=seed))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise


def check_partition(partition: Partition, table: pd.DataFrame) -> None:
    """Raises DataError unless every row of ``table`` is at one site in its own split, or in ``dropped``.

    Also refuses a patient who is in two splits, at one site or at two: the test rows would not be new patients.
    """
    parts = [part for rows in partition.sites.values() for part in rows.values()]
    used = np.concatenate([*parts, partition.dropped])
    if len(used) != len(table) or not np.array_equal(np.sort(used), np.arange(len(table))):
        raise DataError(
            f"partition {partition.kind!r} is not disjoint and complete: {len(used)} uses of "
            f"{len(np.unique(used))} rows, the data has {len(table)}"
        )
    split_of_row = table["split"].to_numpy()
    for site, rows in partition.sites.items():
        for split, part in rows.items():
            if np.any(split_of_row[part] != split):
                raise DataError(f"partition {partition.kind!r}: site {site!r} has rows of another split in {split!r}")
    has_patient = table["patient"].to_numpy() != ""
    splits_of_patient = table.loc[has_patient].groupby("patient", sort=True)["split"].nunique()
    torn = splits_of_patient.index[splits_of_patient > 1]
    if len(torn):
        lines = table.loc[table["patient"] == torn[0], "line"].tolist()
        raise DataError(
            f"{len(torn)} patients are in more than one split, the first is {torn[0]!r} in rows {lines}; "
            f"give all images of a patient one split"
        )


def hide_labels(targets: np.ndarray, partition: Partition) -> np.ndarray:
    """A copy of ``targets (n, C) int8`` as the sites read them: hidden positives are 0 (missed annotations)."""
    seen = targets.copy()
    seen[partition.hidden[:, 0], partition.hidden[:, 1]] = ABSENT
    return seen


def by_site(
    targets: np.ndarray, table: pd.DataFrame, *, columns: Sequence[str] = ("site",), min_samples: int = 64
) -> Partition:
    """The real sites: values of the first column, refined by the further ones and joined by "-" (``nih_a-AP``).

    A further column divides a site only when each part has ``min_samples`` training rows; else that site stays whole
    under its own name. So ``("site", "view")`` makes five sites of the chest X-ray pack: both NIH sites divide into
    AP and PA, and Hannover, with 39 PA radiographs, stays ``mhh``.

    Choice: 64 = two batches of 32, as the smallest site of `beta_gamma`. A blank further value is a part named
    "unstated"; a blank first value is refused with its row. A patient may be at two sites (two views), never in two
    splits.
    """
    missing = [column for column in columns if column not in table.columns]
    if missing or not columns:
        raise DataError(
            f"site columns {missing or list(columns)} are not in the data; its columns: {list(table.columns)}"
        )
    first, *further = columns
    values = table[first].astype(str).str.strip()
    if (values == "").any():
        line = table["line"].to_numpy()[(values == "").to_numpy()][0]
        raise DataError(f"row {line}: column {first!r} is blank; name the site of every row or partition another way")

    is_train = (table["split"] == "train").to_numpy()
    keys = [(value,) for value in values]
    for column in further:
        refined = table[column].astype(str).str.strip().replace("", "unstated")
        parts = [(*key, value) for key, value in zip(keys, refined, strict=True)]
        smallest = _smallest_part(keys, parts, is_train)
        keys = [part if smallest[key] >= min_samples else key for key, part in zip(keys, parts, strict=True)]

    names = ["-".join(key) for key in keys]
    ordered = sorted(set(names))
    if len(ordered) != len(set(keys)):
        clash = next(name for name in ordered if len({key for key in set(keys) if "-".join(key) == name}) > 1)
        raise DataError(f"two different sites would both be named {clash!r}; rename a value of {list(columns)}")
    number = {name: site for site, name in enumerate(ordered)}
    site_of_row = np.array([number[name] for name in names], dtype=np.int64)
    arguments = {"columns": list(columns), "min_samples": min_samples}
    return _partition("by_site", arguments, ordered, site_of_row, targets, table)


def iid(targets: np.ndarray, table: pd.DataFrame, rng: np.random.Generator, *, num_sites: int) -> Partition:
    """Sites of equal size and, up to chance, equal mix: each split is shuffled and dealt round-robin."""
    splits = _splits(table)
    site_of_row = _even_sites(len(table), splits, rng, num_sites=num_sites)
    return _partition("iid", {"num_sites": num_sites}, _site_names(num_sites), site_of_row, targets, table)


def dirichlet(
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    *,
    num_sites: int,
    alpha: float,
    min_size: int = 10,
) -> Partition:
    """Label skew for single-label data: per class, shares of the sites are drawn from Dirichlet(alpha).

    Small alpha: few classes a site; large alpha: even. A site that already holds its even share of the training
    patients gets nothing of the next class, and the whole is drawn again until every site has ``min_size`` training
    rows (as in DENSE, Zhang et al., NeurIPS 2022). Val and test are cut by the shares of train.

    Choice: after 1,000 tries it gives up with DataError, where the source loops for ever. A patient counts for the
    class of most of their rows (ties: the first label).
    """
    site_of_row = _dirichlet_sites(targets, _splits(table), rng, num_sites=num_sites, alpha=alpha, min_size=min_size)
    arguments = {"num_sites": num_sites, "alpha": alpha, "min_size": min_size}
    return _partition("dirichlet", arguments, _site_names(num_sites), site_of_row, targets, table)


def long_tail(
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    *,
    num_sites: int,
    ratio: float,
    alpha: float | None = None,
    min_size: int = 10,
) -> Partition:
    """A long-tailed training set, the first label the head and the last ``ratio`` times rarer, dealt to sites.

    The training rows of each class are cut to `long_tail_counts`, the rest is ``dropped``; val and test stay whole.
    The sites are those of `dirichlet` with ``alpha``, or of `iid` where alpha is None. Source: FairFAL.

    Choice: the head keeps the mean class size, as in the source; a class with fewer rows than its count keeps all.
    """
    splits = _splits(table)
    rows = splits["train"].rows
    classes = _single_labels(targets)[rows]
    counts = long_tail_counts(len(rows) // targets.shape[1], targets.shape[1], ratio)
    kept = np.sort(rows[long_tail_rows(classes, counts, rng)])
    if len(kept) == 0:
        raise DataError(f"a long tail of {len(rows)} training rows over {targets.shape[1]} classes keeps no row")
    splits["train"] = _dealing(table, kept)
    if alpha is None:
        site_of_row = _even_sites(len(table), splits, rng, num_sites=num_sites)
    else:
        site_of_row = _dirichlet_sites(targets, splits, rng, num_sites=num_sites, alpha=alpha, min_size=min_size)
    arguments = {"num_sites": num_sites, "ratio": ratio, "alpha": alpha, "min_size": min_size}
    return _partition("long_tail", arguments, _site_names(num_sites), site_of_row, targets, table)


def equal_sites(
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    *,
    num_sites: int,
    alpha: float,
    ratio: float = 1,
) -> Partition:
    """Training sets of equal size whose class mixes follow Dirichlet(alpha): FairFAL's ``dir_balance``, on a long tail.

    The training rows are first cut to a long tail as in `long_tail` (``ratio`` 1: to none, all rows stay) and then
    dealt by `dirichlet_balanced`; val and test are cut by the sites' shares of each class in train.

    Raises DataError for patients with several training rows: the protocol deals rows one by one.
    """
    splits, classes = _splits(table), _single_labels(targets)
    train = splits["train"]
    if train.num_units != len(train.rows):
        raise DataError(
            f"{len(train.rows)} training rows are of {train.num_units} patients, and sites of equal size deal rows one "
            "by one; use 'dirichlet' or 'long_tail', which deal whole patients"
        )
    rows = train.rows
    if ratio > 1:
        counts = long_tail_counts(len(rows) // targets.shape[1], targets.shape[1], ratio)
        rows = np.sort(rows[long_tail_rows(classes[rows], counts, rng)])
    parts = dirichlet_balanced(classes[rows], num_sites, alpha, int(rng.integers(2**62)))
    arguments = {"num_sites": num_sites, "alpha": alpha, "ratio": ratio}
    return _given("dirichlet_balanced", arguments, targets, table, rng, [rows[part] for part in parts])


def listed(
    targets: np.ndarray, table: pd.DataFrame, rng: np.random.Generator, *, name: str, lists: Sequence[Sequence[int]]
) -> Partition:
    """The training rows that ready lists give to each site (`index_lists`); other training rows are dropped.

    Val and test are cut by the sites' shares of each class in train. Raises DataError for rows that are not training
    rows of the data, or that are listed twice.
    """
    is_train = (table["split"] == "train").to_numpy()
    parts = [np.asarray(part, dtype=np.int64) for part in lists]
    rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(rows) or min(map(len, parts)) == 0:
        raise DataError(f"the index lists {name!r} leave a site without a row; choose another name")
    if rows.min() < 0 or rows.max() >= len(table) or not is_train[rows].all() or len(np.unique(rows)) != len(rows):
        raise DataError(
            f"the index lists {name!r} are not of this data: every row number must be one of its {is_train.sum()} "
            "training rows, and no row may be listed twice"
        )
    return _given("listed", {"name": name}, targets, table, rng, parts)


def beta_gamma(
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    *,
    num_sites: int,
    beta: float,
    gamma: float,
    invisible_labels: InvisibleLabels = "keep",
    min_size: int = 64,
) -> Partition:
    """Multi-label skew: each site sees a share ``gamma`` of the labels, their samples divided by Dirichlet(beta).

    The protocol of the fednca specification, section 5, in its six steps (the paper publishes none):
    (1) v = max(1, round(gamma C)) labels are visible at each site, every label somewhere; (2) p_c ~ Dirichlet(beta)
    over the sites that see c; (3) a sample with positives S goes to a site drawn by sum_{c in S} p_c among the sites
    that see all of S, or else the most of S; (4) positives of labels that the site does not see are kept and reported
    as ``exceptions``, read as 0 ("zero"), or the sample is dropped ("drop"); (5) samples without a positive are dealt
    round-robin after a shuffle; (6) samples move from the largest site until each has ``min_size`` training rows.

    Choice: the unit is a patient, S the union of their positives; with "drop" the whole patient is dropped.
    Choice: "zero" and "drop" act on train only, so that every setting is measured on the same, fully labelled val and
    test. V and p are shared by the three splits; the round-robin of one split goes on where the last one stopped.
    Choice: step 6 looks at train, prefers samples whose positives the receiving site sees (with "drop" it takes no
    others), and never lets the giving site fall below ``min_size``.
    Choice: round() is Python's (half to even). Unknown labels (-1) are not positives; they are never touched.
    """
    _require_positive("beta", beta)
    if not 0 < gamma <= 1:
        raise DataError(f"gamma is the share of labels that a site sees, above 0 and at most 1, got {gamma}")
    if invisible_labels not in ("keep", "zero", "drop"):
        raise DataError(f"invisible_labels={invisible_labels!r} is unknown; use 'keep', 'zero' or 'drop'")
    splits = _splits(table)
    _require_sites(num_sites, splits["train"], min_size=min_size)

    visible = _draw_visibility(rng, num_sites, targets.shape[1], gamma)
    shares = np.zeros(visible.shape)  # (K, C)
    for label in range(targets.shape[1]):
        shares[visible[:, label], label] = rng.dirichlet(np.full(visible[:, label].sum(), beta))

    site_of_row = np.full(len(targets), NOWHERE, dtype=np.int64)
    first = 0
    for split, part in splits.items():
        positives = _unit_positives(targets, part)
        is_empty = ~positives.any(axis=1)
        site_of_unit = np.full(part.num_units, NOWHERE, dtype=np.int64)
        site_of_unit[~is_empty] = _draw_sites(rng, positives[~is_empty], visible, shares)
        sees_all = positives @ visible.T.astype(np.int64) == positives.sum(axis=1, keepdims=True)  # (units, K)
        if invisible_labels == "drop" and split == "train":
            placed = np.flatnonzero(~is_empty)
            site_of_unit[placed[~sees_all[placed, site_of_unit[placed]]]] = NOWHERE
        site_of_row[part.rows] = site_of_unit[part.unit_of_row]
        first = _deal_evenly(part, np.flatnonzero(is_empty), rng, num_sites, first, site_of_row)
        if split == "train":
            _fill_up(part, sees_all, rng, num_sites, min_size, site_of_row, must_see=invisible_labels == "drop")

    exceptions = _exceptions(targets, visible, site_of_row)
    is_train = (table["split"] == "train").to_numpy()
    hidden = exceptions[is_train[exceptions[:, 0]]] if invisible_labels == "zero" else exceptions[:0]
    arguments = {
        "num_sites": num_sites,
        "beta": beta,
        "gamma": gamma,
        "invisible_labels": invisible_labels,
        "min_size": min_size,
    }
    names = _site_names(num_sites)
    return _partition(
        "beta_gamma",
        arguments,
        names,
        site_of_row,
        targets,
        table,
        visible=visible,
        exceptions=exceptions,
        hidden=hidden,
    )


def pooled_train(targets: np.ndarray, table: pd.DataFrame, partition: Partition) -> Partition:
    """The centralised upper bound: all training rows at an extra site "pooled", val and test where they were.

    Labels that ``partition`` hides stay hidden and rows that it drops stay dropped, so the pooled model learns from
    what the sites had. ``exceptions`` are still those of ``partition``; "pooled" sees every label.
    """
    if POOLED in partition.sites:
        raise DataError(f"a site is already named {POOLED!r}; rename it to make a centralised upper bound")
    names = sorted([*partition.sites, POOLED])
    site_of_row = np.full(len(table), NOWHERE, dtype=np.int64)
    for site, rows in partition.sites.items():
        for split, part in rows.items():
            site_of_row[part] = names.index(POOLED if split == "train" else site)
    visible = partition.visible
    if visible is not None:
        visible = np.insert(visible, names.index(POOLED), True, axis=0)
    return _partition(
        f"{partition.kind}+{POOLED}",
        partition.arguments,
        names,
        site_of_row,
        targets,
        table,
        visible=visible,
        exceptions=partition.exceptions,
        hidden=partition.hidden,
    )


class _Dealing(NamedTuple):
    """Rows to be dealt ``(n,) int64``, and for each the number of its unit: a patient, or a row without one."""

    rows: np.ndarray
    unit_of_row: np.ndarray
    num_units: int


def _dealing(table: pd.DataFrame, rows: np.ndarray) -> _Dealing:
    patients = table["patient"].to_numpy()[rows]
    keys = [
        ("patient", patient) if patient != "" else ("row", row) for patient, row in zip(patients, rows, strict=True)
    ]
    number: dict[tuple, int] = {}
    unit_of_row = np.array([number.setdefault(key, len(number)) for key in keys], dtype=np.int64)
    return _Dealing(rows, unit_of_row, len(number))


def _splits(table: pd.DataFrame) -> dict[str, _Dealing]:
    split = table["split"].to_numpy()
    strange = ~np.isin(split, SPLITS)
    if strange.any():
        line = table["line"].to_numpy()[strange][0]
        raise DataError(f"row {line}: split {split[strange][0]!r} is none of {list(SPLITS)}")
    return {name: _dealing(table, np.flatnonzero(split == name)) for name in SPLITS}


def _site_names(num_sites: int) -> list[str]:
    """site-00, site-01, ...: padded, so that sorting by name sorts by number."""
    width = max(2, len(str(num_sites - 1)))
    return [f"site-{site:0{width}d}" for site in range(num_sites)]


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise DataError(f"{name} is a Dirichlet concentration and must be positive and finite, got {value}")


def _require_sites(num_sites: int, train: _Dealing, *, min_size: int) -> None:
    if num_sites < 1:
        raise DataError(f"a partition needs at least 1 site, got {num_sites}")
    if min_size < 0:
        raise DataError(f"the smallest site cannot have {min_size} rows; give 0 or more")
    if num_sites > train.num_units or num_sites * min_size > len(train.rows):
        raise DataError(
            f"{num_sites} sites of at least {max(min_size, 1)} training rows were asked for, the data has "
            f"{len(train.rows)} training rows of {train.num_units} patients; ask for fewer sites or a smaller minimum"
        )


def _deal_evenly(
    part: _Dealing, units: np.ndarray, rng: np.random.Generator, num_sites: int, first: int, site_of_row: np.ndarray
) -> int:
    """Shuffles ``units`` and deals them from site ``first`` on into ``site_of_row``; returns the next site's number."""
    site_of_unit = np.full(part.num_units, NOWHERE, dtype=np.int64)
    site_of_unit[rng.permutation(units)] = (first + np.arange(len(units))) % num_sites
    dealt = site_of_unit[part.unit_of_row]
    is_dealt = dealt != NOWHERE
    site_of_row[part.rows[is_dealt]] = dealt[is_dealt]
    return (first + len(units)) % num_sites


def _even_sites(
    num_rows: int, splits: Mapping[str, _Dealing], rng: np.random.Generator, *, num_sites: int
) -> np.ndarray:
    """The site of every row ``(n,) int64``, NOWHERE for rows outside ``splits``."""
    _require_sites(num_sites, splits["train"], min_size=0)
    site_of_row = np.full(num_rows, NOWHERE, dtype=np.int64)
    first = 0
    for part in splits.values():
        first = _deal_evenly(part, np.arange(part.num_units), rng, num_sites, first, site_of_row)
    return site_of_row


def _single_labels(targets: np.ndarray) -> np.ndarray:
    is_present = targets == PRESENT
    strange = np.flatnonzero(is_present.sum(axis=1) != 1)
    if len(strange):
        raise DataError(
            f"{len(strange)} rows do not have exactly one label (the first is row number {strange[0]}); this partition "
            f"is for single-label data, use beta_gamma for multi-label data"
        )
    return is_present.argmax(axis=1)


def _dirichlet_sites(
    targets: np.ndarray,
    splits: Mapping[str, _Dealing],
    rng: np.random.Generator,
    *,
    num_sites: int,
    alpha: float,
    min_size: int,
) -> np.ndarray:
    """The site of every row ``(n,) int64``, NOWHERE for rows outside ``splits``."""
    _require_positive("alpha", alpha)
    _require_sites(num_sites, splits["train"], min_size=min_size)
    classes = _single_labels(targets)
    class_of_unit = {name: _unit_classes(classes, targets.shape[1], part) for name, part in splits.items()}
    train = splits["train"]
    for _ in range(DIRICHLET_TRIES):
        shares = _draw_shares(rng, np.bincount(class_of_unit["train"], minlength=targets.shape[1]), num_sites, alpha)
        site_of_unit = _cut_by_shares(rng, class_of_unit["train"], shares)
        if np.bincount(site_of_unit[train.unit_of_row], minlength=num_sites).min() >= min_size:
            break
    else:
        raise DataError(
            f"in {DIRICHLET_TRIES} draws of Dirichlet(alpha={alpha}) no one gave each of {num_sites} sites {min_size} "
            f"of {len(train.rows)} training rows; raise alpha, or ask for fewer sites or a smaller min_size"
        )
    site_of_row = np.full(len(targets), NOWHERE, dtype=np.int64)
    site_of_row[train.rows] = site_of_unit[train.unit_of_row]
    for name in SPLITS[1:]:
        site_of_row[splits[name].rows] = _cut_by_shares(rng, class_of_unit[name], shares)[splits[name].unit_of_row]
    return site_of_row


def _given(
    kind: str,
    arguments: Mapping[str, object],
    targets: np.ndarray,
    table: pd.DataFrame,
    rng: np.random.Generator,
    parts: Sequence[np.ndarray],
) -> Partition:
    """The partition whose training rows are ``parts``; val and test follow their shares of each class, whole patients.

    A class without a training row is dealt evenly.
    """
    classes, splits, num_sites = _single_labels(targets), _splits(table), len(parts)
    site_of_row = np.full(len(targets), NOWHERE, dtype=np.int64)
    for site, part in enumerate(parts):
        site_of_row[part] = site
    counts = np.stack([np.bincount(classes[part], minlength=targets.shape[1]) for part in parts], axis=1)  # (C, K)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.where(totals > 0, counts / np.maximum(totals, 1), 1 / num_sites)
    for name in SPLITS[1:]:
        unit_classes = _unit_classes(classes, targets.shape[1], splits[name])
        site_of_row[splits[name].rows] = _cut_by_shares(rng, unit_classes, shares)[splits[name].unit_of_row]
    return _partition(kind, arguments, _site_names(num_sites), site_of_row, targets, table)


def _unit_classes(classes: np.ndarray, num_classes: int, part: _Dealing) -> np.ndarray:
    votes = np.zeros((part.num_units, num_classes), dtype=np.int64)
    np.add.at(votes, (part.unit_of_row, classes[part.rows]), 1)
    return votes.argmax(axis=1)


def _draw_shares(rng: np.random.Generator, class_sizes: np.ndarray, num_sites: int, alpha: float) -> np.ndarray:
    """Shares ``(C, K)`` of the sites in each class; a site that holds its even share of the whole gets none.

    Zeroing entries of a Dirichlet draw and normalising again is a Dirichlet draw over the entries that remain.
    """
    shares = np.zeros((len(class_sizes), num_sites))
    held = np.zeros(num_sites)
    for label, size in enumerate(class_sizes):
        is_open = held < class_sizes.sum() / num_sites
        if not is_open.any():  # only once every unit has been dealt: the class is empty in train
            is_open[:] = True
        shares[label, is_open] = rng.dirichlet(np.full(is_open.sum(), alpha))
        held += np.diff(_cuts(shares[label], size), prepend=0, append=size)
    return shares


def _cuts(shares: np.ndarray, size: int) -> np.ndarray:
    """Where ``size`` ordered units are cut for K sites: floors of the running share, ``(K - 1,) int64``.

    The small term keeps a sum of shares that rounds to just below 1 from giving a unit to a site with share 0.
    """
    return np.minimum(np.floor(np.cumsum(shares)[:-1] * size + 1e-9), size).astype(np.int64)


def _cut_by_shares(rng: np.random.Generator, class_of_unit: np.ndarray, shares: np.ndarray) -> np.ndarray:
    site_of_unit = np.full(len(class_of_unit), NOWHERE, dtype=np.int64)
    for label in range(len(shares)):
        members = rng.permutation(np.flatnonzero(class_of_unit == label))
        cuts = _cuts(shares[label], len(members))
        site_of_unit[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    return site_of_unit


def _draw_visibility(rng: np.random.Generator, num_sites: int, num_labels: int, gamma: float) -> np.ndarray:
    """Step 1, ``(K, C) bool``: each site draws v labels; a label seen nowhere replaces one that is seen twice."""
    seen = max(1, round(gamma * num_labels))
    if num_sites * seen < num_labels:
        raise DataError(
            f"{num_sites} sites that see {seen} labels each (gamma={gamma}) cannot see all {num_labels} labels; "
            f"raise gamma to {-(-num_labels // num_sites) / num_labels:.3f} or ask for more sites"
        )
    visible = np.zeros((num_sites, num_labels), dtype=bool)
    for site in range(num_sites):
        visible[site, rng.permutation(num_labels)[:seen]] = True
    for label in np.flatnonzero(~visible.any(axis=0)):
        spare = np.argwhere(visible & (visible.sum(axis=0) > 1))  # not empty: K v >= C and a label is unseen
        site, given_up = spare[rng.integers(len(spare))]
        visible[site, given_up], visible[site, label] = False, True
    return visible


def _unit_positives(targets: np.ndarray, part: _Dealing) -> np.ndarray:
    """The union of the positives of each unit's rows, ``(units, C) int64``."""
    positives = np.zeros((part.num_units, targets.shape[1]), dtype=np.int64)
    np.maximum.at(positives, part.unit_of_row, (targets[part.rows] == PRESENT).astype(np.int64))
    return positives


def _draw_sites(rng: np.random.Generator, positives: np.ndarray, visible: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Step 3: the site of each unit ``(u,) int64``, for ``positives (u, C)``, ``visible (K, C)``, ``shares (K, C)``."""
    seen = positives @ visible.T.astype(np.int64)
    is_candidate = seen == seen.max(axis=1, keepdims=True)
    weight = np.where(is_candidate, np.einsum("uc,kc->uk", positives.astype(np.float64), shares), 0.0)
    weight = np.where(weight.sum(axis=1, keepdims=True) > 0, weight, is_candidate)  # tiny beta: all shares may be 0
    running = np.cumsum(weight, axis=1)
    total = running[:, -1:]
    point = np.minimum(rng.random((len(positives), 1)) * total, np.nextafter(total, 0))
    return (running <= point).sum(axis=1)


def _fill_up(
    part: _Dealing,
    sees_all: np.ndarray,
    rng: np.random.Generator,
    num_sites: int,
    min_size: int,
    site_of_row: np.ndarray,
    *,
    must_see: bool,
) -> None:
    """Step 6, in place: moves units of ``part`` until every site has ``min_size`` rows, or raises DataError.

    Each move brings one small site closer and makes no other small, so it ends.
    """
    size_of_unit = np.bincount(part.unit_of_row, minlength=part.num_units)
    site_of_unit = np.full(part.num_units, NOWHERE, dtype=np.int64)
    site_of_unit[part.unit_of_row] = site_of_row[part.rows]
    while True:
        is_placed = site_of_unit != NOWHERE
        held = np.bincount(site_of_unit[is_placed], weights=size_of_unit[is_placed], minlength=num_sites)
        receiver = int(held.argmin())
        if held[receiver] >= min_size:
            break
        for giver in np.argsort(-held, kind="stable"):
            movable = np.flatnonzero((site_of_unit == giver) & (size_of_unit <= held[giver] - min_size))
            fitting = movable[sees_all[movable, receiver]]
            choice = fitting if must_see or len(fitting) else movable
            if len(choice):
                site_of_unit[choice[rng.integers(len(choice))]] = receiver
                break
        else:
            raise DataError(
                f"cannot give each of {num_sites} sites {min_size} training rows: site number {receiver} has "
                f"{int(held[receiver])} and no other can spare a patient; lower min_size or ask for fewer sites"
            )
    site_of_row[part.rows] = site_of_unit[part.unit_of_row]


def _exceptions(targets: np.ndarray, visible: np.ndarray, site_of_row: np.ndarray) -> np.ndarray:
    """Pairs (row, label) ``(m, 2) int64`` of positives whose label the row's site does not see."""
    is_invisible = ~visible[site_of_row] & (site_of_row != NOWHERE)[:, None]
    return np.argwhere((targets == PRESENT) & is_invisible).astype(np.int64)


def _smallest_part(keys: list[tuple], parts: list[tuple], is_train: np.ndarray) -> dict[tuple, int]:
    """For each key the training rows of its smallest part."""
    rows = dict.fromkeys(parts, 0)
    for part, counts in zip(parts, is_train, strict=True):
        rows[part] += int(counts)
    smallest: dict[tuple, int] = {}
    for key, part in set(zip(keys, parts, strict=True)):
        smallest[key] = min(smallest.get(key, rows[part]), rows[part])
    return smallest


def _partition(
    kind: str,
    arguments: Mapping[str, object],
    names: Sequence[str],
    site_of_row: np.ndarray,
    targets: np.ndarray,
    table: pd.DataFrame,
    **rest: np.ndarray | None,
) -> Partition:
    """Rows by site and split out of the site of every row; checked before it is handed out."""
    split = table["split"].to_numpy()
    sites = {
        name: {part: np.flatnonzero((site_of_row == site) & (split == part)).astype(np.int64) for part in SPLITS}
        for site, name in enumerate(names)
    }
    counts = {name: {part: _count(targets[rows]) for part, rows in of_site.items()} for name, of_site in sites.items()}
    dropped = np.flatnonzero(site_of_row == NOWHERE).astype(np.int64)
    partition = Partition(kind, arguments, sites, counts, dropped=dropped, **rest)
    check_partition(partition, table)
    return partition


def _count(targets: np.ndarray) -> dict[str, object]:
    return {"samples": len(targets), **{name: part.tolist() for name, part in class_counts(targets)._asdict().items()}}
