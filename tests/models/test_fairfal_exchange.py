"""The calendar of cycles and the budgets of FairFAL, against the numbers of the specification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.fairfal_exchange import (
    area_under_curve,
    closes_cycle,
    cycle_of,
    learning_rate,
    opens_cycle,
    site_budget,
)


@given(st.integers(1, 500), st.integers(1, 40))
def test_every_round_is_in_one_cycle_and_each_cycle_opens_and_closes_once(server_round, rounds):
    cycle = cycle_of(server_round, rounds)
    assert (cycle - 1) * rounds < server_round <= cycle * rounds
    assert opens_cycle(server_round, rounds) == (cycle_of(server_round - 1, rounds) != cycle)
    assert closes_cycle(server_round, rounds) == (cycle_of(server_round + 1, rounds) != cycle)


def test_the_rate_drops_for_the_last_24_of_100_rounds_of_every_cycle():
    rates = [learning_rate(0.01, number, 100) for number in range(1, 301)]
    assert rates == pytest.approx(([0.01] * 76 + [0.001] * 24) * 3)


@pytest.mark.parametrize(
    ("total", "budget"), [(20_428, 102), (17_023, 85), (15_907, 79), (97_477, 487), (7_007, 35), (330, 1), (30, 1)]
)
def test_budgets_are_those_of_the_specifications_table(total, budget):
    assert site_budget(total, 10, 0.05) == budget


def test_area_is_numpys_trapezoid_over_the_range():
    generator = np.random.default_rng(0)
    x, y = np.sort(generator.random(7)), generator.random(7)
    area = area_under_curve(dict(zip(x.tolist(), y.tolist(), strict=True)))
    assert area == pytest.approx(np.trapezoid(y, x) / (x[-1] - x[0]))
    assert area_under_curve({}) is None and area_under_curve({0.1: 0.5}) is None
