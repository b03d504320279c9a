"""FedMPT's trained part around a frozen CLIP, built alike at server and sites; and the way from pixels to logits.

See `models.fedmpt` for the method. ``official_v1`` gives the scores of the authors' first code on the same patches.
Choice: without that code's visual prompt, whose second pass through the image tower would need the pictures in every
step, and with tokens of its own for every condition; so its prompts are all that is trained.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.clip import Clip, load_clip, patch_features, prepare_images
from models.fedmpt import FedMPTNetwork, build_fedmpt, frozen_sha256, prompt_tokens, transport_maps
from models.fedmpt_v1 import official_v1_logits

PAPER, OFFICIAL_V1 = "paper", "official_v1"
SMALLEST = 1e-6
BAR_ROWS, BAR_COLUMNS = 8, 64


@functools.lru_cache(maxsize=1)
def opened_clip(folder: Path, sha256: str = "") -> Clip:
    """The CLIP of a folder, once a process; on the CPU, whatever torch's default device is. Raises as `load_clip`.

    Towers draw weights before theirs are read: torch's generator is as before afterwards, or what is drawn next would
    depend on whether this process had opened the CLIP already.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return load_clip(folder, sha256)


class OfficialV1(FedMPTNetwork):
    """The first code's logits of patches, as probabilities; only the prompts are trained."""

    def forward(self, patches: Tensor, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Probabilities ``(B, C)`` of patches ``(B, M, D)`` and text ``(N, C, D)``; there are no intermediates."""
        logits = official_v1_logits(patches, text.flatten(0, 1), len(text), self.head.tau)
        return logits.sigmoid(), {}


def fedmpt_network(
    clip: Clip, labels: Sequence[str], *, conditions: Sequence[str], variant: str = PAPER, **options: Any
) -> FedMPTNetwork:
    """The trained part with its ``frozen_sha256``, on the CPU; random starts from torch's current generator.

    ``options``: of `models.fedmpt.build_fedmpt`. Raises ValueError for names, conditions or sizes that make no prompt.
    """
    with torch.device("cpu"):
        tokens = prompt_tokens(
            conditions, labels, options.get("beta_cond", 4), options.get("beta_cls", 4), clip.tokenizer
        )
        if variant == OFFICIAL_V1:
            options |= {"rank": 0, "gate": "uniform"}
        network = build_fedmpt(
            conditions, labels, tokenizer=clip.tokenizer, embeddings=clip.embeddings.cpu(), dim=clip.dim, **options
        )
        if variant == OFFICIAL_V1:
            network = OfficialV1(tokens, network.prompt, network.head)
        network.frozen_sha256 = frozen_sha256(conditions, labels, tokens, clip.sha256)
    return network


def logits_of(probabilities: Tensor) -> Tensor:
    """Logits whose sigmoid is the probability, cut to +-13.8, for what is made for logits (losses, histograms)."""
    return probabilities.float().logit(SMALLEST)


class PixelClassifier(nn.Module):
    """The whole model from pixels to logits, for who wants a picture's scores or maps outside of a federation.

    Its state is that of the trained part; CLIP is no part of it.
    """

    def __init__(self, clip: Clip, network: FedMPTNetwork) -> None:
        super().__init__()
        self.prompt, self.head = network.prompt, network.head
        self.parts = (clip, network)  # a tuple, so that neither is a submodule
        self.frozen_sha256 = network.frozen_sha256

    def to_empty(self, *, device: Any, recurse: bool = True) -> PixelClassifier:
        """The model on the device with its content: the frozen token rows are in no state dict and cannot be empty."""
        return self.to(device)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, C)`` of pixels ``(B, 1 or 3, H, W) float32`` from -1 to 1."""
        return logits_of(self.explained(images)[0])

    def explained(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Probabilities ``(B, C)`` of such pixels, and how they came about, see `models.fedmpt_head.FedMPTHead`."""
        clip, network = self.parts
        pixels = (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        patches = patch_features(clip, prepare_images(clip, pixels))
        return network(patches, network.text_features(clip.model))

    def maps(self, images: Tensor, label: int) -> dict[str, Tensor]:
        """By title, each ``(B, H, W)``: where a label's mass comes from, and how much each condition says.

        The gate's map is a bar chart: one bar a condition, from the top in their order, as long as its weight. Nothing
        for the first code's scores, which have no transport.
        """
        clip, _ = self.parts
        _, found = self.explained(images)
        if "gate" not in found:
            return {}
        plans = transport_maps(found["plan"], found["gate"])[:, label].unflatten(1, clip.grid)
        columns = torch.arange(BAR_COLUMNS, device=images.device) < (BAR_COLUMNS * found["gate"][:, :, None]).round()
        bars = columns.float().repeat_interleave(BAR_ROWS, dim=1)
        bars[:, ::BAR_ROWS] = 0  # a line between two bars
        return {"transport": plans, "gate": bars}
