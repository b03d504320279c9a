"""FedMPT on the server: the mean of what the sites tuned around one frozen CLIP.

Wang et al., CVPR 2026, arXiv 2605.28347; `models.fedmpt` says what travels (eight small arrays, 0.77 MB at five
conditions) and the project's fedmpt specification gives the formulas. CLIP never travels: every site opens it from a
local folder, and its hash, with the label names, the conditions and their tokens, is part of the schema that round 0
compares.

Choice: sites weigh the same, as in the authors' code; ``aggregate = num_examples`` is the switch. Choice: the rate
falls by the closed form of the cosine in every round for everybody, not by each client's own count of rounds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from federation import wire
from federation.registry import register
from federation.settings import Settings, names_in
from models.fedmpt import FedMPTNetwork
from models.fedmpt_networks import PAPER, fedmpt_network, opened_clip
from strategies.aggregation import Arrays
from strategies.base import FederatedStrategy
from strategies.cards import CardError, SiteCard
from strategies.evaluation import PooledScores
from strategies.fedmpt_area import DIGITS, DIGITS_MAKER, FedMPTArea, cosine_lr
from strategies.fedmpt_figures import ranking_figures
from strategies.gate import Reply
from strategies.selection import drawn_sites


class FedMPT(FederatedStrategy):
    """FedAvg over prompts, adapters and gate, with a cosine rate and a share of the sites in every round."""

    secure_summable = True
    sends_changes = True

    def __init__(self, settings: Settings, experiment: str = "experiment") -> None:
        super().__init__(settings, experiment)
        self.evaluation_extra = self.options.gate_numbers()
        self.selects_model = not self.options.alone

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """What no network can be made of, and rounds that could not succeed."""
        return _wrong_names(settings) + _wrong_shares(settings) + _wrong_travel(settings)

    def network(self, labels: tuple[str, ...], task: str) -> FedMPTNetwork:
        """The trained part. Raises CardError for labels that make no prompt and for a CLIP that cannot be opened."""
        if task != "multilabel":
            raise CardError(
                f"fedmpt needs multi-label data, the sites have a {task} task; data.mosaic makes several labels of one"
            )
        try:
            clip = opened_clip(self.options.clip_folder(self.settings), self.options.clip_sha256)
            return fedmpt_network(clip, labels, **self.options.network_options())
        except ValueError as error:
            raise CardError(str(error)) from error

    def select_sites(self, server_round: int) -> list[SiteCard]:
        """The share of the sites, uniform without replacement; all of them by default."""
        cards = list(self.table.trainable)
        if self.options.participation == 1:
            return drawn_sites(cards, self.settings, server_round)
        count = self.options.sites_of_a_round(len(cards))
        area = self.settings.federation.model_copy(update={"sites_per_round": count})
        return drawn_sites(cards, self.settings.model_copy(update={"federation": area}), server_round)

    def round_config(self, card: SiteCard, server_round: int) -> dict[str, int | float | str]:
        return {"lr": cosine_lr(self.settings.training.lr, server_round, self.settings.federation.rounds)}

    def trained_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        return () if self.options.alone else super().trained_modules(card, server_round)

    def update_specs(self, card: SiteCard, server_round: int) -> dict[str, dict[str, wire.TensorSpec]]:
        return self.options.sent_specs(super().update_specs(card, server_round))

    def received(self, reply: Reply) -> Mapping[str, Arrays]:
        """The changes in float32, whatever they travelled in."""
        return {
            module: {name: value.astype(np.float32, copy=False) for name, value in arrays.items()}
            for module, arrays in reply.modules.items()
        }

    @property
    def weighting(self) -> str:
        return "equal" if self.options.aggregate == "uniform" else super().weighting

    def figures(self, pools: Mapping[str, PooledScores]) -> dict[str, float | None]:
        return ranking_figures(pools[""], self._split, self.progress.best_thresholds)


def _wrong_names(settings: Settings) -> list[str]:
    options, found = settings.options, []
    try:
        options.condition_names()
    except ValueError as error:
        found.append(f"fedmpt.conditions = {options.conditions!r}: {error}")
    if len(names_in(settings.data.labels)) == 1:
        found.append(
            f"data.labels = {settings.data.labels!r} is one label: its probability is 1 always (softmax over classes); "
            "add a label 'no finding'"
        )
    if settings.model.weights:
        found.append(f"model.weights = {settings.model.weights!r}: fedmpt takes its towers from fedmpt.clip_dir")
    if settings.data.partition == "own" and options.clip_dir == DIGITS:
        found.append("fedmpt.clip_dir = 'digits' is for simulations; name the folder of the CLIP that every site has")
    if settings.model.normalise != "half":
        found.append(
            f"model.normalise = {settings.model.normalise!r}: pixels are normalised as the CLIP folder says; use 'half'"
        )
    return found


def _wrong_shares(settings: Settings) -> list[str]:
    options, fed, data = settings.options, settings.federation, settings.data
    if options.participation == 1:
        return []
    if fed.sites_per_round:
        return [
            f"fedmpt.participation = {options.participation} with federation.sites_per_round = {fed.sites_per_round}: "
            "both say how many sites train in a round; use one"
        ]
    if data.partition in ("by_site", "listed", "own") or data.cluster_share:
        return []
    count, found = options.sites_of_a_round(data.num_sites), []
    needed = {"federation.min_sites": fed.min_sites}
    if settings.privacy.secure_sum:
        needed["privacy.min_cohort"] = settings.privacy.min_cohort
    for key, least in needed.items():
        if count < least:
            found.append(
                f"fedmpt.participation = {options.participation} of data.num_sites = {data.num_sites} is {count} "
                f"site{'s' * (count > 1)} in a round, below {key} = {least}: no round could ever succeed"
            )
    return found


def _wrong_travel(settings: Settings) -> list[str]:
    options, privacy, found = settings.options, settings.privacy, []
    if options.upload_dtype != "float32" and (privacy.secure_sum or privacy.dp != "none"):
        found.append(
            "fedmpt.upload_dtype = 'float16' with privacy.secure_sum or privacy.dp: masks and noise are made for "
            "float32; use that"
        )
    trains = bool(options.beta_cls or (options.beta_cond and options.condition_prompts))
    if options.variant == PAPER:
        trains |= bool(options.adapter_rank) or options.gate == "router"
    if not trains:
        found.append("fedmpt without prompts, adapters and gate trains nothing; switch one of them on")
    return found


register("fedmpt", FedMPT, settings=FedMPTArea, site="client_app.fedmpt", prepare=DIGITS_MAKER)
