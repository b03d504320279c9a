from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from datasets.embedded import digits
from datasets.records import SPLITS, DataError, Manifest
from datasets.site import class_counts, load_site


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return digits()


def open_site(manifest, rows, tmp_path, **changes):
    arguments = {"name": "a", "size": 8, "channels": 1, "cache_dir": tmp_path, **changes}
    return load_site(manifest, rows, **arguments)


def test_a_site_holds_its_rows_in_the_order_asked_for(manifest, tmp_path):
    rows = {"train": np.array([5, 3, 900]), "val": np.array([1200]), "test": np.array([1700, 1500])}
    site = open_site(manifest, rows, tmp_path)
    assert (site.name, site.labels, site.task) == ("a", manifest.labels, "multiclass")
    for split, part in rows.items():
        assert site.splits[split].images.shape == (len(part), 8, 8, 1)
        assert site.splits[split].images.dtype == np.uint8
        assert np.array_equal(site.splits[split].targets, manifest.targets[part])
        for position, row in enumerate(part):
            assert np.array_equal(site.splits[split].images[position, :, :, 0], manifest.images.read(int(row)))
        assert site.splits[split].reports == ()


def test_an_empty_site_and_a_site_of_one_sample_are_legal(manifest, tmp_path):
    empty = open_site(manifest, {}, tmp_path, channels=3)
    assert [len(empty.splits[split]) for split in SPLITS] == [0, 0, 0]
    assert empty.splits["train"].images.shape == (0, 8, 8, 3) and empty.splits["train"].targets.shape == (0, 10)
    one = open_site(manifest, {"train": np.array([7])}, tmp_path)
    assert len(one.splits["train"]) == 1 and len(one.splits["test"]) == 0


def test_reports_stand_beside_their_samples_when_the_site_has_any(manifest, tmp_path):
    reports = np.array([""] * len(manifest), dtype=object)
    reports[4] = "no finding"
    told = dataclasses.replace(manifest, table=manifest.table.assign(report=reports))
    site = open_site(told, {"train": np.array([3, 4]), "test": np.array([1700])}, tmp_path)
    assert site.splits["train"].reports == ("", "no finding") and site.splits["test"].reports == ("",)
    assert open_site(told, {"train": np.array([3])}, tmp_path).splits["train"].reports == ()


def test_the_checksum_follows_data_rows_splits_and_hidden_labels(manifest, tmp_path):
    rows = {"train": np.array([1, 2]), "test": np.array([1700])}
    base = open_site(manifest, rows, tmp_path).checksum
    hidden = manifest.targets.copy()
    hidden[1] = 0
    others = [
        open_site(manifest, {**rows, "train": np.array([2, 1])}, tmp_path),
        open_site(manifest, {"val": np.array([1, 2]), "test": np.array([1700])}, tmp_path),
        open_site(dataclasses.replace(manifest, checksum="other"), rows, tmp_path),
        open_site(dataclasses.replace(manifest, targets=hidden), rows, tmp_path),
    ]
    assert len({base, *(site.checksum for site in others)}) == 5
    assert open_site(manifest, rows, tmp_path).checksum == base


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"train": np.array([0, 5000])}, "0 to 1796"),
        ({"train": np.array([-1])}, "0 to 1796"),
        ({"train": np.array([3]), "test": np.array([3])}, "used twice"),
        ({"training": np.array([3])}, "unknown splits"),
    ],
)
def test_rows_that_do_not_fit_the_manifest_are_refused(manifest, tmp_path, rows, words):
    with pytest.raises(DataError, match=words):
        open_site(manifest, rows, tmp_path)


def test_class_counts_add_up_and_know_empty_unknown_and_absent_classes():
    targets = np.array([[1, 0, -1], [1, 0, -1], [0, 0, -1]], dtype=np.int8)
    positives, negatives, unknown = class_counts(targets)
    assert (positives.tolist(), negatives.tolist(), unknown.tolist()) == ([2, 0, 0], [1, 3, 0], [0, 0, 3])
    assert [part.tolist() for part in class_counts(targets[:0])] == [[0, 0, 0]] * 3
    assert positives.dtype == np.int64
