"""One site's data in memory: the decoded pixels, targets and reports of its rows, and which of them each row has.

Legal and common in hospitals: an empty split or site, one sample, a class nobody has, labels all unknown, images
without reports and reports without images (the project's incongruent specification, sections 2 and 9).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from datasets.cache import load_pixels
from datasets.records import (
    ABSENT,
    IMAGE,
    PRESENT,
    REPORT,
    SPLITS,
    UNKNOWN,
    DataError,
    Manifest,
    SiteData,
    Split,
)

AUTOMATIC = frozenset({"auto", "automatic", "automated", "labeler", "labeller", "mined", "mining", "nlp"})
REVIEWED = frozenset({"reviewed", "curated", "manual", "expert", "experts", "radiologist", "radiologists"})


class ClassCounts(NamedTuple):
    """Samples per class, each ``(C,) int64``; the three add up to the number of samples in every class."""

    positives: np.ndarray
    negatives: np.ndarray
    unknown: np.ndarray


def class_counts(targets: np.ndarray) -> ClassCounts:
    """Positives, negatives and unknowns per class of ``targets (n, C) int8`` (1, 0, -1); n may be 0."""
    return ClassCounts(*((targets == value).sum(axis=0, dtype=np.int64) for value in (PRESENT, ABSENT, UNKNOWN)))


def is_small(counts: np.ndarray, least: int) -> np.ndarray:
    """Which counts are from 1 to ``least - 1``."""
    return (counts > 0) & (counts < least)


def hidden_labels(counts: ClassCounts, min_cell: int, task: str) -> np.ndarray:
    """Labels of which a site tells no count, ``(C,) bool``: 1 to ``min_cell - 1`` samples have it, or have it not.

    Neither count of such a label may be told, since one of them and the number of samples give the other. Where every
    sample has one label, the counts of all other labels give it too, so that the rarest of these, and what is as rare,
    is hidden with it.
    """
    hidden = is_small(counts.positives, min_cell) | is_small(counts.negatives, min_cell)
    if task == "multiclass" and hidden.any() and not hidden.all():
        told = counts.positives[~hidden]
        hidden |= counts.positives == min(told[told > 0], default=0)
    return hidden


def sample_ids(manifest: Manifest) -> tuple[str, ...]:
    """One row key a sample, in the manifest's order: its image's path, or ``row N`` (from 0) where it has none."""
    paths = manifest.table["image"] if "image" in manifest.table.columns else [""] * len(manifest)
    return tuple(path or f"row {row}" for row, path in enumerate(paths))


def present_modalities(manifest: Manifest) -> np.ndarray:
    """Which rows have an image and which a report, ``(n, 2) bool``, without opening a file.

    A report of nothing but white space is none. A table without the column ``image`` has an image in every row.
    """
    table = manifest.table
    has_image = table["image"].ne("") if "image" in table.columns else np.ones(len(table), dtype=bool)
    return np.column_stack([np.asarray(has_image), table["report"].str.strip().ne("").to_numpy()]).astype(bool)


def label_sources(cells: pd.Series) -> np.ndarray:
    """Where labels come from, ``(n,) str`` out of `LABEL_SOURCES`, read from the words of the column ``label_source``.

    Choice: ``chexpert-labeler`` and ``nih-text-mining`` are auto, ``radiologists`` is reviewed; where words of both
    kinds stand, the less trusted one counts; anything else is unknown.

    >>> label_sources(pd.Series(["radiologists", "nih-text-mining", ""])).tolist()
    ['reviewed', 'auto', 'unknown']
    """
    codes, values = pd.factorize(cells)
    words = [set(re.findall(r"[a-z]+", str(value).lower())) for value in values]
    read = ["auto" if found & AUTOMATIC else "reviewed" if found & REVIEWED else "unknown" for found in words]
    return np.array(read, dtype="U8")[codes]


def load_site(
    manifest: Manifest,
    rows_by_split: Mapping[str, np.ndarray],
    *,
    name: str,
    size: int,
    channels: int,
    cache_dir: Path | None,
    present: np.ndarray | None = None,
    reads_reports: bool = False,
) -> SiteData:
    """The rows of one site, decoded at ``size`` x ``size`` with ``channels`` (1 or 3), through the pixel cache.

    ``rows_by_split`` holds row numbers of ``manifest`` per split; a missing split is an empty one. A report stands
    at its sample's position in ``Split.reports``; a site without any report text has none there.
    ``present (len(manifest), 2) bool`` says which rows have an image and which a report, as a simulation wants it;
    None: what `present_modalities` finds. The file of an absent image is never opened.

    ``reads_reports`` is for methods that learn from reports too: samples with a report only stay, and an image that
    cannot be decoded is an absent one. Otherwise only samples with an image stay, and such an image is an error. What
    does not stay is counted in ``Split.dropped``.

    The checksum covers the manifest, the rows that stay, and the site's targets (a simulation may hide labels at a
    site). Raises DataError for unknown splits, rows out of range and rows used twice.
    """
    rows = _checked_rows(manifest, rows_by_split, name)
    present = present_modalities(manifest) if present is None else present
    if present.shape != (len(manifest), 2) or present.dtype != bool:
        raise DataError(
            f"site {name!r}: the presence mask is {present.dtype} {present.shape}, the manifest needs a bool mask "
            f"({len(manifest)}, 2)"
        )
    kept, masks, pixels, unreadable = {}, {}, {}, {}
    for split, part in rows.items():
        mask = present[part]
        images, is_read = _decode(manifest, part[mask[:, IMAGE]], size, channels, cache_dir, tolerant=reads_reports)
        mask[mask[:, IMAGE], IMAGE] = is_read
        stays = mask.any(axis=1) if reads_reports else mask[:, IMAGE]
        kept[split], masks[split] = part[stays], mask[stays]
        pixels[split], unreadable[split] = _in_place(images, mask[stays, IMAGE]), int((~is_read).sum())

    together, ends = np.concatenate(list(kept.values())), np.cumsum([len(part) for part in kept.values()])[:-1]
    reports, ids = manifest.table["report"].to_numpy(), sample_ids(manifest)
    has_reports = any(mask[:, REPORT].any() for mask in masks.values())
    columns = (label_sources(manifest.table["label_source"].iloc[together]), *_groups(manifest.table.iloc[together]))
    splits = {}
    for (split, part), *arrays in zip(kept.items(), *(np.split(column, ends) for column in columns), strict=True):
        texts = [str(reports[row]) if told else "" for row, told in zip(part, masks[split][:, REPORT], strict=True)]
        splits[split] = Split(
            pixels[split],
            manifest.targets[part],
            tuple(texts) if has_reports else (),
            masks[split],
            *arrays,
            dropped=len(rows[split]) - len(part),
            unreadable=unreadable[split],
            ids=tuple(ids[row] for row in part),
        )
    return SiteData(name, manifest.labels, manifest.task, splits, _checksum(manifest, kept), manifest.checksum)


def _decode(
    manifest: Manifest, rows: np.ndarray, size: int, channels: int, cache_dir: Path | None, *, tolerant: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``(m, size, size, channels)`` of the rows that can be decoded, and which those are, ``(n,) bool``.

    Choice: only after a failure is each image tried by itself, so that sound data is decoded once and then cached.
    """
    is_read = np.ones(len(rows), dtype=bool)
    try:
        return load_pixels(manifest, rows, size=size, channels=channels, cache_dir=cache_dir), is_read
    except DataError:
        is_read[:] = [not tolerant or _is_readable(manifest, row) for row in rows]
        if is_read.all():
            raise
    return load_pixels(manifest, rows[is_read], size=size, channels=channels, cache_dir=cache_dir), is_read


def _is_readable(manifest: Manifest, row: int) -> bool:
    try:
        manifest.images.read(int(row))
    except DataError:
        return False
    return True


def _in_place(pixels: np.ndarray, has_image: np.ndarray) -> np.ndarray:
    """``pixels (m, ...)`` at the m samples that have an image, zeros at the others: ``(n, ...)``, read-only."""
    if has_image.all():
        return pixels
    shape = (len(has_image), *pixels.shape[1:])
    if not has_image.any():
        return np.broadcast_to(np.uint8(0), shape)  # takes no memory
    placed = np.zeros(shape, dtype=np.uint8)
    placed[has_image] = pixels
    placed.flags.writeable = False
    return placed


def _groups(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the studies and of the patients of ``table``'s rows, each ``(n,) int64``, by first appearance.

    Choice: a blank patient is a patient of one line of the source. A blank study is, within its patient, all rows with
    the same report (one report, many films), and without a report the images of one line.
    """
    line = table["site"] + "\x1f" + table["line"].astype(str)
    patient = ("p" + table["patient"]).where(table["patient"].ne(""), "l" + line)
    told = ("r" + table["report"]).where(table["report"].str.strip().ne(""), "l" + line)
    study = patient + "\x1f" + ("s" + table["study"]).where(table["study"].ne(""), told)
    studies, patients = (pd.factorize(column)[0].astype(np.int64) for column in (study, patient))
    return studies, patients


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
