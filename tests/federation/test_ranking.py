"""mAP, CF1 and OF1 against the authors' numbers, scikit-learn, and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score

from federation.metrics import cf1, mean_average_precision, of1
from federation.ranking import class_average_precisions, official_best, official_map, threshold_metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmpt" / "off_metrics.npz"


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as arrays:
        return {name: arrays[name] for name in arrays}


def drawn(seed, rows=30, classes=4):
    rng = np.random.default_rng(seed)
    return rng.random((rows, classes)), (rng.random((rows, classes)) < 0.4).astype(np.int8)


def test_average_precisions_are_the_authors(golden):
    scores, targets = golden["pred"], golden["target"]
    found = class_average_precisions(scores, targets)
    np.testing.assert_allclose(np.nan_to_num(found), golden["AP"], rtol=0, atol=1e-9)
    assert np.isnan(found).tolist() == [False] * 5 + [True]  # class 5 has no positive
    assert math.isclose(100 * official_map(scores, targets), golden["mAP"], abs_tol=1e-6)
    assert math.isclose(mean_average_precision(scores, targets), golden["AP"][:5].mean(), abs_tol=1e-9)


@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_threshold_metrics_are_the_authors(golden, threshold):
    expected = golden[f"own_fixed_thr{threshold}_CP_CR_CF1macro_OP_OR_OF1_CF1harm"]
    found = threshold_metrics(golden["pred"], golden["target"], threshold)
    np.testing.assert_allclose(100 * np.array(found), expected[:6], rtol=0, atol=1e-4)
    assert cf1(golden["pred"], golden["target"], threshold) == found.cf1
    assert of1(golden["pred"], golden["target"], threshold) == found.of1


def test_best_of_nine_thresholds_is_what_the_authors_report(golden):
    expected = golden["official_best_over_thresholds_CP_CR_CF1_OP_OR_OF1_mAP"]
    found = official_best(golden["pred"], golden["target"])
    np.testing.assert_allclose(100 * np.array(found), expected[:6], rtol=0, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_scikit_learn_gives_the_same(seed):
    scores, targets = drawn(seed)
    for label, found in enumerate(class_average_precisions(scores, targets)):
        assert math.isclose(found, average_precision_score(targets[:, label], scores[:, label]), abs_tol=1e-12)
    predicted = scores > 0.5
    assert math.isclose(cf1(scores, targets), f1_score(targets, predicted, average="macro", zero_division=0))
    assert math.isclose(of1(scores, targets), f1_score(targets, predicted, average="micro", zero_division=0))


def test_unknown_entries_count_for_nothing():
    scores, targets = drawn(3)
    known = np.random.default_rng(4).random(scores.shape) < 0.6
    changed, hidden = np.where(known, scores, np.nan), np.where(known, targets, -1)
    for label, found in enumerate(class_average_precisions(changed, hidden, known)):
        alone = known[:, label]
        expected = average_precision_score(targets[alone, label], scores[alone, label])
        assert math.isclose(found, expected, abs_tol=1e-12)
    predicted = [f1_score(targets[k, c], scores[k, c] > 0.5, zero_division=0) for c, k in enumerate(known.T)]
    assert math.isclose(cf1(scores, hidden, known=known), np.mean(predicted))


def test_thresholds_are_strict_and_may_differ_by_class():
    scores, targets = np.array([[0.5, 0.5], [0.6, 0.2]]), np.array([[1, 1], [1, 0]])
    assert cf1(scores, targets) == pytest.approx((2 / 3 + 0) / 2)
    assert cf1(scores, targets, [0.5, 0.4]) == pytest.approx((2 / 3 + 1) / 2)


def test_nothing_predicted_and_nothing_there():
    scores, nothing = np.full((3, 2), 0.1), np.zeros((3, 2))
    assert cf1(scores, nothing) == of1(scores, nothing) == 0
    assert math.isnan(mean_average_precision(scores, nothing)) and official_map(scores, nothing) == 0


def test_ties_keep_the_order_of_rows():
    assert class_average_precisions([[0.5], [0.5]], [[1], [0]])[0] == 1
    assert class_average_precisions([[0.5], [0.5]], [[0], [1]])[0] == 0.5


@pytest.mark.parametrize(
    ("scores", "targets", "said"),
    [([[0.1]], [[0, 1]], "one"), ([[math.nan]], [[0]], "nan"), ([[0.1]], [[-1]], "0 or 1")],
)
def test_wrong_input_is_refused(scores, targets, said):
    with pytest.raises(ValueError, match=said):
        mean_average_precision(scores, targets)
