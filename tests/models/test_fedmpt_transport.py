"""Sinkhorn against POT, closed forms and float64, and what every plan must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.fedmpt import sinkhorn


def problems(seed=0, count=3, rows=7, columns=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(count, rows, columns, generator=generator, dtype=torch.float64)
    a = torch.rand(count, rows, generator=generator, dtype=torch.float64).add(0.1)
    b = torch.full((columns,), 1 / columns, dtype=dtype)
    return cost.to(dtype), (a / a.sum(dim=1, keepdim=True)).to(dtype), b


@pytest.mark.parametrize(
    ("reg", "share"), [(0.05, 0.9999999938), (0.1, 0.9998638188), (0.2, 0.9801866627), (1.0, 0.4753668864)]
)
def test_identity_costs_give_the_closed_form(reg, share):
    """C P_cc = 1 / (1 + (C - 1) exp(-1 / reg)) for C = 4 (spec 11.3)."""
    cost, uniform = 1 - torch.eye(4, dtype=torch.float64)[None], torch.full((4,), 0.25, dtype=torch.float64)
    plan = sinkhorn(cost, uniform[None], uniform, reg, 20)
    torch.testing.assert_close(4 * plan[0].diagonal(), torch.full((4,), share, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("reg", [0.1, 0.2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pot_and_logarithms_give_the_same_converged_plan(reg, dtype):
    cost, a, b = problems(dtype=dtype)
    found = sinkhorn(cost, a, b, reg, 200)
    for solver in ("pot", "log"):
        torch.testing.assert_close(sinkhorn(cost, a, b, reg, 200, solver=solver), found, rtol=0, atol=3e-7)


def test_twenty_iterations_are_enough_at_the_default_reg():
    cost, a, b = problems(count=8, rows=196, columns=20)
    difference = (sinkhorn(cost, a, b, 0.2, 20) - sinkhorn(cost, a, b, 0.2, 500)).abs().sum(dim=(1, 2))
    assert difference.max() < 1e-6


def test_small_reg_needs_logarithms_and_gets_them():
    cost, a, b = problems(dtype=torch.float32)
    plan = sinkhorn(cost, a, b, 0.005, 50)
    assert torch.isfinite(plan).all()
    torch.testing.assert_close(plan, sinkhorn(cost, a, b, 0.005, 50, solver="log"), rtol=0, atol=0)
    exact = sinkhorn(cost.double(), a.double(), b.double(), 0.005, 50, solver="kernel")
    torch.testing.assert_close(plan.double(), exact, rtol=0, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    columns=st.integers(1, 6),
    reg=st.floats(0.1, 5.0),
)
def test_plans_have_their_marginals_and_beat_independence(seed, rows, columns, reg):
    cost, a, b = problems(seed, rows=rows, columns=columns)
    plan = sinkhorn(cost, a, b, reg, 20)
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(dim=1), b.expand(3, -1), rtol=0, atol=1e-12)
    assert (plan.sum(dim=2) - a).abs().sum(dim=1).max() < 1e-2
    independent = a[:, :, None] * b

    def objective(value):
        return (value * cost).sum(dim=(1, 2)) + reg * torch.special.xlogy(value, value).sum(dim=(1, 2))

    assert (objective(plan) <= objective(independent) + 1e-2).all()


def test_a_problem_does_not_depend_on_its_neighbours():
    cost, a, b = problems(count=5)
    together = sinkhorn(cost, a, b, 0.2, 20)
    alone = torch.cat([sinkhorn(cost[i : i + 1], a[i : i + 1], b, 0.2, 20) for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)


def test_infinite_reg_gives_the_independent_plan():
    cost, a, b = problems()
    torch.testing.assert_close(sinkhorn(cost, a, b, 1e9, 5), a[:, :, None] * b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", ["kernel", "log"])
def test_gradients_are_those_of_differences(solver):
    cost, a, b = problems(count=1, rows=3, columns=2)
    cost.requires_grad_()
    assert torch.autograd.gradcheck(lambda value: sinkhorn(value, a, b, 0.5, 5, solver=solver), cost)


def test_a_patch_without_mass_sends_none():
    cost, a, b = problems()
    a[:, 0] = 0
    a = a / a.sum(dim=1, keepdim=True)
    for solver in ("kernel", "log"):
        plan = sinkhorn(cost, a, b, 0.2, 50, solver=solver)
        assert (plan[:, 0] == 0).all() and torch.isfinite(plan).all()


def test_half_precision_and_autocast_are_computed_in_float32():
    cost, a, b = problems(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sinkhorn(cost.half(), a.half(), b, 0.2, 20).dtype == torch.float32
        torch.testing.assert_close(sinkhorn(cost, a, b, 0.2, 20).sum(dim=1), b.expand(3, -1), rtol=0, atol=1e-6)


def test_wrong_arguments_are_refused():
    cost, a, b = problems()
    for arguments in ((cost[0], a, b, 0.2, 5), (cost, a[:, :3], b, 0.2, 5), (cost, a, a, 0.2, 5)):
        with pytest.raises(ValueError, match="expected cost"):
            sinkhorn(*arguments)
    with pytest.raises(ValueError, match="reg"):
        sinkhorn(cost, a, b, 0.0, 5)
    with pytest.raises(ValueError, match="iterations"):
        sinkhorn(cost, a, b, 0.2, 0)
    with pytest.raises(ValueError, match="solver"):
        sinkhorn(cost, a, b, 0.2, 5, solver="exact")
