"""Distances, k-center, k-means and neighbours against plain computation, scikit-learn and the best cover there is."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from models.selection_geometry import (
    k_center,
    k_means,
    nearest_neighbours,
    plain,
    rank_one,
    spread_seeds,
    squared_distances,
)


def rng_of(seed):
    return torch.Generator().manual_seed(seed)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_distances_of_factors_are_those_of_the_products(seed):
    draw = functools.partial(torch.randn, generator=rng_of(seed))
    points, others = rank_one(draw(9, 4), draw(9, 5)), rank_one(draw(6, 4), draw(6, 5))
    dense = [torch.einsum("nc,nd->ncd", p.left, p.right).flatten(1) for p in (points, others)]
    expected = torch.cdist(*dense, compute_mode="donot_use_mm_for_euclid_dist").square()
    torch.testing.assert_close(squared_distances(points, others), expected, rtol=1e-10, atol=1e-14)
    assert (squared_distances(points, points).diagonal() == 0).all()


def test_k_center_on_a_line():
    candidates = torch.tensor([[0.0], [2.0], [10.0], [11.0]])
    picks = k_center(plain(candidates), 2, plain(torch.zeros(1, 1)))
    assert candidates[picks, 0].tolist() == [11.0, 2.0]


@pytest.mark.parametrize("seed", range(6))
def test_greedy_covers_within_twice_the_optimum(seed):
    vectors = torch.randn(10, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distances = torch.cdist(vectors, vectors)
    radius = {subset: distances[:, list(subset)].amin(dim=1).max() for subset in itertools.combinations(range(10), 3)}
    greedy = k_center(plain(vectors), 3, plain(vectors[:0]))
    assert distances[:, greedy].amin(dim=1).max() <= 2 * min(radius.values()) + 1e-12


def test_k_means_is_a_fixed_point_as_good_as_scikit_learns():
    vectors = torch.randn(200, 3, generator=rng_of(0)) + 4 * torch.randint(3, (200, 1), generator=rng_of(1))
    clusters, centres = k_means(vectors, 6, rng_of(2))
    distances = torch.cdist(vectors.double(), centres)
    assert torch.equal(distances.argmin(dim=1), clusters)
    for cluster in range(6):
        torch.testing.assert_close(vectors.double()[clusters == cluster].mean(dim=0), centres[cluster])
    tries = [k_means(vectors, 6, rng_of(seed))[1] for seed in range(10)]
    inertia = min(torch.cdist(vectors.double(), tried).amin(dim=1).square().sum() for tried in tries)
    assert inertia <= 1.02 * KMeans(6, n_init=10, random_state=0).fit(vectors.numpy()).inertia_


def test_k_means_of_equal_vectors_has_empty_clusters():
    clusters, centres = k_means(torch.ones(5, 2), 3, rng_of(0))
    assert clusters.tolist() == [0] * 5 and (centres == 1).all()
    clusters, _ = k_means(torch.arange(3.0)[:, None], 9, rng_of(0))
    assert sorted(clusters.tolist()) == [0, 1, 2]


def test_neighbours_are_the_most_similar_without_oneself():
    vectors = torch.randn(30, 4, generator=rng_of(3), dtype=torch.float64)
    unit = torch.nn.functional.normalize(vectors, dim=1)
    own = torch.arange(30)
    cosines, ids = nearest_neighbours(vectors, vectors, 4, own)
    for row in range(30):
        expected = sorted(set(range(30)) - {row}, key=lambda other: -float(unit[row] @ unit[other]))[:4]
        assert ids[row].tolist() == expected
        torch.testing.assert_close(cosines[row], unit[expected] @ unit[row])
    with pytest.raises(ValueError, match="30 neighbours were asked for, there are 29"):
        nearest_neighbours(vectors, vectors, 30, own)


def test_seeds_are_the_same_from_factors_and_from_products():
    left, right = torch.randn(40, 3, generator=rng_of(4)), torch.randn(40, 5, generator=rng_of(5))
    dense = torch.einsum("nc,nd->ncd", left.double(), right.double()).flatten(1)
    found = spread_seeds(rank_one(left, right), 10, 0, rng_of(6))
    assert torch.equal(found, spread_seeds(plain(dense), 10, 0, rng_of(6)))
