"""SphereFed's network and loss: unit features, points that are not trained, and a loss that a plain loop gives too."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from models.spherefed import SHARPNESS, SphereNetwork, build_spherefed, sphere_loss


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def small(name="small_cnn", num_labels=7, **options):
    torch.manual_seed(0)
    return build_spherefed(name, num_labels=num_labels, points=draws(), channels=1, image_size=16, width=8, **options)


def labelled(batch=6, labels=7, unknown=0.3):
    targets = torch.randint(0, 2, (batch, labels), generator=draws(1), dtype=torch.int8)
    return torch.where(torch.rand(batch, labels, generator=draws(2)) < unknown, -1, targets)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
@pytest.mark.parametrize("projection", [True, False])
def test_features_lie_on_the_sphere_and_logits_follow_from_them(name, projection):
    network = small(name, projection=projection).eval()
    images = torch.randn(3, 1, 16, 16, generator=draws())
    features = network.features(images)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    expected = torch.empty(3, 7)
    features = features.detach()
    for sample in range(3):
        for label in range(7):
            score = math.sqrt(7) * float(features[sample] @ network.points[label])
            expected[sample, label] = SHARPNESS * (score - 0.5)
    logits = network(images)
    assert logits.shape == (3, 7) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_points_are_in_no_state_dict_and_keep_their_bits_in_training():
    network = small()
    before = network.points.clone()
    assert not any("points" in name for name in [*network.state_dict(), *dict(network.named_parameters())])
    optimiser = torch.optim.SGD(network.parameters(), lr=1.0, weight_decay=0.1)
    sphere_loss(network.scores(torch.randn(6, 1, 16, 16)), labelled()).backward()
    optimiser.step()
    assert torch.equal(network.points, before) and network.points.grad is None


def test_a_network_made_on_meta_and_emptied_has_its_points_again():
    with torch.device("meta"):
        made = build_spherefed("small_cnn", num_labels=7, points=draws(), channels=1, image_size=16, width=8)
    network = small()
    made.to_empty(device="cpu").load_state_dict(network.state_dict(), strict=True)
    images = torch.randn(4, 1, 16, 16)
    assert made.frozen_sha256 == network.frozen_sha256
    assert torch.equal(made.eval()(images), network.eval()(images))
    assert torch.equal(copy.deepcopy(made)(images), made(images))


def test_loss_is_that_of_a_plain_loop():
    scores, targets = torch.randn(6, 7, generator=draws()), labelled()
    total = 0.0
    for sample in range(6):
        for label in range(7):
            if targets[sample, label] >= 0:
                total += (float(scores[sample, label]) - float(targets[sample, label])) ** 2
    assert float(sphere_loss(scores, targets)) == pytest.approx(total / 42, rel=1e-6)


def test_unknown_labels_have_zero_gradient_and_known_ones_have_not():
    scores, targets = torch.randn(6, 7, generator=draws()).requires_grad_(), labelled()
    (gradient,) = torch.autograd.grad(sphere_loss(scores, targets), scores)
    assert (gradient[targets == -1] == 0).all() and (gradient[targets != -1] != 0).all()
    (nothing,) = torch.autograd.grad(sphere_loss(scores, torch.full((6, 7), -1)), scores)
    assert not nothing.any()


def test_single_label_rows_without_a_class_are_unknown():
    scores = torch.randn(3, 4, generator=draws()).requires_grad_()
    targets = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [-1, -1, -1, -1]])
    (gradient,) = torch.autograd.grad(sphere_loss(scores, targets, "multiclass"), scores)
    assert gradient[0].all() and not gradient[1:].any()


@pytest.mark.parametrize("present", [[], [2], [0, 3, 5], list(range(7))])
def test_every_set_of_labels_has_a_place_of_loss_zero_on_the_default_sphere(present):
    """Why the default radius is sqrt(C): the feature is built by hand, in the span of the points and beside it."""
    network = small()
    targets = torch.zeros(1, 7)
    targets[0, present] = 1
    inside = targets @ network.points / math.sqrt(7)
    beside = torch.randn(1, network.points.shape[1], generator=draws())
    beside = beside - beside @ network.points.T @ network.points
    feature = inside + beside / beside.norm() * math.sqrt(max(0.0, 1 - len(present) / 7))
    torch.testing.assert_close(feature.norm(), torch.tensor(1.0), atol=1e-5, rtol=0)
    assert float(sphere_loss(network.scale * feature @ network.points.T, targets)) < 1e-10


def test_the_papers_sphere_has_such_a_place_for_one_label_only():
    network = small(scale=1.0)
    one, two = torch.zeros(1, 7), torch.zeros(1, 7)
    one[0, 4] = two[0, [1, 4]] = 1
    assert float(sphere_loss(network.scale * (one @ network.points) @ network.points.T, one)) < 1e-10
    best = two @ network.points / math.sqrt(2)  # the nearest point of the sphere, at |o - y| = sqrt(2) - 1
    loss = float(sphere_loss(network.scale * best @ network.points.T, two))
    assert loss == pytest.approx((math.sqrt(2) - 1) ** 2 / 7, rel=1e-4)


@pytest.mark.parametrize("num_labels", [32, 33])
def test_as_many_labels_as_the_feature_is_wide_are_refused(num_labels):
    with pytest.raises(ValueError, match=rf"{num_labels} .*width.* 32"):
        small(num_labels=num_labels)


def test_without_projection_the_backbone_is_all_that_is_trained():
    network = SphereNetwork(nn.Conv2d(1, 8, 1), torch.eye(3, 8), projection=False)
    assert set(network.state_dict()) == {"backbone.weight", "backbone.bias"}


def test_half_precision_features_still_give_float32_scores():
    network = small()
    with torch.autocast("cpu", torch.bfloat16):
        scores = network.scores(torch.randn(4, 1, 16, 16))
    assert scores.dtype == torch.float32 and sphere_loss(scores, labelled(4)).dtype == torch.float32
