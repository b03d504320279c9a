"""The prototype library of Incongruent: what one patient can change, what is released, and how the server ages it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.incongruent_losses import unit
from models.incongruent_prototypes import PrototypeLibrary, empty_library, prototype_sums, update_prototypes

# -- what a site sends ------------------------------------------------------------------------------------------------


def reports(patients=12, each=3, labels=4, dim=6, seed=0, unknown=0.2):
    """Text features ``(n, d)``, targets, known and patient codes, rows in random order."""
    generator = torch.Generator().manual_seed(seed)
    n = patients * each
    features = 3 * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    targets = (torch.rand(n, labels, generator=generator) < 0.5).to(torch.int8)
    known = torch.rand(n, labels, generator=generator) >= unknown
    targets[~known] = -1
    codes = 100 + 7 * (torch.randperm(n, generator=generator) % patients)
    return features, targets, known, codes


def slow_sums(features, targets, known, patients, min_patients):
    features, (n, labels) = features.numpy(), targets.shape
    sums, released = np.zeros((labels, features.shape[1])), np.zeros(labels, dtype=bool)
    positives = [[c for c in range(labels) if known[i, c] and targets[i, c] == 1] for i in range(n)]
    parts = {}
    for patient in sorted(set(patients.tolist())):
        rows = [i for i in range(n) if patients[i] == patient]
        part, bound = np.zeros_like(sums), 0.0
        for c in range(labels):
            mine = [i for i in rows if c in positives[i]]
            if mine:
                part[c] = np.mean([features[i] / np.linalg.norm(features[i]) / len(positives[i]) for i in mine], axis=0)
                bound += np.mean([1 / len(positives[i]) for i in mine]) ** 2
        parts[patient] = part / max(1, bound**0.5)
    for c in range(labels):
        owners = {int(patients[i]) for i in range(n) if c in positives[i]}
        released[c] = len(owners) >= min_patients
        if released[c]:
            sums[c] = sum(parts[patient][c] for patient in owners)
    return sums, released


@given(seed=st.integers(0, 10_000), each=st.integers(1, 4), min_patients=st.integers(2, 10))
@settings(max_examples=40, deadline=None)
def test_sums_are_what_a_slow_loop_gives(seed, each, min_patients):
    inputs = reports(patients=8, each=each, seed=seed)
    sums, released = prototype_sums(*inputs, min_patients)
    expected, expected_released = slow_sums(*inputs, min_patients)
    assert released.tolist() == expected_released.tolist()
    np.testing.assert_allclose(sums, expected, rtol=1e-9, atol=1e-10)


@given(seed=st.integers(0, 10_000), each=st.integers(1, 5), labels=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_one_patient_moves_the_table_by_at_most_one(seed, each, labels):
    features, targets, known, codes = reports(patients=3, each=each, labels=labels, seed=seed)
    with_all, _ = prototype_sums(features, targets, known, codes, min_patients=0)
    others = codes != 100
    without, _ = prototype_sums(features[others], targets[others], known[others], codes[others], min_patients=0)
    assert torch.linalg.vector_norm(with_all - without) <= 1 + 1e-12


def test_a_patient_with_a_report_for_each_label_is_scaled_to_one():
    """The plain formula gives sqrt(4): four rows of length 1."""
    sums, _ = prototype_sums(
        torch.ones(4, 3), torch.eye(4), torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 1
    )
    assert torch.linalg.vector_norm(sums).item() == pytest.approx(1, abs=1e-6)


def test_a_patient_with_one_report_adds_its_direction_divided_by_its_labels():
    features = torch.tensor([[3.0, 4.0]])
    sums, released = prototype_sums(
        features, torch.tensor([[1, 1, 0, 1]]), torch.tensor([[True, True, True, False]]), torch.tensor([5]), 1
    )
    assert released.tolist() == [True, True, False, False]
    torch.testing.assert_close(sums, torch.tensor([[0.3, 0.4], [0.3, 0.4], [0, 0], [0, 0]]))


@given(seed=st.integers(0, 10_000), copies=st.integers(2, 30))
@settings(max_examples=30, deadline=None)
def test_a_patient_copied_many_times_releases_nothing_and_changes_nothing(seed, copies):
    """Nine patients of at least ten: a tenth is made up by repeating the reports of one."""
    features, targets, known, codes = reports(patients=9, each=1, seed=seed, unknown=0.0)
    targets[:, 0] = 1
    sums, released = prototype_sums(features, targets, known, codes, min_patients=10)
    assert not released.any() and not sums.any()
    again = torch.cat([torch.arange(9), torch.full((copies,), 4)])
    repeated = [values[again] for values in (features, targets, known, codes)]
    sums, released = prototype_sums(*repeated, min_patients=10)
    assert not released.any() and not sums.any()
    below, _ = prototype_sums(*repeated, min_patients=1)
    torch.testing.assert_close(below, prototype_sums(features, targets, known, codes, min_patients=1)[0])
    library = empty_library(4, 6)
    after = update_prototypes(library, torch.stack([sums, sums]), torch.stack([released, released]))
    assert torch.equal(after.prototypes, library.prototypes) and not after.available.any()


def test_order_of_rows_and_names_of_patients_change_nothing():
    features, targets, known, codes = reports(seed=3)
    sums, released = prototype_sums(features, targets, known, codes)
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(1))
    again, released_again = prototype_sums(features[order], targets[order], known[order], 5000 - codes[order])
    torch.testing.assert_close(again, sums, rtol=1e-12, atol=1e-12)
    assert torch.equal(released, released_again)


def test_reports_without_a_positive_and_sites_without_reports_send_zeros():
    features, targets, known, codes = reports()
    for rows in (slice(None), slice(0)):
        sums, released = prototype_sums(features[rows], torch.zeros_like(targets)[rows], known[rows], codes[rows])
        assert sums.shape == (4, 6) and not sums.any() and not released.any()


def test_noise_has_the_asked_deviation_and_only_touches_released_rows():
    features, targets, known, codes = reports(patients=20, dim=2000, seed=1)
    targets[:, 3] = 0
    plain, released = prototype_sums(features, targets, known, codes)
    assert released.tolist() == [True, True, True, False]
    draws = [
        prototype_sums(features, targets, known, codes, sigma=2.0, generator=torch.Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert not draws[0][3].any()
    noise = (draws[0] - plain)[:3]
    assert noise.std().item() == pytest.approx(2, rel=0.06)  # 6000 draws: three standard errors are 0.055
    assert abs(noise.mean().item()) < 0.1
    with pytest.raises(ValueError, match="generator"):
        prototype_sums(features, targets, known, codes, sigma=2.0)


def test_sums_carry_no_gradient_and_half_features_give_float32():
    features, targets, known, codes = reports()
    sums, _ = prototype_sums(features.half().requires_grad_(), targets, known, codes)
    assert sums.dtype == torch.float32 and not sums.requires_grad


# -- what the server keeps --------------------------------------------------------------------------------------------


def total_of(*rows):
    """Sums ``(K, C, d)`` of two sites which together are ``rows``, and everything released."""
    total = torch.tensor(rows)
    return torch.stack([total / 4, 3 * total / 4]), torch.ones(2, len(rows), dtype=torch.bool)


def test_first_and_later_prototypes():
    library = update_prototypes(empty_library(2, 2), *total_of([3.0, 4.0], [0.0, -2.0]))
    torch.testing.assert_close(library.prototypes, torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
    assert library.ages.tolist() == [0, 0] and library.available.all()
    later = update_prototypes(library, *total_of([8.0, -6.0], [0.0, -1.0]))
    mixed = 0.9 * torch.tensor([0.6, 0.8]) + 0.1 * torch.tensor([0.8, -0.6])
    torch.testing.assert_close(later.prototypes, torch.stack([mixed / mixed.norm(), torch.tensor([0.0, -1.0])]))


def test_a_label_needs_two_sites_that_release_it():
    sums, released = total_of([1.0, 0.0], [0.0, 1.0])
    released[1, 0] = False
    sums[1, 0] = float("nan")  # what stands in a row that is not released is never read
    library = update_prototypes(empty_library(2, 2), sums, released)
    assert library.available.tolist() == [False, True] and library.ages.tolist() == [-1, 0]
    assert library.prototypes.tolist() == [[0, 0], [0, 1]]
    alone = update_prototypes(empty_library(2, 2), sums, released, min_sites=1)
    torch.testing.assert_close(alone.prototypes, torch.eye(2))


def test_sums_that_cancel_refresh_nothing():
    sums = torch.tensor([[[1.0, 0.0]], [[-1.0, 5e-7]]])
    library = update_prototypes(empty_library(1, 2), sums, torch.ones(2, 1, dtype=torch.bool))
    assert library.ages.tolist() == [-1] and not library.available.any()
    known = update_prototypes(empty_library(1, 2), *total_of([1.0, 0.0]))
    opposite = update_prototypes(known, *total_of([-1.0, 0.0]), momentum=0.5)
    assert torch.equal(opposite.prototypes, known.prototypes) and opposite.ages.tolist() == [1]


def test_a_prototype_expires_and_comes_back():
    library = update_prototypes(empty_library(1, 2), *total_of([1.0, 0.0]))
    nobody = torch.zeros(0, 1, 2), torch.zeros(0, 1, dtype=torch.bool)
    for age in range(1, 21):
        library = update_prototypes(library, *nobody)
        assert library.ages.item() == age and library.available.item() == (age < 20)
    assert library.prototypes.tolist() == [[1, 0]]
    back = update_prototypes(library, *total_of([0.0, 1.0]))
    assert back.available.all() and back.ages.tolist() == [0]
    torch.testing.assert_close(back.prototypes, unit(torch.tensor([[0.9, 0.1]])))


@given(sites=st.integers(0, 5), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_any_round_keeps_unit_rows_and_the_given_library(sites, seed):
    generator = torch.Generator().manual_seed(seed)
    library = empty_library(4, 5)
    for _ in range(3):
        before = PrototypeLibrary(*(values.clone() for values in library))
        sums = torch.randn(sites, 4, 5, generator=generator)
        after = update_prototypes(library, sums, torch.rand(sites, 4, generator=generator) < 0.6)
        assert all(torch.equal(a, b) for a, b in zip(library, before, strict=True))
        lengths = torch.linalg.vector_norm(after.prototypes, dim=1)
        torch.testing.assert_close(lengths, (after.ages >= 0).float())
        library = after


def test_wrong_shapes_are_refused():
    sums, released = total_of([1.0, 0.0])
    with pytest.raises(ValueError, match=r"expected sums \(K, 1, 2\)"):
        update_prototypes(empty_library(1, 2), sums[:, :, :1], released)
    with pytest.raises(ValueError, match="released"):
        update_prototypes(empty_library(1, 2), sums, released[:1])
