"""Sites by label co-occurrence and lost labels: closed forms, shares, and no empty site."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.label_clusters import by_label_clusters, clusters_for, label_clusters, label_features, mask_labels
from datasets.records import DataError


def grouped(rows=60, seed=0):
    """Three kinds of pictures with labels 0-1, 2-3 and 4-5, most of them both."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(rows) % 3
    targets = np.zeros((rows, 6), np.int8)
    targets[np.arange(rows), 2 * kinds] = 1
    targets[np.arange(rows), 2 * kinds + 1] = rng.random(rows) < 0.9
    return targets, kinds


def test_label_features_have_their_closed_form():
    targets = np.zeros((1, 20), np.int8)
    targets[0, :2] = 1
    targets[0, 5] = -1
    np.testing.assert_allclose(
        label_features(targets)[0, [0, 1, 5, 9]], [0.115985, 0.115985, 0.042668, 0.042668], atol=5e-7
    )


def test_kinds_of_pictures_become_sites():
    targets, kinds = grouped()
    clusters = label_clusters(targets, 3)
    assert len({(kind, cluster) for kind, cluster in zip(kinds, clusters, strict=True)}) == 3
    np.testing.assert_array_equal(clusters, label_clusters(targets, 3))


def test_test_rows_follow_the_training_rows_and_do_not_move_them():
    targets, kinds = grouped()
    is_train = np.arange(60) < 45
    clusters = label_clusters(targets, 3, fit_on=is_train)
    np.testing.assert_array_equal(clusters[is_train], label_clusters(targets[is_train], 3))
    for kind in range(3):
        assert len(np.unique(clusters[kinds == kind])) == 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), distinct=st.integers(1, 4), num_clusters=st.integers(1, 6))
def test_no_site_is_empty(seed, distinct, num_clusters):
    rng = np.random.default_rng(seed)
    targets = (rng.random((distinct, 5)) < 0.5).astype(np.int8)[rng.integers(0, distinct, 12)]
    assert set(label_clusters(targets, num_clusters)) == set(range(num_clusters))


def test_shares_of_classes_are_the_published_numbers_of_sites():
    assert [clusters_for(0.1, 20), clusters_for(0.1, 80), clusters_for(1.0, 20), clusters_for(0.01, 20)] == [
        2,
        8,
        20,
        1,
    ]
    for share in (0, 1.1):
        with pytest.raises(DataError, match="share"):
            clusters_for(share, 20)
    with pytest.raises(DataError, match="3 rows"):
        label_clusters(np.eye(3, dtype=np.int8), 4)


def test_masks_lose_their_share_of_what_they_may_lose():
    rng = np.random.default_rng(0)
    targets = rng.integers(-1, 2, (400, 25)).astype(np.int8)
    before = targets.copy()
    for share in (0.1, 0.5, 0.9):
        dropped = mask_labels(targets, share, "drop_positive", np.random.default_rng(1))
        changed = dropped != targets
        assert (targets[changed] == 1).all() and (dropped[changed] == 0).all()
        assert abs(changed[targets == 1].mean() - share) < 0.03
        unknown = mask_labels(targets, share, "unknown_entries", np.random.default_rng(1))
        changed = unknown != targets
        assert (unknown[changed] == -1).all()
        assert abs(changed[targets != -1].mean() - share) < 0.03
    np.testing.assert_array_equal(targets, before)


def test_masks_of_two_shares_are_nested_and_ends_are_exact():
    targets = np.ones((50, 4), np.int8)
    little, much = (mask_labels(targets, share, "drop_positive", np.random.default_rng(2)) for share in (0.3, 0.7))
    assert (much <= little).all()
    assert mask_labels(targets, 0.0, "unknown_entries", np.random.default_rng(2)).all()
    assert (mask_labels(targets, 1.0, "unknown_entries", np.random.default_rng(2)) == -1).all()


def test_unknown_modes_and_shares_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(DataError, match="flip"):
        mask_labels(np.ones((1, 1)), 0.1, "flip", rng)
    with pytest.raises(DataError, match=r"1\.5"):
        mask_labels(np.ones((1, 1)), 1.5, "drop_positive", rng)


def table_of(rng, rows, patients):
    number = rng.integers(0, patients, rows)
    split = rng.choice(["train", "val", "test"], patients, p=[0.6, 0.2, 0.2])[number]
    return pd.DataFrame({"patient": [f"p{one}" for one in number], "split": split, "line": np.arange(2, rows + 2)})


def test_sites_are_clusters_of_patients_and_test_rows_go_to_the_nearest():
    rng = np.random.default_rng(0)
    kinds = np.kron(np.eye(4, dtype=np.int8), np.ones((1, 3), np.int8))  # four groups of labels that never mix
    group = rng.integers(0, 4, 90)
    table = table_of(rng, 600, 90)
    patient = table["patient"].str[1:].astype(int).to_numpy()
    targets = kinds[group[patient]]
    found = by_label_clusters(targets, table, num_sites=4)
    assert list(found.sites) == ["site-00", "site-01", "site-02", "site-03"]
    for rows in found.sites.values():
        together = np.concatenate(list(rows.values()))
        assert len(np.unique(group[patient[together]])) == 1 and len(rows["train"]) and len(rows["test"])
    assert not len(found.dropped)


def test_more_clusters_than_training_patients_are_refused():
    table = table_of(np.random.default_rng(1), 40, 6)
    with pytest.raises(DataError, match="ask for fewer sites"):
        by_label_clusters(np.eye(4, dtype=np.int8)[np.arange(40) % 4], table, num_sites=7)
