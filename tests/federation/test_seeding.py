"""Every draw is a function of (seed, purpose, round, site) and of nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from federation import seeding


def test_seeds_are_the_same_on_every_machine_and_in_every_version():
    # Recorded once; a change here would make every run of before irreproducible.
    assert seeding.derive(7, "batches", 1, "st-mary") == 7705256849852322023
    assert seeding.derive(0, "") == 4684701661187169400


def test_every_part_of_the_key_makes_another_seed():
    keys = list(itertools.product((1, 2), ("batches", "training"), (0, 1, 11), ("", "a", "1a")))
    assert len({seeding.derive(*key) for key in keys}) == len(keys)


def test_parts_of_the_key_cannot_run_into_each_other():
    assert seeding.derive(1, "a", 11, "b") != seeding.derive(1, "a", 1, "1b")
    assert seeding.derive(1, "a", 1, "b") != seeding.derive(1, "a1", 1, "b")


def test_a_seed_fits_torch_and_numpy():
    seeds = [seeding.derive(seed, "x") for seed in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_of_one_key_draw_the_same_and_of_two_keys_not():
    def torch_draw(*key):
        return torch.rand(4, generator=seeding.generator(*key)).tolist()

    def numpy_draw(*key):
        return seeding.numpy_generator(*key).random(4).tolist()

    for draw in (torch_draw, numpy_draw):
        assert draw(1, "p", 2, "s") == draw(1, "p", 2, "s") != draw(1, "p", 3, "s")


def test_a_generator_does_not_touch_the_global_state():
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(3).tolist(), np.random.random(3).tolist()
    torch.manual_seed(0)
    np.random.seed(0)
    seeding.generator(1, "p").initial_seed()
    torch.rand(5, generator=seeding.generator(1, "p"))
    seeding.numpy_generator(1, "p").random(5)
    assert (torch.rand(3).tolist(), np.random.random(3).tolist()) == expected


def test_a_scope_seeds_the_global_state_inside_and_restores_it_after():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with seeding.scope(1, "init"):
        first = torch.nn.Linear(3, 2).weight.tolist()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(100)
    with seeding.scope(1, "init"):
        assert torch.nn.Linear(3, 2).weight.tolist() == first
    with seeding.scope(1, "init", 1):
        assert torch.nn.Linear(3, 2).weight.tolist() != first


def test_a_scope_restores_the_state_after_an_error():
    before = torch.random.get_rng_state()
    try:
        with seeding.scope(1, "init"):
            torch.rand(1)
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.equal(torch.random.get_rng_state(), before)
