"""Does a model give its training images away when it is inverted? The check at a site before its one upload.

The project's fedmitr specification, section 9. The site inverts its own model briefly and looks at how near the images
are to those it trained on, against images that it kept out. A model that has memorised nothing is as near to the ones
as to the others. Visual dissimilarity proves nothing, and neither does a passed audit: DP-SGD is the formal protection.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MIN_REFERENCES = 10


class Audit(NamedTuple):
    """``closer``: how often (of ``trials``) a synthetic image is nearer to a training image than to any held-out one.

    ``share = closer / trials`` is near 1/2 for a model that has memorised nothing; ``p_value`` is the chance of as
    many or more with a fair coin. ``trained`` and ``held_out (S,) float32`` are the nearest distances (root mean square
    per pixel); they are patients' data and stay at the site.
    """

    closer: int
    trials: int
    share: float
    p_value: float
    trained: Tensor
    held_out: Tensor


def memorisation_audit(
    synthetic: Tensor, training: Tensor, held_out: Tensor, generator: torch.Generator, *, chunk: int = 256
) -> Audit:
    """Compares nearest neighbours of ``synthetic (S, ...)`` in ``training (n, ...)`` and in ``held_out (m, ...)``.

    All are pixels, or features, of one shape. Equal numbers of references are compared, else the larger set would be
    nearer by chance: min(n, m) are drawn from each with ``generator``. Ties are left out. Draw both sets from the same
    patients' population, and no patient in both. Raises ValueError for fewer than 10 references on a side.
    """
    references = min(len(training), len(held_out))
    if references < MIN_REFERENCES or not len(synthetic):
        raise ValueError(
            f"the audit needs synthetic images and at least {MIN_REFERENCES} training and held-out ones; got "
            f"{len(synthetic)}, {len(training)} and {len(held_out)}"
        )
    trained, unseen = (
        _nearest(synthetic, images[torch.randperm(len(images), generator=generator)[:references]], chunk)
        for images in (training, held_out)
    )
    closer, trials = int((trained < unseen).sum()), int((trained != unseen).sum())
    share = closer / trials if trials else 0.5
    return Audit(closer, trials, share, _coin_tail(closer, trials), trained, unseen)


def has_memorised(audit: Audit, *, level: float = 0.01) -> bool:
    """Whether an upload should be refused: nearer to the training images more often than chance allows."""
    return audit.p_value < level


def _nearest(images: Tensor, references: Tensor, chunk: int) -> Tensor:
    """Distance of each image to its nearest reference ``(S,)``, root mean square over the values."""
    flat, others = images.flatten(1).float(), references.flatten(1).float()
    # Squares by matrix product would lose small distances to rounding, and small ones are what is looked for.
    nearest = [
        torch.cdist(part, others, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1).values
        for part in flat.split(chunk)
    ]
    return torch.cat(nearest) / flat.shape[1] ** 0.5


def _coin_tail(heads: int, tosses: int) -> float:
    """The chance of ``heads`` or more in ``tosses`` of a fair coin, exact.

    >>> _coin_tail(2, 2)
    0.25
    """
    return sum(math.comb(tosses, number) for number in range(heads, tosses + 1)) / 2**tosses
