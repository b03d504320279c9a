"""The settings of `incongruent`, and the rules that follow from them: server and sites both read them from here.

The project's incongruent specification; section numbers stand in the descriptions. What travels to and from a site in
a round is a function of these settings, the site's profile and the round, so that nothing of it has to be negotiated
twice.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from federation.compression import TopK
from federation.settings import MethodArea
from federation.wire import TensorSpec
from models.incongruent import MODULES, NETWORK_OPTIONS, profile_modules
from models.incongruent_exchange import IMPUTATION, PROTOTYPES, PUBLIC, TEXT, VISION


class IncongruentArea(MethodArea):
    """Defaults are those of the specification; `paper` routes (MIN, MAD, LOOT, attention) are off."""

    fusion: Literal["gated", "attention", "mean", "zero_concat"] = Field("gated", description="3.3, 3.4")
    gate: Literal["vector", "scalar"] = "vector"
    attn_mask: Literal["full", "s2s", "bar", "non_cross", "mixed"] = "full"
    head: Literal["label_attn", "linear"] = "label_attn"
    lambda_co: float = Field(0.5, ge=0, le=2, description="weight of the co-occurrence prior in the head (3.5)")
    dim: int = Field(256, ge=8, le=4096, description="shared width d")
    vision: str = Field("", description="image encoder; empty: model.name")
    text: Literal["tiny", "small", "base"] = "tiny"
    text_dir: str = Field("", description="local folder of a text encoder and its tokeniser; empty: built small")
    vocab_size: int = Field(8192, ge=16, le=200_000, description="of the hashing tokeniser")
    source_input: bool = Field(False, description="the fusion is told the label source (4.1)")
    gamma_pos: float = Field(1.0, ge=0, le=10)
    gamma_neg: float = Field(4.0, ge=0, le=10)
    shift: float = Field(0.05, ge=0, lt=0.5)
    reweight: Literal["effective", "pos_weight", "none"] = "effective"
    reweight_beta: float = Field(0.999, gt=0, lt=1)
    trust: bool = Field(True, description="weigh and smooth labels by their source (4.1)")
    trust_zeta: float = Field(1.0, ge=0, le=4, description="exponent of a site's mean trust in the mean (5.4)")
    align_lambda: float = Field(0.05, ge=0, le=10, description="image-report contrast at paired sites (4.2)")
    align_temperature: float = Field(0.07, gt=0, le=10)
    align_eta: float = Field(0.5, ge=0, le=1)
    align_rho: float = Field(1.0, ge=0, le=4)
    cons_lambda: float = Field(0.1, ge=0, le=10, description="consistency with the global encoder (4.3)")
    cons_mode: Literal["sample", "class", "kl"] = "sample"
    proto_lambda: float = Field(0.05, ge=0, le=10, description="text prototypes from other sites (4.4)")
    proto_temperature: float = Field(0.1, gt=0, le=10)
    proto_min_patients: int = Field(10, ge=2, description="patients a site needs to release a label's prototype")
    proto_min_sites: int = Field(2, ge=1)
    proto_momentum: float = Field(0.9, ge=0, lt=1)
    proto_sigma: float = Field(0.0, ge=0, le=100, description="Gaussian noise on a released prototype sum")
    proto_max_age: int = Field(20, ge=1)
    prox_mode: Literal["both", "params", "output", "off"] = Field("both", description="on the fusion only (4.5)")
    prox_mu: float = Field(0.01, ge=0, le=100)
    prox_nu: float = Field(0.1, ge=0, le=100)
    mad_lambda: float = Field(
        0.0,
        ge=0,
        le=10,
        description="distillation by modality; the specification takes 0.5 for the papers' routes (4.6)",
    )
    mad_temperature: float = Field(2.0, gt=0, le=20)
    impute: bool = Field(False, description="MIN: guess the absent modality in training (3.6)")
    impute_refresh: int = Field(5, ge=1, description="rounds between two fits of the imputation nets")
    infer_impute: bool = Field(False, description="MIN: also when the model is used")
    loot: bool = Field(False, description="leave-one-out teachers on public samples, at the sites (4.7)")
    public_root: str = Field("", description="data root of the public samples of leave-one-out teachers")
    public_samples: int = Field(64, ge=2, le=4096)
    loot_loss: Literal["cos", "mse"] = "cos"
    fedprox_mu: float = Field(0.0, ge=0, le=100, description="baseline: proximal term on all parameters")
    moon_weight: float = Field(0.0, ge=0, le=100, description="baseline: model contrast on the fused features")
    start: float = Field(0.6, ge=0, le=1, description="smallest share of paired sites in the first round (5.2)")
    end: float = Field(0.2, ge=0, le=1)
    decay: Literal["cosine", "linear", "exp"] = "cosine"
    decay_rounds: int = Field(0, ge=0, description="0: half of the rounds")
    fill: Literal["unimodal_first", "all"] = "unimodal_first"
    no_pair: Literal["proceed", "abort"] = Field("proceed", description="in a round without a paired site")
    epochs_paired: int = Field(3, ge=1, le=100)
    epochs_image: int = Field(1, ge=1, le=100)
    epochs_text: int = Field(1, ge=1, le=100)
    clip: float = Field(2.0, ge=0, description="largest norm of a gradient; 0: no clipping")
    agg_mode: Literal["partial", "fedavg_full", "zero_fill"] = Field("partial", description="5.4")
    agg_count: Literal["module_samples", "client_samples"] = "module_samples"
    profile_balance: Literal["none", "equal"] = "none"
    modality: Literal["any", "image", "text"] = Field("any", description="baseline: one modality everywhere")
    alone: bool = Field(False, description="baseline: every site keeps its own model")
    pooled: bool = Field(False, description="baseline: all training samples at one site (simulation only)")
    coverage: Literal["error", "warn"] = Field("error", description="where a tensor was never trained (5.5)")
    topk_ratio: float = Field(0.05, gt=0, le=1, description="share of the vision change that is sent (6.2); 1: all")
    topk_dtype: Literal["float32", "float16"] = "float32"
    topk_index: Literal["magnitude", "shared_seed"] = "magnitude"
    topk_max_age: int = Field(10, ge=1)
    text_every: int = Field(2, ge=1, description="rounds between two uploads of the text encoder (6.3)")
    text_skip: Literal["accumulate", "freeze"] = "accumulate"
    text_fraction: float = Field(1.0, gt=0, le=1, description="share of the text change that is sent")
    text_clip: float = Field(0.0, ge=0, le=1e6, description="largest L2 norm of the text change that is sent; 0: any")
    text_sigma: float = Field(0.0, ge=0, le=1000, description="Gaussian noise on it, as a multiple of text_clip")
    critical_labels: str = Field("", description="comma-separated; thresholds reach critical_recall on validation")
    critical_recall: float = Field(0.95, gt=0, le=1)

    @property
    def network_options(self) -> dict[str, object]:
        """Arguments of `build_incongruent` that are settings of the run."""
        return self.model_dump(include=set(NETWORK_OPTIONS))

    @property
    def is_full(self) -> bool:
        """Whether every site holds every module, as plain FedAvg has it."""
        return self.agg_mode != "partial"

    def profile_of(self, modalities: tuple[str, ...] | list[str]) -> str:
        """``paired``, ``image`` or ``text`` for a site card's modalities, as far as this run uses them."""
        if self.modality != "any":
            return self.modality
        return "paired" if len(modalities) > 1 else "text" if modalities[0] == "report" else "image"

    def site_modules(self, profile: str) -> tuple[str, ...]:
        """Modules that a site of a profile is sent and builds."""
        profile = "paired" if self.is_full and self.modality == "any" else profile
        return profile_modules(profile, fusion=self.fusion, impute=self.impute)

    def fits_imputation(self, server_round: int) -> bool:
        """Whether paired sites fit the imputation nets in this round."""
        return self.impute and (server_round - 1) % self.impute_refresh == 0

    def uploads_text(self, server_round: int, last_round: int) -> bool:
        """Whether the text encoder travels up: the same rounds at all sites, and the last one."""
        return server_round % self.text_every == 0 or server_round == last_round

    def trained_modules(self, profile: str, server_round: int, last_round: int) -> tuple[str, ...]:
        """Modules whose change a site sends back in a round (spec 2, 5.3)."""
        if self.alone:
            return ()
        plain = "paired" if self.is_full and self.modality == "any" else profile
        modules = set(profile_modules(plain, fusion=self.fusion))
        if profile == "paired" and self.fits_imputation(server_round):
            modules |= set(IMPUTATION)
        if not self.uploads_text(server_round, last_round):
            modules -= {TEXT}
        return tuple(module for module in MODULES if module in modules)

    def sends_prototypes(self, profile: str) -> bool:
        """Whether a site of a profile sends its sums of text directions."""
        return self.proto_lambda > 0 and profile in ("paired", "text") and not self.alone

    def compressor(self, module: str) -> TopK | None:
        """How a module's change is made sparse; None where it travels whole."""
        if module == VISION and self.topk_ratio < 1:
            return TopK(self.topk_ratio, self.topk_max_age, self.topk_dtype, self.topk_index)
        if module == TEXT and self.text_fraction < 1:
            return TopK(self.text_fraction, self.topk_max_age, "float32", "shared_seed")
        return None

    def sent_specs(
        self,
        specs: dict[str, dict[str, TensorSpec]],
        profile: str,
        server_round: int,
        last_round: int,
        num_labels: int,
    ) -> dict[str, dict[str, TensorSpec]]:
        """What a site sends in a round, by record: changes (sparse where they are), prototype sums, embeddings.

        ``specs``: the dense tensors of at least the trained modules.
        """
        sent = {}
        for module in self.trained_modules(profile, server_round, last_round):
            topk = self.compressor(module)
            sent[module] = specs[module] if topk is None else topk.specs(specs[module])
        if self.sends_prototypes(profile):
            sent[PROTOTYPES] = {
                "sums": TensorSpec((num_labels, self.dim), "float32"),
                "released": TensorSpec((num_labels,), "bool"),
            }
        if self.loot:
            sent[PUBLIC] = {"embeddings": TensorSpec((self.public_samples, self.dim), "float32")}
        return sent

    def rounds_of_decay(self, rounds: int) -> int:
        """Rounds over which the share of paired sites falls."""
        return self.decay_rounds or max(1, math.ceil(rounds / 2))

    def epochs(self, profile: str) -> int:
        """Local epochs of a profile (spec 4.9)."""
        return {"paired": self.epochs_paired, "image": self.epochs_image, "text": self.epochs_text}[profile]
