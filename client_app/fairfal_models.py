"""The models that a FairFAL query looks through: the received one, and local ones that never leave the site.

The project's fairfal specification, section 5.0; the distilled model is IFAL's (section 11).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.evaluation import EVALUATION_BATCH
from client_app.site import Site
from client_app.training import Diverged, Job, Modules, fit, load_batch, optimiser_for, received_network
from federation import seeding
from federation.settings import Settings
from models.fairfal_networks import FeatureNetwork, build_feature_network

LAST = "last"
"""State name of the model that a site had after its own training in the last round of a cycle."""

ACCURATE = 0.99
MILESTONE, DECAY = 0.75, 0.1
DISTIL_EPOCHS, DISTIL_PATIENCE, DISTIL_LR, DISTIL_T = 500, 5, 1e-3, 4.0


class Seen(NamedTuple):
    """What a model says of n images: ``logits (n, C)``, ``features (n, D)``, float32 on the CPU."""

    logits: Tensor
    features: Tensor

    def rows(self, index: slice | Tensor) -> Seen:
        return Seen(self.logits[index], self.features[index])

    def finite(self) -> Tensor:
        """Which images have only finite values, ``(n,) bool``."""
        return self.logits.isfinite().all(dim=1) & self.features.isfinite().all(dim=1)


def build(labels: tuple[str, ...], settings: Settings) -> FeatureNetwork:
    """The method's network; weights from torch's current generator."""
    return build_feature_network(settings.options.backbone, num_labels=len(labels), **settings.network_shape())


@torch.no_grad()
def seen_by(network: FeatureNetwork, site: Site, job: Job, rows: np.ndarray, num_checked: int | None = None) -> Seen:
    """Logits and features of rows of the training split, evaluation mode, no augmentation, in batches.

    Raises Diverged with the number of images that have a value that is not finite: such a model picks nothing.
    ``num_checked``: only so many, the first, have to be finite; None: all.
    """
    split, unused = site.data.splits["train"], torch.Generator()
    network.to(job.device).eval()
    parts = [(torch.empty(0, len(site.data.labels)), torch.empty(0, network.dim))]
    for start in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[start : start + EVALUATION_BATCH]
        images, _ = load_batch(split, batch, "none", unused, job.settings.model.normalise)
        logits, features = network.outputs(images.to(job.device))
        parts.append((logits.float().cpu(), features.float().cpu()))
    logits, features = (torch.cat(column) for column in zip(*parts, strict=True))
    seen = Seen(logits, features)
    is_bad = ~seen.finite()[:num_checked]
    if bool(is_bad.any()):
        raise Diverged(
            f"{site.name}: the model gives {int(is_bad.sum())} of {len(is_bad)} images values that are not finite"
        )
    return seen


def local_network(site: Site, modules: Modules, job: Job, cycle: int, kind: str) -> FeatureNetwork:
    """The site's own query model, trained on its labelled samples (``site`` is the labelled part).

    ``scratch``: from first weights that all sites share in a cycle (spec 5.0); ``finetune``: from the received model;
    ``last_fl``: the site's model after its training in the cycle's last round, without further training. Choice: a
    site that did not train in that round takes ``scratch``.
    """
    if kind == "last_fl":
        kept = site.load_state(LAST, job.server_round - 1)
        if kept is not None:
            return received_network(site, {"model": kept}, job, build)
    if kind == "finetune":
        network = received_network(site, modules, job, build)
    else:
        with seeding.scope(job.settings.seed, "local_weights", cycle):
            network = build(site.data.labels, job.settings)
    _train_local(network, site, job, cycle)
    return network


def _train_local(network: FeatureNetwork, site: Site, job: Job, cycle: int) -> None:
    """At most ``local_epochs`` epochs, until the training accuracy is 0.99; lr / 10 after int(0.75 epochs) steps.

    Choice: steps, as the authors' scheduler counts; ``local_lr_unit = "epoch"`` is what they will have meant (8-d).
    """
    options = job.settings.options
    optimiser = optimiser_for(network, job.settings)
    milestone, steps = int(options.local_epochs * MILESTONE), 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps == milestone:
            for group in optimiser.param_groups:
                group["lr"] *= DECAY

    for epoch in range(1, options.local_epochs + 1):
        by_step = count if options.local_lr_unit == "step" else None
        fit(network, site, _epoch_job(job, cycle, epoch), epochs=1, optimiser=optimiser, after_step=by_step)
        if by_step is None:
            count()
        if _train_accuracy(network, site, job, cycle, epoch) >= ACCURATE:
            break


def distilled_network(site: Site, modules: Modules, job: Job, cycle: int) -> FeatureNetwork:
    """IFAL's third model: from scratch on the labelled samples, loss 0.1 CE + 0.9 T^2 KL(global || own), T = 4.

    At most 500 epochs, until 5 have passed without a lower loss.
    """
    teacher = received_network(site, modules, job, build).to(job.device).eval()
    with seeding.scope(job.settings.seed, "distilled_weights", cycle):
        network = build(site.data.labels, job.settings)

    def objective(images: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (teacher(images) / DISTIL_T).log_softmax(dim=1)
        logits = network(images)
        found = (logits / DISTIL_T).log_softmax(dim=1)
        divergence = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
        return 0.1 * F.cross_entropy(logits, targets.argmax(dim=1)) + 0.9 * DISTIL_T**2 * divergence

    training = job.settings.training.model_copy(update={"lr": DISTIL_LR})
    job = replace(job, settings=job.settings.model_copy(update={"training": training}))
    optimiser = optimiser_for(network, job.settings)
    best, waited = float("inf"), 0
    for epoch in range(1, DISTIL_EPOCHS + 1):
        done = fit(network, site, _epoch_job(job, cycle, epoch), epochs=1, optimiser=optimiser, objective=objective)
        best, waited = (done.loss_sum, 0) if done.loss_sum < best else (best, waited + 1)
        if waited == DISTIL_PATIENCE:
            break
    return network


def _epoch_job(job: Job, cycle: int, epoch: int) -> Job:
    """A job whose draws are those of one epoch of a local training; negative, so that no round has the same."""
    return replace(job, server_round=-(1000 * cycle + epoch))


@torch.no_grad()
def _train_accuracy(network: FeatureNetwork, site: Site, job: Job, cycle: int, epoch: int) -> float:
    """Share of right answers on the training samples as augmented, evaluation mode; of known labels in multi-label."""
    split, settings = site.data.splits["train"], job.settings
    draws = seeding.generator(settings.seed, "local_accuracy", 1000 * cycle + epoch, site.name)
    load: Callable[..., Any] = functools.partial(
        load_batch, split, augment=settings.training.augment, draws=draws, normalise=settings.model.normalise
    )
    network.eval()
    right = total = 0
    for start in range(0, len(split), EVALUATION_BATCH):
        images, targets = load(np.arange(start, min(start + EVALUATION_BATCH, len(split))))
        logits = network(images.to(job.device)).cpu()
        if site.data.task == "multiclass":
            right, total = right + int((logits.argmax(dim=1) == targets.argmax(dim=1)).sum()), total + len(targets)
        else:
            is_known = targets >= 0
            right += int(((logits > 0) == (targets == 1))[is_known].sum())
            total += int(is_known.sum())
    return right / max(total, 1)
