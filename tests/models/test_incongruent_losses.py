"""The alignment losses and ties of Incongruent: golden numbers, closed forms, slow loops and odd batches."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.incongruent_losses import (
    consistency_loss,
    contrastive_loss,
    contrastive_targets,
    loot_loss,
    loot_teachers,
    mad_loss,
    moon_loss,
    output_penalty,
    pairing_weight,
    prototype_loss,
    prox_penalty,
    unit,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "incongruent" / "05_contrastive.npz"
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}


def golden(dtype):
    with np.load(GOLDEN) as arrays:
        data = {key: torch.from_numpy(np.asarray(arrays[key])) for key in arrays}
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in data.items()}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labelled(batch=7, labels=5, dim=8, seed=0, unknown=0.3, dtype=torch.float64):
    """Features ``(B, d)``, targets, known, unit prototypes and which are available (one is not, its row is nan)."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, dim, generator=generator, dtype=torch.float64).to(dtype)
    targets = (torch.rand(batch, labels, generator=generator) < 0.4).to(torch.int8)
    known = torch.rand(batch, labels, generator=generator) >= unknown
    targets[~known] = -1
    prototypes = unit(torch.randn(labels, dim, generator=generator, dtype=torch.float64)).to(dtype)
    available = torch.ones(labels, dtype=torch.bool)
    available[seed % labels], prototypes[seed % labels] = False, float("nan")
    return features, targets, known, prototypes, available


def cosine(a, b):
    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def is_zero_with_graph(loss, *inputs):
    gradients = torch.autograd.grad(loss, inputs)
    return loss.item() == 0 and all((gradient == 0).all() for gradient in gradients)


# -- level 1: contrast ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_contrast_gives_the_golden_numbers(dtype):
    data = golden(dtype)
    found = contrastive_targets(data["study"], data["y"], eta=0.5, dtype=dtype)
    torch.testing.assert_close(found, data["Q"], **TOLERANCES[dtype])
    soft = contrastive_loss(data["zv"], data["zt"], data["study"], data["y"], temperature=0.07, eta=0.5)
    torch.testing.assert_close(soft, data["loss"], **TOLERANCES[dtype])
    hard = contrastive_loss(data["zv"], data["zt"], torch.arange(6), data["y"], temperature=0.07, eta=0.0)
    torch.testing.assert_close(hard, data["loss_hard"], **TOLERANCES[dtype])


def test_pairing_weights_are_the_golden_ones():
    data = golden(torch.float64)
    found = [pairing_weight(pairs, records) for pairs, records in data["pair_in"].tolist()]
    assert found == pytest.approx(data["pair_w"].tolist(), rel=1e-9)


def test_pairing_weight_is_a_power_and_refuses_what_cannot_be():
    assert pairing_weight(30, 100, rho=2) == pytest.approx(0.09)
    assert pairing_weight(30, 100, rho=0) == 1
    assert pairing_weight(4, 100) == 0 and pairing_weight(5, 100) == 0.05
    with pytest.raises(ValueError, match="3 pairs of 2 records"):
        pairing_weight(3, 2)


def test_two_orthonormal_pairs():
    pairs = torch.eye(2, 4, dtype=torch.float64)
    loss = contrastive_loss(3 * pairs, 5 * pairs, torch.arange(2), torch.eye(2), temperature=1.0, eta=0.0)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1)), abs=1e-12)  # 0.313261688


@pytest.mark.parametrize(("pairs", "study"), [(0, []), (1, [4]), (3, [4, 4, 4])])
def test_fewer_than_two_pairs_or_one_study_is_zero(pairs, study):
    z_image, z_text = normal(pairs, 6, seed=1).requires_grad_(), normal(pairs, 6, seed=2).requires_grad_()
    loss = contrastive_loss(z_image, z_text, torch.tensor(study, dtype=torch.int64), torch.zeros(pairs, 3))
    assert is_zero_with_graph(loss, z_image, z_text)


@given(pairs=st.integers(2, 7), seed=st.integers(0, 10_000), eta=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=40, deadline=None)
def test_contrast_is_what_a_slow_loop_gives(pairs, seed, eta):
    z_image, z_text = normal(pairs, 5, seed=seed), normal(pairs, 5, seed=seed + 1)
    study = torch.randint(0, 4, (pairs,), generator=torch.Generator().manual_seed(seed))
    study[0], study[1] = 8, 9  # at least two studies
    _, labels, *_ = labelled(pairs, 3, seed=seed)
    sets = [{c for c in range(3) if labels[i, c] == 1} for i in range(pairs)]
    wanted = np.zeros((pairs, pairs))
    for i in range(pairs):
        same = [float(study[i] == study[j]) for j in range(pairs)]
        jaccard = [len(sets[i] & s) / len(sets[i] | s) if sets[i] | s else 1.0 for s in sets]
        wanted[i] = [(1 - eta) * g / sum(same) + eta * q / sum(jaccard) for g, q in zip(same, jaccard, strict=True)]
    scores = np.array([[cosine(a, b) / 0.2 for b in z_text.numpy()] for a in z_image.numpy()])
    expected = 0.0
    for table in (scores, scores.T):
        log_probabilities = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
        expected -= (wanted * log_probabilities).sum(axis=1).mean() / 2
    np.testing.assert_allclose(contrastive_targets(study, labels, eta, torch.float64), wanted, atol=1e-12)
    assert contrastive_loss(z_image, z_text, study, labels, 0.2, eta).item() == pytest.approx(expected, rel=1e-9)


def test_contrast_is_symmetric_in_its_modalities_and_sees_no_lengths():
    data = golden(torch.float64)
    loss = contrastive_loss(data["zt"], 7 * data["zv"], data["study"], data["y"])
    torch.testing.assert_close(loss, data["loss"])


# -- level 2: consistency ---------------------------------------------------------------------------------------------


def slow_consistency(mode, features, reference, targets, known, prototypes, available):
    features, reference, prototypes = (values.numpy() for values in (features, reference, prototypes))
    batch, labels = targets.shape
    if mode == "sample":
        return np.mean([1 - cosine(features[i], reference[i]) for i in range(batch)])
    if mode == "class":
        rows = [[i for i in range(batch) if known[i, c] and targets[i, c] == 1] for c in range(labels)]
        terms = [1 - cosine(features[r].mean(axis=0), reference[r].mean(axis=0)) for r in rows if len(r) >= 2]
        return np.mean(terms) if terms else 0.0
    usable = [c for c in range(labels) if available[c]]
    terms = []
    for i in range(batch):
        ours, theirs = (
            np.exp([cosine(values[i], prototypes[c]) / 0.5 for c in usable]) for values in (features, reference)
        )
        ours, theirs = ours / ours.sum(), theirs / theirs.sum()
        terms.append((theirs * np.log(theirs / ours)).sum())
    return np.mean(terms)


@pytest.mark.parametrize("mode", ["sample", "class", "kl"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_consistency_is_what_a_slow_loop_gives(mode, dtype):
    for seed in range(8):
        features, targets, known, prototypes, available = labelled(seed=seed)
        reference = normal(7, 8, seed=seed + 50)
        expected = slow_consistency(mode, features, reference, targets, known, prototypes, available)
        given_features = features.to(dtype).requires_grad_()
        loss = consistency_loss(
            given_features, reference.to(dtype), targets, known, prototypes.to(dtype), available, mode=mode
        )
        tolerance = TOLERANCES[dtype]
        assert loss.item() == pytest.approx(expected, rel=tolerance["rtol"], abs=tolerance["atol"])
        assert torch.autograd.grad(loss, given_features)[0].isfinite().all()


@pytest.mark.parametrize("mode", ["sample", "class", "kl"])
def test_consistency_is_zero_at_the_global_encoder_and_positive_elsewhere(mode):
    features, targets, known, prototypes, available = labelled(batch=12, unknown=0.0)
    same = consistency_loss(features, features, targets, known, prototypes, available, mode=mode)
    assert same.item() == pytest.approx(0, abs=1e-12)
    other = consistency_loss(features, normal(12, 8, seed=9), targets, known, prototypes, available, mode=mode)
    assert other.item() > 1e-3


@pytest.mark.parametrize("mode", ["sample", "class", "kl"])
def test_the_global_encoder_gets_no_gradient(mode):
    features, targets, known, prototypes, available = labelled()
    reference = normal(7, 8, seed=9).requires_grad_()
    loss = consistency_loss(features.requires_grad_(), reference, targets, known, prototypes, available, mode=mode)
    assert torch.autograd.grad(loss, reference, allow_unused=True) == (None,)


def test_consistency_without_anything_to_compare_is_zero():
    features, targets, known, prototypes, available = labelled(labels=3)
    features.requires_grad_()
    alone = torch.full_like(targets, -1)
    alone[0] = 1  # one positive a label: no class mean
    reference = normal(7, 8, seed=9)
    nowhere = torch.zeros_like(available)
    assert is_zero_with_graph(
        consistency_loss(features, reference, alone, known, prototypes, available, mode="class"), features
    )
    assert is_zero_with_graph(
        consistency_loss(features, reference, targets, known, prototypes, nowhere, mode="kl"), features
    )
    for mode in ("sample", "class", "kl"):
        empty = features[:0]
        loss = consistency_loss(empty, reference[:0], targets[:0], known[:0], prototypes, available, mode=mode)
        assert is_zero_with_graph(loss, features)


def test_an_unknown_mode_is_refused():
    features, targets, known, prototypes, available = labelled()
    with pytest.raises(ValueError, match="mode='pixel' is unknown; there are sample, class, kl"):
        consistency_loss(features, features, targets, known, prototypes, available, mode="pixel")


# -- level 3: prototypes at the receiver ------------------------------------------------------------------------------


def slow_prototype_loss(features, targets, known, prototypes, available, temperature=0.1):
    features, prototypes = features.numpy(), prototypes.numpy()
    terms = []
    for i in range(len(features)):
        usable = [c for c in range(len(prototypes)) if available[c] and known[i, c]]
        positives = [c for c in usable if targets[i, c] == 1]
        negatives = [c for c in usable if targets[i, c] == 0]
        if positives and negatives:
            exponentials = {c: math.exp(cosine(features[i], prototypes[c]) / temperature) for c in usable}
            against = sum(exponentials[c] for c in negatives)
            terms.append(np.mean([-math.log(exponentials[c] / (exponentials[c] + against)) for c in positives]))
    return np.mean(terms) if terms else 0.0


def test_one_aligned_positive_and_one_orthogonal_negative():
    axes = torch.eye(2, 4, dtype=torch.float64)
    every = torch.ones(1, 2, dtype=torch.bool)
    loss = prototype_loss(2 * axes[:1], torch.tensor([[1, 0]]), every, axes, every[0])
    assert loss.item() == pytest.approx(4.539889921e-5, rel=1e-9)


@given(
    batch=st.integers(1, 7),
    labels=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    unknown=st.sampled_from([0.0, 0.4, 0.9]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
@settings(max_examples=60, deadline=None)
def test_prototype_loss_is_what_a_slow_loop_gives(batch, labels, seed, unknown, dtype):
    features, targets, known, prototypes, available = labelled(batch, labels, seed=seed, unknown=unknown, dtype=dtype)
    expected = slow_prototype_loss(features.double(), targets, known, prototypes.double(), available)
    loss = prototype_loss(features.requires_grad_(), targets, known, prototypes, available)
    assert loss.item() == pytest.approx(expected, rel=TOLERANCES[dtype]["rtol"], abs=TOLERANCES[dtype]["atol"])
    assert torch.autograd.grad(loss, features)[0].isfinite().all()


def test_rows_without_a_positive_or_a_negative_do_not_count():
    features, _, _, prototypes, _ = labelled(batch=4, labels=3, seed=0)
    prototypes = torch.eye(3, 8, dtype=torch.float64)
    available = torch.tensor([True, True, False])
    known = torch.ones(4, 3, dtype=torch.bool)
    targets = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]])  # label 2 has no prototype: only row 0 counts
    features.requires_grad_()
    loss = prototype_loss(features, targets, known, prototypes, available)
    torch.testing.assert_close(loss, prototype_loss(features[:1], targets[:1], known[:1], prototypes, available))
    (gradient,) = torch.autograd.grad(loss, features)
    assert gradient[0].any() and not gradient[1:].any()
    assert is_zero_with_graph(
        prototype_loss(features, targets, known, prototypes, torch.zeros_like(available)), features
    )
    assert is_zero_with_graph(
        prototype_loss(features, targets, torch.zeros_like(known), prototypes, available), features
    )


def test_positives_do_not_repel_each_other():
    """Three labels on orthogonal axes, the feature between the two positives: both costs are those of one positive."""
    axes = torch.eye(3, dtype=torch.float64)
    between = axes[:1] + axes[1:2]
    every = torch.ones(3, dtype=torch.bool)
    two = prototype_loss(between, torch.tensor([[1, 1, 0]]), every[None], axes, every, temperature=1.0)
    assert two.item() == pytest.approx(math.log1p(math.exp(-math.sqrt(0.5))), rel=1e-12)


# -- ties to the global model -----------------------------------------------------------------------------------------


def test_prox_penalty_is_half_mu_times_the_squared_distance():
    fusion = nn.Linear(3, 2)
    reference = {name: value.detach() - 2 for name, value in fusion.named_parameters()}
    loss = prox_penalty(fusion, reference, mu=0.1)
    assert loss.item() == pytest.approx(0.05 * 4 * 8, rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, fusion.bias)[0], torch.full((2,), 0.2))
    assert prox_penalty(nn.Identity(), {}).item() == 0


def test_output_penalty_is_a_mean_over_rows_and_width():
    fused, reference = normal(5, 4).requires_grad_(), normal(5, 4, seed=1).requires_grad_()
    loss = output_penalty(fused, reference)
    assert loss.item() == pytest.approx(np.square((fused - reference).detach().numpy()).mean(), rel=1e-12)
    assert torch.autograd.grad(loss, reference, allow_unused=True) == (None,)
    assert is_zero_with_graph(output_penalty(fused[:0], reference[:0]), fused)


BOTH, IMAGE, TEXT = (True, True), (True, False), (False, True)


def test_distillation_is_what_a_slow_loop_gives():
    student, teacher = normal(4, 3).requires_grad_(), 2 * normal(4, 3, seed=1)
    present = torch.tensor([IMAGE, TEXT, BOTH, IMAGE])
    teacher_present = torch.tensor([BOTH, BOTH, BOTH, IMAGE])  # only rows 0 and 1 have a richer teacher
    p, q = (torch.sigmoid(values / 2).detach().numpy() for values in (teacher, student))
    expected = 4 * np.mean((p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))[:2])
    loss = mad_loss(student, teacher, present, teacher_present)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, student)
    assert gradient[:2].all() and not gradient[2:].any()


def test_distillation_of_equal_logits_and_without_a_richer_teacher_is_zero():
    student = normal(4, 3).requires_grad_()
    richer, same = torch.tensor([BOTH] * 4), torch.tensor([IMAGE] * 4)
    assert is_zero_with_graph(mad_loss(student, student.detach(), same, same), student)
    assert mad_loss(student, student, same, richer).item() == 0
    assert is_zero_with_graph(mad_loss(student, 5 * student, same, same), student)


def test_distillation_of_extreme_logits_is_finite():
    student = torch.tensor([[-500.0, 500.0]], requires_grad=True)
    loss = mad_loss(student, -student, torch.tensor([IMAGE]), torch.tensor([BOTH]))
    assert loss.item() == pytest.approx(4 * 250)
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


def test_moon_of_equal_features_is_ln_2_and_falls_towards_the_global_model():
    fused = normal(3, 5).requires_grad_()
    assert moon_loss(fused, fused, fused).item() == pytest.approx(math.log(2), abs=1e-12)
    away = moon_loss(fused, fused, -fused)
    assert away.item() == pytest.approx(math.log1p(math.exp(-4)), rel=1e-9)  # cosines 1 and -1 at T = 0.5
    assert is_zero_with_graph(moon_loss(fused[:0], fused[:0], fused[:0]), fused)


# -- leave-one-out teachers -------------------------------------------------------------------------------------------


@given(sites=st.integers(2, 6), seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_teachers_are_the_means_of_the_others(sites, seed):
    embeddings = normal(sites, 4, 3, seed=seed)
    total = embeddings.sum(dim=0)
    teachers = loot_teachers(total, embeddings, sites)
    for site in range(sites):
        others = torch.cat([embeddings[:site], embeddings[site + 1 :]]).mean(dim=0)
        torch.testing.assert_close(teachers[site], others, rtol=1e-9, atol=1e-10)
        assert torch.equal(loot_teachers(total, embeddings[site], sites), teachers[site])
    torch.testing.assert_close(teachers.mean(dim=0), embeddings.mean(dim=0), rtol=1e-9, atol=1e-10)


def test_two_sites_are_each_others_teachers_and_one_has_none():
    embeddings = normal(2, 4, 3)
    torch.testing.assert_close(loot_teachers(embeddings.sum(dim=0), embeddings, 2), embeddings.flip(0))
    with pytest.raises(ValueError, match="at least 2"):
        loot_teachers(embeddings[0], embeddings[0], 1)


def test_loot_loss_is_a_cosine_distance_or_a_mean_square():
    ours, theirs = normal(4, 3).requires_grad_(), normal(4, 3, seed=1)
    rows = [1 - cosine(a, b) for a, b in zip(ours.detach().numpy(), theirs.numpy(), strict=True)]
    assert loot_loss(ours, theirs).item() == pytest.approx(np.mean(rows), rel=1e-9)
    torch.testing.assert_close(loot_loss(ours, theirs, "mse"), torch.nn.functional.mse_loss(ours, theirs))
    with pytest.raises(ValueError, match="kind='l1' is unknown"):
        loot_loss(ours, theirs, "l1")


# -- precision and odd rows -------------------------------------------------------------------------------------------


def test_autocast_and_half_inputs_give_the_float32_numbers():
    features, targets, known, prototypes, available = labelled(dtype=torch.bfloat16)
    other, study = normal(7, 8, seed=3, dtype=torch.bfloat16), torch.arange(7)

    def losses(cast):
        ours, theirs, library = features.to(cast), other.to(cast), prototypes.to(cast)
        return [
            contrastive_loss(ours, theirs, study, targets),
            prototype_loss(ours, targets, known, library, available),
            *(
                consistency_loss(ours, theirs, targets, known, library, available, mode=mode)
                for mode in ("sample", "class", "kl")
            ),
            moon_loss(ours, theirs, -theirs),
            output_penalty(ours, theirs),
            loot_loss(ours, theirs),
        ]

    expected = losses(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses(torch.bfloat16)
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_feature_of_length_zero_does_not_explode():
    features, targets, known, prototypes, available = labelled(dtype=torch.float32)
    features[:2] = 0
    features.requires_grad_()
    loss = prototype_loss(features, targets, known, prototypes, available)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.isfinite() and not gradient[:2].any() and gradient.abs().max() < 1e3


def test_wrong_shapes_are_refused():
    features, targets, known, prototypes, available = labelled()
    with pytest.raises(ValueError, match="z_text"):
        contrastive_loss(features, features[:3], torch.arange(7), targets)
    with pytest.raises(ValueError, match="study"):
        contrastive_loss(features, features, torch.arange(3), targets)
    with pytest.raises(ValueError, match=r"prototypes has shape \(5, 7\), expected \(5, 8\)"):
        prototype_loss(features, targets, known, prototypes[:, :7], available)
    with pytest.raises(ValueError, match="global_features"):
        consistency_loss(features, features[:1], targets, known, prototypes, available)
