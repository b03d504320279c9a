"""FedMPT's asymmetric loss: closed forms, unknown entries, and what it sums."""

from __future__ import annotations

import math

import pytest
import torch

from models.fedmpt import asymmetric_loss_probabilities


@pytest.mark.parametrize(
    ("p", "target", "expected"),
    [
        (0.5, 1, 0.3465735903),  # half of ln 2
        (0.5, 0, 0.1210619861),  # 0.45^2 times -ln 0.55
        (0.05, 0, 0.0),
        (0.01, 0, 0.0),
        (0.0, 1, 13.8155105580),  # -ln 1e-6
        (0.9, 0, 1.3706691864),
        (1.0, 0, 2.7036483758),  # 0.95^2 times -ln 0.05
        (1.0, 1, 0.0),
    ],
)
def test_loss_of_one_entry(p, target, expected):
    loss = asymmetric_loss_probabilities(torch.tensor([[p]], dtype=torch.float64), torch.tensor([[target]]))
    # the numbers of spec 11.4 were computed in float32, hence not 1e-9
    assert math.isclose(loss.item(), expected, rel_tol=0, abs_tol=1e-8)


def test_unknown_entries_are_never_read():
    p = torch.tensor([[0.3, 0.8], [0.6, 0.2]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1.0, float("nan")], [-1.0, 0.0]])
    known = torch.tensor([[True, False], [False, True]])
    loss = asymmetric_loss_probabilities(p, targets, known)
    expected = -(0.7 * math.log(0.3) + 0.15**2 * math.log(0.85))
    assert math.isclose(loss.item(), expected, rel_tol=1e-12)
    (gradient,) = torch.autograd.grad(loss, p)
    assert (gradient[~known] == 0).all() and torch.isfinite(gradient).all()
    nothing = asymmetric_loss_probabilities(p, targets, torch.zeros(2, 2, dtype=torch.bool))
    assert nothing == 0 and nothing.requires_grad


def test_loss_is_a_sum_and_shapes_must_agree():
    p, targets = torch.rand(4, 3), torch.ones(4, 3)
    once, twice = (asymmetric_loss_probabilities(p.repeat(n, 1), targets.repeat(n, 1)) for n in (1, 2))
    torch.testing.assert_close(twice, 2 * once)
    with pytest.raises(ValueError, match="agree"):
        asymmetric_loss_probabilities(p, targets[:2])
