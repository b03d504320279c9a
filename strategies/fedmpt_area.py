"""The settings of `fedmpt`, and what follows from them at server and sites alike.

The project's fedmpt specification, section 5; where the source leaves something open, its section 4 says what the
values stand for. Rounds, epochs, batch size and the optimiser are those of the shared areas; the authors train with
SGD, lr 0.001, momentum 0.9, weight decay 1e-5, batches of 32 and one local epoch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from federation.settings import MethodArea, Settings
from federation.wire import TensorSpec
from models.conditions import conditions_in
from models.fedmpt import CONDITIONS
from models.fedmpt_networks import OFFICIAL_V1, PAPER

DIGITS = "digits"
"""Name of the small CLIP that is made from the embedded digits, in simulation only."""
DIGITS_FOLDER = "clip-digits"
DIGITS_MAKER = "server_app.fedmpt_pretrain"
"""Module that makes it, see `federation.registry`."""


class ClipArea(MethodArea):
    """Which frozen CLIP every site holds; for every method on patch features."""

    clip_dir: str = Field(
        DIGITS,
        min_length=1,
        description="CLIP folder in open_clip's layout, the same at every site; digits: a small one for the demo",
    )
    clip_sha256: str = Field("", description="expected SHA-256 of that folder; empty: sites compare theirs")
    feature_cache_gb: float = Field(20.0, ge=0, description="largest size of a site's patch features on disk; 0: none")
    alone: bool = Field(False, description="baseline: every site trains its own and sends none of it")

    def clip_folder(self, settings: Settings) -> Path:
        """Where this machine has the CLIP; the small one of the demo lies beside the cached images."""
        if self.clip_dir != DIGITS:
            return Path(self.clip_dir).expanduser()
        cache = settings.data.cache_dir or Path(settings.reporting.runs_dir) / ".cache"
        return Path(cache).expanduser() / DIGITS_FOLDER


class FedMPTArea(ClipArea):
    """Defaults are the `paper` variant of the specification; every other reading and ablation is a switch."""

    variant: Literal["paper", "official_v1"] = Field(
        PAPER, description="official_v1: the scores of the authors' first code, see models.fedmpt_v1"
    )
    conditions: str = Field(
        "", description="phrases with commas, a shipped list (natural-images, ...) or a .json file; empty: the authors'"
    )
    num_conditions: int = Field(5, ge=1, le=64, description="how many of them are used at most, from the first on (N)")
    condition_prompts: bool = Field(True, description="false: ablation, one prompt a class and no condition in it")
    beta_cond: int = Field(4, ge=0, le=32, description="trained tokens of a condition")
    beta_cls: int = Field(4, ge=0, le=32, description="trained tokens of the class context")
    cls_ctx_init: Literal["photo", "random"] = Field("photo", description="photo: 'a photo of a', with 4 tokens")
    adapter_rank: int = Field(32, ge=0, le=1024, description="width of the adapters; 0: ablation without them")
    adapter_residual: bool = True
    adapter_scale: float = Field(1.0, gt=0, le=100)
    kappa: float = Field(20.0, gt=0, le=1000, description="factor on cosines")
    tau: float = Field(4.0, gt=0, le=1000, description="temperature of the patch marginal")
    marginal_on: Literal["scaled", "raw"] = Field("scaled", description="patch marginal on kappa cos or on cos")
    aggregation: Literal["ot", "patch_softmax"] = Field("ot", description="patch_softmax: ablation without transport")
    ot_reg: float = Field(0.2, gt=0, le=10, description="entropic weight of the transport")
    ot_iters: int = Field(20, ge=1, le=1000)
    ot_grad: Literal["detach", "through"] = "detach"
    psi_similarity: Literal["softmax", "cosine"] = "softmax"
    psi_rescale: bool = Field(True, description="false: the literal psi, at most 1 / C, which learns no negatives")
    gate: Literal["router", "std", "uniform"] = Field("router", description="uniform: ablation without a gate")
    gate_temp: float = Field(1.0, gt=0, le=100)
    asl_pos: float = Field(1.0, ge=0, le=10)
    asl_neg: float = Field(2.0, ge=0, le=10)
    asl_clip: float = Field(0.05, ge=0, lt=1)
    loss_weight: float = Field(0.02, gt=0, le=100, description="of the loss, a sum over batch and labels")
    participation: float = Field(1.0, gt=0, le=1, description="share of the sites that train in a round")
    aggregate: Literal["uniform", "num_examples"] = Field("uniform", description="weight of a site in the mean")
    upload_dtype: Literal["float32", "float16"] = Field("float32", description="float16: half the bytes of an update")

    def condition_names(self) -> tuple[str, ...]:
        """The conditions in use, one to N. Raises ValueError for a list or file that cannot be used."""
        names = conditions_in(self.conditions) if self.conditions.strip() else CONDITIONS
        return names[: self.num_conditions]

    def network_options(self) -> dict[str, Any]:
        """Arguments of `models.fedmpt_networks.fedmpt_network` that are settings of the run."""
        names = self.condition_names()
        same = ("variant", "beta_cond", "beta_cls", "cls_ctx_init", "adapter_residual", "adapter_scale", "kappa", "tau")
        same += ("marginal_on", "aggregation", "ot_reg", "ot_iters", "psi_similarity", "psi_rescale", "gate")
        same += ("gate_temp",)
        return {
            **self.model_dump(include=set(same)),
            "conditions": names if self.condition_prompts else (),
            "num_adapters": len(names),
            "rank": self.adapter_rank,
            "detach_plan": self.ot_grad == "detach",
        }

    def gate_numbers(self) -> dict[str, str]:
        """What an evaluation tells beside the scores: the mean gate weight of every condition, key -> kind."""
        if self.variant == OFFICIAL_V1:
            return {}
        return {f"gate of {name}": "real" for name in self.condition_names()}

    def sites_of_a_round(self, count: int) -> int:
        """How many of ``count`` sites train in a round: max(int(participation count), 1), as the authors' code."""
        return max(int(self.participation * count + 1e-9), 1)

    def sent_specs(self, specs: dict[str, dict[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
        """What a site sends for these tensors."""
        return {
            module: {name: TensorSpec(spec.shape, self.upload_dtype) for name, spec in tensors.items()}
            for module, tensors in specs.items()
        }


def cosine_lr(lr: float, server_round: int, rounds: int) -> float:
    """The rate of a round (1 is the first): 0.5 lr (1 + cos(pi r / R)) with r = round - 1 (spec section 3).

    >>> round(cosine_lr(0.001, 11, 50), 9)
    0.000904508
    """
    return 0.5 * lr * (1 + math.cos(math.pi * (server_round - 1) / rounds))
