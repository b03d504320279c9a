"""Losses of the baselines. Unknown labels have zero gradient; every loss is computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

UNKNOWN = -1


def masked_bce(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Binary cross-entropy with logits, summed over known entries, and their number.

    ``logits (B, C)``, ``targets (B, C)`` with 1 present, 0 absent, -1 unknown. An unknown entry adds nothing to the
    sum, to the number or to the gradient. Uses softplus: no logarithm of a rounded sigmoid.
    """
    known = targets != UNKNOWN
    wanted = targets.clamp(min=0).float()
    losses = F.softplus(logits.float()) - logits.float() * wanted
    return torch.where(known, losses, losses.new_zeros(())).sum(), int(known.sum())


def masked_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy of one-label samples, summed over samples whose label is known, and their number.

    ``logits (B, C)``, ``targets (B, C)`` one-hot; a row without a 1 is unknown and has zero gradient.
    """
    known = (targets == 1).any(dim=1)
    classes = torch.where(known, targets.argmax(dim=1), -100)
    return F.cross_entropy(logits.float(), classes, ignore_index=-100, reduction="sum"), int(known.sum())


LOSSES = {"multilabel": masked_bce, "multiclass": masked_cross_entropy}
"""Loss by task: ``(logits, targets) -> (sum, number of entries)``."""


def probabilities(logits: Tensor, task: str) -> Tensor:
    """Scores in [0, 1] ``(B, C) float32``: sigmoid for multilabel, softmax for multiclass."""
    return torch.sigmoid(logits.float()) if task == "multilabel" else torch.softmax(logits.float(), dim=1)


def proximal_term(network: torch.nn.Module, reference: dict[str, Tensor], mu: float) -> Tensor:
    """mu / 2 * ||w - w_global||^2 over the parameters (FedProx, Li et al. 2020, objective h_k of section 3.2)."""
    squares = [(value - reference[name]).square().sum() for name, value in network.named_parameters()]
    return 0.5 * mu * torch.stack(squares).sum()
