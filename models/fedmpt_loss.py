"""The asymmetric loss of FedMPT, on probabilities (spec S8)."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-6


def asymmetric_loss_probabilities(
    p: Tensor,
    targets: Tensor,
    known: Tensor | None = None,
    gamma_pos: float = 1.0,
    gamma_neg: float = 2.0,
    clip: float = 0.05,
) -> Tensor:
    """Minus the SUM over known entries of y (1-p)^gamma_pos log p + (1-y) q^gamma_neg log(1-q), a scalar (spec S8).

    q = max(p - clip, 0), logarithms of at least 1e-6, focusing factors without gradient. ``p (B, C)`` in [0, 1],
    ``targets (B, C)`` 0 or 1, ``known (B, C)`` bool, None where all are: what stands at an unknown entry is never read.
    0 without a known entry. The caller multiplies by ``loss_weight`` (D 0.02); the sum makes the step grow with the
    batch, as in the authors' code. Raises ValueError where the shapes differ.

    >>> asymmetric_loss_probabilities(torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 0]]))
    tensor(0.4676)
    """
    known = torch.ones_like(p, dtype=torch.bool) if known is None else known.bool()
    if targets.shape != p.shape or known.shape != p.shape:
        raise ValueError(
            f"p {tuple(p.shape)}, targets {tuple(targets.shape)} and known {tuple(known.shape)} must agree"
        )
    p = p if p.dtype == torch.float64 else p.float()
    p = torch.where(known, p, 0.5)
    q = (p - clip).clamp(min=0)
    present = (1 - p.detach()) ** gamma_pos * p.clamp(min=SMALLEST).log()
    absent = q.detach() ** gamma_neg * (1 - q).clamp(min=SMALLEST).log()
    return -torch.where(known, torch.where(targets == 1, present, absent), 0.0).sum()
