"""The library of text prototypes in Incongruent: what a site with reports sends, and what the server keeps.

The formulas are those of the project's incongruent specification, sections 4.4 (sender) and 5.6. What a site does with
the prototypes it receives is `incongruent_losses.prototype_loss`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.incongruent_asymmetric import wide
from models.incongruent_losses import unit

MIN_LENGTH = 1e-6
NEVER = -1


class PrototypeLibrary(NamedTuple):
    """The server's prototypes of C labels.

    ``prototypes (C, d) float32``: unit rows, zeros where there never was one. ``ages (C,) int64``: rounds since the
    last refresh, -1 where there was none. ``available (C,) bool``: whether a site may use the row.
    """

    prototypes: Tensor
    ages: Tensor
    available: Tensor


def empty_library(num_labels: int, dim: int) -> PrototypeLibrary:
    """A library without a prototype."""
    return PrototypeLibrary(
        torch.zeros(num_labels, dim),
        torch.full((num_labels,), NEVER),
        torch.zeros(num_labels, dtype=torch.bool),
    )


@torch.no_grad()
def prototype_sums(
    features: Tensor,
    targets: Tensor,
    known: Tensor,
    patients: Tensor,
    min_patients: int = 10,
    sigma: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """A site's sum of text directions by label ``(C, d)``, and which labels it releases ``(C,) bool`` (spec 4.4).

    For each label: over the patients, the mean of u / |Y| over the patient's reports with that label, |Y| the number of
    positives of the report. Below ``min_patients`` patients a label is not released and its row is 0. ``sigma``:
    standard deviation of a Gaussian on every number of a released row, drawn from ``generator``.

    ``features (n, d)`` as projected, ``targets``, ``known`` ``(n, C)``, ``patients (n,) int``, any codes, one row a
    report. The sums run in float64 and have the features' dtype, float32 where that is lower.

    No patient moves the whole table by more than 1 in L2, the sensitivity that ``sigma`` counts on. Choice: the formula
    alone does not give that (two reports, each with one label of its own, move it by sqrt(2)), so a patient's part is
    divided by max(1, b), b^2 = sum over labels of (mean of 1 / |Y|)^2, which bounds its length. A patient with one
    report is never scaled.

    Raises ValueError for ``sigma`` > 0 without a generator.
    """
    if sigma > 0 and generator is None:
        raise ValueError(f"sigma={sigma} needs a generator to draw the noise from")
    directions = unit(features.double())
    positive = (known.bool() & (targets == 1)).double()
    share = positive / positive.sum(dim=1, keepdim=True).clamp(min=1)  # 1 / |Y| at the positives
    codes, patient = patients.unique(return_inverse=True)
    table = positive.new_zeros(len(codes), positive.shape[1])  # patients x labels
    reports = table.index_add(0, patient, positive)
    means = table.index_add(0, patient, share) / reports.clamp(min=1)
    bound = torch.linalg.vector_norm(means, dim=1, keepdim=True).clamp(min=1)
    sums = (share / (reports.clamp(min=1) * bound)[patient]).T @ directions
    if sigma > 0:  # noise for every row, so that the draws of a row do not depend on which others are released
        sums = sums + sigma * torch.randn(sums.shape, generator=generator, dtype=sums.dtype).to(sums.device)
    released = (reports > 0).sum(dim=0) >= min_patients
    return torch.where(released[:, None], sums, 0.0).to(wide(features).dtype), released


@torch.no_grad()
def update_prototypes(
    library: PrototypeLibrary,
    sums: Tensor,
    released: Tensor,
    *,
    min_sites: int = 2,
    momentum: float = 0.9,
    max_age: int = 20,
) -> PrototypeLibrary:
    """The library after a round (spec 5.6); the given one is unchanged.

    A label is refreshed where at least ``min_sites`` sites released it and the total of their sums is not shorter than
    1e-6: first to the total's direction p, later to the direction of momentum * old + (1 - momentum) * p. A prototype
    that was not refreshed for ``max_age`` rounds is not available.

    ``sums (K, C, d)`` and ``released (K, C) bool`` of this round's sites, in the order of their names: float64 sums run
    in that order. K may be 0. Raises ValueError where the shapes do not fit.

    Choice: a prototype that comes back after it was too old is mixed with the old one, as "later" says. Where old and
    new cancel, the old one stays.
    """
    labels, dim = library.prototypes.shape
    if sums.shape[1:] != (labels, dim) or released.shape != sums.shape[:2]:
        raise ValueError(
            f"expected sums (K, {labels}, {dim}) and released (K, {labels}), "
            f"got {tuple(sums.shape)} and {tuple(released.shape)}"
        )
    total = torch.where(released[:, :, None], sums.double(), 0.0).sum(dim=0)
    is_first = library.ages == NEVER
    mixed = momentum * library.prototypes.double() + (1 - momentum) * unit(total)
    fresh = torch.where(is_first[:, None], total, mixed)
    is_long = (torch.linalg.vector_norm(total, dim=1) >= MIN_LENGTH) & (
        torch.linalg.vector_norm(fresh, dim=1) >= MIN_LENGTH
    )
    refreshed = (released.sum(dim=0) >= min_sites) & is_long
    ages = torch.where(refreshed, 0, torch.where(is_first, NEVER, library.ages + 1))
    return PrototypeLibrary(
        torch.where(refreshed[:, None], unit(fresh).to(library.prototypes.dtype), library.prototypes),
        ages,
        (ages != NEVER) & (ages < max_age),
    )
