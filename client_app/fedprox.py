"""FedProx at a site: FedAvg with the distance to the received model in the loss (Li et al. 2020, section 3.2)."""

from __future__ import annotations

from client_app.site import Site
from client_app.training import Build, Job, Modules, Update, change, fit, network_for, received_network
from models.losses import proximal_term


def train(site: Site, modules: Modules, job: Job, build: Build = network_for) -> Update:
    """The change of ``model`` after local training on loss + mu / 2 * ||w - w_global||^2."""
    network = received_network(site, modules, job, build)
    reference = {name: modules["model"][name].to(job.device) for name, _ in network.named_parameters()}
    done = fit(network, site, job, penalty=lambda: proximal_term(network, reference, job.settings.options.mu))
    return done.update({"model": change(modules["model"], network.state_dict())})
