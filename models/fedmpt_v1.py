"""The scores of the authors' first FedMPT code, a baseline: no transport, no adapters, no learned gate (spec 2).

Only the arithmetic from features to logits; its defects are kept, since the published numbers may come from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE, GAIN, SMALLEST_STD = 20.0, 5.0, 1e-5


def official_v1_logits(tokens: Tensor, text: Tensor, num_conditions: int, temperature: float = 1.0) -> Tensor:
    """Logits ``(B, C) float32`` of image tokens ``(B, T, D)`` and text features ``(N * C, D)``, conditions first.

    Tokens are divided by their length over the T tokens, a channel at a time, as the authors do. o = 20 <f, t>, score
    s = 5 sum_t o softmax_t(o / T); z = s standardised over the classes of a condition, gate = softmax over conditions
    of (std / T), logit = mean_n gate_n z_n. ``temperature``: T, 4 in the authors' launcher. Logits stay within about
    0.25 of 0, so sigmoid is near 0.5. Raises ValueError where the rows of ``text`` are no N times C, C >= 2.
    """
    if len(text) % num_conditions or len(text) < 2 * num_conditions:
        raise ValueError(f"text has {len(text)} rows, expected {num_conditions} conditions times at least 2 classes")
    tokens, text = tokens.float(), text.float()
    tokens = tokens / torch.linalg.vector_norm(tokens, dim=1, keepdim=True)
    text = text / torch.linalg.vector_norm(text, dim=1, keepdim=True)
    products = SCALE * tokens @ text.T  # (B, T, N C)
    scores = GAIN * (products * (products / temperature).softmax(dim=1)).sum(dim=1)
    scores = scores.unflatten(1, (num_conditions, -1))
    spread = scores.std(dim=2, keepdim=True)
    standard = (scores - scores.mean(dim=2, keepdim=True)) / (spread + SMALLEST_STD)
    return ((spread / temperature).softmax(dim=1) * standard).mean(dim=1)
