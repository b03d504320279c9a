"""FedMPT: a training step with cached patches and short text rows beside the naive step, on the same batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows import Row, alternate
from federation import seeding
from models.clip import VIT_B_16, Clip, patch_features, random_clip
from models.fedmpt import CONDITIONS, FedMPTNetwork, asymmetric_loss_probabilities, build_fedmpt, sinkhorn

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table", "dog",
    "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip
"""The 20 classes of VOC2007."""
BATCH = 32
REPEATS = 3
TARGET = "<= 0.04, equal to 1e-5"
TOLERANCE = 1e-5


def measure(config: Mapping[str, Any] = VIT_B_16, batch: int = BATCH, repeats: int = REPEATS) -> list[Row]:
    """CPU seconds of one step (features, loss, gradients, SGD), ours beside the naive one; ViT-B/16, random weights.

    Raises ValueError where losses or gradients differ by more than 1e-5 of their size.
    """
    with seeding.scope(0, "clip"):
        clip = random_clip(config)
    with seeding.scope(0, "prompts"):
        network = build_fedmpt(
            CONDITIONS[:5], CLASSES, tokenizer=clip.tokenizer, embeddings=clip.embeddings, dim=clip.dim
        )
        for value in network.head.parameters():  # a fresh adapter is zero and would hide a wrong gradient
            torch.nn.init.normal_(value, std=0.02)
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, clip.image_size, clip.image_size, generator=draws)
    targets = (torch.rand(batch, len(CLASSES), generator=draws) < 0.1).float()
    patches = patch_features(clip, images)
    difference = _difference(
        _gradients(network, clip, patches, targets), _naive_gradients(network, clip, images, targets)
    )
    if difference > TOLERANCE:
        raise ValueError(
            f"loss and gradients differ from the naive step's by {difference:.1e}, at most 1e-5 is allowed"
        )

    ours, peer = alternate(
        lambda: _cpu_seconds(lambda: _step(network, _gradients(network, clip, patches, targets))),
        lambda: _cpu_seconds(lambda: _step(network, _naive_gradients(network, clip, images, targets))),
        repeats,
    )
    note = (
        f"batch {batch}, 5 conditions, {len(CLASSES)} classes; naive: image tower, {clip.model.context_length}-token "
        f"prompts, adapted features built; largest relative difference {difference:.1e}"
    )
    return [Row("training step", "CPU s", ours, "naive step", peer, TARGET, note)]


def _gradients(network: FedMPTNetwork, clip: Clip, patches: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss and the gradient of every trained array, the product's way."""
    probabilities, _ = network(patches, network.text_features(clip.model))
    return _loss_and_gradients(network, probabilities, targets)


def _naive_gradients(network: FedMPTNetwork, clip: Clip, images: Tensor, targets: Tensor) -> list[Tensor]:
    """The same from the formulas as they stand in the specification, nothing cached, trimmed or shared."""
    head = network.head
    patches, text = patch_features(clip, images), network.text_features(clip.model, "full")
    hidden = torch.einsum("nrd,bmd->bnmr", head.adapter.down, patches)
    adapted = patches[:, None] + head.adapter.scale * torch.einsum("ndr,bnmr->bnmd", head.adapter.up, hidden)
    cos = torch.einsum("bnmd,ncd->bnmc", F.normalize(adapted, dim=3, eps=1e-6), F.normalize(text, dim=2, eps=1e-6))
    sim = (head.kappa * cos).softmax(dim=3)
    with torch.no_grad():
        a = (head.kappa * cos.amax(dim=3) / head.tau).softmax(dim=2)
        b = torch.full((len(CLASSES),), 1 / len(CLASSES))
        plan = sinkhorn((1 - sim).flatten(0, 1), a.flatten(0, 1), b, head.ot_reg, head.ot_iters).view_as(sim)
    scores = len(CLASSES) * (plan * sim).sum(dim=2)
    gate = head.gate(patches.mean(dim=1)).softmax(dim=1)
    return _loss_and_gradients(network, (gate[:, :, None] * scores).sum(dim=1).clamp(0, 1), targets)


def _loss_and_gradients(network: FedMPTNetwork, probabilities: Tensor, targets: Tensor) -> list[Tensor]:
    loss = 0.02 * asymmetric_loss_probabilities(probabilities, targets)
    return [loss.detach(), *torch.autograd.grad(loss, list(network.parameters()))]


@torch.no_grad()
def _step(network: FedMPTNetwork, found: list[Tensor]) -> None:
    for value, gradient in zip(network.parameters(), found[1:], strict=True):
        value -= 1e-6 * gradient


def _difference(ours: list[Tensor], naive: list[Tensor]) -> float:
    """The larger relative difference: of the loss, or of the gradient as one vector of all trained numbers.

    Single arrays are not compared: the gate's gradient is a thousandth of the vector, a difference of nearly equal
    scores, and in float32 both ways are 1e-5 of its length away from float64.
    """
    (loss, *gradients), (expected_loss, *expected) = ours, naive
    mine, other = (torch.cat([value.flatten() for value in values]) for values in (gradients, expected))
    return max(float((loss - expected_loss).abs() / expected_loss), float((mine - other).norm() / other.norm()))


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
