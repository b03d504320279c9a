"""Further prompt-tuning baselines, simplified where their own material needs another loop; see `promptclip`.

- ``tpg``, Qiu et al., "FedTPG", ICLR 2024: a network that generates the context from the class names. Simplified: one
  cross-attention with one head and one hidden layer; the scores against the classes are `PosCoOp`'s.
- ``mvp``, Singha et al., "FedMVP", ICCV 2025: one visual prompt a picture, from its class token's attention to the
  class names; layers as in the spec's section 2. It needs a second pass through the image tower in every step.
- ``otp``, Li et al., "FedOTP", CVPR 2024: a global context that is averaged and a local one that stays, matched with
  the patches by transport in which patches may stay unmatched.
- ``ram``, Tan et al., "Recover and Match", CVPR 2025: transport between patches and classes, held near that of the
  frozen CLIP (eps 0.1 and 0.05, spec 8). Simplified: one residual adapter after the last block instead of adapters in
  all blocks (13.0 million numbers), and no change to the last block's attention.

In the two with a transport, the patches that speak for a class are weighed alike where they speak against it.

Left out: SCPNet, MaPLe, PGP, TCP and FedAWA, which the spec has one line on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.clip import Clip
from models.fedmpt import frozen_sha256
from models.fedmpt_head import Adapters, plain_cosines
from models.fedmpt_transport import sinkhorn
from models.promptclip import SCALE, START_TOKENS, DualCoOp, PosCoOp, PromptClip, ZeroShot

HIDDEN = 64
HEADS = 8
MASS, OTP_REG = 0.8, 0.1
RAM_REG, RAM_TEACHER, RAM_RANK = 0.1, 0.05, 32
ITERATIONS = 20
SMALLEST = 1e-12


class TPG(PosCoOp):
    """The context is what a small network makes of the class names."""

    def make(self) -> None:
        super().make()
        width, dim = self.context.shape[3], self.names.shape[1]
        self.query = nn.Parameter(self.context[0, 0].detach().clone())
        del self.context
        self.key, self.value = nn.Linear(dim, width), nn.Linear(dim, width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        nn.init.zeros_(self.out[2].weight)  # starts at the words
        nn.init.zeros_(self.out[2].bias)

    def text_features(self, text_tower: nn.Module) -> Tensor:
        names = nn.functional.normalize(self.names, dim=1)
        attended = (self.query @ self.key(names).T / self.query.shape[1] ** 0.5).softmax(dim=1) @ self.value(names)
        return self.encoded(text_tower, (self.query + self.out(attended))[None, None])


class MVP(PosCoOp):
    """A visual prompt a picture; the texts are the frozen ones."""

    reads_pixels = True

    def __init__(self, clip: Clip, labels: Sequence[str], num_tokens: int = START_TOKENS, gain: float = 5.0) -> None:
        self.width = clip.model.visual.class_embedding.shape[0]
        super().__init__(clip, labels, num_tokens, gain)

    def make(self) -> None:
        super().make()
        del self.context
        dim = self.names.shape[1]
        self.attention = nn.MultiheadAttention(dim, HEADS)
        self.prompt = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, self.width))

    def text_features(self, text_tower: nn.Module) -> Tensor:
        return self.names[None]

    def patches(self, clip: Clip, inputs: Tensor) -> Tensor:
        visual = clip.model.visual
        with torch.no_grad():
            whole, _ = visual(inputs)
            embedded = visual._embeds(inputs)
        prompt = self.prompt(self.attention(whole, self.names, self.names, need_weights=False)[0])
        tokens = visual.transformer(torch.cat([embedded[:, :1], prompt[:, None], embedded[:, 1:]], dim=1))
        return visual.ln_post(tokens)[:, 2:] @ visual.proj


class OTP(PosCoOp):
    """Two contexts, ``context`` for all sites and ``own`` for this one."""

    kept = frozenset({"own"})

    def make(self) -> None:
        super().make()
        self.own = nn.Parameter(self.context.detach().clone())

    def text_features(self, text_tower: nn.Module) -> Tensor:
        return self.encoded(text_tower, torch.cat([self.context, self.own]))

    def forward(self, patches: Tensor, text: Tensor) -> Tensor:
        cosines = plain_cosines(patches.float(), text.float())  # (B, 2, M, C)
        with torch.no_grad():
            plan = partial_transport(1 - cosines.permute(0, 3, 2, 1).flatten(0, 1), MASS, OTP_REG, ITERATIONS)
            plan = plan.unflatten(0, (len(patches), -1)).permute(0, 3, 2, 1)
        against = plain_cosines(patches.float(), self.negative[None])  # (B, 1, M, C)
        return self.gain * SCALE * (plan * (cosines - against)).sum(dim=(1, 2)) / MASS


class RAM(PosCoOp):
    """An adapter on the patches, and a transport that the frozen CLIP constrains."""

    def make(self) -> None:
        super().make()
        self.adapter = Adapters(1, self.names.shape[1], RAM_RANK)

    def forward(self, patches: Tensor, text: Tensor) -> Tensor:
        patches, text = patches.float(), text.float()
        cosines = self.adapter(patches, text)[:, 0]  # (B, M, C)
        with torch.no_grad():
            plan = constrained_transport(cosines, plain_cosines(patches, self.names[None])[:, 0])
        against = plain_cosines(patches, self.negative[None])[:, 0]
        return self.gain * SCALE * plan.shape[2] * (plan * (cosines - against)).sum(dim=1)


VARIANTS: dict[str, type[PromptClip]] = {
    "zero_shot": ZeroShot,
    "poscoop": PosCoOp,
    "dualcoop": DualCoOp,
    "tpg": TPG,
    "mvp": MVP,
    "otp": OTP,
    "ram": RAM,
}


def build_promptclip(clip: Clip, labels: Sequence[str], variant: str, **options: Any) -> PromptClip:
    """The trained part of a baseline with its ``frozen_sha256``, on the CPU.

    ``options``: ``num_tokens`` and ``gain``. Random starts from torch's current generator. Raises ValueError for fewer
    than two labels and for names that make no prompt.
    """
    with torch.device("cpu"):
        network = VARIANTS[variant](clip, labels, **options)
    network.frozen_sha256 = frozen_sha256((variant,), labels, network.tokens, clip.sha256)
    return network


def partial_transport(cost: Tensor, mass: float, reg: float, iterations: int) -> Tensor:
    """Plans ``(P, M, G)`` with row sums of at most 1 / M and column sums of ``mass / G``; cost ``(P, M, G)``.

    Scaling iterations in which a row is only ever scaled down: r = min((1 / M) / (K c), 1), c = (mass / G) / (K' r).
    """
    kernel = (cost / -reg).exp()
    most, due = 1 / cost.shape[1], mass / cost.shape[2]
    columns = torch.ones_like(cost[:, 0])
    for _ in range(iterations):
        rows = (most / (kernel * columns[:, None]).sum(dim=2)).clamp(max=1)
        columns = due / (kernel * rows[:, :, None]).sum(dim=1)
    return kernel * rows[:, :, None] * columns[:, None]


def constrained_transport(cosines: Tensor, teacher: Tensor) -> Tensor:
    """argmin <P, 1 - S> - 0.1 H(P) + 0.05 KL(P, Q), plans ``(B, M, C)`` with even rows and columns.

    S and Q are the softmax over classes of 20 ``cosines (B, M, C)`` and 20 ``teacher (B, M, C)``. The KL term makes it
    a transport with entropic weight 0.15 and cost 1 - S - 0.05 log Q.
    """
    agreed = (SCALE * teacher).softmax(dim=2).clamp(min=SMALLEST).log()
    cost = 1 - (SCALE * cosines).softmax(dim=2) - RAM_TEACHER * agreed
    patches, classes = cost.shape[1:]
    a, b = cost.new_full(cost.shape[:2], 1 / patches), cost.new_full((classes,), 1 / classes)
    return sinkhorn(cost, a, b, RAM_REG + RAM_TEACHER, ITERATIONS, solver="log")
