"""What both halves of `fairfal` agree on: the calendar of cycles, and the questions with the numbers of their answers.

The project's fairfal specification, sections 2, 4 and 6. Rounds count from 1; a cycle is so many rounds and begins with
a question to every site.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

STATS, COUNTS, SELECT = "stats", "counts", "select"

ANSWERS: Mapping[str, Mapping[str, str]] = {
    STATS: {"gamma": "real"},
    COUNTS: {"noisy_counts": "counts"},
    SELECT: {"num_selected": "count", "num_labelled": "count"},
}
"""What a site answers to each question (spec 6). ``noisy_counts`` is asked for by one switch only (spec 17-3)."""

ONE_CLASS = 0.0
"""The ``gamma`` of a site of one class that ``fairfal.skip_single_class`` leaves out of the mean (spec 14)."""

DECAY_AFTER, DECAY = 0.75, 0.1


def cycle_of(server_round: int, rounds_per_cycle: int) -> int:
    """The cycle of a round, from 1."""
    return (server_round - 1) // rounds_per_cycle + 1


def opens_cycle(server_round: int, rounds_per_cycle: int) -> bool:
    """Whether a round is the first of its cycle."""
    return server_round % rounds_per_cycle == 1 or rounds_per_cycle == 1


def closes_cycle(server_round: int, rounds_per_cycle: int) -> bool:
    """Whether a round is the last of its cycle."""
    return server_round % rounds_per_cycle == 0


def learning_rate(lr: float, server_round: int, rounds_per_cycle: int) -> float:
    """``lr``, and a tenth of it once the round's index in its cycle, from 0, is above int(0.75 T) (spec 4).

    >>> [learning_rate(0.01, index + 1, 100) for index in (75, 76)]
    [0.01, 0.001]
    """
    index = (server_round - 1) % rounds_per_cycle
    return lr * DECAY if index > int(DECAY_AFTER * rounds_per_cycle) else lr


def site_budget(num_train: int, num_sites: int, label_share: float) -> int:
    """Samples that each site labels in a cycle: int(N * share / K), N rounded to hundreds (spec 2).

    Choice: N below 1,000 is taken as it is, and the budget is at least 1.

    >>> site_budget(17_023, 10, 0.05), site_budget(20_428, 10, 0.05)
    (85, 102)
    """
    total = num_train if num_train < 1000 else round(num_train, -2)
    return max(1, int(total * label_share / num_sites))


def area_under_curve(points: Mapping[float, float]) -> float | None:
    """AULC: trapezoids over the ratios of labelled samples, divided by their range; None for fewer than two ratios.

    ``points``: ratio -> figure. The normalisation is the specification's own (spec 10).

    >>> area_under_curve({0.1: 0.5, 0.2: 0.7, 0.4: 0.8})
    0.7
    """
    ratios = sorted(points)
    if len(ratios) < 2:
        return None
    area = sum((b - a) * (points[a] + points[b]) / 2 for a, b in pairwise(ratios))
    return area / (ratios[-1] - ratios[0])
