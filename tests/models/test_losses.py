"""Losses against torch's own, and what an unknown label does: nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.losses import LOSSES, masked_bce, masked_cross_entropy, probabilities, proximal_term


def drawn(seed=0, batch=7, labels=4):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, labels, generator=generator)
    targets = torch.randint(0, 2, (batch, labels), generator=generator, dtype=torch.int8)
    return logits.requires_grad_(), targets


def one_hot(classes, labels=4):
    """Rows with a single 1; a class of -1 is an unknown row of -1."""
    rows = torch.zeros(len(classes), labels, dtype=torch.int8)
    for row, value in enumerate(classes):
        rows[row] = torch.tensor([-1] * labels) if value < 0 else F.one_hot(torch.tensor(value), labels)
    return rows


def test_bce_is_torchs_over_all_known_labels():
    logits, targets = drawn()
    total, count = masked_bce(logits, targets)
    expected = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="sum")
    assert count == 28 and total.item() == pytest.approx(expected.item(), rel=1e-6)
    (found,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, torch.sigmoid(logits.detach()) - targets.float())  # d/dx of the sum


def test_bce_skips_unknown_entries_in_sum_number_and_gradient():
    logits, targets = drawn()
    hidden = torch.rand(7, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    targets = torch.where(hidden, -1, targets)
    total, count = masked_bce(logits, targets)
    expected = F.binary_cross_entropy_with_logits(logits[~hidden], targets[~hidden].float(), reduction="sum")
    assert count == int((~hidden).sum()) and total.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, logits)
    assert (gradient[hidden] == 0).all() and (gradient[~hidden] != 0).all()


def test_cross_entropy_is_torchs_over_rows_with_a_class():
    logits, _ = drawn()
    classes = [0, 3, -1, 2, -1, 1, 1]
    total, count = masked_cross_entropy(logits, one_hot(classes))
    expected = F.cross_entropy(logits, torch.tensor(classes), ignore_index=-1, reduction="sum")
    assert count == 5 and total.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, logits)
    known = torch.tensor(classes) >= 0
    assert (gradient[~known] == 0).all()
    probabilities_minus_target = torch.softmax(logits.detach(), 1) - one_hot(classes).clamp(min=0)
    torch.testing.assert_close(gradient[known], probabilities_minus_target[known])


def test_a_row_of_zeros_has_no_class():
    logits, _ = drawn(batch=2)
    targets = torch.zeros(2, 4, dtype=torch.int8)
    targets[0, 2] = 1
    assert masked_cross_entropy(logits, targets)[1] == 1


@pytest.mark.parametrize("task", LOSSES)
def test_a_batch_without_a_known_label_is_zero_in_value_number_and_gradient(task):
    logits, targets = drawn()
    total, count = LOSSES[task](logits, torch.full_like(targets, -1))
    (gradient,) = torch.autograd.grad(total, logits)
    assert total.item() == 0.0 and count == 0 and (gradient == 0).all()


@pytest.mark.parametrize(("logit", "target", "loss"), [(1e4, 1, 0.0), (1e4, 0, 1e4), (-1e4, 1, 1e4), (-1e4, 0, 0.0)])
def test_bce_of_extreme_logits_is_exact_and_has_a_gradient(logit, target, loss):
    # log(sigmoid(-1e4)) would be -inf
    logits = torch.tensor([[logit]], requires_grad=True)
    total, _ = masked_bce(logits, torch.tensor([[target]]))
    (gradient,) = torch.autograd.grad(total, logits)
    assert total.item() == loss and gradient.item() == (0.0 if loss == 0 else 1.0 if logit > 0 else -1.0)


def test_an_infinite_logit_of_an_unknown_label_does_not_reach_the_gradient():
    logits = torch.tensor([[float("inf"), 0.5]], requires_grad=True)
    total, count = masked_bce(logits, torch.tensor([[-1, 1]]))
    (gradient,) = torch.autograd.grad(total, logits)
    assert count == 1 and torch.isfinite(total) and torch.isfinite(gradient).all() and gradient[0, 0] == 0


def test_cross_entropy_of_extreme_logits_is_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0, 0.0]], requires_grad=True)
    total, _ = masked_cross_entropy(logits, one_hot([1]))
    assert total.item() == 2e4  # the distance of the two logits


@pytest.mark.parametrize("task", LOSSES)
def test_half_precision_logits_are_summed_in_single_precision(task):
    logits = torch.full((5000, 2), 4.0, dtype=torch.float16)
    targets = torch.tensor([[0, 1]], dtype=torch.int8).repeat(5000, 1)
    total, _ = LOSSES[task](logits, targets)
    exact, _ = LOSSES[task](logits.double(), targets)
    # a float16 sum stops growing near 8192, or overflows beyond 65504
    assert total.dtype == torch.float32 and total.item() == pytest.approx(exact.item(), rel=1e-5)


def test_scores_are_sigmoid_for_many_labels_and_softmax_for_one():
    logits, _ = drawn()
    torch.testing.assert_close(probabilities(logits, "multilabel"), torch.sigmoid(logits))
    torch.testing.assert_close(probabilities(logits, "multiclass"), torch.softmax(logits, 1))
    assert probabilities(logits.half(), "multiclass").dtype == torch.float32


def test_proximal_term_is_half_mu_times_the_squared_distance():
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    generator = torch.Generator().manual_seed(0)
    reference = {
        name: value.detach() + torch.randn(value.shape, generator=generator)
        for name, value in network.named_parameters()
    }
    slow = 0.0
    for name, value in network.named_parameters():  # buffers of BatchNorm are no part of it
        for ours, theirs in zip(value.detach().flatten().tolist(), reference[name].flatten().tolist(), strict=True):
            slow += 0.5 * 0.3 * (ours - theirs) ** 2
    term = proximal_term(network, reference, 0.3)
    assert term.item() == pytest.approx(slow, rel=1e-5)
    (gradient,) = torch.autograd.grad(term, network[0].weight)
    torch.testing.assert_close(gradient, 0.3 * (network[0].weight.detach() - reference["0.weight"]))
    own = {name: value.detach().clone() for name, value in network.named_parameters()}
    assert proximal_term(network, own, 0.3).item() == 0.0
