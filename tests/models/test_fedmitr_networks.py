"""The networks of `fedmitr`: what names lead to, and what a file of weights has to be before it is read."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from models.fedmitr_networks import build_vit
from models.vit_tokens import check_vit, grid_of

TINY = {"model": "vit", "patch": 8, "width": 16, "depth": 2, "heads": 2, "init_sha256": ""}


def vit(weights="", *, num_labels=4, image_size=32, channels=1, **changes):
    options = SimpleNamespace(**{**TINY, **changes})
    return build_vit(options, num_labels=num_labels, image_size=image_size, channels=channels, weights=weights)


def saved(network, path):
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("channels", [1, 3])
def test_own_network_takes_the_datas_channels_and_size(channels):
    network = vit(channels=channels, image_size=24, patch=4)
    check_vit(network)
    assert grid_of(network) == 6
    assert network(torch.zeros(2, channels, 24, 24)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [
        ("deit_tiny_patch16_224", 22_124_840),
        ("deit_small_patch16_224", 86_697_512),
        ("deit_base_patch16_224", 343_244_840),
    ],
)
def test_published_networks_are_as_large_on_the_wire_as_the_specification_says(name, size_bytes):
    """Section 7: 152 tensors with 10 labels, 4 bytes a value and 128 of .npy header a tensor."""
    with torch.device("meta"):
        state = vit(model=name, num_labels=10, image_size=224, channels=3).state_dict()
    assert len(state) == 152
    assert sum(4 * value.numel() + 128 for value in state.values()) == size_bytes


def test_dinov2_of_112_pixels_has_an_eight_by_eight_grid():
    with torch.device("meta"):
        assert grid_of(vit(model="vit_small_patch14_dinov2", image_size=112, channels=3)) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vit_imaginary"}, "is unknown; use 'vit' or a name of timm"),
        ({"model": "resnet18"}, "is no vision transformer"),
        ({"model": "swin_tiny_patch4_window7_224", "image_size": 224}, "needs timm's VisionTransformer"),
        ({"patch": 7}, "must tile the image|patches must tile"),
        ({"heads": 3}, "fedmitr.heads = 3 does not divide fedmitr.width = 16"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(changes, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        vit(**changes)


def test_weights_fill_everything_but_the_head(tmp_path):
    torch.manual_seed(0)
    donor = vit(num_labels=9)
    path, sha256 = saved(donor, tmp_path / "body.safetensors")
    torch.manual_seed(1)
    plain = vit()
    torch.manual_seed(1)
    network = vit(path, init_sha256=sha256)
    for name, value in network.state_dict().items():
        source = plain if name.startswith("head.") else donor
        assert torch.equal(value, source.state_dict()[name]), name


def test_positions_of_another_grid_are_resampled_and_a_constant_stays_one(tmp_path):
    donor = vit(image_size=64)
    with torch.no_grad():
        donor.pos_embed[:, 1:] = torch.arange(16.0)
    path, sha256 = saved(donor, tmp_path / "body.safetensors")
    network = vit(path, init_sha256=sha256)
    assert network.pos_embed.shape == (1, 17, 16)
    torch.testing.assert_close(network.pos_embed[0, 1:], torch.arange(16.0).expand(16, 16))
    assert torch.equal(network.pos_embed[:, :1], donor.pos_embed[:, :1])  # the class token has no place


def test_another_file_is_refused_and_its_checksum_told(tmp_path):
    path, sha256 = saved(vit(), tmp_path / "body.safetensors")
    with pytest.raises(ValueError, match=f"has the SHA-256 {sha256}, fedmitr.init_sha256 is 'abc'"):
        vit(path, init_sha256="abc")


@pytest.mark.parametrize(
    ("donor", "message"),
    [
        ({"channels": 3}, r"patch_embed.proj.weight: \(16, 3, 8, 8\), expected \(16, 1, 8, 8\).*data.channels = 3"),
        ({"depth": 1}, r"12 tensors \(blocks.1"),
        ({"width": 8}, "give a file of the same model"),
    ],
)
def test_a_file_of_another_network_is_refused_tensor_by_tensor(tmp_path, donor, message):
    path, sha256 = saved(vit(**donor), tmp_path / "body.safetensors")
    with pytest.raises(ValueError, match=message):
        vit(path, init_sha256=sha256)
