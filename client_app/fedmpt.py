"""FedMPT at a site: prompts, adapters and gate tuned on the cached patch features of its own pictures.

Wang et al., CVPR 2026, arXiv 2605.28347; `models.fedmpt` for the network. The frozen CLIP is a local file of the
site's; what leaves is the change of eight small arrays, the usual scores, and the mean gate weight of every condition
over an evaluated split.

Choice: the optimiser starts anew every round, where the authors' clients keep their momentum. Choice: batches are
shuffled, seeded by site and round.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from client_app import evaluation
from client_app.evaluation import Scores
from client_app.fedmpt_features import site_clip, site_features, without_pixels
from client_app.site import Site
from client_app.training import Job, Modules, Update, change, fit, optimiser_for
from federation import seeding, wire
from federation.settings import Settings
from models.fedmpt import FedMPTNetwork, asymmetric_loss_probabilities
from models.fedmpt_networks import PixelClassifier, fedmpt_network, logits_of

OWN = "own"
"""Name of the state that a site alone keeps."""
TRANSPORT_ENTRIES = 20_000_000
"""Entries of a transport problem that an evaluation holds at once: 80 MB a tensor."""


def EVALUATION_EXTRA(settings: Settings) -> Mapping[str, str]:
    """The mean gate weight of every condition, key -> kind."""
    return settings.options.gate_numbers()


def build(labels: tuple[str, ...], settings: Settings) -> nn.Module:
    """The model from pixels to logits around the site's own CLIP, on the CPU.

    For labels that make no prompt it is an empty one: the site card then gets through and shows the list, and the
    server, which builds the real one, refuses the run with the reason. Raises DataError without the right CLIP.
    """
    clip = site_clip(settings)
    try:
        return PixelClassifier(clip, copy.deepcopy(_blueprint(labels, settings)))
    except ValueError:
        return nn.Module()


@functools.lru_cache(maxsize=4)
def _blueprint(labels: tuple[str, ...], settings: Settings) -> FedMPTNetwork:
    """The trained part as it is copied for every message: its token rows are looked up once."""
    with seeding.scope(settings.seed, "blueprint"):
        return fedmpt_network(site_clip(settings), labels, **settings.options.network_options())


def received(site: Site, modules: Modules, job: Job) -> FedMPTNetwork:
    """The trained part with the received arrays, on the job's device; the text tower too. Raises WireError."""
    network = copy.deepcopy(_blueprint(site.data.labels, job.settings))
    try:
        network.load_state_dict(modules["model"], strict=True)
    except (KeyError, RuntimeError) as error:
        raise wire.WireError("the received module 'model' does not fit this site's network") from error
    if job.settings.options.alone and job.last_accepted and (own := site.load_state(OWN, job.last_accepted)):
        network.load_state_dict(own)
    site_clip(job.settings).model.to(job.device)
    return network.to(job.device)


def update_specs(modules: Modules, site: Site, job: Job) -> dict[str, dict[str, wire.TensorSpec]]:
    """What the site sends: the eight arrays in ``upload_dtype``; `strategies.fedmpt` declares the same."""
    if job.settings.options.alone:
        return {}
    return job.settings.options.sent_specs({name: wire.spec_of(state) for name, state in modules.items()})


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of ``model`` after local training at the round's rate, which the server sends."""
    network, options = received(site, modules, job), job.settings.options
    features, targets = site_features(site, job, "train"), site.data.splits["train"].targets
    text_tower = site_clip(job.settings).model

    def load(rows: np.ndarray, _: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(features[rows]), torch.from_numpy(targets[rows])

    def objective(patches: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast(job.device.type, job.precision, enabled=job.precision is not None):
            text = network.text_features(text_tower)
        scores, _ = network(patches, text)
        loss = asymmetric_loss_probabilities(
            scores, wanted, wanted >= 0, options.asl_pos, options.asl_neg, options.asl_clip
        )
        return options.loss_weight * loss

    optimiser = optimiser_for(network, job.settings)
    for group in optimiser.param_groups:
        group["lr"] = float(job.config["lr"])
    done = fit(network, site, job, load=load, objective=objective, optimiser=optimiser)
    if options.alone:
        site.save_state(OWN, job.server_round, network.state_dict(), job.last_accepted)
        return done.update({})
    dtype = getattr(torch, options.upload_dtype)
    moved = change(modules["model"], network.state_dict())
    return done.update({"model": {name: value.to(dtype) for name, value in moved.items()}})


def weights(update: Update, job: Job) -> dict[str, int]:
    """What the server's `weigh` gives, for a secure sum."""
    uniform = job.settings.options.aggregate == "uniform" or job.settings.federation.weighting == "equal"
    return {"model": 1 if uniform else update.num_examples}


@torch.no_grad()
def evaluate(site: Site, modules: Modules, job: Job, split: str) -> Scores:
    """Scores on the cached features, and the mean gate weight of every condition over the split.

    A split smaller than ``privacy.min_cell`` tells zeros instead: a mean over so few pictures is about them.
    """
    network, features = received(site, modules, job).eval(), site_features(site, job, split)
    with torch.autocast(job.device.type, job.precision, enabled=job.precision is not None):
        text = network.text_features(site_clip(job.settings).model)
    at_once = max(1, TRANSPORT_ENTRIES // (features.shape[1] * text.shape[0] * text.shape[1]))
    numbers, gates = job.settings.options.gate_numbers(), []

    def forward(rows: np.ndarray, _: Tensor) -> Tensor:
        found = []
        for part in torch.from_numpy(features[rows]).split(at_once):
            scores, inside = network(part.to(job.device), text)
            found.append(logits_of(scores))
            if numbers:
                gates.append(inside["gate"].sum(dim=0).double().cpu())
        return torch.cat(found)

    scores = evaluation.score(network, without_pixels(site, split), job, split, forward=forward)
    told = gates and len(features) >= job.settings.privacy.min_cell
    means = (torch.stack(gates).sum(dim=0) / len(features)).tolist() if told else [0.0] * len(numbers)
    return replace(scores, extra=dict(zip(numbers, means, strict=True)))


@torch.no_grad()
def explain(network: PixelClassifier, images: Tensor, label: int) -> dict[str, Tensor]:
    """Where a label's mass comes from and what the gate weighs, by title ``(B, H, W)``, for who may see the images."""
    return network.maps(images, label)
