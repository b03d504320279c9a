"""SphereFed's network and loss: features on a sphere, regressed onto class points that are fixed before training.

Dong, Zhang, Li, Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022 (arXiv 2207.09413); single-label there.
Written from the paper's public descriptions; no code was read. Sites that see different labels pull a trained
classifier apart; here all share one that is never trained, so their features grow into the same places.

What travels, both ways: ``backbone.*`` and ``projection.*`` (D^2 + D numbers). The class points are in no state dict.

Simplification: the paper's last step, which replaces the fixed classifier by the ridge regression of the labels on the
trained features, from sums over all sites, is left out. It needs the sites' feature covariances of the final model (and
one for each label where labels are unknown): one more exchange with arrays of its own. Results are those of the paper's
variant without calibration, which the paper reports as the weaker one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.fednca_backbones import build_backbone
from models.fixed_directions import directions_sha256, orthonormal_rows
from models.losses import UNKNOWN

SHARPNESS = 4.0
"""Logit = SHARPNESS * (score - 1/2). Choice: the paper needs the order of scores only. With 4 the sigmoid has slope 1
at the midpoint: a score near 1/2 is its own probability, and the histogram's bins resolve scores around 0 and 1."""


class SphereNetwork(nn.Module):
    """Backbone, projection to the sphere, fixed class points; ``forward``: ``(B, ch, H, W) -> (B, C) float32`` logits.

    ``points (C, D) float32``: orthonormal rows. ``scale``: length of the sphere, 0 for sqrt(C). Choice: sqrt(C). A unit
    feature has inner product 1 with one class point at most; |P| present labels need a sphere of radius sqrt(|P|). At
    radius sqrt(C) every set of labels has a place where each present label scores 1 and each absent one 0 (what is
    left of the length lies at right angles to all points, hence D > C). ``scale=1`` is the paper's sphere.

    ``projection``: a linear layer between the pooled feature and the sphere. Choice: on. Pooled features follow a ReLU,
    so none is negative and without it they could reach one orthant of the sphere only (digits mosaics, AdamW, 20
    rounds, one seed: macro AUROC 0.927 with it, 0.847 without).
    """

    def __init__(self, backbone: nn.Module, points: Tensor, *, scale: float = 0.0, projection: bool = True) -> None:
        super().__init__()
        num_labels, dim = points.shape
        if num_labels >= dim:
            raise ValueError(f"{num_labels} class points need features wider than {num_labels}, got width {dim}")
        self.backbone = backbone
        self.projection = nn.Linear(dim, dim) if projection else nn.Identity()
        self.scale = scale or math.sqrt(num_labels)
        self._drawn = points
        self.register_buffer("points", points.clone(), persistent=False)

    @property
    def frozen_sha256(self) -> str:
        """Hash of the class points as this process drew them."""
        return directions_sha256(self._drawn)

    def features(self, images: Tensor) -> Tensor:
        """Unit features ``(B, D) float32``."""
        projected = self.projection(self.backbone(images).mean(dim=(2, 3)))
        return F.normalize(projected.float(), dim=1)

    def scores(self, images: Tensor) -> Tensor:
        """scale * <feature, class point> ``(B, C) float32``: regressed to 1 for present and to 0 for absent labels."""
        features = self.features(images)
        with torch.autocast(features.device.type, enabled=False):
            return self.scale * (features @ self.points.T)

    def forward(self, images: Tensor) -> Tensor:
        return SHARPNESS * (self.scores(images) - 0.5)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> SphereNetwork:
        """As of any module; the class points, which no state dict brings back, are put in again."""
        super().to_empty(device=device, recurse=recurse)
        self.points.copy_(self._drawn)
        return self


def build_spherefed(
    name: str,
    *,
    num_labels: int,
    points: torch.Generator,
    channels: int = 3,
    image_size: int = 224,
    width: int = 32,
    norm: str = "batch",
    scale: float = 0.0,
    projection: bool = True,
) -> SphereNetwork:
    """The network with a backbone by name (`build_backbone`); ``points`` is the generator of the class points.

    >>> network = build_spherefed("small_cnn", num_labels=7, points=torch.Generator().manual_seed(1), channels=1)
    >>> network(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 7])
    """
    backbone, dim = build_backbone(name, channels=channels, image_size=image_size, width=width, norm=norm)
    return SphereNetwork(backbone, orthonormal_rows(num_labels, dim, points), scale=scale, projection=projection)


def sphere_loss(scores: Tensor, targets: Tensor, task: str = "multilabel") -> Tensor:
    """Mean squared error between scores and labels, a float32 scalar.

    ``scores (B, C)``, ``targets (B, C)`` with 1 present, 0 absent, -1 unknown; an unknown label has zero gradient. In a
    ``multiclass`` task a row without a 1 is unknown as a whole. Choice: the target of every present label is 1 however
    many there are (with one label a sample that is the paper's one-hot target), so a score means the same in every
    image. The sum over known entries is divided by all entries, as `client_app.training.batch_loss` does.
    """
    known = targets != UNKNOWN
    if task == "multiclass":
        known = known & (targets == 1).any(dim=1, keepdim=True)
    errors = (scores.float() - targets.float()).square()
    return torch.where(known, errors, 0.0).sum() / targets.numel()
