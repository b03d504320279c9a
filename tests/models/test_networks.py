"""The networks of the baselines: shapes, stems, norms, and what a file of weights may lack."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.networks import SmallCNN, build_network, load_backbone, resnet18


def small(**changes):
    return build_network(
        "small_cnn", **{"channels": 1, "num_labels": 5, "image_size": 16, "width": 8, "norm": "batch"} | changes
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 16, 33])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_small_cnn_gives_one_logit_a_label_for_any_input_from_8_pixels(channels, size, norm):
    network = small(channels=channels, norm=norm).eval()
    assert network(torch.zeros(2, channels, size, size)).shape == (2, 5)


def test_small_cnn_has_the_parameters_of_its_three_blocks():
    # 3x3 convolutions without bias 1->8->16->32, norm 2 a channel, head 32 -> 5 with bias
    expected = 9 * (8 + 8 * 16 + 16 * 32) + 2 * (8 + 16 + 32) + 32 * 5 + 5
    assert sum(value.numel() for value in small().parameters()) == expected


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (64, 3), (95, 3)])
def test_small_images_get_a_stem_that_keeps_their_size(size, channels):
    network = resnet18(channels=channels, num_labels=3, image_size=size)
    assert network.conv1.kernel_size == (3, 3) and network.conv1.stride == (1, 1)
    assert isinstance(network.maxpool, nn.Identity)
    assert network.conv1(torch.zeros(1, channels, size, size)).shape[-2:] == (size, size)
    assert network.eval()(torch.zeros(2, channels, size, size)).shape == (2, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_keep_the_published_stem(channels):
    network = resnet18(channels=channels, num_labels=3, image_size=96)
    assert network.conv1.kernel_size == (7, 7) and network.conv1.in_channels == channels
    assert isinstance(network.maxpool, nn.MaxPool2d)


@pytest.mark.parametrize(
    "network", [small(norm="group"), resnet18(channels=1, num_labels=2, norm="group", image_size=32)]
)
def test_group_norm_leaves_no_buffer_to_average(network):
    assert not list(network.buffers())
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())


def test_group_norm_does_not_mix_the_samples_of_a_batch():
    network = small(norm="group").train()
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(images)[:1], network(images[:1]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [4, 5, 6, 7, 12, 33])
def test_group_norm_divides_any_width(width):
    assert small(norm="group", width=width).eval()(torch.zeros(1, 1, 8, 8)).shape == (1, 5)


def test_the_initial_weights_follow_torchs_generator():
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(small().head.weight.detach())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_unknown_network_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="no network 'vgg'; there are small_cnn and resnet18"):
        build_network("vgg", channels=1, num_labels=1, image_size=8, width=4, norm="batch")


# -- weights from a file --------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    """``weights(without=..., change=...)``: a file made from another SmallCNN with two labels more."""

    def write(without=(), change=()):
        state = {name: value + 1 for name, value in SmallCNN(channels=1, num_labels=5, width=8).state_dict().items()}
        state = {name: value for name, value in state.items() if not name.startswith(tuple(without))} | dict(change)
        path = tmp_path / "backbone.safetensors"
        save_file(state, path)
        return path, state

    return write


def test_a_whole_file_is_loaded_to_the_last_tensor(weights):
    path, state = weights()
    network = small()
    load_backbone(network, path)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_only_the_head_may_be_absent_and_stays_as_it_was(weights):
    path, state = weights(without=["head."])
    network = small()
    head = network.head.weight.detach().clone()
    load_backbone(network, path)
    assert torch.equal(network.head.weight, head)
    assert torch.equal(network.features[0][0].weight, state["features.0.0.weight"])


WRONG = {
    "a missing layer": ({"without": ["features.1.0"]}, r"absent \['features.1.0.weight'\]"),
    "another shape": ({"change": {"features.0.0.weight": torch.zeros(8, 3, 3, 3)}}, r"wrong \['features.0.0.weight'\]"),
    "a head for other labels": ({"change": {"head.weight": torch.zeros(7, 32)}}, r"wrong \['head.weight'\]"),
    "an extra tensor": ({"change": {"decoder.weight": torch.zeros(1)}}, r"wrong \['decoder.weight'\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_is_refused_and_nothing_is_loaded(weights, name):
    changes, reason = WRONG[name]
    path, _ = weights(**changes)
    network = small()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(ValueError, match=f"backbone.safetensors does not fit the network: .*{reason}"):
        load_backbone(network, path)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
