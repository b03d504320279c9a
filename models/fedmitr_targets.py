"""Which label each synthetic image gets, and which site's model it is drawn from.

The project's fedmitr specification, sections 3, 9 and 10. A class that no site holds is never asked for, and neither is
one that a site holds for fewer than ``min_class_count`` patients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SAMPLERS = ("balanced", "client_count", "client_present", "uniform")


class Targets(NamedTuple):
    """Labels ``(M,) int64``, or ``(M, C) int8`` with -1 unknown, and the site of each ``(M,) int64``, ascending."""

    labels: Tensor
    sites: Tensor


def teaching_sites(counts: Tensor, *, min_class_count: int = 10) -> Tensor:
    """Sites whose models can be inverted ``(K,) bool``: those that hold two classes or more (spec 10).

    A model of one class gives it to noise already, so there is no signal. Choice: where every site has one class,
    those that hold one teach all the same, for there is nothing better.
    """
    held = (counts >= max(1, min_class_count)).sum(dim=1)
    return held >= 2 if bool((held >= 2).any()) else held >= 1


def sample_targets(
    sampler: str, size: int, counts: Tensor, generator: torch.Generator, *, min_class_count: int = 10
) -> Targets:
    """``size`` labels and the sites that draw them, for ``counts (K, C)`` samples by site and class (spec 3).

    ``balanced``: every class held by a teaching site equally often, then site k with n_k,y / sum_j n_j,y.
    ``client_count``: every site equally often, then y with n_k,c / n_k. ``client_present``: the same with y uniform
    over the site's classes. ``uniform``: y uniform over all classes, SMI's way, wrong for a site that never saw y; a
    class that the site holds too rarely is left out even there.

    Choice: "equally often" is dealt in turn, up to one, not drawn. Raises ValueError where nothing can be asked for.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"label sampler {sampler!r} is unknown; there are {', '.join(SAMPLERS)}")
    is_held = counts >= max(1, min_class_count)
    teaches = teaching_sites(counts, min_class_count=min_class_count)
    usable = torch.where(is_held & teaches[:, None], counts, 0).double()
    if not bool(usable.any()):
        raise ValueError(f"no site holds a class with at least {min_class_count} samples; there is nothing to invert")
    turn = torch.arange(size)
    if sampler == "balanced":
        classes = usable.any(dim=0).nonzero()[:, 0]
        labels = classes[turn % len(classes)]
        sites = _draw(usable.T[labels], generator)
    else:
        teachers = teaches.nonzero()[:, 0]
        sites = teachers[turn % len(teachers)]
        chances = {
            "client_count": usable,
            "client_present": (usable > 0).double(),
            "uniform": (is_held | (counts == 0)).double(),
        }[sampler]
        labels = _draw(chances[sites], generator)
    order = sites.argsort(stable=True)
    return Targets(labels[order], sites[order])


def sample_label_vectors(
    size: int, positives: Tensor, negatives: Tensor, generator: torch.Generator, *, min_class_count: int = 10
) -> Targets:
    """``size`` label vectors ``(M, C) int8`` for multi-label sites, dealt to the sites in turn (spec 13.1).

    ``positives`` and ``negatives (K, C)`` count known samples. Every label is present with the site's own prevalence,
    independently. Choice: in each vector one label drawn from those that the site holds (or, as often, none) is set to
    present, or rare findings would never be drawn. A label with too few positives is absent, one with no known sample
    at all is -1. A site without any usable label is not asked.
    """
    is_held = positives >= max(1, min_class_count)
    prevalence = torch.where(is_held, positives / (positives + negatives).clamp(min=1), 0.0).double()
    teachers = is_held.any(dim=1).nonzero()[:, 0]
    if not len(teachers):
        raise ValueError(f"no site holds a label with at least {min_class_count} positives; there is nothing to invert")
    sites = teachers[torch.arange(size) % len(teachers)].sort().values
    drawn = torch.rand(size, positives.shape[1], generator=generator, dtype=torch.float64) < prevalence[sites]
    none = torch.ones(len(sites), 1, dtype=torch.float64)
    forced = _draw(torch.cat([is_held[sites].double(), none], dim=1), generator)
    drawn |= torch.nn.functional.one_hot(forced, positives.shape[1] + 1)[:, :-1].bool()
    is_unknown = (positives + negatives == 0)[sites]
    return Targets(torch.where(is_unknown, -1, drawn.to(torch.int8)).to(torch.int8), sites)


def _draw(chances: Tensor, generator: torch.Generator) -> Tensor:
    """One column of each row ``(M, n) -> (M,) int64``, in proportion to the row."""
    return torch.multinomial(chances, 1, generator=generator)[:, 0]
