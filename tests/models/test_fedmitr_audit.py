"""The memorisation audit: what it finds in copies, what it finds in strangers, and how often it is wrong."""

from __future__ import annotations

import pytest
import torch

from models.fedmitr_audit import has_memorised, memorisation_audit


def images_of(count, seed):
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def seeded():
    return torch.Generator().manual_seed(0)


def test_copies_of_training_images_are_found():
    training, held_out = images_of(60, 1), images_of(40, 2)
    copies = training.repeat(1, 1, 1, 1) + 0.05 * torch.randn(60, 3, 4, 4, generator=seeded())
    audit = memorisation_audit(copies, training, held_out, seeded())
    assert has_memorised(audit) and audit.share > 0.7


def test_strangers_are_as_near_to_both():
    audit = memorisation_audit(images_of(300, 3), images_of(200, 1), images_of(100, 2), seeded())
    assert not has_memorised(audit) and 0.3 < audit.share < 0.7
    swapped = memorisation_audit(images_of(100, 2), images_of(200, 1), images_of(100, 2), seeded())
    assert swapped.share < 0.1 and swapped.p_value > 0.99


def test_distances_are_those_of_a_slow_loop_in_any_chunk():
    synthetic, training, held_out = images_of(7, 3), images_of(12, 1), images_of(12, 2)
    audits = [memorisation_audit(synthetic, training, held_out, seeded(), chunk=chunk) for chunk in (2, 256)]
    for audit in audits:
        for found, references in ((audit.trained, training), (audit.held_out, held_out)):
            expected = [min((one - other).square().mean().sqrt().item() for other in references) for one in synthetic]
            assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert audits[0].closer == sum(a < b for a, b in zip(audits[0].trained, audits[0].held_out, strict=True))


def test_chances_are_at_least_one_in_a_thousand_and_ties_are_left_out():
    training = images_of(10, 1)
    audit = memorisation_audit(training[:3], training, training.clone(), seeded())
    assert (audit.trials, audit.share, audit.p_value) == (0, 0.5, 1.0)
    far = memorisation_audit(training, training, training + 5, seeded())
    assert (far.closer, far.trials, far.p_value) == (10, 10, 1 / 1000)


def test_too_few_references_are_refused():
    with pytest.raises(ValueError, match="at least 10 training and held-out ones; got 3, 20 and 9"):
        memorisation_audit(images_of(3, 0), images_of(20, 1), images_of(9, 2), seeded())


def test_alarms_are_as_rare_as_promised_where_all_synthetic_images_are_alike():
    """Sixty-four grey images have one nearest reference; which side it is on is a coin toss, not sixty-four of them."""
    grey = torch.full((64, 3, 4, 4), 0.5)
    alarms = [
        has_memorised(
            memorisation_audit(grey, images_of(20, 2 * seed), images_of(20, 2 * seed + 1), seeded()), level=0.1
        )
        for seed in range(40)
    ]
    assert sum(alarms) == 0


def test_false_alarms_are_at_the_level_where_synthetic_images_differ():
    """Independent images: 200 audits at level 0.1 alarm 20 times, give or take three standard deviations of 4.2."""
    alarms = [
        has_memorised(
            memorisation_audit(
                images_of(30, 3 * seed), images_of(20, 3 * seed + 1), images_of(20, 3 * seed + 2), seeded()
            ),
            level=0.1,
        )
        for seed in range(200)
    ]
    assert sum(alarms) <= 33
