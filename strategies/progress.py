"""Where a run stands, what a round did, and who writes it down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from strategies.cards import SiteTable
from strategies.evaluation import PooledScores

Modules = dict[str, dict[str, torch.Tensor]]
"""The global state: module name -> tensor name -> tensor."""


@dataclass
class Progress:
    """Where a run stands after a round: everything that a resumed run needs, besides the settings.

    ``accepted``: site -> last round whose reply was taken. ``best_thresholds``: per label, fitted on validation.
    ``method``: the method's own tensors (`FederatedStrategy.state_dict`). ``releases``: rounds that `privacy.dp` has
    to account for, repeated ones included.
    """

    server_round: int = 0
    modules: Modules = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    best_round: int = 0
    best_value: float | None = None
    best_thresholds: list[float] | None = None
    method: dict[str, torch.Tensor] = field(default_factory=dict)
    releases: int = 0


@dataclass
class RoundRecord:
    """What one exchange of training did: who was in, who was not and why.

    ``frozen``: modules that a secure sum had too few sites for, with the reason. ``clipped``: values that it cut to the
    declared range, by module, over all sites. ``privacy``: what can be said of it, with `privacy.dp`.
    """

    round: int
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    accepted: list[str] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    train_loss: dict[str, float | None] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    extra: dict[str, dict[str, float]] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)
    privacy: dict[str, float | int | str] = field(default_factory=dict)


class Observer(Protocol):
    """Keeps what a run leaves behind (`server_app.run_folder`)."""

    def sites_known(self, table: SiteTable, modules: Modules, headline_excluded: Mapping[str, str]) -> None: ...
    def round_done(self, record: RoundRecord) -> None: ...
    def evaluated(
        self, server_round: int, split: str, pools: Mapping[str, PooledScores], thresholds: np.ndarray | None
    ) -> None: ...
    def keep(self, name: str, content: Mapping[str, Any]) -> None: ...
    def left_out(self, split: str, entries: Iterable[Mapping[str, str]]) -> None: ...
    def keep_best(self, server_round: int, modules: Modules) -> None: ...
    def load_best(self, server_round: int) -> Modules: ...
    def checkpoint(self, progress: Progress) -> None: ...
