"""The numbers of FairFAL: golden numbers of the authors' code, the spec's worked examples, invariants, odd sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.fairfal import (
    balanced_indices,
    balanced_prior,
    gradients_from_global,
    imbalance_ratio,
    inverse_class_weights,
    mixing_weight,
    prefers_global,
    prior_divergence,
    proportional_budgets,
    prototype_labels,
    residuals,
    uncertainty,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "fairfal"
SCENARIOS = ("all_classes", "missing_classes", "single_class", "identical_models")


def rng_of(seed):
    return torch.Generator().manual_seed(seed)


def golden_model_selection(scenario):
    with np.load(GOLDEN / "case02_model_selection.npz", allow_pickle=False) as file:
        return {name.partition("__")[2]: file[name] for name in file.files if name.startswith(f"{scenario}__")}


# -- priors and scalars -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "prefix"), [("upsample", ""), ("class_mean", "expected_")])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_priors_divergence_and_imbalance_are_the_authors(scenario, how, prefix):
    golden = golden_model_selection(scenario)
    found = {}
    for model in ("global", "local"):
        probabilities = torch.from_numpy(golden[f"logits_{model}"]).softmax(dim=1)
        found[model] = balanced_prior(probabilities, golden["y"], how)
        np.testing.assert_allclose(found[model].numpy(), golden[f"{prefix}prior_{model}"], atol=1e-6)
    assert prior_divergence(found["global"], found["local"]) == pytest.approx(golden[f"{prefix}d"], abs=1e-6)
    assert imbalance_ratio(found["global"], np.unique(golden["y"])) == pytest.approx(golden[f"{prefix}gamma"], abs=1e-6)


@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=60), cap=st.none() | st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_a_balanced_resample_holds_every_present_class_equally_often(labels, cap):
    labels = np.array(labels)
    largest = np.bincount(labels).max()
    target = largest if cap is None else min(largest, cap)
    chosen = balanced_indices(labels, cap=cap).numpy()
    classes, counts = np.unique(labels[chosen], return_counts=True)
    assert classes.tolist() == np.unique(labels).tolist() and set(counts) == {target}
    for label in classes[np.bincount(labels)[classes] <= target]:
        assert set(np.flatnonzero(labels == label)) <= set(chosen)


def test_a_balanced_resample_is_one_stream_of_numpys_generator():
    labels, rng = [1, 0, 0, 0, 1], np.random.default_rng(7)
    expected = np.concatenate([rng.choice([1, 2, 3], 3, replace=False), [0, 4], rng.choice([0, 4], 1)])
    rng.shuffle(expected)
    assert balanced_indices(labels, seed=7).tolist() == expected.tolist()
    assert balanced_indices([]).tolist() == []


def test_upsampled_priors_scatter_around_the_class_mean():
    probabilities = torch.rand(60, 4, generator=rng_of(0)).softmax(dim=1)
    labels = torch.tensor([0] * 30 + [1] * 20 + [3] * 10)
    draws = torch.stack([balanced_prior(probabilities, labels, seed=seed) for seed in range(400)])
    expected = balanced_prior(probabilities, labels, "class_mean")
    assert (draws.mean(dim=0) - expected).abs().max() < 4 * draws.std(dim=0).max() / 400**0.5
    assert draws.std(dim=0).max() > 1e-4


def test_class_mean_does_not_depend_on_order_or_repetition():
    probabilities = torch.rand(12, 3, generator=rng_of(1)).softmax(dim=1)
    labels = torch.arange(12) % 3
    expected = balanced_prior(probabilities, labels, "class_mean")
    order = torch.randperm(12, generator=rng_of(2))
    torch.testing.assert_close(balanced_prior(probabilities[order], labels[order], "class_mean"), expected)
    doubled = torch.cat([torch.arange(12), (labels == 1).nonzero()[:, 0]])
    torch.testing.assert_close(balanced_prior(probabilities[doubled], labels[doubled], "class_mean"), expected)


def test_multilabel_prior_is_the_mean_over_labels_of_their_positives():
    probabilities = torch.rand(8, 3, generator=rng_of(3), dtype=torch.float64)
    labels = torch.tensor([[1, 0, 0]] * 3 + [[1, 1, 0]] * 3 + [[-1, 1, 0]] * 2)
    expected = (probabilities[:6].mean(dim=0) + probabilities[3:].mean(dim=0)) / 2
    torch.testing.assert_close(balanced_prior(probabilities, labels, "class_mean"), expected)
    with pytest.raises(ValueError, match="'upsample' is for single-label data"):
        balanced_prior(probabilities, labels)


@pytest.mark.parametrize("how", ["upsample", "class_mean"])
def test_a_site_without_labels_has_no_prior(how):
    with pytest.raises(ValueError, match="at least one labelled sample"):
        balanced_prior(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), how)


def test_a_prior_names_what_is_wrong():
    with pytest.raises(ValueError, match="2 of 3 labelled samples have values that are not finite"):
        balanced_prior(torch.tensor([[float("nan"), 1.0], [0.5, 0.5], [torch.inf, 0.0]]), [0, 1, 1])
    with pytest.raises(ValueError, match="1 labels are none of 2 classes, the first is 2"):
        balanced_prior(torch.rand(2, 2), [0, 2])
    with pytest.raises(ValueError, match="'best' is unknown; there are upsample, class_mean"):
        balanced_prior(torch.rand(2, 2), [0, 1], "best")
    with pytest.raises(ValueError, match="n labels"):
        balanced_prior(torch.rand(2, 2), [0])


@pytest.mark.parametrize(("present", "expected"), [([0, 1, 3], 0.25), ([1, 2], 2 / 3), ([2], 1.0)])
def test_imbalance_is_of_the_present_classes(present, expected):
    prior = [0.4, 0.3, 0.2, 0.1]
    mask = np.isin(np.arange(4), present)
    for given_as in (present, set(present), torch.tensor(present), mask, torch.from_numpy(mask), mask.tolist()):
        assert imbalance_ratio(prior, given_as) == pytest.approx(expected, abs=1e-15)


def test_imbalance_stays_above_zero_and_needs_a_class():
    assert imbalance_ratio([0.0, 1.0], [0, 1]) == 1e-12
    assert imbalance_ratio([0.0, 1.0], [0]) == 1e-12
    for nothing in ([], [False, False]):
        with pytest.raises(ValueError, match="at least one present class"):
            imbalance_ratio([0.5, 0.5], nothing)


def test_divergence_of_known_priors():
    first, second = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    assert prior_divergence(first, second) == pytest.approx(2 / 7) == prior_divergence(second, first)
    assert prior_divergence(first, first) == 0
    assert prior_divergence([1.0, 0.0], [0.0, 1.0]) == 1
    assert prior_divergence([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]) == 0  # the third class is 0/0
    with pytest.raises(ValueError, match="two priors"):
        prior_divergence(first, [0.5, 0.5])


@pytest.mark.parametrize(
    ("divergence", "mean", "expected"), [(0.25, 0.25, False), (0.1, 0.2, True), (2 / 7, 0.25, False)]
)
def test_the_switch_is_strict(divergence, mean, expected):
    assert prefers_global(divergence, mean) is expected


@given(divergence=st.floats(0, 1), mean=st.floats(0, 1))
def test_global_uncertainty_never_meets_local_gradients(divergence, mean):
    if abs(divergence + mean - 0.5) > 1e-9:
        assert prefers_global(divergence, mean) == (divergence + mean < 0.5)
        assert not prefers_global(divergence, mean) or gradients_from_global(mean)


def test_the_soft_switch_becomes_the_hard_one():
    assert mixing_weight(0.25, 0.25, tau=0.1) == 0.5
    assert mixing_weight(0.1, 0.2, tau=0.1) == pytest.approx(1 / (1 + np.exp(-1)))
    assert mixing_weight(0.1, 0.2, tau=1e-6) == 1.0 and mixing_weight(0.9, 0.9, tau=1e-6) == 0.0
    with pytest.raises(ValueError, match="tau=0 must be above 0"):
        mixing_weight(0.1, 0.1, tau=0)


# -- prototypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("normalise", "name"), [(True, "pseudo"), (False, "pseudo_raw_inner_product")])
def test_pseudo_labels_are_the_authors(normalise, name):
    with np.load(GOLDEN / "case03_prototypes.npz", allow_pickle=False) as file:
        found = prototype_labels(file["emb_lab"], file["y_lab"], file["emb_unl"], 6, normalise=normalise)
        assert found.tolist() == file[name].tolist()


@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_pseudo_labels_are_of_labelled_classes_and_blind_to_length(seed, scale):
    known, pool = (torch.randn(count, 5, generator=rng_of(seed)) for count in (9, 30))
    labels = torch.tensor([1, 1, 4, 4, 4, 2, 2, 1, 1])
    found = prototype_labels(known, labels, pool, 6)
    assert set(found.tolist()) <= {1, 2, 4}
    lengths = torch.rand(30, 1, generator=rng_of(seed)) + 0.1
    assert torch.equal(prototype_labels(known * scale, labels, pool * lengths, 6), found)


def test_a_feature_of_length_zero_gets_the_lowest_labelled_class():
    assert prototype_labels([[1.0, 0.0], [0.0, 1.0]], [3, 2], [[0.0, 0.0]], 5).tolist() == [2]


def test_without_labels_there_is_one_bucket():
    empty = torch.empty(0, 2)
    assert prototype_labels(empty, torch.empty(0, dtype=torch.int64), torch.rand(3, 2), 4).tolist() == [0, 0, 0]


def test_a_multilabel_image_shapes_the_prototype_of_each_of_its_labels():
    known = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([[1, 0, 0], [0, 1, -1], [1, 1, 0]])
    assert prototype_labels(known, labels, [[2.0, 0.1], [0.1, 2.0]], 3).tolist() == [0, 1]


def test_features_that_are_not_finite_are_counted():
    pool = torch.tensor([[1.0, torch.nan], [0.0, 1.0]])
    with pytest.raises(ValueError, match="1 of 2 pool samples"):
        prototype_labels([[1.0, 0.0]], [0], pool, 2)


# -- uncertainty and residuals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["entropy", "margin", "least_confidence"])
def test_uncertainty_at_both_ends(kind):
    ends = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    certain, uniform = uncertainty(ends, kind).tolist()
    assert abs(certain) < 1e-9
    assert uniform == pytest.approx({"entropy": 1.0, "margin": 1.0, "least_confidence": 0.75}[kind], abs=1e-9)


@pytest.mark.parametrize("kind", ["entropy", "margin", "least_confidence"])
def test_uncertainty_in_plain_loops(kind):
    rows = torch.rand(6, 5, generator=rng_of(0), dtype=torch.float64).softmax(dim=1)
    expected = []
    for row in rows.tolist():
        first, second = sorted(row, reverse=True)[:2]
        entropy = -sum(p * np.log(p) for p in row) / np.log(5)
        expected.append({"entropy": entropy, "margin": 1 - (first - second), "least_confidence": 1 - first}[kind])
    np.testing.assert_allclose(uncertainty(rows, kind), expected, atol=1e-10)


def test_multilabel_uncertainty_is_the_mean_of_the_labels_own():
    found = uncertainty(torch.tensor([[0.5, 1.0], [0.5, 0.5]]), multilabel=True)
    torch.testing.assert_close(found, torch.tensor([0.5, 1.0], dtype=torch.float64), atol=1e-9, rtol=0)


def test_uncertainty_refuses_what_it_cannot_rank():
    with pytest.raises(ValueError, match="at least 2 classes"):
        uncertainty(torch.ones(3, 1))
    with pytest.raises(ValueError, match="'bald' is unknown"):
        uncertainty(torch.rand(3, 2), "bald")
    with pytest.raises(ValueError, match="1 of 2 pool samples"):
        uncertainty(torch.tensor([[0.5, 0.5], [torch.nan, 0.5]]))


def test_residuals_sum_to_zero_and_forget_a_shift():
    logits = torch.randn(7, 4, generator=rng_of(5), dtype=torch.float64)
    labels = torch.arange(7) % 4
    for given_labels in (None, labels):
        found = residuals(logits, given_labels)
        torch.testing.assert_close(found.sum(dim=1), torch.zeros(7, dtype=torch.float64), atol=1e-12, rtol=0)
        shift = torch.randn(7, 1, generator=rng_of(6), dtype=torch.float64)
        torch.testing.assert_close(residuals(logits + shift, given_labels), found, atol=1e-12, rtol=0)
    # Minus the gradient of the cross-entropy with respect to the logits.
    logits.requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(residuals(logits.detach(), labels), -torch.autograd.grad(loss, logits)[0])


def test_a_pool_residual_is_that_of_the_predicted_class():
    logits = torch.randn(7, 4, generator=rng_of(5))
    torch.testing.assert_close(residuals(logits), residuals(logits, logits.argmax(dim=1)))
    assert residuals(torch.tensor([[40.0, 0.0]])).abs().max() < 1e-15


def test_multilabel_residuals_are_minus_the_gradient_of_bce_on_known_labels():
    logits = torch.randn(4, 3, generator=rng_of(5), dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[1, 0, -1], [0, 0, 1], [1, 1, 1], [-1, -1, -1]])
    known = (labels >= 0).double()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels.clamp(min=0).double(), weight=known, reduction="sum"
    )
    found = residuals(logits.detach(), labels, multilabel=True)
    torch.testing.assert_close(found, -torch.autograd.grad(loss, logits)[0])
    predicted = (logits.detach() > 0).long()
    torch.testing.assert_close(
        residuals(logits.detach(), multilabel=True), residuals(logits.detach(), predicted, multilabel=True)
    )


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_rare_classes_weigh_more():
    assert inverse_class_weights([1, 2, 4]) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert inverse_class_weights([-3.2, 0.0, 1.0]) == pytest.approx([1 / 3] * 3)  # noise can make a count negative


@given(pools=st.lists(st.integers(0, 500), min_size=1, max_size=8), total=st.integers(0, 2000))
@settings(max_examples=100, deadline=None)
def test_proportional_budgets_are_shares_rounded_by_less_than_one(pools, total):
    budgets = np.array(proportional_budgets(pools, total))
    wanted = min(total, sum(pools))
    assert budgets.sum() == wanted and (budgets <= pools).all() and (budgets >= 0).all()
    if sum(pools):
        assert np.abs(budgets - wanted * np.array(pools) / sum(pools)).max() < 1 + 1e-9
