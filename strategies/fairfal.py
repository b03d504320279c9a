"""FairFAL on the server: cycles of a federated training from scratch and a question to every site what to label next.

Zong, Huang, "Federated Active Learning Under Extreme Non-IID and Global Class Imbalance", CVPR 2026, arXiv 2603.10341;
the project's fairfal specification. Cycle 1 begins with a random first set, each further cycle with the last model of
the one before: every site picks by it, the labels join its set, and new first weights are trained. Once, at the first
active query, each site sends one float64, the imbalance of the model on its labels; their mean is frozen and kept in
the checkpoint. Ids, features, prototypes and class counts stay at the sites.

Choice: the result is the last round's model, as published, and the learning curve is that of the test data at the end
of each cycle; no choice is made by it. Choice: the mean over too few answers is not taken (spec 14); until there is
one, sites are told 1, which lets them trust their own model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any, Literal

import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.supercore import log
from pydantic import Field
from torch import nn

from federation import seeding
from federation.registry import register
from federation.settings import MethodArea, Settings
from models.fairfal import inverse_class_weights, proportional_budgets
from models.fairfal_exchange import (
    ANSWERS,
    COUNTS,
    ONE_CLASS,
    SELECT,
    STATS,
    area_under_curve,
    closes_cycle,
    cycle_of,
    opens_cycle,
    site_budget,
)
from models.fairfal_networks import FeatureNetwork, build_feature_network
from strategies.aggregation import StreamingMean, apply_share
from strategies.base import MODEL, FederatedStrategy
from strategies.cards import SiteCard
from strategies.discovery import QuorumError
from strategies.evaluation import PooledScores
from strategies.gate import Reply
from strategies.progress import Modules
from strategies.selection import drawn_sites

CONTROL = "control"
CURVE = {"multiclass": ("accuracy", "balanced_accuracy", "macro_f1"), "multilabel": ("macro_auroc",)}
"""Figures whose learning curves are kept."""
SINGLE_LABEL_RULES = ("logo", "kafal", "feal", "ifal", "ensemble_logit", "ensemble_rank")


class FairFALArea(MethodArea):
    """Defaults are those of the specification, which follow the authors' code; section 8 has the disagreements."""

    backbone: Literal["cnn4conv", "mobilenet", "resnet18", "small_cnn"] = "cnn4conv"
    rounds_per_cycle: int = Field(100, ge=1, description="federation.rounds is a multiple of it: one part a cycle")
    label_share: float = Field(0.05, gt=0, le=1, description="share of all images that is labelled in a cycle")
    optimiser: Literal["fedavg", "fedprox", "scaffold"] = Field("fedavg", description="how the sites train")
    mu: float = Field(0.01, ge=0, le=1000, description="weight of the proximal term of fedprox")
    labels: Literal["oracle", "readers"] = Field("oracle", description="who labels: the data's own labels, or a queue")
    first_round: Literal["random", "given"] = Field("random", description="given: start with the labels that are there")
    cycle_init: Literal["random", "warm"] = "random"
    rule: Literal[
        "fairfal",
        "random",
        "entropy",
        "margin",
        "least_confidence",
        "coreset",
        "badge",
        "logo",
        "kafal",
        "feal",
        "ifal",
        "ensemble_logit",
        "ensemble_rank",
    ] = Field("fairfal", description="who picks; all but the first are comparisons")
    query_model: Literal["adaptive", "opposite", "global", "local"] = "adaptive"
    local_model: Literal["scratch", "finetune", "last_fl"] = "scratch"
    local_epochs: int = Field(50, ge=1, le=500, description="most epochs of the local query model")
    local_lr_unit: Literal["step", "epoch"] = Field("step", description="what the drop of its rate counts (8-d)")
    delta: float = Field(0.75, ge=0, le=1, description="score above which the global model is trusted")
    soft_tau: float = Field(0.0, ge=0, le=10, description="width of a soft mix of both models; 0: the hard switch")
    gamma_momentum: float = Field(1.0, ge=0, le=1, description="share of the old mean gamma in each cycle; 1: frozen")
    min_gamma_sites: int = Field(2, ge=1, description="gammas that their mean needs (1 in a federation of one)")
    skip_single_class: bool = Field(False, description="leave sites of one labelled class out of the mean gamma")
    skip_not_finite: bool = Field(False, description="never pick images of which a model says what is not finite")
    grad_model: Literal["auto", "global", "local"] = "auto"
    balanced_prior: Literal["upsample", "class_mean"] = "upsample"
    normalise_prototypes: bool = True
    uncertainty: Literal["entropy", "margin", "least_confidence"] = "entropy"
    kappa: float = Field(4.0, ge=1, le=1000, description="candidates for each pick of a class")
    anchor_mode: Literal["same_class", "all"] = "same_class"
    budget_mode: Literal["equal", "proportional"] = Field("equal", description="proportional to the sites' pools")
    class_budget: Literal["uniform", "global_inverse"] = "uniform"
    count_noise: float = Field(2.0, gt=0, le=1e6, description="Laplace scale of the label counts of global_inverse")


class FairFAL(FederatedStrategy):
    """Cycles around the runtime's rounds; FedAvg, FedProx or SCAFFOLD inside."""

    selects_model = False
    secure_summable = False

    def __init__(self, settings: Settings, experiment: str = "experiment") -> None:
        super().__init__(settings, experiment)
        self.gamma_bar = math.nan
        self.labelled: dict[str, int] = {}
        """Labelled samples by site, as each said at its last query."""
        self.curve: dict[int, dict[str, float]] = {}
        """Label ratio and figures on test data at the end of each cycle."""

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """What does not make whole cycles, or cannot be trained."""
        options, rounds, found = settings.options, settings.federation.rounds, []
        if rounds % (cycle := options.rounds_per_cycle):
            found.append(
                f"federation.rounds = {rounds} is no multiple of fairfal.rounds_per_cycle = {cycle}: a run is whole "
                f"cycles; 9 of them are {9 * cycle} rounds"
            )
        if options.first_round == "given" and options.labels == "oracle":
            found.append(
                "fairfal.first_round = 'given' with fairfal.labels = 'oracle': nothing is labelled at the start; use "
                "first_round = 'random' or labels = 'readers'"
            )
        if options.optimiser == "scaffold" and settings.training.optimizer != "sgd":
            found.append(
                f"fairfal.optimiser = 'scaffold' with training.optimizer = {settings.training.optimizer!r}: use 'sgd'"
            )
        if options.backbone == "cnn4conv" and settings.data.image_size < 16:
            found.append(
                f"data.image_size = {settings.data.image_size}: cnn4conv halves a picture four times; use 16 or more, "
                "or fairfal.backbone = 'small_cnn'"
            )
        if settings.model.weights:
            found.append(
                f"model.weights = {settings.model.weights!r}: every cycle begins with random weights; leave it"
            )
        return found

    # -- the state ----------------------------------------------------------------------------------------------------

    def network(self, labels: tuple[str, ...], task: str) -> FeatureNetwork:
        if task == "multilabel" and self.options.rule in SINGLE_LABEL_RULES:
            raise ValueError(f"fairfal.rule = {self.options.rule!r} is for single-label data; choose another rule")
        return build_feature_network(self.options.backbone, num_labels=len(labels), **self.settings.network_shape())

    def build(self, network: nn.Module) -> Modules:
        modules = {MODEL: network.state_dict()}
        if self.options.optimiser == "scaffold":
            modules[CONTROL] = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
        return modules

    def weigh(self, reply: Reply, module: str) -> float:
        return 1.0 if module == CONTROL else super().weigh(reply, module)

    def combine(self, means: Mapping[str, StreamingMean], server_round: int) -> Modules:
        """The mean; SCAFFOLD's variate moves by the share of sites that took part."""
        modules = super().combine({MODEL: means[MODEL]}, server_round)
        if CONTROL in means:
            num_sites = len(self.table.trainable)
            modules[CONTROL] = apply_share(self.progress.modules[CONTROL], means[CONTROL], num_sites)
        return modules

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"gamma_bar": torch.tensor(self.gamma_bar, dtype=torch.float64)}
        state |= {f"labelled/{site}": torch.tensor(count) for site, count in self.labelled.items()}
        for cycle, point in self.curve.items():
            named = {f"curve/{cycle}/{name}": value for name, value in point.items()}
            state |= {key: torch.tensor(value, dtype=torch.float64) for key, value in named.items()}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.gamma_bar = float(state["gamma_bar"])
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if kind == "labelled":
                self.labelled[rest] = int(value)
            elif kind == "curve":
                cycle, _, name = rest.partition("/")
                self.curve.setdefault(int(cycle), {})[name] = float(value)

    # -- cycles -------------------------------------------------------------------------------------------------------

    def select_sites(self, server_round: int) -> list[SiteCard]:
        """Drawn among the sites that have a labelled sample."""
        return drawn_sites(self._with_labels(), self.settings, server_round)

    def before_round(self, grid: Grid, server_round: int) -> None:
        """At a cycle's start: measures the last model, agrees on gamma, has every site pick, begins anew."""
        rounds = self.options.rounds_per_cycle
        if not opens_cycle(server_round, rounds):
            return
        cycle = cycle_of(server_round, rounds)
        config: dict[str, Any] = {"question": SELECT, "cycle": cycle}
        if cycle > 1:
            self._agree(grid, server_round, cycle)
            config["gamma_bar"] = 1.0 if math.isnan(self.gamma_bar) else self.gamma_bar
            if self.options.class_budget == "global_inverse":
                config["class_weights"] = self._class_weights(grid, server_round, cycle)
            self._measure(grid, server_round - 1)
        self._query(grid, server_round, cycle, config)
        if cycle > 1 and self.options.cycle_init == "random":
            with seeding.scope(self.settings.seed, "initial_weights", cycle):
                network = self.network(self.table.labels, self.table.task)
            self.progress.modules = self.build(network)
        self._records = {}

    def _agree(self, grid: Grid, server_round: int, cycle: int) -> None:
        """Asks for gamma where it is needed and not frozen yet; the mean is in the checkpoint before it is used."""
        momentum, known = self.options.gamma_momentum, not math.isnan(self.gamma_bar)
        if not _needs_gamma(self.options) or (known and momentum == 1):
            return
        self.answer_numbers = ANSWERS[STATS]
        gammas = []
        for card, numbers in self.ask(grid, server_round, self._with_labels(), {"question": STATS, "cycle": cycle}):
            gamma = float(numbers["gamma"])
            if 0 < gamma <= 1:
                gammas.append(gamma)
            elif gamma == ONE_CLASS and self.options.skip_single_class:
                log(INFO, "\t├── %s: one class only is labelled there; left out of the mean gamma", card.site)
            else:
                log(WARNING, "\t├── %s: gamma is %s, expected above 0 and at most 1; left out", card.site, gamma)
        needed = min(self.options.min_gamma_sites, len(self.table.trainable))
        if len(gammas) < needed:
            log(WARNING, "\t├── %s of %s gammas: no mean yet, asked again in the next cycle", len(gammas), needed)
            return
        mean = math.fsum(gammas) / len(gammas)
        self.gamma_bar = momentum * self.gamma_bar + (1 - momentum) * mean if known else mean
        log(INFO, "\t├── mean gamma of %s sites: %.6f", len(gammas), self.gamma_bar)
        assert self._observer is not None
        self.progress.method = self.state_dict()
        self._observer.checkpoint(self.progress)

    def _class_weights(self, grid: Grid, server_round: int, cycle: int) -> list[float]:
        self.answer_numbers = ANSWERS[COUNTS]
        totals = [0.0] * len(self.table.labels)
        for card, numbers in self.ask(grid, server_round, self._with_labels(), {"question": COUNTS, "cycle": cycle}):
            if len(numbers["noisy_counts"]) != len(totals):
                log(WARNING, "\t├── %s: %s label counts, left out", card.site, len(numbers["noisy_counts"]))
                continue
            totals = [total + count for total, count in zip(totals, numbers["noisy_counts"], strict=True)]
        return inverse_class_weights(totals)

    def _query(self, grid: Grid, server_round: int, cycle: int, config: Mapping[str, Any]) -> None:
        """Has every site pick, also those that do not train; one that fails keeps its labels (spec 14)."""
        budgets, picked = self._budgets(), {}
        self.answer_numbers = ANSWERS[SELECT]
        cards = self.table.trainable
        for card, numbers in self.ask(grid, server_round, cards, lambda card: {**config, "budget": budgets[card.site]}):
            selected, labelled = int(numbers["num_selected"]), int(numbers["num_labelled"])
            if selected > budgets[card.site] or labelled > card.num_train:
                log(WARNING, "\t├── %s says %s picked, %s labelled; not believed", card.site, selected, labelled)
                continue
            picked[card.site], self.labelled[card.site] = selected, labelled
        short = sum(budgets.values()) - sum(picked.values())
        log(INFO, "\t├── cycle %s: %s picked, %s below the budget", cycle, sum(picked.values()), short)
        log(INFO, "\t├── labelled: %s of %s", sum(self.labelled.values()), self._pool_size())
        self._keep_page()
        if len(ready := self._with_labels()) < self.quorum():
            raise QuorumError(
                f"cycle {cycle}: {len(ready)} sites have labelled samples, {self.quorum()} needed "
                "(federation.min_sites). The picks wait in the sites' annotation queues: label and import them, then "
                "resume."
            )

    def _budgets(self) -> dict[str, int]:
        cards = self.table.trainable
        each = site_budget(self._pool_size(), len(cards), self.options.label_share)
        if self.options.budget_mode == "equal":
            return {card.site: each for card in cards}
        parts = proportional_budgets([card.num_train for card in cards], each * len(cards))
        return {card.site: part for card, part in zip(cards, parts, strict=True)}

    def _with_labels(self) -> list[SiteCard]:
        return [card for card in self.table.trainable if self.labelled.get(card.site, 0) > 0]

    def _pool_size(self) -> int:
        return sum(card.num_train for card in self.table.trainable)

    # -- what is measured ---------------------------------------------------------------------------------------------

    def _evaluation_due(self, server_round: int) -> bool:
        """Not in the round that opens a cycle: the model before it is measured by itself, the new one is untrained."""
        return super()._evaluation_due(server_round) and not closes_cycle(server_round, self.options.rounds_per_cycle)

    def _measure(self, grid: Grid, server_round: int) -> None:
        """Measures a cycle's last model: on test data for the learning curve, which is no test result."""
        if super()._evaluation_due(server_round):
            self._evaluate(grid, server_round, "val")
        self._pools, self._split = self._empty_pools(), "test"
        for message in self._replies(grid, self.configure_evaluate(server_round, self.arrays, ConfigRecord(), grid)):
            if (reply := self._gated(message, 0.0)) is not None:
                self._pool(reply)
        self.figures(self._pools)

    def _finish(self, grid: Grid, last: int) -> MetricRecord:
        measured = super()._finish(grid, last)
        self._keep_page()
        return measured

    def _keep_page(self) -> None:
        """What the server knows of the cycles, ``cycles.json`` in the run folder."""
        assert self._observer is not None
        gamma_bar = None if math.isnan(self.gamma_bar) else self.gamma_bar
        curve = [{"cycle": cycle, **dict(sorted(self.curve[cycle].items()))} for cycle in sorted(self.curve)]
        labelled = dict(sorted(self.labelled.items()))
        self._observer.keep("cycles", {"gamma_bar": gamma_bar, "labelled": labelled, "curve": curve})

    def figures(self, pools: Mapping[str, PooledScores]) -> dict[str, float | None]:
        """Share of labelled images; on test data, which join the curve, the areas under it so far (spec 10)."""
        ratio = sum(self.labelled.values()) / self._pool_size()
        if self._split != "test":
            return {"label_ratio": ratio}
        names = CURVE[self.table.task]
        summary = pools[""].summary(None, set(self.headline_excluded))
        point = {name: float(summary[name]) for name in names if summary[name] is not None}
        self.curve[cycle_of(self.progress.server_round, self.options.rounds_per_cycle)] = {"ratio": ratio, **point}
        areas = {
            f"aulc_{name}": area_under_curve({p["ratio"]: p[name] for p in self.curve.values() if name in p})
            for name in names
        }
        return {"label_ratio": ratio, **areas}


def _needs_gamma(options: Any) -> bool:
    """Whether some site's pick depends on the mean gamma."""
    if options.rule == "random":
        return False
    return options.query_model in ("adaptive", "opposite") or (
        options.rule == "fairfal" and options.grad_model == "auto"
    )


register("fairfal", FairFAL, settings=FairFALArea, site="client_app.fairfal")
