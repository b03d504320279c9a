"""The sites' models as one teacher: how their logits are weighed, and its outputs on a pool, computed once.

The project's fedmitr specification, section 4. The teachers' outputs do not depend on the student, so they are cached
in float16; models are run one after the other and may be loaded as they are needed, so memory does not grow with the
number of sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.inversion import Inverted, frozen
from models.inversion_terms import shift_ids
from models.vit_tokens import embed, grid_of, patch_of, patch_pixels, read_tokens, subset_logits, take

VIEWS = ("low", "high", "whole", "tokens")


class Teacher(NamedTuple):
    """A site's model and the normalisation ``(ch,)`` that it was trained with."""

    model: nn.Module
    mean: Sequence[float]
    std: Sequence[float]


def ensemble_logits(site_logits: Tensor, weights: Tensor | None) -> Tensor:
    """sum_k w_k z_k / sum_k w_k, ``(K, B, C) -> (B, C)`` (spec 4).

    ``weights``: ``(K,)`` one a site, ``(K, C)`` one a class column (`class_count_weights`), ``(K, B, 1)`` one a sample
    (`label_count_weights`), or None for equal ones. Only their proportions count. Raises ValueError for weights that
    are negative, not finite, of another shape, or that sum to 0.
    """
    if site_logits.ndim != 3:
        raise ValueError(f"site_logits are (K, B, C), got {tuple(site_logits.shape)}")
    weights = site_logits.new_ones(len(site_logits)) if weights is None else weights.to(site_logits)
    shares = _shares(weights)
    spread = shares[:, None, None] if shares.ndim == 1 else shares[:, None] if shares.ndim == 2 else shares
    if len(spread) != len(site_logits):
        raise ValueError(f"weights {tuple(weights.shape)} are of other sites than logits {tuple(site_logits.shape)}")
    return (spread * site_logits).sum(dim=0)


def class_count_weights(counts: Tensor) -> Tensor:
    """W[k, c] = n_k,c / sum_j n_j,c, ``(K, C) float32``; a class that no site has seen gets 1/K (spec 4).

    ``counts (K, C)`` samples by site and class; a suppressed count is 0. Columns sum to 1.
    """
    if counts.ndim != 2 or bool((counts < 0).any()) or not bool(torch.isfinite(counts.float()).all()):
        raise ValueError(f"counts are (K, C) numbers from 0, suppressed ones 0; got shape {tuple(counts.shape)}")
    counts = counts.float()
    total = counts.sum(dim=0, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1e-12), 1 / len(counts))


def label_count_weights(counts: Tensor, labels: Tensor) -> Tensor:
    """W[k, y_b] of each sample ``(K, B, 1) float32`` for ``labels (B,) int64``: the class-level ensemble of FedFTG."""
    return class_count_weights(counts)[:, labels, None]


def normalised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels in [0, 1] ``(B, ch, H, W)`` as a model expects them, float32."""
    images = images.float()
    return (images - images.new_tensor(mean)[:, None, None]) / images.new_tensor(std)[:, None, None]


def mirrored(images: Tensor, ids: Sequence[Tensor], grid: int) -> tuple[Tensor, list[Tensor]]:
    """Mirror images ``(B, ch, H, W)`` and where the patches of each ``(B, n) int64`` list are in them."""
    return images.flip(3), [shift_ids(part, grid, 0, 0, True, 1) for part in ids]


def cached_teacher(
    teachers: Iterable[Teacher],
    weights: Tensor,
    pool: Inverted,
    view: str = "low",
    *,
    flip: bool = True,
    batch_size: int = 256,
) -> Tensor:
    """The ensemble's logits on a pool, ``(V, M, C) float16``: V = 2 with ``flip``, the mirror images second.

    ``view``: what every teacher sees. ``"low"`` or ``"high"``: the class token and those patches only. ``"whole"``: all
    patches. ``"tokens"``: all patches, the head on each low token, ``(V, M, l, C)`` - sensible only where sites
    trained with a loss on tokens (spec 4). ``weights`` as for `ensemble_logits`, with B = M. ``teachers`` is walked
    once: a generator that loads one model at a time keeps memory flat. Sums are float32, in the order given.
    Raises ValueError where the numbers of teachers and weights differ.
    """
    if view not in VIEWS:
        raise ValueError(f"view={view!r} is unknown; there are {', '.join(VIEWS)}")
    shares = _shares(weights)
    total, number = None, 0
    for number, teacher in enumerate(teachers, start=1):
        if number > len(shares):
            raise ValueError(f"there are more teachers than the {len(shares)} weights")
        logits = _on_pool(teacher, pool, view, flip, batch_size)
        share = shares[number - 1].to(logits)
        if view == "tokens" and share.ndim == 2:  # one weight a sample, the same for all its tokens
            share = share[:, None]
        total = share * logits if total is None else total.add_(share * logits)
    if number != len(shares):
        raise ValueError(f"got {number} teachers and {len(shares)} weights; every teacher needs one")
    return total.half()


def _shares(weights: Tensor) -> Tensor:
    """Weights that sum to 1 over the sites."""
    total = weights.sum(dim=0, keepdim=True)
    if bool((weights < 0).any()) or not bool(weights.isfinite().all()) or not bool((total > 0).all()):
        raise ValueError("weights are finite, at least 0, and sum to more than 0 over the sites")
    return weights / total


@torch.no_grad()
def _on_pool(teacher: Teacher, pool: Inverted, view: str, flip: bool, batch_size: int) -> Tensor:
    """One teacher's logits on every image of the pool and, with ``flip``, on every mirror image, float32."""
    device = teacher.model.patch_embed.proj.weight.device
    parts: list[list[Tensor]] = [[] for _ in range(2 if flip else 1)]
    with frozen(teacher.model):
        for rows in torch.arange(len(pool.images)).split(batch_size):
            images = normalised(pool.images[rows].to(device), teacher.mean, teacher.std)
            ids = [pool.low[rows].to(device), pool.high[rows].to(device)]
            parts[0].append(_view(teacher.model, images, *ids, view))
            if flip:
                images, ids = mirrored(images, ids, grid_of(teacher.model))
                parts[1].append(_view(teacher.model, images, *ids, view))
    return torch.stack([torch.cat(part) for part in parts]).float()


def _view(model: nn.Module, images: Tensor, low: Tensor, high: Tensor, view: str) -> Tensor:
    if view == "tokens":
        return take(read_tokens(model, embed(model, patch_pixels(images, patch_of(model))))[1], low - 1)
    return subset_logits(model, images, {"low": low, "high": high, "whole": None}[view])
