"""From an image's and a report's features to one feature f, whatever is present: method `incongruent`'s fusion.

The project's incongruent specification, sections 3.3, 3.4 and 3.6. In every function ``present (B, 2)`` says which of
image (column 0) and report (column 1) a sample has; what stands in the features of an absent one, NaN included, changes
neither a result nor a gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.incongruent_asymmetric import SOURCES

FUSIONS = ("gated", "mean", "zero_concat", "attention")
GATES = ("vector", "scalar")
ATTENTION_MASKS = ("full", "s2s", "bar", "non_cross", "mixed")

DROPOUT = 0.1
MIXED_S2S_SHARE = 0.75
CLS, IMAGE, TEXT = 0, 1, 2


def zero_absent(features: Tensor, present: Tensor) -> Tensor:
    """``features (B, ...)`` with zeros in rows where ``present (B,) bool`` is False. NaN * 0 would be NaN."""
    return torch.where(present.view(-1, *[1] * (features.ndim - 1)), features, 0)


def mean_weights(present: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Weights ``(B, 2, dim)`` of the plain average of what is present; 1 and 0 for a lone modality."""
    flags = present.to(dtype)
    return (flags / flags.sum(dim=1, keepdim=True))[:, :, None].expand(-1, -1, dim)


class FusionGate(nn.Module):
    """How much of image and report goes into each dimension: ``z_image, z_text (B, d), present (B, 2) -> (B, 2, d)``.

    softmax over the present modalities of W_g [z_image; z_text; present] + b_g (spec 3.3). A lone modality has weight
    exactly 1 and gives W_g and b_g a gradient of exactly 0. They start at 0: the plain average.
    ``kind="scalar"``: one weight a modality instead of one a dimension.
    """

    def __init__(self, dim: int, kind: str = "vector") -> None:
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"gate={kind!r} is unknown; there are {', '.join(GATES)}")
        self.dim, self.width = dim, dim if kind == "vector" else 1
        self.linear = nn.Linear(2 * dim + 2, 2 * self.width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, z_image: Tensor, z_text: Tensor, present: Tensor) -> Tensor:
        present = present.bool()
        z_image, z_text = zero_absent(z_image, present[:, 0]), zero_absent(z_text, present[:, 1])
        scores = self.linear(torch.cat([z_image, z_text, present.to(z_image.dtype)], dim=1))
        scores = scores.unflatten(1, (2, self.width)).masked_fill(~present[:, :, None], -torch.inf)
        return scores.softmax(dim=1).expand(-1, -1, self.dim)


class PooledFusion(nn.Module):
    """f = LayerNorm(h + W_2 GELU(W_1 [h; present] + b_1) + b_2), ``(B, d)``, of one feature h of both modalities.

    h is the sum of the features by ``weights (B, 2, d)`` (`FusionGate` or `mean_weights`). W_2 and b_2 start at 0.
    ``concat=True`` is `zero_concat`: h is a linear layer on [z_image; z_text], an absent one zero, and weights are not
    used. Choice: the plain average and the concatenation go through the same layers as the gate's sum, so that an
    ablation changes h and nothing else. ``sources=True`` adds a learnt vector of the label source to h, 0 at first.
    """

    def __init__(self, dim: int, *, concat: bool = False, sources: bool = False) -> None:
        super().__init__()
        self.join = nn.Linear(2 * dim, dim) if concat else None
        self.inner = nn.Linear(dim + 2, 2 * dim)
        self.dropout = nn.Dropout(DROPOUT)
        self.outer = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.sources = _source_embedding(dim) if sources else None

    def forward(
        self,
        z_image: Tensor,
        z_text: Tensor,
        present: Tensor,
        weights: Tensor | None = None,
        sources: Tensor | None = None,
    ) -> Tensor:
        present = present.bool()
        z_image, z_text = zero_absent(z_image, present[:, 0]), zero_absent(z_text, present[:, 1])
        if self.join is not None:
            h = self.join(torch.cat([z_image, z_text], dim=1))
        else:
            h = weights[:, 0] * z_image + weights[:, 1] * z_text
        if self.sources is not None:
            h = h + _source_vector(self.sources, sources, len(h))
        inner = self.inner(torch.cat([h, present.to(h.dtype)], dim=1))
        return self.norm(h + self.outer(self.dropout(F.gelu(inner))))


class GatedFusion(nn.Module):
    """Gate and fusion together: ``z_image, z_text (B, d), present (B, 2) -> f (B, d), gate (B, 2, d)`` (spec 3.3).

    The network itself keeps the two apart, because only sites with pairs train the gate. A row with nothing present
    has no meaning here; `IncongruentNetwork` refuses it.
    """

    def __init__(self, dim: int, gate: str = "vector") -> None:
        super().__init__()
        self.gate = FusionGate(dim, gate)
        self.fusion = PooledFusion(dim)

    def forward(self, z_image: Tensor, z_text: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(z_image, z_text, present)
        return self.fusion(z_image, z_text, present, weights), weights


def attention_mask(family: str, image_valid: Tensor, text_valid: Tensor) -> Tensor:
    """Who may read whom, ``(B, L, L) bool``, row reads column, for tokens [CLS, image, text] (spec 3.4).

    ``image_valid (B, n_v)``, ``text_valid (B, n_t) bool``: False for tokens of an absent modality and for padding; such
    tokens are read by nobody and read only themselves.
    ``full``: all read all; ``s2s``: image reads image, text reads image and the text up to itself; ``bar``: s2s, and
    image reads text; ``non_cross``: each modality itself. Choice: CLS reads every valid token and itself; no other
    token reads CLS. (MedViLL's s2s counts CLS to the image, so that a classifier on it would never see the report.)
    """
    device = image_valid.device
    kinds = [CLS] + [IMAGE] * image_valid.shape[1] + [TEXT] * text_valid.shape[1]
    kind = torch.tensor(kinds, device=device)
    place = torch.arange(len(kind), device=device)
    reader, read = kind[:, None], kind[None, :]
    if family == "full":
        allowed = torch.ones(len(kind), len(kind), dtype=torch.bool, device=device)
    elif family == "non_cross":
        allowed = reader == read
    elif family in ("s2s", "bar"):
        allowed = (reader == read) & ((reader != TEXT) | (place[:, None] >= place[None, :]))
        allowed = allowed | ((reader == TEXT) & (read == IMAGE))
        if family == "bar":
            allowed = allowed | ((reader == IMAGE) & (read == TEXT))
    else:
        raise ValueError(f"attention mask {family!r} is unknown; there are full, s2s, bar and non_cross")
    allowed = (reader == CLS) | (allowed & (read != CLS))
    valid = torch.cat([image_valid.new_ones(len(image_valid), 1), image_valid, text_valid], dim=1)
    return (allowed & valid[:, :, None] & valid[:, None, :]) | torch.eye(len(kind), dtype=torch.bool, device=device)


class AttentionFusion(nn.Module):
    """Self-attention over the tokens of both modalities; f is the class token at the end, ``(B, d)`` (spec 3.4).

    ``image_tokens (B, n_v, d)``, ``text_tokens (B, n_t, d)`` with their ``valid (B, n) bool``. A modality embedding is
    added to the tokens; two layers with norms before, 4 heads. ``mask``: see `attention_mask`; ``mixed`` draws for
    every training batch s2s with probability 0.75, else full.
    Choice: feed-forward width 4 d, a norm at the end (usual for norms before), ``mixed`` evaluates with full, and the
    embeddings start normal with deviation 0.02 (BERT's).
    """

    def __init__(self, dim: int, *, mask: str = "full", sources: bool = False) -> None:
        super().__init__()
        if mask not in ATTENTION_MASKS:
            raise ValueError(f"attn_mask={mask!r} is unknown; there are {', '.join(ATTENTION_MASKS)}")
        self.mask, self.num_heads = mask, 4
        self.cls = nn.Parameter(0.02 * torch.randn(dim))
        self.modality = nn.Parameter(0.02 * torch.randn(2, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, self.num_heads, 4 * dim, DROPOUT, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.sources = _source_embedding(dim) if sources else None

    def forward(
        self,
        image_tokens: Tensor,
        image_valid: Tensor,
        text_tokens: Tensor,
        text_valid: Tensor,
        sources: Tensor | None = None,
    ) -> Tensor:
        batch = len(image_tokens)
        cls = self.cls.expand(batch, -1)
        if self.sources is not None:
            cls = cls + _source_vector(self.sources, sources, batch)
        blocks = [
            torch.where(valid[:, :, None], tokens + embedding, 0)
            for tokens, valid, embedding in zip(
                (image_tokens, text_tokens), (image_valid, text_valid), self.modality, strict=True
            )
        ]
        tokens = torch.cat([cls[:, None], *blocks], dim=1)
        hidden = ~attention_mask(self._family(), image_valid, text_valid)
        hidden = hidden.repeat_interleave(self.num_heads, dim=0)  # (B*heads, L, L), as nn.MultiheadAttention wants it
        for layer in self.layers:
            tokens = layer(tokens, hidden)
        return self.norm(tokens[:, 0])

    def _family(self) -> str:
        if self.mask != "mixed":
            return self.mask
        return "s2s" if self.training and float(torch.rand((), device="cpu")) < MIXED_S2S_SHARE else "full"


def imputation_net(dim: int) -> nn.Sequential:
    """MIN: one modality's feature from the other's, W_2 relu(W_1 z + b_1) + b_2, ``(B, d) -> (B, d)`` (spec 3.6)."""
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))


def _source_embedding(dim: int) -> nn.Embedding:
    embedding = nn.Embedding(len(SOURCES), dim)
    nn.init.zeros_(embedding.weight)
    return embedding


def _source_vector(embedding: nn.Embedding, sources: Tensor | None, batch: int) -> Tensor:
    """``(B, d)``; without sources, as at inference, the labels count as reviewed."""
    return embedding.weight[SOURCES.index("reviewed")].expand(batch, -1) if sources is None else embedding(sources)
