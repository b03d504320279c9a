"""Prompt tuning of a frozen CLIP without conditions, made federated: baselines for methods on patch features.

One method with a ``variant``, since the variants differ in `models.promptclip` alone: CLIP as it is, Fed-PosCoOp,
Fed-DualCoOp, and simplified FedTPG, FedMVP, FedOTP and Fed-RAM (`models.promptclip_variants` says how). Rate, loss and
the cached features are those of `strategies.fedmpt_area` and `client_app.fedmpt_features`, so that a table compares
what is trained. Sites weigh as ``federation.weighting`` says.

What travels: module ``model``, the tensors that are averaged; ``own`` goes down as the start of what a site keeps.
Choice: where sites keep tensors, the model of the last round is measured: they have no common best round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from federation.registry import register
from federation.settings import Settings
from models.fedmpt_networks import opened_clip
from models.promptclip import PromptClip
from models.promptclip_variants import VARIANTS, build_promptclip
from strategies.base import MODEL, FederatedStrategy
from strategies.cards import CardError, SiteCard
from strategies.evaluation import PooledScores
from strategies.fedmpt_area import DIGITS_MAKER, cosine_lr
from strategies.fedmpt_figures import ranking_figures
from strategies.progress import Modules
from strategies.promptclip_area import PromptClipArea


class PromptTuning(FederatedStrategy):
    """FedAvg over a prompt's tensors, of which some may stay at the sites."""

    secure_summable = False

    def __init__(self, settings: Settings, experiment: str = "experiment") -> None:
        super().__init__(settings, experiment)
        self.selects_model = not (self.options.alone or VARIANTS[self.options.variant].kept)

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """Settings that would be ignored."""
        options, found = settings.options, []
        if settings.model.weights:
            found.append(f"model.weights = {settings.model.weights!r}: promptclip takes its towers from clip_dir")
        if options.alone and options.variant == "zero_shot":
            found.append("promptclip.alone = true with variant = 'zero_shot', which trains nothing; use false")
        return found

    def network(self, labels: tuple[str, ...], task: str) -> PromptClip:
        """The trained part. Raises CardError for labels that make no prompt and for a CLIP that cannot be opened."""
        if task != "multilabel":
            raise CardError(f"promptclip needs multi-label data, the sites have a {task} task")
        options = self.options
        try:
            clip = opened_clip(options.clip_folder(self.settings), options.clip_sha256)
            return build_promptclip(clip, labels, **options.network_options())
        except ValueError as error:
            raise CardError(str(error)) from error

    def build(self, network: nn.Module) -> Modules:
        assert isinstance(network, PromptClip)
        return network.modules_that_travel()

    def trained_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        return () if self.options.alone or self.options.variant == "zero_shot" else (MODEL,)

    def round_config(self, card: SiteCard, server_round: int) -> dict[str, int | float | str]:
        return {"lr": cosine_lr(self.settings.training.lr, server_round, self.settings.federation.rounds)}

    def figures(self, pools: Mapping[str, PooledScores]) -> dict[str, float | None]:
        return ranking_figures(pools[""], self._split, self.progress.best_thresholds)

    def export(self) -> dict[str, torch.Tensor]:
        """All tensors; what a site keeps is in it as it starts."""
        return {name: value for state in self.progress.modules.values() for name, value in state.items()}


register("promptclip", PromptTuning, settings=PromptClipArea, site="client_app.promptclip", prepare=DIGITS_MAKER)
