"""Rules that choose pool samples by a score: random, the uncertainties, two ensembles and KSAS.

Section 11 of the project's fairfal specification. Every rule gives ``(min(budget, N),) int64`` positions in the pool of
N, the most wanted first; ties go to the earlier position. Scores are float64. Rules that compare samples with each
other are in `selection_diverse` and can be imported from here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.selection_diverse import badge, coreset, feal, ifal, logo

__all__ = [
    "badge",
    "coreset",
    "ensemble_logit",
    "ensemble_rank",
    "entropy",
    "feal",
    "ifal",
    "ksas",
    "least_confidence",
    "logo",
    "margin",
    "random",
]

RANK_OFFSET = 20


def random(num_samples: int, budget: int, generator: torch.Generator) -> Tensor:
    """Uniform without replacement."""
    return torch.randperm(num_samples, generator=generator)[:budget]


def entropy(probabilities: Tensor, budget: int) -> Tensor:
    """The largest -sum p log p, 0 log 0 = 0, of ``probabilities (N, C)``."""
    return _largest(torch.special.entr(probabilities.double()).sum(dim=1), budget)


def margin(probabilities: Tensor, budget: int) -> Tensor:
    """The smallest difference between the two largest entries of ``probabilities (N, C)``, C >= 2."""
    top = probabilities.double().topk(2, dim=1).values
    return _largest(top[:, 1] - top[:, 0], budget)


def least_confidence(probabilities: Tensor, budget: int) -> Tensor:
    """The smallest largest entry of ``probabilities (N, C)``."""
    return _largest(-probabilities.double().amax(dim=1), budget)


def ensemble_logit(probabilities_global: Tensor, probabilities_local: Tensor, budget: int) -> Tensor:
    """Ens-Logit: `entropy` of the mean of both models' probabilities ``(N, C)``."""
    return entropy((probabilities_global.double() + probabilities_local.double()) / 2, budget)


def ensemble_rank(probabilities_global: Tensor, probabilities_local: Tensor, budget: int) -> Tensor:
    """Ens-Rank: the largest sum of 1 / (20 + rank) over both models' `entropy` lists, rank from 0 (LoGo's code)."""
    score = torch.zeros(len(probabilities_global), dtype=torch.float64, device=probabilities_global.device)
    for probabilities in (probabilities_global, probabilities_local):
        picks = entropy(probabilities, budget)
        score[picks] += 1 / (RANK_OFFSET + torch.arange(len(picks), device=score.device, dtype=score.dtype))
    return _largest(score, budget)


def ksas(logits_global: Tensor, logits_local: Tensor, class_counts: Tensor, budget: int) -> Tensor:
    """KAFAL's knowledge-specialised sampling (ICCV 2023, arXiv 2211.13579): where the two models disagree most.

    ``logits (N, C)`` get the log of ``class_counts (C,)``, the site's labelled samples; the score is the mean of both
    KL divergences. Choice: classes without a label are left out of both distributions; their log 0 makes the whole
    pool NaN in the source. Raises ValueError without a labelled sample.
    """
    present = class_counts > 0
    if not bool(present.any()):
        raise ValueError("ksas needs at least one labelled sample")
    prior = class_counts[present].double().log()
    first = (logits_global[:, present].double() + prior).log_softmax(dim=1)
    second = (logits_local[:, present].double() + prior).log_softmax(dim=1)
    return _largest(((first.exp() - second.exp()) * (first - second)).sum(dim=1) / 2, budget)


def _largest(scores: Tensor, budget: int) -> Tensor:
    return scores.argsort(descending=True, stable=True)[:budget]
