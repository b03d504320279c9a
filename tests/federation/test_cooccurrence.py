"""How much more often a label is called falsely where one that goes with it is there: closed forms, and lift 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from federation.cooccurrence import absent_label_counts, false_positive_lift

ALWAYS = np.full((2, 2), 1.5) - 1.5 * np.eye(2)  # each of the two labels makes the other likely


def test_counts_and_lift_have_their_closed_form():
    """Label 1 is called in 3 of 4 samples that have label 0 and not it, in 2 of 8 that have neither: 0.75 / 0.25."""
    targets = np.array([[1, 0]] * 4 + [[0, 0]] * 8 + [[1, 1]] * 5)
    called = np.zeros((17, 2), bool)
    called[[0, 1, 2, 4, 5], 1] = True
    called[12:] = True  # where a label is there, calling it is no false positive
    counts = absent_label_counts(called, targets)
    assert counts.dtype == np.int64 and counts[:, 0, 1].tolist() == [4, 3, 8, 2]
    assert counts[:, 1, 0].tolist() == [0, 0, 8, 0]
    assert false_positive_lift(counts, ALWAYS) == (3.0, 1, 1)  # of label 0 without label 1 there is no rate


def test_mean_is_over_pairs_that_the_prior_makes_likely_and_no_other():
    counts = np.broadcast_to(np.array([10, 6, 40, 6])[:, None, None], (4, 3, 3)).copy()
    counts[1, 0, 2] = 3
    prior = np.array([[0, 1.2, 2], [1.0, 0, -1], [0.9, 0, 0]])
    assert false_positive_lift(counts, prior) == (pytest.approx((4 + 2) / 2), 2, 0)


@pytest.mark.parametrize("counts", [[0, 0, 9, 3], [9, 3, 0, 0], [9, 3, 9, 0], [0, 0, 0, 0]])
def test_pair_without_a_ratio_is_left_out_and_counted(counts):
    lift, pairs, left_out = false_positive_lift(np.array(counts)[:, None, None] * np.ones((4, 2, 2), int), ALWAYS)
    assert math.isnan(lift) and (pairs, left_out) == (0, 2)


TARGETS = arrays(np.int64, st.tuples(st.integers(1, 12), st.just(3)), elements=st.sampled_from([-1, 0, 1]))


@given(TARGETS, st.integers(1, 4))
def test_model_that_does_not_look_at_the_other_label_has_lift_one(targets, times):
    """Every sample stands there five times and is called in ``times`` of them, whatever it has."""
    repeated = np.tile(targets, (5, 1))
    called = np.repeat(np.arange(5) < times, len(targets))[:, None] & np.ones(repeated.shape, bool)
    lift, pairs, left_out = false_positive_lift(absent_label_counts(called, repeated), 2 - 2 * np.eye(3))
    assert pairs + left_out == 6 and (pairs == 0 or lift == pytest.approx(1))


@given(TARGETS, st.data())
def test_counts_are_those_of_plain_loops_and_add_up_over_sites(targets, data):
    called = data.draw(arrays(bool, targets.shape))
    found = absent_label_counts(called, targets)
    for i in range(3):
        for j in range(3):
            for at, value in ((0, 1), (2, 0)):
                rows = (targets[:, i] == value) & (targets[:, j] == 0)
                assert found[at, i, j] == rows.sum() and found[at + 1, i, j] == (rows & called[:, j]).sum()
    cut = data.draw(st.integers(0, len(targets)))
    parts = [absent_label_counts(called[part], targets[part]) for part in (slice(cut), slice(cut, None))]
    assert np.array_equal(found, sum(parts))
