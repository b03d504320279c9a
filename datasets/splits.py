"""Patient-disjoint splits: made from a hash where a manifest states none, checked where it does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from datasets.records import SPLITS, DataError

SPLIT_FRACTIONS = {"train": 0.7, "val": 0.1, "test": 0.2}


def hash_split(patients: Sequence[str] | np.ndarray, fractions: Mapping[str, float] = SPLIT_FRACTIONS) -> np.ndarray:
    """A split for every patient, ``(n,) object``, from the SHA-256 of the identifier alone.

    The hash is read as a number in [0, 1) and falls into the cumulated ``fractions`` (which add up to 1), so sizes are
    met on average only, and a small site may find a split empty.
    """
    names, bounds = list(fractions), np.cumsum(list(fractions.values()))[:-1]
    chosen = {}
    for patient in dict.fromkeys(patients):
        digest = hashlib.sha256(b"split:" + patient.encode("utf-8", "surrogatepass")).digest()
        place = np.searchsorted(bounds, int.from_bytes(digest[:8], "big") / 2**64, side="right")
        chosen[patient] = names[int(place)]
    return np.asarray([chosen[patient] for patient in patients], dtype=object)


def check_disjoint(patients: np.ndarray, splits: np.ndarray, lines: np.ndarray, name: str) -> None:
    """Raises DataError when a patient is in two splits; shows rows, never the identifier."""
    inside = {split: dict(zip(patients[splits == split], lines[splits == split], strict=True)) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        shared = [patient for patient in inside[one] if patient in inside[other]]
        if shared:
            raise DataError(
                f"{name}: {len(shared)} patients are both in {one} and in {other} (for example in rows "
                f"{inside[one][shared[0]]} and {inside[other][shared[0]]}); give each patient one split, drop the "
                "split column, or, when two sites number different people alike, put the site's name before the number"
            )
