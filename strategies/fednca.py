"""FedNCA-ML on the server: the plain mean of what the sites trained around one fixed simplex ETF.

Peng et al., "Neural Collapse-Inspired Multi-Label Federated Learning under Label-Distribution Skew", arXiv 2509.12544,
algorithm 1. See `models.fednca` for the network, its losses and what travels. The ETF never travels: every site
computes it and its hash is part of the schema that round 0 compares.

Choice: sites weigh the same, as in algorithm 1 and in the authors' code (the text says FedAvg); ``num_examples`` is the
switch. Choice: BatchNorm statistics are averaged with the weights; counters are kept out of the mean.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from federation.registry import register
from federation.settings import MethodArea, Settings, names_in
from models.fednca import LOSS_NUMBERS, NETWORK_OPTIONS, FedNCANetwork, backbone_width, build_fednca
from models.fednca_collapse import COLLAPSE_NUMBERS
from models.fednca_export import export_network
from strategies.base import MODEL, FederatedStrategy

MAX_SGD_STEP = 0.03
"""Largest lr / (1 - momentum) of SGD. Choice: measured on the digits with momentum 0.9, where a rate of 0.01 diverges
in the first round, 0.005 learns next to nothing in six, and 0.002 and 0.001 train."""


class FedNCAArea(MethodArea):
    """Defaults are those of the specification; every disagreement between paper and code is a switch here."""

    backbone: str = Field("", description="resnet18, resnet50, small_cnn or a timm vit_*; empty: model.name")
    head: Literal["ladm", "etf", "linear"] = Field("ladm", description="etf and linear are ablations without attention")
    queries: Literal["fixed", "learnable_etf_init", "learnable_random"] = "fixed"
    etf_trainable: bool = Field(False, description="true reproduces the published script, which trains the ETF")
    position: bool = Field(True, description="the fixed 2-D sine-cosine code on the attention's tokens")
    num_heads: int = Field(4, ge=1, le=64)
    logit_scale_init: float = Field(10.0, gt=0, le=1000)
    learnable_scale: bool = True
    use_bias: bool = True
    head_normalize: bool = False
    lambda_neg: float = Field(1.0, ge=0, le=100, description="1 from scratch, 0.01 with pretrained weights")
    lambda_pos: float = Field(1.0, ge=0, le=100)
    tau: float = Field(0.3, ge=0, lt=1, description="scores of absent labels below this cost nothing")
    temperature: float = Field(0.07, gt=0, le=10)
    rejection: Literal["max_all", "nonself_sum"] = "max_all"
    rejection_select: Literal["topk", "all", "random"] = "topk"
    contrast: Literal["cross_entropy", "cosine", "squared_l2"] = "cross_entropy"
    aggregation: Literal["equal", "num_examples"] = "equal"
    lr_schedule: Literal["constant", "official_restart"] = "constant"
    beta2: float = Field(0.98, gt=0, lt=1, description="AdamW's second beta")


class FedNCA(FederatedStrategy):
    """FedAvg with equal weights over a network whose classifier is not trained."""

    secure_summable = True
    train_extra = LOSS_NUMBERS
    evaluation_extra = COLLAPSE_NUMBERS

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """Combinations that no network can be built from, or that are known to diverge."""
        options, found = settings.options, []
        if options.queries != "fixed" and options.head != "ladm":
            found.append(f"fednca.queries = {options.queries!r} needs fednca.head = 'ladm', not {options.head!r}")
        if options.etf_trainable and options.head == "linear":
            found.append("fednca.etf_trainable = true needs a head with an ETF, not fednca.head = 'linear'")
        return found + _too_long_steps(settings) + _misfits(settings)

    def network(self, labels: tuple[str, ...], task: str) -> FedNCANetwork:
        return build_fednca(
            self.options.backbone or self.settings.model.name,
            num_labels=len(labels),
            **self.settings.network_shape(),
            **self.options.model_dump(include=set(NETWORK_OPTIONS)),
        )

    @property
    def weighting(self) -> str:
        return "equal" if self.options.aggregation == "equal" else super().weighting

    def inference_program(self) -> bytes | None:
        """Per-label probabilities and attention maps from one file; None for the ablations, which have no attention."""
        if self.options.head != "ladm" or self.options.head_normalize:
            return None
        network = self.network(self.table.labels, self.table.task)
        network.load_state_dict(self.progress.modules[MODEL], strict=True)
        data = self.settings.data
        return export_network(
            network.eval(),
            labels=self.table.labels,
            channels=data.channels,
            image_size=data.image_size,
            normalise=self.settings.model.normalise,
        )


def _too_long_steps(settings: Settings) -> list[str]:
    """SGD that diverges within a round; see `MAX_SGD_STEP`. The linear head is an ordinary network and takes more."""
    training = settings.training
    if training.optimizer != "sgd" or settings.options.head == "linear":
        return []
    if training.lr / (1 - training.momentum) <= MAX_SGD_STEP:
        return []
    return [
        f"method = 'fednca' with training.optimizer = 'sgd', training.lr = {training.lr} and training.momentum = "
        f"{training.momentum} diverges: its loss is a sum over the labels and its logits have a scale of 10; use "
        "training.optimizer = 'adamw' with training.lr = 0.001, or SGD with training.lr = 0.001"
    ]


def _misfits(settings: Settings) -> list[str]:
    """What does not fit the width of the backbone, as far as it is known before the sites' label list is."""
    options, found = settings.options, []
    name = options.backbone or settings.model.name
    try:
        dim = backbone_width(name, **settings.network_shape())
    except ValueError as error:
        return [f"fednca.backbone = {name!r}: {error}"]
    if options.head == "ladm" and (dim % options.num_heads or dim % 2):
        found.append(f"fednca.num_heads = {options.num_heads} does not divide the width {dim} of {name}; use 4")
    count = len(names_in(settings.data.labels))
    if count and options.head != "linear" and not 2 <= count <= dim:
        found.append(
            f"data.labels names {count} label{'s' * (count != 1)}, the ETF of a {name} of width {dim} has room for "
            f"2 to {dim}; change the labels, take a wider backbone, or fednca.head = 'linear'"
        )
    return found


register("fednca", FedNCA, settings=FedNCAArea, site="client_app.fednca")
