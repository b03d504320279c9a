"""How many sites with image-report pairs a round needs, and who fills it: a floor that decays over the rounds.

Source: the project's incongruent specification, section 5.2. Alignment of the two branches needs paired sites early;
later rounds may be filled with sites of one modality. Every draw comes from the generator that is passed in, so a
round's selection is a function of the seed and the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

Shape = Literal["cosine", "linear", "exp"]
Fill = Literal["unimodal_first", "all"]
Item = TypeVar("Item")


def paired_fraction(round: int, start: float, end: float, decay_rounds: float, shape: Shape = "cosine") -> float:
    """The share of paired sites asked for in a round counted from 1: ``end + (start - end) * D(s)`` (spec 5.2).

    s = (round - 1) / decay_rounds, at most 1. D: ``linear`` 1 - s, ``cosine`` (1 + cos(pi s)) / 2, ``exp`` e^(-5 s),
    which ends at e^-5, not at 0. Raises ValueError unless 0 <= end <= start <= 1, round >= 1 and decay_rounds > 0.

    >>> [round(paired_fraction(t, 0.6, 0.2, 10), 3) for t in (1, 6, 11, 40)]
    [0.6, 0.4, 0.2, 0.2]
    """
    if not 0 <= end <= start <= 1:
        raise ValueError(f"start is {start} and end {end}, expected 0 <= end <= start <= 1")
    if round < 1 or not decay_rounds > 0:
        raise ValueError(f"round is {round} and decay_rounds {decay_rounds}, expected at least 1 and above 0")
    s = min((round - 1) / decay_rounds, 1.0)
    if shape == "linear":
        decay = 1 - s
    elif shape == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * s))
    elif shape == "exp":
        decay = math.exp(-5 * s)
    else:
        raise ValueError(f"shape is {shape!r}, expected 'cosine', 'linear' or 'exp'")
    return end + (start - end) * decay


def paired_quota(
    sites: int, pool: int, round: int, start: float, end: float, decay_rounds: float, shape: Shape = "cosine"
) -> int:
    """Paired sites that a round must hold: min(pool, sites, max(1, ceil(fraction * sites - 1e-9))) (spec 5.2).

    ``sites``: sites drawn in the round. ``pool``: paired sites that are there; 0 where there is none. The 1e-9 forgives
    binary fractions: 0.2 of 10 sites is 2, not 3.
    """
    if sites < 0 or pool < 0:
        raise ValueError(f"sites is {sites} and pool {pool}, expected numbers from 0")
    fraction = paired_fraction(round, start, end, decay_rounds, shape)
    return min(pool, sites, max(1, math.ceil(fraction * sites - 1e-9)))


def stratified(
    paired: Sequence[Item],
    others: Sequence[Item],
    count: int,
    quota: int,
    fill: Fill,
    generator: np.random.Generator,
) -> list[Item]:
    """``count`` sites, at least ``quota`` of them paired, uniform without replacement; all where there are no more.

    ``fill`` says who takes the other places: ``unimodal_first`` (the specification's default) the other sites, and
    paired ones only when these run out; ``all`` whoever is drawn from the rest. The result keeps the order of
    ``[*paired, *others]``; give both sorted by name, or the draw depends on the order of arrival. Raises ValueError
    for a quota that cannot be met.
    """
    if not 0 <= quota <= min(count, len(paired)):
        raise ValueError(f"quota is {quota}, expected 0 to {count} sites of a round and {len(paired)} paired sites")
    num_paired = len(paired)
    everyone = [*paired, *others]
    chosen = _draw(np.arange(num_paired), quota, generator)
    left = np.setdiff1d(np.arange(len(everyone)), chosen)
    if fill == "unimodal_first":
        chosen = np.concatenate((chosen, _draw(left[left >= num_paired], count - chosen.size, generator)))
        chosen = np.concatenate((chosen, _draw(left[left < num_paired], count - chosen.size, generator)))
    elif fill == "all":
        chosen = np.concatenate((chosen, _draw(left, count - chosen.size, generator)))
    else:
        raise ValueError(f"fill is {fill!r}, expected 'unimodal_first' or 'all'")
    return [everyone[index] for index in np.sort(chosen)]


def _draw(indices: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    return generator.choice(indices, min(count, indices.size), replace=False)
