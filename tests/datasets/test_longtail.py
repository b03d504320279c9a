"""Long tails and sites of equal size: the authors' counts, exact sums, and the same draws for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets.balanced import balanced_counts, dirichlet_shares
from datasets.longtail import long_tail_counts, long_tail_rows
from datasets.partition import dirichlet_balanced
from datasets.records import DataError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "fairfal" / "case07_long_tail.json").read_text())
CIFAR10_LT = np.repeat(np.arange(10), [5000, 3584, 2569, 1842, 1320, 946, 678, 486, 348, 250])


@pytest.mark.parametrize("name", [name for name in GOLDEN if "_rho" in name])
def test_class_counts_are_the_authors(name):
    golden, rho = GOLDEN[name], int(name.partition("rho")[2])
    counts = long_tail_counts(golden["counts"][0], len(golden["counts"]), rho)
    assert counts == golden["counts"] and sum(counts) == golden["total"]


def test_the_rows_that_stay_are_the_authors():
    """FairFAL shuffles each class under NumPy's legacy generator; the same stream must give the same rows, in order."""
    golden = GOLDEN["subset_example"]
    classes = np.repeat(np.arange(golden["classes"]), golden["per_class"])
    counts = long_tail_counts(golden["per_class"], golden["classes"], 1 / golden["imb_factor"])
    kept = long_tail_rows(classes, counts, np.random.RandomState(golden["legacy_numpy_seed"]))
    assert counts == golden["counts"] and kept.tolist() == golden["kept_original_indices"]
    assert classes[kept].tolist() == golden["targets"]


def test_a_class_with_too_few_samples_keeps_them_all():
    classes = np.repeat([0, 1], [2, 28])
    kept = long_tail_rows(classes, long_tail_counts(15, 2, 3), np.random.default_rng(0))
    assert np.bincount(classes[kept]).tolist() == [2, 5]


def test_a_tail_longer_than_its_head_is_refused():
    with pytest.raises(DataError, match=r"at least 1, got 0\.5"):
        long_tail_counts(100, 4, 0.5)


# -- sites of equal size ----------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    num_sites=st.integers(1, 12),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    classes=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_sites_are_of_equal_size_and_hold_everything_once(seed, num_sites, alpha, classes):
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, rng.integers(num_sites, 300), p=rng.dirichlet(np.ones(classes)))
    sites = dirichlet_balanced(labels, num_sites, alpha, seed)
    assert len(sites) == num_sites
    assert max(map(len, sites)) - min(map(len, sites)) <= 1
    assert np.sort(np.concatenate(sites)).tolist() == list(range(len(labels)))


@given(seed=st.integers(0, 10_000), num_sites=st.integers(1, 9), classes=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_counts_keep_every_class_whole(seed, num_sites, classes):
    rng = np.random.default_rng(seed)
    class_counts = rng.integers(0, 60, classes)
    shares = torch.from_numpy(rng.dirichlet(np.full(classes, 0.2), num_sites)).float()
    counts = balanced_counts(shares, class_counts)
    assert (counts >= 0).all() and counts.sum(axis=0).tolist() == class_counts.tolist()
    total = class_counts.sum()
    expected = [total // num_sites + (site < total % num_sites) for site in range(num_sites)]
    assert counts.sum(axis=1).tolist() == expected


def test_counts_of_a_small_table_by_hand():
    # 10 of class 0 by (.75, .25, 0): 7.5 and 2.5, the tie goes to the first: 8, 2, 0. 5 of class 1 by (.2, .2, .6):
    # 1, 1, 3. Sites hold 9, 3, 3 of 5 each, so in class 0 the first gives two to each of the others.
    shares = torch.tensor([[0.75, 0.2], [0.25, 0.2], [0.0, 0.6]])
    assert balanced_counts(shares, np.array([10, 5])).tolist() == [[4, 1], [4, 1], [2, 3]]


def test_a_class_that_no_site_has_a_share_of_is_dealt_evenly():
    assert balanced_counts(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), np.array([4, 6])).tolist() == [[2, 3], [2, 3]]


def test_shares_are_torchs_dirichlet_for_the_seed_and_leave_its_generator_alone():
    before = torch.get_rng_state()
    found = dirichlet_shares(4, 3, 0.5, 11)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        drawn = torch.distributions.Dirichlet(torch.full((3,), 0.5))
        rows = torch.stack([drawn.sample() for _ in range(4)]).double()
    for _ in range(5):
        rows = rows / rows.sum(dim=1, keepdim=True)
        rows = rows / rows.sum(dim=0, keepdim=True)
    torch.testing.assert_close(found.double(), rows, rtol=1e-5, atol=1e-6)


def test_small_alpha_gives_few_classes_and_large_alpha_all():
    few, all_classes = (dirichlet_balanced(CIFAR10_LT, 10, alpha, 0) for alpha in (0.1, 100))
    num_classes = [len(np.unique(CIFAR10_LT[site])) for site in few]
    assert max(num_classes) <= 8 and min(num_classes) >= 1
    assert all(len(np.unique(CIFAR10_LT[site])) == 10 for site in all_classes)


def test_one_seed_is_one_partition():
    first, second, other = (dirichlet_balanced(CIFAR10_LT[::10], 5, 0.1, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(first, other, strict=True))
    column = dirichlet_balanced(CIFAR10_LT[::10, None], 5, 0.1, 3)
    assert all(np.array_equal(*pair) for pair in zip(first, column, strict=True))


@pytest.mark.parametrize(
    ("labels", "num_sites", "alpha", "message"),
    [
        ([0, 1], 3, 1.0, "2 samples cannot be dealt to 3 sites"),
        ([0, 1], 0, 1.0, "at least 1 site"),
        ([0, 1], 1, 0.0, "positive, finite alpha"),
        ([0, 1], 1, float("inf"), "positive, finite alpha"),
        ([-1, 1], 1, 1.0, "the smallest is -1"),
    ],
)
def test_numbers_that_make_no_partition_are_refused(labels, num_sites, alpha, message):
    with pytest.raises(DataError, match=message):
        dirichlet_balanced(labels, num_sites, alpha, 0)
