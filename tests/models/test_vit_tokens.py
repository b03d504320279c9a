"""Token dropping against the authors' numbers, timm's own forward pass, and a plain dense attention."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

from models.vit_tokens import (
    all_patches,
    check_vit,
    cls_attention,
    complement,
    embed,
    forward_subset,
    patch_pixels,
    read_tokens,
    subset_logits,
    take,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmitr"


def golden_vit():
    """The golden ViT and the arrays around it."""
    with np.load(GOLDEN / "case06_sparse_forward.npz") as arrays:
        data = {key: torch.from_numpy(arrays[key]) for key in arrays if key != "cfg"}
        sizes = json.loads(str(arrays["cfg"]))
    model = VisionTransformer(
        img_size=sizes["img"],
        patch_size=sizes["patch"],
        embed_dim=sizes["dim"],
        depth=sizes["depth"],
        num_heads=sizes["heads"],
        num_classes=sizes["classes"],
    )
    model.load_state_dict({key[2:]: value for key, value in data.items() if key.startswith("w.")}, strict=True)
    return model.eval(), data


def tiny_vit(seed=0, **options):
    """A ViT of 16 patches with weights large enough that every token matters."""
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(img_size=16, patch_size=4, **options)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def images_of(count=3, channels=3, side=16, seed=1):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(seed))


def subsets(count, size, num_patches=16, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_patches, generator=generator)[:size] + 1 for _ in range(count)])


def dense_attention(model, images, keep=None):
    """Row 0 of the last block's full attention matrix, float64, token by token (no fused kernels, no shared code)."""
    model = model.double()
    tokens = model._pos_embed(model.patch_embed(images.double()))
    if keep is not None:
        prefix = torch.arange(model.num_prefix_tokens)
        rows = [torch.cat([prefix, ids + model.num_prefix_tokens - 1]) for ids in keep]
        tokens = torch.stack([sequence[row] for sequence, row in zip(tokens, rows, strict=True)])
    tokens = model.norm_pre(tokens)
    for block in model.blocks[:-1]:
        tokens = block(tokens)
    block = model.blocks[-1]
    batch, length, width = tokens.shape
    heads = block.attn.num_heads
    q, k, _ = block.attn.qkv(block.norm1(tokens)).reshape(batch, length, 3, heads, width // heads).unbind(2)
    q, k = block.attn.q_norm(q), block.attn.k_norm(k)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (width // heads) ** -0.5
    weights = scores.softmax(dim=3).mean(dim=1)
    rows = weights[:, 0] if model.has_class_token else weights.mean(dim=1)
    model.float()
    return rows[:, model.num_prefix_tokens :].float()


VARIANTS = {
    "plain": {},
    "registers": {"reg_tokens": 2},
    "deit3": {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.5},
    "qk_norm": {"qk_norm": True, "qkv_bias": False},
    "pre_norm": {"pre_norm": True},
    "pooled": {"class_token": False, "global_pool": "avg"},
    "pooled_with_class": {"global_pool": "avg"},
    "dynamic": {"dynamic_img_size": True},
    "no_position": {"pos_embed": "none"},
}


# -- reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "logits", "attention"),
    [(None, "logits_full", "attn_full"), ("abs1", "logits1", "attn1"), ("abs2", "logits2", "attn2")],
)
def test_logits_and_attention_are_the_authors(ids, logits, attention):
    model, data = golden_vit()
    keep = all_patches(2, 16) if ids is None else data[ids][:, 1:]
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(forward_subset(model, data["x"], keep), data[logits], **close)
    torch.testing.assert_close(cls_attention(model, data["x"], keep), data[attention], **close)


def test_the_dropped_patches_alone_are_the_authors_too():
    model, data = golden_vit()
    dropped = complement(data["abs2"][:, 1:], 16)
    assert torch.equal(dropped, data["complement"][:, 1:])
    torch.testing.assert_close(
        forward_subset(model, data["x"], dropped), data["logits_complement"], rtol=1e-4, atol=2e-5
    )


def test_the_gradient_is_the_authors_and_exactly_zero_on_dropped_patches():
    model, data = golden_vit()
    x = data["x"].clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(forward_subset(model, x, data["abs2"][:, 1:]), data["y"])
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.item() == pytest.approx(data["ce"].item(), rel=1e-5)
    torch.testing.assert_close(gradient, data["ce_grad"], rtol=1e-4, atol=2e-6)
    dropped = take(patch_pixels(gradient, 8), data["complement"][:, 1:] - 1)
    assert (dropped == 0).all() and (take(patch_pixels(gradient, 8), data["abs2"][:, 1:] - 1) != 0).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_patches_are_timms_own_forward_pass(variant):
    model, images = tiny_vit(**VARIANTS[variant]), images_of()
    expected = model(images)
    torch.testing.assert_close(forward_subset(model, images, all_patches(3, 16)), expected, rtol=1e-5, atol=1e-5)
    class_logits, token_logits = read_tokens(model, embed(model, patch_pixels(images, 4)))
    torch.testing.assert_close(class_logits, expected, rtol=1e-5, atol=1e-5)
    states = model.fc_norm(model.forward_features(images)[:, model.num_prefix_tokens :])
    torch.testing.assert_close(token_logits, model.head(states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [None, 5])
def test_attention_is_a_row_of_the_full_matrix(variant, size):
    model, images = tiny_vit(**VARIANTS[variant]), images_of()
    keep = None if size is None else subsets(3, size)
    found = cls_attention(model, images, keep)
    torch.testing.assert_close(found, dense_attention(model, images, keep), rtol=1e-4, atol=1e-6)
    assert (found.sum(dim=1) < 1 + 1e-6).all()


def test_gradients_of_weights_are_those_of_the_whole_last_block():
    model, images = tiny_vit(init_values=0.5), images_of()
    expected = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(subset_logits(model, images, None).square().sum(), list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# -- property ---------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), size=st.integers(1, 16))
@settings(max_examples=25, deadline=None)
def test_the_order_of_patches_does_not_matter(seed, size):
    model, images = tiny_vit(), images_of()
    keep = subsets(3, size, seed=seed)
    shuffled = keep[:, torch.randperm(size, generator=torch.Generator().manual_seed(seed))]
    found = forward_subset(model, images, keep)
    torch.testing.assert_close(forward_subset(model, images, shuffled), found, rtol=1e-5, atol=1e-5)
    other = images.clone()  # pixels of dropped patches are not looked at, not even where they are nan
    places = (complement(keep, 16) - 1)[:, :, None].expand(-1, -1, 48)
    pixels = patch_pixels(other, 4).scatter(1, places, float("nan"))
    back = pixels.view(3, 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 16, 16)
    assert torch.equal(forward_subset(model, back, keep), found)


def test_gathering_before_the_embedding_is_gathering_after_it():
    model, images, keep = tiny_vit(), images_of(), subsets(3, 6)
    before = embed(model, take(patch_pixels(images, 4), keep - 1), keep)
    after = embed(model, patch_pixels(images, 4))
    torch.testing.assert_close(before[:, 1:], take(after[:, 1:], keep - 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(cls_attention(model, after, keep), cls_attention(model, images, keep))


@given(seed=st.integers(0, 1000), size=st.integers(0, 16))
@settings(max_examples=25, deadline=None)
def test_a_set_and_its_complement_are_all_patches(seed, size):
    keep = subsets(4, size, seed=seed)
    rest = complement(keep, 16)
    assert torch.equal(torch.cat([keep, rest], dim=1).sort(dim=1).values, all_patches(4, 16))
    assert torch.equal(rest, rest.sort(dim=1).values)


def test_black_patches_are_patches_like_any_other():
    model = tiny_vit()
    images = torch.zeros(2, 3, 16, 16)
    assert not torch.allclose(
        forward_subset(model, images, subsets(2, 3)), forward_subset(model, images, subsets(2, 9))
    )


def test_without_patches_the_class_token_is_alone():
    model = tiny_vit()
    found = forward_subset(model, images_of(), torch.empty(3, 0, dtype=torch.int64))
    assert found.isfinite().all() and torch.equal(found[0], found[1])


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.tensor([[0, 1]]), "0 is the class token"),
        (torch.tensor([[1, 17]]), "from 1 to 16"),
        (torch.tensor([[3, 3]]), "names a patch twice"),
        (torch.tensor([[1, 2], [1, 2]]), r"must be \(1, n\)"),
        (torch.tensor([[1.0]]), "int64"),
    ],
)
def test_wrong_ids_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        forward_subset(tiny_vit(), images_of(1), keep)


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"\(B, 3, 16, 16\) for this network, got \(1, 3, 32, 32\)"):
        forward_subset(tiny_vit(), images_of(1, side=32), all_patches(1, 16))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "got Linear"),
        (lambda: VisionTransformer(img_size=(16, 32), patch_size=4, embed_dim=8, depth=1, num_heads=1), "square"),
        (lambda: VisionTransformer(img_size=18, patch_size=4, embed_dim=8, depth=1, num_heads=1), "tile"),
        (
            lambda: VisionTransformer(
                img_size=16, patch_size=4, embed_dim=8, depth=1, num_heads=1, patch_drop_rate=0.5
            ),
            "patch_drop_rate",
        ),
        (
            lambda: SwinTransformer(img_size=16, patch_size=2, embed_dim=8, depths=(1,), num_heads=(1,), window_size=4),
            "SwinTransformer",
        ),
    ],
)
def test_networks_whose_patches_cannot_be_dropped_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        check_vit(build())
