"""Losses of DENSE, Co-Boosting and FedFTG against the authors' numbers and slow sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.fedmitr import class_count_weights, ensemble_logits, kd_loss, label_count_weights
from models.fedmitr_baselines import (
    ImageGenerator,
    coboost_adversarial_loss,
    dense_adversarial_loss,
    diversity_loss,
    fedftg_class_loss,
    fedftg_distillation_loss,
    hard_sample_loss,
    perturbed,
    reweighted,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmitr"


def golden():
    with np.load(GOLDEN / "case04_losses.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("key", "loss"),
    [
        ("dense_adv_T3", lambda d: dense_adversarial_loss(d["student"], d["ens_uniform"], 3.0)),
        ("coboost_adv_T3", lambda d: coboost_adversarial_loss(d["student"], d["ens_uniform"])),
        ("hard_sample_ce", lambda d: hard_sample_loss(d["ens_uniform"], d["y"])),
    ],
)
def test_losses_are_the_authors(key, loss):
    data = golden()
    assert loss(data).item() == pytest.approx(data[key].item(), rel=1e-4)


def test_dense_counts_only_rows_that_disagree_and_reaches_both_sides():
    student, teacher = torch.randn(6, 4, generator=seeded()), torch.randn(6, 4, generator=seeded(1))
    student[:3] = teacher[:3] * 2  # same class, other numbers
    differs = student.argmax(dim=1) != teacher.argmax(dim=1)
    assert 0 < differs.sum() < 6
    each = [kd_loss(student[row : row + 1], teacher[row : row + 1], 1.0).item() for row in range(6)]
    expected = -sum(value for value, counts in zip(each, differs.tolist(), strict=True) if counts) / 6
    teacher.requires_grad_()
    found = dense_adversarial_loss(student, teacher)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(found, teacher)
    assert (gradient[differs] != 0).any() and (gradient[~differs] == 0).all()
    assert dense_adversarial_loss(teacher, teacher).item() == 0


def test_hard_samples_count_and_known_ones_do_not():
    logits = torch.tensor([[20.0, 0.0], [0.0, 0.0]]).requires_grad_()
    loss = hard_sample_loss(logits, torch.tensor([0, 0]))
    assert loss.item() == pytest.approx(0.5 * 0.5 * np.log(2), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient[1], torch.tensor([-0.125, 0.125]))  # (1 - p) is a constant


def test_reweighting_moves_towards_the_site_that_is_right():
    labels = torch.tensor([0, 1, 2, 0])
    right = 5 * torch.nn.functional.one_hot(labels, 3).float()
    logits = torch.stack([right, -right])
    weights = torch.tensor([0.5, 0.5])
    moved = reweighted(weights, logits, labels, 10)
    torch.testing.assert_close(moved, torch.tensor([0.5 + 0.01 * 0.99**10, 0.5 - 0.01 * 0.99**10]))
    assert torch.equal(weights, torch.tensor([0.5, 0.5]))
    for epoch in range(200):
        weights = reweighted(weights, logits, labels, epoch, step=0.1)
    assert weights.tolist() == [1.0, 0.0]
    alone = torch.tensor([1.0])
    assert reweighted(alone, logits[1:], labels, 0, step=5.0).sum() > 0


def test_perturbed_images_move_by_the_same_amount_and_stay_pixels():
    images = 0.1 + 0.8 * torch.rand(3, 2, 4, 4, generator=seeded())
    head = torch.randn(32, 5, generator=seeded(1))
    found = perturbed(images, lambda pixels: pixels.flatten(1) @ head, seeded(2))
    torch.testing.assert_close((found - images).abs(), torch.full_like(images, 8 / 255))
    direction = 2 * torch.rand(3, 5, generator=seeded(2)) - 1
    expected = (direction @ head.T).view_as(images).sign() * 8 / 255
    torch.testing.assert_close(found - images, expected)
    edge = perturbed(torch.ones(1, 2, 4, 4), lambda pixels: pixels.flatten(1) @ head, seeded(), epsilon=0.5)
    assert edge.max() <= 1 and edge.min() >= 0.5


def test_fedftg_terms_are_those_of_a_slow_sum():
    logits, student = torch.randn(3, 4, 5, generator=seeded()), torch.randn(4, 5, generator=seeded(1))
    labels, counts = torch.tensor([0, 4, 2, 2]), torch.randint(0, 9, (3, 5), generator=seeded(2))
    weights = label_count_weights(counts, labels)
    hard = soft = 0.0
    for sample in range(4):
        for site in range(3):
            weight = class_count_weights(counts)[site, labels[sample]].item()
            one = logits[site, sample : sample + 1]
            hard += weight * torch.nn.functional.cross_entropy(one, labels[sample : sample + 1]).item() / 4
            soft += weight * kd_loss(student[sample : sample + 1], one, 1.0).item() / 4
    assert fedftg_class_loss(logits, labels, weights).item() == pytest.approx(hard, rel=1e-5)
    assert fedftg_distillation_loss(student, logits, weights).item() == pytest.approx(soft, rel=1e-5)
    same = ensemble_logits(logits, None).expand(3, -1, -1)
    assert fedftg_distillation_loss(same[0], same, weights).item() == pytest.approx(0, abs=1e-6)


def test_equal_images_of_different_noise_cost_most():
    noise = torch.randn(4, 6, generator=seeded())
    images = torch.rand(4, 3, 5, 5, generator=seeded(1))
    apart = [
        (images[i] - images[j]).abs().mean().item() * (noise[i] - noise[j]).norm().item()
        for i in range(4)
        for j in range(4)
    ]
    assert diversity_loss(images, noise).item() == pytest.approx(np.exp(-np.mean(apart)), rel=1e-4)
    assert diversity_loss(images[:1].expand(4, -1, -1, -1), noise).item() == 1


def test_the_generator_makes_pixels():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = ImageGenerator(nz=8, width=4, channels=3, image_size=20)
        images = generator(torch.randn(5, 8))
    assert images.shape == (5, 3, 20, 20) and images.min() >= 0 and images.max() <= 1
    with pytest.raises(ValueError, match="multiple of 4; got 30"):
        ImageGenerator(image_size=30)
