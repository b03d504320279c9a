"""Intervals against published values, and against how often they hold the truth."""

import numpy as np
import pytest

from federation.intervals import auroc_interval, bootstrap_interval, wilson_interval
from federation.metrics import ScoreHistogram


def test_wilson_interval_gives_newcombes_table():
    # Newcombe, Statistics in Medicine 17:857 (1998), table I, method 3
    low, high = wilson_interval([81, 15, 0, 1], [263, 148, 20, 29])
    np.testing.assert_allclose(low, [0.2553, 0.0624, 0.0, 0.0061], atol=5e-5)
    np.testing.assert_allclose(high, [0.3662, 0.1605, 0.1611, 0.1718], atol=5e-5)


def test_wilson_interval_of_none_is_nan_and_of_all_ends_at_one():
    low, high = wilson_interval([0, 7], [0, 7])
    assert np.isnan(low[0]) and np.isnan(high[0])
    assert 0 < low[1] < high[1] == 1.0
    with pytest.raises(ValueError, match="confidence"):
        wilson_interval(1, 2, confidence=95)


def test_auroc_interval_solves_newcombes_equation():
    auroc, positives, negatives = 0.8, 30, 200
    for bound in auroc_interval(auroc, positives, negatives):
        size = (positives + negatives) / 2 - 1
        variance = bound * (1 - bound) * (1 + size * ((1 - bound) / (2 - bound) + bound / (1 + bound)))
        assert abs(bound - auroc) == pytest.approx(1.959964 * np.sqrt(variance / (positives * negatives)), rel=1e-5)


def test_auroc_interval_of_a_perfect_small_class_is_wide():
    low, high = auroc_interval([1.0, 1.0, 0.0, np.nan], [3, 3000, 3, 0], [20, 20000, 20, 5])
    assert low[0] < 0.8 and high[0] == pytest.approx(1.0)
    assert low[1] > 0.99
    assert high[2] > 0.2 and low[2] == pytest.approx(0.0, abs=1e-12)
    assert np.isnan([low[3], high[3]]).all()


@pytest.mark.parametrize("method", ["newcombe", "bootstrap"])
def test_intervals_hold_the_true_auroc_about_as_often_as_they_say(method):
    # two normals one standard deviation apart: AUROC = Phi(1 / sqrt 2) = 0.7602
    generator = np.random.default_rng(0)
    held, trials = 0, 200
    for trial in range(trials):
        histogram = ScoreHistogram(1, 256)
        targets = np.repeat([1, 0], [40, 400])[:, None]
        histogram.update(1 / (1 + np.exp(-generator.normal(targets - 2.0, 1.0))), targets)
        if method == "newcombe":
            low, high = (float(bound[0]) for bound in auroc_interval(histogram.auroc(), 40, 400))
        else:
            low, high = bootstrap_interval(histogram, lambda drawn: drawn.auroc()[0], draws=100, seed=trial)
        held += low <= 0.7602 <= high
    # 95 % of 200 is 190; three standard deviations of a binomial are 9, and the bootstrap is known to run short
    assert held >= 178


def test_bootstrap_follows_its_seed_and_says_undefined():
    histogram = ScoreHistogram(1)
    histogram.update(np.random.default_rng(0).random((60, 1)), np.arange(60)[:, None] % 2)

    def auroc(drawn):
        return float(drawn.auroc()[0])

    first, again, other = (bootstrap_interval(histogram, auroc, draws=20, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert np.isnan(bootstrap_interval(ScoreHistogram(1), auroc, draws=5)).all()
    with pytest.raises(ValueError, match="at least 2 draws"):
        bootstrap_interval(histogram, auroc, draws=1)
