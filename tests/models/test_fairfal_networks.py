"""The networks of FairFAL: the authors' counts, keys and forward pass, and features beside logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.fairfal_networks import NETWORKS, CNN4Conv, build_feature_network

GOLDEN = Path(__file__).parents[1] / "golden" / "fairfal"
INFO = json.loads((GOLDEN / "case10_cnn4conv_info.json").read_text())


def cnn4conv_of(info):
    return CNN4Conv(channels=info["in_channels"], num_labels=info["num_classes"], image_size=info["img"])


def with_weights_by_formula(network):
    """Every float entry of the state dict from its running index; see the golden README of the project."""
    state, start = network.state_dict(), 0
    for name, value in state.items():
        if not value.is_floating_point():
            continue
        t = np.arange(start, start + value.numel(), dtype=np.float64)
        start += value.numel()
        v = np.sin(0.7 * t + 0.3 * np.cos(1.3 * t))
        if name.endswith("running_var"):
            v = 1 + 0.5 * v
        elif name.endswith(".1.weight"):  # batch norm
            v = 1 + 0.2 * v
        elif name.endswith("weight"):
            v = 0.05 * v
        else:
            v = 0.1 * v
        state[name] = torch.from_numpy(v.reshape(value.shape)).float()
    network.load_state_dict(state, strict=True)
    return network.eval()


@pytest.mark.parametrize("case", INFO)
def test_cnn4conv_has_the_authors_parameters_and_keys(case):
    info, network = INFO[case], cnn4conv_of(INFO[case])
    state = network.state_dict()
    assert [[name, list(value.shape)] for name, value in state.items()] == info["keys"]
    assert sum(parameter.numel() for parameter in network.parameters()) == info["params"]
    assert sum(value.numel() * value.element_size() for value in state.values()) == info["state_dict_bytes"]
    assert network.dim == info["emb_dim"] and (network.linear.bias == 0).all()


@pytest.mark.parametrize("case", INFO)
def test_cnn4conv_computes_what_the_authors_does(case):
    info = INFO[case]
    network = with_weights_by_formula(cnn4conv_of(info))
    shape = (2, info["in_channels"], info["img"], info["img"])
    t = np.arange(np.prod(shape), dtype=np.float64)
    images = torch.from_numpy(np.sin(0.05 * t + 0.2 * np.cos(0.9 * t)).reshape(shape)).float()
    with torch.no_grad():
        logits, features = network.outputs(images)
        assert torch.equal(network(images), logits)
    with np.load(GOLDEN / "case10_cnn4conv_forward.npz", allow_pickle=False) as golden:
        np.testing.assert_allclose(logits, golden[f"{case}__logits"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(features, golden[f"{case}__features"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters", "state_bytes", "dim"),
    [("resnet18", 11_173_962, 44_734_408, 512), ("mobilenet", 3_217_226, 12_956_672, 1024)],
)
def test_ablation_backbones_have_the_sizes_of_the_spec(name, parameters, state_bytes, dim):
    network = build_feature_network(name, channels=3, num_labels=10, image_size=32)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert sum(value.numel() * value.element_size() for value in network.state_dict().values()) == state_bytes
    assert network.dim == dim


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 50)])
def test_logits_are_the_linear_layer_of_the_features(name, channels, side):
    network = build_feature_network(name, channels=channels, num_labels=4, image_size=side).eval()
    images = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, features = network.outputs(images)
        assert logits.shape == (2, 4) and features.shape == (2, network.dim)
        torch.testing.assert_close(logits, network.linear(features))
        assert (features >= 0).all()


def test_residual_blocks_start_as_the_identity():
    body = build_feature_network("resnet18", channels=1, num_labels=2, image_size=32).features
    last = [module for name, module in body.named_modules() if name.endswith("bn2")]
    assert len(last) == 8 and all((module.weight == 0).all() for module in last)


def test_pictures_too_small_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="needs 16 pixels, got 15"):
        build_feature_network("cnn4conv", channels=1, num_labels=2, image_size=15)
    with pytest.raises(ValueError, match="no network 'vgg' with features; there are cnn4conv, mobilenet, resnet18"):
        build_feature_network("vgg", channels=1, num_labels=2, image_size=32)
