"""The plain records of the data room: what is known of samples, with and without their pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import pandas as pd

Task = Literal["multilabel", "multiclass"]
SPLITS = ("train", "val", "test")

PRESENT, ABSENT, UNKNOWN = 1, 0, -1

IMAGE, REPORT = 0, 1  # columns of a presence mask (n, 2)
LABEL_SOURCES = ("reviewed", "auto", "unknown")


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the row and the fix. It stays at the site."""


class Images(Protocol):
    """Pixels of a manifest's rows, decoded when asked for.

    ``checksum`` is the SHA-256 (hex) of what the pixels are read from.
    """

    checksum: str

    def __len__(self) -> int: ...

    def read(self, row: int) -> np.ndarray:
        """Pixels of one row: uint8 ``(H, W)`` or ``(H, W, 3)`` at native size; raises DataError."""
        ...


@dataclass(frozen=True)
class Manifest:
    """Every sample of one data root, without its pixels.

    ``table`` has one row a sample (index 0..n-1) and the columns ``patient``, ``study``, ``site``, ``split``,
    ``time``, ``label_source``, ``report`` (free text; "" where there is none), ``line`` (row in the source
    file, for error messages), and any further columns of the source, untouched.
    ``targets`` is ``(n, C)`` int8: 1 present, 0 absent, -1 unknown. A multiclass row has exactly one 1, or -1 only
    where its label is not known yet.
    """

    labels: tuple[str, ...]
    task: Task
    table: pd.DataFrame
    targets: np.ndarray
    images: Images
    checksum: str

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True)
class Split:
    """Samples of one split at one site: ``images (n, H, W, ch) uint8``, ``targets (n, C) int8`` (1, 0, -1).

    ``datasets.site.load_site`` fills the further arrays, each of n entries; None in a split made by hand.
    ``present (n, 2) bool``: has an image, has a report. A sample without an image has zero pixels, one without a
    report the text "". ``sources (n,) str``: where its labels come from, one of `LABEL_SOURCES`.
    ``studies`` and ``patients`` ``(n,) int64``: equal numbers are one study, one patient, at this site and across its
    splits. The identifiers themselves stay in the manifest.
    ``dropped`` samples were left out since they have nothing to learn from, ``unreadable`` have an image that cannot
    be decoded. ``ids``: the samples' row keys (`datasets.site.sample_ids`); they never leave the site.
    """

    images: np.ndarray
    targets: np.ndarray
    reports: tuple[str, ...] = ()
    present: np.ndarray | None = None
    sources: np.ndarray | None = None
    studies: np.ndarray | None = None
    patients: np.ndarray | None = None
    dropped: int = 0
    unreadable: int = 0
    ids: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class SiteData:
    """What one site trains and evaluates on. ``splits`` has the keys train, val and test; a split may be empty.

    ``checksum`` covers the site's rows and targets, ``manifest_sha256`` is that of the whole manifest they are from.
    """

    name: str
    labels: tuple[str, ...]
    task: Task
    splits: Mapping[str, Split]
    checksum: str
    manifest_sha256: str = ""
