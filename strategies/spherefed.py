"""SphereFed on the server: the mean of what the sites trained around class points that never change.

Dong et al., "SphereFed: Hyperspherical Federated Learning", ECCV 2022; see `models.spherefed` for the network, what
travels and what is left out (the calibration after training). The class points never travel: every site draws them from
the run's seed, and their hash is part of the schema that round 0 compares.
"""

from __future__ import annotations

from pydantic import Field

from federation import seeding
from federation.registry import register
from federation.settings import MethodArea
from models.spherefed import SphereNetwork, build_spherefed
from strategies.base import FederatedStrategy


class SphereFedArea(MethodArea):
    """What the paper leaves open for several labels a sample; the reasons are in `models.spherefed`."""

    scale: float = Field(0.0, ge=0, le=1000, description="radius of the features' sphere; 0: sqrt(labels), paper: 1")
    projection: bool = Field(True, description="a linear layer before the sphere, so that all of it can be reached")


class SphereFed(FederatedStrategy):
    """FedAvg over a network whose classifier is not trained."""

    def network(self, labels: tuple[str, ...], task: str) -> SphereNetwork:
        return build_spherefed(
            self.settings.model.name,
            num_labels=len(labels),
            points=seeding.generator(self.settings.seed, "class_points"),
            **self.settings.network_shape(),
            **self.options.model_dump(),
        )


register("spherefed", SphereFed, settings=SphereFedArea, site="client_app.spherefed")
