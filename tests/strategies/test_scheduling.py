"""The floor of paired sites: golden numbers, closed forms, and who is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.scheduling import paired_fraction, paired_quota, stratified

GOLDEN = Path(__file__).parents[1] / "golden" / "incongruent" / "10_scheduler.npz"
SHAPES = ("linear", "cosine", "exp")

shapes = st.sampled_from(SHAPES)
rounds = st.integers(1, 60)
sizes = st.integers(0, 9)


@pytest.mark.parametrize("shape", SHAPES)
def test_golden_fractions(shape):
    found = [paired_fraction(t, 0.6, 0.2, 10, shape) for t in range(1, 16)]
    np.testing.assert_allclose(found, np.load(GOLDEN)[f"frac_{shape}"], rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("sites", "pool"), [(10, 8), (10, 3), (3, 8), (1, 1), (5, 0)])
def test_golden_quotas(shape, sites, pool):
    found = [paired_quota(sites, pool, t, 0.6, 0.2, 10, shape) for t in range(1, 16)]
    assert found == np.load(GOLDEN)[f"need_{shape}_S{sites}_pool{pool}"].tolist()


def test_closed_forms_of_the_specification():
    # section 9: .6 -> .2 over 10 rounds; 10 sites, 8 of them paired
    assert [paired_fraction(t, 0.6, 0.2, 10) for t in (1, 6, 11, 50)] == pytest.approx([0.6, 0.4, 0.2, 0.2])
    assert [paired_quota(10, 8, t, 0.6, 0.2, 10) for t in range(1, 12)] == [6, 6, 6, 6, 5, 4, 4, 3, 3, 3, 2]


@given(rounds, st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 40), shapes)
def test_the_fraction_falls_from_start_and_never_below_end(server_round, one, other, decay_rounds, shape):
    start, end = max(one, other), min(one, other)
    here, later = (paired_fraction(t, start, end, decay_rounds, shape) for t in (server_round, server_round + 1))
    assert end - 1e-12 <= later <= here + 1e-12 <= start + 2e-12
    assert paired_fraction(1, start, end, decay_rounds, shape) == pytest.approx(start)


@given(sizes, sizes, rounds, shapes)
def test_the_quota_fits_into_the_round_and_the_pool(sites, pool, server_round, shape):
    quota = paired_quota(sites, pool, server_round, 0.6, 0.2, 10, shape)
    assert 0 <= quota <= min(sites, pool)
    assert quota >= 1 or min(sites, pool) == 0  # where there can be a paired site, there is one


@given(sizes, sizes, st.integers(0, 20), st.data(), st.sampled_from(["unimodal_first", "all"]), st.integers(0, 2**32))
def test_a_round_has_its_size_its_quota_and_nobody_twice(num_paired, num_others, count, data, fill, seed):
    paired, others = [f"p{i}" for i in range(num_paired)], [f"u{i}" for i in range(num_others)]
    quota = data.draw(st.integers(0, min(count, num_paired)))
    chosen = stratified(paired, others, count, quota, fill, np.random.default_rng(seed))
    assert len(chosen) == len(set(chosen)) == min(count, num_paired + num_others)
    assert chosen == [site for site in [*paired, *others] if site in chosen]  # in the order given
    drawn_paired = sum(site in paired for site in chosen)
    assert drawn_paired >= quota
    if fill == "unimodal_first":  # more than the quota only where the others do not suffice
        assert drawn_paired == max(quota, min(count, num_paired + num_others) - num_others)
    assert chosen == stratified(paired, others, count, quota, fill, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("fill", "paired_share", "other_share"),
    # 4 paired, 4 others, 5 places, quota 2. unimodal_first: 2 of 4 paired, 3 of 4 others.
    # all: beyond the quota each of the 6 that are left has 3 places in 6, so a paired site has 1/2 + 1/2 * 1/2.
    [("unimodal_first", 0.5, 0.75), ("all", 0.75, 0.5)],
)
def test_every_site_of_a_kind_has_the_same_chance(fill, paired_share, other_share):
    rng, draws = np.random.default_rng(0), 4000
    counts = np.zeros(8)
    for _ in range(draws):
        counts[stratified(range(4), range(4, 8), 5, 2, fill, rng)] += 1
    # 5 standard deviations of a share over 4000 draws: 5 * sqrt(0.25 / 4000)
    np.testing.assert_allclose(counts / draws, [paired_share] * 4 + [other_share] * 4, atol=0.04)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: paired_fraction(1, 0.2, 0.6, 10), "start is 0.2 and end 0.6"),
        (lambda: paired_fraction(1, 1.2, 0.6, 10), "start is 1.2"),
        (lambda: paired_fraction(0, 0.6, 0.2, 10), "round is 0"),
        (lambda: paired_fraction(1, 0.6, 0.2, 0), "decay_rounds 0"),
        (lambda: paired_fraction(1, 0.6, 0.2, 10, "step"), "shape is 'step'"),
        (lambda: paired_quota(-1, 2, 1, 0.6, 0.2, 10), "sites is -1"),
        (lambda: stratified("a", "b", 2, 2, "all", np.random.default_rng()), "quota is 2, expected 0 to 2 sites"),
        (lambda: stratified("ab", "c", 1, 2, "all", np.random.default_rng()), "quota is 2, expected 0 to 1 sites"),
        (lambda: stratified("ab", "c", 2, 1, "none", np.random.default_rng()), "fill is 'none'"),
    ],
)
def test_what_cannot_be_is_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()
