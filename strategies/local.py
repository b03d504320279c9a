"""Local: each site alone, the floor that a federation has to beat.

What travels: the common start down, nothing but scores up. Every site keeps its own model; the pooled metrics are those
of each site's model on that site's samples. Choice: the model of the last round is measured, since the sites' models
have no common best round.
"""

from __future__ import annotations

from federation.registry import register
from federation.settings import MethodArea
from strategies.base import FederatedStrategy
from strategies.cards import SiteCard


class Local(FederatedStrategy):
    """No module comes back, so the global state stays the common start."""

    selects_model = False
    secure_summable = False

    @property
    def weighting(self) -> str:
        return "none, nothing is averaged"

    def trained_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        return ()


register("local", Local, settings=MethodArea, site="client_app.local")
