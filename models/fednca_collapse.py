"""How far the class features have collapsed onto their prototypes: sums that add up, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.fednca_etf import prototype_products

COLLAPSE_NUMBERS = {
    "collapse_within": "real",
    "collapse_between": "real",
    "collapse_cosine": "real",
    "collapse_labels": "count",
}
"""What `collapse_numbers` gives: scalars of a site, which tell nothing of one sample's feature."""


@dataclass(frozen=True)
class CollapseSums:
    """Sums over the positives of each label; those of two batches or sites add with ``+``.

    ``features (C, D)``, ``squares (C,)`` of |h|^2, ``cosines (C,)`` to the own prototype, ``counts (C,)``; float64.
    ``features`` of a label with one positive is that patient's feature: a site sends only what its policy allows.
    """

    counts: Tensor
    features: Tensor
    squares: Tensor
    cosines: Tensor

    def __add__(self, other: CollapseSums) -> CollapseSums:
        return CollapseSums(
            self.counts + other.counts,
            self.features + other.features,
            self.squares + other.squares,
            self.cosines + other.cosines,
        )


@dataclass(frozen=True)
class Collapse:
    """Undefined values are nan. ``cosines (C,) float64``: mean cosine of each label's features to its prototype."""

    within: float
    between: float
    ratio: float
    cosine: float
    cosines: Tensor


@torch.no_grad()
def collapse_sums(class_features: Tensor, targets: Tensor, etf: Tensor) -> CollapseSums:
    """The sums of a batch: ``class_features (B, C, D)``, ``targets (B, C)`` in 1, 0, -1 (only 1 counts), ``etf``."""
    if class_features.shape != (*targets.shape, etf.shape[1]):
        raise ValueError(
            f"features {tuple(class_features.shape)} do not fit targets {tuple(targets.shape)} and "
            f"prototypes {tuple(etf.shape)}"
        )
    present = (targets == 1).double()
    features = class_features.double()
    lengths = torch.linalg.vector_norm(features, dim=2) * torch.linalg.vector_norm(etf.double(), dim=1)
    own = prototype_products(class_features, etf).diagonal(dim1=1, dim2=2).double()
    return CollapseSums(
        counts=present.sum(dim=0),
        features=torch.einsum("bc,bcd->cd", present, features),
        squares=(present * features.square().sum(dim=2)).sum(dim=0),
        cosines=(present * own / lengths.clamp(min=1e-12)).sum(dim=0),
    )


def collapse(sums: CollapseSums) -> Collapse:
    """Within-class and between-class scatter of the positives' class features, their ratio, and the cosines.

    With mu_c the mean feature of label c: within = mean_c mean_i |h_ic - mu_c|^2, between = mean_c |mu_c - mean mu|^2,
    over the labels with two positives or more; ratio = within / between, nan below two such labels. Choice: the ratio
    of traces and not Papyan's tr(S_w S_b^+) / C: it adds up over sites and needs no inverse of a rank C-1 matrix; and
    labels count alike, so that a frequent one does not decide. Full collapse is ratio 0 and cosine 1.
    """
    seen, measured = sums.counts > 0, sums.counts > 1
    means = sums.features / sums.counts.clamp(min=1)[:, None]
    scatter = sums.squares / sums.counts.clamp(min=1) - means.square().sum(dim=1)
    within = scatter[measured].clamp(min=0).mean()  # nan of nothing, which is meant
    between = (means[measured] - means[measured].mean(dim=0)).square().sum(dim=1).mean()
    if int(measured.sum()) < 2:
        between = torch.full_like(between, torch.nan)
    cosines = torch.where(seen, sums.cosines / sums.counts.clamp(min=1), torch.nan)
    return Collapse(
        within=float(within),
        between=float(between),
        ratio=float(within / between) if between > 0 else float("nan"),
        cosine=float(cosines[seen].mean()),
        cosines=cosines,
    )


def collapse_numbers(sums: CollapseSums) -> dict[str, float | int]:
    """`collapse` as plain numbers that can travel; all 0 where fewer than two labels have two positives."""
    labels = int((sums.counts > 1).sum())
    if labels < 2:
        return {"collapse_within": 0.0, "collapse_between": 0.0, "collapse_cosine": 0.0, "collapse_labels": 0}
    found = collapse(sums)
    return {
        "collapse_within": found.within,
        "collapse_between": found.between,
        "collapse_cosine": found.cosine,
        "collapse_labels": labels,
    }
