"""Real data that is inside a package, so that a demo and the tests run offline: the scikit-learn digits.

1,797 handwritten digits, 8x8 pixels, from the test part of the UCI set "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak 1998), as shipped in scikit-learn (BSD-3-Clause).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from datasets.images import ArrayImages
from datasets.mosaics import manifest_checksum, plain_table
from datasets.records import DataError, Manifest

DIGITS = tuple(str(digit) for digit in range(10))

# First rows of the handwriting forms in the file, one writer's sheet after the other: each sheet opens with the
# digits 0..9 in order (the scikit-learn course, chapter "Sample grouping", lists the same rows).
SHEETS = (0, 130, 256, 386, 516, 646, 776, 915, 1029, 1157, 1287, 1415, 1545, 1667, 1797)
TRAIN_SHEETS, VAL_SHEETS = 9, 2
PUBLIC_SHEETS = 5
"""The first sheets are public where a federation needs data that no site has; the last of them is for checks."""

GREY_LEVELS = 16


def digits(labels: Sequence[str] | None = None, *, part: Literal["all", "public", "private"] = "all") -> Manifest:
    """The digits as a single-label manifest: 10 classes, 1,157 train, 258 val and 382 test images, 8x8 grey uint8.

    ``labels`` is the federation's list: the names "0" to "9" in any order. The column ``sheet`` numbers the
    handwriting forms 00 to 13. ``public`` is sheets 00 to 03 for training and 04 as val, ``private`` the other sheets
    in their usual splits, so the two share no image and no sheet. Raises DataError for other labels.

    Choice: whole sheets go to train (9), val (2) and test (3), so that the test shows new hands. A random split
    flatters: the scikit-learn course finds accuracy 0.967 in shuffled folds, 0.931 in folds of neighbouring rows.
    The source speaks of 13 writers for these 14 sheets and names none, so one hand may be in two splits, and every
    image is a patient of its own. Pixels 0..16 are scaled to 0..255.
    """
    chosen = DIGITS if labels is None else tuple(labels)
    if sorted(chosen) != sorted(DIGITS):
        raise DataError(f"the digits have the labels {list(DIGITS)}, in any order; got {list(chosen)}")
    from sklearn.datasets import load_digits  # a hospital, with data of its own, never waits for this

    source = load_digits()
    sheet = np.searchsorted(SHEETS, np.arange(len(source.target)), side="right") - 1
    split = np.where(sheet < TRAIN_SHEETS, "train", np.where(sheet < TRAIN_SHEETS + VAL_SHEETS, "val", "test"))
    if part == "public":
        split = np.where(sheet < PUBLIC_SHEETS - 1, "train", "val")
    rows = np.flatnonzero({"all": sheet >= 0, "public": sheet < PUBLIC_SHEETS, "private": sheet >= PUBLIC_SHEETS}[part])
    split, sheet = split[rows], sheet[rows]
    targets = (source.target[rows, None] == np.array([int(name) for name in chosen])).astype(np.int8)
    table = plain_table(split.tolist(), site="digits", prefix="digit")
    table["sheet"] = [f"{number:02d}" for number in sheet]
    images = ArrayImages(np.rint(source.images[rows] * (255 / GREY_LEVELS)).astype(np.uint8))
    return Manifest(chosen, "multiclass", table, targets, images, manifest_checksum(chosen, table, targets, images))
