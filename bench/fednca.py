"""FedNCA-ML: train step and inference of its ResNet-18 beside the ResNet-18 of FedAvg, on the same batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.rows import Row, alternate, seconds
from client_app.training import batch_loss
from models.fednca import build_fednca, fednca_loss
from models.fednca_export import FoldedNetwork
from models.networks import resnet18

LABELS = 14
BATCH = 8
REPEATS = {224: 7, 64: 7}
"""Pairs of measurements by image side. At 64 pixels the networks have the stem for small images."""

TRAIN_TARGET, INFERENCE_TARGET = "<= 1.10", "<= 1.05"


def measure() -> list[Row]:
    """Milliseconds an image, ours beside FedAvg's: forward, loss, backward and AdamW; then scores of the same model."""
    rows = []
    for side, repeats in REPEATS.items():
        ours, peer = _networks(side)
        images = torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(0))
        targets = (torch.rand(BATCH, LABELS, generator=torch.Generator().manual_seed(1)) < 0.2).to(torch.int8)
        rows.append(_row(f"train step, {side} px", _step(ours, images, targets), _step(peer, images, targets), repeats))
        ours, peer = ours.eval(), peer.eval()
        folded = FoldedNetwork(ours, tuple(ours.backbone(images[:1]).shape[2:])).eval()
        scores = _scores(peer, images)
        rows.append(_row(f"inference, {side} px", _scores(ours, images), scores, repeats))
        rows.append(_row(f"inference folded, maps included, {side} px", _scores(folded, images), scores, repeats))
    return rows


def _row(what: str, ours: Callable[[], object], peer: Callable[[], object], repeats: int) -> Row:
    per_sample = 1000 / BATCH
    mine, other = alternate(lambda: per_sample * seconds(ours), lambda: per_sample * seconds(peer), repeats)
    target, published = (TRAIN_TARGET, "1.52") if what.startswith("train") else (INFERENCE_TARGET, "1.15")
    note = f"batch {BATCH}, {LABELS} labels, {torch.get_num_threads()} threads; the paper reports {published}"
    return Row(what, "ms/image", mine, "FedAvg, ResNet-18", other, target, note)


def _networks(side: int) -> tuple[nn.Module, nn.Module]:
    ours = build_fednca("resnet18", num_labels=LABELS, channels=3, image_size=side)
    return ours, resnet18(channels=3, num_labels=LABELS, image_size=side)


def _step(network: nn.Module, images: Tensor, targets: Tensor) -> Callable[[], None]:
    """One local training step as the sites do it."""
    optimiser = torch.optim.AdamW(network.train().parameters(), lr=1e-4, weight_decay=0.01)

    def loss() -> Tensor:
        if not hasattr(network, "class_outputs"):
            return batch_loss(network, images, targets, "multilabel", None)
        outputs = network.class_outputs(images)
        return fednca_loss(
            *outputs, targets, network.etf, lambda_neg=1.0, lambda_pos=1.0, axis_aligned=True, validate=False
        )[0]

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss().backward()
        optimiser.step()

    return step


def _scores(network: nn.Module, images: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def score() -> object:
        found = network(images)
        return found if isinstance(found, dict) else found.sigmoid()

    return score
