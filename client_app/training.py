"""Local training: batches, optimiser, one loop. Methods give it a network and, where they differ, two small hooks."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from client_app.site import Site
from datasets.records import Split
from datasets.transforms import Normalisation, random_crop, random_flip, to_input
from federation import seeding, wire
from federation.settings import Settings
from models.losses import LOSSES
from models.networks import build_network

Modules = dict[str, dict[str, Tensor]]


class Diverged(ArithmeticError):
    """Training gave a loss that is not finite. The site sends no update."""


class Withheld(RuntimeError):
    """A check of the site's own keeps its update back; why is for the site's log only."""


@dataclass(frozen=True)
class Job:
    """What one message asks of a site: the settings, the round, the server's further config, and where to compute."""

    settings: Settings
    server_round: int
    last_accepted: int
    config: Mapping[str, int | float | str]
    device: torch.device
    precision: torch.dtype | None = None


@dataclass(frozen=True)
class Update:
    """What training gives back. ``modules``: the change of every trained tensor (integer buffers: their new value).

    ``extra``: the numbers that the site half declares in ``TRAIN_EXTRA``.
    """

    modules: Modules
    num_examples: int
    loss_sum: float
    num_steps: int
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Fit:
    """How a local training went. ``loss_sum``: over the samples of the last epoch, the loss of their batch."""

    num_examples: int = 0
    loss_sum: float = 0.0
    num_steps: int = 0
    losses: list[float] = field(default_factory=list)

    def update(self, modules: Modules, extra: Mapping[str, float] | None = None) -> Update:
        """These changes as what the site sends, with how the training went."""
        return Update(modules, self.num_examples, self.loss_sum, self.num_steps, dict(extra or {}))


Build = Callable[[tuple[str, ...], Settings], nn.Module]
"""A site half's ``build``: label names and settings to the method's network, weights from torch's generator."""


def network_for(labels: tuple[str, ...], settings: Settings) -> nn.Module:
    """The configured network; its initial weights come from torch's current generator."""
    return build_network(settings.model.name, num_labels=len(labels), **settings.network_shape())


def on_meta(labels: tuple[str, ...], settings: Settings, build: Build = network_for) -> nn.Module:
    """A network without memory or random draws, for its names, shapes and dtypes."""
    with torch.device("meta"):
        return build(labels, settings)


_blueprint = functools.lru_cache(maxsize=4)(on_meta)
"""The network of a run that `received_network` copies: building its layers takes longer than a small site's step."""


def received_network(site: Site, modules: Modules, job: Job, build: Build = network_for) -> Any:
    """The method's network with the weights of the received module ``model``, which is not written to.

    Built without drawing initial weights first: for ResNet-18 that would cost more than a small site's epoch. Raises
    WireError where it does not fit.
    """
    network = copy.deepcopy(_blueprint(site.data.labels, job.settings, build))
    try:
        network.to_empty(device="cpu").load_state_dict(modules["model"], strict=True)
    except (KeyError, RuntimeError) as error:
        raise wire.WireError("the received module 'model' does not fit this site's network") from error
    return network


def change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """After minus before for float tensors, the new value for integer buffers."""
    return {
        name: (value.cpu() - before[name].cpu() if value.is_floating_point() else value.cpu().clone())
        for name, value in after.items()
    }


def usable(split: Split) -> np.ndarray:
    """Rows with at least one known label, ``(n,) int64``: the others teach nothing."""
    return np.flatnonzero((split.targets >= 0).any(axis=1))


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled positions in batches. A last batch of one is joined to the one before: BatchNorm cannot train on one."""
    order = torch.randperm(count, generator=generator)
    ends = [*range(size, count, size), count]
    if len(ends) > 1 and ends[-1] - ends[-2] == 1:
        del ends[-2]
    start = 0
    for end in ends:
        yield order[start:end]
        start = end


def optimiser_for(network: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """A fresh optimiser over the trainable parameters: no momentum is carried from round to round."""
    area = settings.training
    parameters = [value for value in network.parameters() if value.requires_grad]
    if area.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=area.lr, momentum=area.momentum, weight_decay=area.weight_decay)
    return torch.optim.AdamW(parameters, lr=area.lr, weight_decay=area.weight_decay)


def fit(
    network: nn.Module,
    site: Site,
    job: Job,
    *,
    rows: np.ndarray | None = None,
    load: Callable[[np.ndarray, torch.Generator], tuple[Tensor | None, ...]] | None = None,
    objective: Callable[..., Tensor] | None = None,
    optimiser: torch.optim.Optimizer | None = None,
    penalty: Callable[[], Tensor] | None = None,
    after_step: Callable[[], None] | None = None,
    epochs: int | None = None,
    clip: float = 0.0,
) -> Fit:
    """Trains a network in place on the site's training split.

    ``rows``: samples to train on (default `usable`); ``load``: what of them the objective takes (default `load_batch`);
    ``objective``: scalar of a batch on the job's device (default `batch_loss` of ``(images, targets)``); ``optimiser``
    over the network's parameters (default `optimiser_for`). ``penalty`` is added to every batch's loss (FedProx);
    ``after_step`` runs after every optimiser step (SCAFFOLD). ``epochs``: default ``training.epochs``; ``clip``: the
    gradient's largest L2 norm, 0 for none. A site with one sample trains with BatchNorm in evaluation mode. Raises
    Diverged.
    """
    area, split = job.settings.training, site.data.splits["train"]
    normalise = job.settings.model.normalise
    rows = usable(split) if rows is None else rows
    load = load or (lambda picked, generator: load_batch(split, picked, area.augment, generator, normalise))
    network.to(job.device).train()
    if len(rows) == 1:
        freeze_batch_norm(network)
    optimiser = optimiser or optimiser_for(network, job.settings)
    objective = objective or (
        lambda images, targets: batch_loss(network, images, targets, site.data.task, job.precision)
    )
    result = Fit(num_examples=len(rows))
    draws = seeding.generator(job.settings.seed, "batches", job.server_round, site.name)
    with seeding.scope(job.settings.seed, "training", job.server_round, site.name):
        for _ in range(epochs or area.epochs):
            result.losses = []
            for picked in batches(len(rows), area.batch_size, draws):
                loaded = load(rows[picked.numpy()], draws)
                loss = objective(*(None if part is None else part.to(job.device) for part in loaded))
                optimiser.zero_grad(set_to_none=True)
                (loss if penalty is None else loss + penalty()).backward()
                if clip:
                    nn.utils.clip_grad_norm_(network.parameters(), clip)
                optimiser.step()
                if after_step is not None:
                    after_step()
                result.losses.append(float(loss.detach()) * len(picked))
                result.num_steps += 1
    result.loss_sum = math.fsum(result.losses)
    weights = [float(torch.linalg.vector_norm(value.detach().double())) for value in network.parameters()]
    if not math.isfinite(result.loss_sum + math.fsum(weights)):
        raise Diverged(
            f"round {job.server_round} gave a loss of {result.loss_sum} or infinite weights; lower training.lr"
        )
    return result


def load_batch(
    split: Split, rows: np.ndarray, augment: str, draws: torch.Generator, normalise: Normalisation = "half"
) -> tuple[Tensor, Tensor]:
    """Pixels as network input ``(B, ch, H, W) float32`` and targets ``(B, C) int8``; augmented by the draws given.

    ``normalise``: the run's ``model.normalise``.
    """
    images = torch.from_numpy(np.ascontiguousarray(split.images[rows]))
    if augment in ("flip", "crop_flip"):
        images = random_flip(images, draws)
    if augment == "crop_flip":
        images = random_crop(images, draws, padding=max(1, images.shape[1] // 8))
    return to_input(images, normalise=normalise), torch.from_numpy(split.targets[rows])


def batch_loss(network: nn.Module, images: Tensor, targets: Tensor, task: str, precision: torch.dtype | None) -> Tensor:
    """The training objective of a batch, a float32 scalar; autocast covers the network only.

    The sum over known entries, divided by all entries (multilabel) or samples (multiclass) of the batch. Choice:
    dividing by the known entries instead would let a site that records one label of fifteen pull fifteen times as hard
    on it; so a known entry weighs the same at every site, as it would in one pooled data set.
    """
    with torch.autocast(images.device.type, precision, enabled=precision is not None):
        logits = network(images)
    total, _ = LOSSES[task](logits, targets)
    return total / (targets.numel() if task == "multilabel" else len(targets))


def freeze_batch_norm(network: nn.Module) -> None:
    """BatchNorm layers use and keep their running statistics."""
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
