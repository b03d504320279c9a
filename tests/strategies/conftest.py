"""A federated training as one plain loop, to hold the strategies against."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from client_app.site import open_site, site_names
from datasets.transforms import to_input
from federation import seeding
from federation.settings import Settings
from models.networks import SmallCNN
from server_app.inprocess import InProcessGrid

PLAIN = {"training.momentum": 0.0, "training.weight_decay": 0.0, "data.num_sites": 3, "evaluation.every": 0}
"""Settings under which a local step is w <- w - lr * gradient, and the last model is the result."""


@pytest.fixture
def plain_loop(tmp_path):
    """``plain_loop(settings, rounds, gradient_of)``: the model's state after FedAvg-like rounds, sites in a row.

    ``gradient_of(site, name, gradient, value, received)`` is the direction of a step, and ``after_site(site, received,
    network, num_steps)`` sees each trained network.
    """

    def loop(settings: Settings, rounds, gradient_of, after_site=lambda *_: None, after_round=lambda *_: None):
        data = [open_site(settings, {"partition-id": i}, tmp_path).data for i in range(len(site_names(settings)))]
        with seeding.scope(settings.seed, "initial_weights"):
            network = SmallCNN(channels=1, num_labels=10, width=settings.model.width)
        state = {name: value.clone() for name, value in network.state_dict().items()}
        for server_round in range(1, rounds + 1):
            collected = []
            for site in data:
                network.load_state_dict(state)
                steps = train(network, site, server_round, settings, gradient_of)
                after_site(site.name, state, dict(network.named_parameters()), steps)
                collected.append(
                    (len(site.splits["train"]), {name: value.clone() for name, value in network.state_dict().items()})
                )
            total = sum(count for count, _ in collected)
            for name, value in state.items():
                if value.is_floating_point():
                    state[name] = value + sum(count * (own[name] - value) for count, own in collected) / total
                else:
                    state[name] = torch.stack([own[name] for _, own in collected]).max()
            after_round()
        return state

    def train(network, site, server_round, settings, gradient_of):
        split, size = site.splits["train"], settings.training.batch_size
        images, targets = to_input(torch.from_numpy(split.images)), torch.from_numpy(split.targets).float()
        received = {name: value.detach().clone() for name, value in network.named_parameters()}
        network.train()
        order = torch.randperm(
            len(split), generator=seeding.generator(settings.seed, "batches", server_round, site.name)
        )
        parts = list(order.split(size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        for rows in parts:
            loss = F.binary_cross_entropy_with_logits(network(images[rows]), targets[rows])
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            with torch.no_grad():
                for (name, value), gradient in zip(network.named_parameters(), gradients, strict=True):
                    value -= settings.training.lr * gradient_of(site.name, name, gradient, value, received[name])
        return len(parts)

    return loop


@pytest.fixture
def plain_settings(tiny):
    """``plain_settings(**changes)``: settings whose local step is a plain gradient step."""

    def make(**changes):
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        return Settings.from_run_config({**tiny, **PLAIN, **dotted})

    return make


@pytest.fixture
def trained():
    """``trained(settings)``: the strategy after its run in process, and the run's folder."""
    from federation import registry
    from server_app.run_folder import RunFolder

    def train(settings):
        folder = RunFolder.open(settings)
        strategy = registry.find(settings.method).strategy(settings, folder.experiment)
        nodes = [{"partition-id": index} for index in range(len(site_names(settings)))]
        strategy.start(InProcessGrid(nodes, settings.flat()), observer=folder)
        return strategy, folder.path

    return train
