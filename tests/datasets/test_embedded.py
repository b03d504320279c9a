from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from datasets.embedded import DIGITS, SHEETS, digits
from datasets.partition import check_partition, iid
from datasets.records import DataError


def test_digits_are_the_whole_scikit_learn_set():
    manifest, source = digits(), load_digits()
    assert len(manifest) == len(manifest.images) == 1797 and manifest.task == "multiclass"
    assert manifest.labels == DIGITS
    assert np.array_equal(manifest.targets.argmax(axis=1), source.target)
    assert np.all(manifest.targets.sum(axis=1) == 1) and manifest.targets.dtype == np.int8
    pixels = manifest.images.read(0)
    assert pixels.shape == (8, 8) and pixels.dtype == np.uint8
    assert np.array_equal(np.rint(pixels / 255 * 16), source.images[0])  # 17 grey levels survive the scaling
    assert max(manifest.images.read(row).max() for row in range(20)) == 255


def test_sheets_open_with_the_digits_in_order():
    """Why the split goes by sheet: each writer's form starts with 0 to 9, so the borders can be seen in the file."""
    target = load_digits().target
    for first in SHEETS[:-1]:
        assert target[first : first + 10].tolist() == list(range(10))


def test_a_sheet_is_in_one_split_and_every_split_has_every_digit():
    manifest = digits()
    assert manifest.table["split"].value_counts().to_dict() == {"train": 1157, "test": 382, "val": 258}
    assert manifest.table.groupby("sheet")["split"].nunique().max() == 1
    for split in ("train", "val", "test"):
        assert np.all(manifest.targets[(manifest.table["split"] == split).to_numpy()].sum(axis=0) > 20)
    check_partition(iid(manifest.targets, manifest.table, np.random.default_rng(0), num_sites=3), manifest.table)


def test_label_columns_follow_the_order_asked_for():
    backwards = digits(labels=DIGITS[::-1])
    assert np.array_equal(backwards.targets, digits().targets[:, ::-1])
    assert backwards.checksum != digits().checksum == digits(labels=DIGITS).checksum


@pytest.mark.parametrize("labels", [("1", "1"), DIGITS[:9], (*DIGITS, "10"), ()])
def test_labels_that_are_not_the_ten_digits_are_refused(labels):
    with pytest.raises(DataError, match="the digits have the labels"):
        digits(labels=labels)
