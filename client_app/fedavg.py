"""FedAvg at a site: local training of the received model (McMahan et al. 2017, algorithm 1, ClientUpdate)."""

from __future__ import annotations

from client_app.site import Site
from client_app.training import Job, Modules, Update, change, fit, received_network


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of ``model`` after local training."""
    network = received_network(site, modules, job)
    done = fit(network, site, job)
    return done.update({"model": change(modules["model"], network.state_dict())})
