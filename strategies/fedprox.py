"""FedProx: FedAvg whose sites stay near the received model (Li et al. 2020, "Federated Optimization in Heterogeneous
Networks", section 3.2). The server's half is FedAvg's; the difference is in the sites' loss.
"""

from pydantic import Field

from federation.registry import register
from federation.settings import MethodArea
from strategies.base import FederatedStrategy


class FedProxArea(MethodArea):
    """``mu`` scales the proximal term. Choice: 0.01, the default of the multi-label FL code bases we compare with."""

    mu: float = Field(0.01, ge=0, le=1000, description="weight of the proximal term")


class FedProx(FederatedStrategy):
    """FedAvg on the server; see `client_app.fedprox`."""


register("fedprox", FedProx, settings=FedProxArea, site="client_app.fedprox")
