"""SCAFFOLD at a site: steps corrected by control variates (Karimireddy et al. 2020, algorithm 1, option II).

After every optimiser step y <- y - lr * (c - c_k). After the last one c_k+ = c_k - c + (x - y) / (steps * lr), and the
changes y - x and c_k+ - c_k travel. c_k stays at the site; the one used is that of the last round that the server took
from this site, so a refused or repeated round leaves no trace in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.site import Site
from client_app.training import Build, Job, Modules, Update, change, fit, network_for, on_meta, received_network
from federation import wire
from federation.settings import Settings

STATE = "control"


def specs(labels: tuple[str, ...], settings: Settings) -> dict[str, dict[str, wire.TensorSpec]]:
    """The network, and one control variate a parameter."""
    network = on_meta(labels, settings)
    return {"control": wire.spec_of(dict(network.named_parameters())), "model": wire.spec_of(network.state_dict())}


def train(site: Site, modules: Modules, job: Job, build: Build = network_for, first_round: int = 1) -> Update:
    """The changes of ``model`` and ``control``; keeps the site's new control variate.

    ``first_round``: where the model last began anew; a variate of a round before it is of another model and counts 0.
    """
    network = received_network(site, modules, job, build)
    last_accepted = job.last_accepted if job.last_accepted >= first_round else 0
    server, own = modules["control"], own_control(site, modules["control"], last_accepted)
    lr = job.settings.training.lr
    correction = {name: (server[name] - own[name]).to(job.device) for name in server}

    @torch.no_grad()
    def correct() -> None:
        for name, value in network.named_parameters():
            value.sub_(correction[name], alpha=lr)

    done = fit(network, site, job, after_step=correct)
    new = {
        name: own[name] - server[name] + (modules["model"][name] - value.detach().cpu()) / (done.num_steps * lr)
        for name, value in network.named_parameters()
    }
    site.save_state(STATE, job.server_round, new, job.last_accepted)
    changes = {
        "control": {name: new[name] - own[name] for name in new},
        "model": change(modules["model"], network.state_dict()),
    }
    return done.update(changes)


def own_control(site: Site, like: dict[str, Tensor], last_accepted: int) -> dict[str, Tensor]:
    """The site's control variate as the server knows it; zeros before its first accepted round.

    Choice: zeros also where the site has lost its state (a new disk): the variate is a correction, not a result.
    """
    kept = site.load_state(STATE, last_accepted) if last_accepted else None
    return kept if kept is not None else {name: torch.zeros_like(value) for name, value in like.items()}
