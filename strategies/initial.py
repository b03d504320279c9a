"""The start of a run: the initial weights, and how long they are."""

from __future__ import annotations

from collections.abc import Callable
from logging import WARNING
from pathlib import Path

import numpy as np
import torch
from flwr.supercore import log
from torch import nn

from federation import seeding, wire
from federation.settings import Settings
from models.networks import load_backbone


def seeded(build: Callable[[], nn.Module], settings: Settings) -> nn.Module:
    """A network with seeded initial weights, its backbone from ``model.weights`` where a safetensors file is given.

    Choice: weights without ImageNet's normalisation are warned of and not refused, since those of a run of this project
    expect ``half``.
    """
    with seeding.scope(settings.seed, "initial_weights"):
        network = build()
    if settings.model.weights:
        load_backbone(getattr(network, "backbone", network), Path(settings.model.weights).expanduser())
        if settings.model.normalise == "half":
            log(
                WARNING,
                "model.weights with model.normalise = 'half': ImageNet weights need model.normalise = 'imagenet'",
            )
    return network


def state_norm(state: wire.State) -> float:
    """L2 norm over the float tensors of a module."""
    norms = [float(torch.linalg.vector_norm(value)) for value in state.values() if value.is_floating_point()]
    return float(np.linalg.norm(norms))
