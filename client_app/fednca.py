"""FedNCA-ML at a site: local training with the three losses around the fixed ETF (arXiv 2509.12544; `models.fednca`).

AdamW starts anew every round, with betas 0.9 and ``fednca.beta2`` and no weight decay on biases (authors' code); with
``training.optimizer = sgd`` the runtime's SGD is used. Only ``model`` travels, with the means of the loss parts; an
evaluation adds four numbers on neural collapse. Attention, features and prototypes stay here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from client_app import evaluation
from client_app.evaluation import EVALUATION_BATCH, Scores
from client_app.site import Site
from client_app.training import (
    Job,
    Modules,
    Update,
    batches,
    change,
    fit,
    load_batch,
    optimiser_for,
    received_network,
    usable,
)
from federation import seeding
from federation.settings import Settings
from models.fednca import (
    LOSS_NUMBERS,
    NETWORK_OPTIONS,
    FedNCANetwork,
    backbone_width,
    build_fednca,
    class_bce,
    fednca_loss,
)
from models.fednca_collapse import COLLAPSE_NUMBERS, collapse_numbers, collapse_sums
from models.fednca_maps import attention_maps, grad_cam

TRAIN_EXTRA = LOSS_NUMBERS
EVALUATION_EXTRA = COLLAPSE_NUMBERS


def build(labels: tuple[str, ...], settings: Settings) -> FedNCANetwork:
    """The network with the site's own ETF.

    For a label list that has no room in the ETF it is one without: the site card then gets through and shows the list,
    and the server, which builds the real one, refuses the run with the numbers instead of "the site's code failed".
    """
    name = settings.options.backbone or settings.model.name
    options = settings.options.model_dump(include=set(NETWORK_OPTIONS))
    if not 2 <= len(labels) <= backbone_width(name, **settings.network_shape()):
        options |= {"head": "linear", "queries": "fixed", "etf_trainable": False}
    return build_fednca(name, num_labels=len(labels), **settings.network_shape(), **options)


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of ``model`` after local training, and the mean of every loss part."""
    network = received_network(site, modules, job, build)
    totals: Counter[str] = Counter()
    optimiser = _optimiser(network, job)
    done = fit(
        network,
        site,
        job,
        objective=_objective(network, site, job, totals),
        optimiser=optimiser,
        after_step=_schedule(optimiser, site, job),
    )
    parts = {name: totals[name] / totals["samples"] for name in LOSS_NUMBERS}
    return done.update({"model": change(modules["model"], network.state_dict())}, parts)


def weights(update: Update, job: Job) -> dict[str, int]:
    """What the server's `weigh` gives, for a secure sum."""
    equal = "equal" in (job.settings.options.aggregation, job.settings.federation.weighting)
    return {"model": 1 if equal else update.num_examples}


def _objective(
    network: FedNCANetwork, site: Site, job: Job, totals: Counter[str]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a batch (spec 2.6); adds its parts to ``totals``. The ablations without features have only BCE."""
    options = job.settings.options
    draws = seeding.generator(job.settings.seed, "rejection", job.server_round, site.name)

    def objective(images: Tensor, targets: Tensor) -> Tensor:
        enabled = job.precision is not None
        with torch.autocast(images.device.type, job.precision, enabled=enabled):
            outputs = network.class_outputs(images) if network.kind == "ladm" else (network(images),)
        totals["samples"] += len(targets)
        if network.kind != "ladm":
            bce = class_bce(outputs[0], targets, targets >= 0)
            totals["bce"] += float(bce.detach().sum())
            return bce.mean()
        loss, parts = fednca_loss(
            *outputs,
            targets,
            network.etf,
            lambda_neg=options.lambda_neg,
            lambda_pos=options.lambda_pos,
            tau=options.tau,
            temperature=options.temperature,
            select=options.rejection_select,
            rejection=options.rejection,
            contrast=options.contrast,
            generator=draws,
            axis_aligned=not options.etf_trainable,
            validate=False,
        )
        for name, values in parts.items():
            totals[name] += float(values.detach().sum())
        return loss

    return objective


def _optimiser(network: FedNCANetwork, job: Job) -> torch.optim.Optimizer:
    area = job.settings.training
    if area.optimizer != "adamw":
        return optimiser_for(network, job.settings)
    named = [(name, value) for name, value in network.named_parameters() if value.requires_grad]
    groups = [
        {"params": [value for name, value in named if "bias" not in name], "weight_decay": area.weight_decay},
        {"params": [value for name, value in named if "bias" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=area.lr, betas=(0.9, job.settings.options.beta2))


def _schedule(optimiser: torch.optim.Optimizer, site: Site, job: Job) -> Callable[[], None] | None:
    """The published script's schedule: a warm-up over int(1.5 L) steps that restarts every round of L steps.

    Step s has lr * s / int(1.5 L), so it never peaks, and with L = 1 nothing is learnt (spec, disagreement 8).
    """
    if job.settings.options.lr_schedule == "constant":
        return None
    area = job.settings.training
    count = len(usable(site.data.splits["train"]))
    steps = area.epochs * sum(1 for _ in batches(count, area.batch_size, torch.Generator()))
    warm_up = max(1, int(1.5 * steps))
    taken = 0

    def set_lr() -> None:
        for group in optimiser.param_groups:
            group["lr"] = area.lr * taken / warm_up

    def after_step() -> None:
        nonlocal taken
        taken += 1
        set_lr()

    set_lr()
    return after_step


@torch.no_grad()
def evaluate(site: Site, modules: Modules, job: Job, split: str) -> Scores:
    """Scores as of any network, with the site's neural-collapse numbers over the positives of the split."""
    network = received_network(site, modules, job, build)
    scores = evaluation.score(network, site, job, split)
    none = dict.fromkeys(COLLAPSE_NUMBERS, 0)
    return Scores(scores.arrays, scores.num_examples, scores.loss_sum, _collapse(network, site, job, split) or none)


def _collapse(network: FedNCANetwork, site: Site, job: Job, split: str) -> dict[str, float | int]:
    samples = site.data.splits[split]
    if network.kind != "ladm":
        return {}
    sums = None
    for start in range(0, len(samples), EVALUATION_BATCH):
        rows = np.arange(start, min(start + EVALUATION_BATCH, len(samples)))
        images, targets = load_batch(samples, rows, "none", torch.Generator(), job.settings.model.normalise)
        _, features = network.class_outputs(images.to(job.device))
        batch = collapse_sums(features, targets.to(job.device), network.etf)
        sums = batch if sums is None else sums + batch
    return collapse_numbers(sums)


def explain(network: FedNCANetwork, images: Tensor, label: int) -> dict[str, Tensor]:
    """Where the network looked for one label, by title, each ``(B, H, W) float32``, for who may see the images."""
    maps = {"attention": attention_maps(network, images)[:, label]} if network.kind == "ladm" else {}
    return {**maps, "Grad-CAM": grad_cam(network, images, label)}
