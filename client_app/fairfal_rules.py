"""What both models of a query see at a site, and the rules of comparison that pick from it (spec section 11).

The project's fairfal specification. The arithmetic of the rules is in `models.selection`; here each gets the model that
its paper gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from client_app.fairfal_models import Seen
from models import selection
from models.selection_diverse import Outputs

UNCERTAINTIES = ("entropy", "margin", "least_confidence")
LAST_ROUND_RULES = ("kafal", "ifal")
"""Rules whose local model is, by their papers, the site's after its last round."""
TWO_MODEL_RULES = ("logo", "kafal", "feal", "ifal", "ensemble_logit", "ensemble_rank")


@dataclass(frozen=True)
class View:
    """What a query sees: the labelled images first, then those of the pool.

    ``ids``: those of the pool's images. ``labels``: class numbers ``(n,)``, or ``(n, C)`` 1, 0, -1 in multi-label data.
    ``weight``: how much the global model's uncertainty counts, 0..1. ``by_local`` is ``by_global`` where the rule needs
    no local model.
    """

    ids: tuple[str, ...]
    by_global: Seen
    by_local: Seen
    labels: Tensor
    weight: float
    multilabel: bool

    @property
    def known(self) -> slice:
        return slice(0, len(self.labels))

    @property
    def pool(self) -> slice:
        return slice(len(self.labels), None)

    @property
    def trusted(self) -> Seen:
        """The model that rules of one model ask."""
        return self.by_global if self.weight >= 0.5 else self.by_local

    def without_bad(self) -> View:
        """The view without the images of the pool of which a model says what is not finite (spec 14)."""
        is_good = self.by_global.finite() & self.by_local.finite()
        ids = tuple(id for id, good in zip(self.ids, is_good[self.pool].tolist(), strict=True) if good)
        return replace(self, ids=ids, by_global=self.by_global.rows(is_good), by_local=self.by_local.rows(is_good))

    def probabilities(self, logits: Tensor) -> Tensor:
        """``(n, C) float64``: softmax, or sigmoids in multi-label data."""
        return logits.double().sigmoid() if self.multilabel else logits.double().softmax(dim=1)


def picked_by(
    rule: str,
    view: View,
    budget: int,
    draws: torch.Generator,
    *,
    scores: Callable[[Tensor, str], Tensor],
    residuals: Callable[[Tensor], Tensor],
    distilled: Callable[[], Seen],
) -> Tensor:
    """Pool positions ``(min(budget, N),) int64`` by a rule.

    ``scores``: probabilities and a name of `UNCERTAINTIES` to ``(N,)`` in multi-label data; ``residuals``: logits to
    the left factor of the gradient embedding; ``distilled``: makes IFAL's third model and gives what it sees. Choice:
    where nothing is labelled yet, KAFAL and IFAL, which need labels, are the global model's entropy.
    """
    first, second = view.by_global.rows(view.pool), view.by_local.rows(view.pool)
    trusted = view.trusted.rows(view.pool)
    both = view.probabilities(first.logits), view.probabilities(second.logits)
    if rule in LAST_ROUND_RULES and not len(view.labels):
        return selection.entropy(both[0], budget)
    if rule in UNCERTAINTIES:
        probabilities = view.probabilities(trusted.logits)
        if view.multilabel:
            return scores(probabilities, rule).argsort(descending=True, stable=True)[:budget]
        return getattr(selection, rule)(probabilities, budget)
    if rule == "coreset":
        return selection.coreset(trusted.features, view.trusted.features[view.known], budget)
    if rule == "badge":
        return selection.badge(residuals(trusted.logits), trusted.features, budget, draws)
    if rule == "logo":
        return selection.logo(both[1], second.features, both[0], budget, draws)
    if rule == "kafal":
        counts = torch.bincount(view.labels, minlength=first.logits.shape[1])
        return selection.ksas(first.logits, second.logits, counts, budget)
    if rule == "feal":
        return selection.feal(first.logits, second.logits, second.features, budget)
    if rule == "ifal":
        seen = (view.by_global, view.by_local, distilled())
        outputs = (Outputs(one.features, view.probabilities(one.logits)) for one in seen)
        return selection.ifal(*outputs, view.labels, budget, draws)
    return {"ensemble_logit": selection.ensemble_logit, "ensemble_rank": selection.ensemble_rank}[rule](*both, budget)
