"""Contrastive training of a small CLIP, with open_clip's own towers and loss (Radford et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.fedmpt_text import encode_text


def tokenizer_of(model: nn.Module) -> Any:
    """CLIP's tokeniser with the model's context length."""
    from open_clip import SimpleTokenizer

    return SimpleTokenizer(context_length=model.context_length)


def contrastive_loss(model: nn.Module, images: Tensor, ids: Tensor) -> Tensor:
    """`open_clip.ClipLoss` of prepared pictures ``(B, 3, S, S)`` and their token rows ``(B, L) int64``."""
    from open_clip import ClipLoss

    pictures = F.normalize(model.encode_image(images), dim=1)
    return ClipLoss()(pictures, F.normalize(text_features(model, ids), dim=1), model.logit_scale.exp())


def text_features(model: nn.Module, ids: Tensor) -> Tensor:
    """Text features ``(B, D)`` of token rows, computed up to the last end token only, with gradients."""
    return encode_text(model, model.token_embedding(ids), ids.argmax(dim=1), "trimmed")
