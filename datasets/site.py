"""One site's data in memory: the decoded pixels, targets and reports of its rows.

Legal and common in hospitals: an empty split or site, one sample, a class nobody has, labels all unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.cache import load_pixels
from datasets.records import ABSENT, PRESENT, SPLITS, UNKNOWN, DataError, Manifest, SiteData, Split


class ClassCounts(NamedTuple):
    """Samples per class, each ``(C,) int64``; the three add up to the number of samples in every class."""

    positives: np.ndarray
    negatives: np.ndarray
    unknown: np.ndarray


def class_counts(targets: np.ndarray) -> ClassCounts:
    """Positives, negatives and unknowns per class of ``targets (n, C) int8`` (1, 0, -1); n may be 0."""
    return ClassCounts(*((targets == value).sum(axis=0, dtype=np.int64) for value in (PRESENT, ABSENT, UNKNOWN)))


def load_site(
    manifest: Manifest,
    rows_by_split: Mapping[str, np.ndarray],
    *,
    name: str,
    size: int,
    channels: int,
    cache_dir: Path | None,
) -> SiteData:
    """The rows of one site, decoded at ``size`` x ``size`` with ``channels`` (1 or 3), through the pixel cache.

    ``rows_by_split`` holds row numbers of ``manifest`` per split; a missing split is an empty one. A report stands
    at its sample's position in ``Split.reports``; a site without any report text has none there.
    The checksum covers the manifest, the rows, and the site's targets (a simulation may hide labels at a site).
    Raises DataError for unknown splits, rows out of range and rows used twice.
    """
    rows = _checked_rows(manifest, rows_by_split, name)
    reports = manifest.table["report"].to_numpy()
    has_reports = any(reports[row] for part in rows.values() for row in part)
    splits = {}
    for split, part in rows.items():
        pixels = load_pixels(manifest, part, size=size, channels=channels, cache_dir=cache_dir)
        texts = tuple(str(reports[row]) for row in part) if has_reports else ()
        splits[split] = Split(pixels, manifest.targets[part], texts)
    return SiteData(name, manifest.labels, manifest.task, splits, _checksum(manifest, rows))


def _checked_rows(manifest: Manifest, rows_by_split: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    unknown = sorted(set(rows_by_split) - set(SPLITS))
    if unknown:
        raise DataError(f"site {name!r}: unknown splits {unknown}; the splits are {list(SPLITS)}")
    rows = {split: np.asarray(rows_by_split.get(split, ()), dtype=np.int64) for split in SPLITS}
    together = np.concatenate(list(rows.values()))
    if len(together) and (together.min() < 0 or together.max() >= len(manifest)):
        raise DataError(
            f"site {name!r}: rows {together.min()} to {together.max()} were asked for, the manifest has "
            f"0 to {len(manifest) - 1}; was the partition made from another version of the data?"
        )
    if len(np.unique(together)) != len(together):
        raise DataError(f"site {name!r}: a row is used twice, in one split or in two; a sample belongs to one split")
    return rows


def _checksum(manifest: Manifest, rows: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(manifest.checksum.encode())
    for split in SPLITS:
        digest.update(f"\x1f{split}\x1f{len(rows[split])}\x1f".encode())
        digest.update(rows[split].astype("<i8").tobytes())
        digest.update(np.ascontiguousarray(manifest.targets[rows[split]], dtype=np.int8).tobytes())
    return digest.hexdigest()
