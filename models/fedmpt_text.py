"""Prompt embeddings to text features through CLIP's frozen text tower: the full way and two shorter, exact ones.

Attention in the text tower is causal, so no token after the end token matters (``trimmed``), and the tokens that all
classes of a condition begin with have the same states in all of them (``shared_prefix``). Project's fedmpt
specification, section 13.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODES = ("full", "trimmed", "shared_prefix")


def encode_text(
    text_tower: nn.Module,
    prompts: Tensor,
    eot: Tensor,
    mode: str = "shared_prefix",
    *,
    prefix: Tensor | None = None,
) -> Tensor:
    """Text features ``(..., D) float32``, not normalised: projected state at the end token (spec S1).

    ``text_tower``: the text tower of open_clip (`open_clip.CLIP` itself, or its ``text``). ``prompts (..., L, W)``:
    embeddings without positions. ``eot (...) int64``: place of the end token. All modes give the same features and the
    same gradients up to rounding; a condition's rows are those of the first axis of ``prompts (N, C, L, W)``.

    ``shared_prefix`` needs to know how many leading tokens the rows of a condition share: ``prefix (N,) int64``, as in
    `PromptTokens`, or found by comparing the rows. Of ``prompts (R, L, W)`` neighbours with more than the start token
    in common form a group. The gradient of shared tokens goes to the first row of the group, as the sum over its rows.
    Choice: a tower with other blocks than CLIP's is read ``trimmed`` instead (spec 15.4).

    Raises ValueError for shapes that do not fit, and for a tower without a causal mask in any mode but ``full``.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; there are {', '.join(MODES)}")
    lead, (length, width) = prompts.shape[:-2], prompts.shape[-2:]
    positions = text_tower.positional_embedding
    if lead != eot.shape or length > len(positions) or width != positions.shape[1]:
        raise ValueError(
            f"expected prompts (..., L, {positions.shape[1]}) with L up to {len(positions)} and eot (...), got "
            f"{tuple(prompts.shape)} and {tuple(eot.shape)}"
        )
    if mode != "full" and text_tower.attn_mask is None:
        raise ValueError(f"mode={mode!r} needs a causal text tower, this one has no mask; use mode='full'")
    rows, ends = prompts.flatten(0, -3), eot.flatten().cpu()
    layout = None
    if mode == "shared_prefix" and _has_clip_blocks(text_tower):
        groups = _groups(rows, lead)
        lengths = _shared_lengths(rows, ends, groups) if prefix is None else prefix.cpu()
        layout = _layout(lengths, ends, groups, length) if int(lengths.min()) > 0 else None
    if layout is not None:
        states = _shared_states(text_tower, rows, layout)
    else:
        kept = length if mode == "full" else int(ends.max()) + 1
        states = _states(text_tower, rows[:, :kept], ends)
    return _projected(text_tower, states).float().unflatten(0, lead)


def _states(tower: nn.Module, rows: Tensor, ends: Tensor) -> Tensor:
    """States at the end tokens ``(R, W)``, all rows and tokens side by side."""
    length = rows.shape[1]
    mask = None if tower.attn_mask is None else tower.attn_mask[:length, :length]
    states = rows.to(_dtype(tower)) + tower.positional_embedding[:length].to(_dtype(tower))
    states = tower.transformer(states, attn_mask=mask)
    return states[torch.arange(len(rows), device=rows.device), ends.to(rows.device)]


def _projected(tower: nn.Module, states: Tensor) -> Tensor:
    states, projection = tower.ln_final(states), tower.text_projection
    if projection is None:
        return states
    return projection(states) if isinstance(projection, nn.Linear) else states @ projection


def _dtype(tower: nn.Module) -> torch.dtype:
    return tower.transformer.get_cast_dtype()


# -- shared prefixes --------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where every token stands once all real tokens are one list, prefixes first: T tokens, G groups, R rows."""

    source: Tensor
    """``(T,)``: token in the flattened prompts ``(R * L, W)``."""
    place: Tensor
    """``(T,)``: position in its row."""
    prefix: Tensor
    """``(G, P)``: index in the list; behind a short prefix any token, which causality hides."""
    queries: Tensor
    """``(R, S)``: suffix tokens of every row."""
    keys: Tensor
    """``(R, P + S)``: prefix and suffix tokens of every row."""
    mask: Tensor
    """``(R, 1, S, P + S) bool``: which keys a query sees."""
    order: Tensor
    """``(T,)``: the list's tokens in the padded ``(G * P + R * S)``."""
    end: Tensor
    """``(R,)``: the end token in S."""


def _layout(lengths: Tensor, ends: Tensor, groups: Tensor, row_length: int) -> _Layout:
    rows, own = torch.arange(len(ends)), lengths[groups]
    first = torch.searchsorted(groups, torch.arange(len(lengths)))  # groups ascend
    end = ends - own
    in_prefix, in_suffix = torch.arange(int(lengths.max())), torch.arange(int(end.max()) + 1)
    prefix_real, suffix_real = in_prefix < lengths[:, None], in_suffix <= end[:, None]
    prefix_source = (first * row_length)[:, None] + in_prefix
    suffix_source = (rows * row_length + own)[:, None] + in_suffix
    source = torch.cat([prefix_source[prefix_real], suffix_source[suffix_real]])
    index = torch.cat([prefix_real.flatten(), suffix_real.flatten()])
    slots = index.cumsum(0) - 1
    prefix, queries = slots[: prefix_real.numel()].view(prefix_real.shape), slots[prefix_real.numel() :]
    queries = queries.view(suffix_real.shape)
    causal = in_suffix[:, None] >= in_suffix
    mask = torch.cat(
        [
            prefix_real[groups][:, None, :].expand(-1, len(in_suffix), -1),
            causal.expand(len(rows), -1, -1),
        ],
        dim=2,
    )
    keys = torch.cat([prefix[groups], queries], dim=1)
    return _Layout(source, source % row_length, prefix, queries, keys, mask[:, None], index.nonzero()[:, 0], end)


def _shared_states(tower: nn.Module, rows: Tensor, layout: _Layout) -> Tensor:
    """States at the end tokens ``(R, W)``; every prefix is computed once, the last block at the end tokens only."""
    layout = _Layout(*(part.to(rows.device) for part in layout))
    states = F.embedding(layout.source, rows.flatten(0, 1)) + tower.positional_embedding[layout.place]
    states = states.to(_dtype(tower))
    *blocks, last = tower.transformer.resblocks
    for block in blocks:
        query, key_value = _in_projection(block, states)
        own = F.embedding(layout.prefix, query), F.embedding(layout.prefix, key_value)
        prefix = _attention(block, *own, causal=True)
        all_keys = F.embedding(layout.keys, key_value)
        suffix = _attention(block, F.embedding(layout.queries, query), all_keys, mask=layout.mask)
        padded = torch.cat([prefix.flatten(0, 1), suffix.flatten(0, 1)])
        states = _rest_of_block(block, states, F.embedding(layout.order, padded))
    row = torch.arange(len(rows), device=rows.device)
    at_end = layout.queries[row, layout.end]
    query, key_value = _in_projection(last, states)
    mask = layout.mask[row, :, layout.end][:, :, None]
    attended = _attention(last, F.embedding(at_end, query)[:, None], F.embedding(layout.keys, key_value), mask=mask)
    return _rest_of_block(last, F.embedding(at_end, states), attended[:, 0])


def _in_projection(block: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Queries ``(T, W)``, and keys beside values ``(T, 2 W)``."""
    projected = F.linear(block.ln_1(states), block.attn.in_proj_weight, block.attn.in_proj_bias)
    return projected.tensor_split([states.shape[1]], dim=1)


def _attention(
    block: Any, query: Tensor, key_value: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention before its output projection ``(rows, tokens, W)``."""
    parts = (query, *key_value.chunk(2, dim=2))
    parts = (part.unflatten(2, (block.attn.num_heads, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)


def _rest_of_block(block: Any, states: Tensor, attended: Tensor) -> Tensor:
    states = states + block.ls_1(block.attn.out_proj(attended))
    return states + block.ls_2(block.mlp(block.ln_2(states)))


def _has_clip_blocks(tower: nn.Module) -> bool:
    """Whether the tower has CLIP's own blocks, whose parts are used one by one above."""
    return all(
        isinstance(getattr(block, "attn", None), nn.MultiheadAttention) and not hasattr(block, "ln_1_kv")
        for block in tower.transformer.resblocks
    )


@torch.no_grad()
def _groups(rows: Tensor, lead: torch.Size) -> Tensor:
    """Group of every row ``(R,) int64``, ascending, on the CPU."""
    if len(lead) > 1:
        return torch.arange(lead[0]).repeat_interleave(lead[1:].numel())
    common = (rows[1:] == rows[:-1]).all(dim=2).int().cumprod(dim=1).sum(dim=1).cpu()
    return torch.cat([torch.zeros(1, dtype=torch.int64), (common <= 1).long()]).cumsum(0)


@torch.no_grad()
def _shared_lengths(rows: Tensor, ends: Tensor, groups: Tensor) -> Tensor:
    """How many leading tokens the rows of each group have in common, at most up to the end token, ``(G,) int64``."""
    num_groups = int(groups.max()) + 1
    first = torch.searchsorted(groups, torch.arange(num_groups))[groups]
    common = (rows == rows[first.to(rows.device)]).all(dim=2).int().cumprod(dim=1).sum(dim=1).cpu()
    return torch.full((num_groups,), rows.shape[1]).scatter_reduce(0, groups, torch.minimum(common, ends), "amin")
