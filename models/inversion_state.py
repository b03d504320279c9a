"""What an inversion carries from one iteration to the next, and what it gives in the end: tensors by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor


class Inverted(NamedTuple):
    """Synthetic images and what is known of them.

    ``images (M, ch, H, W) float32`` pixels in [0, 1], whatever the model's normalisation; ``labels (M,) int64`` or
    ``(M, C)``; ``high (M, h)`` and ``low (M, l) int64`` the patches that the model looked at and the others.
    """

    images: Tensor
    labels: Tensor
    high: Tensor
    low: Tensor


@dataclass
class InversionState:
    """Everything that the next iteration needs, as tensors: what a checkpoint holds.

    ``canvas (B, ch, H * W)`` normalised pixels; ``first`` and ``second`` Adam's moments, ``(B, ch, H * W)`` or, once
    stopped patches are frozen, of the pixels of ``alive`` in its order; ``alive (B, K)`` ids, the most attended first;
    ``attention (B, K)`` recorded for the next stop, else ``(B, 0)``; ``detached (B, S, n)`` the sets that rebirth has
    finished; ``jitter (T, G, 3) int64`` offsets down, right and flip of each group; ``trace (T, G)`` the label loss;
    ``best (B, ch, H * W)`` and ``best_loss (G,)`` for ``iterate="best"``, else empty.
    """

    iteration: int
    labels: Tensor
    canvas: Tensor
    first: Tensor
    second: Tensor
    alive: Tensor
    attention: Tensor
    detached: Tensor
    jitter: Tensor
    trace: Tensor
    best: Tensor
    best_loss: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        """The state as named tensors, to be written as safetensors."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**held, "iteration": torch.tensor(self.iteration)}

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor]) -> InversionState:
        """The state that `state_dict` gave; raises ValueError for other names."""
        names = {field.name for field in fields(cls)}
        if set(tensors) != names:
            raise ValueError(f"not the state of an inversion: differing names {sorted(names ^ set(tensors))}")
        return cls(**{**tensors, "iteration": int(tensors["iteration"])})

    @property
    def num_groups(self) -> int:
        """Batches that were started one by one and merged since."""
        return self.jitter.shape[1]


def merge(states: Sequence[InversionState]) -> InversionState:
    """Several batches as one, in order, each with the jitter, norms and means that it would have had alone.

    For the iterations after the last stop, when few patches are alive and a larger batch costs little more. Raises
    ValueError unless all are at the same iteration with the same sizes.
    """
    if len({(state.iteration, state.alive.shape, state.first.shape, state.num_groups) for state in states}) != 1:
        raise ValueError("batches can be merged at the same iteration, with the same sizes and patches alive only")
    joined: dict[str, Tensor | int] = {"iteration": states[0].iteration}
    for name in states[0].state_dict():
        if name != "iteration":
            axis = 1 if name in ("jitter", "trace") else 0
            joined[name] = torch.cat([getattr(state, name) for state in states], dim=axis)
    return InversionState(**joined)


def join(shards: Sequence[Inverted]) -> Inverted:
    """One pool of several `Inverted`, in the order given; their patch counts must be equal."""
    return Inverted(*(torch.cat(parts) for parts in zip(*shards, strict=True)))
