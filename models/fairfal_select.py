"""The two-stage sampler of FairFAL: uncertain candidates of every class, then those that cover the class best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from models.selection_geometry import k_centers, nearest_distances, rank_one

ANCHOR_MODES = ("same_class", "all")
BATCH = 256
"""Candidates that are compared with each other at a time, where classes have few."""


class Samples(NamedTuple):
    """What the sampler knows of N images: the factors of their gradient embeddings, and their labels.

    ``residuals (N, C)``, ``features (N, D)``; ``labels``: ``(N,) int``, or ``(N, C)`` 0/1 for labelled multi-label
    images (-1 unknown).
    """

    residuals: Tensor
    features: Tensor
    labels: Tensor


def class_quotas(bucket_sizes: Sequence[int], budget: int, weights: Sequence[float] | None = None) -> list[int]:
    """How many samples to pick from each class's bucket: C ints that sum to min(budget, all samples) (spec 5.6).

    Even shares over all C classes, the rest of the division to the largest buckets. A quota above its bucket is cut,
    and the excess dealt one by one, round-robin from the largest bucket on. Ties: the lower class first.

    ``weights``: C numbers of at least 0, not all 0: shares in proportion to them, rounded by largest remainder (see
    `inverse_class_weights`). Choice: the excess is dealt as without them.

    >>> class_quotas([85, 30, 4, 0, 1, 0], 40)
    [18, 17, 4, 0, 1, 0]
    """
    sizes = np.asarray(bucket_sizes, dtype=np.int64)
    if sizes.ndim != 1 or not len(sizes) or sizes.min() < 0 or budget < 0:
        raise ValueError(f"quotas need sizes and a budget of at least 0, got sizes {sizes.tolist()}, budget {budget}")
    total = min(int(budget), int(sizes.sum()))
    order = np.argsort(-sizes, kind="stable")
    if weights is None:
        quotas, first = np.full(len(sizes), total // len(sizes)), order
    else:
        wanted = total * _shares(weights, len(sizes))
        quotas = np.floor(wanted).astype(np.int64)
        first = order[np.argsort((quotas - wanted)[order], kind="stable")]
    quotas[first[: total - quotas.sum()]] += 1
    quotas = np.minimum(quotas, sizes)
    while excess := total - int(quotas.sum()):
        has_room = order[quotas[order] < sizes[order]]
        quotas[has_room[:excess]] += 1
    return quotas.tolist()


def select(
    uncertainty: ArrayLike | Tensor,
    pseudo_labels: ArrayLike | Tensor,
    residuals: ArrayLike | Tensor,
    features: ArrayLike | Tensor,
    anchor_residuals: ArrayLike | Tensor,
    anchor_features: ArrayLike | Tensor,
    anchor_labels: ArrayLike | Tensor,
    budget: int,
    kappa: float = 4,
    *,
    anchor_mode: str = "same_class",
    distance: str = "euclidean",
    class_weights: Sequence[float] | None = None,
) -> Tensor:
    """The query set: min(budget, N) pool positions, ``int64`` ascending (spec 5.7).

    Of the N pool samples: ``uncertainty (N,)``, ``pseudo_labels (N,) int``, ``residuals (N, C)``, ``features (N, D)``;
    of the n labelled ones ``anchor_residuals (n, C)``, ``anchor_features (n, D)``, ``anchor_labels`` (see `Samples`).
    How they are chosen, the options and the errors: `picks_by_class`.
    """
    picks = picks_by_class(
        torch.as_tensor(uncertainty, dtype=torch.float64),
        Samples(torch.as_tensor(residuals), torch.as_tensor(features), torch.as_tensor(pseudo_labels)),
        Samples(torch.as_tensor(anchor_residuals), torch.as_tensor(anchor_features), torch.as_tensor(anchor_labels)),
        budget,
        kappa,
        anchor_mode=anchor_mode,
        distance=distance,
        class_weights=class_weights,
    )
    return torch.cat(picks).sort().values


def picks_by_class(
    uncertainty: Tensor,
    pool: Samples,
    labelled: Samples,
    budget: int,
    kappa: float = 4,
    *,
    anchor_mode: str = "same_class",
    distance: str = "euclidean",
    class_weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """Pool positions by class: C tensors ``(quota_c,) int64``, each in the order in which it was picked (spec 5.7).

    For each class with quota q (`class_quotas`): the max(1, floor(kappa q)) most uncertain samples of its bucket (those
    with that pseudo-label), of which greedy k-center picks q, starting from the labelled samples of that class
    (``anchor_mode="all"``: from all labelled samples); without any, the first pick is the most uncertain. Ties: the
    more uncertain, then the earlier in the pool. A multi-label image anchors each of its labels.

    Distances are those of residual (x) feature (``distance="cosine"``: of these scaled to length 1), computed from the
    factors: no (N, C D) array is formed, memory is O((N + n)(C + D)).

    Raises ValueError for shapes that do not fit, labels outside 0..C-1, kappa below 1, a negative budget, and values
    that are not finite, with the number of samples that have them.
    """
    num_classes = pool.residuals.shape[-1]
    _check("pool", pool, num_classes, pool.features.shape[-1])
    _check("labelled", labelled, num_classes, pool.features.shape[-1])
    require_finite("pool", uncertainty)
    if not uncertainty.shape == pool.labels.shape == pool.residuals.shape[:1]:
        shapes = tuple(uncertainty.shape), tuple(pool.labels.shape)
        raise ValueError(f"expected uncertainty and pseudo-labels ({len(pool.residuals)},), got {shapes}")
    if not kappa >= 1:
        raise ValueError(f"kappa={kappa} gives fewer candidates than picks; it must be at least 1")
    if anchor_mode not in ANCHOR_MODES:
        raise ValueError(f"anchor_mode={anchor_mode!r} is unknown; there are {', '.join(ANCHOR_MODES)}")

    sizes = torch.bincount(pool.labels.long(), minlength=num_classes).tolist()
    quotas = class_quotas(sizes, budget, class_weights)
    by_uncertainty = uncertainty.argsort(descending=True, stable=True)
    buckets = by_uncertainty[pool.labels[by_uncertainty].argsort(stable=True)].split(sizes)
    candidates = [bucket[: int(kappa * quota)] for bucket, quota in zip(buckets, quotas, strict=True)]
    chosen = torch.cat(candidates)
    points = rank_one(pool.residuals[chosen], pool.features[chosen], distance)
    anchors = rank_one(labelled.residuals, labelled.features, distance)
    is_anchor = memberships(labelled.labels, num_classes)
    if anchor_mode == "all":
        is_anchor = torch.ones_like(is_anchor)

    picks = list(candidates)
    starts = np.cumsum([0, *map(len, candidates)])
    pairs = enumerate(zip(candidates, quotas, strict=True))
    for batch in _batches({label: len(found) for label, (found, quota) in pairs if len(found) > quota}):
        sizes = [len(candidates[label]) for label in batch]
        rows = torch.cat([torch.arange(starts[label], starts[label + 1]) for label in batch]).to(chosen.device)
        in_batch = is_anchor[:, batch]
        near = in_batch.any(dim=1)
        of_candidate = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(sizes))
        is_seen = in_batch[near][:, of_candidate] if len(batch) > 1 else None
        group = points.rows(rows)
        nearest = nearest_distances(group, anchors.rows(near), is_seen)
        found = k_centers(group, sizes, [quotas[label] for label in batch], nearest)
        for label, positions in zip(batch, found, strict=True):
            picks[label] = chosen[rows[positions]]
    return picks


def memberships(labels: Tensor, num_classes: int) -> Tensor:
    """Which sample has which label ``(n, C) bool``, of class numbers ``(n,)`` or of labels ``(n, C)`` 1, 0, -1."""
    if labels.ndim == 2:
        return labels == 1
    return labels[:, None] == torch.arange(num_classes, device=labels.device)


def require_labels(labels: Tensor, num_classes: int) -> None:
    """Raises ValueError unless labels are class numbers ``(n,)`` in 0..C-1, or ``(n, C)`` of 1, 0 and -1."""
    if labels.ndim == 2 and labels.shape[1] == num_classes:
        wrong = (labels != 1) & (labels != 0) & (labels != -1)
    elif labels.ndim == 1:
        wrong = (labels < 0) | (labels >= num_classes)
    else:
        raise ValueError(f"labels must be (n,) or (n, {num_classes}), got {tuple(labels.shape)}")
    if bool(wrong.any()):
        found = labels[wrong][0].item()
        raise ValueError(f"{int(wrong.sum())} labels are none of {num_classes} classes, the first is {found}")


def require_finite(name: str, values: Tensor) -> None:
    """Raises ValueError with the number of samples ``(N, ...)`` that have a value that is not finite."""
    if not len(values) or bool(values.sum().isfinite()):  # much quicker than to look at each
        return
    if wrong := int((~values.isfinite()).reshape(len(values), -1).any(dim=1).sum()):
        raise ValueError(f"{wrong} of {len(values)} {name} samples have values that are not finite; leave them out")


def _batches(sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """The classes, in order, as many at a time as have at most `BATCH` candidates, or one alone that has more."""
    batch: list[int] = []
    for label, size in sizes.items():
        if batch and sum(sizes[other] for other in batch) + size > BATCH:
            yield batch
            batch = []
        batch.append(label)
    if batch:
        yield batch


def _check(name: str, samples: Samples, num_classes: int, width: int) -> None:
    residuals, features, labels = samples
    if residuals.shape[1:] != (num_classes,) or features.shape[1:] != (width,) or len(residuals) != len(features):
        raise ValueError(
            f"{name}: expected residuals (N, {num_classes}) and features (N, {width}), got {tuple(residuals.shape)} "
            f"and {tuple(features.shape)}"
        )
    if len(labels) != len(residuals):
        raise ValueError(f"{name}: {len(labels)} labels of {len(residuals)} samples")
    require_finite(name, residuals)
    require_finite(name, features)
    require_labels(labels, num_classes)


def _shares(weights: Sequence[float], num_classes: int) -> np.ndarray:
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (num_classes,) or not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise ValueError(f"class weights must be {num_classes} numbers of at least 0, not all 0, got {weights}")
    return weights / weights.sum()
