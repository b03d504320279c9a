"""Rules that choose pool samples which differ from each other: CoreSet, BADGE, LoGo, FEAL and IFAL.

Section 11 of the project's fairfal specification. Every rule gives ``(min(budget, N),) int64`` positions in the pool of
N, in the order in which they are picked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.selection_geometry import (
    k_center,
    k_means,
    nearest_neighbours,
    plain,
    rank_one,
    spread_seeds,
    squared_distances,
)


def coreset(features_pool: Tensor, features_labelled: Tensor, budget: int) -> Tensor:
    """Greedy k-center on features ``(N, D)`` as they are, starting from the labelled ones ``(n, D)``."""
    return k_center(plain(features_pool), budget, plain(features_labelled))


def badge(residuals: Tensor, features: Tensor, budget: int, generator: torch.Generator) -> Tensor:
    """BADGE (ICLR 2020): k-means++ seeds on gradient embeddings, from the longest on.

    ``residuals (N, C)`` and ``features (N, D)`` of the pool are the embedding's factors; the (N, C D) array of the
    source is not formed.
    """
    points = rank_one(residuals, features)
    if not len(residuals):
        return torch.empty(0, dtype=torch.int64, device=residuals.device)
    return spread_seeds(points, budget, int(points.squared_lengths.argmax()), generator)


def logo(
    probabilities_local: Tensor,
    features_local: Tensor,
    probabilities_global: Tensor,
    budget: int,
    generator: torch.Generator,
) -> Tensor:
    """LoGo (CVPR 2023, arXiv 2303.12317): clusters of the local-only model, the most uncertain of each to the global.

    Macro step: k-means with ``budget`` clusters of `logo_embedding`; micro step: `logo_picks`.
    """
    if not len(features_local) or budget == 0:
        return torch.empty(0, dtype=torch.int64, device=features_local.device)
    clusters, _ = k_means(logo_embedding(probabilities_local, features_local), budget, generator)
    return logo_picks(clusters, probabilities_global, budget)


def logo_embedding(probabilities: Tensor, features: Tensor) -> Tensor:
    """(1 - max p) times the feature: ``(N, C), (N, D) -> (N, D) float64``."""
    return (1 - probabilities.double().amax(dim=1, keepdim=True)) * features.double()


def logo_picks(clusters: Tensor, probabilities: Tensor, budget: int) -> Tensor:
    """Of each cluster the sample of highest entropy, then, where clusters are empty, of each its next, and so on.

    ``clusters (N,) int64``, ``probabilities (N, C)``. Choice: of equal place in their clusters the more uncertain come
    first; the source cuts an unordered set.
    """
    by_entropy = torch.special.entr(probabilities.double()).sum(dim=1).argsort(descending=True, stable=True)
    by_cluster = by_entropy[clusters[by_entropy].argsort(stable=True)]
    sizes = torch.bincount(clusters)
    starts = sizes.cumsum(dim=0) - sizes
    place = torch.empty_like(by_cluster)
    place[by_cluster] = torch.arange(len(by_cluster), device=place.device) - starts[clusters[by_cluster]]
    return by_entropy[place[by_entropy].argsort(stable=True)][:budget]


def feal(
    logits_global: Tensor,
    logits_local: Tensor,
    features_local: Tensor,
    budget: int,
    *,
    num_neighbours: int = 5,
    similar_from: float = 0.85,
) -> Tensor:
    """FEAL (CVPR 2024, arXiv 2312.02567): evidential uncertainty, without neighbours of what is already picked.

    The score is `evidential_uncertainty` of ``logits (N, C)``. Down the list a sample is picked unless it has
    ``num_neighbours`` neighbours, cosine of ``features_local (N, D)`` above ``similar_from``, of which one is picked.
    Choice: what is then missing is filled from the top of the list (the source: from the highest pool positions).
    """
    ranking = evidential_uncertainty(logits_global, logits_local).argsort(descending=True, stable=True).tolist()
    count = len(ranking)
    if count <= num_neighbours:  # no sample has so many neighbours
        return torch.tensor(ranking[:budget], dtype=torch.int64, device=logits_global.device)
    own = torch.arange(count, device=features_local.device)
    cosines, ids = nearest_neighbours(features_local, features_local, num_neighbours, own)
    is_crowded = (cosines[:, -1] > similar_from).tolist()
    neighbours = ids.tolist()
    picked: dict[int, None] = {}  # in order of picking
    for position in ranking:
        if len(picked) == budget:
            break
        if not (is_crowded[position] and any(other in picked for other in neighbours[position])):
            picked[position] = None
    picks = [*picked, *(position for position in ranking if position not in picked)]
    return torch.tensor(picks[:budget], dtype=torch.int64, device=logits_global.device)


def evidential_uncertainty(logits_global: Tensor, logits_local: Tensor) -> Tensor:
    """FEAL's score ``(N,) float64``: scaled entropy of the global Dirichlet, times both expected entropies.

    alpha = relu(logit) + 1, S = sum alpha. Expected entropy: sum_c alpha_c / S (psi(S + 1) - psi(alpha_c + 1)). The
    differential entropy of Dir(alpha_global) is scaled to 0..1 over the pool (0 where all are equal).
    """
    alphas = [logits.double().relu() + 1 for logits in (logits_global, logits_local)]
    if not len(alphas[0]):
        return alphas[0].new_empty(0)
    entropy = torch.distributions.Dirichlet(alphas[0]).entropy()
    span = entropy.max() - entropy.min()
    scaled = (entropy - entropy.min()) / torch.where(span > 0, span, 1.0)
    return scaled * sum(_expected_entropy(alpha) for alpha in alphas)


def _expected_entropy(alpha: Tensor) -> Tensor:
    total = alpha.sum(dim=1, keepdim=True)
    return (alpha / total * (torch.digamma(total + 1) - torch.digamma(alpha + 1))).sum(dim=1)


class Outputs(NamedTuple):
    """What one model says of the n labelled and then the N pool samples: ``features (n + N, D)``, ``probabilities
    (n + N, C)``."""

    features: Tensor
    probabilities: Tensor


def ifal(
    by_global: Outputs,
    by_local: Outputs,
    by_distilled: Outputs,
    labels: Tensor,
    budget: int,
    generator: torch.Generator,
    *,
    num_neighbours: int = 250,
) -> Tensor:
    """IFAL (IJCAI 2025, pp. 7300-7308): where three models' neighbourhoods disagree, one sample of each cluster.

    The models: global, the site's after its last round, and a local one distilled from the global; ``labels (n,)`` of
    the labelled samples. With q = `reverse_neighbour_classes` and W = `sorted_distance`, the score is
    max(a / (b + 1e-5), b / (a + 1e-5)) (a + b) times W of the local model's q and its softmax, where a and b are how
    far the distilled model is from the local and from the global one. Of the samples above the score's Otsu threshold
    those nearest to the centres of k-means on local features are picked; where these are fewer than ``budget``, again
    without the last factor; where still fewer, the largest scores.

    Choice: neighbours are at most the pool's size less one; Otsu is computed on the values, without bins.
    """
    num_pool = len(by_global.features) - len(labels)
    if num_pool < 2 or budget == 0:  # nobody has a neighbour
        return torch.arange(num_pool, device=labels.device)[:budget]

    def classes(neighbourhood: Outputs, voters: Outputs) -> Tensor:
        return reverse_neighbour_classes(neighbourhood.features, voters.probabilities, labels, num_neighbours)

    distilled = classes(by_distilled, by_global)
    from_local = sorted_distance(classes(by_local, by_global), distilled)
    from_global = sorted_distance(classes(by_global, by_global), distilled)
    ratio = torch.maximum(from_global / (from_local + 1e-5), from_local / (from_global + 1e-5))
    disagreement = ratio * (from_local + from_global)
    pool_local = by_local.probabilities[len(labels) :].double()
    score = disagreement * sorted_distance(classes(by_local, by_local), pool_local)

    features = F.normalize(by_local.features[len(labels) :].double(), dim=1)
    budget = min(budget, num_pool)
    for values in (score, disagreement):
        candidates = (values > otsu_threshold(values)).nonzero()[:, 0]
        picks = _cluster_picks(features, candidates, budget, generator)
        if len(picks) == budget:
            return picks
    return score.argsort(descending=True, stable=True)[:budget]


def reverse_neighbour_classes(features: Tensor, probabilities: Tensor, labels: Tensor, num_neighbours: int) -> Tensor:
    """Class shares of those who count a pool sample among their neighbours, ``(N, C) float64``, rows sum to 1.

    Each of the n labelled and N pool samples votes for its ``num_neighbours`` most similar pool samples (cosine of
    ``features (n + N, D)``, itself left out, at most N - 1) with its class: the true one of ``labels (n,)``, or the
    largest of ``probabilities (n + N, C)``. Every class starts with one vote.
    """
    known, (total, num_classes) = len(labels), probabilities.shape
    count = min(num_neighbours, total - known - 1)
    own = torch.arange(total, device=features.device) - known
    _, chosen = nearest_neighbours(features, features[known:], count, own.clamp(min=-1))
    votes = torch.cat([labels.long(), probabilities[known:].argmax(dim=1)])
    cells = chosen * num_classes + votes[:, None]
    counts = torch.bincount(cells.flatten(), minlength=(total - known) * num_classes).double() + 1
    counts = counts.view(total - known, num_classes)
    return counts / counts.sum(dim=1, keepdim=True)


def sorted_distance(first: Tensor, second: Tensor) -> Tensor:
    """One-dimensional Wasserstein distance between the values of two rows, ``(N, C), (N, C) -> (N,)``.

    It is the mean difference of the sorted values; which class has which value is lost, as in the source.
    """
    return (first.sort(dim=1).values - second.sort(dim=1).values).abs().mean(dim=1)


def otsu_threshold(values: Tensor) -> Tensor:
    """Otsu's threshold of ``values (N,)``, a scalar: the largest value of the lower of two classes that differ most.

    Choice: every value is a possible cut (no histogram). Where all are equal it is that value.
    """
    ordered = values.sort().values
    below = torch.arange(1, len(ordered), device=values.device, dtype=values.dtype)
    above = len(ordered) - below
    sums = ordered.cumsum(dim=0)
    difference = sums[:-1] / below - (sums[-1] - sums[:-1]) / above
    between = torch.where(ordered[1:] > ordered[:-1], below * above * difference.square(), -1.0)
    return ordered[between.argmax()] if bool((between > 0).any()) else ordered[-1]


def _cluster_picks(features: Tensor, candidates: Tensor, budget: int, generator: torch.Generator) -> Tensor:
    """Of the ``candidates`` those nearest to the centres of k-means, each once, in the order of the centres."""
    if not len(candidates):
        return candidates
    _, centres = k_means(features[candidates], min(budget, len(candidates)), generator)
    nearest = squared_distances(plain(centres), plain(features[candidates])).argmin(dim=1).tolist()
    return candidates[list(dict.fromkeys(nearest))]
