"""Streaming weighted means of model updates.

Replies are folded in one at a time, so memory is one model however many sites there are. The order of the sum is
the order of `StreamingMean.add`; the round protocol calls it in the order of site names, never of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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

        Raises ValueError for a weight that is not positive and finite, for a site that was added before, and for a
        tensor whose shape or dtype differs from an earlier site's; nothing is folded in then.
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
        self._sites.add(site)
        for name, value in wire.tensors(arrays, copy=False).items():
            self._fold(name, value, arrays[name].dtype, float(weight))

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
