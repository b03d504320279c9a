"""Fusion of image and report features: golden numbers, what is absent has no influence, who reads whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.incongruent_fusion import (
    AttentionFusion,
    FusionGate,
    GatedFusion,
    PooledFusion,
    attention_mask,
    imputation_net,
    mean_weights,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "incongruent" / "01_gated_fusion.npz"
PATTERNS = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 0]], dtype=torch.bool)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shaken(module, scale=0.5):
    """Every parameter off its initial value, so that zeros and ones at the start hide nothing."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter += scale * normal(*parameter.shape, seed=100 + number, dtype=parameter.dtype)
    return module.eval()


def golden_fusion(dtype=torch.float64):
    with np.load(GOLDEN) as arrays:
        data = {key: torch.from_numpy(arrays[key]).to(dtype) for key in arrays}
    fusion = GatedFusion(6).to(dtype)
    names = ["Wg", "bg", "W1", "b1", "W2", "b2", "ln_g", "ln_b"]
    with torch.no_grad():
        for parameter, name in zip(fusion.parameters(), names, strict=True):
            parameter.copy_(data[f"p_{name}"])
    return fusion.eval(), data


# -- gate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-9, 1e-10), (torch.float32, 2e-5, 2e-6)])
def test_gate_and_feature_are_the_golden_ones(dtype, rtol, atol):
    fusion, data = golden_fusion(dtype)
    f, gate = fusion(data["zv"], data["zt"], data["m"].bool())
    torch.testing.assert_close(gate, data["gate"], rtol=rtol, atol=atol)
    torch.testing.assert_close(f, data["f"], rtol=rtol, atol=atol)
    h = gate[:, 0] * torch.where(data["m"][:, :1] == 1, data["zv"], 0) + gate[:, 1] * torch.where(
        data["m"][:, 1:] == 1, data["zt"], 0
    )
    torch.testing.assert_close(h, data["h"], rtol=rtol, atol=atol)


def test_planted_nan_and_inf_change_nothing_and_give_no_gradient():
    fusion, data = golden_fusion()
    present = data["m"].bool()
    clean, clean_gate = fusion(data["zv"], data["zt"], present)
    z_image, z_text = data["zv_poison"].clone().requires_grad_(), data["zt_poison"].clone().requires_grad_()
    assert not z_image.isfinite().all() and not z_text.isfinite().all()
    f, gate = fusion(z_image, z_text, present)
    assert torch.equal(f, clean) and torch.equal(gate, clean_gate)
    f.square().sum().backward()
    assert (z_image.grad[~present[:, 0]] == 0).all() and (z_text.grad[~present[:, 1]] == 0).all()
    assert (z_image.grad[present[:, 0]] != 0).all() and z_text.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in fusion.parameters())


@pytest.mark.parametrize("kind", ["vector", "scalar"])
def test_a_lone_modality_has_weight_one_and_leaves_the_gate_without_gradient(kind):
    fusion = shaken(GatedFusion(8, kind))
    present = torch.tensor([[True, False], [False, True]])
    f, gate = fusion(normal(2, 8), normal(2, 8, seed=1), present)
    assert torch.equal(gate, present[:, :, None].expand(2, 2, 8).float())
    f.square().sum().backward()
    assert all((parameter.grad == 0).all() for parameter in fusion.gate.parameters())
    assert any((parameter.grad != 0).any() for parameter in fusion.fusion.parameters())


@given(st.integers(0, 2**31))
def test_weights_of_present_modalities_sum_to_one(seed):
    gate = shaken(FusionGate(6), 2.0)(normal(5, 6, seed=seed), normal(5, 6, seed=seed + 1), PATTERNS)
    torch.testing.assert_close(gate.sum(dim=1), torch.ones(5, 6))
    assert (gate[~PATTERNS] == 0).all() and (gate[PATTERNS] > 0).all()


def test_scalar_gate_weighs_all_dimensions_alike_and_has_two_outputs():
    gate = shaken(FusionGate(6, "scalar"))
    weights = gate(normal(5, 6), normal(5, 6, seed=1), PATTERNS)
    assert weights.shape == (5, 2, 6) and torch.equal(weights, weights[:, :, :1].expand(5, 2, 6))
    assert gate.linear.weight.shape == (2, 14)


def test_an_untrained_gate_is_the_plain_average_and_an_untrained_fusion_its_norm():
    fusion = GatedFusion(8).eval()
    z_image, z_text, present = normal(1, 8), normal(1, 8, seed=1), torch.tensor([[True, True]])
    f, gate = fusion(z_image, z_text, present)
    assert (gate == 0.5).all() and torch.equal(gate, mean_weights(present, 8, torch.float32))
    torch.testing.assert_close(f, torch.nn.functional.layer_norm((z_image + z_text) / 2, (8,)))


def test_dropout_draws_from_torchs_generator_and_only_in_training():
    fusion = shaken(GatedFusion(8)).train()
    inputs = normal(5, 8), normal(5, 8, seed=1), PATTERNS
    torch.manual_seed(1)
    first, second = fusion(*inputs)[0], fusion(*inputs)[0]
    torch.manual_seed(1)
    assert torch.equal(first, fusion(*inputs)[0]) and not torch.equal(first, second)
    fusion.eval()
    assert torch.equal(fusion(*inputs)[0], fusion(*inputs)[0])


def test_an_unknown_gate_is_refused():
    with pytest.raises(ValueError, match="gate='matrix' is unknown; there are vector, scalar"):
        FusionGate(8, "matrix")


# -- pooled ablations -------------------------------------------------------------------------------------------------


def test_average_is_over_what_is_present():
    weights = mean_weights(PATTERNS, 3, torch.float64)
    expected = torch.tensor([[0.5, 0.5], [1, 0], [0, 1], [0.5, 0.5], [1, 0]], dtype=torch.float64)
    assert torch.equal(weights, expected[:, :, None].expand(5, 2, 3))


def test_concatenation_has_zeros_for_what_is_absent():
    fusion = shaken(PooledFusion(8, concat=True))
    z_image, z_text = normal(5, 8), normal(5, 8, seed=1)
    blank = torch.where(PATTERNS[:, :1], z_image, 0), torch.where(PATTERNS[:, 1:], z_text, 0)
    h = fusion.join(torch.cat(blank, dim=1))
    inner = fusion.inner(torch.cat([h, PATTERNS.float()], dim=1))
    expected = fusion.norm(h + fusion.outer(torch.nn.functional.gelu(inner)))
    poison = torch.where(PATTERNS[:, :1], z_image, torch.nan), torch.where(PATTERNS[:, 1:], z_text, torch.inf)
    assert torch.equal(fusion(*poison, PATTERNS), expected)


def test_label_source_moves_the_feature_and_none_counts_as_reviewed():
    fusion = shaken(PooledFusion(8, sources=True))
    inputs = normal(3, 8), normal(3, 8, seed=1), PATTERNS[:3], mean_weights(PATTERNS[:3], 8, torch.float32)
    reviewed, mixed = fusion(*inputs), fusion(*inputs, torch.tensor([0, 1, 2]))
    assert torch.equal(reviewed, fusion(*inputs, torch.zeros(3, dtype=torch.int64)))
    assert torch.equal(reviewed[0], mixed[0]) and (reviewed[1:] != mixed[1:]).any(dim=1).all()
    assert (PooledFusion(8, sources=True).sources.weight == 0).all()


# -- attention --------------------------------------------------------------------------------------------------------

# Rows read columns: CLS, image 1, image 2, text 1, text 2, text 3.
FAMILIES = {
    "full": ["111111", "011111", "011111", "011111", "011111", "011111"],
    "s2s": ["111111", "011000", "011000", "011100", "011110", "011111"],
    "bar": ["111111", "011111", "011111", "011100", "011110", "011111"],
    "non_cross": ["111111", "011000", "011000", "000111", "000111", "000111"],
}


def table(rows):
    return torch.tensor([[cell == "1" for cell in row] for row in rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_who_reads_whom(family):
    found = attention_mask(family, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool))
    assert torch.equal(found[0], table(FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_tokens_are_read_by_nobody_and_read_only_themselves(family):
    image = torch.tensor([[True, True], [False, False]])
    text = torch.tensor([[True, False, False], [True, True, False]])
    found = attention_mask(family, image, text)
    valid = torch.cat([torch.ones(2, 1, dtype=torch.bool), image, text], dim=1)
    for row in range(2):
        for reader in range(6):
            for read in range(6):
                expected = bool(table(FAMILIES[family])[reader, read] and valid[row, reader] and valid[row, read])
                assert bool(found[row, reader, read]) == (expected or reader == read)


def test_unknown_masks_are_refused():
    with pytest.raises(ValueError, match="attn_mask='causal' is unknown"):
        AttentionFusion(8, mask="causal")
    with pytest.raises(ValueError, match="attention mask 'mixed' is unknown"):
        attention_mask("mixed", torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool))


def token_batch(seed=0):
    image_valid = torch.tensor([[True, True], [False, False], [True, True]])
    text_valid = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    return normal(3, 2, 8, seed=seed), image_valid, normal(3, 3, 8, seed=seed + 1), text_valid


def plain_attention(fusion, tokens, allowed):
    """One sequence through the layers, head by head, in float64 loops over readers."""
    x = tokens
    for layer in fusion.layers:
        attention, width = layer.self_attn, x.shape[1] // fusion.num_heads
        normed = layer.norm1(x)
        q, k, v = torch.nn.functional.linear(normed, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=1)
        read = torch.zeros_like(x)
        for head in range(fusion.num_heads):
            cut = slice(head * width, (head + 1) * width)
            for reader in range(len(x)):
                columns = allowed[reader].nonzero().squeeze(1)
                weights = (k[columns, cut] @ q[reader, cut] / width**0.5).softmax(dim=0)
                read[reader, cut] = weights @ v[columns, cut]
        x = x + attention.out_proj(read)
        x = x + layer.linear2(torch.nn.functional.gelu(layer.linear1(layer.norm2(x))))
    return fusion.norm(x[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_plain_loops(family):
    fusion = shaken(AttentionFusion(8, mask=family).double(), 0.3)
    image, image_valid, text, text_valid = (
        part.double() if part.is_floating_point() else part for part in token_batch()
    )
    found = fusion(image, image_valid, text, text_valid)
    allowed = attention_mask(family, image_valid, text_valid)
    for row in range(3):
        blocks = [fusion.cls[None], image[row] + fusion.modality[0], text[row] + fusion.modality[1]]
        torch.testing.assert_close(found[row], plain_attention(fusion, torch.cat(blocks), allowed[row]))
    with torch.no_grad():  # torch has another kernel for inference
        torch.testing.assert_close(fusion(image, image_valid, text, text_valid), found.detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_are_not_valid_change_nothing_and_give_no_gradient(family):
    fusion = shaken(AttentionFusion(8, mask=family))
    image, image_valid, text, text_valid = token_batch()
    clean = fusion(image, image_valid, text, text_valid)
    image = torch.where(image_valid[:, :, None], image, torch.nan).requires_grad_()
    text = torch.where(text_valid[:, :, None], text, torch.inf).requires_grad_()
    found = fusion(image, image_valid, text, text_valid)
    assert torch.equal(found, clean)
    found.square().sum().backward()
    assert (image.grad[~image_valid] == 0).all() and (text.grad[~text_valid] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in fusion.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_token_sees_the_report_under_every_mask(family):
    fusion = shaken(AttentionFusion(8, mask=family))
    image, image_valid, text, text_valid = token_batch()
    changed = text.clone()
    changed[0, 0] += 1
    moved = (fusion(image, image_valid, text, text_valid) != fusion(image, image_valid, changed, text_valid)).any(dim=1)
    assert moved.tolist() == [True, False, False]


def test_mixed_draws_a_mask_for_every_training_batch_and_evaluates_with_full():
    fusion = AttentionFusion(8, mask="mixed").train()
    torch.manual_seed(0)
    families = [fusion._family() for _ in range(400)]
    # 0.75 of 400 draws, deviation 8.7
    assert set(families) == {"s2s", "full"} and abs(families.count("s2s") - 300) < 40
    fusion = shaken(fusion)
    full = shaken(AttentionFusion(8, mask="full"))
    full.load_state_dict(fusion.state_dict())
    assert torch.equal(fusion(*token_batch()), full(*token_batch()))


def test_label_source_reaches_the_class_token():
    fusion = shaken(AttentionFusion(8, sources=True))
    reviewed, mixed = fusion(*token_batch()), fusion(*token_batch(), torch.tensor([0, 1, 2]))
    assert torch.equal(reviewed[0], mixed[0]) and (reviewed[1:] != mixed[1:]).any(dim=1).all()


# -- imputation -------------------------------------------------------------------------------------------------------


def test_imputation_net_is_two_layers_of_the_shared_width():
    net = imputation_net(8)
    first, second = net[0], net[2]
    z = normal(3, 8)
    expected = (z @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias
    torch.testing.assert_close(net(z), expected)
    assert sum(parameter.numel() for parameter in net.parameters()) == 2 * (8 * 8 + 8)
