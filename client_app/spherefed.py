"""SphereFed at a site: local training of the features towards the fixed class points (Dong et al., ECCV 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.site import Site
from client_app.training import Job, Modules, Update, change, fit, received_network
from federation import seeding
from federation.settings import Settings, SettingsError
from models.spherefed import SphereNetwork, build_spherefed, sphere_loss


def build(labels: tuple[str, ...], settings: Settings) -> SphereNetwork:
    """The network with this run's class points. Raises SettingsError where so many labels have no room."""
    try:
        return build_spherefed(
            settings.model.name,
            num_labels=len(labels),
            points=seeding.generator(settings.seed, "class_points"),
            **settings.network_shape(),
            **settings.options.model_dump(),
        )
    except ValueError as error:
        raise SettingsError([f"spherefed: {error}; use fewer labels or a wider backbone"]) from error


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of ``model`` after local training on the squared error of the scores."""
    network = received_network(site, modules, job, build)

    def objective(images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(images.device.type, job.precision, enabled=job.precision is not None):
            scores = network.scores(images)
        return sphere_loss(scores, targets, site.data.task)

    done = fit(network, site, job, objective=objective)
    return done.update({"model": change(modules["model"], network.state_dict())})
