"""Does a model give its training images away when it is inverted? The check at a site before its one upload.

The project's fedmitr specification, section 9. The site inverts its own model briefly and looks at how near the images
are to those it trained on, against images that it kept out. A model that has memorised nothing is as near to the ones
as to the others. Visual dissimilarity proves nothing, and neither does a passed audit: DP-SGD is the formal protection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_REFERENCES = 10
PERMUTATIONS = 999


class Audit(NamedTuple):
    """``closer``: how often (of ``trials``) a synthetic image is nearer to a training image than to any held-out one.

    ``share = closer / trials`` is near 1/2 for a model that has memorised nothing; ``p_value`` is the chance of as
    many or more if it made no difference which references were trained on (see `memorisation_audit`). ``trained`` and
    ``held_out (S,) float32`` are the nearest distances (root mean square per pixel); they are patients' data and stay
    at the site.
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
    nearer by chance: min(n, m) are drawn from each with ``generator``. Ties are left out.

    The chance is that of a permutation test: the references are dealt to the two sides again, at random, 999 times. A
    coin toss for each synthetic image would be wrong, for these are alike: where all have the same nearest reference,
    all fall on its side, and one audit in two would cry out over nothing. Draw both sets from the same
    patients' population, and no patient in both. Raises ValueError for fewer than 10 references on a side.
    """
    references = min(len(training), len(held_out))
    if references < MIN_REFERENCES or not len(synthetic):
        raise ValueError(
            f"the audit needs synthetic images and at least {MIN_REFERENCES} training and held-out ones; got "
            f"{len(synthetic)}, {len(training)} and {len(held_out)}"
        )
    picked = [images[torch.randperm(len(images), generator=generator)[:references]] for images in (training, held_out)]
    (trained, from_trained), (unseen, from_unseen) = (_nearest(synthetic, images, chunk) for images in picked)
    counts = trained != unseen
    nearest = torch.where(trained < unseen, from_trained, references + from_unseen)[counts]  # of 2 * references
    closer, trials = int((nearest < references).sum()), int(counts.sum())
    dealt = torch.rand(PERMUTATIONS, 2 * references, generator=generator).argsort(dim=1)
    as_many = (dealt[:, nearest] < references).sum(dim=1) >= closer
    p_value = (1 + int(as_many.sum())) / (1 + PERMUTATIONS)
    return Audit(closer, trials, closer / trials if trials else 0.5, p_value, trained, unseen)


def has_memorised(audit: Audit, *, level: float = 0.01) -> bool:
    """Whether an upload should be refused: nearer to the training images more often than chance allows."""
    return audit.p_value < level


def _nearest(images: Tensor, references: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Distance of each image to its nearest reference ``(S,)``, root mean square over the values, and which it is."""
    flat, others = images.flatten(1).float(), references.flatten(1).float()
    # Squares by matrix product would lose small distances to rounding, and small ones are what is looked for.
    found = [
        torch.cdist(part, others, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1) for part in flat.split(chunk)
    ]
    distances, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    return distances / flat.shape[1] ** 0.5, places
