"""Streaming weighted means of model updates.

Replies are folded in one at a time, so memory is one model however many sites there are. The order of the sum is
the order of `StreamingMean.add`; the round protocol calls it in the order of site names, never of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypedDict

import numpy as np
import torch

from federation import wire

Arrays = Mapping[str, np.ndarray]


class StreamingMean:
    """Weighted mean of tensors by name, each name over the sites that sent it.

    Keeps the running mean ``m += (x - m) * w / W`` with W the weight so far: identical inputs give themselves back bit
    by bit, a large weight cannot overflow, and one model is all that is held. Half precision is accumulated in
    float32. Integer and bool buffers (BatchNorm's step counter) stay out of the float path: the largest is kept.

    >>> mean = StreamingMean()
    >>> mean.add("a", {"w": np.float32([1.0])}, 1)
    >>> mean.add("b", {"w": np.float32([4.0])}, 3)
    >>> mean.result()["w"]
    array([3.25], dtype=float32)
    """

    def __init__(self) -> None:
        self._mean: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._weights: dict[str, float] = {}
        self._sites: set[str] = set()

    @property
    def sites(self) -> frozenset[str]:
        """Sites folded in so far."""
        return frozenset(self._sites)

    @property
    def weights(self) -> dict[str, float]:
        """Sum of the weights behind every tensor: the denominator of its mean."""
        return dict(self._weights)

    def add(self, site: str, arrays: Arrays, weight: float) -> None:
        """Folds in one site's tensors; they are read, never kept or written to.

        Raises ValueError as `check` does; nothing is folded in then.
        """
        self.check(site, arrays, weight)
        self._sites.add(site)
        for name, value in wire.tensors(arrays, copy=False).items():
            self._fold(name, value, arrays[name].dtype, float(weight))

    def check(self, site: str, arrays: Arrays, weight: float) -> None:
        """Raises ValueError where `add` would refuse; changes nothing.

        That is a weight that is not positive and finite, a site that was added before, and a tensor whose shape or
        dtype differs from an earlier site's.
        """
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weight of {site!r} is {weight}, expected a positive finite number")
        if site in self._sites:
            raise ValueError(f"site {site!r} was added before; a site counts once")
        for name, value in arrays.items():
            if name in self._mean and (tuple(self._mean[name].shape), self._dtypes[name]) != (value.shape, value.dtype):
                raise ValueError(
                    f"{name!r} of {site!r} is {value.dtype}{list(value.shape)}, "
                    f"expected {self._dtypes[name]}{list(self._mean[name].shape)} as from the sites before"
                )

    def _fold(self, name: str, value: torch.Tensor, dtype: np.dtype, weight: float) -> None:
        total = self._weights.get(name, 0.0) + weight
        self._weights[name] = total
        if name not in self._mean:
            self._dtypes[name] = dtype
            wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
            self._mean[name] = value.to(wide, copy=True)
        elif value.is_floating_point():
            mean = self._mean[name]
            mean.lerp_(value.to(mean.dtype), weight / total)
        else:
            torch.maximum(self._mean[name], value, out=self._mean[name])

    def result(self) -> dict[str, np.ndarray]:
        """The mean of every tensor, in the dtype it was sent in. Raises ValueError where nothing was added."""
        if not self._sites:
            raise ValueError("no site was added, so there is no mean; keep the state there was")
        return {name: mean.numpy().astype(self._dtypes[name], copy=False) for name, mean in self._mean.items()}


class TensorCoverage(TypedDict):
    """What one tensor's mean rests on: how many updates, from which sites (in the order added), of which weight."""

    updates: int
    sites: list[str]
    weight: float


class ModularMean:
    """Masked means: each tensor of each module over the sites that trained and sent it, by the module's own count.

    A hospital without reports sends no text encoder and must not dilute it, so a module's denominator holds only its
    senders: one `StreamingMean` a module. Source: the project's incongruent specification, sections 5.4 and 5.5.

    ``modules``: module -> names of its tensors, where others are to be refused; None takes what comes. Add sites in
    the order of their names, as with `StreamingMean`: that order is the order of the sum.

    >>> mean = ModularMean()
    >>> mean.add("a", {"vision": {"w": np.float32([1.0])}, "text": {"t": np.float32([8.0])}}, {"vision": 1, "text": 5})
    >>> mean.add("b", {"vision": {"w": np.float32([4.0])}}, {"vision": 3})
    >>> mean.result()
    {'text': {'t': array([8.], dtype=float32)}, 'vision': {'w': array([3.25], dtype=float32)}}
    """

    def __init__(self, modules: Mapping[str, Iterable[str]] | None = None) -> None:
        self._declared = None if modules is None else {module: frozenset(names) for module, names in modules.items()}
        self._means: dict[str, StreamingMean] = {}
        self._senders: dict[str, dict[str, list[str]]] = {}
        self._sites: set[str] = set()

    @property
    def sites(self) -> frozenset[str]:
        """Sites added so far, whether or not any of their modules counted."""
        return frozenset(self._sites)

    @property
    def means(self) -> dict[str, StreamingMean]:
        """The mean of every module that some site sent."""
        return dict(self._means)

    def add(
        self,
        site: str,
        modules: Mapping[str, Arrays],
        counts: Mapping[str, float],
        *,
        trust: float = 1.0,
        zeta: float = 1.0,
    ) -> None:
        """Folds in one site's modules with weights ``counts[module] * trust**zeta``.

        ``counts``: the samples behind each module that is sent, also of modules that are not. A module of weight 0 (no
        samples, or no trust) is ignored. ``trust``: confidence in the site's labels, in [0, 1].

        Raises ValueError for a site that was added before, a module or tensor that is not declared, a missing,
        negative or infinite count, a trust outside [0, 1], a negative ``zeta``, and a tensor whose shape or dtype
        differs from an earlier site's; nothing of the site is folded in then.
        """
        if site in self._sites:
            raise ValueError(f"site {site!r} was added before; a site counts once")
        if not 0 <= trust <= 1:
            raise ValueError(f"trust of {site!r} is {trust}, expected 0 to 1")
        if not (math.isfinite(zeta) and zeta >= 0):
            raise ValueError(f"zeta is {zeta}, expected a finite number from 0")
        weights = {}
        for module in sorted(modules):
            self._check_declared(site, module, modules[module])
            count = counts.get(module)
            if count is None or not (math.isfinite(count) and count >= 0):
                raise ValueError(f"count of {site!r} for module {module!r} is {count}, expected a finite number from 0")
            weight = float(count) * trust**zeta
            if weight > 0 and modules[module]:
                self._means.get(module, StreamingMean()).check(site, modules[module], weight)
                weights[module] = weight
        self._sites.add(site)
        for module, weight in weights.items():
            self._means.setdefault(module, StreamingMean()).add(site, modules[module], weight)
            senders = self._senders.setdefault(module, {})
            for name in modules[module]:
                senders.setdefault(name, []).append(site)

    def _check_declared(self, site: str, module: str, arrays: Arrays) -> None:
        if self._declared is None:
            return
        if module not in self._declared:
            raise ValueError(f"{site!r} sent module {module!r}, expected one of {sorted(self._declared)}")
        if unknown := sorted(set(arrays) - self._declared[module]):
            raise ValueError(f"{site!r} sent {unknown[:3]} in module {module!r}, which has no such tensors")

    def result(self) -> dict[str, dict[str, np.ndarray]]:
        """The mean of every tensor that some site sent, by module; what nobody sent is absent and stays as it was."""
        return {module: self._means[module].result() for module in sorted(self._means)}

    def coverage(self) -> dict[str, dict[str, TensorCoverage]]:
        """Who is behind the mean of each tensor, by module and name, as plain values for JSON."""
        weights = {module: mean.weights for module, mean in self._means.items()}
        return {
            module: {
                name: TensorCoverage(updates=len(sites), sites=list(sites), weight=weights[module][name])
                for name, sites in sorted(self._senders[module].items())
            }
            for module in sorted(self._means)
        }

    def uncovered(self, expected: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """Tensors among ``expected`` (module -> names) that nobody updated; empty where all were."""
        sent = {module: set(senders) for module, senders in self._senders.items()}
        missing = {module: sorted(set(expected[module]) - sent.get(module, set())) for module in sorted(expected)}
        return {module: names for module, names in missing.items() if names}


def capped_weights(counts: Mapping[str, float], max_share: float) -> dict[str, float]:
    """Weights by count in which no site holds more than ``max_share`` of the whole.

    Every count above a ceiling c is cut to c, where c is the largest ceiling for which c <= max_share * sum. A share
    below 1/K cannot be had by K sites; then all are equal. Sites with count 0 keep 0.

    >>> capped_weights({"a": 900, "b": 50, "c": 50}, 0.5)
    {'a': 100.0, 'b': 50.0, 'c': 50.0}
    """
    weights = {site: float(count) for site, count in counts.items()}
    ordered = sorted((value for value in weights.values() if value > 0), reverse=True)
    if max_share >= 1 or not ordered or ordered[0] <= max_share * sum(ordered):
        return weights
    ceiling = ordered[-1]
    for cut in range(1, len(ordered)):
        rest = sum(ordered[cut:])
        if cut * max_share < 1:
            candidate = max_share * rest / (1 - cut * max_share)
            if candidate >= ordered[cut]:
                ceiling = candidate
                break
    return {site: min(value, ceiling) for site, value in weights.items()}


def apply_mean(state: wire.State, mean: Arrays) -> dict[str, torch.Tensor]:
    """The next state: float tensors plus their mean change, integer buffers replaced; names without a mean stay.

    Returns new tensors; ``state`` is not written to. Raises ValueError for a name that the state does not have.
    """
    if unknown := sorted(set(mean) - set(state)):
        raise ValueError(f"the update names {unknown[:3]}, which the state does not have")
    changes = wire.tensors(mean, copy=False)
    out = {}
    for name, value in state.items():
        if name not in changes:
            out[name] = value.clone()
        elif value.is_floating_point():
            out[name] = value + changes[name].to(value.dtype)
        else:
            out[name] = changes[name].clone()
    return out


def scaled_to_norm(arrays: Arrays, norm: float, bound: float) -> Arrays:
    """Float tensors scaled so that their joint L2 norm is at most ``bound``; the same object where it is already."""
    if norm <= bound:
        return arrays
    factor = bound / norm
    return {
        name: (value * np.asarray(factor, value.dtype) if np.issubdtype(value.dtype, np.floating) else value)
        for name, value in arrays.items()
    }


def apply_share(state: wire.State, changes: StreamingMean, num_sites: int) -> dict[str, torch.Tensor]:
    """The state plus the mean change times the share of the ``num_sites`` sites that took part.

    SCAFFOLD moves the server's control variate so (algorithm 1, line 17).
    """
    share = len(changes.sites) / num_sites
    return apply_mean(state, {name: value * share for name, value in changes.result().items()})
