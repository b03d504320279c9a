"""Distances, covering and clustering for the choice of samples: k-center, k-means++ seeds, k-means, neighbours.

Points are rank-one matrices g = left (x) right, kept as their two factors: the gradient embedding of a sample is one.
|g_i - g_j|^2 = |l_i|^2 |r_i|^2 + |l_j|^2 |r_j|^2 - 2 <l_i, l_j> <r_i, r_j>, so memory is that of the factors, never
that of their product. Plain vectors are the case of a left factor of ones (`plain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024
"""Rows that are compared with all others at a time."""

SAME_POINT = 1e-12
"""Squared distances below this share of both squared lengths are 0: what is left of two equal points in float64."""


class RankOne(NamedTuple):
    """N points: factors ``left (N, C)``, ``right (N, D)`` and squared lengths ``(N,)``, all float64."""

    left: Tensor
    right: Tensor
    squared_lengths: Tensor

    def rows(self, index: Tensor | slice) -> RankOne:
        """The points at ``index``, in its order."""
        return RankOne(self.left[index], self.right[index], self.squared_lengths[index])


def rank_one(left: Tensor, right: Tensor, distance: str = "euclidean") -> RankOne:
    """Points of two factors ``(N, C)``, ``(N, D)``.

    ``distance="cosine"`` scales every point to length 1, so that squared distances are 2 (1 - cosine); a point of
    length 0 has cosine 0 with all. Choice: float64, since the distance is a difference of large terms.
    """
    left, right = left.double(), right.double()
    if distance == "cosine":
        left, right = F.normalize(left, dim=1, eps=1e-12), F.normalize(right, dim=1, eps=1e-12)
        return RankOne(left, right, torch.ones_like(left[:, 0]))
    if distance != "euclidean":
        raise ValueError(f"distance={distance!r} is unknown; there are euclidean, cosine")
    return RankOne(left, right, left.square().sum(dim=1) * right.square().sum(dim=1))


def plain(vectors: Tensor) -> RankOne:
    """Vectors ``(N, D)`` as points."""
    return rank_one(torch.ones_like(vectors[:, :1]), vectors)


def squared_distances(points: RankOne, others: RankOne) -> Tensor:
    """Squared distances ``(N, M) float64``, exactly 0 between equal points."""
    lengths = points.squared_lengths[:, None] + others.squared_lengths
    products = (points.left @ others.left.T).mul_(points.right @ others.right.T)
    distances = lengths - 2 * products
    return distances.masked_fill_(distances <= SAME_POINT * lengths, 0.0)


def nearest_distances(points: RankOne, others: RankOne, is_seen: Tensor | None = None) -> Tensor:
    """Squared distance to the nearest of ``others``, ``(N,) float64``; inf where there are none.

    ``is_seen (M, N) bool``: which of them each point looks at (without it, at all).
    """
    nearest = torch.full_like(points.squared_lengths, torch.inf)
    block = points.left.shape[1] + points.right.shape[1]  # the distances of a block take no more than the factors
    for first in range(0, len(others.left), block):
        rows = slice(first, first + block)
        distances = squared_distances(points, others.rows(rows))
        if is_seen is not None:
            distances.masked_fill_(~is_seen[rows].T, torch.inf)
        nearest = torch.minimum(nearest, distances.amin(dim=1))
    return nearest


def k_center(points: RankOne, count: int, anchors: RankOne) -> Tensor:
    """Greedy k-center: positions ``(min(count, N),) int64`` in the order in which they are picked.

    Each pick is the point farthest from the anchors and the earlier picks (ties: the first). Without anchors the first
    point is the first pick; where no more than ``count`` points are there, all are taken in their order.
    """
    if count >= len(points.left):
        return torch.arange(len(points.left), device=points.left.device)
    return k_centers(points, [len(points.left)], [count], nearest_distances(points, anchors))[0]


def k_centers(points: RankOne, sizes: Sequence[int], counts: Sequence[int], nearest: Tensor) -> list[Tensor]:
    """`k_center` in G groups at once: G tensors ``(count,) int64`` of positions among all N points, in picking order.

    ``sizes``: how many points each group has, which lie one group after the other; ``counts``: how many to pick, at
    most the size; ``nearest (N,) float64``: squared distances to the anchors. Many small groups take as long as one.
    """
    steps, device = max(counts), nearest.device
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    ends = torch.tensor(sizes, device=device).cumsum(0)[:, None]
    table = ends - torch.tensor(sizes, device=device)[:, None] + torch.arange(max(sizes), device=device)
    is_free, table = table < ends, table.clamp(max=len(nearest) - 1)
    picks = torch.empty(len(sizes), steps, dtype=torch.int64, device=device)
    for place in range(steps):
        if place:
            last = picks[:, place - 1]
            distances = squared_distances(points, points.rows(last)).gather(1, group[:, None])[:, 0]
            nearest = torch.minimum(nearest, distances)
            nearest[last] = -torch.inf  # stays below every distance, so it is not picked again
        farthest = nearest[table].masked_fill_(~is_free, -torch.inf).argmax(dim=1, keepdim=True)
        picks[:, place] = table.gather(1, farthest)[:, 0]
    return [row[:count] for row, count in zip(picks, counts, strict=True)]


def spread_seeds(points: RankOne, count: int, first: int, generator: torch.Generator) -> Tensor:
    """k-means++ seeds: distinct positions ``(min(count, N),) int64`` in the order in which they are drawn.

    From ``first`` on, each is drawn with probability in proportion to its squared distance to the nearest one so far.
    Choice: where all that is left lies on a seed, the draw is uniform over what is left (the source stops there).
    """
    count = min(count, len(points.left))
    picks = torch.full((count,), first, dtype=torch.int64, device=points.left.device)
    is_free = torch.ones_like(points.squared_lengths, dtype=torch.bool)
    nearest = torch.full_like(points.squared_lengths, torch.inf)
    for place in range(1, count):
        last = picks[place - 1 : place]
        is_free[last] = False
        nearest = torch.minimum(nearest, squared_distances(points, points.rows(last))[:, 0])
        weights = torch.where(is_free, nearest, 0.0)
        weights = torch.where(weights.sum() > 0, weights, is_free.double())
        picks[place] = torch.multinomial(weights.cpu(), 1, generator=generator)
    return picks


def k_means(vectors: Tensor, count: int, generator: torch.Generator, max_steps: int = 300) -> tuple[Tensor, Tensor]:
    """Lloyd's k-means from k-means++ seeds: cluster of every vector ``(N,) int64``, centres ``(k, D) float64``.

    ``vectors (N, D)``, k = min(count, N). A centre that no vector is nearest to stays where it is, so a cluster can be
    empty. Ends when no vector changes its cluster, or after ``max_steps``.
    """
    points = plain(vectors)
    first = int(torch.randint(len(vectors), (1,), generator=generator))
    centres = points.right[spread_seeds(points, count, first, generator)]
    clusters = squared_distances(points, plain(centres)).argmin(dim=1)
    for _ in range(max_steps):
        members = torch.bincount(clusters, minlength=len(centres)).double()[:, None]
        sums = torch.zeros_like(centres).index_add_(0, clusters, points.right)
        centres = torch.where(members > 0, sums / members.clamp(min=1), centres)
        moved = squared_distances(points, plain(centres)).argmin(dim=1)
        if torch.equal(moved, clusters):
            break
        clusters = moved
    return clusters, centres


def nearest_neighbours(vectors: Tensor, others: Tensor, count: int, own: Tensor) -> tuple[Tensor, Tensor]:
    """The ``count`` most similar of ``others``: cosines ``(N, count) float64`` and positions ``(N, count) int64``.

    ``vectors (N, D)``, ``others (M, D)``; ``own (N,) int64`` is each vector's own position among ``others``, which is
    left out, or -1. Raises ValueError where there are fewer than ``count``.
    """
    available = len(others) - int((own >= 0).any())
    if count > available:
        raise ValueError(f"{count} neighbours were asked for, there are {available}")
    vectors, others = F.normalize(vectors.double(), dim=1), F.normalize(others.double(), dim=1)
    found = []
    for rows, places in zip(vectors.split(BLOCK), own.split(BLOCK), strict=True):
        cosines = rows @ others.T
        has_own = (places >= 0).nonzero()[:, 0]
        cosines[has_own, places[has_own]] = -torch.inf
        found.append(cosines.topk(count, dim=1))
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])
