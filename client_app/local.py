"""Each site alone: trains its own model from the common start and keeps it. No weights are sent; scores are."""

from __future__ import annotations

from client_app import evaluation
from client_app.evaluation import Scores
from client_app.site import Site
from client_app.training import Job, Modules, Update, fit, received_network
from federation import wire

STATE = "own"


def update_specs(modules: Modules, site: Site, job: Job) -> dict[str, dict[str, wire.TensorSpec]]:
    """No weights are sent back."""
    return {}


def train(site: Site, modules: Modules, job: Job) -> Update:
    """One more round of the site's own model; nothing of it leaves."""
    network = received_network(site, own_model(site, modules, job), job)
    done = fit(network, site, job)
    site.save_state(STATE, job.server_round, network.state_dict(), job.last_accepted)
    return done.update({})


def evaluate(site: Site, modules: Modules, job: Job, split: str) -> Scores:
    """Scores of the site's own model."""
    return evaluation.evaluate(site, own_model(site, modules, job), job, split)


def own_model(site: Site, modules: Modules, job: Job) -> Modules:
    """The site's model after the last round that the server counted; the common start before that."""
    kept = site.load_state(STATE, job.last_accepted) if job.last_accepted else None
    return {"model": kept if kept is not None else modules["model"]}
