"""FedNCA-ML's ETF, label attention, head and network: published numbers, closed forms, and what must not change."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from models.fednca import (
    FedNCANetwork,
    LabelAttention,
    build_backbone,
    build_fednca,
    etf_sha256,
    fednca_loss,
    pairwise_logits,
    prototype_products,
    simplex_etf,
    sincos_2d,
)
from models.networks import SmallCNN

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def golden(name):
    with np.load(GOLDEN / f"fednca_{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(seed=0, num_labels=7, **options):
    """A small network with every parameter off its initial value, so that biases and scales matter."""
    torch.manual_seed(seed)
    network = build_fednca("small_cnn", num_labels=num_labels, channels=1, image_size=16, width=8, **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return network


# -- simplex ETF ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 7, 10, 14, 20, 80])
def test_etf_is_that_of_the_authors_code(classes):
    expected = golden("etf")[f"m_{classes}"]
    torch.testing.assert_close(simplex_etf(*expected.shape), expected, atol=5e-6, rtol=0)  # built in float32 there


@pytest.mark.parametrize(
    ("classes", "own", "other"),
    [(7, 0.92582010, -0.15430335), (10, 0.94868330, -0.10540926), (80, 0.99373035, -0.01257887)],
)
def test_etf_has_the_two_numbers_of_its_formula(classes, own, other):
    etf = simplex_etf(classes, 128)
    assert etf.dtype == torch.float32 and (etf[:, classes:] == 0).all()
    square = etf[:, :classes]
    assert square.diagonal().numpy() == pytest.approx(own, abs=1e-8)
    assert square[~torch.eye(classes, dtype=torch.bool)].numpy() == pytest.approx(other, abs=1e-8)


@pytest.mark.parametrize("classes", [2, 7, 80])
def test_etf_rows_have_length_one_and_equal_angles_and_sum_to_zero(classes):
    etf = simplex_etf(classes, 96).double()
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(etf @ etf.T, expected, atol=3e-7, rtol=0)  # float32 entries
    assert etf.sum(dim=0).abs().max() < 1e-5 and torch.linalg.matrix_rank(etf, tol=1e-4) == classes - 1


@pytest.mark.parametrize(("classes", "dim"), [(1, 8), (0, 8), (9, 8)])
def test_etf_without_room_for_its_classes_is_refused(classes, dim):
    with pytest.raises(ValueError, match=rf"2 <= classes <= width, got {classes} classes and width {dim}"):
        simplex_etf(classes, dim)


def test_etf_fills_a_square():
    assert simplex_etf(8, 8).shape == (8, 8)


def test_two_processes_make_the_same_bytes():
    code = "from models.fednca import *; print(etf_sha256(simplex_etf(14, 512)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == etf_sha256(simplex_etf(14, 512))


def test_the_hash_sees_a_single_bit():
    etf = simplex_etf(7, 16)
    changed = etf.clone()
    changed[3, 12] = 1e-30
    assert etf_sha256(etf) == etf_sha256(etf.clone().T.contiguous().T) != etf_sha256(changed)


# -- position code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "dim"), [(2, 3, 32), (7, 7, 512), (1, 1, 4), (4, 2, 6)])
def test_position_code_is_its_formula(height, width, dim):
    half = dim // 2
    expected = np.zeros((height * width, dim))
    for y in range(height):
        for x in range(width):
            for k in range(dim):
                value, channel = (y, k) if k < half else (x, k - half)
                angle = value / 10000 ** (2 * (channel // 2) / half)
                expected[y * width + x, k] = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
    found = sincos_2d(height, width, dim)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("height", "width", "dim"), [(0, 2, 8), (2, 2, 7), (2, 2, 0)])
def test_position_code_of_an_odd_width_or_no_map_is_refused(height, width, dim):
    with pytest.raises(ValueError, match="even width"):
        sincos_2d(height, width, dim)


# -- label attention --------------------------------------------------------------------------------------------------


def golden_attention(position):
    data = golden("ladm")
    ladm = LabelAttention(32, int(data["heads"]), position)
    names = {"in_proj_weight": "w_in", "in_proj_bias": "b_in", "out_proj.weight": "w_out", "out_proj.bias": "b_out"}
    ladm.attention.load_state_dict({name: data[key] for name, key in names.items()}, strict=True)
    return ladm, data


@pytest.mark.parametrize(("position", "tag"), [(False, "nope"), (True, "pe")])
def test_class_features_and_weights_are_those_of_the_authors_code(position, tag):
    ladm, data = golden_attention(position)
    features, weights = ladm.attend(data["feat"], data["queries"])
    torch.testing.assert_close(features, data[f"cls_{tag}"], atol=2e-5, rtol=0)
    # Its pictures: mean of the three largest head weights, and a second softmax over the tokens.
    picture = weights.topk(3, dim=1).values.mean(dim=1).softmax(dim=2).unflatten(2, (2, 3))
    torch.testing.assert_close(picture, data[f"attn_{tag}"], atol=2e-5, rtol=0)
    low, high = picture.amin(dim=(2, 3), keepdim=True), picture.amax(dim=(2, 3), keepdim=True)
    stretched = (picture - low) / (high - low + 1e-6)
    torch.testing.assert_close(stretched, data[f"attn_norm_{tag}"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("position", [True, False])
def test_reordered_sums_are_torchs_attention_in_value_weights_and_gradients(position):
    ladm = LabelAttention(32, 4, position)
    with torch.no_grad():
        ladm.attention.in_proj_bias += 0.3 * normal(96)
        ladm.attention.out_proj.bias += 0.3 * normal(32, seed=1)
    feature_map = normal(3, 32, 4, 5, seed=2).requires_grad_()
    queries = normal(6, 32, seed=3).requires_grad_()
    tokens = feature_map.flatten(2).transpose(1, 2)
    tokens = tokens + sincos_2d(4, 5, 32) if position else tokens
    expected, attention = ladm.attention(queries.expand(3, -1, -1), tokens, tokens)
    features, maps = ladm.forward_with_maps(feature_map, queries)
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(maps.flatten(2), attention, atol=1e-6, rtol=1e-5)
    inputs = [feature_map, queries, *ladm.attention.parameters()]
    direction = normal(3, 6, 32, seed=4)
    for found, wanted in zip(
        torch.autograd.grad((features * direction).sum(), inputs),
        torch.autograd.grad((expected * direction).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_attention_has_the_parameters_of_one_attention_and_its_code_is_not_saved():
    ladm = LabelAttention(512, 4)
    ladm(normal(1, 512, 2, 2), simplex_etf(7, 512))
    assert sum(parameter.numel() for parameter in ladm.parameters()) == 1_050_624
    assert sorted(ladm.state_dict()) == [
        f"attention.{name}" for name in ("in_proj_bias", "in_proj_weight", "out_proj.bias", "out_proj.weight")
    ]


def test_position_code_is_made_once_for_a_map_size():
    ladm = LabelAttention(16, 4)
    code = ladm.position_code(2, 3, torch.device("cpu"))
    assert ladm.position_code(2, 3, torch.device("cpu")) is code
    assert ladm.position_code(3, 2, torch.device("cpu")).shape == (6, 16)
    assert ladm(normal(1, 16, 5, 4), simplex_etf(5, 16)).shape == (1, 5, 16)  # another size is no trouble


def test_order_of_tokens_matters_with_position_code_only():
    feature_map, queries = normal(2, 32, 3, 3), simplex_etf(5, 32)
    shuffled = feature_map.flatten(2)[:, :, torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    shuffled = shuffled.unflatten(2, (3, 3))
    blind, seeing = LabelAttention(32, 4, position=False), LabelAttention(32, 4)
    torch.testing.assert_close(blind(shuffled, queries), blind(feature_map, queries), atol=1e-5, rtol=0)
    assert (seeing(shuffled, queries) - seeing(feature_map, queries)).abs().max() > 1e-3


def test_maps_sum_to_one():
    maps = LabelAttention(32, 4).forward_with_maps(normal(2, 32, 3, 5), simplex_etf(5, 32))[1]
    assert maps.shape == (2, 5, 3, 5) and (maps >= 0).all()
    torch.testing.assert_close(maps.sum(dim=(2, 3)), torch.ones(2, 5))


@pytest.mark.parametrize(("dim", "heads"), [(30, 4), (7, 7), (8, 0)])
def test_width_that_the_heads_or_the_code_do_not_divide_is_refused(dim, heads):
    with pytest.raises(ValueError, match=f"width {dim} must be even and divisible by {heads} heads"):
        LabelAttention(dim, heads)


@pytest.mark.parametrize(("feature_map", "queries"), [((2, 16, 3, 3), (5, 32)), ((2, 32, 9), (5, 32)),
                                                      ((2, 32, 3, 3), (5, 16))])  # fmt: skip
def test_maps_and_queries_that_do_not_fit_are_refused(feature_map, queries):
    with pytest.raises(ValueError, match=r"expected a map \(B, 32, H, W\) and queries \(C, 32\)"):
        LabelAttention(32, 4)(torch.zeros(feature_map), torch.zeros(queries))


# -- pairwise logits --------------------------------------------------------------------------------------------------


def test_logits_are_scaled_inner_products_with_the_bias_of_the_prototype():
    features, etf, bias = normal(3, 5, 20), simplex_etf(5, 20), normal(5, seed=1)
    found = pairwise_logits(features, etf, torch.tensor(1.5), bias)
    for sample in range(3):
        for label in range(5):
            for prototype in range(5):
                expected = 1.5 * float(features[sample, label] @ etf[prototype]) + float(bias[prototype])
                assert found[sample, label, prototype].item() == pytest.approx(expected, abs=1e-5)


def test_logits_of_the_authors_code():
    data = golden("loss")
    found = pairwise_logits(data["cls"], data["proto"], data["scale"], data["bias"])
    torch.testing.assert_close(found, data["L"], atol=5e-6, rtol=1e-6)


@pytest.mark.parametrize("axis_aligned", [None, True, False])
def test_padding_of_the_prototypes_is_never_needed(axis_aligned):
    features, etf = normal(2, 5, 20), simplex_etf(5, 20)
    found = pairwise_logits(features, etf, 2.0, None, axis_aligned=axis_aligned)
    torch.testing.assert_close(found, 2 * features @ etf.T)


def test_prototypes_that_are_not_axis_aligned_are_read_in_full():
    rotation, _ = torch.linalg.qr(normal(20, 20))
    features, etf = normal(2, 5, 20), simplex_etf(5, 20) @ rotation
    torch.testing.assert_close(prototype_products(features, etf), features @ etf.T)
    trained = simplex_etf(5, 20).requires_grad_()  # its padding is zero and has a gradient
    (gradient,) = torch.autograd.grad(prototype_products(features, trained).square().sum(), trained)
    assert (gradient[:, 5:] != 0).any()


def test_logits_of_a_feature_without_bias_sum_to_zero():
    logits = pairwise_logits(normal(4, 7, 32), simplex_etf(7, 32), 10.0, None)
    assert logits.sum(dim=2).abs().max() < 1e-4 and (logits.max(dim=2).values >= 0).all()


def test_normalised_logits_are_cosines():
    features, etf = normal(2, 5, 20), simplex_etf(5, 20)
    found = pairwise_logits(features, etf, 3.0, None, normalize=True)
    expected = 3 * nn.functional.cosine_similarity(features[:, :, None], etf[None, None], dim=3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_logits_stay_float32_inside_autocast():
    features, etf = normal(2, 5, 20), simplex_etf(5, 20)
    with torch.autocast("cpu", torch.bfloat16):
        found = pairwise_logits(features, etf, torch.tensor(10.0), torch.zeros(5))
    assert found.dtype == torch.float32 and torch.equal(found, pairwise_logits(features, etf, 10.0, None))


def test_features_that_do_not_fit_the_prototypes_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 5, 16\) do not fit prototypes \(5, 20\)"):
        pairwise_logits(torch.zeros(2, 5, 16), simplex_etf(5, 20), 1.0, None)


# -- network: size, state, modes --------------------------------------------------------------------------------------


def trained_scalars(network):
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("data", ["dermamnist", "cifar10", "chestxray14_disease_only", "voc2012", "coco2017"])
def test_resnet18_has_the_published_numbers_of_parameters_and_bytes(data):
    counts = json.loads((GOLDEN / "fednca_param_counts.json").read_text())
    expected = counts["per_dataset"][data]
    with torch.device("meta"):
        network = build_fednca(num_labels=expected["C"])
        both = build_fednca(num_labels=expected["C"], etf_trainable=True)
        linear = build_fednca(num_labels=expected["C"], head="linear")
    assert trained_scalars(network) == expected["trainable_frozen_etf"]
    assert trained_scalars(network.backbone) == counts["resnet18_backbone_params_without_fc"]
    assert trained_scalars(network.ladm) == counts["ladm_params"]
    assert trained_scalars(both) == expected["trainable_plus_two_etf_copies"]
    assert trained_scalars(linear) == expected["fedavg_linear_head_params"]
    state = network.state_dict().values()
    assert sum(value.numel() * value.element_size() for value in state) == expected["upload_bytes_fp32_bn_int64"]
    floats = [value for value in state if value.is_floating_point()]
    assert sum(value.numel() for value in floats) == expected["upload_elements_frozen_etf_not_sent"] - 20


def test_dermamnist_trains_12227144_scalars():
    with torch.device("meta"):
        assert trained_scalars(build_fednca(num_labels=7)) == 12_227_144


def test_state_holds_no_frozen_etf_and_a_trainable_one():
    attention = [f"ladm.attention.{name}" for name in LabelAttention(32, 4).attention.state_dict()]
    names = [name for name in small().state_dict() if not name.startswith("backbone.")]
    assert sorted(names) == sorted([*attention, "head.logit_scale", "head.bias"])
    assert {"etf", "learned_queries"} <= set(small(etf_trainable=True).state_dict())


def test_resnet_keeps_torchvisions_names():
    names = set(build_backbone("resnet18")[0].state_dict())
    expected = {name for name in torchvision.models.resnet18().state_dict() if not name.startswith("fc.")}
    assert names == expected


BACKBONES = {
    "small_cnn": ({"channels": 1, "image_size": 16, "width": 8}, (32, 2, 2)),
    "resnet18": ({"image_size": 64}, (512, 8, 8)),
    "resnet50": ({"channels": 1, "image_size": 32, "norm": "group"}, (2048, 4, 4)),
    "vit_tiny_patch16_224": ({"channels": 1, "image_size": 32, "patch_size": 8}, (192, 4, 4)),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_gives_a_map_and_a_working_network(name):
    options, shape = BACKBONES[name]
    torch.manual_seed(0)
    backbone, dim = build_backbone(name, **options)
    images = normal(2, options.get("channels", 3), options["image_size"], options["image_size"])
    network = FedNCANetwork(backbone, dim=dim, num_labels=5).eval()
    with torch.no_grad():
        assert (dim, *backbone.eval()(images).shape[1:]) == (shape[0], *shape)
        assert network(images).shape == (2, 5)


def test_large_images_give_the_published_map():
    with torch.no_grad():
        assert build_backbone("resnet18")[0].eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 512, 7, 7)


def test_vision_transformer_map_is_in_reading_order_without_the_class_token():
    torch.manual_seed(0)
    backbone = build_backbone("vit_tiny_patch16_224", image_size=48)[0].eval()
    images = normal(1, 3, 48, 48)
    with torch.no_grad():
        tokens = backbone.vit.forward_features(images)
        feature_map = backbone(images)
    assert tokens.shape == (1, 10, 192) and torch.equal(feature_map[0, :, 1, 2], tokens[0, 1 + 1 * 3 + 2])


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("vgg11", {}, "no backbone 'vgg11'; there are small_cnn, resnet18, resnet50"),
        ("vit_no_such", {}, "no backbone 'vit_no_such'"),
        ("vit_relpos_small_patch16_224", {}, "not a plain vision transformer"),
        ("vit_tiny_patch16_224", {"image_size": 40}, "patches of 16 pixels do not tile 40 pixels"),
    ],
)
def test_backbones_that_there_are_not_are_refused(name, options, reason):
    with pytest.raises(ValueError, match=reason):
        build_backbone(name, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head": "mlp"}, "head='mlp' is unknown; there are ladm, etf, linear"),
        ({"queries": "text"}, "queries='text' is unknown"),
        (
            {"head": "etf", "queries": "learnable_random"},
            "queries='learnable_random' needs head='ladm', got head='etf'",
        ),
        ({"head": "linear", "etf_trainable": True}, "needs a head with an ETF, got head='linear'"),
        ({"num_labels": 33}, "2 <= classes <= width, got 33 classes and width 32"),
        ({"num_labels": 1}, "2 <= classes <= width, got 1 classes"),
        ({"num_heads": 5}, "divisible by 5 heads"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        small(**options)


def test_ablations_pool_the_map():
    images = normal(3, 1, 16, 16)
    network = small(head="etf").eval()
    pooled = network.backbone(images).mean(dim=(2, 3))
    expected = network.head.logit_scale * pooled @ network.etf.T + network.head.bias
    torch.testing.assert_close(network(images), expected)
    linear = small(head="linear").eval()
    torch.testing.assert_close(linear(images), linear.head(linear.backbone(images).mean(dim=(2, 3))))
    for other in (network, linear):
        with pytest.raises(ValueError, match="class features need head='ladm'; this network has head="):
            other.class_outputs(images)


def test_linear_ablation_is_the_baseline_network():
    torch.manual_seed(3)
    ours = build_fednca("small_cnn", num_labels=5, channels=1, width=8, head="linear").eval()
    baseline = SmallCNN(channels=1, num_labels=5, width=8).eval()
    renamed = {name.replace("backbone.", "features."): value for name, value in ours.state_dict().items()}
    baseline.load_state_dict(renamed, strict=True)
    images = normal(2, 1, 16, 16)
    torch.testing.assert_close(ours(images), baseline(images))


def test_logits_are_the_diagonal_of_the_pairwise_logits():
    network, images = small().eval(), normal(3, 1, 16, 16)
    logits, features = network.class_outputs(images)
    assert logits.shape == (3, 7, 7) and features.shape == (3, 7, 32)
    assert torch.equal(network(images), logits.diagonal(dim1=1, dim2=2))


def test_head_of_the_paper_has_no_parameters():
    network = small(logit_scale_init=1.0, learnable_scale=False, use_bias=False).eval()
    assert not list(network.head.parameters())
    logits, features = network.class_outputs(normal(2, 1, 16, 16))
    torch.testing.assert_close(logits, features @ network.etf.T)


@pytest.mark.parametrize("queries", ["fixed", "learnable_etf_init", "learnable_random"])
def test_query_modes_differ_in_what_is_trained_and_where_it_starts(queries):
    torch.manual_seed(0)
    network = build_fednca("small_cnn", num_labels=7, channels=1, width=8, queries=queries)
    assert network.queries.requires_grad == (queries != "fixed")
    assert torch.equal(network.queries, network.etf) == (queries != "learnable_random")
    assert not network.etf.requires_grad
    if queries == "learnable_random":  # rows of about the ETF's length
        assert network.queries.norm(dim=1).mean().item() == pytest.approx(1, abs=0.2)


def test_a_network_made_on_meta_and_emptied_has_its_etf_again():
    source = small().eval()
    with torch.device("meta"):
        network = build_fednca("small_cnn", num_labels=7, channels=1, image_size=16, width=8)
    network.to_empty(device="cpu").load_state_dict(source.state_dict(), strict=True)
    assert etf_sha256(network.etf) == etf_sha256(simplex_etf(7, 32))
    images = normal(2, 1, 16, 16)
    torch.testing.assert_close(network.eval()(images), source(images))


def test_vision_transformer_made_on_meta_is_complete():
    options = {"num_labels": 7, "image_size": 32, "patch_size": 16}
    source = build_fednca("vit_tiny_patch16_224", **options).eval()
    with torch.device("meta"):
        network = build_fednca("vit_tiny_patch16_224", **options)
    network.to_empty(device="cpu").load_state_dict(source.state_dict(), strict=True)
    images = normal(1, 3, 32, 32)
    torch.testing.assert_close(network.eval()(images), source(images))


# -- network: behaviour -----------------------------------------------------------------------------------------------


def labelled(batch=6, labels=7, seed=5):
    return (torch.rand(batch, labels, generator=torch.Generator().manual_seed(seed)) < 0.3).float()


def step(network, *, lambda_neg=1.0, lambda_pos=1.0, batch=6):
    """Gradients of one batch in the parameters."""
    logits, features = network.class_outputs(normal(batch, 1, 16, 16, seed=4))
    targets = labelled(batch, network.num_labels)
    loss, _ = fednca_loss(logits, features, targets, network.etf, lambda_neg=lambda_neg, lambda_pos=lambda_pos)
    loss.backward()
    return loss


def test_dead_parameters_have_exactly_no_gradient():
    network = small()
    step(network)
    attention = network.ladm.attention
    assert (attention.in_proj_weight.grad[:32, 7:] == 0).all()  # queries are zero in columns >= C
    assert (attention.in_proj_weight.grad[:32, :7] != 0).any()
    assert (attention.in_proj_bias.grad[32:64] == 0).all()  # key bias: a softmax does not see it
    assert (attention.out_proj.weight.grad[7:] != 0).any()  # the contrast divides by |h|, which has all columns


def test_without_contrast_only_c_rows_of_the_output_projection_learn():
    network = small()
    step(network, lambda_pos=0.0)
    gradient = network.ladm.attention.out_proj.weight.grad
    assert (gradient[7:] == 0).all() and (gradient[:7] != 0).any()


@pytest.mark.parametrize("lambdas", [(0.0, 0.0), (1.0, 1.0)])
def test_frozen_etf_has_no_gradient_and_keeps_its_bits(lambdas):
    network = small()
    before = network.etf.clone()
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        step(network, lambda_neg=lambdas[0], lambda_pos=lambdas[1])
        optimiser.step()
    assert network.etf.grad is None and torch.equal(network.etf, before)
    assert etf_sha256(network.etf) == etf_sha256(simplex_etf(7, 32))
    assert all(parameter is not network.etf for group in optimiser.param_groups for parameter in group["params"])


def test_trainable_etf_and_its_queries_move_apart():
    network = small(etf_trainable=True)
    with torch.no_grad():
        network.learned_queries.copy_(network.etf)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    step(network)
    optimiser.step()
    assert not torch.equal(network.etf, network.queries) and not torch.equal(network.etf, simplex_etf(7, 32))


def test_a_sample_is_scored_alone_as_in_a_batch():
    network, images = small().eval(), normal(5, 1, 16, 16)
    logits, features = network.class_outputs(images)
    for row in range(5):
        alone = network.class_outputs(images[row : row + 1])
        torch.testing.assert_close(alone[0][0], logits[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone[1][0], features[row], atol=1e-5, rtol=1e-5)


def test_permuting_labels_needs_prototypes_and_queries_permuted_too():
    network, images = small(queries="learnable_etf_init").eval(), normal(3, 1, 16, 16)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    both, bias_only = copy.deepcopy(network), copy.deepcopy(network)
    with torch.no_grad():
        for other in (both, bias_only):
            other.head.bias.copy_(network.head.bias[order])
        both.learned_queries.copy_(network.queries[order])
        both.etf.copy_(network.etf[order])
    expected = network(images)[:, order]
    torch.testing.assert_close(both(images), expected, atol=1e-5, rtol=1e-5)
    assert (bias_only(images) - expected).abs().max() > 1e-2


def test_half_precision_network_still_gives_float32_logits_and_loss():
    network, images = small(), normal(4, 1, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        logits, features = network.class_outputs(images)
    loss, parts = fednca_loss(logits, features, labelled(4), network.etf, lambda_neg=1.0, lambda_pos=1.0)
    loss.backward()
    assert features.dtype == torch.bfloat16 and logits.dtype == loss.dtype == torch.float32
    assert {part.dtype for part in parts.values()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def mosaics(count, labels=4, seed=0):
    """2x2 mosaics of 8x8 tiles, each tile one of four textures or empty; the label says which textures are there."""
    rng = np.random.default_rng(seed)
    glyphs = np.sign(rng.standard_normal((labels, 8, 8)))
    images, targets = np.zeros((count, 1, 16, 16), np.float32), np.zeros((count, labels), np.int8)
    for image, target in zip(images, targets, strict=True):
        for y in (0, 8):
            for x in (0, 8):
                if rng.random() < 0.6:
                    label = rng.integers(labels)
                    image[0, y : y + 8, x : x + 8] = glyphs[label] + 0.1 * rng.standard_normal((8, 8))
                    target[label] = 1
    return torch.from_numpy(images), torch.from_numpy(targets)


def test_thirty_two_mosaics_are_learned_by_heart():
    images, targets = mosaics(32)
    torch.manual_seed(0)
    network = build_fednca("small_cnn", num_labels=4, channels=1, image_size=16, width=16)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(200):
        logits, features = network.class_outputs(images)
        loss, _ = fednca_loss(logits, features, targets, network.etf, lambda_neg=0.01, lambda_pos=1.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert torch.equal(logits.diagonal(dim1=1, dim2=2) > 0, targets == 1)
