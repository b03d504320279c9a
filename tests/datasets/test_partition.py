"""Partitions: disjoint and complete, patients whole, the same for the same seed, and as the protocols say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.manifest import read_manifest
from datasets.partition import (
    Partition,
    beta_gamma,
    by_site,
    check_partition,
    dirichlet,
    hide_labels,
    iid,
    long_tail,
    pooled_train,
)
from datasets.records import SPLITS, DataError

SHARED = Path(__file__).resolve().parents[3] / "shared"
CHEST = SHARED / "data" / "d1_cxr_multilabel.zip"

needs_chest = pytest.mark.skipif(not CHEST.exists(), reason="../shared/data/d1_cxr_multilabel.zip is not here")


def make_table(splits, patients=None, **columns) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "patient": [""] * len(splits) if patients is None else patients,
            "split": splits,
            "line": np.arange(2, len(splits) + 2),
            **columns,
        }
    )


def multilabel(rng, rows, labels, *, density=0.25, patients=False):
    """Random multi-label rows, 60/20/20 in train, val and test; with ``patients``, about three rows each."""
    targets = (rng.random((rows, labels)) < density).astype(np.int8)
    targets[rng.random((rows, labels)) < 0.1] = -1
    if not patients:
        return targets, make_table(rng.choice(SPLITS, rows, p=[0.6, 0.2, 0.2]))
    number = rng.integers(0, max(1, rows // 3), rows)
    split_of_patient = rng.choice(SPLITS, rows, p=[0.6, 0.2, 0.2])
    return targets, make_table(split_of_patient[number], [f"p{patient}" for patient in number])


def single_label(rng, rows, classes):
    targets = np.eye(classes, dtype=np.int8)[rng.integers(0, classes, rows)]
    return targets, make_table(rng.choice(SPLITS, rows, p=[0.6, 0.2, 0.2]))


def site_of_row(partition: Partition, rows: int) -> np.ndarray:
    sites = np.full(rows, -1)
    for number, parts in enumerate(partition.sites.values()):
        for part in parts.values():
            sites[part] = number
    return sites


def assert_patients_whole(partition: Partition, table: pd.DataFrame) -> None:
    sites = site_of_row(partition, len(table))
    for _, group in table[table["patient"] != ""].groupby("patient"):
        assert len(set(sites[group.index])) == 1


# --------------------------------------------------------------------------- beta / gamma


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_sites=st.integers(1, 8),
    labels=st.integers(2, 9),
    gamma=st.floats(0.05, 1.0),
    beta=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    mode=st.sampled_from(["keep", "zero", "drop"]),
    patients=st.booleans(),
)
def test_beta_gamma_covers_every_row_once_and_every_label_somewhere(
    seed, num_sites, labels, gamma, beta, mode, patients
):
    targets, table = multilabel(np.random.default_rng(seed), 300, labels, patients=patients)
    seen = max(1, round(gamma * labels))
    arguments = {
        "num_sites": num_sites,
        "beta": beta,
        "gamma": gamma,
        "invisible_labels": mode,
        "min_size": 0 if mode == "drop" else 4,
    }
    if num_sites * seen < labels:
        with pytest.raises(DataError, match="cannot see all"):
            beta_gamma(targets, table, np.random.default_rng(seed), **arguments)
        return
    partition = beta_gamma(targets, table, np.random.default_rng(seed), **arguments)

    check_partition(partition, table)
    assert np.all(partition.visible.sum(axis=1) == seen)
    assert partition.visible.any(axis=0).all()
    assert partition.to_json() == beta_gamma(targets, table, np.random.default_rng(seed), **arguments).to_json()
    sites = site_of_row(partition, len(table))
    for row, label in partition.exceptions:
        assert targets[row, label] == 1 and not partition.visible[sites[row], label]
    if mode == "drop":
        assert set(table["split"].to_numpy()[partition.dropped]) <= {"train"}
        assert "train" not in set(table["split"].to_numpy()[partition.exceptions[:, 0]])
    else:
        assert len(partition.dropped) == 0
        assert min(len(rows["train"]) for rows in partition.sites.values()) >= 4
        assert_patients_whole(partition, table)
    assert (len(partition.hidden) > 0) <= (mode == "zero")


def test_beta_gamma_sends_a_sample_to_a_site_that_sees_all_of_it_or_else_the_most():
    """Step 3, re-computed row by row from the visibility that was drawn."""
    targets, table = multilabel(np.random.default_rng(3), 400, 6, density=0.3)
    partition = beta_gamma(targets, table, np.random.default_rng(4), num_sites=5, beta=0.5, gamma=0.5, min_size=0)
    sites = site_of_row(partition, len(table))
    for row in range(len(targets)):
        positives = np.flatnonzero(targets[row] == 1)
        seen = [int(partition.visible[site, positives].sum()) for site in range(5)]
        assert seen[sites[row]] == max(seen)


def test_beta_gamma_approaches_an_even_split_as_beta_grows():
    """With all labels visible and beta -> infinity every site is equally likely: binomial(n, 1/K), five sigma."""
    rng = np.random.default_rng(0)
    targets = np.ones((4000, 3), dtype=np.int8) * (rng.random((4000, 3)) < 0.5)
    table = make_table(["train"] * 4000)
    partition = beta_gamma(targets, table, np.random.default_rng(1), num_sites=4, beta=1e7, gamma=1.0)
    for label in range(3):
        total = int(targets[:, label].sum())
        held = np.array([of_site["train"]["positives"][label] for of_site in partition.counts.values()])
        assert np.all(np.abs(held - total / 4) < 5 * np.sqrt(total * 0.25 * 0.75))


def test_small_beta_concentrates_a_class_at_one_site():
    targets = np.eye(4, dtype=np.int8)[np.repeat(np.arange(4), 200)]
    table = make_table(["train"] * 800)
    partition = beta_gamma(targets, table, np.random.default_rng(1), num_sites=4, beta=1e-4, gamma=1.0, min_size=0)
    held = np.array([of_site["train"]["positives"] for of_site in partition.counts.values()])  # (K, C)
    assert np.all(held.max(axis=0) >= 199)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_sites=st.integers(1, 9))
def test_samples_without_a_positive_are_dealt_evenly_before_the_smallest_site_is_filled(seed, num_sites):
    targets, table = multilabel(np.random.default_rng(seed), 200, 4)
    partition = beta_gamma(
        targets, table, np.random.default_rng(seed), num_sites=num_sites, beta=0.3, gamma=1.0, min_size=0
    )
    is_empty = ~(targets == 1).any(axis=1)
    sites = site_of_row(partition, len(table))
    for rows in (is_empty, *(is_empty & (table["split"] == split).to_numpy() for split in SPLITS)):
        held = np.bincount(sites[rows], minlength=num_sites)
        assert held.max() - held.min() <= 1


def test_filling_the_smallest_site_takes_from_the_largest_and_prefers_visible_samples():
    targets = np.eye(2, dtype=np.int8)[np.array([0] * 90 + [1] * 10)]
    table = make_table(["train"] * 100)
    unfilled = beta_gamma(targets, table, np.random.default_rng(2), num_sites=2, beta=1e-4, gamma=1.0, min_size=0)
    filled = beta_gamma(targets, table, np.random.default_rng(2), num_sites=2, beta=1e-4, gamma=1.0, min_size=30)
    assert min(len(rows["train"]) for rows in unfilled.sites.values()) < 30
    assert sorted(len(rows["train"]) for rows in filled.sites.values()) == [30, 70]
    assert len(filled.exceptions) == 0


def test_hidden_labels_are_training_positives_read_as_absent():
    targets, table = multilabel(np.random.default_rng(5), 300, 8, density=0.4)
    arguments = {"num_sites": 4, "beta": 0.5, "gamma": 0.4, "min_size": 8}
    keep = beta_gamma(targets, table, np.random.default_rng(6), **arguments)
    zero = beta_gamma(targets, table, np.random.default_rng(6), invisible_labels="zero", **arguments)
    assert np.array_equal(hide_labels(targets, keep), targets)
    seen = hide_labels(targets, zero)
    changed = np.argwhere(seen != targets)
    assert len(changed) == len(zero.hidden) > 0
    assert np.all(targets[seen != targets] == 1) and np.all(seen[seen != targets] == 0)
    assert set(table["split"].to_numpy()[changed[:, 0]]) == {"train"}
    assert len(zero.exceptions) > len(zero.hidden)


def test_drop_takes_unseen_training_samples_out():
    targets, table = multilabel(np.random.default_rng(5), 400, 8, density=0.4)
    partition = beta_gamma(
        targets,
        table,
        np.random.default_rng(6),
        num_sites=4,
        beta=0.5,
        gamma=0.4,
        invisible_labels="drop",
        min_size=0,
    )
    assert len(partition.dropped) > 0
    is_train = (table["split"] == "train").to_numpy()
    assert sum(len(rows["train"]) for rows in partition.sites.values()) == is_train.sum() - len(partition.dropped)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beta": 0.0}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.5}, "gamma"),
        ({"invisible_labels": "hide"}, "invisible_labels"),
        ({"num_sites": 0}, "at least 1 site"),
        ({"num_sites": 500}, "500 sites"),
        ({"min_size": 60}, "60 training rows"),
    ],
)
def test_beta_gamma_refuses_what_it_cannot_do(changes, words):
    targets, table = multilabel(np.random.default_rng(0), 200, 4)
    arguments = {"num_sites": 4, "beta": 0.5, "gamma": 0.5, "min_size": 5, **changes}
    with pytest.raises(DataError, match=words):
        beta_gamma(targets, table, np.random.default_rng(0), **arguments)


def test_sites_that_no_patient_can_fill_are_an_error_not_a_loop():
    """One patient holds 58 of 60 rows: three sites of ten rows cannot be made without tearing them apart."""
    targets = np.zeros((60, 2), dtype=np.int8)
    table = make_table(["train"] * 60, ["big"] * 58 + ["b", "c"])
    with pytest.raises(DataError, match="no other can spare a patient"):
        beta_gamma(targets, table, np.random.default_rng(0), num_sites=3, beta=1.0, gamma=1.0, min_size=10)


def test_labels_that_are_all_unknown_are_dealt_like_samples_without_a_finding():
    targets = np.full((90, 3), -1, dtype=np.int8)
    table = make_table(["train"] * 90)
    partition = beta_gamma(targets, table, np.random.default_rng(0), num_sites=3, beta=0.1, gamma=0.5, min_size=10)
    assert [len(rows["train"]) for rows in partition.sites.values()] == [30, 30, 30]
    assert partition.counts["site-00"]["train"]["unknown"] == [30, 30, 30]


# --------------------------------------------------------------------------- single-label protocols


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_sites=st.integers(1, 6),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e4]),
    classes=st.integers(2, 10),
)
def test_dirichlet_covers_every_row_once_with_the_smallest_site_large_enough(seed, num_sites, alpha, classes):
    targets, table = single_label(np.random.default_rng(seed), 400, classes)
    try:
        partition = dirichlet(targets, table, np.random.default_rng(seed), num_sites=num_sites, alpha=alpha, min_size=5)
    except DataError as error:  # few classes cannot reach many sites when each class goes to one
        assert "no one gave each" in str(error) and classes < num_sites and alpha < 1
        return
    check_partition(partition, table)
    assert min(len(rows["train"]) for rows in partition.sites.values()) >= 5
    again = dirichlet(targets, table, np.random.default_rng(seed), num_sites=num_sites, alpha=alpha, min_size=5)
    assert again.to_json() == partition.to_json()


def test_dirichlet_with_large_alpha_is_even_in_every_class_and_split():
    targets = np.eye(4, dtype=np.int8)[np.repeat(np.arange(4), 300)]
    table = make_table((["train"] * 200 + ["val"] * 50 + ["test"] * 50) * 4)
    partition = dirichlet(targets, table, np.random.default_rng(0), num_sites=5, alpha=1e8)
    for of_site in partition.counts.values():
        for split, size in (("train", 40), ("val", 10), ("test", 10)):  # floors of running sums: at most 1 off
            assert np.all(np.abs(np.array(of_site[split]["positives"]) - size) <= 1)


def test_dirichlet_that_cannot_be_reached_ends_with_the_numbers():
    targets = np.eye(2, dtype=np.int8)[np.repeat([0, 1], 50)]
    table = make_table(["train"] * 100)
    with pytest.raises(DataError, match=r"alpha=0\.0001"):
        dirichlet(targets, table, np.random.default_rng(0), num_sites=5, alpha=1e-4, min_size=10)


def test_single_label_protocols_refuse_multilabel_rows():
    targets, table = multilabel(np.random.default_rng(0), 60, 4)
    with pytest.raises(DataError, match="beta_gamma"):
        dirichlet(targets, table, np.random.default_rng(0), num_sites=2, alpha=1.0)


def test_a_patient_of_several_classes_stays_at_one_site():
    targets = np.eye(3, dtype=np.int8)[np.arange(120) % 3]
    table = make_table(["train"] * 120, [f"p{row // 4}" for row in range(120)])
    assert_patients_whole(dirichlet(targets, table, np.random.default_rng(0), num_sites=3, alpha=0.5), table)
    assert_patients_whole(iid(targets, table, np.random.default_rng(0), num_sites=3), table)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_sites=st.integers(1, 12))
def test_iid_sites_differ_by_at_most_one_row(seed, num_sites):
    targets, table = multilabel(np.random.default_rng(seed), 120, 3)
    partition = iid(targets, table, np.random.default_rng(seed), num_sites=num_sites)
    for split in SPLITS:
        sizes = [len(rows[split]) for rows in partition.sites.values()]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_long_tail_cuts_train_only_and_drops_the_rest(alpha):
    targets = np.eye(4, dtype=np.int8)[np.tile(np.arange(4), 150)]
    table = make_table((["train"] * 4 + ["test"] * 2) * 100)
    partition = long_tail(targets, table, np.random.default_rng(0), num_sites=3, ratio=10, alpha=alpha)
    check_partition(partition, table)
    train = np.concatenate([rows["train"] for rows in partition.sites.values()])
    assert targets[train].sum(axis=0).tolist() == [100, 46, 21, 10]
    assert sum(len(rows["test"]) for rows in partition.sites.values()) == 200
    assert len(partition.dropped) == 400 - len(train)


# --------------------------------------------------------------------------- real sites


@needs_chest
def test_the_chest_pack_has_its_five_real_sites():
    manifest = read_manifest(CHEST)
    partition = by_site(manifest.targets, manifest.table, columns=("site", "view"))
    assert list(partition.sites) == ["mhh", "nih_a-AP", "nih_a-PA", "nih_b64-AP", "nih_b64-PA"]
    # counted in metadata.csv with the csv module: (train, val, test)
    sizes = {name: tuple(len(rows[split]) for split in SPLITS) for name, rows in partition.sites.items()}
    assert sizes == {
        "mhh": (179, 29, 35),
        "nih_a-AP": (381, 32, 154),
        "nih_a-PA": (301, 29, 103),
        "nih_b64-AP": (261, 7, 89),
        "nih_b64-PA": (449, 58, 129),
    }
    # Hannover states COVID-19 for all but 2 training rows and none of the 14 findings
    assert partition.counts["mhh"]["train"]["unknown"] == [179] * 14 + [2]


@needs_chest
@pytest.mark.parametrize("mode", ["keep", "zero", "drop"])
def test_the_chest_pack_by_beta_gamma_keeps_patients_whole(mode):
    manifest = read_manifest(CHEST)
    partition = beta_gamma(
        manifest.targets,
        manifest.table,
        np.random.default_rng(0),
        num_sites=5,
        beta=0.1,
        gamma=0.5,
        invisible_labels=mode,
        min_size=32,
    )
    assert_patients_whole(partition, manifest.table)
    assert min(len(rows["train"]) for rows in partition.sites.values()) >= 32


def test_a_site_divides_only_when_every_part_is_large_enough():
    table = make_table(
        ["train"] * 10 + ["test"],
        site=["a"] * 5 + ["b"] * 6,
        view=["AP"] * 3 + ["PA"] * 2 + ["AP"] * 4 + ["PA"] * 2,
    )
    targets = np.zeros((11, 1), dtype=np.int8)
    names = {
        minimum: list(by_site(targets, table, columns=["site", "view"], min_samples=minimum).sites)
        for minimum in (1, 2, 3)
    }
    # training rows: a-AP 3, a-PA 2, b-AP 4, b-PA 1
    assert names == {1: ["a-AP", "a-PA", "b-AP", "b-PA"], 2: ["a-AP", "a-PA", "b"], 3: ["a", "b"]}


def test_two_real_sites_of_the_same_name_are_refused():
    table = make_table(["train"] * 4, site=["a-b", "a-b", "a", "a"], view=["c", "c", "b-c", "b-c"])
    with pytest.raises(DataError, match="'a-b-c'"):
        by_site(np.zeros((4, 1), np.int8), table, columns=["site", "view"], min_samples=1)


def test_a_blank_site_and_a_missing_column_are_refused_by_name():
    table = make_table(["train"] * 3, site=["a", " ", "b"])
    with pytest.raises(DataError, match="row 3: column 'site' is blank"):
        by_site(np.zeros((3, 1), np.int8), table)
    with pytest.raises(DataError, match="ward"):
        by_site(np.zeros((3, 1), np.int8), table, columns=["ward"])


def test_one_real_site_is_a_partition_too():
    table = make_table(["train", "val", "test"], site=["a", "a", "a"])
    assert list(by_site(np.zeros((3, 1), np.int8), table).sites) == ["a"]


def test_a_patient_in_train_and_test_is_refused_across_sites_with_the_rows():
    table = make_table(["train", "test", "train"], ["p1", "p1", "p2"], site=["a", "b", "a"])
    with pytest.raises(DataError, match=r"'p1' in rows \[2, 3\]"):
        by_site(np.zeros((3, 1), np.int8), table)
    with pytest.raises(DataError, match="more than one split"):
        iid(np.zeros((3, 1), np.int8), table, np.random.default_rng(0), num_sites=2)


def test_a_strange_split_is_refused_with_its_row():
    table = make_table(["train", "training"])
    with pytest.raises(DataError, match="row 3: split 'training'"):
        iid(np.zeros((2, 1), np.int8), table, np.random.default_rng(0), num_sites=1)


# --------------------------------------------------------------------------- the record


def test_pooled_train_moves_all_training_rows_and_leaves_evaluation_alone():
    targets, table = multilabel(np.random.default_rng(0), 200, 4)
    partition = beta_gamma(
        targets,
        table,
        np.random.default_rng(0),
        num_sites=3,
        beta=0.3,
        gamma=0.5,
        invisible_labels="zero",
        min_size=4,
    )
    pooled = pooled_train(targets, table, partition)
    assert list(pooled.sites) == ["pooled", "site-00", "site-01", "site-02"]
    assert pooled.sites["pooled"]["train"].tolist() == np.flatnonzero(table["split"] == "train").tolist()
    for site, rows in partition.sites.items():
        assert len(pooled.sites[site]["train"]) == 0
        for split in ("val", "test"):
            assert np.array_equal(pooled.sites[site][split], rows[split])
    assert pooled.visible[0].all() and np.array_equal(pooled.visible[1:], partition.visible)
    assert np.array_equal(hide_labels(targets, pooled), hide_labels(targets, partition))
    with pytest.raises(DataError, match="pooled"):
        pooled_train(targets, table, pooled)


def test_site_names_sort_by_number_beyond_a_hundred():
    table = make_table(["train"] * 120)
    names = list(iid(np.zeros((120, 1), np.int8), table, np.random.default_rng(0), num_sites=120).sites)
    assert names[0] == "site-000" and names[99] == "site-099" and names == sorted(names)


def test_check_partition_refuses_a_row_that_is_lost_or_used_twice():
    targets, table = multilabel(np.random.default_rng(0), 30, 2)
    partition = iid(targets, table, np.random.default_rng(0), num_sites=2)
    rows = partition.sites["site-00"]
    rows["train"] = rows["train"][1:]
    with pytest.raises(DataError, match="not disjoint and complete"):
        check_partition(partition, table)
    rows["train"] = np.append(rows["train"], rows["train"][0])
    with pytest.raises(DataError, match="not disjoint and complete"):
        check_partition(partition, table)


def test_a_written_partition_says_what_was_dealt(tmp_path):
    targets, table = multilabel(np.random.default_rng(0), 60, 3)
    partition = iid(targets, table, np.random.default_rng(0), num_sites=2)
    path = tmp_path / "partition.json"
    path.write_text("an older partition")
    partition.write(path, seed=7)
    content = json.loads(path.read_text())
    assert content["seed"] == 7 and content["kind"] == "iid" and content["arguments"] == {"num_sites": 2}
    assert content["sites"]["site-01"]["val"] == partition.sites["site-01"]["val"].tolist()
    train = content["counts"]["site-00"]["train"]
    per_class = np.array([train["positives"], train["negatives"], train["unknown"]]).sum(axis=0)
    assert per_class.tolist() == [train["samples"]] * 3
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_partition(tmp_path, monkeypatch):
    targets, table = multilabel(np.random.default_rng(0), 20, 2)
    partition = iid(targets, table, np.random.default_rng(0), num_sites=1)
    path = tmp_path / "partition.json"
    path.write_text("old")

    def fails(_):
        raise OSError("disk full")

    monkeypatch.setattr("datasets.partition.os.fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        partition.write(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_partitions_are_the_same_on_every_machine():
    """Recorded from one run: a change of the drawing order would silently change every published simulation."""
    targets = np.eye(3, dtype=np.int8)[np.arange(12) % 3]
    table = make_table(["train"] * 12)
    dealt = beta_gamma(targets, table, np.random.default_rng(1), num_sites=2, beta=1.0, gamma=1.0, min_size=2)
    cut = dirichlet(targets, table, np.random.default_rng(1), num_sites=2, alpha=1.0, min_size=2)
    assert [rows["train"].tolist() for rows in dealt.sites.values()] == [[0, 3, 5, 6, 8, 9], [1, 2, 4, 7, 10, 11]]
    assert [rows["train"].tolist() for rows in cut.sites.values()] == [[1, 3, 4, 6, 9, 10], [0, 2, 5, 7, 8, 11]]
