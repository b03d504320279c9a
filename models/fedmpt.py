"""FedMPT: a frozen CLIP whose prompts, adapters and gate are tuned together by sites with few pictures.

Xucong Wang et al., "FedMPT: Federated Multi-Label Prompt Tuning of Vision-Language Models", CVPR 2026, arXiv
2605.28347; sections and the word D (default) as in the project's fedmpt specification, "spec" below. Every picture gets
one prediction a condition (background, pose, ...): the patches are transported to the classes, a class's probability is
the mean similarity of what reached it, and a gate mixes the conditions, so that a cat is found where a cat is, not
wherever there is a chair.

What travels, both ways, float32 (N=5, D=512): ``prompt.cond`` (5, 4, 512), ``prompt.cls`` (4, 512), ``adapter.down``
(5, 32, 512), ``adapter.up`` (5, 512, 32), ``gate.w1`` (32, 512), ``gate.b1`` (32), ``gate.w2`` (5, 32), ``gate.b2``
(5): 192,709 numbers, 770,836 bytes. CLIP never travels: sites load it from a local file and compare `frozen_sha256`.

The parts, by topic: `fedmpt_prompts`, `fedmpt_text`, `fedmpt_transport`, `fedmpt_head`, `fedmpt_loss`; `clip` has the
frozen towers, `fedmpt_v1` the scores of the authors' first code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from models.fedmpt_head import FedMPTHead, transport_maps
from models.fedmpt_loss import asymmetric_loss_probabilities
from models.fedmpt_prompts import CLASS_CONTEXT, ConditionPrompts, PromptTokens, Tokenizer, prompt_tokens
from models.fedmpt_text import encode_text
from models.fedmpt_transport import sinkhorn

__all__ = [
    "CONDITIONS",
    "ConditionPrompts",
    "FedMPTHead",
    "FedMPTNetwork",
    "PromptTokens",
    "asymmetric_loss_probabilities",
    "build_fedmpt",
    "encode_text",
    "frozen_sha256",
    "prompt_tokens",
    "sinkhorn",
    "transport_maps",
]

CONDITIONS = ("color", "background", "scene type", "spatial layout", "pose", "lighting", "object scale")
"""The authors' built-in conditions; N of them are the first N (spec 5, D 5)."""
CONTEXT_STARTS = ("photo", "random")


class FedMPTNetwork(nn.Module):
    """The trained parts, ``prompt``, ``head.adapter`` and ``head.gate``; the frozen towers are arguments.

    ``tokens`` are the rows that the prompts were made of.
    """

    def __init__(self, tokens: PromptTokens, prompt: ConditionPrompts, head: FedMPTHead) -> None:
        super().__init__()
        self.prompt, self.head = prompt, head
        self.eot, self.prefix = tokens.eot, tokens.prefix

    def text_features(self, text_tower: nn.Module, mode: str = "shared_prefix") -> Tensor:
        """Features of all prompts ``(N, C, D) float32``, one group of rows where there are no conditions.

        Encode again after every optimiser step; in evaluation once. ``text_tower``: see `encode_text`.
        """
        length = None if mode == "full" else int(self.eot.max()) + 1
        return encode_text(text_tower, self.prompt(length), self.eot, mode, prefix=self.prefix)

    def forward(self, patches: Tensor, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Probabilities ``(B, C)`` and intermediates, see `FedMPTHead`."""
        return self.head(patches, text)

    def travelling(self) -> dict[str, nn.Module]:
        """The parts that travel by name; with ablations some are absent."""
        parts = {"prompt": self.prompt, "adapter": self.head.adapter, "gate": self.head.gate}
        return {name: part for name, part in parts.items() if part is not None and len(part.state_dict())}


def build_fedmpt(
    conditions: Sequence[str],
    class_names: Sequence[str],
    *,
    tokenizer: Tokenizer,
    embeddings: Tensor,
    dim: int,
    num_adapters: int = 0,
    beta_cond: int = 4,
    beta_cls: int = 4,
    cls_ctx_init: str = "photo",
    **head: Any,
) -> FedMPTNetwork:
    """A fresh network; random starts come from torch's current generator.

    ``embeddings (V, W)``: token embeddings of the text tower; ``dim``: joint width D; ``head``: see `FedMPTHead`.
    ``cls_ctx_init="photo"`` starts the class tokens from "a photo of a" where ``beta_cls`` is 4, else they are random,
    as with ``"random"`` (D photo). Without ``conditions`` (ablation) ``num_adapters`` says how many adapters there are.

    Raises ValueError as `prompt_tokens` and `FedMPTHead` do, and for fewer than two classes.
    """
    if cls_ctx_init not in CONTEXT_STARTS:
        raise ValueError(f"cls_ctx_init={cls_ctx_init!r} is unknown; there are {', '.join(CONTEXT_STARTS)}")
    if len(class_names) < 2:
        raise ValueError(
            f"there are {len(class_names)} classes, at least 2 are needed (softmax over classes); add 'no finding'"
        )
    tokens = prompt_tokens(conditions, class_names, beta_cond, beta_cls, tokenizer)
    context = tokenizer.encode(CLASS_CONTEXT) if cls_ctx_init == "photo" else []
    prompt = ConditionPrompts(tokens, embeddings, context_ids=context if len(context) == beta_cls else None)
    return FedMPTNetwork(tokens, prompt, FedMPTHead(len(conditions) or num_adapters or 1, dim, **head))


def frozen_sha256(conditions: Sequence[str], class_names: Sequence[str], tokens: PromptTokens, clip_sha256: str) -> str:
    """SHA-256 (hex) of what all sites must hold alike: names, their order, their tokens, and CLIP (spec 10)."""
    digest = hashlib.sha256("\x1f".join([*conditions, "", *class_names, clip_sha256]).encode())
    digest.update(tokens.ids.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
