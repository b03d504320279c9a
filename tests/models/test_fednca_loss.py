"""FedNCA-ML's loss against the authors' numbers, a slow loop, closed forms, and every kind of odd batch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.fednca import class_bce, fednca_loss, known_labels, pairwise_logits, simplex_etf

GOLDEN = Path(__file__).parents[1] / "golden" / "fednca_loss.npz"
NAN = float("nan")


def golden():
    with np.load(GOLDEN) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def drawn(batch=6, labels=5, dim=16, seed=0, unknown=0.0):
    """Logits ``(B, C, C)``, features, targets (about 40 % present) and the ETF."""
    generator = torch.Generator().manual_seed(seed)
    etf = simplex_etf(labels, dim)
    features = 2 * torch.randn(batch, labels, dim, generator=generator)
    bias = torch.randn(labels, generator=generator)
    targets = (torch.rand(batch, labels, generator=generator) < 0.4).to(torch.int8)
    targets[torch.rand(batch, labels, generator=generator) < unknown] = -1
    return pairwise_logits(features, etf, 1.5, bias), features, targets, etf


def loss_of(logits, features, targets, etf, *, lambda_neg=1.0, lambda_pos=1.0, **options):
    return fednca_loss(logits, features, targets, etf, lambda_neg=lambda_neg, lambda_pos=lambda_pos, **options)


def slow(logits, features, targets, etf, *, select, rejection, contrast, tau=0.3, temperature=0.07, known=None):
    """The same three parts from the formulas, float64, one pair at a time. Rows: samples; columns: bce, neg, pos."""
    logits, features, etf = (value.detach().double().numpy() for value in (logits, features, etf))
    targets = targets.numpy()
    batch, labels = targets.shape
    seen = [[targets[i, c] in (0, 1) and (known is None or known[i, c]) for c in range(labels)] for i in range(batch)]
    parts = np.zeros((batch, 3))
    positives = [(i, c) for i in range(batch) for c in range(labels) if seen[i][c] and targets[i, c] == 1]
    negatives = [(i, c) for i in range(batch) for c in range(labels) if seen[i][c] and targets[i, c] == 0]

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    for i, c in positives + negatives:
        probability = sigmoid(logits[i, c, c])
        parts[i, 0] -= math.log(probability if targets[i, c] == 1 else 1 - probability)
    strongest = sorted(negatives, key=lambda pair: -max(logits[pair]))
    for i, c in strongest[: len(positives)] if select == "topk" else negatives if positives else []:
        if rejection == "max_all":
            parts[i, 1] += max(0.0, sigmoid(max(logits[i, c])) - tau)
        else:
            parts[i, 1] += sum(max(0.0, sigmoid(logits[i, c, j]) - tau) for j in range(labels) if j != c)
    for i, c in positives:
        h, own = features[i, c], etf[c]
        cosines = [h @ m / (np.linalg.norm(h) * np.linalg.norm(m)) for m in etf]
        if contrast == "cross_entropy":
            exponentials = [math.exp(cosine / temperature) for cosine in cosines]
            parts[i, 2] -= math.log(exponentials[c] / sum(exponentials))
        elif contrast == "cosine":
            parts[i, 2] += 1 - cosines[c]
        else:
            parts[i, 2] += ((h - own) ** 2).sum()
    return parts


def stacked(parts):
    return torch.stack([parts["bce"], parts["neg"], parts["pos"]], dim=1).detach().double().numpy()


# -- reference numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["topk", "all"])
@pytest.mark.parametrize(
    ("contrast", "tag"), [("cross_entropy", "PSC"), ("cosine", "Cosine"), ("squared_l2", "L2")]
)  # names in the authors' code
@pytest.mark.parametrize("lambda_neg", [1.0, 0.01])
def test_totals_are_those_of_the_authors_code(select, contrast, tag, lambda_neg):
    data = golden()
    loss, parts = loss_of(
        data["L"], data["cls"], data["y"], data["proto"], lambda_neg=lambda_neg, select=select, contrast=contrast
    )
    found = parts["bce"] + lambda_neg * parts["neg"] + parts["pos"]
    expected = data[f"total_{select}_{tag}_{lambda_neg}"]
    # The squared distances reach 115, where one float32 step is 7.6e-6: there the bound is relative.
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=5e-7)
    assert loss.item() == pytest.approx(expected.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "part", "key"),
    [
        ({}, "bce", "bce"),
        ({}, "neg", "rej_topk"),
        ({"select": "all"}, "neg", "rej_all"),
        ({"select": "all", "rejection": "nonself_sum"}, "neg", "rej_nonself_reference_only"),
        ({}, "pos", "con_PSC"),
    ],
)
def test_parts_are_those_of_the_authors_code(options, part, key):
    data = golden()
    _, parts = loss_of(data["L"], data["cls"], data["y"], data["proto"], **options)
    torch.testing.assert_close(parts[part], data[key].float(), atol=5e-6, rtol=5e-7)


def test_gradients_are_those_of_the_authors_code():
    data = golden()
    features, scale, bias = (data[key].clone().requires_grad_() for key in ("cls", "scale", "bias"))
    logits = pairwise_logits(features, data["proto"], scale, bias)
    loss, _ = loss_of(logits, features, data["y"], data["proto"])
    assert loss.item() == pytest.approx(data["mean_loss"].item(), abs=5e-6)
    found = torch.autograd.grad(loss, [features, scale, bias])
    for gradient, key in zip(found, ("grad_cls", "grad_scale", "grad_bias"), strict=True):
        torch.testing.assert_close(gradient, data[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("select", ["topk", "all"])
@pytest.mark.parametrize("rejection", ["max_all", "nonself_sum"])
@pytest.mark.parametrize("contrast", ["cross_entropy", "cosine", "squared_l2"])
@pytest.mark.parametrize("unknown", [0.0, 0.4])
def test_parts_are_those_of_a_slow_loop(select, rejection, contrast, unknown):
    options = {"select": select, "rejection": rejection, "contrast": contrast}
    for seed in range(5):
        inputs = drawn(batch=7, labels=6, seed=seed, unknown=unknown)
        loss, parts = loss_of(*inputs, lambda_neg=0.7, lambda_pos=1.3, **options)
        expected = slow(*inputs, **options)
        np.testing.assert_allclose(stacked(parts), expected, atol=2e-5, rtol=2e-5)
        assert loss.item() == pytest.approx((expected @ [1, 0.7, 1.3]).mean(), rel=1e-5)


@given(
    batch=st.integers(1, 6),
    labels=st.integers(2, 7),
    seed=st.integers(0, 10_000),
    unknown=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_any_batch_gives_what_the_slow_loop_gives_and_a_finite_gradient(batch, labels, seed, unknown):
    logits, features, targets, etf = drawn(batch, labels, seed=seed, unknown=unknown)
    logits, features = logits.requires_grad_(), features.requires_grad_()
    loss, parts = loss_of(logits, features, targets, etf)
    expected = slow(logits, features, targets, etf, select="topk", rejection="max_all", contrast="cross_entropy")
    np.testing.assert_allclose(stacked(parts), expected, atol=2e-5, rtol=2e-5)
    for gradient in torch.autograd.grad(loss, [logits, features]):
        assert gradient.isfinite().all()


def test_gradient_is_the_slope():
    _, features, targets, etf = drawn(batch=4, seed=3, unknown=0.2)
    features = features.requires_grad_()

    def loss(given):
        return loss_of(pairwise_logits(given, etf, 1.5, None), given, targets, etf)[0]

    (gradient,) = torch.autograd.grad(loss(features), features)
    with torch.no_grad():
        for seed in range(4):  # central differences along random directions; no kink lies within the step
            direction = torch.randn(features.shape, generator=torch.Generator().manual_seed(seed))
            direction /= direction.norm()
            slope = (loss(features + 1e-2 * direction) - loss(features - 1e-2 * direction)) / 2e-2
            assert slope.item() == pytest.approx((gradient * direction).sum().item(), abs=3e-3)


# -- closed forms -----------------------------------------------------------------------------------------------------


def one_present(labels, feature):
    """One sample, label 0 present and its feature given, everything else 0."""
    etf = simplex_etf(labels, labels + 4)
    features = torch.zeros(1, labels, labels + 4)
    features[0, 0] = feature(etf[0])
    targets = torch.zeros(1, labels)
    targets[0, 0] = 1
    return torch.zeros(1, labels, labels), features, targets, etf


@pytest.mark.parametrize(
    ("labels", "value"), [(7, 3.4667e-7), (10, 1.1499e-6), (14, 2.7070e-6), (20, 5.5977e-6), (80, 4.1198e-5)]
)
@pytest.mark.parametrize("length", [1.0, 0.01, 300.0])
def test_contrast_on_the_own_prototype(labels, value, length):
    _, parts = loss_of(*one_present(labels, lambda own: length * own))
    assert parts["pos"].item() == pytest.approx(value, rel=2e-4)


@pytest.mark.parametrize(("labels", "value"), [(7, 18.45843), (10, 18.07024), (80, 18.83599)])
def test_contrast_opposite_to_the_own_prototype(labels, value):
    _, parts = loss_of(*one_present(labels, lambda own: -own))
    # The cosine is a float32 sum of C terms, 2e-6 off at C=80, and is divided by 0.07
    assert parts["pos"].item() == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize("labels", [2, 7, 80])
def test_zero_feature_costs_ln_c_and_does_not_explode(labels):
    logits, features, targets, etf = one_present(labels, lambda own: 0 * own)
    features = features.requires_grad_()
    loss, parts = loss_of(logits, features, targets, etf)
    assert parts["pos"].item() == pytest.approx(math.log(labels), abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, features)
    assert (gradient == 0).all()


def test_contrast_sees_neither_scale_nor_bias():
    logits, features, targets, etf = drawn()
    _, parts = loss_of(logits, features, targets, etf)
    _, other = loss_of(5 * logits - 3, features, targets, etf)
    assert torch.equal(parts["pos"], other["pos"])


def test_logits_of_zero_cost_c_ln_2():
    _, features, targets, etf = drawn(labels=7)
    _, parts = loss_of(torch.zeros(6, 7, 7), features, targets, etf)
    assert parts["bce"].numpy() == pytest.approx(4.852030, abs=1e-6)


def test_without_bias_the_gate_never_closes():
    _, features, targets, etf = drawn(batch=40, labels=7)
    logits = pairwise_logits(features, etf, 10.0, None)
    _, parts = loss_of(logits, features, targets, etf, select="all")
    each = parts["neg"] / (targets == 0).sum(dim=1)
    assert (each >= 0.2 - 1e-6).all() and (each <= 0.7 + 1e-6).all()


def test_gate_closes_at_minus_0_847():
    targets = torch.tensor([[1, 0]])
    for strongest, closed in ((-0.84729, False), (-0.84731, True)):
        logits = torch.full((1, 2, 2), strongest)
        _, parts = loss_of(logits, torch.ones(1, 2, 4), targets, simplex_etf(2, 4))
        assert (parts["neg"].item() == 0) == closed


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_extreme_logits_are_finite_in_value_and_gradient(logit):
    _, features, targets, etf = drawn()
    logits = torch.full((6, 5, 5), logit).requires_grad_()
    loss, parts = loss_of(logits, features, targets, etf)
    wrong = (targets == 1).sum(dim=1) if logit < 0 else (targets == 0).sum(dim=1)
    torch.testing.assert_close(parts["bce"], 1e4 * wrong.float())
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


# -- which negatives --------------------------------------------------------------------------------------------------


def selected(parts_of_targets, **options):
    """Which pairs have a rejection cost, read from the gradient of ``neg`` (every chosen one is above the gate)."""
    logits, features, targets, etf = parts_of_targets
    logits = (logits - logits.min() + 0.1).detach().clamp(max=8).requires_grad_()
    _, parts = loss_of(logits, features, targets, etf, **options)
    (gradient,) = torch.autograd.grad(parts["neg"].sum(), logits)
    return (gradient != 0).any(dim=2), logits.detach().max(dim=2).values, targets


def test_topk_takes_as_many_as_there_are_positives_and_the_strongest():
    chosen, strongest, targets = selected(drawn(batch=8, labels=9, seed=2))
    absent = targets == 0
    assert chosen.sum() == (targets == 1).sum() < absent.sum() and not (chosen & ~absent).any()
    assert strongest[chosen].min() >= strongest[absent & ~chosen].max()


def test_topk_keeps_all_negatives_where_there_are_fewer():
    logits, features, targets, etf = drawn()
    targets[:] = 1
    targets[0, :2] = 0
    chosen, _, _ = selected((logits, features, targets, etf))
    assert torch.equal(chosen, targets == 0)


def test_equal_logits_choose_the_first_ones():
    logits, features, targets, etf = drawn(batch=2)
    targets[:] = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    chosen, _, _ = selected((torch.ones_like(logits), features, targets, etf))
    assert chosen.nonzero().tolist() == [[0, 0], [0, 1]]


def test_random_draws_k_negatives_with_the_generator_given():
    inputs = drawn(batch=8, labels=9, seed=2)
    draws = [selected(inputs, select="random", generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    targets = inputs[2]
    for chosen in draws:
        assert chosen.sum() == (targets == 1).sum() and not (chosen & (targets != 0)).any()
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_every_negative_can_be_drawn():
    inputs = drawn(batch=3, labels=4, seed=1)
    generator = torch.Generator().manual_seed(0)
    union = torch.stack([selected(inputs, select="random", generator=generator)[0] for _ in range(60)]).any(dim=0)
    assert torch.equal(union, inputs[2] == 0)


def test_all_adds_up_over_samples_and_topk_does_not():
    logits, features, targets, etf = drawn(batch=5, labels=8, seed=4)
    targets[:, 0] = 1  # each sample has a positive
    singles = {
        select: np.mean([
            loss_of(logits[i : i + 1], features[i : i + 1], targets[i : i + 1], etf, select=select)[0].item()
            for i in range(5)
        ])
        for select in ("all", "topk")
    }  # fmt: skip
    whole = {select: loss_of(logits, features, targets, etf, select=select)[0].item() for select in singles}
    assert whole["all"] == pytest.approx(singles["all"], rel=1e-6)
    assert abs(whole["topk"] - singles["topk"]) > 1e-3


# -- odd batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["topk", "all", "random"])
@pytest.mark.parametrize("batch", [1, 4])
def test_batch_without_positives_is_bce_only(select, batch):
    logits, features, _, etf = drawn(batch=batch)
    targets = torch.zeros(batch, 5, dtype=torch.int8)
    loss, parts = loss_of(logits, features, targets, etf, select=select, generator=torch.Generator())
    assert (parts["neg"] == 0).all() and (parts["pos"] == 0).all()
    expected = torch.nn.functional.softplus(logits.diagonal(dim1=1, dim2=2)).sum(dim=1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("select", ["topk", "all", "random"])
@pytest.mark.parametrize("rejection", ["max_all", "nonself_sum"])
@pytest.mark.parametrize("batch", [1, 4])
def test_batch_without_negatives_has_no_rejection(select, rejection, batch):
    logits, features, _, etf = drawn(batch=batch)
    targets = torch.ones(batch, 5, dtype=torch.int8)
    options = {"select": select, "rejection": rejection, "generator": torch.Generator()}
    loss, parts = loss_of(logits, features, targets, etf, **options)
    assert (parts["neg"] == 0).all() and (parts["pos"] > 0).all() and loss.isfinite()


def test_batch_without_a_known_label_is_zero_in_value_and_gradient():
    logits, features, targets, etf = drawn()
    logits, features = logits.requires_grad_(), features.requires_grad_()
    loss, parts = loss_of(logits, features, torch.full_like(targets, -1), etf)
    assert loss.item() == 0 and all((part == 0).all() for part in parts.values())
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, [logits, features]))


def test_class_absent_at_a_site_still_learns_from_its_negatives():
    logits, features, targets, etf = drawn()
    targets[:, 2], targets[:, 0] = 0, 1
    logits = logits.requires_grad_()
    loss, _ = loss_of(logits, features, targets, etf)
    assert (torch.autograd.grad(loss, logits)[0][:, 2, 2] > 0).all()


# -- unknown labels ---------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0.05, 0.95),
    select=st.sampled_from(["topk", "all"]),
    rejection=st.sampled_from(["max_all", "nonself_sum"]),
)
@settings(max_examples=60, deadline=None)
def test_what_the_network_says_of_an_unknown_label_changes_nothing(seed, share, select, rejection):
    logits, features, targets, etf = drawn(batch=5, labels=6, seed=seed, unknown=share)
    generator = torch.Generator().manual_seed(seed)
    unknown = targets == -1
    options = {"select": select, "rejection": rejection}
    loss, parts = loss_of(logits.requires_grad_(), features.requires_grad_(), targets, etf, **options)
    for gradient in torch.autograd.grad(loss, [logits, features]):
        assert (gradient[unknown] == 0).all()
    others = [
        torch.where(unknown[..., None], 50 * torch.randn(value.shape, generator=generator), value)
        for value in (logits, features)
    ]
    changed, changed_parts = loss_of(*others, targets, etf, **options)
    assert changed.item() == loss.item()
    assert all(torch.equal(parts[name], changed_parts[name]) for name in parts)


def test_minus_one_nan_and_known_say_the_same():
    logits, features, targets, etf = drawn(seed=6)
    hidden = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    expected = loss_of(logits, features, targets.masked_fill(hidden, -1), etf)[0]
    for given_targets, known in (
        (targets.float().masked_fill(hidden, NAN), None),
        (targets, ~hidden),
        (targets.float().masked_fill(hidden, 7.0), ~hidden),  # nothing is read where known is False
        (targets.masked_fill(hidden, -1), torch.ones_like(hidden)),
    ):
        assert torch.equal(loss_of(logits, features, given_targets, etf, known=known)[0], expected)


def test_unknown_pairs_do_not_count_for_k():
    logits, features, targets, etf = drawn(batch=2, labels=5)
    targets[:] = torch.tensor([[1, 0, 0, 0, 0], [-1, -1, -1, 0, 0]])
    chosen, _, _ = selected((logits, features, targets, etf))
    assert chosen.sum() == 1


@pytest.mark.parametrize("value", [2, -2, 0.5, float("inf")])
def test_target_that_is_no_label_is_refused_with_its_place(value):
    logits, features, targets, etf = drawn()
    targets = targets.float()
    targets[4, 2] = value
    with pytest.raises(ValueError, match=rf"targets\[4, 2\] is {value}"):
        loss_of(logits, features, targets, etf)


def test_known_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"known has shape \(5,\), targets \(6, 5\)"):
        known_labels(torch.zeros(6, 5), torch.ones(5))


# -- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["select", "rejection", "contrast"])
def test_unknown_choice_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=f"{name}='best' is unknown; there are "):
        loss_of(*drawn(), **{name: "best"})


def test_random_without_a_generator_is_refused():
    with pytest.raises(ValueError, match="needs a generator"):
        loss_of(*drawn(), select="random")


@pytest.mark.parametrize("position", range(4))
def test_shapes_that_do_not_fit_are_refused(position):
    inputs = list(drawn())
    inputs[position] = inputs[position][:-1]
    with pytest.raises(ValueError, match="expected logits"):
        loss_of(*inputs)


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match="with B >= 1"):
        loss_of(*drawn(batch=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loss_is_float32_whatever_comes_in(dtype):
    logits, features, targets, etf = drawn()
    loss, parts = loss_of(logits.to(dtype), features.to(dtype), targets, etf)
    assert {loss.dtype, *(part.dtype for part in parts.values())} == {torch.float32}
    exact = loss_of(logits, features, targets, etf)[0].item()
    assert loss.item() == pytest.approx(exact, rel=1e-6 if dtype == torch.float64 else 2e-2)


def test_class_bce_is_torchs():
    logits, _, targets, _ = drawn(unknown=0.3)
    logits, known = logits.diagonal(dim1=1, dim2=2), targets >= 0
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, targets.clamp(min=0).float(), weight=known.float(), reduction="none"
    )
    torch.testing.assert_close(class_bce(logits, targets, known), expected.sum(dim=1))
