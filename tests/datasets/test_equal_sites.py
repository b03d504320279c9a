"""Partitions of equal sites and of ready lists: who holds what, and which lists are refused."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from datasets.index_lists import index_lists
from datasets.longtail import long_tail_counts
from datasets.partition import check_partition, dirichlet_balanced, equal_sites, listed
from datasets.records import DataError


def cells(num_train=400, num_test=100, num_classes=4, seed=0, patients=None):
    """Single-label rows: train first, then test."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, num_classes, num_train + num_test)
    splits = ["train"] * num_train + ["test"] * num_test
    table = pd.DataFrame(
        {"patient": patients or [""] * len(splits), "split": splits, "line": np.arange(2, len(splits) + 2)}
    )
    return np.eye(num_classes, dtype=np.int8)[classes], table


@pytest.mark.parametrize("alpha", [0.1, 100])
def test_sites_are_of_one_size_and_the_tail_is_long(alpha):
    targets, table = cells()
    found = equal_sites(targets, table, np.random.default_rng(3), num_sites=5, alpha=alpha, ratio=10)
    check_partition(found, table)
    sizes = [len(rows["train"]) for rows in found.sites.values()]
    assert max(sizes) - min(sizes) <= 1
    totals = np.sum([counts["train"]["positives"] for counts in found.counts.values()], axis=0)
    wanted = np.minimum(long_tail_counts(100, 4, 10), targets[:400].sum(axis=0))
    assert totals.tolist() == wanted.tolist() and len(found.dropped) == 400 - totals.sum()
    assert sum(len(rows["test"]) for rows in found.sites.values()) == 100
    present = np.mean([(np.array(counts["train"]["positives"]) > 0).mean() for counts in found.counts.values()])
    assert present == 1 if alpha == 100 else present < 0.9


def test_without_a_tail_all_rows_are_dealt_as_the_source_deals_them():
    targets, table = cells()
    found = equal_sites(targets, table, np.random.default_rng(3), num_sites=3, alpha=1.0, ratio=1)
    seed = int(np.random.default_rng(3).integers(2**62))
    expected = dirichlet_balanced(targets[:400].argmax(axis=1), 3, 1.0, seed)
    assert [rows["train"].tolist() for rows in found.sites.values()] == [np.sort(part).tolist() for part in expected]
    assert not len(found.dropped)


def test_the_test_rows_of_a_class_follow_its_training_rows():
    targets, table = cells(num_test=2000)
    found = equal_sites(targets, table, np.random.default_rng(3), num_sites=4, alpha=0.3, ratio=1)
    train, test = (
        np.array([counts[split]["positives"] for counts in found.counts.values()]) for split in ("train", "test")
    )
    assert np.abs(train / train.sum(axis=0) - test / test.sum(axis=0)).max() < 0.01


def test_patients_with_several_rows_are_refused():
    targets, table = cells(40, 0, patients=[f"p{row // 2}" for row in range(40)])
    with pytest.raises(DataError, match="40 training rows are of 20 patients"):
        equal_sites(targets, table, np.random.default_rng(0), num_sites=2, alpha=1.0)


def test_listed_rows_are_where_the_lists_say_and_others_nowhere():
    targets, table = cells()
    found = listed(targets, table, np.random.default_rng(0), name="two", lists=[[0, 5, 9], [1, 2]])
    assert [rows["train"].tolist() for rows in found.sites.values()] == [[0, 5, 9], [1, 2]]
    assert len(found.dropped) == 395 and found.arguments == {"name": "two"}


@pytest.mark.parametrize("lists", [[[0], []], [[0, 1], [1]], [[0], [400]], [[0], [-1]], [[0], [9999]], []])
def test_lists_that_are_not_of_this_data_are_refused(lists):
    targets, table = cells()
    with pytest.raises(DataError, match="the index lists 'x'"):
        listed(targets, table, np.random.default_rng(0), name="x", lists=lists)


def test_lists_are_read_by_name_and_seed(tmp_path):
    content = {"note": "a set", "seed0": {"a": [[0], [1]]}, "seed1": {"a": [[2], [3]]}}
    (tmp_path / "splits.json").write_text(json.dumps(content))
    assert [index_lists(tmp_path, "a", seed) for seed in (1, 2, 3)] == [[[0], [1]], [[2], [3]], [[0], [1]]]
    for text, message in (
        (json.dumps(content), "has no lists 'b'; it has: a"),
        ("[1]", "has no lists 'b'"),
        ("{", "is no JSON"),
        ('{"seed0": {"b": [1, 2]}}', "is no list of lists"),
        ('{"seed0": {"b": [["1"]]}}', "no row number"),
    ):
        (tmp_path / "splits.json").write_text(text)
        with pytest.raises(DataError, match=message):
            index_lists(tmp_path, "b", 1)
    (tmp_path / "splits.json").unlink()
    with pytest.raises(DataError, match=r"'listed' needs splits\.json"):
        index_lists(tmp_path, "a", 1)


def test_a_blank_class_waits_for_its_label_only_where_the_sidecar_says_so(tmp_path):
    from PIL import Image

    from datasets.manifest import read_manifest

    for name in ("a.png", "b.png"):
        Image.new("L", (4, 4)).save(tmp_path / name)
    (tmp_path / "manifest.csv").write_text("image,split,label\na.png,train,dog\nb.png,train,\n")
    sidecar = {"labels": ["cat", "dog"], "task": "multiclass"}
    for extra, message in (({}, "'' is no class"), ({"unlabelled": 1}, "unlabelled must be true or false")):
        (tmp_path / "manifest.json").write_text(json.dumps({**sidecar, **extra}))
        with pytest.raises(DataError, match=message):
            read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**sidecar, "unlabelled": True}))
    assert read_manifest(tmp_path).targets.tolist() == [[0, 1], [-1, -1]]
