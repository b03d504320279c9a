"""Numbers of one inversion, named as in a run config; contradictions are refused together."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITERATES = ("last", "best")
HIGH_SETS = ("loop", "recompute")
LOW_SETS = ("stopped", "alive_tail")


@dataclass(frozen=True)
class InversionSettings:
    """Defaults: the published code of Sparse Model Inversion for ImageNet images of 224 pixels (spec 3 and 14).

    ``stops`` are iterations, counted from 0, and ``ratios`` the shares of the patches still alive that stop there.
    ``mean`` and ``std`` are the model's normalisation, one value a channel; ``tie_channels`` keeps images grey.
    ``freeze_stopped``: stopped pixels keep their values; without it the priors and Adam's momentum go on moving them
    (D4). ``rebirth``: each stop finishes the most attended patches as a sparse image of their own and goes on with
    the others; sets are of equal size, ``ratios`` are not read. Choice: SMI's early stops are too early for that; space
    them evenly. ``bf16``: forward passes in half precision, pixels and moments in float32.
    Raises ValueError that names every contradiction.
    """

    inv_iters: int = 4000
    inv_lr: float = 0.25
    inv_betas: tuple[float, float] = (0.5, 0.99)
    w_ce: float = 1.0
    w_tv2: float = 1e-4
    w_tv1: float = 0.0
    w_l2: float = 0.0
    w_adv: float = 0.0
    jitter: float = 1 / 8
    flip: bool = True
    stops: tuple[int, ...] = (50, 100, 200, 300)
    ratios: tuple[float, ...] = (0.3, 0.3, 0.3, 0.3)
    freeze_stopped: bool = False
    rebirth: bool = False
    iterate: str = "last"
    high_set: str = "loop"
    low_set: str = "stopped"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    tie_channels: bool = False
    bf16: bool = False

    def __post_init__(self) -> None:
        for name in ("inv_betas", "stops", "ratios", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        wrong = [*self._wrong_numbers(), *self._wrong_schedule(), *self._wrong_sets()]
        if wrong:
            raise ValueError("; ".join(wrong))

    def _wrong_numbers(self) -> list[str]:
        wrong = [] if self.inv_iters >= 1 else [f"inv_iters is at least 1, got {self.inv_iters}"]
        if not 0 < self.inv_lr < math.inf:
            wrong.append(f"inv_lr is positive, got {self.inv_lr}")
        if len(self.inv_betas) != 2 or not all(0 <= beta < 1 for beta in self.inv_betas):
            wrong.append(f"inv_betas are two numbers from 0 to below 1, got {self.inv_betas}")
        weights = {name: getattr(self, name) for name in ("w_ce", "w_tv2", "w_tv1", "w_l2", "w_adv")}
        wrong += [f"{name} is at least 0 and finite, got {w}" for name, w in weights.items() if not 0 <= w < math.inf]
        if not 0 <= self.jitter < 1:
            wrong.append(f"jitter is a share of the image's side, from 0 to below 1, got {self.jitter}")
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            wrong.append(f"mean and std need one value a channel, std positive, got {self.mean} and {self.std}")
        return wrong

    def _wrong_schedule(self) -> list[str]:
        wrong = []
        if any(stop < 1 for stop in self.stops):
            wrong.append(f"stops are at least 1, for the iteration before one ranks the patches; got {self.stops}")
        if any(later - earlier < 2 for earlier, later in zip(self.stops, self.stops[1:], strict=False)):
            wrong.append(f"stops increase by at least 2, got {self.stops}")
        if self.stops and max(self.stops) >= self.inv_iters:
            wrong.append(f"the last of stops={self.stops} must come before inv_iters={self.inv_iters}")
        if not self.rebirth and len(self.ratios) != len(self.stops):
            wrong.append(f"each stop needs a ratio, got {len(self.stops)} stops and {len(self.ratios)} ratios")
        if any(not 0 <= ratio < 1 for ratio in self.ratios):
            wrong.append(f"ratios are from 0 to below 1, got {self.ratios}")
        return wrong

    def _wrong_sets(self) -> list[str]:
        choices = (("iterate", ITERATES), ("high_set", HIGH_SETS), ("low_set", LOW_SETS))
        wrong = [
            f"{name}={getattr(self, name)!r} is unknown; there are {', '.join(known)}"
            for name, known in choices
            if getattr(self, name) not in known
        ]
        if self.rebirth and not self.freeze_stopped:
            wrong.append("rebirth=True finishes patches for good: set freeze_stopped=True")
        chosen = (self.iterate, self.high_set, self.low_set)
        if self.rebirth and chosen != ("last", "loop", "stopped"):
            wrong.append(f"rebirth=True needs iterate='last', high_set='loop', low_set='stopped', got {chosen}")
        if self.rebirth and not self.stops:
            wrong.append("rebirth=True needs at least one stop")
        return wrong
