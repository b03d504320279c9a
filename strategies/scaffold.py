"""SCAFFOLD: control variates against client drift (Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", algorithm 1, option II).

What travels: ``model`` and the server's variate ``control`` down, the changes of both up: twice FedAvg's bytes.
x <- x + mean(dy), c <- c + |S| / N * mean(dc).
Choice: variates start at zero and cover parameters only, not buffers; the model's mean uses the run's weighting, the
variate's mean is equal as in the paper; the global step size is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from federation.registry import register
from federation.settings import MethodArea, Settings
from strategies.aggregation import StreamingMean, apply_share
from strategies.base import MODEL, FederatedStrategy
from strategies.gate import Reply
from strategies.progress import Modules

CONTROL = "control"


class Scaffold(FederatedStrategy):
    """FedAvg plus the server's control variate."""

    secure_summable = False

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """Option II divides by steps * lr, which is the step size of SGD only."""
        if settings.training.optimizer == "sgd":
            return []
        return [f"method = 'scaffold' with training.optimizer = {settings.training.optimizer!r}: use 'sgd'"]

    def build(self, network: nn.Module) -> Modules:
        zeros = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
        return {MODEL: network.state_dict(), CONTROL: zeros}

    def weigh(self, reply: Reply, module: str) -> float:
        return 1.0 if module == CONTROL else super().weigh(reply, module)

    def combine(self, means: Mapping[str, StreamingMean], server_round: int) -> Modules:
        modules = super().combine({MODEL: means[MODEL]}, server_round)
        control = apply_share(self.progress.modules[CONTROL], means[CONTROL], len(self.table.trainable))
        return {**modules, CONTROL: control}


register("scaffold", Scaffold, settings=MethodArea, site="client_app.scaffold")
