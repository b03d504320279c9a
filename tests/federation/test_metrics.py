"""Histograms against scikit-learn on the pooled scores, and the algebra that lets them travel."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    recall_score,
    roc_auc_score,
)

from federation.metrics import (
    SELECTION_METRICS,
    STEPS_PER_BIN,
    ScoreHistogram,
    bin_edges,
    check_selection_metric,
    confusion_matrix,
    none_if_nan,
    selection_value,
)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


DISTRIBUTIONS = {
    "rare label, spread 0.3 logit around 0.02": lambda r, n, y: sigmoid(r.normal(-4.0 + 0.3 * y, 0.3, n)),
    "rare label, spread 0.15 logit around 0.02": lambda r, n, y: sigmoid(r.normal(-3.95 + 0.1 * y, 0.15, n)),
    "calibrated logits": lambda r, n, y: sigmoid(r.normal(-2.5 + y, 1.0, n)),
    "uniform": lambda r, n, y: r.uniform(0, 1, n) ** (1 - 0.4 * y),
    "saturated float32": lambda r, n, y: sigmoid(r.normal(-6 + 12 * y, 8.0, n)).astype(np.float32),
    "ties of two decimals": lambda r, n, y: np.round(r.beta(2 + y, 3 - y, n), 2),
    "constant": lambda r, n, y: np.full(n, 0.02 + 0 * y),
    "three values": lambda r, n, y: r.choice([0.01, 0.3, 0.9], n, p=[0.6 - 0.3 * y, 0.3, 0.1 + 0.3 * y]),
}


def drawn(name, seed, positives=300, negatives=9700):
    generator = np.random.default_rng(seed)
    draw = DISTRIBUTIONS[name]
    scores = np.concatenate([draw(generator, positives, 1), draw(generator, negatives, 0)])
    targets = np.repeat([1, 0], [positives, negatives])
    order = generator.permutation(len(scores))
    return scores[order, None], targets[order, None]


def filled(scores, targets, known=None, bins=1024):
    histogram = ScoreHistogram(scores.shape[1], bins)
    histogram.update(scores, targets, known)
    return histogram


def test_a_tiny_case_by_hand():
    # positives 0.9 and 0.3, negatives 0.3, 0.1: pairs won 1, 1, tie 1/2, 1 -> 3.5 of 4
    histogram = filled(np.array([[0.9], [0.3], [0.3], [0.1]]), np.array([[1], [1], [0], [0]]))
    assert histogram.auroc()[0] == 0.875
    assert histogram.average_precision()[0] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert histogram.counts(0.2)[:] == (2, 1, 0, 1)
    assert histogram.f1(0.2)[0] == pytest.approx(0.8)


# Measured over 20 seeds: at most 0.0002 with 300 positives; 0.0005 is what the project promises.
@pytest.mark.parametrize("bins", [256, 1024])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_pooled_auroc_is_scikit_learns_within_half_a_thousandth(name, bins):
    for seed in range(5):
        scores, targets = drawn(name, seed)
        parts = np.array_split(np.arange(len(scores)), [100, 2500, 2600])
        pooled = ScoreHistogram(1, bins)
        for part in parts:
            pooled.merge(filled(scores[part], targets[part], bins=bins))
        assert pooled.auroc()[0] == pytest.approx(roc_auc_score(targets[:, 0], scores[:, 0]), abs=5e-4)


# Precision steps at every score, so the bin width shows more than in the AUROC; saturated scores most of all, where
# thousands share the last bin.
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_average_precision_is_near_scikit_learns(name):
    for seed in range(5):
        scores, targets = drawn(name, seed)
        expected = average_precision_score(targets[:, 0], scores[:, 0])
        tolerance = 0.02 if name == "saturated float32" else 0.003
        assert filled(scores, targets).average_precision()[0] == pytest.approx(expected, abs=tolerance)


def test_merging_is_exact_and_independent_of_order_and_of_grouping():
    generator = np.random.default_rng(0)
    sites = [
        (generator.random((n, 3)), generator.integers(0, 2, (n, 3)), generator.random((n, 3)) < 0.7)
        for n in (0, 1, 50, 400)
    ]
    whole = filled(*(np.concatenate(parts) for parts in zip(*sites, strict=True)))
    for order in itertools.permutations(sites):
        merged = ScoreHistogram(3)
        for site in order:
            assert merged.merge(filled(*site)) is merged
        for name, array in whole.to_arrays().items():
            np.testing.assert_array_equal(merged.to_arrays()[name], array)


@pytest.mark.parametrize("bins", [2, 7, 256, 1000, 1024])
def test_a_score_of_exactly_one_half_is_negative(bins):
    assert 0.5 in bin_edges(bins)
    assert (np.diff(bin_edges(bins)) > 0).all()
    scores = np.array([[0.5], [np.nextafter(0.5, 1)], [np.nextafter(0.5, 0)]])
    assert filled(scores, np.ones((3, 1), int), bins=bins).counts(0.5).tp[0] == 1


def test_threshold_metrics_are_scikit_learns_at_snapped_thresholds():
    generator = np.random.default_rng(3)
    scores, targets = generator.random((500, 4)), generator.integers(0, 2, (500, 4))
    histogram = filled(scores, targets)
    thresholds = histogram.snap([0.5, 0.123, 0.9, 0.01])
    assert np.abs(thresholds - [0.5, 0.123, 0.9, 0.01]).max() < 0.003
    called = scores > thresholds
    np.testing.assert_allclose(histogram.f1(thresholds), f1_score(targets, called, average=None))
    np.testing.assert_allclose(histogram.sensitivity(thresholds), recall_score(targets, called, average=None))
    np.testing.assert_allclose(histogram.specificity(thresholds), recall_score(1 - targets, ~called, average=None))
    np.testing.assert_allclose(histogram.ppv(thresholds), (called & (targets == 1)).sum(0) / called.sum(0))
    assert (np.sum(histogram.counts(thresholds), axis=0) == 500).all()


@pytest.mark.parametrize("criterion", ["f1", "youden"])
def test_best_thresholds_beat_every_other_edge(criterion):
    generator = np.random.default_rng(4)
    targets = (generator.random((800, 2)) < [0.05, 0.5]).astype(int)
    histogram = filled(sigmoid(generator.normal(-3 + 2 * targets, 1)), targets, bins=64)

    def value(thresholds):
        if criterion == "f1":
            return histogram.f1(thresholds)
        return histogram.sensitivity(thresholds) + histogram.specificity(thresholds)

    everywhere = np.array([value(edge) for edge in histogram.edges])
    np.testing.assert_allclose(value(histogram.best_thresholds(criterion)), everywhere.max(0))


def test_best_threshold_is_one_half_for_a_perfect_or_an_undefined_class():
    scores = np.array([[0.9, 0.2], [0.1, 0.3]])
    histogram = filled(scores, np.array([[1, 0], [0, 0]]))
    np.testing.assert_array_equal(histogram.best_thresholds(), [0.5, 0.5])
    with pytest.raises(ValueError, match="'f1' or 'youden', got 'F1'"):
        histogram.best_thresholds("F1")


def test_undefined_is_nan_not_zero_and_not_one_half():
    scores = np.full((4, 3), 0.7)
    histogram = filled(scores, np.array([[1, 0, 1]] * 4), np.array([[True, True, False]] * 4))
    assert np.isnan(histogram.auroc()).all()
    assert np.isnan(histogram.average_precision()).all()
    np.testing.assert_array_equal(histogram.f1(), [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(histogram.sensitivity(), [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(histogram.specificity(), [np.nan, 0.0, np.nan])
    np.testing.assert_array_equal(histogram.ppv(0.9), [np.nan] * 3)
    np.testing.assert_array_equal(histogram.support(), [[4, 0, 0], [0, 4, 0]])
    empty = ScoreHistogram(3)
    empty.update(np.zeros((0, 3)), np.zeros((0, 3)))
    assert np.isnan(empty.auroc()).all()


def test_unknown_pairs_are_not_counted_whatever_their_target():
    scores, targets = np.array([[0.2], [0.8], [0.6]]), np.array([[0.0], [1.0], [-1.0]])
    known = np.array([[True], [True], [False]])
    histogram = filled(scores, targets, known)
    np.testing.assert_array_equal(histogram.support(), [[1], [1]])
    targets[2] = np.nan
    np.testing.assert_array_equal(filled(scores, targets, known).positives, histogram.positives)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_and_numpy_batches_count_alike(dtype):
    logits = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    scores, targets, known = logits.sigmoid(), torch.randint(0, 2, (64, 2)), torch.rand(64, 2) < 0.5
    histogram = filled(scores, targets, known)
    again = filled(scores.detach().double().numpy(), targets.numpy(), known.numpy())
    for name, array in again.to_arrays().items():
        np.testing.assert_array_equal(histogram.to_arrays()[name], array)


@pytest.mark.parametrize(
    ("scores", "targets", "message"),
    [
        ([[0.1], [np.nan]], [[0], [1]], "1 of 2 scores are NaN"),
        ([[0.1], [1.5]], [[0], [1]], r"probabilities in \[0, 1\]"),
        ([[-0.2], [0.5]], [[0], [1]], r"probabilities in \[0, 1\]"),
        ([[np.inf], [0.5]], [[0], [1]], r"probabilities in \[0, 1\]"),
        ([[0.1], [0.5]], [[0], [2]], "must be 0 or 1"),
        ([[0.1], [0.5]], [[0], [-1]], "must be 0 or 1"),
        ([[0.1], [0.5]], [[0]], "must agree"),
        ([0.1, 0.5], [0, 1], r"must be \(n, 1\)"),
        ([[0.1, 0.5]], [[0, 1]], r"must be \(n, 1\)"),
    ],
)
def test_a_bad_batch_is_named_and_changes_nothing(scores, targets, message):
    histogram = ScoreHistogram(1)
    with pytest.raises(ValueError, match=message):
        histogram.update(np.array(scores), np.array(targets))
    assert not any(array.any() for array in histogram.to_arrays().values())


def test_a_score_an_ulp_above_one_is_one():
    assert filled(np.array([[np.nextafter(np.float32(1), np.float32(2))]]), np.array([[1]])).positives[0, -1] == 1


def test_arrays_travel_as_int64_and_come_back():
    scores, targets = drawn("calibrated logits", 0)
    histogram = filled(scores, targets)
    arrays = histogram.to_arrays()
    assert {name: array.shape for name, array in arrays.items()} == ScoreHistogram.shapes(1, 1024)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}
    again = ScoreHistogram.from_arrays(arrays)
    assert again.auroc()[0] == histogram.auroc()[0]
    again.merge(again)
    assert not np.shares_memory(again.positives, arrays["positives"])
    np.testing.assert_array_equal(arrays["positives"], histogram.positives)


def test_counts_alone_are_enough_with_bins_as_ties():
    scores, targets = drawn("ties of two decimals", 0)
    arrays = filled(scores, targets).to_arrays()
    counts = ScoreHistogram.from_arrays({name: arrays[name] for name in ("positives", "negatives")})
    # up to 0.5 no two hundredths share a bin, so the loss is small
    assert counts.auroc()[0] == pytest.approx(roc_auc_score(targets[:, 0], scores[:, 0]), abs=5e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positives": None}, "'positives' is missing"),
        ({"positives": np.zeros(8, np.int32)}, r"\(classes, bins\), got \(8,\)"),
        ({"negatives": np.zeros((2, 9), np.int32)}, r"\(2, 8\) integers, got \(2, 9\)"),
        ({"negatives": np.zeros((2, 8))}, "integers, got .* float64"),
        ({"negatives": np.full((2, 8), -1)}, "must be in 0"),
        ({"negatives": np.full((2, 8), 2**62)}, "must be in 0"),
        ({"positive_steps": np.full((2, 8), STEPS_PER_BIN + 1)}, "exceed their counts"),
    ],
)
def test_arrays_no_site_can_have_are_refused(change, message):
    arrays = {name: np.ones(shape, np.int32) for name, shape in ScoreHistogram.shapes(2, 8).items()} | change
    with pytest.raises(ValueError, match=message):
        ScoreHistogram.from_arrays({name: array for name, array in arrays.items() if array is not None})


def test_histograms_of_other_shape_do_not_merge():
    with pytest.raises(ValueError, match=r"\(2, 256\) here, \(2, 1024\) there"):
        ScoreHistogram(2, 256).merge(ScoreHistogram(2))


def test_small_cells_are_blanked_and_counted_across_sites():
    # positives 0, 1, 4, 5 and negatives 10, 9, 6, 5 of ten examples
    targets = (np.arange(10)[:, None] < [0, 1, 4, 5]).astype(int)
    site = filled(np.full((10, 4), 0.3), targets)
    safe = site.suppress(5)
    np.testing.assert_array_equal(safe.suppressed, [0, 1, 1, 0])
    np.testing.assert_array_equal(safe.support(), [[0, 0, 0, 5], [10, 0, 0, 5]])
    assert not safe.positive_steps[1].any()
    assert site.support()[0].tolist() == [0, 1, 4, 5], "the site's own histogram is left as it was"
    np.testing.assert_array_equal(safe.merge(site.suppress(2)).suppressed, [0, 2, 1, 0])
    np.testing.assert_array_equal(site.suppress(0).to_arrays()["positives"], site.positives)


def test_subset_and_pooled_are_the_macro_and_micro_views():
    generator = np.random.default_rng(5)
    scores, targets = generator.random((300, 3)), generator.integers(0, 2, (300, 3))
    histogram = filled(scores, targets)
    np.testing.assert_array_equal(histogram.subset([2, 0]).auroc(), histogram.auroc()[[2, 0]])
    assert histogram.pooled().auroc()[0] == pytest.approx(roc_auc_score(targets.ravel(), scores.ravel()), abs=5e-4)


def test_resampling_keeps_the_numbers_and_follows_the_generator():
    scores, targets = drawn("calibrated logits", 0, 50, 500)
    histogram = filled(scores, targets)
    first, second, third = (histogram.resample(np.random.default_rng(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.support(), histogram.support())
    assert first.auroc()[0] == second.auroc()[0] != third.auroc()[0]
    assert not ScoreHistogram(2).resample(np.random.default_rng(0)).positives.any()


def test_confusion_matrices_add_up_and_give_scikit_learns_figures():
    generator = np.random.default_rng(6)
    targets, predicted = generator.integers(0, 4, 200), generator.integers(0, 4, 200)
    matrix = confusion_matrix(predicted[:50], targets[:50], 4) + confusion_matrix(
        torch.tensor(predicted[50:]), torch.tensor(targets[50:]), 4
    )
    assert matrix.dtype == np.int64
    assert matrix.diagonal().sum() / matrix.sum() == accuracy_score(targets, predicted)
    np.testing.assert_allclose((matrix.diagonal() / matrix.sum(1)).mean(), balanced_accuracy_score(targets, predicted))
    assert confusion_matrix([0, 1], [-1, 1], 2).tolist() == [[0, 0], [0, 1]], "an unknown target is not counted"
    assert confusion_matrix([], [], 2).sum() == 0
    with pytest.raises(ValueError, match=r"0\.\.1"):
        confusion_matrix([2], [0], 2)


def test_a_misspelt_selection_metric_is_refused_with_the_nearest_name():
    assert all(check_selection_metric(name) == name for name in SELECTION_METRICS)
    with pytest.raises(ValueError, match="'macro_aurok': did you mean 'macro_auroc'"):
        check_selection_metric("macro_aurok")
    with pytest.raises(ValueError, match="'accuracy' needs one label a sample"):
        check_selection_metric("accuracy", "multilabel")
    assert check_selection_metric("accuracy", "multiclass") == "accuracy"


def test_selection_value_is_higher_for_better_and_none_if_undefined():
    assert selection_value({"loss": 0.25}, "neg_loss") == -0.25
    assert selection_value({"macro_auroc": 0.8}, "macro_auroc") == 0.8
    assert selection_value({"macro_auroc": None}, "macro_auroc") is None
    assert selection_value({"macro_auroc": float("nan")}, "macro_auroc") is None
    assert selection_value({}, "neg_loss") is None
    assert none_if_nan(np.float64(0.5)) == 0.5
