"""Attention and Grad-CAM maps: what they are, and that looking leaves the network as it was."""

from __future__ import annotations

import pytest
import torch

from models.fednca import build_fednca
from models.fednca_maps import attention_maps, grad_cam


def network_of(**options):
    torch.manual_seed(0)
    network = build_fednca("small_cnn", num_labels=5, channels=1, image_size=24, width=8, **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return network.eval()


def images(count=3):
    return torch.randn(count, 1, 24, 24, generator=torch.Generator().manual_seed(1))


def state(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def test_attention_maps_are_torchs_head_mean_weights():
    network, batch = network_of(), images()
    tokens = network.backbone(batch).flatten(2).transpose(1, 2)
    tokens = tokens + network.ladm.position_code(3, 3, tokens.device)
    _, expected = network.ladm.attention(network.etf.expand(3, -1, -1), tokens, tokens, average_attn_weights=True)
    maps = attention_maps(network, batch)
    assert maps.shape == (3, 5, 3, 3) and not maps.requires_grad
    torch.testing.assert_close(maps.flatten(2), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("head", ["etf", "linear"])
def test_networks_without_attention_have_no_attention_maps(head):
    with pytest.raises(ValueError, match=f"attention maps need head='ladm'; this network has head='{head}'"):
        attention_maps(network_of(head=head), images())


def test_grad_cam_of_the_linear_head_is_its_class_activation_map():
    # There the logit is w . mean(F) + b: the gradient in every cell is w / (H W), and the map relu(w . F) / (H W).
    network, batch = network_of(head="linear"), images()
    expected = torch.einsum("d,bdhw->bhw", network.head.weight[2], network.backbone(batch)).relu() / 9
    torch.testing.assert_close(grad_cam(network, batch, 2), expected.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("head", ["ladm", "etf"])
def test_grad_cam_is_the_mean_gradient_times_the_map(head):
    network, batch = network_of(head=head), images()
    feature_map = network.backbone(batch).detach().requires_grad_()
    logits = network.logits_of(feature_map)
    expected = torch.zeros(3, 3, 3)
    for sample in range(3):
        (gradient,) = torch.autograd.grad(logits[sample, 4], feature_map, retain_graph=True)
        for channel in range(network.dim):
            expected[sample] += gradient[sample, channel].mean() * feature_map[sample, channel].detach()
    found = grad_cam(network, batch, 4)
    assert found.shape == (3, 3, 3) and (found > 0).any()
    torch.testing.assert_close(found, expected.relu(), atol=1e-6, rtol=1e-4)


def test_grad_cam_of_a_sample_does_not_depend_on_its_batch_or_on_no_grad():
    network, batch = network_of(), images()
    whole = grad_cam(network, batch, 1)
    with torch.no_grad():
        torch.testing.assert_close(grad_cam(network, batch[1:2], 1)[0], whole[1], atol=1e-6, rtol=1e-4)


def test_looking_changes_nothing():
    network, before = network_of(), state(network_of())
    attention_maps(network, images())
    grad_cam(network, images(), 0)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters()) and not network.training


def test_a_network_in_training_mode_is_refused():
    for look in (lambda network: attention_maps(network, images()), lambda network: grad_cam(network, images(), 0)):
        with pytest.raises(ValueError, match="evaluation mode"):
            look(network_of().train())


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_that_there_is_not_is_refused(label):
    with pytest.raises(ValueError, match=f"label {label} is not one of 5"):
        grad_cam(network_of(), images(), label)
