"""FedLGT at a site: local training with some label states told and the others asked for (Liu et al., AAAI 2024).

Hidden from the network are the labels on which the received global model is unsure (client-aware masking), a random
share of the others, and what the site does not know. The optimiser is the runtime's. Only ``model`` travels.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from client_app.site import Site
from client_app.training import Job, Modules, Update, change, fit, received_network
from federation import seeding
from federation.settings import Settings, SettingsError
from models.fedlgt import NETWORK_OPTIONS, FedLGTNetwork, build_fedlgt, fedlgt_loss, label_states, random_masks, unsure


def build(labels: tuple[str, ...], settings: Settings) -> FedLGTNetwork:
    """The network with this run's embeddings. Raises SettingsError where it cannot be built."""
    try:
        return build_fedlgt(
            settings.model.name,
            num_labels=len(labels),
            draws=seeding.generator(settings.seed, "label_embeddings"),
            **settings.network_shape(),
            **settings.options.model_dump(include=set(NETWORK_OPTIONS)),
        )
    except ValueError as error:
        raise SettingsError([f"fedlgt: {error}"]) from error


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of ``model`` after local training; the received model stays by as the guide of the masks.

    Choice: the guide is in evaluation mode, so that its doubts do not depend on the batch; the authors leave it as it
    happens to be.
    """
    options = job.settings.options
    network = received_network(site, modules, job, build)
    guide = copy.deepcopy(network).to(job.device).eval().requires_grad_(False)
    draws = seeding.generator(job.settings.seed, "label_masks", job.server_round, site.name)

    def objective(images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(images.device.type, job.precision, enabled=job.precision is not None):
            hidden = unsure(guide(images), options.unsure_from, options.unsure_to)
            if options.random_masks:
                hidden = hidden | random_masks(*targets.shape, draws).to(targets.device)
            states = label_states(targets, hidden)
            logits = network(images, states)
        return fedlgt_loss(logits, targets, states, options.loss_labels)

    done = fit(network, site, job, objective=objective)
    return done.update({"model": change(modules["model"], network.state_dict())})
