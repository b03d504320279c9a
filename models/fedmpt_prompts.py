"""Condition prompts of FedMPT: token rows of (condition, class) pairs and the trained tokens among them (spec S1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASS_TOKEN = -101
"""Id of the first trained class token; the next is -102."""
CONDITION_TOKEN = -201
"""Id of the first trained condition token."""
CLASS_CONTEXT = "a photo of a"
"""What the trained class tokens say at the start, where there are as many as this has words."""
TOKEN_STD = 0.02


class Tokenizer(Protocol):
    """CLIP's tokeniser, as `open_clip.SimpleTokenizer` gives it."""

    context_length: int
    sot_token_id: int
    eot_token_id: int

    def encode(self, text: str) -> list[int]: ...


class PromptTokens(NamedTuple):
    """Token rows of N conditions and C classes.

    ``ids (N, C, L) int64``: ids of the tokeniser, 0 after the end; -201, -202, ... are the trained tokens of the row's
    condition and -101, -102, ... the trained class tokens. ``eot (N, C) int64``: place of the end token.
    ``prefix (N,) int64``: how many leading tokens all classes of a condition share.
    """

    ids: Tensor
    eot: Tensor
    prefix: Tensor

    @property
    def counts(self) -> tuple[int, int]:
        """How many trained tokens a row has: of its condition, of the class context."""
        row = self.ids[0, 0]
        condition = int((row <= CONDITION_TOKEN).sum())
        return condition, int((row < 0).sum()) - condition


def prompt_tokens(
    conditions: Sequence[str], class_names: Sequence[str], beta_cond: int, beta_cls: int, tokenizer: Tokenizer
) -> PromptTokens:
    """Rows ``[SOT] L_cond[1..beta_cond] CONDITION L_cls[1..beta_cls] CLASS "." [EOT]`` (spec S1).

    Condition and class keep all tokens of their phrase; underscores are blanks. The full stop is tokenised with the
    class name, as the authors' code does. Without ``conditions`` there is one group of rows, and no condition part in
    them: the ablation without condition prompts.

    Raises ValueError naming the phrase: an empty name, two classes that read the same, a row longer than the
    tokeniser's context.
    """
    if beta_cond < 0 or beta_cls < 0:
        raise ValueError(f"beta_cond={beta_cond} and beta_cls={beta_cls} are numbers of tokens, at least 0")
    if not class_names:
        raise ValueError("there is no class name; a prompt needs at least one")
    heads = [_ids(name, "condition", tokenizer) for name in conditions]
    tails = [_ids(name, "class", tokenizer, end=".") for name in class_names]
    _refuse_twins(class_names, tails)

    class_part = [CLASS_TOKEN - k for k in range(beta_cls)]
    condition_part = [CONDITION_TOKEN - k for k in range(beta_cond)]
    prefixes = [[tokenizer.sot_token_id, *condition_part, *head, *class_part] for head in heads]
    prefixes = prefixes or [[tokenizer.sot_token_id, *class_part]]
    length = tokenizer.context_length
    ids = torch.zeros(len(prefixes), len(tails), length, dtype=torch.int64)
    eot = torch.zeros(ids.shape[:2], dtype=torch.int64)
    for n, prefix in enumerate(prefixes):
        for c, tail in enumerate(tails):
            row = [*prefix, *tail, tokenizer.eot_token_id]
            if len(row) > length:
                condition = f" under condition {conditions[n]!r}" if conditions else ""
                raise ValueError(
                    f"the prompt of class {class_names[c]!r}{condition} has {len(row)} tokens, the text tower reads "
                    f"{length}; shorten the phrase or lower beta_cond={beta_cond} or beta_cls={beta_cls}"
                )
            ids[n, c, : len(row)] = torch.tensor(row)
            eot[n, c] = len(row) - 1
    return PromptTokens(ids, eot, torch.tensor([len(prefix) for prefix in prefixes]))


class ConditionPrompts(nn.Module):
    """The trained tokens ``cond (N, beta_cond, W)`` and ``cls (beta_cls, W)`` within frozen token embeddings.

    ``embeddings (V, W)``: the token embeddings of CLIP; only the rows in use are kept, and they are in no state dict.
    ``context_ids``: tokens that the class tokens start from, None for random ones. Every condition has tokens of its
    own; the class tokens are shared by all classes and all conditions. Draws are normal with standard deviation 0.02,
    from torch's current generator. An absent part (no condition, or 0 tokens) is None.
    """

    def __init__(self, tokens: PromptTokens, embeddings: Tensor, *, context_ids: Sequence[int] | None = None) -> None:
        super().__init__()
        beta_cond, beta_cls = tokens.counts
        if context_ids is not None and len(context_ids) != beta_cls:
            raise ValueError(f"{len(context_ids)} start tokens were given for {beta_cls} class tokens")
        num_conditions, width = len(tokens.ids), embeddings.shape[1]
        embeddings = embeddings.detach().float()
        self.cond = nn.Parameter(TOKEN_STD * torch.randn(num_conditions, beta_cond, width)) if beta_cond else None
        start = TOKEN_STD * torch.randn(beta_cls, width) if context_ids is None else embeddings[list(context_ids)]
        self.cls = nn.Parameter(start.clone()) if beta_cls else None

        used, rows = torch.unique(tokens.ids.clamp(min=0), return_inverse=True)
        condition_rows = CONDITION_TOKEN - tokens.ids + beta_cond * torch.arange(num_conditions)[:, None, None]
        class_rows = CLASS_TOKEN - tokens.ids + num_conditions * beta_cond
        trained = torch.where(tokens.ids <= CONDITION_TOKEN, condition_rows, class_rows) + len(used)
        self.register_buffer("frozen", embeddings[used], persistent=False)
        self.register_buffer("rows", torch.where(tokens.ids < 0, trained, rows), persistent=False)

    def forward(self, length: int | None = None) -> Tensor:
        """Prompt embeddings ``(N, C, L, W) float32``, without positions; ``length``: only the first so many tokens."""
        parts = [self.frozen]
        parts += [part.flatten(0, -2) for part in (self.cond, self.cls) if part is not None]
        return F.embedding(self.rows[..., :length], torch.cat(parts))


def _ids(name: str, what: str, tokenizer: Tokenizer, end: str = "") -> list[int]:
    phrase = name.replace("_", " ").strip()
    ids = tokenizer.encode(phrase)
    if not ids:
        raise ValueError(f"the name of a {what} is empty ({name!r}); give it one")
    return tokenizer.encode(phrase + end)


def _refuse_twins(class_names: Sequence[str], tails: Sequence[Sequence[int]]) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for name, tail in zip(class_names, tails, strict=True):
        if (key := tuple(tail)) in seen:
            raise ValueError(f"the classes {seen[key]!r} and {name!r} read the same; every class needs its own name")
        seen[key] = name
