"""FedNCA-ML: one multi-label image model for sites that see different labels.

Peng, Liu, Yang, Saha, Yang, Noble, "Neural Collapse-Inspired Multi-Label Federated Learning under Label-Distribution
Skew", arXiv 2509.12544. Every label owns a fixed direction, a row of a simplex ETF, which all sites compute for
themselves. Cross-attention with those directions as queries draws one feature a label from the image's feature map; the
same directions are the classifier and the prototypes of two regularisers: features of absent labels must not look like
any label, features of present labels must look like their own.

What travels, both ways, float32 (ResNet-18, C labels): ``backbone.*`` 11,176,512 numbers and the batch-norm buffers
(9,600 numbers and 20 int64), ``ladm.attention.*`` 1,050,624, ``head.logit_scale`` 1, ``head.bias`` C: 48,947,136 bytes
at C=7. The frozen ETF is in no state dict; sites compare `etf_sha256`.

Where the paper and the authors' code differ, the choice is named in the function; the other reading is an argument.
The parts, by topic: `fednca_etf`, `fednca_attention`, `fednca_loss`, `fednca_backbones`; for reading a trained model
`fednca_maps`, `fednca_collapse`, `fednca_export`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.fednca_attention import LabelAttention, sincos_2d
from models.fednca_backbones import backbone_width, build_backbone
from models.fednca_etf import etf_sha256, pairwise_logits, prototype_products, simplex_etf
from models.fednca_loss import class_bce, fednca_loss, known_labels

__all__ = [
    "LOSS_NUMBERS",
    "NETWORK_OPTIONS",
    "EtfHead",
    "FedNCANetwork",
    "LabelAttention",
    "backbone_width",
    "build_backbone",
    "build_fednca",
    "class_bce",
    "etf_sha256",
    "fednca_loss",
    "known_labels",
    "pairwise_logits",
    "prototype_products",
    "simplex_etf",
    "sincos_2d",
]

NETWORK_OPTIONS = (
    "head",
    "queries",
    "etf_trainable",
    "num_heads",
    "position",
    "logit_scale_init",
    "learnable_scale",
    "use_bias",
    "head_normalize",
)
"""Arguments of `FedNCANetwork` that are settings of a run."""

LOSS_NUMBERS = {"bce": "real", "neg": "real", "pos": "real"}
"""Means of the loss parts over a site's samples, which travel with its update."""

HEADS = ("ladm", "etf", "linear")
QUERIES = ("fixed", "learnable_etf_init", "learnable_random")


class EtfHead(nn.Module):
    """Scale and bias around the inner products with the ETF: ``(B, Q, D), (C, D) -> (B, Q, C) float32`` (eq. 9).

    Choice: a learnable scale from 10 and a learnable bias from 0 (authors' code). The paper's sigmoid(<h, m>) is
    ``logit_scale_init=1, learnable_scale=False, use_bias=False``.
    """

    def __init__(
        self,
        num_labels: int,
        *,
        logit_scale_init: float = 10.0,
        learnable_scale: bool = True,
        use_bias: bool = True,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        scale = float(logit_scale_init)
        self.logit_scale = nn.Parameter(torch.tensor(scale)) if learnable_scale else scale
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_labels)) if use_bias else None)
        self.normalize = normalize

    def forward(self, features: Tensor, etf: Tensor) -> Tensor:
        return pairwise_logits(
            features,
            etf,
            self.logit_scale,
            self.bias,
            normalize=self.normalize,
            axis_aligned=not etf.requires_grad,  # a frozen ETF is that of `simplex_etf`
        )


class FedNCANetwork(nn.Module):
    """Backbone, label attention and ETF head; ``forward`` gives logits ``(B, C) float32``, one of each label.

    ``backbone``: images to ``(B, dim, H, W)``, see `build_backbone`. ``head="ladm"`` is the method. The ablations:
    ``"etf"``, the pooled feature against the ETF; ``"linear"``, the pooled feature and a linear layer.

    ``queries``: ``fixed`` is the ETF; ``learnable_etf_init`` and ``learnable_random`` are trained. Choice: random
    queries are normal with rows of about the ETF's length 1. ``etf_trainable`` (Choice: off) reproduces the published
    script, which trains the classifier's copy of the ETF and, with fixed queries, the queries' own copy.

    A frozen ETF is a buffer outside the state dict: no gradient, no optimiser, and `to_empty` makes it anew.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int,
        num_labels: int,
        head: str = "ladm",
        queries: str = "fixed",
        etf_trainable: bool = False,
        num_heads: int = 4,
        position: bool = True,
        logit_scale_init: float = 10.0,
        learnable_scale: bool = True,
        use_bias: bool = True,
        head_normalize: bool = False,
    ) -> None:
        super().__init__()
        _check_parts(head, queries, etf_trainable)
        self.kind, self.dim, self.num_labels, self.etf_trainable = head, dim, num_labels, etf_trainable
        self.backbone = backbone
        if head == "linear":
            self.head: nn.Module = nn.Linear(dim, num_labels)
            return
        etf = simplex_etf(num_labels, dim)
        if etf_trainable:
            self.etf = nn.Parameter(etf)
        else:
            self.register_buffer("etf", etf, persistent=False)
        self.head = EtfHead(
            num_labels,
            logit_scale_init=logit_scale_init,
            learnable_scale=learnable_scale,
            use_bias=use_bias,
            normalize=head_normalize,
        )
        if head == "ladm":
            self.ladm = LabelAttention(dim, num_heads, position)
            if queries == "learnable_random":
                self.learned_queries = nn.Parameter(torch.randn(num_labels, dim) * dim**-0.5)
            elif queries == "learnable_etf_init" or etf_trainable:
                self.learned_queries = nn.Parameter(etf.clone())

    @property
    def frozen_sha256(self) -> str:
        """Hash of the fixed prototypes that every site computes for itself; "" where there are none."""
        return "" if self.kind == "linear" else etf_sha256(simplex_etf(self.num_labels, self.dim))

    @property
    def queries(self) -> Tensor:
        """What the attention asks with, ``(C, D)``: the ETF, unless they are trained."""
        return getattr(self, "learned_queries", self.etf)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits_of(self.backbone(images))

    def class_outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What `fednca_loss` compares: pairwise logits ``(B, C, C) float32`` and class features ``(B, C, D)``."""
        return self.class_outputs_of(self.backbone(images))

    def logits_of(self, feature_map: Tensor) -> Tensor:
        """Logits ``(B, C)`` of a feature map ``(B, D, H, W)``."""
        if self.kind == "ladm":
            return self.class_outputs_of(feature_map)[0].diagonal(dim1=1, dim2=2)
        pooled = feature_map.mean(dim=(2, 3))
        return self.head(pooled) if self.kind == "linear" else self.head(pooled[:, None], self.etf)[:, 0]

    def class_outputs_of(self, feature_map: Tensor) -> tuple[Tensor, Tensor]:
        """`class_outputs` of a feature map."""
        self.require_ladm("class features")
        class_features = self.ladm(feature_map, self.queries)
        return self.head(class_features, self.etf), class_features

    def require_ladm(self, what: str) -> None:
        """Raises ValueError for a network of an ablation, which has no label attention."""
        if self.kind != "ladm":
            raise ValueError(f"{what} need head='ladm'; this network has head={self.kind!r}")

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> FedNCANetwork:
        """As of any module; the frozen ETF, which no state dict brings back, is computed again."""
        super().to_empty(device=device, recurse=recurse)
        if self.kind != "linear" and not self.etf_trainable:
            self.etf.copy_(simplex_etf(self.num_labels, self.dim))
        return self


def build_fednca(
    backbone: str = "resnet18",
    *,
    num_labels: int,
    channels: int = 3,
    image_size: int = 224,
    width: int = 32,
    norm: str = "batch",
    patch_size: int | None = None,
    **options: bool | float | int | str,
) -> FedNCANetwork:
    """The network with a backbone by name (`build_backbone`); ``options`` are those of `FedNCANetwork`.

    >>> network = build_fednca("small_cnn", num_labels=7, channels=1, image_size=16, width=8)
    >>> network(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 7])
    """
    body, dim = build_backbone(
        backbone, channels=channels, image_size=image_size, width=width, norm=norm, patch_size=patch_size
    )
    return FedNCANetwork(body, dim=dim, num_labels=num_labels, **options)


def _check_parts(head: str, queries: str, etf_trainable: bool) -> None:
    if head not in HEADS:
        raise ValueError(f"head={head!r} is unknown; there are {', '.join(HEADS)}")
    if queries not in QUERIES:
        raise ValueError(f"queries={queries!r} is unknown; there are {', '.join(QUERIES)}")
    if queries != "fixed" and head != "ladm":
        raise ValueError(f"queries={queries!r} needs head='ladm', got head={head!r}: nothing else asks with queries")
    if etf_trainable and head == "linear":
        raise ValueError("etf_trainable=True needs a head with an ETF, got head='linear'")
