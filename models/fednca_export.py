"""A trained network as one file that runs without this code: images in, probabilities and attention maps out."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from models.fednca_etf import etf_sha256

CARD = "model.json"
"""Name of the extra file inside the exported one: labels, input, outputs, ETF hash, and what the caller adds."""


class FoldedNetwork(nn.Module):
    """Backbone, then attention and head as one 1x1 convolution with constants: what inference needs and no more.

    With frozen queries q and prototypes m the attention score of label c, head n, token x is (W_k^T q_cn) . x + const,
    and the label's logit is sum_n sum_x a_cn(x) g_cn . x + const with g_cn = scale W_v^T (W_o^T m_c)_n, since the
    weights a sum to one. Both are linear in x: W_k^T q and W_v^T W_o^T m are folded in float64 here, and the position
    code becomes a constant of each token. Neither keys, values nor class features are computed.

    ``images (B, ch, S, S) float32`` -> ``{"probabilities": (B, C), "attention": (B, C, H, W)}``, maps summing to one.
    Choice: images are -1 to 1 whatever the network was trained on; ``normalise="imagenet"`` brings them to ImageNet's
    mean and standard deviation (3 channels) here, so that a file's user has one rule for pixels.
    """

    def __init__(self, network: nn.Module, map_size: tuple[int, int], normalise: str = "half") -> None:
        super().__init__()
        network.require_ladm("an exported model and its attention maps")
        if network.head.normalize:
            raise ValueError("a head that normalises its features is not linear in them and cannot be folded")
        self.num_labels, self.num_heads, self.map_size = network.num_labels, network.ladm.num_heads, map_size
        self.backbone = copy.deepcopy(network.backbone)
        self.normalise = normalise
        if normalise == "imagenet":
            mean, std = (torch.tensor(part).view(1, 3, 1, 1) for part in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
            self.register_buffer("gain", 0.5 / std)
            self.register_buffer("shift", (0.5 - mean) / std)
        directions, offsets, constant = _folded(network, map_size)
        self.register_buffer("directions", directions.float().unsqueeze(2))
        self.register_buffer("offsets", offsets.float())
        self.register_buffer("constant", constant.float())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.normalise == "imagenet":
            images = images * self.gain + self.shift
        tokens = self.backbone(images).flatten(2)
        scores, evidence = (F.conv1d(tokens, self.directions) + self.offsets).chunk(2, dim=1)  # (B, C*heads, T) each
        weights = scores.softmax(dim=2)
        by_label = (self.num_labels, self.num_heads)
        logits = (weights * evidence).unflatten(1, by_label).sum(dim=(2, 3)) + self.constant
        maps = weights.unflatten(1, by_label).mean(dim=2).unflatten(2, self.map_size)
        return {"probabilities": logits.sigmoid(), "attention": maps}


@torch.no_grad()
def _folded(network: nn.Module, map_size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Directions ``(2*C*heads, D)``, offsets of every token ``(2*C*heads, T)``, constant ``(C,)``; all float64."""
    ladm, head = network.ladm, network.head
    labels, heads, width = network.num_labels, ladm.num_heads, ladm.dim // ladm.num_heads
    queries, etf = network.queries.double(), network.etf.double()
    state = {name: value.double() for name, value in ladm.attention.named_parameters()}
    w_query, w_key, w_value = state["in_proj_weight"].chunk(3)
    b_query, _, b_value = state["in_proj_bias"].chunk(3)  # the key bias moves all scores of a query alike

    scale = float(head.logit_scale)
    query = ((queries @ w_query.T + b_query) * width**-0.5).view(labels, heads, width)
    reading = (scale * etf @ state["out_proj.weight"]).view(labels, heads, width)
    score = torch.einsum("chw,hwd->chd", query, w_key.view(heads, width, -1))
    evidence = torch.einsum("chw,hwd->chd", reading, w_value.view(heads, width, -1))
    directions = torch.cat([score.flatten(0, 1), evidence.flatten(0, 1)])
    tokens = map_size[0] * map_size[1]
    offsets = directions.new_zeros(len(directions), tokens)
    if ladm.position:
        offsets = directions @ ladm.position_code(*map_size, directions.device).double().T
    constant = reading.flatten(1) @ b_value + scale * etf @ state["out_proj.bias"]
    return directions, offsets, constant if head.bias is None else constant + head.bias.double()


def export_network(
    network: nn.Module,
    *,
    labels: Sequence[str],
    channels: int,
    image_size: int,
    normalise: str = "half",
    card: Mapping[str, object] | None = None,
) -> bytes:
    """The bytes of a ``.pt2`` file (torch.export) of a `FedNCANetwork` with label attention; the network is untouched.

    Run it with torch alone, any batch size, images of the exported size::

        extra = {"model.json": ""}
        program = torch.export.load("model.pt2", extra_files=extra).module()
        out = program(images)  # pixels as -1 to 1 -> {"probabilities": (B, C), "attention": (B, C, H, W)}
        labels = json.loads(extra["model.json"])["labels"]

    ``normalise``: the run's ``model.normalise``, see `FoldedNetwork`. ``card``: JSON values for the file's
    description. A ``.pt2`` file is a program: load only a file whose origin is known. Ours holds weights as raw bytes
    and, as its only pickle, an example input of zeros. Choice: torch.export and not TorchScript, which torch has
    deprecated.
    """
    if len(labels) != network.num_labels:
        raise ValueError(f"{len(labels)} labels for a network of {network.num_labels}")
    description = {
        "labels": list(labels),
        "input": [channels, image_size, image_size],
        "outputs": ["probabilities", "attention"],
        "etf_sha256": etf_sha256(network.etf),
    }
    if taken := sorted(set(card or {}) & set(description)):
        raise ValueError(f"the card's keys {taken} are written by the export itself")
    network = copy.deepcopy(network).cpu().eval()
    example = torch.zeros(2, channels, image_size, image_size)
    with torch.no_grad():
        map_size = tuple(network.backbone(example).shape[2:])
        folded = FoldedNetwork(network, map_size, normalise).eval().requires_grad_(False)
        program = torch.export.export(
            folded, (example,), dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}}
        )
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={CARD: json.dumps({**description, **(card or {})}, sort_keys=True)})
    return file.getvalue()
