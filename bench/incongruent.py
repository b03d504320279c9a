"""incongruent: train step of a batch of pairs, images and reports beside the same batch where everything is there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.rows import Row, alternate, seconds
from models.incongruent import IncongruentNetwork, build_incongruent
from models.incongruent_asymmetric import asymmetric_loss
from models.incongruent_losses import contrastive_loss

LABELS = 14
BATCH = 16
WORDS, VOCAB_SIZE = 58, 8192
"""58 words: 95 % of the Open-I reports are no longer (the project's incongruent specification, section 8)."""
REPEATS = {224: 5, 64: 9}
"""Pairs of measurements by image side. At 64 pixels the networks have the stem for small images."""
TARGET = "<= 0.85"
"""Three quarters of the images and of the reports are there; what is fused and scored is the whole batch."""


def measure() -> list[Row]:
    """Milliseconds a sample: forward, both losses, backward and AdamW, half of a batch pairs against all of it."""
    return [_row(side, repeats) for side, repeats in REPEATS.items()]


def _row(side: int, repeats: int) -> Row:
    mixed, dense = _step(side, _mixed()), _step(side, torch.ones(BATCH, 2, dtype=torch.bool))
    per_sample = 1000 / BATCH
    mine, other = alternate(lambda: per_sample * seconds(mixed), lambda: per_sample * seconds(dense), repeats)
    note = (
        f"batch {BATCH}: half pairs, a quarter images, a quarter reports; ResNet-18, BERT 2x128, {WORDS} words, "
        f"{LABELS} labels, {torch.get_num_threads()} threads"
    )
    return Row(f"train step, {side} px", "ms/sample", mine, "all pairs", other, TARGET, note)


def _mixed() -> Tensor:
    """Which samples have an image and which a report ``(B, 2) bool``, the kinds mixed as in a shuffled batch."""
    kinds = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    return kinds.repeat(BATCH // len(kinds), 1)


def _step(side: int, present: Tensor) -> Callable[[], None]:
    """One local training step on a batch where this much is there."""
    network = _network(side)
    optimiser = torch.optim.AdamW(network.train().parameters(), lr=1e-4, weight_decay=0.01)
    images, tokens, targets = _batch(side)
    known, pairs = torch.ones_like(targets, dtype=torch.bool), present.all(dim=1)
    studies = torch.arange(BATCH)

    def step() -> None:
        seen = network.features(images, tokens, present)
        loss = asymmetric_loss(seen.logits, targets, known, gamma_pos=1.0, gamma_neg=4.0, shift=0.05)
        loss = loss + contrastive_loss(seen.z_image[pairs], seen.z_text[pairs], studies[pairs], targets[pairs])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return step


def _network(side: int) -> IncongruentNetwork:
    return build_incongruent(
        LABELS,
        vision="resnet18",
        text="small",
        vocab_size=VOCAB_SIZE,
        channels=3,
        image_size=side,
    )


def _batch(side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images ``(B, 3, S, S)``, tokens ``(B, L)`` and targets ``(B, C)``, all drawn."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, side, side, generator=draws)
    tokens = torch.randint(3, VOCAB_SIZE, (BATCH, WORDS), generator=draws)
    targets = (torch.rand(BATCH, LABELS, generator=draws) < 0.2).to(torch.int8)
    return images, tokens, targets
