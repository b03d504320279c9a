"""The four blocks by hand, the algebra of head and tail, and thresholds that reach a recall."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sklearn.metrics import recall_score, roc_auc_score

from federation.blocks import head_and_tail, variance_by_class
from federation.metrics import ScoreHistogram, four_blocks

nan = math.nan
aurocs = st.one_of(st.floats(0, 1), st.just(nan))


def test_the_blocks_by_hand():
    # 5 classes, ceil(5/3) = 2 in head and tail; by positives: classes 1, 3 | 0 | 2, 4
    blocks = four_blocks(
        pooled=[0.9, 0.8, nan, 0.6, 0.7],
        sites={"b": [0.7, 0.9, nan, 0.5, nan], "a": [0.9, nan, nan, 0.9, nan]},
        positives=[40, 900, 3, 41, 0],
        local_only={"a": [0.8, nan, nan, 0.8, nan], "b": [0.8, 0.9, nan, 0.3, nan]},
    )
    assert blocks["macro_auroc"] == pytest.approx((0.9 + 0.8 + 0.6 + 0.7) / 4)
    assert blocks["head_auroc"] == pytest.approx((0.8 + 0.6) / 2)
    assert blocks["tail_auroc"] == pytest.approx(0.7)  # class 2 is undefined and left out
    assert blocks["worst_auroc"] == 0.6 and blocks["auroc_classes"] == 4.0
    assert blocks["auroc_q10"] == pytest.approx(0.6 + 0.3 * 0.1)  # position 0.1 * 3 of 0.6, 0.7, 0.8, 0.9
    assert blocks["site_variance"] == pytest.approx(0.1**2)  # macros 0.7 and 0.9
    # between sites: class 0 has 0.7, 0.9; class 1 one site; class 3 0.5, 0.9; classes 2 and 4 none
    assert blocks["class_variance"] == pytest.approx((0.01 + 0.0 + 0.04) / 3)
    assert blocks["weakest_gain"] == pytest.approx(0.7 - 2.0 / 3)  # b is weakest alone: 2/3 against 0.8


def test_undefined_is_nan_and_one_site_has_no_spread():
    blocks = four_blocks([nan, nan], {"a": [nan, nan]}, [0, 0])
    assert blocks.pop("auroc_classes") == 0.0
    assert all(type(value) is float and math.isnan(value) for value in blocks.values())
    one = four_blocks([0.5, 0.7], {"a": [0.5, 0.7], "without": [nan, nan]}, [2, 1])
    assert one["site_variance"] == 0.0 and math.isnan(one["weakest_gain"])
    assert math.isnan(four_blocks([0.5], {}, [1])["site_variance"])


@given(npst.arrays(np.float64, (4, 7), elements=aurocs), st.permutations(range(3)), st.permutations(range(7)))
def test_order_of_sites_changes_nothing_and_order_of_classes_only_rounding(table, site_order, class_order):
    positives = np.array([70, 60, 50, 40, 30, 20, 10])
    sites = {f"s{index}": table[index] for index in range(3)}
    blocks = four_blocks(table[3], sites, positives, sites)
    turned = {f"s{index}": sites[f"s{index}"] for index in site_order}
    np.testing.assert_equal(four_blocks(table[3], turned, positives, turned), blocks)
    classes = np.array(class_order)
    moved = {site: values[classes] for site, values in sites.items()}
    for name, value in four_blocks(table[3][classes], moved, positives[classes], moved).items():
        assert value == pytest.approx(blocks[name], abs=1e-12, nan_ok=True), name
    assert blocks["weakest_gain"] == 0.0 or math.isnan(blocks["weakest_gain"])  # against itself nobody gains


@given(npst.arrays(np.float64, (5, 6), elements=aurocs))
def test_variances_are_numpys_over_what_is_defined(table):
    found = variance_by_class({f"s{index}": row for index, row in enumerate(table)})
    for label, column in enumerate(table.T):
        defined = [value for value in column if not math.isnan(value)]
        assert found[label] == pytest.approx(np.var(defined) if defined else nan, nan_ok=True)


@pytest.mark.parametrize(
    ("positives", "head", "tail"),
    [
        ([5], [0], [0]),
        ([5, 6], [1], [0]),
        ([7, 7, 7], [0], [2]),
        ([1, 3, 3, 2], [1, 2], [3, 0]),
        (np.uint8([0, 9, 1]), [1], [0]),
    ],
)
def test_head_and_tail_by_hand(positives, head, tail):
    found = head_and_tail(positives)
    assert found[0].tolist() == head and found[1].tolist() == tail


def test_sklearns_closed_form_goes_through():
    auroc = roc_auc_score([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
    assert four_blocks([auroc], {"a": [auroc]}, [2])["macro_auroc"] == 0.75  # spec section 9


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (([0.5, 0.5], {"a": [0.5, 0.5]}, []), "positives must be"),
        (([0.5], {"a": [0.5, 0.5]}, [1, 2]), r"\(pooled\) must be \(2,\)"),
        (([0.5, 0.5], {"a": [0.5]}, [1, 2]), r"\(a\) must be \(2,\)"),
        (([0.5, 1.5], {"a": [0.5, 0.5]}, [1, 2]), r"\(pooled\) must be in \[0, 1\]"),
        (([0.5], {"a": [0.5]}, [1], {"a": [50.0]}), r"\(local-only of a\) must be in"),
    ],
)
def test_shapes_and_values_that_do_not_fit_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        four_blocks(*arguments)


# -- thresholds by recall -------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.8, 0.95, 1.0]))
@settings(deadline=None)  # scikit-learn is slow on its first call
def test_the_recall_threshold_is_the_largest_edge_that_reaches_the_target(seed, target):
    rng = np.random.default_rng(seed)
    scores, targets = rng.uniform(0.001, 1, (60, 2)), rng.integers(0, 2, (60, 2))
    targets[0] = 1
    histogram = ScoreHistogram(2, 64)
    histogram.update(scores, targets)
    for label, threshold in enumerate(histogram.recall_thresholds(target)):
        found = scores[targets[:, label] == 1, label]
        assert threshold == max(edge for edge in histogram.edges if (found > edge).mean() >= target)
        above = scores[:, label] > threshold
        assert histogram.sensitivity(threshold)[label] == recall_score(targets[:, label], above) >= target


def test_recall_thresholds_at_the_ends():
    histogram = ScoreHistogram(3, 16)
    # class 0: 19 of 20 positives above one half, so 0.95 is reached there exactly; class 1: no positive;
    # class 2: a positive at 0 lies above no edge
    scores = np.full((20, 3), 0.500001)
    scores[0] = 0.0
    targets = np.ones((20, 3))
    targets[:, 1] = 0
    histogram.update(scores, targets)
    assert histogram.recall_thresholds([0.95, 0.95, 1.0]).tolist() == [0.5, 0.5, histogram.edges[0]]
    with pytest.raises(ValueError, match=r"recall targets must be in \[0, 1\]"):
        histogram.recall_thresholds(95)
