"""Vision transformers of timm on some of their patches only: fewer tokens, not masked ones.

The project's fedmitr specification, section 1. Patches are numbered 1..N row by row; 0 is the class token, which
always enters and is never listed. A patch keeps its position embedding wherever it stands in the list, so logits do
not depend on the order of ``keep``.

The logits of a ViT with a class token read one row of the last block. Only that row is computed there: one query,
all keys, one row of the MLP. Its softmax is the attention of the class token, so nothing of size T x T is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from timm.layers.attention import Attention
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn


class Outputs(NamedTuple):
    """Logits ``(B, C)`` and, where asked for, the attention that each patch gets ``(B, n)``."""

    logits: Tensor
    attention: Tensor | None


def check_vit(model: nn.Module) -> None:
    """Raises ValueError with the reason for a network whose patches cannot be dropped one by one.

    Taken are plain vision transformers: square images and patches, the blocks of timm, no pruning or distillation
    token of their own. Windows (Swin) and convolutional stems (hybrids) tie patches to their neighbours.
    """
    if type(model) is not VisionTransformer:
        raise ValueError(f"sparse inversion needs timm's VisionTransformer, got {type(model).__name__}")
    stem, blocks = model.patch_embed, list(model.blocks)
    if type(stem) is not PatchEmbed or not isinstance(stem.proj, nn.Conv2d) or stem.img_size is None:
        raise ValueError("the patch embedding is not one convolution of fixed size: hybrids cannot drop patches")
    (height, width), (patch_y, patch_x) = stem.img_size, stem.patch_size
    if height != width or patch_y != patch_x or height % patch_y:
        raise ValueError(
            f"images of {height} x {width} pixels and patches of {patch_y} x {patch_x}: both must be square and the "
            f"patches must tile the image"
        )
    if any(type(block) is not Block or type(block.attn) is not Attention for block in blocks):
        raise ValueError(f"blocks must be timm's plain ones, got {sorted({type(block).__name__ for block in blocks})}")
    if any(getattr(block.attn, "gate", None) is not None for block in blocks):
        raise ValueError("gated attention is not supported")
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError("the network drops patches at random (patch_drop_rate > 0); build it with 0")


def grid_of(model: nn.Module) -> int:
    """Patches along one side, G; there are G * G of them."""
    return model.patch_embed.grid_size[0]


def patch_of(model: nn.Module) -> int:
    """Side of a patch in pixels."""
    return model.patch_embed.patch_size[0]


def patch_pixels(images: Tensor, patch: int) -> Tensor:
    """Images ``(B, ch, H, W)`` cut into patches ``(B, N, ch * patch * patch)``, row by row, channels first in each."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    cut = images.reshape(batch, channels, rows, patch, columns, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch * patch)


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows ``(B, n, D)`` of ``rows (B, N, D)`` at ``positions (B, n) int64``."""
    return rows.gather(1, positions[:, :, None].expand(-1, -1, rows.shape[2]))


def complement(keep: Tensor, num_patches: int) -> Tensor:
    """The patches that are not in ``keep (B, n)``: ``(B, N - n) int64`` ascending. Waits for no device."""
    kept = torch.zeros(len(keep), num_patches, dtype=torch.int8, device=keep.device).scatter_(1, keep - 1, 1)
    return kept.argsort(dim=1, stable=True)[:, : num_patches - keep.shape[1]] + 1


def all_patches(batch: int, num_patches: int, device: torch.device | str = "cpu") -> Tensor:
    """Every patch of every image, ``(B, N) int64``."""
    return torch.arange(1, num_patches + 1, device=device).repeat(batch, 1)


def embed(model: nn.Module, pixels: Tensor, keep: Tensor | None = None) -> Tensor:
    """Tokens ``(B, prefix + n, D)`` that enter the blocks, positions added, of ``pixels (B, n, ch * P * P)``.

    ``keep (B, n)`` says which patches the pixels are; None where they are all, in order.
    """
    weight = model.patch_embed.proj.weight.flatten(1)
    tokens = model.patch_embed.norm(nn.functional.linear(pixels, weight, model.patch_embed.proj.bias))
    prefix = [part.expand(len(pixels), -1, -1) for part in (model.cls_token, model.reg_token) if part is not None]
    num_prefix = model.num_prefix_tokens
    if model.pos_embed is not None:
        positions = model.pos_embed if model.no_embed_class else model.pos_embed[:, num_prefix:]
        tokens = tokens + (positions if keep is None else take(positions.expand(len(pixels), -1, -1), keep - 1))
    if prefix:
        head = torch.cat(prefix, dim=1)
        if model.pos_embed is not None and not model.no_embed_class:
            head = head + model.pos_embed[:, :num_prefix]
        tokens = torch.cat([head, tokens], dim=1)
    return model.norm_pre(model.pos_drop(tokens))


def read_class(model: nn.Module, tokens: Tensor, *, with_attention: bool = False) -> Outputs:
    """Runs the blocks on ``tokens (B, prefix + n, D)`` and reads the logits, and the attention where asked for.

    The attention is that of the last block, mean over heads, of the class token on the patches; not renormalised.
    Choice: without a class token, the mean over all queries.
    """
    for block in model.blocks[:-1]:
        tokens = block(tokens)
    last, num_prefix = model.blocks[-1], model.num_prefix_tokens
    if model.has_class_token and model.global_pool == "token":
        row, weights = _class_row(last, tokens)
        # forward_head pools a sequence to its first token, and here that is all there is.
        return Outputs(model.forward_head(model.norm(row)), weights[:, num_prefix:] if with_attention else None)
    attention = _received(model, last, tokens) if with_attention else None
    return Outputs(model.forward_head(model.norm(last(tokens))), attention)


def read_tokens(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``(B, C)`` and the same head on every patch token after the last norm, ``(B, n, C)``."""
    states = model.norm(model.blocks(tokens))
    patches = model.fc_norm(states[:, model.num_prefix_tokens :])
    return model.forward_head(states), model.head(model.head_drop(patches))


def subset_logits(model: nn.Module, images: Tensor, keep: Tensor | None) -> Tensor:
    """`forward_subset` without its checks, for loops whose ids are known to be right; None keeps all patches."""
    pixels = patch_pixels(images, patch_of(model))
    return read_class(model, embed(model, pixels if keep is None else take(pixels, keep - 1), keep)).logits


def forward_subset(model: nn.Module, images: Tensor, keep: Tensor) -> Tensor:
    """Logits ``(B, C)`` when only the patches ``keep (B, n) int64`` of each image enter the encoder.

    ``images (B, ch, H, W)`` are normalised as the model expects; ids are 1..N, no id twice in a row. The raw patches
    are gathered before the embedding, so a dropped patch costs nothing and its pixels get no gradient at all.
    Raises ValueError for another network, image size or id.
    """
    check_vit(model)
    _check_images(model, images)
    check_keep(keep, len(images), grid_of(model) ** 2)
    return subset_logits(model, images, keep)


def cls_attention(model: nn.Module, tokens_or_images: Tensor, keep: Tensor | None = None) -> Tensor:
    """The attention of the class token on each patch in the last block, mean over heads: ``(B, n)`` (spec 1).

    ``tokens_or_images``: images ``(B, ch, H, W)``, or tokens ``(B, prefix + N, D)`` as `embed` gives them. ``keep
    (B, n)``: only these patches enter. The column of the class token is left out and nothing is renormalised, so a
    row sums to less than 1. Choice: without a class token, the mean over all queries.
    """
    check_vit(model)
    num_patches = grid_of(model) ** 2
    if keep is not None:
        check_keep(keep, len(tokens_or_images), num_patches)
    if tokens_or_images.ndim == 4:
        _check_images(model, tokens_or_images)
        pixels = patch_pixels(tokens_or_images, patch_of(model))
        tokens = embed(model, pixels if keep is None else take(pixels, keep - 1), keep)
    elif keep is None:
        tokens = tokens_or_images
    else:
        prefix = model.num_prefix_tokens
        tokens = torch.cat([tokens_or_images[:, :prefix], take(tokens_or_images[:, prefix:], keep - 1)], dim=1)
    return read_class(model, tokens, with_attention=True).attention


def check_keep(keep: Tensor, batch: int, num_patches: int) -> None:
    """Raises ValueError unless ``keep`` is ``(batch, n) int64`` of distinct ids 1..num_patches."""
    if keep.dtype != torch.int64 or keep.ndim != 2 or len(keep) != batch:
        raise ValueError(
            f"patch ids must be ({batch}, n) int64, one row an image; got {tuple(keep.shape)} {keep.dtype}"
        )
    if keep.numel() == 0:
        return
    if keep.min() < 1 or keep.max() > num_patches:
        raise ValueError(
            f"patch ids run from 1 to {num_patches} (0 is the class token, which always enters); got "
            f"{int(keep.min())} to {int(keep.max())}"
        )
    ordered = keep.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError("a row of patch ids names a patch twice")


def _check_images(model: nn.Module, images: Tensor) -> None:
    wanted = (model.patch_embed.proj.in_channels, *model.patch_embed.img_size)
    if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
        raise ValueError(
            f"images must be (B, {', '.join(map(str, wanted))}) for this network, got {tuple(images.shape)}"
        )


def _class_row(block: Block, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of ``block(tokens)``, ``(B, 1, D)``, and its attention, mean over heads, ``(B, T)``."""
    attention = block.attn
    normed = block.norm1(tokens)
    width = attention.attn_dim
    weight, bias = attention.qkv.weight, attention.qkv.bias
    query = nn.functional.linear(normed[:, :1], weight[:width], None if bias is None else bias[:width])
    rest = nn.functional.linear(normed, weight[width:], None if bias is None else bias[width:])
    query = attention.q_norm(_heads(query, attention))
    keys, values = (_heads(part, attention) for part in rest.chunk(2, dim=2))
    weights = (query * attention.scale @ attention.k_norm(keys).transpose(2, 3)).softmax(dim=3)  # (B, heads, 1, T)
    mixed = (attention.attn_drop(weights) @ values).transpose(1, 2).flatten(2)
    row = attention.proj_drop(attention.proj(attention.norm(mixed)))
    row = tokens[:, :1] + block.drop_path1(block.ls1(row))
    row = row + block.drop_path2(block.ls2(block.mlp(block.norm2(row))))
    return row, weights.mean(dim=1)[:, 0]


def _received(model: nn.Module, block: Block, tokens: Tensor) -> Tensor:
    """The attention that each patch gets, mean over heads and over queries (the class token's alone with one)."""
    attention = block.attn
    query, keys, _ = (_heads(part, attention) for part in attention.qkv(block.norm1(tokens)).chunk(3, dim=2))
    if model.has_class_token:
        query = query[:, :, :1]
    weights = (attention.q_norm(query) * attention.scale @ attention.k_norm(keys).transpose(2, 3)).softmax(dim=3)
    return weights.mean(dim=(1, 2))[:, model.num_prefix_tokens :]


def _heads(rows: Tensor, attention: Attention) -> Tensor:
    """``(B, T, heads * d)`` as ``(B, heads, T, d)``."""
    return rows.unflatten(2, (attention.num_heads, attention.head_dim)).transpose(1, 2)
