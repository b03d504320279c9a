"""FedLGT on the server: FedAvg over a label transformer whose label embeddings never change.

Liu et al., "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024; see `models.fedlgt` for
the network, what travels and what is simplified (by default no language). Label embeddings never travel: every site
draws or reads them, and their hash is part of the schema that round 0 compares.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from federation import seeding
from federation.registry import register
from federation.settings import MethodArea, Settings
from models.fedlgt import NETWORK_OPTIONS, FedLGTNetwork, build_fedlgt
from models.fednca_backbones import build_backbone
from strategies.base import FederatedStrategy
from strategies.cards import CardError


class FedLGTArea(MethodArea):
    """Defaults are those of the authors' code with label mask training.

    Choice: states are hidden at random (C-Tran's label mask training) as well as where the received model is unsure,
    and the loss asks for hidden labels only. Hiding unsure labels alone tells the network nearly every answer that it
    is asked for; ``random_masks = false`` with ``loss_labels = "all"`` is that reading (digits mosaics, AdamW, 20
    rounds, one seed: macro AUROC 0.651, against 0.930 with the defaults).
    """

    label_embeddings: str = Field("", description="safetensors file, the same at every site; empty: random directions")
    hidden: int = Field(0, ge=0, le=4096, description="the encoder's width; 0: the backbone's")
    num_layers: int = Field(3, ge=1, le=24)
    num_heads: int = Field(4, ge=1, le=64)
    dropout: float = Field(0.1, ge=0, lt=1)
    unsure_from: float = Field(0.48, ge=0, le=1, description="received model's scores from here on are unsure")
    unsure_to: float = Field(0.52, ge=0, le=1, description="and up to here")
    random_masks: bool = Field(True, description="hide a random 25 to 100 % of the labels as well")
    loss_labels: Literal["masked", "all"] = Field("masked", description="labels the loss asks for: hidden ones, or all")


class FedLGT(FederatedStrategy):
    """FedAvg on the server; see `client_app.fedlgt`."""

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """Values that leave nothing to learn from, or no network to build."""
        options, found = settings.options, []
        if options.unsure_from > options.unsure_to:
            found.append(f"fedlgt.unsure_from = {options.unsure_from} is above fedlgt.unsure_to = {options.unsure_to}")
        if options.loss_labels == "masked" and not options.random_masks:
            found.append(
                "fedlgt.random_masks = false with fedlgt.loss_labels = 'masked': nothing is learnt where the received "
                "model is sure; use 'all'"
            )
        width = options.hidden or _backbone_width(settings)
        if width % options.num_heads:
            found.append(
                f"fedlgt.hidden = {options.hidden} gives an encoder of width {width}, which is not divisible by "
                f"fedlgt.num_heads = {options.num_heads}"
            )
        return found

    def network(self, labels: tuple[str, ...], task: str) -> FedLGTNetwork:
        if task != "multilabel":
            raise CardError(
                f"the sites' task is {task!r}, but fedlgt needs several labels a sample: where there is exactly one, "
                "the states of some labels give the others away; choose another method"
            )
        return build_fedlgt(
            self.settings.model.name,
            num_labels=len(labels),
            draws=seeding.generator(self.settings.seed, "label_embeddings"),
            **self.settings.network_shape(),
            **self.options.model_dump(include=set(NETWORK_OPTIONS)),
        )


def _backbone_width(settings: Settings) -> int:
    model, data = settings.model, settings.data
    with torch.device("meta"):
        return build_backbone(model.name, channels=data.channels, image_size=data.image_size, width=model.width)[1]


register("fedlgt", FedLGT, settings=FedLGTArea, site="client_app.fedlgt")
