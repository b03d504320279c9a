"""Everything that a method may change of the round protocol: one class of hooks with defaults.

A method is a subclass of `strategies.base.FederatedStrategy` that overrides some of these; the defaults are FedAvg's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import nn

from federation import wire
from federation.settings import Settings
from models.networks import build_network
from strategies.aggregation import Arrays, StreamingMean, apply_mean
from strategies.cards import SiteCard, SiteTable
from strategies.evaluation import PooledScores
from strategies.gate import Reply
from strategies.progress import Modules, Progress
from strategies.secure_round import SecureMean
from strategies.selection import drawn_sites

MODEL = "model"
"""Name of the one module of a method that has one."""


class MethodHooks:
    """What a method says of itself (attributes) and does its own way (methods).

    ``settings`` is the whole run config, ``options`` the method's own section, ``table`` the frozen site cards and
    ``progress`` the state of the run; ``weight_ceiling`` is where `weigh` cuts a site's examples.
    """

    settings: Settings
    options: Any
    table: SiteTable
    progress: Progress
    weight_ceiling: float

    selects_model = True
    """Whether the best validation round's model is the result; False where the models are not the server's."""
    train_extra: Mapping[str, str] = {}
    """Numbers of the method's own in every training reply, key -> kind; the site half's ``TRAIN_EXTRA``."""
    evaluation_extra: Mapping[str, str] = {}
    """Numbers of the method's own in every evaluation, key -> kind; the site half's ``EVALUATION_EXTRA``."""
    pools_training_data = False
    """Whether a simulation puts all training samples at one site (the centralised upper bound)."""
    secure_summable = True
    """Whether the mean of the sites' updates is all that the server needs, so that `privacy.secure_sum` can be used.

    A class with a `weigh`, `weighting` or `received` of its own has to say so itself: its site half then has
    ``weights(update, job)`` with the same weights as whole numbers, and what it sends is what is averaged.
    """
    sends_changes = True
    """Whether what a site sends is the change that is averaged, so that `privacy.dp` can clip and noise it.

    A class with a `received` of its own has to say so itself.
    """
    reads_reports = False
    """Whether sites read reports, so that samples without an image count too."""
    profile_extra: Mapping[str, str] = {}
    """Numbers of the method's own on every site card, key -> kind; the site half's ``PROFILE_EXTRA``."""
    views: tuple[str, ...] = ()
    """Further ways in which every split is scored, beside the plain one; the site half's ``VIEWS``."""
    answer_numbers: Mapping[str, str] = {}
    """What a site answers to the method's own question (`ask`), key -> kind; the site half's ``ANSWER_NUMBERS``."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if {"weigh", "weighting", "received"} & set(vars(cls)) and "secure_summable" not in vars(cls):
            cls.secure_summable = False
        if "received" in vars(cls) and "sends_changes" not in vars(cls):
            cls.sends_changes = False

    def network(self, labels: tuple[str, ...], task: str) -> nn.Module:
        """The method's network, weights from torch's current generator. Default: the configured one.

        Its ``frozen_sha256``, where it has one, covers what every site holds fixed and nobody sends.
        """
        return build_network(self.settings.model.name, num_labels=len(labels), **self.settings.network_shape())

    def build(self, network: nn.Module) -> Modules:
        """The initial global state by module name. Default: the network as ``model``."""
        return {MODEL: network.state_dict()}

    def shared_modules(self) -> tuple[str, ...]:
        """Modules that every site builds: their tensors are in the schema that round 0 compares. Default: all."""
        return tuple(sorted(self.progress.modules))

    def trained_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        """Modules whose change this site sends back in a round. Default: all."""
        return tuple(sorted(self.progress.modules))

    def update_specs(self, card: SiteCard, server_round: int) -> dict[str, dict[str, wire.TensorSpec]]:
        """Shapes and dtypes of what the site sends back, by module. Default: the trained modules' own.

        A method whose sites send something else (sparse values, sums) declares it here and in its site half's
        ``update_specs``, and reads it in `received`.
        """
        return {name: wire.spec_of(self.progress.modules[name]) for name in self.trained_modules(card, server_round)}

    def received(self, reply: Reply) -> Mapping[str, Arrays]:
        """The changes to average out of an accepted reply. Default: what was sent. A WireError refuses the reply."""
        return reply.modules

    def sent_modules(self, card: SiteCard, server_round: int) -> tuple[str, ...]:
        """Modules that travel down to this site for training. Default: all."""
        return tuple(sorted(self.progress.modules))

    def round_config(self, card: SiteCard, server_round: int) -> dict[str, int | float | str]:
        """Further numbers and strings sent with a training message."""
        return {}

    def select_sites(self, server_round: int) -> list[SiteCard]:
        """The sites that train in a round; see `selection.drawn_sites`."""
        return drawn_sites(list(self.table.trainable), self.settings, server_round)

    @property
    def weighting(self) -> str:
        """What a site weighs by, for the log; the default `weigh` reads it: ``equal`` or ``num_examples``."""
        return self.settings.federation.weighting

    def weigh(self, reply: Reply, module: str) -> float:
        """Weight of a reply in a module's mean: its examples, cut at the ceiling of ``max_site_share``, or 1.

        A class that weighs by something else says by what in `weighting`.
        """
        if self.weighting == "equal":
            return 1.0
        return min(float(reply.num_examples), self.weight_ceiling)

    def before_round(self, grid: Grid, server_round: int) -> None:
        """What a method does before a round's training, such as a question to the sites (`ask`)."""

    def figures(self, pools: Mapping[str, PooledScores]) -> dict[str, float | None]:
        """Further headline figures of an evaluation; ``pools``: scores by view, "" is the plain one."""
        return {}

    def combine(self, means: Mapping[str, StreamingMean | SecureMean], server_round: int) -> Modules:
        """The next global state from the mean change of every module that somebody sent. Default: add them.

        A secure sum gives no mean of integer buffers, and none of a module that too few sites trained.
        """
        return {
            module: apply_mean(state, means[module].result() if module in means else {})
            for module, state in self.progress.modules.items()
        }

    def quorum(self) -> int:
        """Usable training replies that a round needs."""
        return self.settings.federation.min_sites

    def export(self) -> dict[str, torch.Tensor]:
        """What ``model.safetensors`` holds. Default: the module ``model``, or all modules as ``module.name``."""
        modules = self.progress.modules
        if MODEL in modules:
            return dict(modules[MODEL])
        return {f"{module}.{name}": value for module, state in modules.items() for name, value in state.items()}

    def inference_program(self) -> bytes | None:
        """The selected model as one file that runs without this code, or None for a method that has none."""
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The method's own state for a checkpoint, as flat tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state_dict` gave."""
