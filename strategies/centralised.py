"""Centralised: all training samples at one simulated site, the ceiling that no federation has to reach.

Simulation only; validation and test samples stay at their sites, so the tables compare with every other method's.
Choice: the optimiser starts anew every round, as in FedAvg, so that both see the same schedule.
"""

from __future__ import annotations

from federation.registry import register
from federation.settings import MethodArea
from strategies.base import FederatedStrategy


class Centralised(FederatedStrategy):
    """FedAvg over one training site."""

    pools_training_data = True
    secure_summable = False

    def quorum(self) -> int:
        return 1


register("centralised", Centralised, settings=MethodArea, site="client_app.centralised")
