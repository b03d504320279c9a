"""Between the round protocol and the secure sum: who sums what, and the means that come out of it, checked.

The checks of the update gate on a single update (norm, counters) cannot be made under masks; what can be checked of
the sum is checked here, before any number of it touches the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from federation.secure_sum import ModuleSum, SecureSumError, Specs
from strategies.aggregation import Arrays


@dataclass(frozen=True)
class SecureMean:
    """The mean change of one module out of a secure sum, read as a `StreamingMean` that nobody can add to."""

    sites: frozenset[str]
    weights: Mapping[str, float]
    mean: Arrays

    def result(self) -> dict[str, np.ndarray]:
        """The mean of every float tensor, in the dtype it was sent in."""
        return dict(self.mean)


def cohorts_of(
    specs: Mapping[str, Mapping[str, Specs]],
) -> tuple[dict[str, list[str]], dict[str, Specs]]:
    """Cohorts (module -> sites) and one layout a module, from what every site sends (site -> module -> its tensors).

    Raises SecureSumError where two sites of a cohort send other tensors.
    """
    cohorts: dict[str, list[str]] = {}
    layouts: dict[str, Specs] = {}
    for site in sorted(specs):
        for module, tensors in specs[site].items():
            if layouts.setdefault(module, tensors) != tensors:
                raise SecureSumError(f"{site} sends other tensors of module {module!r} than {cohorts[module][0]}")
            cohorts.setdefault(module, []).append(site)
    return cohorts, layouts


def checked_means(
    sums: Mapping[str, ModuleSum],
    members: Mapping[str, Mapping[str, float]],
    largest_norm: float,
) -> dict[str, SecureMean]:
    """The means of all modules with any weight. ``members``: module -> site -> the weight that it may have at most.

    Raises SecureSumError for more weight than the sites have together, and for a mean that is not finite or longer than
    ``largest_norm``: a mean of updates that the update gate would take is no longer than its limit.
    """
    means = {}
    for module, total in sorted(sums.items()):
        allowed = sum(round(weight) for weight in members[module].values())
        if total.weight > allowed:
            raise SecureSumError(
                f"the sites of module {module!r} weigh {total.weight} together, expected at most {allowed} by their "
                "examples: one of them gave itself more; the state is kept"
            )
        norm = math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in total.mean.values()))
        if not norm <= largest_norm:
            raise SecureSumError(
                f"the norm of the mean of module {module!r} is {norm:.3g}, expected at most {largest_norm:.3g}; the "
                "state is kept"
            )
        if total.mean:
            weights = dict.fromkeys(total.mean, float(total.weight))
            means[module] = SecureMean(frozenset(members[module]), weights, total.mean)
    return means
