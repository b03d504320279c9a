"""The baselines that score samples: picks of LoGo's code and plain re-computations; all rules on pools at the edge."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from models import selection
from models.selection_diverse import Outputs

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


@pytest.mark.parametrize(("model", "tag"), MODELS)
@pytest.mark.parametrize("rule", ["least_confidence", "margin", "entropy"])
def test_uncertain_picks_are_those_of_logos_code(golden, rule, model, tag):
    picks = getattr(selection, rule)(softmax_of_pool(golden, model), BUDGET)
    assert (picks + NUM_LABELLED).tolist() == golden[f"{rule}__{tag}"].tolist()


def test_random_is_uniform_without_replacement():
    picks = torch.stack([selection.random(5, 2, generator) for generator in [rng_of(0)] for _ in range(3000)])
    assert (picks[:, 0] != picks[:, 1]).all()
    assert scipy.stats.chisquare(torch.bincount(picks.flatten(), minlength=5)).pvalue > 0.01


def test_entropy_takes_a_certain_sample_for_certain():
    assert selection.entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1]]), 3).tolist() == [1, 2, 0]


def test_ties_go_to_the_earlier_position():
    even = torch.full((6, 3), 1 / 3)
    for rule in (selection.entropy, selection.margin, selection.least_confidence):
        assert rule(even, 4).tolist() == [0, 1, 2, 3]
    assert selection.ensemble_logit(even, even, 4).tolist() == [0, 1, 2, 3]
    assert selection.ksas(torch.zeros(6, 3), torch.zeros(6, 3), torch.ones(3), 4).tolist() == [0, 1, 2, 3]


def test_ensembles_of_two_equal_models_are_that_model(golden):
    probabilities = softmax_of_pool(golden, "global")
    expected = selection.entropy(probabilities, BUDGET)
    assert torch.equal(selection.ensemble_logit(probabilities, probabilities, BUDGET), expected)
    assert torch.equal(selection.ensemble_rank(probabilities, probabilities, BUDGET), expected)


def test_ensemble_rank_adds_the_places_of_both_lists(golden):
    lists = [selection.entropy(softmax_of_pool(golden, model), BUDGET).tolist() for model in ("global", "local")]
    score = {}
    for picks in lists:
        for rank, position in enumerate(picks):
            score[position] = score.get(position, 0) + 1 / (20 + rank)
    expected = sorted(score, key=lambda position: (-score[position], position))[:BUDGET]
    found = selection.ensemble_rank(*(softmax_of_pool(golden, model) for model in ("global", "local")), BUDGET)
    assert found.tolist() == expected


def test_ksas_is_the_symmetric_divergence_of_prior_shifted_models(golden):
    counts = torch.tensor([3, 1, 9, 4, 2])
    shifted = [
        scipy.special.softmax(golden[f"logits_{model}"].double().numpy() + np.log(counts.numpy()), axis=1)
        for model in ("global", "local")
    ]
    score = (scipy.stats.entropy(*shifted, axis=1) + scipy.stats.entropy(*shifted[::-1], axis=1)) / 2
    found = selection.ksas(golden["logits_global"], golden["logits_local"], counts, BUDGET)
    assert found.tolist() == np.argsort(-score, kind="stable")[:BUDGET].tolist()


def test_ksas_leaves_out_classes_without_labels(golden):
    logits = golden["logits_global"], golden["logits_local"]
    counts = torch.tensor([3, 0, 9, 0, 2])
    expected = selection.ksas(*(part[:, [0, 2, 4]] for part in logits), counts[[0, 2, 4]], BUDGET)
    assert torch.equal(selection.ksas(*logits, counts, BUDGET), expected)
    with pytest.raises(ValueError, match="at least one labelled sample"):
        selection.ksas(*logits, torch.zeros(5), BUDGET)


# -- pools at the edge ------------------------------------------------------------------------------------------------


def arguments_of(rule, pool, budget, classes=4, width=3):
    logits = torch.randn(pool, classes, generator=rng_of(0))
    given_by_name = {
        "num_samples": pool,
        "generator": rng_of(1),
        "residuals": logits,
        "class_counts": torch.ones(classes),
        "features_labelled": torch.rand(2, width),
        "labels": torch.tensor([0, 1]),
        "budget": budget,
    }
    for model in ("global", "local", "distilled"):
        given_by_name[f"by_{model}"] = Outputs(
            torch.randn(pool + 2, width, generator=rng_of(2)),
            torch.randn(pool + 2, classes, generator=rng_of(3)).softmax(dim=1),
        )
        given_by_name[f"logits_{model}"] = logits
    for name, parameter in inspect.signature(rule).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            continue
        if name not in given_by_name:
            given_by_name[name] = torch.rand(pool, width) if "features" in name else logits.softmax(dim=1)
        yield given_by_name[name]


@pytest.mark.parametrize("name", selection.__all__)
@pytest.mark.parametrize(("pool", "budget"), [(0, 3), (1, 1), (1, 3), (5, 0), (5, 5), (8, 20), (9, 4)])
def test_every_rule_takes_what_there_is(name, pool, budget):
    rule = getattr(selection, name)
    picks = rule(*arguments_of(rule, pool, budget))
    assert picks.dtype == torch.int64 and len(picks) == len(set(picks.tolist())) == min(pool, budget)
    assert all(0 <= pick < pool for pick in picks.tolist())
