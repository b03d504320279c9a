"""Priors on inverted images and the arithmetic of patches: smoothness, ids under jitter, how many patches stay.

Every prior gives one number for each group of a batch, ``(G, b, ch, H, W) -> (G,)``: norms run over all images that
were inverted together, so a group's gradient is the same whether it is alone in the batch or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALL, _FIRST, _LAST = slice(None), slice(None, -1), slice(1, None)
_PAIRS = (
    ((..., _ALL, _FIRST), (..., _ALL, _LAST)),
    ((..., _FIRST, _ALL), (..., _LAST, _ALL)),
    ((..., _FIRST, _FIRST), (..., _LAST, _LAST)),
    ((..., _LAST, _FIRST), (..., _FIRST, _LAST)),
)
"""Neighbours to the right, below and along both diagonals, as slices of ``(..., H, W)``."""


def total_variation_l2(images: Tensor) -> Tensor:
    """||d1|| + ||d2|| + ||d3|| + ||d4||, a scalar: differences to the right, down and along both diagonals.

    ``images (B, ch, H, W)``. Each norm runs over the whole batch, so m copies of an image cost sqrt(m) times as much
    (SMI, DeepInversion). A constant image costs 0 and has gradient 0.
    """
    return total_variation_l2_of(images[None]).sum()


def total_variation_l1(images: Tensor) -> Tensor:
    """The sum of the four mean absolute differences, a scalar, for ``images (B, ch, H, W)`` (SMI's TV1)."""
    return total_variation_l1_of(images[None]).sum()


def total_variation_l2_of(groups: Tensor) -> Tensor:
    """`total_variation_l2` of each group ``(G, b, ch, H, W) -> (G,)``."""
    return _TotalVariationL2.apply(groups)


class _TotalVariationL2(torch.autograd.Function):
    """The norms with their gradient, sum of D^T d / ||d||, written out.

    Differentiating four pairs of slices fills and adds eight whole images, which is felt once few patches are alive.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, groups: Tensor) -> Tensor:
        slope, total = torch.zeros_like(groups), groups.new_zeros(len(groups))
        for first, second in _PAIRS:
            difference = groups[first] - groups[second]
            norm = norm_of(difference)
            total += norm
            # A difference of 0 everywhere has norm 0 and slope 0.
            difference /= norm.clamp(min=torch.finfo(norm.dtype).tiny)[:, None, None, None, None]
            slope[first] += difference
            slope[second] -= difference
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return slope * gradient[:, None, None, None, None]


def total_variation_l1_of(groups: Tensor) -> Tensor:
    """`total_variation_l1` of each group ``(G, b, ch, H, W) -> (G,)``."""
    parts = [groups[first] - groups[second] for first, second in _PAIRS]
    return torch.stack([part.abs().mean(dim=(1, 2, 3, 4)) for part in parts]).sum(dim=0)


def norm_of(groups: Tensor) -> Tensor:
    """The 2-norm of each group, ``(G, ...) -> (G,)``; torch's gradient of it at 0 is 0."""
    return torch.linalg.vector_norm(groups.flatten(1), dim=1)


def keep_counts(num_patches: int, ratios: Sequence[float]) -> list[int]:
    """How many patches are left after each stop: int(K (1 - r)) of those still alive, at least 1 (spec 3).

    >>> keep_counts(196, (0.3, 0.3, 0.3, 0.3))
    [137, 95, 66, 46]
    >>> keep_counts(10, (0.9,))  # int(10 * (1 - 0.9)) is 0
    [1]
    """
    counts = []
    for ratio in ratios:
        num_patches = max(1, int(num_patches * (1 - ratio)))
        counts.append(num_patches)
    return counts


def recomputed_count(num_patches: int, ratios: Sequence[float]) -> int:
    """Patches in SMI's mask of the finished image, int((N + 1) prod(1 - r)), at least 1 and at most N (spec 6, D1).

    >>> recomputed_count(196, (0.3, 0.3, 0.3, 0.3))
    47
    """
    return min(num_patches, max(1, int((num_patches + 1) * math.prod(1 - ratio for ratio in ratios))))


def shift_ids(
    ids: Tensor, grid: int, offset_y: int | Tensor, offset_x: int | Tensor, flip: bool | Tensor, patch: int
) -> Tensor:
    """Where patches ``ids (..., n) int64`` are after a roll by pixels and then, with ``flip``, a mirror image.

    ``grid`` patches along one side, ``patch`` pixels each; offsets are down and to the right and wrap around. A shift
    is rounded to whole patches, floor(offset / patch + 1/2). Id 0, the class token, stays. Offsets and flip may be
    tensors that broadcast against ``ids``.
    """
    place = ids - 1
    row = (place // grid + (2 * offset_y + patch) // (2 * patch)) % grid
    column = (place % grid + (2 * offset_x + patch) // (2 * patch)) % grid
    column = column + flip * (grid - 1 - 2 * column)
    return torch.where(ids == 0, 0, row * grid + column + 1)


def pixel_places(
    ids: Tensor,
    grid: int,
    patch: int,
    offset_y: int | Tensor = 0,
    offset_x: int | Tensor = 0,
    flip: bool | Tensor = False,
) -> Tensor:
    """Which pixels of the image are in patches ``ids (B, n)`` of the rolled, then mirrored image.

    Returns places in the flattened image, ``(B, n * patch * patch) int64``, pixels of a patch row by row. Offsets and
    flip are numbers or ``(B, 1)`` tensors. Gathering these costs what the patches hold, where rolling the image would
    cost all of it, and images of one batch may have different jitter.
    """
    side = grid * patch
    place, inner = (ids - 1)[:, :, None], torch.arange(patch * patch, device=ids.device)
    y = place // grid * patch + inner // patch
    x = place % grid * patch + inner % patch
    y, x = y.flatten(1), x.flatten(1)
    x = x + flip * (side - 1 - 2 * x)
    return (y - offset_y) % side * side + (x - offset_x) % side
