from __future__ import annotations

import dataclasses
import hashlib
import itertools

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from datasets.embedded import digits
from datasets.manifest import read_manifest
from datasets.records import SPLITS, DataError, Manifest
from datasets.site import (
    ClassCounts,
    class_counts,
    hidden_labels,
    is_small,
    label_sources,
    load_site,
    present_modalities,
)


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


@pytest.mark.parametrize("min_cell", [3, 4, 5])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_no_count_that_is_hidden_follows_from_those_that_are_told(classes, min_cell):
    """Every way to deal up to 9 samples of one label each: what is told fits two values of any small count at least."""
    fits = {}
    for size in range(1, 10):
        for first in itertools.product(range(size + 1), repeat=classes - 1):
            if (last := size - sum(first)) < 0:
                continue
            positives = np.array([*first, last])
            hidden = hidden_labels(ClassCounts(positives, size - positives, 0 * positives), min_cell, "multiclass")
            assert (hidden | ~is_small(positives, min_cell)).all()
            told = size, *np.where(hidden, -1, positives).tolist()
            fits.setdefault(told, []).append(positives)
    for told, found in fits.items():
        for label, value in enumerate(told[1:]):
            assert value >= 0 or len({int(positives[label]) for positives in found}) > 1, (told, label)


def test_counts_are_hidden_in_pairs_and_one_more_where_they_add_up():
    def hidden(positives, task, min_cell=5):
        positives = np.array(positives)
        return hidden_labels(ClassCounts(positives, 100 - positives, 0 * positives), min_cell, task).tolist()

    assert hidden([3, 40, 57], "multilabel") == [True, False, False]
    assert hidden([97, 0, 100], "multilabel") == [True, False, False], "few have it not"
    assert hidden([3, 40, 57], "multiclass") == [True, True, False]
    assert hidden([3, 0, 97], "multiclass") == [True, True, True], "of 97 few are left"
    assert hidden([40, 60, 0], "multiclass") == [False, False, False]
    assert hidden([1, 2, 97], "multilabel", 0) == hidden([1, 2, 97], "multiclass", 1) == [False, False, False]


def test_the_checksum_of_data_without_reports_is_rows_and_targets_as_it_always_was(manifest, tmp_path):
    rows = {"train": np.array([5, 3]), "val": np.array([], np.int64), "test": np.array([1700])}
    digest = hashlib.sha256(manifest.checksum.encode())
    for split, part in rows.items():
        digest.update(f"\x1f{split}\x1f{len(part)}\x1f".encode() + part.astype("<i8").tobytes())
        digest.update(manifest.targets[part].tobytes())
    for reads_reports in (False, True):
        assert open_site(manifest, rows, tmp_path, reads_reports=reads_reports).checksum == digest.hexdigest()


# -- images without reports, reports without images -------------------------------------------------------------------

ROWS = """image,report,patient,study,split,label_source,label:a
0.png,a report,p1,s1,train,radiologists,1
1.png,  ,p1,s1,train,chexpert-labeler,0
,only text,p2,,train,,1
2.png|3.png,two films,p3,,train,expert,1
4.png,same words,p4,,train,manual,0
5.png,same words,p4,,train,manual,0
6.png,same words,p5,,train,auto,0
7.png,,p6,,test,,0
8.png,,,,val,,1
9.png,tired,,,val,,1
"""
PAIRED, SILENT, TEXT_ONLY = 0, 1, 2


@pytest.fixture
def ward_of_ten(tmp_path):
    """A folder with ten images of one grey value each, 11 to 20, and eleven samples."""
    folder = tmp_path / "ward"
    folder.mkdir()
    for number in range(10):
        Image.fromarray(np.full((8, 8), 11 + number, np.uint8)).save(folder / f"{number}.png")
    (folder / "manifest.csv").write_text(ROWS, encoding="utf-8")
    return folder


def rows_by_split(manifest):
    return {split: np.flatnonzero(manifest.table["split"] == split) for split in SPLITS}


def test_a_sample_with_a_report_only_stays_with_zero_pixels_where_reports_are_read(ward_of_ten, tmp_path):
    manifest = read_manifest(ward_of_ten)
    site = open_site(manifest, rows_by_split(manifest), tmp_path, reads_reports=True)
    train = site.splits["train"]
    assert train.present.tolist() == [[1, 1], [1, 0], [0, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1]]
    assert train.images[:, 0, 0, 0].tolist() == [11, 12, 0, 13, 14, 15, 16, 17] and train.images.dtype == np.uint8
    assert train.reports[:4] == ("a report", "", "only text", "two films")  # white space is no report
    assert (train.dropped, train.unreadable) == (0, 0)
    assert site.splits["test"].present.tolist() == [[True, False]] and site.splits["test"].reports == ("",)


def test_a_sample_with_a_report_only_is_dropped_and_counted_where_images_are_needed(ward_of_ten, tmp_path):
    manifest = read_manifest(ward_of_ten)
    train = open_site(manifest, rows_by_split(manifest), tmp_path).splits["train"]
    assert train.images[:, 0, 0, 0].tolist() == [11, 12, 13, 14, 15, 16, 17] and train.dropped == 1
    assert len(train) == len(train.targets) == len(train.reports) == len(train.present) == len(train.sources) == 7


def test_a_mask_closes_files_and_a_sample_without_anything_is_dropped_and_counted(ward_of_ten, tmp_path):
    manifest = read_manifest(ward_of_ten)
    (ward_of_ten / "0.png").unlink()  # it would be missed if it were opened
    present = present_modalities(manifest)
    present[PAIRED, 0] = present[SILENT, 0] = False
    rows = rows_by_split(manifest)
    train = open_site(manifest, rows, tmp_path, present=present, reads_reports=True).splits["train"]
    assert train.images[:, 0, 0, 0].tolist() == [0, 0, 13, 14, 15, 16, 17] and train.dropped == 1
    assert train.reports[:2] == ("a report", "only text") and not train.images.flags.writeable
    present[:, 0] = False
    text = open_site(manifest, rows, tmp_path, present=present, reads_reports=True)
    assert [len(text.splits[split]) for split in SPLITS] == [7, 1, 0] and not text.splits["train"].images.any()
    assert text.splits["train"].images.shape == (7, 8, 8, 1)
    assert [text.splits[split].dropped for split in SPLITS] == [1, 1, 1]
    present[:] = False
    empty = open_site(manifest, rows, tmp_path, present=present, reads_reports=True)
    assert [len(empty.splits[split]) for split in SPLITS] == [0, 0, 0]
    assert empty.splits["train"].images.shape == (0, 8, 8, 1) and empty.splits["train"].dropped == 8


def test_an_image_that_cannot_be_decoded_is_absent_beside_a_report_and_else_an_error(ward_of_ten, tmp_path):
    for number in (0, 1):
        (ward_of_ten / f"{number}.png").write_bytes(b"no image")
    manifest = read_manifest(ward_of_ten)
    train = open_site(manifest, rows_by_split(manifest), tmp_path, reads_reports=True).splits["train"]
    assert (train.unreadable, train.dropped) == (2, 1)  # the second has no report either
    assert train.present[:2].tolist() == [[False, True], [False, True]]
    assert train.images[:, 0, 0, 0].tolist() == [0, 0, 13, 14, 15, 16, 17]
    with pytest.raises(DataError, match=r"manifest\.csv row 2"):
        open_site(manifest, rows_by_split(manifest), tmp_path)


def test_trouble_with_the_cache_is_not_taken_for_trouble_with_an_image(manifest, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="pixel cache"):
        open_site(manifest, {"train": np.array([1])}, tmp_path / "file", reads_reports=True)


def test_studies_and_patients_are_numbers_that_hold_across_splits(ward_of_ten, tmp_path):
    manifest = read_manifest(ward_of_ten)
    site = open_site(manifest, rows_by_split(manifest), tmp_path, reads_reports=True)
    train, val = site.splits["train"], site.splits["val"]
    assert train.patients.tolist() == [0, 0, 1, 2, 2, 3, 3, 4] and train.patients.dtype == np.int64
    # stated study; text alone; one report of two films; the same words of one patient, but not of another
    assert train.studies.tolist() == [0, 0, 1, 2, 2, 3, 3, 4] and train.studies.dtype == np.int64
    assert val.patients.tolist() == [5, 6] and val.studies.tolist() == [5, 6]  # blank patients are two
    assert not set(site.splits["test"].patients) & {*train.patients, *val.patients}
    moved = manifest.table.assign(patient="p1", split=["train"] * 10 + ["test"])
    both = open_site(dataclasses.replace(manifest, table=moved), rows_by_split(manifest), tmp_path)
    assert set(both.splits["test"].patients) == set(both.splits["train"].patients) == {0}


def test_two_studies_of_one_name_are_two_with_two_patients(manifest, tmp_path):
    table = manifest.table.assign(study="1", patient=["a", "b", "a"] + ["c"] * (len(manifest) - 3))
    site = open_site(dataclasses.replace(manifest, table=table), {"train": np.arange(4)}, tmp_path)
    assert site.splits["train"].studies.tolist() == [0, 1, 0, 2]


def test_label_sources_are_read_by_their_words(ward_of_ten, tmp_path):
    manifest = read_manifest(ward_of_ten)
    train = open_site(manifest, rows_by_split(manifest), tmp_path, reads_reports=True).splits["train"]
    assert train.sources.tolist() == ["reviewed", "auto", "unknown"] + ["reviewed"] * 4 + ["auto"]
    read = label_sources(pd.Series(["Auto", "expert-reviewed auto", "coco", "NIH-text-mining", "", "automaton"]))
    assert read.tolist() == ["auto", "auto", "unknown", "auto", "unknown", "unknown"]
    assert label_sources(pd.Series([], dtype=str)).shape == (0,)


@pytest.mark.parametrize("mask", [np.ones((3, 2), bool), np.ones((1797, 2), int), np.ones((1797, 3), bool)])
def test_a_mask_that_does_not_fit_the_manifest_is_refused(manifest, tmp_path, mask):
    with pytest.raises(DataError, match=r"the manifest needs a bool mask \(1797, 2\)"):
        open_site(manifest, {"train": np.array([1])}, tmp_path, present=mask)
