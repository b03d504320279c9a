"""Sparse updates with error feedback: a site sends few coordinates of a change and keeps the rest for later rounds.

Source: the project's incongruent specification, sections 6.2 and 6.3; error feedback as in Stich et al. 2018
("Sparsified SGD with memory", NeurIPS). The float tensors of a module, flattened in sorted-name order, are one vector;
``accumulated = change + residual``, k coordinates of it are sent, and ``residual = accumulated - sent``. So nothing is
lost: what a site sent plus its residual is the sum of its changes.

On the wire a module is ``val`` (k,) and, where the indices are the site's own, ``idx`` (k,) int32 ascending. Integer
tensors and BatchNorm's statistics travel beside them, whole and under their own names. `TopK.decode` gives dense
tensors in which an unsent coordinate is 0, so aggregation and gates need not know of any of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from federation import wire
from federation.wire import TensorSpec, WireError

INDICES = "idx"
VALUES = "val"
WHOLE = ("running_mean", "running_var")
"""BatchNorm's statistics travel whole: a variance that is moved by stale parts of its changes can fall below zero."""

Tensors = Mapping[str, np.ndarray | torch.Tensor]
Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class TopK:
    """How one module's change is made sparse. Site and server build the same one from the run config.

    ``ratio``: share of the coordinates that is sent, in (0, 1]. ``max_age``: rounds after which a residual is dropped.
    ``index``: ``magnitude`` sends the largest coordinates of each site; ``shared_seed`` the same random ones for all
    sites (`shared_indices`), which a secure sum needs and which costs no bytes for indices.

    >>> topk = TopK(0.5)
    >>> sent, residual = topk.encode({"w": np.float32([3.0, -1.0, 0.5, -4.0])})
    >>> sent["idx"], sent["val"], residual["w"].tolist()
    (array([0, 3], dtype=int32), array([ 3., -4.], dtype=float32), [0.0, -1.0, 0.5, 0.0])
    """

    ratio: float
    max_age: int = 10
    value_dtype: Literal["float32", "float16"] = "float32"
    index: Literal["magnitude", "shared_seed"] = "magnitude"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, expected a number above 0 and at most 1")
        if self.max_age < 1:
            raise ValueError(f"max_age is {self.max_age}, expected at least 1 round")
        if self.value_dtype not in ("float32", "float16"):
            raise ValueError(f"value_dtype is {self.value_dtype!r}, expected 'float32' or 'float16'")
        if self.index not in ("magnitude", "shared_seed"):
            raise ValueError(f"index is {self.index!r}, expected 'magnitude' or 'shared_seed'")

    def count(self, size: int) -> int:
        """Coordinates sent of ``size``: max(1, ceil(ratio * size - 1e-9)), where 1e-9 forgives binary fractions."""
        return max(1, math.ceil(self.ratio * size - 1e-9))

    def specs(self, dense: Specs) -> dict[str, TensorSpec]:
        """What travels for a module with these dense tensors: the declaration for both gates.

        Raises ValueError for a module without float tensors, one too large for int32, or one with an ``idx`` or
        ``val`` of its own.
        """
        if clash := {INDICES, VALUES} & set(dense):
            raise ValueError(f"the module has a tensor {min(clash)!r}, a name that a sparse update needs; rename it")
        count = self.count(_size(dense))
        sent = {name: dense[name] for name in sorted(set(dense) - set(_floats(dense)))}
        sent[VALUES] = TensorSpec((count,), self.value_dtype)
        if self.index == "magnitude":
            sent[INDICES] = TensorSpec((count,), "int32")
        return sent

    def shared_indices(self, dense: Specs, generator: np.random.Generator) -> NDArray[np.int64]:
        """The coordinates that every site sends this round, (k,) int64 ascending, uniform without replacement.

        ``generator`` must be fresh and the same at all sites and the server: purpose and round, no site name.
        """
        size = _size(dense)
        return np.sort(generator.choice(size, self.count(size), replace=False, shuffle=False))

    def encode(
        self,
        change: Tensors,
        residual: Tensors | None = None,
        *,
        age: int = 1,
        indices: NDArray[np.int64] | None = None,
    ) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
        """The arrays to send, and the new residual by tensor name, to be kept until the next round.

        ``change``: a module's local minus global tensors. ``residual``: what the last `encode` gave, None at first or
        after a loss; ``age``: rounds since then. ``indices``: `shared_indices`, with ``index = "shared_seed"`` only.
        Ties of magnitude go to the lower index. The sum is taken in float32, in float64 where a tensor is float64.
        Raises ValueError where the change is not finite or has no float tensor, or ``indices`` does not fit.

        Choice: a residual is dropped whole where its age exceeds ``max_age`` or its names and shapes are not those of
        the change; a site that trains every round never drops any.
        Choice: float16 values are cut to its largest number; the residual holds what was cut.
        """
        dense = wire.spec_of(change)
        count = self.specs(dense)[VALUES].shape[0]
        accumulated = _flat(change, dense)
        if residual is not None and age <= self.max_age and _shapes(wire.spec_of(residual)) == _shapes(dense):
            accumulated += _flat(residual, dense)
        if not np.isfinite(np.abs(accumulated).max()):
            raise ValueError("the change holds NaN or an infinity, expected finite numbers: did training diverge?")
        chosen = self._chosen(indices, count, accumulated.size)
        if chosen is None:
            chosen = _largest(accumulated, count)
        limit = np.finfo(self.value_dtype).max
        values = accumulated[chosen].clip(-limit, limit).astype(self.value_dtype)
        accumulated[chosen] -= values
        arrays = {name: _array(change[name]) for name in sorted(set(dense) - set(_floats(dense)))}
        arrays[VALUES] = values
        if self.index == "magnitude":
            arrays[INDICES] = chosen.astype(np.int32)
        return arrays, wire.tensors(_split(accumulated, dense), copy=False)

    def decode(
        self, arrays: Mapping[str, np.ndarray], dense: Specs, *, indices: NDArray[np.int64] | None = None
    ) -> dict[str, np.ndarray]:
        """Dense tensors by name in the declared shapes and dtypes, 0 where nothing was sent; integers as sent.

        ``indices``: as given to `encode`. Raises WireError where names, shapes or dtypes are not those of `specs`, or
        an index is out of range, repeated or out of order: refuse the reply then.
        """
        found, wanted = wire.spec_of(arrays), self.specs(dense)
        if found != wanted:
            name = min(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            one, other = found.get(name, "absent"), wanted.get(name, "absent")
            raise WireError(f"sparse tensor {wire.cut(repr(name))} is {one}, expected {other}")
        size = _size(dense)
        chosen = self._chosen(indices, wanted[VALUES].shape[0], size)
        if chosen is None:
            chosen = arrays[INDICES]
            if (chosen[1:] <= chosen[:-1]).any():
                raise WireError("the indices are not in ascending order without repeats")
            if chosen[0] < 0 or chosen[-1] >= size:
                raise WireError(f"the indices reach from {chosen[0]} to {chosen[-1]}, expected 0 to {size - 1}")
        flat = np.zeros(size, _working_dtype(dense))
        flat[chosen] = arrays[VALUES]
        floats = {name: value.astype(dense[name].dtype, copy=False) for name, value in _split(flat, dense).items()}
        return {**{name: arrays[name] for name in sorted(set(dense) - set(floats))}, **floats}

    def _chosen(self, indices: NDArray[np.int64] | None, count: int, size: int) -> NDArray[np.int64] | None:
        """The shared indices, checked; None where each site finds its own."""
        if (indices is None) != (self.index == "magnitude"):
            raise ValueError(
                f"index = {self.index!r} and indices {'absent' if indices is None else 'given'} contradict each other; "
                "give shared_indices with 'shared_seed' and none with 'magnitude'"
            )
        if indices is not None and (indices.shape != (count,) or indices[0] < 0 or indices[-1] >= size):
            raise ValueError(
                f"indices {indices.shape} do not fit {count} of {size} coordinates; draw them from the same specs"
            )
        return indices


def _largest(values: np.ndarray, count: int) -> NDArray[np.int64]:
    """Ascending indices of the ``count`` largest magnitudes, ties to the lower index. O(n): select, then one pass.

    NumPy's selection is several times as fast as ``torch.topk`` on a CPU; neither promises anything about ties.
    """
    magnitudes = np.abs(values)
    cut = values.size - count
    bound = np.partition(magnitudes, cut)[cut]
    chosen = magnitudes > bound
    tied = np.flatnonzero(magnitudes == bound)
    chosen[tied[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _floats(specs: Specs) -> list[str]:
    """Names of the tensors that are made sparse, sorted."""
    floats = (name for name, spec in specs.items() if spec.dtype in wire.FLOAT_DTYPES)
    return sorted(name for name in floats if name.rpartition(".")[2] not in WHOLE)


def _shapes(specs: Specs) -> dict[str, tuple[int, ...]]:
    return {name: specs[name].shape for name in _floats(specs)}


def _size(specs: Specs) -> int:
    """Coordinates of the flat vector, 1 to 2**31 - 1."""
    size = sum(math.prod(shape) for shape in _shapes(specs).values())
    if not 0 < size < 2**31:
        raise ValueError(f"the module has {size} float coordinates, expected 1 to {2**31 - 1}; send it dense")
    return size


def _working_dtype(specs: Specs) -> type[np.floating]:
    return np.float64 if any(spec.dtype == "float64" for spec in specs.values()) else np.float32


def _flat(tensors: Tensors, specs: Specs) -> np.ndarray:
    """The float tensors as one vector (n,), in sorted-name order."""
    dtype = _working_dtype(specs)
    return np.concatenate([_array(tensors[name]).astype(dtype, copy=False).reshape(-1) for name in _floats(specs)])


def _split(flat: np.ndarray, specs: Specs) -> dict[str, np.ndarray]:
    """The way back from `_flat`: views of the vector."""
    shapes = _shapes(specs)
    stops = np.cumsum([math.prod(shape) for shape in shapes.values()])
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(shapes.items(), np.split(flat, stops[:-1]), strict=True)
    }


def _array(value: np.ndarray | torch.Tensor) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
