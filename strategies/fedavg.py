"""FedAvg: the weighted mean of the sites' changes (McMahan et al. 2017, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", algorithm 1).

What travels: the module ``model`` down, its change up, with the number of examples and the training loss.
"""

from federation.registry import register
from federation.settings import MethodArea
from strategies.base import FederatedStrategy


class FedAvg(FederatedStrategy):
    """The round protocol's defaults, nothing else."""


register("fedavg", FedAvg, settings=MethodArea, site="client_app.fedavg")
