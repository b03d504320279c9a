"""CoreSet, BADGE, LoGo, FEAL and IFAL: picks of LoGo's code and plain re-computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import selection
from models.selection_diverse import (
    Outputs,
    evidential_uncertainty,
    logo_embedding,
    logo_picks,
    otsu_threshold,
    reverse_neighbour_classes,
    sorted_distance,
)
from models.selection_geometry import k_means, nearest_neighbours

GOLDEN = Path(__file__).parents[1] / "golden" / "fairfal" / "case12_baselines_logo_repo.npz"
NUM_LABELLED, BUDGET = 20, 12
MODELS = [("global", "global"), ("local", "local_only")]


def rng_of(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def softmax_of_pool(golden, model):
    return golden[f"logits_{model}"][NUM_LABELLED:].softmax(dim=1)


# -- CoreSet, BADGE, LoGo ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "tag"), MODELS)
def test_coreset_picks_are_those_of_logos_code(golden, model, tag):
    features = golden[f"feat_{model}"]
    picks = selection.coreset(features[NUM_LABELLED:], features[:NUM_LABELLED], BUDGET)
    assert (picks + NUM_LABELLED).tolist() == golden[f"coreset__{tag}"].tolist()


def test_badge_starts_where_logos_code_does(golden):
    residuals = _residuals(golden["logits_global"][NUM_LABELLED:])
    picks = selection.badge(residuals, golden["feat_global"][NUM_LABELLED:], BUDGET, rng_of(0))
    assert picks[0] == golden["badge_first_pick_position"]


def test_logo_embedding_and_picks_are_those_of_logos_code(golden):
    embedding = logo_embedding(softmax_of_pool(golden, "local"), golden["feat_local"][NUM_LABELLED:])
    np.testing.assert_allclose(embedding, golden["maxind_embedding_local"], atol=1e-5)
    picks = logo_picks(golden["logo_full__cluster"].long(), softmax_of_pool(golden, "global"), BUDGET)
    assert sorted((picks + NUM_LABELLED).tolist()) == golden["logo_full__selected_sorted"].tolist()


def test_logo_takes_the_top_of_each_cluster_before_any_second(golden):
    clusters, probabilities = golden["logo_empty_clusters__cluster"].long(), softmax_of_pool(golden, "global")
    picks = logo_picks(clusters, probabilities, BUDGET).tolist()
    entropy = torch.special.entr(probabilities).sum(dim=1)
    tops = {max((clusters == c).nonzero()[:, 0].tolist(), key=lambda i: entropy[i]) for c in clusters.unique()}
    assert len(tops) < BUDGET == len(set(picks)) and set(picks[: len(tops)]) == tops


def _residuals(logits):
    return torch.eye(logits.shape[1])[logits.argmax(dim=1)] - logits.softmax(dim=1)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 25))
@settings(max_examples=30, deadline=None)
def test_badge_never_repeats_even_among_equal_samples(seed, count):
    residuals, features = torch.randn(4, 3, generator=rng_of(seed)), torch.randn(4, 2, generator=rng_of(seed + 1))
    picks = selection.badge(residuals.repeat(5, 1), features.repeat(5, 1), count, rng_of(seed))
    assert len(set(picks.tolist())) == len(picks) == min(count, 20)
    if count >= 4:  # all four different ones come before the first copy, which has distance 0
        assert {pick % 4 for pick in picks[:4].tolist()} == {0, 1, 2, 3}


def test_badge_draws_in_proportion_to_squared_distances():
    # |g| = 3 is first; the squared distances of 0, 1, 2 to it are 9, 4, 1.
    residuals, features = torch.ones(4, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    generator = rng_of(0)
    second = [int(selection.badge(residuals, features, 2, generator)[1]) for _ in range(2000)]
    expected = 2000 * np.array([9, 4, 1]) / 14
    assert scipy.stats.chisquare(np.bincount(second, minlength=3), expected).pvalue > 0.01


def test_logo_is_one_pick_of_each_cluster(golden):
    arguments = softmax_of_pool(golden, "local"), golden["feat_local"][NUM_LABELLED:], softmax_of_pool(golden, "global")
    picks = selection.logo(*arguments, BUDGET, rng_of(0))
    clusters, _ = k_means(logo_embedding(*arguments[:2]), BUDGET, rng_of(0))
    assert len(set(picks.tolist())) == BUDGET
    assert set(clusters[picks].tolist()) == set(clusters.tolist())


# -- FEAL -------------------------------------------------------------------------------------------------------------


def test_evidential_uncertainty_with_scipy(golden):
    alphas = [golden[f"logits_{model}"].double().relu().numpy() + 1 for model in ("global", "local")]
    aleatoric = 0
    for alpha in alphas:
        total = alpha.sum(axis=1, keepdims=True)
        aleatoric += (alpha / total * (scipy.special.psi(total + 1) - scipy.special.psi(alpha + 1))).sum(axis=1)
    entropy = np.array([scipy.stats.dirichlet(alpha).entropy() for alpha in alphas[0]])
    expected = (entropy - entropy.min()) / (entropy.max() - entropy.min()) * aleatoric
    found = evidential_uncertainty(golden["logits_global"], golden["logits_local"])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_feal_without_crowds_is_its_ranking(golden):
    logits = golden["logits_global"], golden["logits_local"]
    ranking = evidential_uncertainty(*logits).argsort(descending=True)
    found = selection.feal(*logits, golden["feat_local"], BUDGET, similar_from=1.1)
    assert torch.equal(found, ranking[:BUDGET])


def test_feal_skips_who_stands_in_a_crowd_of_the_picked():
    logits = torch.linspace(3, 0, 20)[:, None] * torch.tensor([[1.0, 0.0, 0.0]])
    ranking = evidential_uncertainty(logits, logits).argsort(descending=True).tolist()
    features = torch.eye(2)[(torch.arange(20) < 10).long()]  # two crowds of ten equal features
    found = selection.feal(logits, logits, features, 4).tolist()
    # The first of each crowd; who is left has five equal neighbours, though not always a picked one among them.
    expected = []
    _, neighbours = nearest_neighbours(features, features, 5, torch.arange(20))
    for position in ranking:
        if not set(neighbours[position].tolist()) & set(expected):
            expected.append(position)
    expected += [position for position in ranking if position not in expected]
    assert found == expected[:4]
    alone = selection.feal(logits, logits, torch.ones(20, 1), 20).tolist()
    assert sorted(alone) == list(range(20))  # filled up to the budget


# -- IFAL -------------------------------------------------------------------------------------------------------------


def outputs_of(seed, count, classes=4, width=3):
    features = torch.randn(count, width, generator=rng_of(seed))
    return Outputs(features, torch.randn(count, classes, generator=rng_of(seed + 100)).softmax(dim=1))


def test_reverse_neighbour_classes_in_plain_loops():
    labels = torch.tensor([1, 3, 1])
    features, probabilities = outputs_of(0, 15)
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    counts = np.ones((12, 4))
    for voter in range(15):
        vote = int(labels[voter]) if voter < 3 else int(probabilities[voter].argmax())
        others = sorted(set(range(3, 15)) - {voter}, key=lambda other: -float(unit[voter] @ unit[other]))
        for chosen in others[:5]:
            counts[chosen - 3, vote] += 1
    expected = counts / counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(reverse_neighbour_classes(features, probabilities, labels, 5), expected, atol=1e-12)


def test_sorted_distance_is_scipys_wasserstein_of_the_values():
    first, second = (torch.rand(6, 5, generator=rng_of(seed), dtype=torch.float64) for seed in (0, 1))
    expected = [scipy.stats.wasserstein_distance(*pair) for pair in zip(first.numpy(), second.numpy(), strict=True)]
    np.testing.assert_allclose(sorted_distance(first, second), expected, rtol=1e-12)


def test_otsu_parts_two_heaps():
    values = torch.cat([torch.linspace(0, 1, 30), torch.linspace(5, 6, 10)])
    threshold = otsu_threshold(values)
    assert threshold == 1.0 and (values > threshold).sum() == 10
    spread = {}
    for cut in values[:-1].tolist():
        below, above = values[values <= cut], values[values > cut]
        spread[cut] = float(len(below) * len(above) * (below.mean() - above.mean()) ** 2)
    assert float(threshold) == max(spread, key=spread.get)
    assert otsu_threshold(torch.full((5,), 2.0)) == 2.0


@pytest.mark.parametrize("budget", [1, 6, 25, 40, 60])
def test_ifal_picks_the_budget_once_each(budget):
    labels = torch.tensor([0, 1, 2, 3, 3])
    models = [outputs_of(seed, 45) for seed in range(3)]
    picks = selection.ifal(*models, labels, budget, rng_of(0))
    assert len(set(picks.tolist())) == len(picks) == min(budget, 40)
    assert torch.equal(picks, selection.ifal(*models, labels, budget, rng_of(0)))
