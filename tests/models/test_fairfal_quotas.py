"""The quotas of FairFAL's sampler: known buckets, the plain rule in loops, invariants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.fairfal_select import class_quotas


@pytest.mark.parametrize(
    ("buckets", "budget", "expected"),
    [
        ([85, 30, 4, 0, 1, 0], 40, [18, 17, 4, 0, 1, 0]),
        ([55, 14, 0, 21, 0, 0], 25, [9, 8, 0, 8, 0, 0]),
        ([7, 5, 4, 4], 50, [7, 5, 4, 4]),
        ([5, 9, 9, 2], 2, [0, 1, 1, 0]),  # fewer than classes: the largest buckets, ties to the lower class
        ([5, 9], 0, [0, 0]),
        ([0, 0], 3, [0, 0]),
    ],
)
def test_quotas_of_known_buckets(buckets, budget, expected):
    assert class_quotas(buckets, budget) == expected


@given(
    buckets=st.lists(st.integers(0, 90), min_size=1, max_size=12),
    budget=st.integers(0, 300),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_quotas_spend_the_budget_within_the_buckets(buckets, budget, weighted, seed):
    weights = np.random.default_rng(seed).random(len(buckets)) if weighted else None
    quotas = np.array(class_quotas(buckets, budget, weights))
    assert quotas.sum() == min(budget, sum(buckets))
    assert (quotas >= 0).all() and (quotas <= buckets).all()
    if not weighted:
        has_room = quotas < buckets
        # A class with room left may have missed the rest of the division and the last lap of the excess, no more.
        assert not has_room.any() or quotas[has_room].min() >= quotas.max() - 2


def test_excess_is_dealt_one_by_one_in_the_order_of_the_buckets():
    def slow(buckets, budget):
        total, classes = min(budget, sum(buckets)), len(buckets)
        order = sorted(range(classes), key=lambda label: -buckets[label])
        quotas = [total // classes] * classes
        for label in order[: total % classes]:
            quotas[label] += 1
        excess = sum(max(0, quota - size) for quota, size in zip(quotas, buckets, strict=True))
        quotas = [min(pair) for pair in zip(quotas, buckets, strict=True)]
        for label in itertools.cycle(order):
            if not excess:
                return quotas
            if quotas[label] < buckets[label]:
                quotas[label] += 1
                excess -= 1

    rng = np.random.default_rng(0)
    for _ in range(200):
        buckets = (rng.integers(0, 30, rng.integers(1, 9)) * (rng.random() < 0.8)).tolist()
        budget = int(rng.integers(0, 150))
        assert class_quotas(buckets, budget) == slow(buckets, budget), (buckets, budget)


def test_weights_shift_the_quotas():
    assert class_quotas([50, 50, 50], 12, [1, 2, 3]) == [2, 4, 6]
    assert class_quotas([50, 50, 1], 12, [1, 2, 3]) == [5, 6, 1]  # five of excess: 3 and 2, the lower class first
    assert class_quotas([50, 50], 10, [0, 1]) == [0, 10]
    assert class_quotas([50, 50, 50], 10, [1, 1, 1]) == class_quotas([50, 50, 50], 10)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="class weights must be 2 numbers"):
        class_quotas([3, 4], 2, weights)


def test_quotas_refuse_negative_numbers():
    for buckets, budget in (([-1, 2], 1), ([1, 2], -1), ([], 1)):
        with pytest.raises(ValueError, match="at least 0"):
            class_quotas(buckets, budget)
