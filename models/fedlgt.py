"""FedLGT's network and loss: label tokens that read the image and each other, some of them told what they are.

Liu, Lin, Yang, Wang, "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024 (arXiv
2312.07165), on C-Tran (Lanchantin et al., CVPR 2021). The feature map's tokens and one token a label go through a
transformer encoder; a label's token is a fixed embedding of its name plus one of its state: unknown, absent or present.
In training some states are told, and the loss asks for the others; at inference all are unknown.

What travels, both ways: ``backbone.*``, ``norm.*``, ``layers.*`` (6 W^2 + 10 W numbers a layer of width W), ``head.*``,
and two projections where widths differ. Label and state embeddings are in no state dict; sites compare their hash.

Simplifications. The published embeddings are CLIP's of the label names and of the words for the states. CLIP's text
weights are not part of this project: by default every site draws the same random unit vectors, so there is no language
in the default, only a fixed identity a label. `read_embeddings` takes real ones from a file. No position code: the
authors' switch for it is off by default. No gradient clipping (theirs: 10, on a loss summed over the batch).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from models.fednca_backbones import build_backbone
from models.fixed_directions import directions_sha256, unit_vectors
from models.losses import UNKNOWN, masked_bce

STATE_UNKNOWN, STATE_ABSENT, STATE_PRESENT = 0, 1, 2
"""Row of a state in the state embeddings: target + 1."""

MAX_KNOWN_SHARE = 0.75
"""C-Tran tells a number of labels that is uniform from 0 to this share of them."""


NETWORK_OPTIONS = ("label_embeddings", "hidden", "num_layers", "num_heads", "dropout")
"""Arguments of `build_fedlgt` that are settings of a run."""


class FedLGTNetwork(nn.Module):
    """``forward``: ``(B, ch, H, W) float32, states (B, C) int64 or None -> (B, C) float32`` logits.

    ``labels (C, E)`` and ``states (3, E) float32``: the fixed embeddings; the row of unknown is zero. The encoder's
    width W is ``hidden``, 0 for the backbone's D; tokens of another width pass a linear layer. With ResNet-18 and
    CLIP's 512 numbers all three are 512, as published. The encoder's layers are C-Tran's: self-attention, feed-forward
    width W, ReLU, norms after the sums; before them one norm of all tokens. Choice: torch's initial values.
    """

    def __init__(
        self,
        backbone: nn.Module,
        labels: Tensor,
        states: Tensor,
        *,
        dim: int,
        hidden: int = 0,
        num_layers: int = 3,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        width = hidden or dim
        if width % num_heads:
            raise ValueError(f"the encoder's width {width} is not divisible by {num_heads} heads")
        self.backbone = backbone
        self.image_projection = _linear(dim, width)
        self.label_projection = _linear(labels.shape[1], width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, width, dropout, "relu", batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, len(labels))
        self._given = (labels, states)
        self.register_buffer("label_embeddings", labels.clone(), persistent=False)
        self.register_buffer("state_embeddings", states.clone(), persistent=False)

    @property
    def frozen_sha256(self) -> str:
        """Hash of the label and state embeddings as this process has them."""
        return directions_sha256(*self._given)

    def forward(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        image_tokens = self.image_projection(self.backbone(images).flatten(2).transpose(1, 2))  # (B, N, W)
        if states is None:
            states = torch.full((len(images), len(self.label_embeddings)), STATE_UNKNOWN, device=images.device)
        label_tokens = self.label_projection(self.label_embeddings + self.state_embeddings[states])  # (B, C, W)
        tokens = self.norm(torch.cat([image_tokens, label_tokens], dim=1))
        for layer in self.layers:
            tokens = layer(tokens)
        own = tokens[:, image_tokens.shape[1] :] * self.head.weight  # each label its own weights, (B, C, W)
        return own.sum(dim=2).float() + self.head.bias

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> FedLGTNetwork:
        """As of any module; the embeddings, which no state dict brings back, are put in again."""
        super().to_empty(device=device, recurse=recurse)
        for buffer, given in zip((self.label_embeddings, self.state_embeddings), self._given, strict=True):
            buffer.copy_(given)
        return self


def _linear(inner: int, outer: int) -> nn.Module:
    return nn.Identity() if inner == outer else nn.Linear(inner, outer, bias=False)


def build_fedlgt(
    name: str,
    *,
    num_labels: int,
    draws: torch.Generator,
    label_embeddings: str = "",
    channels: int = 3,
    image_size: int = 224,
    width: int = 32,
    norm: str = "batch",
    hidden: int = 0,
    num_layers: int = 3,
    num_heads: int = 4,
    dropout: float = 0.1,
) -> FedLGTNetwork:
    """The network with a backbone by name (`build_backbone`).

    ``label_embeddings``: path for `read_embeddings`; "" draws unit vectors of the encoder's width from ``draws``.

    >>> network = build_fedlgt("small_cnn", num_labels=7, draws=torch.Generator().manual_seed(1), channels=1)
    >>> network(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 7])
    """
    backbone, dim = build_backbone(name, channels=channels, image_size=image_size, width=width, norm=norm)
    if label_embeddings:
        labels, states = read_embeddings(Path(label_embeddings).expanduser(), num_labels)
    else:
        drawn = unit_vectors(num_labels + 2, hidden or dim, draws)
        labels, states = drawn[:num_labels], drawn[num_labels:]
    unknown = torch.zeros(1, states.shape[1], device="cpu")
    return FedLGTNetwork(
        backbone,
        labels,
        torch.cat([unknown, states]),
        dim=dim,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        dropout=dropout,
    )


def read_embeddings(path: Path, num_labels: int) -> tuple[Tensor, Tensor]:
    """Embeddings of label names ``(C, E)`` and of absent and present ``(2, E)``, float32, from a safetensors file.

    Its tensors are ``labels``, rows in the federation's order, and ``states``. Raises ValueError where it does not fit.
    """
    try:
        given = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no safetensors file: {error}") from error
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    size = (shapes.get("labels") or (0,))[-1]
    if not size or shapes != {"labels": (num_labels, size), "states": (2, size)}:
        raise ValueError(f"{path.name} holds {shapes}, expected labels ({num_labels}, E) and states (2, E)")
    labels, states = given["labels"].float(), given["states"].float()
    if not (labels.isfinite().all() and states.isfinite().all()):
        raise ValueError(f"{path.name} holds numbers that are not finite")
    return labels, states


def random_masks(batch: int, num_labels: int, draws: torch.Generator) -> Tensor:
    """Which labels C-Tran's label mask training hides ``(B, C) bool``.

    In every sample a number of labels that is uniform on 0, ..., floor(0.75 C) is told, the rest is hidden; which ones
    is drawn anew. Made on the draws' device.
    """
    told = torch.randint(int(MAX_KNOWN_SHARE * num_labels) + 1, (batch, 1), generator=draws, device=draws.device)
    ranks = torch.rand(batch, num_labels, generator=draws, device=draws.device).argsort(dim=1).argsort(dim=1)
    return ranks >= told


def label_states(targets: Tensor, hidden: Tensor) -> Tensor:
    """What the label tokens are told ``(B, C) int64``: unknown where hidden or not known, else absent or present.

    ``targets (B, C)`` with 1 present, 0 absent, -1 unknown, ``hidden (B, C) bool``.
    """
    return torch.where(hidden, STATE_UNKNOWN, targets.long() + 1)


def unsure(logits: Tensor, low: float, high: float) -> Tensor:
    """Where the received global model's scores are within [low, high] ``(B, C) bool``."""
    scores = logits.float().sigmoid()
    return (scores >= low) & (scores <= high)


def fedlgt_loss(logits: Tensor, targets: Tensor, states: Tensor, loss_labels: str = "masked") -> Tensor:
    """BCE summed over labels, a float32 scalar; a label that the site does not know has zero gradient.

    ``logits``, ``targets``, ``states``: ``(B, C)``. ``loss_labels="masked"`` asks only for labels whose state was not
    told, ``"all"`` for every known one. Choice: the mean over samples, where the authors sum over the batch, so that a
    step size means the same for every batch size.
    """
    if loss_labels == "masked":
        targets = targets.masked_fill(states != STATE_UNKNOWN, UNKNOWN)
    total, _ = masked_bce(logits, targets)
    return total / len(targets)
