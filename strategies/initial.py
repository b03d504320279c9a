"""The start of a run: the initial weights, and how long they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from federation import seeding, wire
from federation.settings import Settings
from models.networks import build_network, load_backbone


def initial_network(labels: tuple[str, ...], settings: Settings) -> nn.Module:
    """The configured network with seeded initial weights, or those of ``model.weights`` (a safetensors file)."""
    model, data = settings.model, settings.data
    with seeding.scope(settings.seed, "initial_weights"):
        network = build_network(
            model.name,
            channels=data.channels,
            num_labels=len(labels),
            image_size=data.image_size,
            width=model.width,
            norm=model.norm,
        )
    if model.weights:
        load_backbone(network, Path(model.weights).expanduser())
    return network


def state_norm(state: wire.State) -> float:
    """L2 norm over the float tensors of a module."""
    norms = [float(torch.linalg.vector_norm(value)) for value in state.values() if value.is_floating_point()]
    return float(np.linalg.norm(norms))
