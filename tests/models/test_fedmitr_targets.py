"""Which labels are asked of which site: shares, privacy floor, and counts that leave nothing to ask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.fedmitr_targets import SAMPLERS, sample_label_vectors, sample_targets, teaching_sites

COUNTS = torch.tensor([[90, 30, 0, 0, 0], [30, 90, 60, 0, 0], [0, 0, 0, 500, 0]])  # site 2 has one class, 4 is nowhere


def table(targets, sites=3, labels=5):
    places = targets.sites * labels + targets.labels
    return torch.bincount(places, minlength=sites * labels).view(sites, labels)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_balanced_asks_every_class_equally_and_sites_by_their_share():
    found = table(sample_targets("balanced", 3000, COUNTS, seeded()))
    assert found.sum(dim=0).tolist() == [1000, 1000, 1000, 0, 0]
    # 1000 draws of probability 3/4: a standard deviation of 14
    assert abs(found[0, 0] - 750) < 70 and abs(found[1, 1] - 750) < 70 and found[1, 2] == 1000


def test_client_samplers_ask_every_site_equally():
    for sampler, share in (("client_count", 0.75), ("client_present", 0.5)):
        found = table(sample_targets(sampler, 2000, COUNTS, seeded()))
        assert found.sum(dim=1).tolist() == [1000, 1000, 0]
        assert abs(found[0, 0] - 1000 * share) < 80 and found[0, 2:].sum() == 0
    found = table(sample_targets("uniform", 3000, COUNTS, seeded()))
    assert (found[:2] > 200).all() and found[2].sum() == 0  # even classes that a site never saw: SMI's way


@given(seed=st.integers(0, 10_000), sites=st.integers(1, 5), labels=st.integers(1, 6), size=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_nothing_rare_is_ever_asked_for(seed, sites, labels, size):
    counts = torch.randint(0, 30, (sites, labels), generator=seeded(seed))
    counts[torch.rand(counts.shape, generator=seeded(seed)) < 0.3] = 0
    for sampler in SAMPLERS:
        if not (counts >= 10).any():
            with pytest.raises(ValueError, match="nothing to invert"):
                sample_targets(sampler, size, counts, seeded(seed))
            continue
        found = sample_targets(sampler, size, counts, seeded(seed))
        asked = counts[found.sites, found.labels]
        assert len(asked) == size and torch.equal(found.sites, found.sites.sort().values)
        assert teaching_sites(counts)[found.sites].all()
        assert ((asked >= 10) | (asked == 0)).all() if sampler == "uniform" else (asked >= 10).all()
        assert torch.equal(found.labels, sample_targets(sampler, size, counts, seeded(seed)).labels)


def test_sites_of_one_class_teach_only_where_there_are_no_others():
    assert teaching_sites(COUNTS).tolist() == [True, True, False]
    assert teaching_sites(torch.tensor([[20, 0], [0, 20], [5, 5]])).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="sampler 'even' is unknown"):
        sample_targets("even", 3, COUNTS, seeded())


def test_label_vectors_follow_prevalence_and_know_what_a_site_never_saw():
    positives = torch.tensor([[50, 5, 0, 0], [20, 20, 0, 0], [3, 3, 3, 0]])
    negatives = torch.tensor([[50, 95, 100, 0], [80, 80, 0, 0], [90, 90, 90, 0]])
    found = sample_label_vectors(4000, positives, negatives, seeded())
    assert torch.bincount(found.sites, minlength=3).tolist() == [2000, 2000, 0]  # the third has no usable label
    first, second = found.labels[found.sites == 0], found.labels[found.sites == 1]
    assert (first[:, 3] == -1).all() and (second[:, 2] == -1).all()
    assert (first[:, 1] == 0).all() and (first[:, 2] == 0).all()  # too few positives, and none
    # forced with probability 1/2, else prevalence 1/2: 3/4; of two labels: 1/3 forced, else 1/5: 7/15
    assert (first[:, 0] == 1).float().mean().item() == pytest.approx(3 / 4, abs=0.05)
    assert (second[:, 0] == 1).float().mean().item() == pytest.approx(7 / 15, abs=0.05)
    with pytest.raises(ValueError, match="nothing to invert"):
        sample_label_vectors(5, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), seeded())
