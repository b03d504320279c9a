"""Images to one feature and, for fusion by attention, to tokens: the vision encoder of method `incongruent`.

The project's incongruent specification, sections 3.1 and 3.2.
"""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.fednca_backbones import build_backbone


class VisionEncoder(nn.Module):
    """Images ``(B, ch, H, W) float32`` to z ``(B, d)``: pooled feature of ``backbone``, projected.

    ``backbone``: a module to a feature map ``(B, D, h, w)``, whose mean is the pooled feature and whose cells are the
    tokens; or a plain vision transformer of timm: class token (without one: mean of the patches) and patch tokens.
    """

    def __init__(self, backbone: nn.Module, width: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Linear(width, dim)

    def forward(self, images: Tensor, with_tokens: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """z, and with ``with_tokens`` the tokens projected ``(B, n, d)`` and which are real ``(B, n) bool``: all."""
        if isinstance(self.backbone, VisionTransformer):
            states = self.backbone.forward_features(images)
            tokens = states[:, self.backbone.num_prefix_tokens :]
            pooled = states[:, 0] if self.backbone.has_class_token else tokens.mean(dim=1)
        else:
            tokens = self.backbone(images).flatten(2).transpose(1, 2)
            pooled = tokens.mean(dim=1)
        if not with_tokens:
            return self.projection(pooled), None, None
        tokens = self.projection(tokens)
        return self.projection(pooled), tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


def build_vision_encoder(
    name: str, *, dim: int, channels: int = 3, image_size: int = 224, width: int = 32, norm: str = "batch"
) -> VisionEncoder:
    """A `VisionEncoder` of width ``dim`` by name; the backbones are those of `build_backbone`, with their state names.

    ``tiny_vit`` is there beside them: two layers of width 64 on patches of 8 pixels, for tests and small images.
    Raises ValueError for an unknown name.
    """
    if name == "tiny_vit":
        if image_size % 8:
            raise ValueError(f"patches of 8 pixels do not tile {image_size} pixels")
        backbone: nn.Module = VisionTransformer(
            img_size=image_size, patch_size=8, in_chans=channels, num_classes=0, embed_dim=64, depth=2, num_heads=2
        )
        return VisionEncoder(backbone, 64, dim)
    backbone, size = build_backbone(name, channels=channels, image_size=image_size, width=width, norm=norm)
    return VisionEncoder(getattr(backbone, "vit", backbone), size, dim)
