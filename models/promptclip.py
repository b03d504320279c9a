"""Prompt-tuning baselines around a frozen CLIP, made federated by averaging what they train.

Zhou et al. (CoOp), Sun et al., "DualCoOp", NeurIPS 2022; Rawlekar et al., "PositiveCoOp", 2024; sections as in the
project's fedmpt specification, "spec", whose section 8 is the source. `promptclip_variants` has the others.

All have one head, so that rows of a table differ in what is trained: a class's score is G sum_m w_m o_m with
o = 20 cos(patch, class feature) and w = softmax over patches of o (spec 8, DualCoOp's pooling), and its probability is
the softmax over the score for it and the score against it. The gain G is 5 there, for the narrow cosines of OpenAI's
weights; where cosines are far apart it saturates. Choice: cosines are taken per patch (spec 4, row 13), the
loss is FedMPT's asymmetric one for all, and a context has 4 tokens that start as "a photo of a" (the originals: 16
random ones), which is what FedMPT starts with.

What travels, both ways, float32 at T = 4, W = D = 512: ``context`` (1, 1, T, W) and ``negative`` (C, D) for
``poscoop``, 12,288 numbers at 20 classes; ``context`` (2, C, T, W), 81,920, for ``dualcoop``. ``zero_shot`` sends
nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.clip import Clip
from models.fedmpt_head import plain_cosines
from models.fedmpt_prompts import CLASS_CONTEXT, TOKEN_STD, prompt_tokens
from models.fedmpt_text import encode_text

SCALE = 20.0
START_TOKENS = 4


class PromptClip(nn.Module):
    """The part of a baseline that is trained; CLIP's towers are arguments, and no part of it.

    ``names (C, D)``: frozen features of "a photo of a CLASS."; random starts from torch's current generator.
    ``kept``: names of tensors that stay at the site. ``reads_pixels``: whether `patches` needs pictures.
    """

    kept: frozenset[str] = frozenset()
    reads_pixels = False
    frozen_sha256 = ""

    def __init__(self, clip: Clip, labels: Sequence[str], num_tokens: int = START_TOKENS, gain: float = 5.0) -> None:
        super().__init__()
        self.gain = gain
        if len(labels) < 2:
            raise ValueError(f"there are {len(labels)} classes, at least 2 are needed; add 'no finding'")
        self.num_tokens = num_tokens
        self.register_buffer("names", name_features(clip, labels), persistent=False)
        self.tokens = prompt_tokens((), labels, 0, num_tokens, clip.tokenizer)
        length = int(self.tokens.eot.max()) + 1
        rows = clip.embeddings.detach()[self.tokens.ids[0, :, :length].clamp(min=0)].float()
        self.register_buffer("rows", rows, persistent=False)
        self._start = context_start(clip, num_tokens)
        self.make()
        del self._start

    def make(self) -> None:
        """Makes the parameters."""

    def modules_that_travel(self) -> dict[str, dict[str, Tensor]]:
        """The tensors by module: ``model`` is averaged, ``own`` (where there are any) is the start of what is kept."""
        state = self.state_dict()
        modules = {"model": {name: value for name, value in state.items() if name not in self.kept}}
        return modules | ({"own": {name: state[name] for name in sorted(self.kept)}} if self.kept else {})

    def patches(self, clip: Clip, inputs: Tensor) -> Tensor:
        """Patch features ``(B, M, D)`` of what the site loaded: they are that already, unless it reads pixels."""
        return inputs

    def text_features(self, text_tower: nn.Module) -> Tensor:
        """Class features ``(G, C, D) float32``, to be made again after every step."""
        raise NotImplementedError

    def against(self, patches: Tensor, text: Tensor) -> Tensor:
        """Scores against the classes ``(B, 1, C)``, without the gain."""
        raise NotImplementedError

    def forward(self, patches: Tensor, text: Tensor) -> Tensor:
        """Logits ``(B, C) float32`` of patches ``(B, M, D)`` and `text_features`: scores for minus scores against."""
        return self.gain * (pooled(patches, text[:1]) - self.against(patches, text))[:, 0]

    def encoded(self, text_tower: nn.Module, context: Tensor) -> Tensor:
        """Text features ``(G, C, D)`` of the class names after contexts ``(G, C or 1, T, W)``."""
        groups, behind = len(context), 1 + self.num_tokens
        shared = behind if context.shape[1] == 1 else 1
        context = context.expand(-1, len(self.rows), -1, -1)
        start, end = (part.expand(groups, -1, -1, -1) for part in (self.rows[:, :1], self.rows[:, behind:]))
        prompts, eot = torch.cat([start, context, end], dim=2), self.tokens.eot.expand(groups, -1)
        return encode_text(text_tower, prompts, eot, prefix=torch.full((groups,), shared))


class PosCoOp(PromptClip):
    """A context for all classes, and a direction against each class that no text stands behind.

    Choice: it starts as the classes' mean, which is any class.
    """

    def make(self) -> None:
        self.context = nn.Parameter(self._start[None, None].clone())
        self.negative = nn.Parameter(mean_direction(self.names).expand_as(self.names).clone())

    def text_features(self, text_tower: nn.Module) -> Tensor:
        return self.encoded(text_tower, self.context)

    def against(self, patches: Tensor, text: Tensor) -> Tensor:
        return pooled(patches, self.negative[None])


class ZeroShot(PosCoOp):
    """CLIP as it is: what `PosCoOp` starts as, which nobody trains.

    Choice: its patches, as all others read, not the class token, which the feature cache lacks.
    """


class DualCoOp(PromptClip):
    """A context for and one against every class. Choice: the one for it starts as words, the other at random."""

    def make(self) -> None:
        positive = self._start.expand(len(self.names), -1, -1)
        self.context = nn.Parameter(torch.stack([positive, TOKEN_STD * torch.randn_like(positive)]))

    def text_features(self, text_tower: nn.Module) -> Tensor:
        return self.encoded(text_tower, self.context)

    def against(self, patches: Tensor, text: Tensor) -> Tensor:
        return pooled(patches, text[1:])


def pooled(patches: Tensor, text: Tensor) -> Tensor:
    """Scores ``(B, G, C)``: sum_m o_m softmax_m(o), o = 20 cos, of patches ``(B, M, D)`` and ``(G, C, D)``."""
    products = SCALE * plain_cosines(patches.float(), text.float())  # (B, G, M, C)
    return (products * products.softmax(dim=2)).sum(dim=2)


def mean_direction(features: Tensor) -> Tensor:
    """Mean of ``(C, D)`` unit directions, ``(D,)``."""
    return nn.functional.normalize(features, dim=1).mean(dim=0)


@torch.no_grad()
def name_features(clip: Clip, labels: Sequence[str]) -> Tensor:
    """Features ``(C, D) float32`` of "a photo of a CLASS.". Raises ValueError as `prompt_tokens` does."""
    start = context_start(clip, START_TOKENS)
    tokens = prompt_tokens((), labels, 0, START_TOKENS, clip.tokenizer)
    rows = clip.embeddings[tokens.ids.clamp(min=0)].float()
    rows[:, :, 1 : 1 + START_TOKENS] = start
    return encode_text(clip.model, rows, tokens.eot, prefix=tokens.prefix)[0]


def context_start(clip: Clip, num_tokens: int) -> Tensor:
    """Trained tokens ``(T, W)`` at the start: "a photo of a" where T is 4, else random."""
    if num_tokens == START_TOKENS:
        return clip.embeddings.detach()[clip.tokenizer.encode(CLASS_CONTEXT)].float()
    return TOKEN_STD * torch.randn(num_tokens, clip.embeddings.shape[1])
