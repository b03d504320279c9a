"""The classification loss of Incongruent: asymmetric, weighted by label, trusted by source (spec 4.1).

The formulas are those of the project's incongruent specification, section 4.1, there after Ridnik et al., "Asymmetric
Loss for Multi-Label Classification", ICCV 2021, and the authors' code. `incongruent_losses` has the other terms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCES = ("reviewed", "auto", "unknown")
"""Where a sample's labels come from: a reader, a program that reads reports, or nobody knows."""
SOURCE_TRUST = {"reviewed": 1.0, "auto": 0.7, "unknown": 0.5}
"""Weight of a sample in `asymmetric_loss` by label source (spec 4.1)."""
SOURCE_SMOOTHING = {"reviewed": (0.0, 0.0), "auto": (0.0, 0.05), "unknown": (0.02, 0.05)}
"""(eps_pos, eps_neg) by label source (spec 4.1). Negatives give way more: what no report mentions may be there."""


def wide(values: Tensor) -> Tensor:
    """The values in float32, or in float64 where they are that already."""
    return values if values.dtype == torch.float64 else values.float()


def check_shape(name: str, values: Tensor, expected: tuple[int, ...] | torch.Size) -> None:
    """Raises ValueError where a tensor has another shape than it should."""
    if tuple(values.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {tuple(expected)}")


def asymmetric_elements(
    logits: Tensor,
    targets: Tensor,
    known: Tensor,
    *,
    gamma_pos: float = 1.0,
    gamma_neg: float = 4.0,
    shift: float = 0.05,
    class_weights: Tensor | None = None,
    pos_weight_only: bool = False,
    eps_pos: float | Tensor = 0.0,
    eps_neg: float | Tensor = 0.0,
    detach_focus: bool = True,
) -> Tensor:
    """Asymmetric loss of every entry ``(B, C)``, 0 where the label is not known (Ridnik et al. 2021, spec 4.1).

    w_c [y (1 - p)^gamma_pos (-log p) + (1 - y) q^gamma_neg (-log(1 - q))] with p = sigmoid(x), q = max(p - shift, 0)
    and the label smoothed by its source, y <- y (1 - eps_pos) + (1 - y) eps_neg.

    ``logits``, ``targets``, ``known`` ``(B, C)``; what stands at an unknown entry (-1, nan) is never read.
    ``class_weights (C,)``: `class_weights`, or `positive_weights` with ``pos_weight_only``, which leaves the negative
    term alone. ``eps_pos``, ``eps_neg``: a number, or one of each sample ``(B,)``. ``detach_focus``: no gradient
    through the focusing factors. Raises ValueError where the shapes differ.

    Choice: the sum of two terms also for soft labels; the authors of the loss use one exponent, gamma_pos y + gamma_neg
    (1 - y), which is the same for hard labels only.
    """
    check_shape("targets", targets, logits.shape)
    check_shape("known", known, logits.shape)
    known = known.bool()
    logits = torch.where(known, wide(logits), 0.0)
    labels = torch.where(known, targets.to(logits.dtype), 0.0)
    labels = labels * (1 - _column(eps_pos)) + (1 - labels) * _column(eps_neg)

    # log(1 - q) = log(sigmoid(-x) + shift), at most 0: no logarithm of a rounded probability, also at shift 0
    log_present, log_above = F.logsigmoid(logits), F.logsigmoid(-logits)
    log_absent = torch.logaddexp(log_above, logits.new_tensor(shift).log()).clamp(max=0)
    focus_present = (gamma_pos * log_above).exp()
    focus_absent = (logits.sigmoid() - shift).clamp(min=0) ** gamma_neg
    if detach_focus:
        focus_present, focus_absent = focus_present.detach(), focus_absent.detach()

    present, absent = labels * focus_present * -log_present, (1 - labels) * focus_absent * -log_absent
    if class_weights is not None:
        weights = class_weights.to(logits)
        present, absent = present * weights, absent if pos_weight_only else absent * weights
    return torch.where(known, present + absent, 0.0)


def asymmetric_loss(
    logits: Tensor,
    targets: Tensor,
    known: Tensor,
    *,
    gamma_pos: float = 1.0,
    gamma_neg: float = 4.0,
    shift: float = 0.05,
    trust: Tensor | None = None,
    class_weights: Tensor | None = None,
    pos_weight_only: bool = False,
    eps_pos: float | Tensor = 0.0,
    eps_neg: float | Tensor = 0.0,
    detach_focus: bool = True,
) -> Tensor:
    """Mean of `asymmetric_elements` over the known entries, weighted by the ``trust (B,)`` of each sample (spec 4.1).

    Choice: a mean, where the authors of the loss take the sum: the step must not grow with the batch. With gammas and
    shift 0 it is the binary cross-entropy.

    >>> asymmetric_loss(torch.zeros(1, 2), torch.tensor([[1, 0]]), torch.tensor([[True, False]]))
    tensor(0.3466)
    """
    elements = asymmetric_elements(
        logits,
        targets,
        known,
        gamma_pos=gamma_pos,
        gamma_neg=gamma_neg,
        shift=shift,
        class_weights=class_weights,
        pos_weight_only=pos_weight_only,
        eps_pos=eps_pos,
        eps_neg=eps_neg,
        detach_focus=detach_focus,
    )
    weights = known.to(elements.dtype)
    if trust is not None:
        check_shape("trust", trust, logits.shape[:1])
        weights = weights * trust.to(elements)[:, None]
    return (weights * elements).sum() / weights.sum().clamp(min=1e-8)


def class_weights(counts: Tensor, beta: float = 0.999) -> Tensor:
    """Weights by the effective number of examples ``(C,) float64`` (Cui et al. 2019, spec 4.1).

    (1 - beta) / (1 - beta^n), divided by its mean over the labels with a positive, cut to [0.2, 5]; 1 for a label
    without one. ``counts (C,)``: positives of the whole federation, at least 0. Raises ValueError otherwise.
    """
    counts = _positives(counts)
    if not 0 < beta < 1:
        raise ValueError(f"beta is {beta}, expected a number between 0 and 1")
    seen = counts > 0
    effective = -torch.expm1(counts * torch.tensor(beta, dtype=torch.float64).log())
    raw = torch.where(seen, (1 - beta) / torch.where(seen, effective, 1.0), 0.0)
    mean = raw.sum() / seen.sum().clamp(min=1)
    return torch.where(seen, (raw / mean).clamp(0.2, 5.0), 1.0)


def positive_weights(counts: Tensor, num_examples: int | Tensor) -> Tensor:
    """Weights of the positive term ``(C,) float64``: sqrt((N - n) / n), cut to [1, 20] (spec 4.1, ``pos_weight``).

    ``counts (C,)``: positives n of the whole federation; ``num_examples``: N, one number or the known ones of each
    label ``(C,)``. 1 for a label without a positive. Raises ValueError where n exceeds N.
    """
    counts = _positives(counts)
    absent = torch.as_tensor(num_examples, dtype=torch.float64, device=counts.device) - counts
    if bool((absent < 0).any()):
        raise ValueError(f"{counts.tolist()} positives of {num_examples} examples: a label has more than there are")
    seen = counts > 0
    return torch.where(seen, (absent / torch.where(seen, counts, 1.0)).sqrt().clamp(1.0, 20.0), 1.0)


def _column(values: float | Tensor) -> float | Tensor:
    return values[:, None] if isinstance(values, Tensor) else values


def _positives(counts: Tensor) -> Tensor:
    counts = counts.double()
    if bool((counts < 0).any()):
        raise ValueError(f"counts are {counts.tolist()}; a number of positives is at least 0")
    return counts
