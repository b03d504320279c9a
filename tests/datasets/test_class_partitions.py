"""Sites that differ in their classes: complete, patients whole, the protocol's numbers, and never an endless draw."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.class_partitions import dirichlet_class, dirichlet_client, n_classes_per_site
from datasets.partition import dirichlet
from datasets.records import SPLITS, DataError


def data(rng, rows, classes, *, patients=False):
    """Single-label rows, 60/20/20 in train, val and test; with ``patients``, about three rows each."""
    labels = rng.integers(0, classes, rows)
    split = rng.choice(SPLITS, rows, p=[0.6, 0.2, 0.2])
    patient = [""] * rows
    if patients:
        number = rng.integers(0, max(1, rows // 3), rows)
        split = rng.choice(SPLITS, rows, p=[0.6, 0.2, 0.2])[number]
        patient = [f"p{one}" for one in number]
    table = pd.DataFrame({"patient": patient, "split": split, "line": np.arange(2, rows + 2)})
    return np.eye(classes, dtype=np.int8)[labels], table


def train_counts(partition, targets):
    """Training rows by site and class ``(K, C)``."""
    return np.stack([targets[rows["train"]].sum(axis=0) for rows in partition.sites.values()])


def assert_patients_whole(partition, table):
    site_of_row = np.full(len(table), -1)
    for number, parts in enumerate(partition.sites.values()):
        for rows in parts.values():
            site_of_row[rows] = number
    for _, group in table[table["patient"] != ""].groupby("patient"):
        assert len(set(site_of_row[group.index])) == 1


def test_dirichlet_class_is_the_protocol_of_dense():
    targets, table = data(np.random.default_rng(0), 900, 6)
    found = dirichlet_class(targets, table, np.random.default_rng(3), num_sites=4, alpha=0.3)
    same = dirichlet(targets, table, np.random.default_rng(3), num_sites=4, alpha=0.3)
    assert found.kind == "dirichlet_class" and train_counts(found, targets).sum(axis=1).min() >= 10
    assert all(np.array_equal(found.sites[s][p], same.sites[s][p]) for s in same.sites for p in SPLITS)
    with pytest.raises(DataError, match="in 1000 draws"):
        one_class = np.eye(2, dtype=np.int8)[np.zeros(60, int)]
        dirichlet_class(one_class, table[:60], np.random.default_rng(3), num_sites=3, alpha=1e-3)


@given(
    seed=st.integers(0, 10_000),
    num_sites=st.integers(1, 8),
    classes=st.integers(2, 7),
    alpha=st.sampled_from([1e-4, 0.1, 1.0, 100.0]),
    patients=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_clients_are_of_equal_size_and_hold_everything(seed, num_sites, classes, alpha, patients):
    targets, table = data(np.random.default_rng(seed), 240, classes, patients=patients)
    found = dirichlet_client(targets, table, np.random.default_rng(seed), num_sites=num_sites, alpha=alpha)
    assert len(found.dropped) == 0  # `check_partition` has seen to the rest
    assert_patients_whole(found, table)
    if not patients:
        sizes = train_counts(found, targets).sum(axis=1)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_the_case_in_which_the_source_never_ends_ends(alpha):
    targets, table = data(np.random.default_rng(1), 2000, 10)
    table["split"] = "train"
    found = dirichlet_client(targets, table, np.random.default_rng(1), num_sites=5, alpha=alpha)
    assert train_counts(found, targets).sum(axis=1).tolist() == [400] * 5


def test_small_alpha_gives_few_classes_and_val_follows_train():
    targets, table = data(np.random.default_rng(2), 6000, 10)
    skewed, even = (
        dirichlet_client(targets, table, np.random.default_rng(5), num_sites=5, alpha=alpha) for alpha in (0.05, 1e4)
    )
    counts = [train_counts(partition, targets) for partition in (skewed, even)]
    largest = [(held / held.sum(axis=1, keepdims=True)).max(axis=1).mean() for held in counts]
    assert largest[0] > 0.4 and largest[1] < 0.2
    for rows in skewed.sites.values():
        train, test = (targets[rows[split]].mean(axis=0) for split in ("train", "test"))
        assert np.abs(train - test).max() < 0.15


@given(
    seed=st.integers(0, 10_000),
    num_sites=st.integers(1, 9),
    classes=st.integers(1, 6),
    patients=st.booleans(),
    ask=st.integers(1, 6),
)
@settings(max_examples=40, deadline=None)
def test_sites_hold_as_many_classes_as_asked(seed, num_sites, classes, patients, ask):
    targets, table = data(np.random.default_rng(seed), 1600 if patients else 400, classes, patients=patients)
    wanted = {"num_sites": num_sites, "num_classes": min(ask, classes)}
    found = n_classes_per_site(targets, table, np.random.default_rng(seed), **wanted)
    counts = train_counts(found, targets)
    assert_patients_whole(found, table)
    if not patients:
        assert ((counts > 0).sum(axis=1) == wanted["num_classes"]).all()
        held = counts.sum(axis=0) > 0
        spread = [column[column > 0] for column in counts.T if column.any()]
        assert all(column.max() - column.min() <= 1 for column in spread)
        lost = np.isin(np.arange(len(table)), found.dropped)
        assert np.array_equal(lost, (table["split"] == "train").to_numpy() & ~held[targets.argmax(axis=1)])


@pytest.mark.parametrize("num_classes", [1, 2])
def test_five_sites_take_classes_in_turn_and_do_not_hang(num_classes):
    targets, table = data(np.random.default_rng(0), 3000, 10)
    found = n_classes_per_site(targets, table, np.random.default_rng(0), num_sites=5, num_classes=num_classes)
    counts = train_counts(found, targets)
    for site in range(5):
        expected = [(num_classes * site + j) % 10 for j in range(num_classes)]
        assert np.flatnonzero(counts[site]).tolist() == expected
    tests = np.concatenate([rows["test"] for rows in found.sites.values()])
    assert np.array_equal(np.sort(tests), np.flatnonzero(table["split"] == "test"))  # every class stays in the test


def test_one_seed_is_one_partition():
    targets, table = data(np.random.default_rng(0), 500, 5)
    for deal in (
        lambda seed: dirichlet_client(targets, table, np.random.default_rng(seed), num_sites=4, alpha=0.2),
        lambda seed: n_classes_per_site(targets, table, np.random.default_rng(seed), num_sites=7, num_classes=2),
    ):
        first, second, other = (deal(seed).to_json() for seed in (1, 1, 2))
        assert first == second != other


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, b, r: dirichlet_client(t, b, r, num_sites=2, alpha=0.0), "alpha is a Dirichlet"),
        (lambda t, b, r: dirichlet_client(t, b, r, num_sites=0, alpha=1.0), "at least 1 site"),
        (lambda t, b, r: dirichlet_client(t, b, r, num_sites=99, alpha=1.0), "ask for fewer sites"),
        (lambda t, b, r: n_classes_per_site(t, b, r, num_sites=2, num_classes=0), "1 to 3 classes"),
        (lambda t, b, r: n_classes_per_site(t, b, r, num_sites=2, num_classes=4), "1 to 3 classes"),
        (lambda t, b, r: n_classes_per_site(t, b, r, num_sites=20, num_classes=3), "training patients for 20 sites"),
        (lambda t, b, r: n_classes_per_site(t[:, :2], b, r, num_sites=2, num_classes=1), "exactly one label"),
    ],
)
def test_numbers_that_make_no_partition_are_refused(call, message):
    targets, table = data(np.random.default_rng(0), 60, 3)
    with pytest.raises(DataError, match=message):
        call(targets, table, np.random.default_rng(0))


def test_a_class_without_training_rows_leaves_its_only_holder_empty():
    targets = np.eye(2, dtype=np.int8)[[0, 0, 0, 1]]
    table = pd.DataFrame({"patient": [""] * 4, "split": ["train"] * 3 + ["test"], "line": range(2, 6)})
    with pytest.raises(DataError, match="site number 1 would hold no training row"):
        n_classes_per_site(targets, table, np.random.default_rng(0), num_sites=2, num_classes=1)
