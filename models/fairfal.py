"""FairFAL: which images a site should have labelled next, so that rare classes are not starved.

Zong, Huang, "Federated Active Learning Under Extreme Non-IID and Global Class Imbalance", CVPR 2026, arXiv 2603.10341;
spec = the project's fairfal specification. After a federated training every site picks from its unlabelled pool: one
number of all sites, the mean imbalance of the global model, and one of its own tell which model's uncertainty to trust;
prototypes of its labelled images give every pool image a bucket; from each bucket come uncertain images that cover it.

What travels: weights, and one float64 of a site (`imbalance_ratio`), once. Nothing else of this file leaves a site.

Labels are class numbers ``(n,)``. Multi-label data (Choice, our extension): ``(n, C)`` of 1, 0 and -1 unknown, where a
sample belongs to each of its labels and probabilities are sigmoids. Numbers are float64, whatever comes in.

The sampler is in `fairfal_select`, the networks in `fairfal_networks`, the rules it is compared with in `selection`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from models.fairfal_select import class_quotas, memberships, picks_by_class, require_finite, require_labels, select

__all__ = [
    "balanced_indices",
    "balanced_prior",
    "class_quotas",
    "gradients_from_global",
    "imbalance_ratio",
    "inverse_class_weights",
    "mixing_weight",
    "picks_by_class",
    "prefers_global",
    "prior_divergence",
    "proportional_budgets",
    "prototype_labels",
    "residuals",
    "select",
    "uncertainty",
]

UNCERTAINTIES = ("entropy", "margin", "least_confidence")
PRIORS = ("upsample", "class_mean")
SMALLEST_RATIO = 1e-12


def balanced_indices(labels: ArrayLike | Tensor, seed: int = 42, cap: int | None = None) -> Tensor:
    """Positions of a class-balanced resample of ``labels (n,) int``, ``(present classes * target,) int64`` (spec 5.1).

    The target is the largest class's size, at most ``cap``. A smaller class keeps all its samples and gets more, drawn
    with replacement; one that has enough is drawn without. Class after class takes from one NumPy generator of
    ``seed``, which shuffles the whole last. The draws are the authors'.
    """
    labels = np.asarray(labels)
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    if not len(classes):
        return torch.empty(0, dtype=torch.int64)
    target = counts.max() if cap is None else min(counts.max(), cap)
    parts = []
    for label in classes:
        members = np.flatnonzero(labels == label)
        missing = target - len(members)
        if missing > 0:
            parts.append(np.concatenate([members, rng.choice(members, size=missing, replace=True)]))
        else:
            parts.append(rng.choice(members, size=target, replace=False))
    balanced = np.concatenate(parts)
    rng.shuffle(balanced)
    return torch.from_numpy(balanced)


def balanced_prior(
    probabilities: ArrayLike | Tensor, labels: ArrayLike | Tensor, how: str = "upsample", *, seed: int = 42
) -> Tensor:
    """What a model predicts on average were the present classes equally frequent, ``(C,) float64`` (spec 5.1).

    ``probabilities (n, C)`` of the labelled samples. ``how="upsample"``: the mean over `balanced_indices`.
    ``"class_mean"``: its expectation, the mean over the present classes of each one's mean; it does not depend on
    ``seed`` or the order of the samples. Choice: ``upsample``, as in the authors' code. Multi-label data have
    ``class_mean`` only.

    Raises ValueError without a labelled sample: such a site has no prior and sends nothing.
    """
    probabilities, labels = torch.as_tensor(probabilities, dtype=torch.float64), torch.as_tensor(labels)
    if how not in PRIORS:
        raise ValueError(f"balanced_prior={how!r} is unknown; there are {', '.join(PRIORS)}")
    if probabilities.ndim != 2 or len(labels) != len(probabilities):
        raise ValueError(f"expected probabilities (n, C) and n labels, got {probabilities.shape}, {labels.shape}")
    require_finite("labelled", probabilities)
    require_labels(labels, probabilities.shape[1])
    if how == "upsample":
        if labels.ndim == 2:
            raise ValueError("balanced_prior='upsample' is for single-label data; use 'class_mean'")
        chosen = balanced_indices(labels.cpu(), seed).to(labels.device)
        weights = torch.bincount(chosen, minlength=len(labels)).double()
    else:
        is_member = memberships(labels, probabilities.shape[1]).double()
        weights = (is_member / is_member.sum(dim=0).clamp(min=1)).sum(dim=1)
    if not bool(weights.any()):
        raise ValueError("a prior needs at least one labelled sample")
    return weights @ probabilities / weights.sum()


def imbalance_ratio(prior: ArrayLike | Tensor, present: Iterable[int] | Iterable[bool]) -> float:
    """gamma: the smallest over the largest entry of the global model's ``prior (C,)`` among present classes (spec 5.2).

    ``present``: class numbers, or a mask ``(C,) bool``: the classes with a labelled sample at this site. In (0, 1], 1
    where one class is present; clamped to at least 1e-12. Raises ValueError where none is present.

    >>> imbalance_ratio([0.4, 0.3, 0.2, 0.1], [0, 1, 3])
    0.25
    """
    prior = torch.as_tensor(prior, dtype=torch.float64)
    present = torch.as_tensor(np.asarray(list(present)), device=prior.device)
    if not len(present) or (present.dtype == torch.bool and not bool(present.any())):
        raise ValueError("the imbalance ratio needs at least one present class")
    found = prior[present]
    require_finite("prior", found)
    if float(found.max()) <= 0:
        return SMALLEST_RATIO
    return min(1.0, max(SMALLEST_RATIO, float(found.min() / found.max())))


def prior_divergence(global_prior: ArrayLike | Tensor, local_prior: ArrayLike | Tensor) -> float:
    """d = mean_c |g_c - l_c| / (g_c + l_c) over all C classes, in [0, 1] (spec 5.2); priors ``(C,)``.

    Choice: a class that both models give exactly 0 counts 0 (0/0 in the source).

    >>> round(prior_divergence([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), 6)
    0.285714
    """
    first, second = (
        torch.as_tensor(global_prior, dtype=torch.float64),
        torch.as_tensor(local_prior, dtype=torch.float64),
    )
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"expected two priors (C,), got {tuple(first.shape)} and {tuple(second.shape)}")
    require_finite("prior", first + second)
    total = first + second
    return float(torch.where(total > 0, (first - second).abs() / total, 0.0).mean())


def prefers_global(divergence: float, mean_imbalance: float, delta: float = 0.75) -> bool:
    """Whether the global model's uncertainty is trusted: 1 - (d + mean gamma) / 2 > delta, strictly (spec 5.2).

    >>> prefers_global(0.1, 0.2), prefers_global(0.25, 0.25)
    (True, False)
    """
    return _score(divergence, mean_imbalance) > delta


def mixing_weight(divergence: float, mean_imbalance: float, tau: float, delta: float = 0.75) -> float:
    """Weight of the global model's uncertainty, sigmoid((score - delta) / tau): the soft form of `prefers_global`.

    The local model's has what is left of 1. ``tau`` > 0; towards 0 it becomes the switch (spec 17, extension 5).
    """
    if not tau > 0:
        raise ValueError(f"tau={tau} must be above 0; prefers_global is the hard switch")
    x = (_score(divergence, mean_imbalance) - delta) / tau
    return float(torch.tensor(x, dtype=torch.float64).sigmoid())


def gradients_from_global(mean_imbalance: float) -> bool:
    """Whether residuals come from the global model (mean gamma < 0.5), else from the local one.

    Choice: the authors' code (spec 8-a); the paper always takes the global one. Features always come from it.
    """
    return mean_imbalance < 0.5


def prototype_labels(
    features_labelled: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    features_pool: ArrayLike | Tensor,
    num_classes: int,
    *,
    normalise: bool = True,
) -> Tensor:
    """The class whose prototype each pool sample is most similar to, ``(N,) int64`` (spec 5.3).

    ``features_labelled (n, D)``, ``features_pool (N, D)`` of the global model, scaled to length 1 here. A prototype is
    the mean of a class's features, scaled to length 1 too (``normalise=False``: left as it is, the other reading of the
    paper, spec 8-b). Only classes with a labelled sample can be the answer; a feature of length 0 gets the lowest of
    them. Choice: without any labelled sample all are class 0: one bucket (spec 14).
    """
    known, pool = (
        torch.as_tensor(features_labelled, dtype=torch.float64),
        torch.as_tensor(features_pool, dtype=torch.float64),
    )
    labels = torch.as_tensor(labels)
    require_finite("labelled", known)
    require_finite("pool", pool)
    require_labels(labels, num_classes)
    is_member = memberships(labels, num_classes).double()  # (n, C)
    counts = is_member.sum(dim=0)
    prototypes = is_member.T @ F.normalize(known, dim=1) / counts.clamp(min=1)[:, None]
    if normalise:
        prototypes = F.normalize(prototypes, dim=1)
    similarities = F.normalize(pool, dim=1) @ prototypes.T
    return similarities.masked_fill(counts == 0, -torch.inf).argmax(dim=1)


def uncertainty(probabilities: ArrayLike | Tensor, kind: str = "entropy", *, multilabel: bool = False) -> Tensor:
    """How unsure a model is, ``(N,) float64`` in [0, 1]; larger is less sure (spec 5.4).

    ``probabilities (N, C)``. ``entropy``: -sum p log(p + 1e-12) / log C; ``margin``: 1 - (largest - second);
    ``least_confidence``: 1 - largest. With ``multilabel`` the mean over labels of the same for (p, 1 - p).
    """
    probabilities = torch.as_tensor(probabilities, dtype=torch.float64)
    if kind not in UNCERTAINTIES:
        raise ValueError(f"uncertainty={kind!r} is unknown; there are {', '.join(UNCERTAINTIES)}")
    require_finite("pool", probabilities)
    if multilabel:
        return _uncertainty(torch.stack([probabilities, 1 - probabilities], dim=-1), kind).mean(dim=1)
    if probabilities.shape[1] < 2:
        raise ValueError(f"uncertainty needs at least 2 classes, got {probabilities.shape[1]}")
    return _uncertainty(probabilities, kind)


def residuals(
    logits: ArrayLike | Tensor, labels: ArrayLike | Tensor | None = None, *, multilabel: bool = False
) -> Tensor:
    """y - p, the left factor of the gradient embedding, ``(N, C) float64`` (spec 5.5); the right one is the feature.

    p = softmax of ``logits (N, C)``; y is the true label (anchors), or without ``labels`` the predicted one (pool).
    With ``multilabel``, p = sigmoid and y = p > 0.5 or ``labels (N, C)``, where an unknown label has residual 0.
    """
    logits = torch.as_tensor(logits, dtype=torch.float64)
    require_finite("given", logits)
    if labels is not None:
        labels = torch.as_tensor(labels)
        require_labels(labels, logits.shape[1])
    if multilabel:
        probabilities = logits.sigmoid()
        known = (logits > 0).double() if labels is None else labels.double()
        return torch.where(known < 0, 0.0, known - probabilities)
    labels = logits.argmax(dim=1) if labels is None else labels
    return memberships(labels, logits.shape[1]).double() - logits.softmax(dim=1)


def inverse_class_weights(counts: Sequence[float]) -> list[float]:
    """Class weights for `class_quotas` that are inverse to the counts of labels over all sites (spec 17, extension 3).

    ``counts``: C numbers, possibly with noise: below 1 they count as 1. The weights sum to 1.
    """
    inverse = 1 / np.maximum(np.asarray(counts, dtype=np.float64), 1.0)
    return (inverse / inverse.sum()).tolist()


def proportional_budgets(pool_sizes: Sequence[int], total: int) -> list[int]:
    """Budgets of the sites that sum to min(total, all samples), in proportion to their pools (spec 8-k).

    Rounded by largest remainder, ties to the larger pool; no site gets more than it has.
    """
    return class_quotas(pool_sizes, total, pool_sizes) if any(pool_sizes) else [0] * len(pool_sizes)


def _score(divergence: float, mean_imbalance: float) -> float:
    return 1 - 0.5 * (divergence + mean_imbalance)


def _uncertainty(probabilities: Tensor, kind: str) -> Tensor:
    """Of distributions over the last axis."""
    if kind == "entropy":
        return -(probabilities * (probabilities + 1e-12).log()).sum(dim=-1) / math.log(probabilities.shape[-1])
    top = probabilities.topk(2, dim=-1).values
    return 1 - top[..., 0] if kind == "least_confidence" else 1 - (top[..., 0] - top[..., 1])
