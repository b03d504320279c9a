"""FedMPT's head against golden numbers (the loss on top), a slow float64 loop, closed forms and odd input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation import seeding
from federation.metrics import mean_average_precision, of1
from models.fedmpt import FedMPTHead, asymmetric_loss_probabilities, transport_maps
from models.fedmpt_head import adapted_cosines, plain_cosines

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmpt" / "ref_forward.npz"
SMALL = {"kappa": 5.0, "tau": 4.0, "ot_reg": 0.2}


def golden(dtype=torch.float64):
    with np.load(GOLDEN) as arrays:
        return {key: torch.from_numpy(np.asarray(arrays[key])).to(dtype) for key in arrays}


def golden_head(data, dtype, **options):
    """The head of the golden case; 200 iterations, since the reference ran to convergence."""
    head = FedMPTHead(3, 8, 3, gate_hidden=4, ot_iters=200, **SMALL, **options).to(dtype)
    names = {"adapter.down": "down", "adapter.up": "up"}
    names |= {f"gate.{name}": f"r{name}" for name in ("w1", "b1", "w2", "b2")}
    head.load_state_dict({name: data[key] for name, key in names.items()}, strict=True)
    return head


def drawn(batch=3, conditions=2, patches=5, classes=4, dim=6, rank=2, seed=0, **options):
    """A head with random adapters and gate, patches and text features, float64."""
    generator = torch.Generator().manual_seed(seed)
    head = FedMPTHead(conditions, dim, rank, **SMALL, **options).double()
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    features = torch.randn(batch, patches, dim, generator=generator, dtype=torch.float64)
    text = torch.randn(conditions, classes, dim, generator=generator, dtype=torch.float64)
    return head, features, text


def slow(head, patches, text, *, iterations=20):
    """The probabilities from the formulas, one picture, condition, patch and class at a time, in numpy."""
    state = {name: value.detach().numpy() for name, value in head.state_dict().items()}
    patches, text = patches.numpy(), text.numpy()
    num_conditions, num_classes = text.shape[:2]
    result = np.zeros((len(patches), num_classes))
    for i, picture in enumerate(patches):
        hidden = np.maximum(state["gate.w1"] @ picture.mean(0) + state["gate.b1"], 0)
        omega = np.exp(state["gate.w2"] @ hidden + state["gate.b2"])
        for n in range(num_conditions):
            z = [f + state["adapter.up"][n] @ (state["adapter.down"][n] @ f) for f in picture]
            cos = np.array([[v @ t / np.linalg.norm(v) / np.linalg.norm(t) for t in text[n]] for v in z])
            sim = np.array([np.exp(5 * row) / np.exp(5 * row).sum() for row in cos])
            a = np.exp(5 * cos.max(1) / 4)
            a, b, kernel = a / a.sum(), np.full(num_classes, 1 / num_classes), np.exp((sim - 1) / 0.2)
            columns = np.ones(num_classes)
            for _ in range(iterations):
                rows = a / (kernel @ columns)
                columns = b / (kernel.T @ rows)
            plan = np.diag(rows) @ kernel @ np.diag(columns)
            result[i] += omega[n] / omega.sum() * num_classes * (plan * sim).sum(0)
    return result


# -- golden numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_every_intermediate_is_the_golden_one(dtype, tolerance):
    data = golden(dtype)
    probabilities, found = golden_head(data, dtype)(data["f"], data["t"])
    for name in ("cos", "sim", "cost", "a", "plan", "psi", "cond_prob", "omega", "gate"):
        torch.testing.assert_close(found[name], data[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(probabilities, data["prob"], rtol=0, atol=tolerance)
    loss = asymmetric_loss_probabilities(probabilities, data["y"])
    torch.testing.assert_close(loss, data["loss_sum"], rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_gradients_with_plan_and_focus_held_are_the_golden_ones(dtype, tolerance):
    data = golden(dtype)
    head, text = golden_head(data, dtype), data["t"].clone().requires_grad_()
    asymmetric_loss_probabilities(head(data["f"], text)[0], data["y"]).backward()
    for name, found in {
        "grad_t": text.grad,
        "grad_down": head.adapter.down.grad,
        "grad_up": head.adapter.up.grad,
        "grad_rw2": head.gate.w2.grad,
    }.items():
        torch.testing.assert_close(found, data[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_a_slow_loop_gives_the_same_probabilities():
    head, patches, text = drawn()
    torch.testing.assert_close(head(patches, text)[0], torch.from_numpy(slow(head, patches, text)), rtol=0, atol=1e-10)


# -- low-rank cosines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [True, False])
def test_cosines_and_gradients_equal_those_of_built_features(residual):
    head, patches, text = drawn(dim=16, rank=3)
    down, up, text = head.adapter.down, head.adapter.up, text.requires_grad_()
    z = 0.7 * torch.einsum("ndr,nre,bme->bnmd", up, down, patches)
    z = z + patches[:, None] if residual else z
    built = torch.einsum(
        "bnmd,ncd->bnmc", torch.nn.functional.normalize(z, dim=3), torch.nn.functional.normalize(text, dim=2)
    )
    found = adapted_cosines(patches, text, down, up, scale=0.7, residual=residual)
    torch.testing.assert_close(found, built, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, built.numel(), dtype=torch.float64).view_as(built)
    for mine, other in zip(
        torch.autograd.grad((weights * found).sum(), [text, down, up]),
        torch.autograd.grad((weights * built).sum(), [text, down, up]),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_a_zero_patch_has_cosine_zero_and_finite_gradients():
    head, patches, text = drawn()
    patches[0, 2] = 0
    probabilities, found = head(patches, text)
    assert (found["cos"][0, :, 2] == 0).all() and torch.isfinite(probabilities).all()
    probabilities.sum().backward()
    assert all(torch.isfinite(value.grad).all() for value in head.parameters())


# -- what must hold (spec 11) -----------------------------------------------------------------------------------------


def test_a_fresh_head_changes_nothing_and_weighs_conditions_alike():
    head = FedMPTHead(5, 8, 4)
    patches, text = torch.randn(2, 7, 8), torch.randn(5, 6, 8)
    _, found = head(patches, text)
    torch.testing.assert_close(found["cos"], plain_cosines(patches, text), rtol=0, atol=1e-6)
    torch.testing.assert_close(found["gate"], torch.full((2, 5), 0.2), rtol=0, atol=0)
    probabilities, found = head(patches, text[:1])  # one text for all conditions
    torch.testing.assert_close(probabilities, found["cond_prob"][:, 3], rtol=0, atol=1e-6)


def test_equal_texts_give_one_over_c_for_any_gate():
    head, patches, text = drawn(classes=4)
    probabilities, found = head(patches, text[:, :1].expand(-1, 20, -1))
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 0.05), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["plan"], (found["a"] / 20)[..., None].expand(-1, -1, -1, 20), rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 6), patches=st.integers(1, 7))
def test_probabilities_follow_the_classes_and_do_not_see_the_order_of_patches(seed, classes, patches):
    head, features, text = drawn(seed=seed, classes=classes, patches=patches)
    probabilities, found = head(features, text)
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    # the optimal plan beats a b'; with 20 iterations up to what is left of the row error
    assert (found["cond_prob"].sum(dim=2) >= 1 - 1e-2).all()
    generator = torch.Generator().manual_seed(seed)
    order, moved = torch.randperm(classes, generator=generator), torch.randperm(patches, generator=generator)
    torch.testing.assert_close(head(features, text[:, order])[0], probabilities[:, order], rtol=0, atol=1e-10)
    torch.testing.assert_close(head(features[:, moved], text)[0], probabilities, rtol=0, atol=1e-10)
    alone = torch.cat([head(features[i : i + 1], text)[0] for i in range(len(features))])
    torch.testing.assert_close(alone, probabilities, rtol=0, atol=1e-12)


def test_half_precision_patches_under_autocast_are_computed_in_float32():
    head = FedMPTHead(2, 8, 3)
    patches, text = torch.randn(2, 5, 8).half(), torch.randn(2, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probabilities, found = head(patches, text)
    assert probabilities.dtype == found["cos"].dtype == torch.float32
    torch.testing.assert_close(probabilities, head(patches.float(), text)[0], rtol=0, atol=0)


# -- switches ---------------------------------------------------------------------------------------------------------


def test_literal_psi_stays_below_the_margin_and_learns_nothing_from_negatives():
    head, patches, text = drawn(classes=20, psi_rescale=False)
    probabilities, _ = head(patches, text)
    assert probabilities.max() <= 0.05 and asymmetric_loss_probabilities(probabilities, torch.zeros(3, 20)) == 0
    probabilities, _ = drawn(classes=20)[0](patches, text)
    assert asymmetric_loss_probabilities(probabilities, torch.zeros(3, 20)) > 0


def test_without_transport_every_class_looks_for_itself():
    head, patches, text = drawn(aggregation="patch_softmax", gate="uniform")
    _, found = head(patches, text)
    weights = (5.0 / 4 * found["cos"]).softmax(dim=2)
    torch.testing.assert_close(found["cond_prob"], (weights * found["sim"]).sum(dim=2), rtol=0, atol=1e-12)
    assert "cost" not in found and "omega" not in found


def test_gate_by_spread_prefers_the_condition_that_tells_classes_apart():
    head, patches, text = drawn(gate="std", gate_temp=0.1)
    text[1] = text[1, :1]  # a condition in which all classes read the same
    _, found = head(patches, text)
    spread = found["cond_prob"].std(dim=2)
    torch.testing.assert_close(found["gate"], (spread / 0.1).softmax(dim=1), rtol=0, atol=1e-12)
    assert (found["gate"][:, 0] > found["gate"][:, 1]).all()


def test_raw_marginal_is_flatter_and_raw_cosines_can_be_transported():
    head, patches, text = drawn()
    raw = FedMPTHead(2, 6, 2, marginal_on="raw", psi_similarity="cosine", **SMALL).double()
    raw.load_state_dict(head.state_dict())
    found, other = head(patches, text)[1], raw(patches, text)[1]
    torch.testing.assert_close(other["a"], (found["cos"].amax(dim=3) / 4).softmax(dim=2), rtol=0, atol=1e-12)
    torch.testing.assert_close(other["psi"], (other["plan"] * found["cos"]).sum(dim=2), rtol=0, atol=1e-12)


def test_gradients_through_the_plan_are_those_of_differences():
    head, patches, text = drawn(batch=1, detach_plan=False)
    assert torch.autograd.gradcheck(lambda value: head(patches, value)[0], text.requires_grad_())
    held, *_ = drawn(batch=1)
    assert not held(patches, text)[1]["plan"].requires_grad


def test_head_without_adapters_or_router_has_no_parameters():
    head = FedMPTHead(3, 8, rank=0, gate="uniform")
    assert not list(head.parameters())
    assert head(torch.randn(2, 4, 8), torch.randn(3, 5, 8))[0].shape == (2, 5)


def test_literal_adapters_start_random_and_give_finite_probabilities():
    head = FedMPTHead(2, 8, 3, adapter_residual=False)
    probabilities, _ = head(torch.randn(2, 4, 8), torch.randn(2, 5, 8))
    assert torch.isfinite(probabilities).all() and head.adapter.up.std() > 0


@pytest.mark.parametrize(
    ("patches", "text", "said"),
    [
        ((2, 4, 8), (2, 5, 8), "patches"),
        ((2, 4, 7), (3, 5, 8), "patches"),
        ((2, 0, 8), (3, 5, 8), "patches"),
        ((2, 4, 8), (3, 1, 8), "no finding"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(patches, text, said):
    with pytest.raises(ValueError, match=said):
        FedMPTHead(3, 8, 2)(torch.zeros(patches), torch.zeros(text))


def test_unknown_switches_are_refused_by_name():
    for name in ("aggregation", "marginal_on", "psi_similarity", "gate", "ot_solver"):
        with pytest.raises(ValueError, match=name):
            FedMPTHead(2, 8, 2, **{name: "median"})


def test_transport_maps_say_where_a_class_gets_its_mass_from():
    head, patches, text = drawn()
    _, found = head(patches, text)
    maps = transport_maps(found["plan"], found["gate"])
    expected = sum(found["gate"][1, n] * 4 * found["plan"][1, n, :, 2] for n in range(2))
    torch.testing.assert_close(maps[1, 2], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(maps.sum(dim=2), torch.ones(3, 4, dtype=torch.float64), rtol=0, atol=1e-12)


# -- learning ---------------------------------------------------------------------------------------------------------


def test_training_finds_what_is_in_pictures_whose_text_is_mostly_noise():
    """Spec 11.13, smaller: 8 classes, 3 conditions, text features that are mostly noise at the start."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.nn.functional.normalize(torch.randn(8, 32, generator=generator), dim=1)
    targets = (torch.rand(160, 8, generator=generator) < 0.25).float()
    targets[torch.arange(160), torch.arange(160) % 8] = 1
    shown = torch.multinomial(targets, 16, replacement=True, generator=generator)  # class of each patch
    patches = classes[shown] + 0.3 * torch.randn(160, 16, 32, generator=generator)
    text = torch.nn.Parameter(classes + 0.5 * torch.randn(3, 8, 32, generator=generator))
    with seeding.scope(0, "head"):
        head = FedMPTHead(3, 32, 8, gate_hidden=8)
    optimiser = torch.optim.SGD([text, *head.parameters()], lr=0.05, momentum=0.9)
    train, test, losses = slice(0, 96), slice(96, 160), []

    def scores():
        with torch.no_grad():
            return head(patches[test], text)[0]

    before = mean_average_precision(scores(), targets[test])
    for _ in range(20):
        optimiser.zero_grad()
        loss = 0.02 * asymmetric_loss_probabilities(head(patches[train], text)[0], targets[train])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert mean_average_precision(scores(), targets[test]) > before
    assert of1(scores(), targets[test]) > 0.5
