"""Neural-collapse diagnostics against a slow loop and the two ends: full collapse and one heap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from models.fednca import simplex_etf
from models.fednca_collapse import collapse, collapse_sums


def drawn(batch=20, labels=4, dim=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    etf = simplex_etf(labels, dim)
    features = etf + 0.4 * torch.randn(batch, labels, dim, generator=generator)
    targets = torch.randint(-1, 2, (batch, labels), generator=generator)
    return features, targets, etf


def test_values_are_those_of_a_slow_loop():
    features, targets, etf = drawn()
    groups = [features[targets[:, c] == 1, c].double().numpy() for c in range(4)]
    means = np.array([group.mean(axis=0) for group in groups])
    within = np.mean([((group - mean) ** 2).sum(axis=1).mean() for group, mean in zip(groups, means, strict=True)])
    between = ((means - means.mean(axis=0)) ** 2).sum(axis=1).mean()
    directions = etf.double().numpy()
    cosines = [
        np.mean([h @ m / np.linalg.norm(h) / np.linalg.norm(m) for h in group])
        for group, m in zip(groups, directions, strict=True)
    ]
    found = collapse(collapse_sums(features, targets, etf))
    assert found.within == pytest.approx(within, rel=1e-9)
    assert found.between == pytest.approx(between, rel=1e-9)
    assert found.ratio == pytest.approx(within / between, rel=1e-9)
    np.testing.assert_allclose(found.cosines.numpy(), cosines, atol=1e-6)
    assert found.cosine == pytest.approx(np.mean(cosines), abs=1e-6)


def test_sums_of_sites_add_up_to_the_sums_of_all():
    features, targets, etf = drawn()
    whole = collapse(collapse_sums(features, targets, etf))
    parts = [collapse_sums(features[rows], targets[rows], etf) for rows in (slice(0, 3), slice(3, 20))]
    added = collapse(parts[0] + parts[1])
    assert added.ratio == pytest.approx(whole.ratio, rel=1e-9)
    torch.testing.assert_close(added.cosines, whole.cosines)


def test_full_collapse_is_ratio_zero_and_cosine_one():
    _, targets, etf = drawn()
    found = collapse(collapse_sums(3 * etf.expand(20, -1, -1), targets, etf))
    assert found.ratio == pytest.approx(0, abs=1e-12) and found.cosine == pytest.approx(1, abs=1e-6)
    # Between: the prototypes, three long, have mean zero
    assert found.between == pytest.approx(9, rel=1e-5)


def test_opposite_features_have_cosine_minus_one():
    _, targets, etf = drawn()
    assert collapse(collapse_sums(-etf.expand(20, -1, -1), targets, etf)).cosine == pytest.approx(-1, abs=1e-6)


def test_absent_and_unknown_pairs_are_not_looked_at():
    features, targets, etf = drawn()
    changed = torch.where((targets == 1)[..., None], features, torch.full_like(features, 1e6))
    assert collapse(collapse_sums(changed, targets, etf)).ratio == collapse(collapse_sums(features, targets, etf)).ratio


def test_labels_count_alike_however_frequent():
    features, targets, etf = drawn(batch=30)
    often = torch.cat([features, features[:, :1].expand(-1, 4, -1)])
    more = torch.full_like(targets, 0)
    more[:, 0] = targets[:, 0]
    # the positives of label 0 occur twice: every mean stays what it was
    twice = collapse(collapse_sums(often, torch.cat([targets, more]), etf))
    once = collapse(collapse_sums(features, targets, etf))
    assert twice.ratio == pytest.approx(once.ratio, rel=1e-9) and twice.cosine == pytest.approx(once.cosine, rel=1e-9)


def test_what_has_no_positives_is_undefined():
    features, targets, etf = drawn()
    nothing = collapse(collapse_sums(features, torch.zeros_like(targets), etf))
    assert all(math.isnan(value) for value in (nothing.within, nothing.between, nothing.ratio, nothing.cosine))
    assert nothing.cosines.isnan().all()
    one_label = torch.zeros_like(targets)
    one_label[:, 1] = 1
    found = collapse(collapse_sums(features, one_label, etf))
    assert math.isnan(found.ratio) and math.isnan(found.between) and found.within > 0 and found.cosine > 0
    assert found.cosines.isnan().tolist() == [True, False, True, True]


def test_a_label_with_one_positive_has_a_cosine_but_no_scatter():
    features, targets, etf = drawn()
    targets[:, 3] = 0
    without = collapse(collapse_sums(features, targets, etf))
    targets[0, 3] = 1
    found = collapse(collapse_sums(features, targets, etf))
    assert found.ratio == pytest.approx(without.ratio, rel=1e-12) and not found.cosines[3].isnan()


def test_zero_feature_has_cosine_zero():
    _, targets, etf = drawn()
    assert collapse(collapse_sums(torch.zeros(20, 4, 12), targets, etf)).cosine == 0


def test_shapes_that_do_not_fit_are_refused():
    features, targets, etf = drawn()
    with pytest.raises(ValueError, match=r"features \(20, 4, 12\) do not fit targets \(19, 4\)"):
        collapse_sums(features, targets[1:], etf)
