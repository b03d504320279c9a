"""Method `incongruent`'s heads: label attention biased by which diseases occur together, and a linear layer.

The project's incongruent specification, section 3.5. Co-occurrence must not act as a cause: the prior only biases who
attends to whom among the labels and is never added to a logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HEADS = ("label_attn", "linear")
MAX_LOG_LIFT = 2.0
MIN_LOG_ODDS = -6.0


def cooccurrence_prior(
    pair_counts: Any, counts: Any, num_examples: float, alpha: float = 10.0, min_count: float = 10.0
) -> Tensor:
    """B_ij = clip(log(P(j | i) / p_j), -2, 2), B_ii = 0, ``(C, C) float64``, from counts over the whole federation.

    ``pair_counts (C, C)``: samples positive for both i and j; ``counts (C,)``: positive for i; arrays or tensors.
    p_j = (N_j + 1) / (N + 2); P(j | i) = (N_ij + alpha p_j) / (N_i + alpha). A pair seen fewer than ``min_count`` times
    counts as independent (N_i p_j). The row of a label without positives is 0. Raises ValueError where counts do not
    fit.

    >>> round(cooccurrence_prior([[100, 50], [50, 100]], [100, 100], 1000)[0, 1].item(), 6)
    1.526135
    """
    pairs, counts = (torch.as_tensor(values, dtype=torch.float64) for values in (pair_counts, counts))
    if counts.ndim != 1 or pairs.shape != (len(counts), len(counts)):
        raise ValueError(
            f"expected pair_counts (C, C) and counts (C,), got {tuple(pairs.shape)}, {tuple(counts.shape)}"
        )
    if not (pairs >= 0).all() or not (counts >= 0).all() or not (counts <= num_examples).all() or alpha <= 0:
        raise ValueError(f"counts must lie between 0 and num_examples={num_examples}, and alpha={alpha} above 0")
    share = (counts + 1) / (num_examples + 2)
    own = counts[:, None]
    pairs = torch.where(pairs < min_count, own * share, pairs)
    given = (pairs + alpha * share) / (own + alpha)
    return (given / share).log().clamp(-MAX_LOG_LIFT, MAX_LOG_LIFT).fill_diagonal_(0)


def prevalence_bias(prevalence: Tensor) -> Tensor:
    """Log-odds of each label's share of positives ``(C,)``, clipped to [-6, 0]: where an untrained head starts."""
    return prevalence.double().logit().clamp(MIN_LOG_ODDS, 0)


class LabelAttentionHead(nn.Module):
    """``f (B, d) -> logits (B, C)``: one token a label, which read each other before each is classified.

    x_c = W_f f + E_c; y = x + MHA(x) with lambda_co B added to the attention scores; logit_c = <w_c, LN(y_c)> + b_c.
    4 heads. B is the buffer ``prior (C, C) float32``, 0 until `initialise_head`; it is in the state dict, so it comes
    down with the head's weights and a site cannot hold another one.
    Choice: no bias in W_f and MHA (E_c and b_c are there; the specification's parameter count says the same), E normal
    with deviation 0.02, w_c as of a linear layer.
    """

    def __init__(self, dim: int, num_labels: int, *, lambda_co: float = 0.5) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(f"the head's width {dim} is not divisible by its 4 heads")
        self.lambda_co = lambda_co
        self.project = nn.Linear(dim, dim, bias=False)
        self.labels = nn.Parameter(0.02 * torch.randn(num_labels, dim))
        self.attention = nn.MultiheadAttention(dim, 4, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.weight = nn.Parameter((2 * torch.rand(num_labels, dim) - 1) * dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_labels))
        self.register_buffer("prior", torch.zeros(num_labels, num_labels))

    def forward(self, features: Tensor) -> Tensor:
        tokens = self.project(features)[:, None] + self.labels  # (B, C, d)
        bias = (self.lambda_co * self.prior).to(tokens.dtype)
        read, _ = self.attention(tokens, tokens, tokens, attn_mask=bias, need_weights=False)
        return (self.norm(tokens + read) * self.weight).sum(dim=2) + self.bias


def build_head(name: str, dim: int, num_labels: int, *, lambda_co: float = 0.5) -> nn.Module:
    """The head by name, ``label_attn`` or ``linear`` (logits W f + b). Raises ValueError for another name."""
    if name not in HEADS:
        raise ValueError(f"head={name!r} is unknown; there are {', '.join(HEADS)}")
    return (
        LabelAttentionHead(dim, num_labels, lambda_co=lambda_co) if name == "label_attn" else nn.Linear(dim, num_labels)
    )


@torch.no_grad()
def initialise_head(head: nn.Module, prevalence: Tensor, prior: Tensor | None = None) -> None:
    """Sets a head's bias from the labels' global prevalence ``(C,)`` and, where it has one, its prior ``(C, C)``."""
    head.bias.copy_(prevalence_bias(prevalence))
    if prior is not None and isinstance(head, LabelAttentionHead):
        head.prior.copy_(prior)
