"""mAP, CF1 and OF1 of pooled histograms are those of the scores themselves, which stay at the sites."""

from __future__ import annotations

import numpy as np
import pytest

from federation import ranking
from federation.metrics import ScoreHistogram
from server_app.compare_columns import better, column_name
from strategies.evaluation import PooledScores
from strategies.fedmpt_figures import f1_of_all, ranking_figures
from strategies.gate import Reply

LABELS = ("cat", "dog", "owl", "yak")
BINS = 1024
NEAR = 2e-3
"""Widest step that one of 600 scores makes which lies between a threshold and the nearest edge of a bin."""


def reply(site, scores, targets):
    histogram = ScoreHistogram(len(LABELS), BINS)
    histogram.update(scores, targets)
    numbers = {"loss.test": {"loss_sum": 1.0, "num_examples": len(scores)}}
    return Reply(site, 1, {}, {"test": histogram.to_arrays()}, numbers, 0.0)


def pooled(*sites):
    pool = PooledScores(LABELS, "multilabel", BINS)
    for number, (scores, targets) in enumerate(sites):
        pool.add(reply(f"site-{number}", scores, targets), "test")
    return pool


def draw(seed, count, absent=False):
    rng = np.random.default_rng(seed)
    targets = (rng.random((count, 4)) < (0.4, 0.2, 0.3, 0.0 if absent else 0.1)).astype(int)
    return 1 / (1 + np.exp(-rng.normal(1.5 * targets - 1.0))), targets


@pytest.fixture
def both():
    return draw(1, 200), draw(2, 400)


def test_the_pooled_figures_are_those_of_all_scores_together(both):
    scores, targets = (np.concatenate(parts) for parts in zip(*both, strict=True))
    fitted = [0.3, 0.4, 0.5, 0.2]
    found = ranking_figures(pooled(*both), "test", fitted)
    best = ranking.official_best(scores, targets)
    expected = {
        "map": ranking.mean_average_precision(scores, targets),
        "official_map": ranking.official_map(scores, targets),
        "cf1": ranking.cf1(scores, targets),
        "of1": ranking.of1(scores, targets),
        "cf1_tuned": ranking.cf1(scores, targets, fitted),
        "of1_tuned": ranking.of1(scores, targets, fitted),
        "official_best_cf1_optimistic": best.cf1,
        "official_best_of1_optimistic": best.of1,
    }
    assert found.pop("map_labels") == 4
    assert found == pytest.approx(expected, abs=NEAR)
    assert found["cf1"] == pytest.approx(expected["cf1"], abs=1e-12), "0.5 is the edge of a bin, so it is exact"


def test_a_label_without_a_positive_is_left_out_of_the_mean_and_0_in_the_official_one():
    pool = pooled(draw(3, 300, absent=True))
    found = ranking_figures(pool, "test", None)
    assert found["map_labels"] == 3
    assert found["official_map"] == pytest.approx(0.75 * found["map"])
    assert found["cf1_tuned"] is None and found["of1_tuned"] is None


def test_on_validation_the_thresholds_are_fitted_there(both):
    pool = pooled(*both)
    found = ranking_figures(pool, "val", [0.9] * 4)
    assert found["cf1_tuned"] == f1_of_all(pool.histogram(), pool.best_thresholds())[0]
    assert found["cf1_tuned"] > found["official_best_cf1_optimistic"] - NEAR > found["cf1"] - 2 * NEAR


def test_nothing_predicted_is_0_and_nothing_there_is_not_defined():
    none = np.full((5, 4), 0.01), np.ones((5, 4), int)
    found = ranking_figures(pooled(none), "test", None)
    assert (found["cf1"], found["of1"]) == (0.0, 0.0)
    empty = ranking_figures(pooled((none[0], np.zeros((5, 4), int))), "test", None)
    assert empty["map"] is None and empty["official_map"] == 0.0 and empty["of1"] == 0.0


def test_the_tables_name_every_figure_and_which_side_is_better(both):
    for key in ranking_figures(pooled(*both), "test", None):
        assert "_" not in column_name(key)
        assert better(key) == ("" if key == "map_labels" else "higher")
    assert "optimistic" in column_name("official_best_of1_optimistic")
