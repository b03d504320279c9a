"""The settings of `fedmitr`, and what follows from them: the server's job and the sites read them from here.

The project's fedmitr specification, section 14. Lists are comma-separated text, as Flower's run config has no lists.
The sites train with the shared ``training.*`` settings.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from federation.settings import MethodArea, names_in
from models.fedmitr import DistilSettings
from models.inversion import InversionSettings

HALF = 0.5
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation by channel of ``model.normalise = "imagenet"``; ``half`` is 0.5 for both."""

Server = Literal[
    "fedmitr", "average", "ensemble", "kd", "whole_ce", "hard_low", "high_only", "dense_inversion", "dense",
    "coboosting", "fedftg",
]  # fmt: skip


class FedMITRArea(MethodArea):
    """Defaults: the published code of Sparse Model Inversion and Co-Boosting, for ImageNet images of 224 pixels."""

    model: str = Field("deit_tiny_patch16_224", description="a plain vision transformer of timm, or vit: as below")
    patch: int = Field(8, ge=2, le=64, description="of model = vit: pixels along a patch")
    width: int = Field(64, ge=8, le=2048, description="of model = vit: tokens' width")
    depth: int = Field(4, ge=1, le=48, description="of model = vit: blocks")
    heads: int = Field(4, ge=1, le=32, description="of model = vit: attention heads")
    init_weights: str = Field("", description="safetensors file with pretrained weights, the same at every site")
    init_sha256: str = Field("", description="the checksum that file must have")
    upload_dtype: Literal["float16", "float32"] = "float16"
    clip: float = Field(10.0, ge=0, description="largest gradient norm of local training; 0: no clipping")
    min_class_count: int = Field(10, ge=1, description="samples of a class a site needs to be asked for it")
    audit: bool = Field(False, description="a site inverts its own model first and refuses if it finds its patients")
    audit_level: float = Field(0.01, gt=0, lt=1, description="chance of a false alarm of that audit")
    dp_noise: float = Field(0.0, ge=0, le=100, description="noise multiplier of DP-SGD at the sites; 0: none")
    dp_clip: float = Field(1.0, gt=0, description="DP-SGD: largest gradient norm of one sample")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="DP-SGD: the delta that epsilon is reported for")
    server: Server = Field("fedmitr", description="what the server makes of the uploads; the others are compared with")
    label_sampler: Literal["balanced", "client_count", "client_present", "uniform"] = "balanced"
    pool_size: int = Field(0, ge=0, description="synthetic images; 0: max(50 a class, 2000)")
    inv_batch: int = Field(100, ge=1)
    inv_iters: int = Field(4000, ge=1)
    inv_lr: float = Field(0.25, gt=0)
    w_tv2: float = Field(1e-4, ge=0, description="smoothness of the images, norm of differences")
    w_tv1: float = Field(0.0, ge=0, description="smoothness of the images, mean of differences")
    w_l2: float = Field(0.0, ge=0)
    jitter: float = Field(0.125, ge=0, lt=1, description="largest random shift, share of the image's side")
    flip: bool = Field(True, description="mirror images in inversion and distillation; off where sides differ")
    stops: str = Field("50,100,200,300", description="iterations at which patches stop; empty: dense inversion")
    ratios: str = Field("0.3,0.3,0.3,0.3", description="share of the alive patches that stops, one a stop")
    freeze_stopped: bool = Field(False, description="stopped patches keep their pixels, which is faster")
    merge_batches: int = Field(1, ge=1, description="batches that go on as one after the last stop, which is faster")
    rebirth: bool = Field(False, description="each stop finishes a sparse image of its own; needs freeze_stopped")
    iterate: Literal["last", "best"] = "last"
    high_set: Literal["loop", "recompute"] = "loop"
    low_set: Literal["stopped", "alive_tail"] = "stopped"
    tie_channels: bool = Field(False, description="grey synthetic images")
    bf16: bool = Field(False, description="inversion's forward passes in half precision")
    relabel_mode: Literal["subset", "token"] = Field("subset", description="token: sites train every token's head too")
    ensemble_weight: Literal["class_count", "label_count", "uniform"] = "class_count"
    global_init: Literal["average", "pretrained", "fresh"] = "average"
    train_scope: Literal["full", "head"] = "full"
    kd_T: float = Field(4.0, gt=0)
    kd_lambda: float = Field(1.0, ge=0)
    kd_epochs: int = Field(200, ge=1)
    kd_batch: int = Field(128, ge=1)
    kd_lr: float = Field(0.01, gt=0)
    kd_momentum: float = Field(0.9, ge=0, lt=1)
    kd_wd: float = Field(1e-4, ge=0)
    kd_clip: float = Field(10.0, gt=0)
    gen_steps: int = Field(30, ge=1, description="generator steps an epoch of dense, coboosting, fedftg")
    gen_lr: float = Field(1e-3, gt=0)
    score_average: bool = Field(True, description="sites also score the plain average of three uploads or more")
    checkpoint_s: float = Field(300.0, ge=0, description="seconds between two checkpoints of the job")
    state_dir: str = Field("", description="folder of the server's jobs; empty: in the run folder")
    keep_synthetic: bool = Field(False, description="keep uploads and synthetic images after the run")
    allow_preview: bool = Field(False, description="the server may show synthetic images to who asks it")

    def inversion(self, normalise: str, channels: int) -> InversionSettings:
        """Numbers of stage A; ``dense_inversion`` has no stops. Raises ValueError that names every contradiction."""
        names = ("inv_iters", "inv_lr", "w_tv2", "w_tv1", "w_l2", "jitter", "flip", "iterate", "tie_channels", "bf16")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        mean, std = statistics(normalise, channels)
        if self.server == "dense_inversion":
            return InversionSettings(**common, stops=(), ratios=(), mean=mean, std=std)
        sparse = ("freeze_stopped", "rebirth", "high_set", "low_set")
        return InversionSettings(
            **common,
            **{name: getattr(self, name) for name in sparse},
            stops=tuple(int(stop) for stop in names_in(self.stops)),
            ratios=tuple(float(ratio) for ratio in names_in(self.ratios)),
            mean=mean,
            std=std,
        )

    def distillation(self, objective: str, normalise: str, channels: int) -> DistilSettings:
        """Numbers of stage C."""
        names = ("kd_T", "kd_lambda", "kd_epochs", "kd_batch", "kd_lr", "kd_momentum", "kd_wd", "kd_clip")
        mean, std = statistics(normalise, channels)
        numbers = {name: getattr(self, name) for name in names}
        return DistilSettings(objective, **numbers, flip=self.flip, train_scope=self.train_scope, mean=mean, std=std)


def statistics(normalise: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by channel of what ``model.normalise`` does to pixels in [0, 1]."""
    return ((HALF,) * channels, (HALF,) * channels) if normalise == "half" else IMAGENET
