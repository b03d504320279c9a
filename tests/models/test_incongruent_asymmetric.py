"""The asymmetric loss of Incongruent against golden numbers, closed forms, a slow loop and odd batches."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.incongruent_losses import (
    SOURCE_SMOOTHING,
    SOURCE_TRUST,
    SOURCES,
    asymmetric_elements,
    asymmetric_loss,
    class_weights,
    positive_weights,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "incongruent" / "04_asl.npz"
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}
PLAIN = {"gamma_pos": 0.0, "gamma_neg": 0.0, "shift": 0.0}


def golden(dtype):
    with np.load(GOLDEN) as arrays:
        return {key: torch.from_numpy(np.asarray(arrays[key])).to(dtype) for key in arrays}


def entry(logit, label, **options):
    """Loss and gradient of one known entry, float64."""
    logit = torch.tensor([[logit]], dtype=torch.float64, requires_grad=True)
    loss = asymmetric_loss(logit, torch.tensor([[label]]), torch.tensor([[True]]), **options)
    return loss.item(), torch.autograd.grad(loss, logit)[0].item()


# -- golden numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_soft_labels_weights_and_trust_give_the_golden_numbers(dtype):
    data = golden(dtype)
    known, options = data["u"].bool(), {"class_weights": data["w"], "eps_neg": 0.05}
    found = asymmetric_elements(data["x"], data["y"], known, **options)
    torch.testing.assert_close(found, data["el"], **TOLERANCES[dtype])
    for detach, key in ((True, "grad_detached"), (False, "grad_full")):
        logits = data["x"].clone().requires_grad_()
        loss = asymmetric_loss(logits, data["y"], known, trust=data["tau"][:, 0], detach_focus=detach, **options)
        torch.testing.assert_close(loss, data["loss"], **TOLERANCES[dtype])
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], data[key], **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hard_labels_give_the_golden_numbers(dtype):
    data = golden(dtype)
    known = torch.ones_like(data["y"], dtype=torch.bool)
    found = asymmetric_elements(data["x"], data["y"], known)
    torch.testing.assert_close(found, data["hard_el"], **TOLERANCES[dtype])
    torch.testing.assert_close(found.sum(), data["hard_sum"], **TOLERANCES[dtype])
    for detach, key in ((True, "hard_grad_detached"), (False, "hard_grad_full")):
        logits = data["x"].clone().requires_grad_()
        loss = asymmetric_loss(logits, data["y"], known, detach_focus=detach)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], data[key], **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_focus_and_shift_it_is_binary_cross_entropy(dtype):
    data = golden(dtype)
    known = torch.ones_like(data["y"], dtype=torch.bool)
    found = asymmetric_elements(data["x"], data["y"], known, **PLAIN)
    torch.testing.assert_close(found, data["bce_el"], **TOLERANCES[dtype])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(data["x"], data["y"])
    torch.testing.assert_close(asymmetric_loss(data["x"], data["y"], known, **PLAIN), expected)


def test_class_weights_are_the_golden_ones():
    with np.load(GOLDEN) as arrays:
        found = class_weights(torch.from_numpy(arrays["counts"])).numpy()
        np.testing.assert_allclose(found, arrays["w"], rtol=1e-9, atol=1e-10)


# -- closed forms (spec 9) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logit", "label", "value"),
    [(0, 1, 0.346573590), (0, 0, 0.024515054), (2, 0, 0.846414951), (-2, 1, 1.873391977)],
)
def test_value_of_one_entry(logit, label, value):
    assert entry(float(logit), label)[0] == pytest.approx(value, abs=1e-9)


def test_slope_of_one_entry():
    assert entry(0.0, 1)[1] == pytest.approx(-0.25, abs=1e-12)
    assert entry(0.0, 1, detach_focus=False)[1] == pytest.approx(-0.423286795, abs=1e-9)


@pytest.mark.parametrize("logit", [math.log(0.05 / 0.95) - 1e-9, -5.0, -80.0])
@pytest.mark.parametrize("detach", [True, False])
def test_an_easy_negative_costs_nothing_and_has_no_gradient(logit, detach):
    assert entry(logit, 0, detach_focus=detach) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_hopeless_positive_keeps_its_gradient(dtype):
    """A logarithm clamped at 1e-8 would give 18.42 and no gradient."""
    logits = torch.tensor([[-40.0]], dtype=dtype, requires_grad=True)
    loss = asymmetric_loss(logits, torch.tensor([[1]]), torch.tensor([[True]]))
    assert loss.item() == pytest.approx(40, rel=1e-6)
    assert torch.autograd.grad(loss, logits)[0].item() == pytest.approx(-1, rel=1e-6)


def test_soft_labels_are_two_terms_and_not_one_exponent():
    soft = asymmetric_loss(
        torch.tensor([[0.7]]), torch.tensor([[1]]), torch.tensor([[True]]), eps_pos=0.7
    )  # y = 0.3; the combined exponent of the loss's authors gives 0.1126
    assert soft.item() == pytest.approx(0.1386, abs=5e-5)


def test_class_weights_of_spec_9():
    found = class_weights(torch.tensor([5000, 900, 40, 3, 0]))
    assert found.tolist() == pytest.approx([0.2, 0.2, 0.281784, 3.688465, 1], abs=1e-6)


def test_labels_without_positives_weigh_one():
    assert class_weights(torch.zeros(3, dtype=torch.int64)).tolist() == [1, 1, 1]
    assert positive_weights(torch.tensor([0, 50, 100, 10, 1]), 100).tolist() == pytest.approx([1, 1, 1, 3, 99**0.5])
    assert positive_weights(torch.tensor([1]), 10_000).tolist() == [20]
    assert positive_weights(torch.tensor([10, 10]), torch.tensor([100, 20])).tolist() == [3, 1]


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        class_weights(torch.tensor([3, -1]))
    with pytest.raises(ValueError, match="beta is 1"):
        class_weights(torch.tensor([3]), beta=1)
    with pytest.raises(ValueError, match="more than there are"):
        positive_weights(torch.tensor([3, 11]), 10)


def test_every_source_has_trust_and_smoothing():
    assert set(SOURCES) == set(SOURCE_TRUST) == set(SOURCE_SMOOTHING)
    assert SOURCE_TRUST["reviewed"] > SOURCE_TRUST["auto"] > SOURCE_TRUST["unknown"] > 0
    assert all(eps_neg >= eps_pos for eps_pos, eps_neg in SOURCE_SMOOTHING.values())


# -- properties -------------------------------------------------------------------------------------------------------


def drawn(batch=6, labels=4, seed=0, unknown=0.3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch, labels, generator=generator, dtype=torch.float64)).to(dtype)
    targets = (torch.rand(batch, labels, generator=generator) < 0.4).to(torch.int8)
    known = torch.rand(batch, labels, generator=generator) >= unknown
    trust = torch.rand(batch, generator=generator, dtype=torch.float64)
    return logits, targets, known, trust


def slow(logits, targets, known, trust, weights, gamma_pos, gamma_neg, shift, eps_pos, eps_neg, pos_weight_only):
    total = norm = 0.0
    for i in range(len(logits)):
        for c in range(len(logits[i])):
            if not known[i][c]:
                continue
            label = float(targets[i][c])
            label = label * (1 - eps_pos[i]) + (1 - label) * eps_neg[i]
            p = 1 / (1 + math.exp(-logits[i][c]))
            q = max(p - shift, 0.0)
            present = label * (1 - p) ** gamma_pos * -math.log(p) * weights[c]
            absent = (1 - label) * q**gamma_neg * -math.log(1 - q) * (1 if pos_weight_only else weights[c])
            total += trust[i] * (present + absent)
            norm += trust[i]
    return total / max(norm, 1e-8)


@given(
    seed=st.integers(0, 10_000),
    unknown=st.sampled_from([0.0, 0.4, 0.95, 1.0]),
    gamma_pos=st.sampled_from([0.0, 1.0, 2.0]),
    gamma_neg=st.sampled_from([0.0, 2.0, 4.0]),
    shift=st.sampled_from([0.0, 0.05, 0.3]),
    pos_weight_only=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_batch_gives_what_the_slow_loop_gives(seed, unknown, gamma_pos, gamma_neg, shift, pos_weight_only):
    logits, targets, known, trust = drawn(seed=seed, unknown=unknown)
    eps_pos, eps_neg = 0.1 * trust, 0.2 * (1 - trust)
    weights = torch.tensor([0.2, 1.0, 3.0, 5.0])
    options = {"gamma_pos": gamma_pos, "gamma_neg": gamma_neg, "shift": shift, "pos_weight_only": pos_weight_only}
    found = asymmetric_loss(
        logits, targets, known, trust=trust, class_weights=weights, eps_pos=eps_pos, eps_neg=eps_neg, **options
    )
    expected = slow(
        logits.tolist(), targets, known, trust.tolist(), weights.tolist(), eps_pos=eps_pos, eps_neg=eps_neg, **options
    )
    assert found.item() == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.5, 1.0, 4.0]), detach=st.booleans())
@settings(max_examples=40, deadline=None)
def test_extreme_logits_have_finite_values_and_gradients(seed, gamma, detach):
    logits, targets, known, trust = drawn(seed=seed, dtype=torch.float32)
    logits = (logits * 1e3).requires_grad_()
    for shift in (0.0, 1e-9, 0.05):
        loss = asymmetric_loss(
            logits, targets, known, trust=trust, gamma_pos=gamma, gamma_neg=gamma, shift=shift, detach_focus=detach
        )
        assert loss.isfinite() and torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_gradient_with_full_focus_is_the_slope():
    logits, targets, known, trust = drawn()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: asymmetric_loss(x, targets, known, trust=trust, detach_focus=False), (logits,)
    )


def test_batch_order_and_a_common_trust_change_nothing():
    logits, targets, known, _ = drawn()
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    expected = asymmetric_loss(logits, targets, known)
    torch.testing.assert_close(asymmetric_loss(logits[order], targets[order], known[order]), expected)
    halves = torch.full((len(logits),), 0.5)
    torch.testing.assert_close(asymmetric_loss(logits, targets, known, trust=halves), expected)


# -- odd batches ------------------------------------------------------------------------------------------------------


def test_unknown_entries_are_never_read():
    logits, targets, known, trust = drawn(dtype=torch.float32)
    expected = asymmetric_loss(logits, targets, known, trust=trust)
    spoilt = torch.where(known, logits, float("nan")).requires_grad_()
    labels = torch.where(known, targets.float(), float("nan"))
    loss = asymmetric_loss(spoilt, labels, known, trust=trust)
    assert torch.equal(loss, expected)
    (gradient,) = torch.autograd.grad(loss, spoilt)
    assert (gradient[~known] == 0).all() and gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_nothing_known_is_zero_and_attached_to_the_graph(batch):
    logits = torch.randn(batch, 3, requires_grad=True)
    loss = asymmetric_loss(logits, torch.full((batch, 3), -1), torch.zeros(batch, 3, dtype=torch.bool))
    assert loss.item() == 0 and loss.requires_grad
    assert (torch.autograd.grad(loss, logits)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    logits, targets, known, trust = drawn(dtype=dtype)
    loss = asymmetric_loss(logits, targets, known, trust=trust)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, asymmetric_loss(logits.float(), targets, known, trust=trust))


def test_wrong_shapes_are_refused():
    logits, targets, known, trust = drawn()
    with pytest.raises(ValueError, match=r"targets has shape \(5, 4\), expected \(6, 4\)"):
        asymmetric_loss(logits, targets[:5], known)
    with pytest.raises(ValueError, match="known"):
        asymmetric_loss(logits, targets, known[:, :3])
    with pytest.raises(ValueError, match="trust"):
        asymmetric_loss(logits, targets, known, trust=trust[:2])
