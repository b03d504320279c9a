"""The update gate: looks at one reply before any number in it touches the model.

A reply passes whole or not at all. What is refused is named with its reason, and the round goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from flwr.app import RecordDict

from federation import wire
from federation.metrics import ScoreHistogram
from federation.wire import Payload

MAX_RELATIVE_NORM = 1e4
"""An update may be this many times as long as the model it changes (or as a model of norm 1). Choice: a value that
no training reaches and that keeps a finite but absurd tensor (1e30) out; `federation.norm_bound` is the tight one."""

MAX_COUNTER = 2**31
"""Largest value of an integer buffer in an update. Choice: more steps than any training takes."""


@dataclass(frozen=True)
class Reply:
    """One accepted reply: decoded tensors (read-only views), numbers, and the L2 norm of its float changes.

    ``modules`` as they were sent; ``changes``: what of them is averaged, where a method's sites send something else.
    """

    site: str
    server_round: int
    modules: Mapping[str, Mapping[str, np.ndarray]]
    scores: Mapping[str, Mapping[str, np.ndarray]]
    numbers: Mapping[str, Mapping[str, float | list[int]]]
    norm: float
    changes: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)

    @property
    def num_examples(self) -> int:
        return int(self.numbers[wire.METRICS].get("num_examples", 0))


@dataclass(frozen=True)
class Expected:
    """What a reply has to be: declared payload, round, and the most examples that the site's card allows.

    ``reference_norm``: L2 norm of the modules that are changed; ``split_sizes``: samples by split on the card.
    """

    site: str
    server_round: int
    payload: Payload
    max_examples: int = 0
    reference_norm: float = 0.0
    split_sizes: Mapping[str, int] = field(default_factory=dict)


def inspect(
    content: RecordDict, expected: Expected, changes_of: Callable[[Reply], Mapping] | None = None
) -> tuple[Reply | None, str]:
    """The decoded reply and "", or None and the reason why it is refused. Never raises for anything in the reply.

    ``changes_of`` takes what is averaged out of a reply (`FederatedStrategy.received`); None: the modules as sent.
    """
    try:
        reply = _inspect(content, expected)
        return replace(reply, changes=changes_of(reply) if changes_of else reply.modules), ""
    except (wire.WireError, _RefusedError) as refusal:
        return None, str(refusal)


class _RefusedError(Exception):
    pass


def _inspect(content: RecordDict, expected: Expected) -> Reply:
    payload = expected.payload
    if wrong := payload.violation(content):
        raise _RefusedError(wrong)
    numbers = {name: dict(content[name]) for name in payload.numbers}
    found_round = numbers[wire.METRICS]["server_round"]
    if found_round != expected.server_round:
        raise _RefusedError(f"the reply is for round {found_round}, expected round {expected.server_round}")
    if "num_examples" in payload.numbers[wire.METRICS]:
        _check_count(numbers[wire.METRICS]["num_examples"], expected.max_examples)
    arrays = {name: wire.decode(content[name]) for name in payload.arrays}
    modules = {name.removeprefix(wire.MODULE): value for name, value in arrays.items() if name.startswith(wire.MODULE)}
    scores = {name.removeprefix(wire.SCORES): value for name, value in arrays.items() if name.startswith(wire.SCORES)}
    norm = _checked_norm(modules, MAX_RELATIVE_NORM * max(1.0, expected.reference_norm))
    for split, counts in scores.items():
        _check_scores(split, counts, numbers[f"loss.{split}"], expected.split_sizes.get(wire.split_of(split), 0))
    return Reply(expected.site, expected.server_round, modules, scores, numbers, norm)


def _check_count(count: int, at_most: int) -> None:
    if not 0 < count <= at_most:
        raise _RefusedError(f"num_examples is {count}, expected 1 to {at_most} as on the site card")


def _checked_norm(modules: Mapping[str, Mapping[str, np.ndarray]], at_most: float) -> float:
    """L2 norm over all float tensors; refuses what is not finite, naming the tensor.

    One dot product a tensor, in the tensor's own precision: a NaN or an infinity anywhere makes it NaN or infinite, so
    no element-wise pass is needed, and a value whose square overflows is refused with them.
    """
    total = 0.0
    for module in sorted(modules):
        for name, value in wire.tensors(modules[module], copy=False).items():
            if not value.is_floating_point():
                _check_integers(module, name, value)
                continue
            flat = value.reshape(-1)
            square = (
                float(torch.dot(flat, flat)) if value.dtype != torch.float16 else float(flat.float().square().sum())
            )
            if not math.isfinite(square):
                raise _RefusedError(
                    f"tensor {name!r} of module {module!r} has no finite norm (NaN, infinite or too large)"
                )
            total += square
    norm = math.sqrt(total)
    if norm > at_most:
        raise _RefusedError(f"the update's norm is {norm:.3g}, expected at most {at_most:.3g}")
    return norm


def _check_integers(module: str, name: str, value: torch.Tensor) -> None:
    """Counters replace the model's when they are larger, so none may be near the end of its range."""
    if value.numel() and value.dtype != torch.bool and not 0 <= int(value.min()) <= int(value.max()) <= MAX_COUNTER:
        raise _RefusedError(f"tensor {name!r} of module {module!r} counts beyond 0 to {MAX_COUNTER}")


def _check_scores(split: str, counts: Mapping[str, np.ndarray], loss: Mapping[str, float], size: int) -> None:
    try:
        histogram = ScoreHistogram.from_arrays({name: value for name, value in counts.items() if name != "confusion"})
    except ValueError as error:
        raise _RefusedError(f"the scores of {split!r} are no histogram: {error}") from error
    if loss["loss_sum"] < 0:
        raise _RefusedError(f"the loss of {split!r} is below 0, which none of the losses can be")
    if histogram.suppressed.max() > 1:
        raise _RefusedError(f"the scores of {split!r} suppress a label more than once, which one site cannot")
    confusion = counts.get("confusion", np.zeros(1, np.int64))
    if confusion.min() < 0:
        raise _RefusedError(f"the confusion matrix of {split!r} holds negative counts")
    largest = int(confusion.max())  # with it: a sum of huge int64 cells may wrap around to a small one
    counted = max(int(sum(histogram.support()).max()), int(loss["num_examples"]), largest, int(confusion.sum()))
    if counted > size:
        raise _RefusedError(
            f"the scores of {split!r} count {counted} samples, expected at most {size} as on the site card"
        )
