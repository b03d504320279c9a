"""Backbones that keep the picture's places: images to a feature map, without pooling and without a head."""

from __future__ import annotations

import functools
from collections import OrderedDict

import timm
import torch
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.networks import NORMS, SmallCNN, resnet18


def build_backbone(
    name: str,
    *,
    channels: int = 3,
    image_size: int = 224,
    width: int = 32,
    norm: str = "batch",
    patch_size: int | None = None,
) -> tuple[nn.Module, int]:
    """A module ``(B, channels, S, S) float32 -> (B, D, H, W)`` and D, initialised from torch's current generator.

    ``small_cnn``: the blocks of `SmallCNN`, D = 4 ``width``, one cell for 8x8 pixels. ``resnet18`` (D = 512),
    ``resnet50`` (2048): torchvision's, with torchvision's names, one cell for 32x32 pixels; below 96 pixels the small
    stem of `models.networks.resnet18`, one cell for 8x8. ``vit_*``: a plain vision transformer of timm, its patch
    tokens after the last norm as a map; it takes ``image_size`` only, and ``patch_size`` where the named one is too
    coarse. Nothing is downloaded. Raises ValueError for an unknown name.
    """
    if name == "small_cnn":
        return SmallCNN(channels=channels, num_labels=1, width=width, norm=norm).features, 4 * width
    if name in ("resnet18", "resnet50"):
        network = resnet18(channels=channels, num_labels=1, norm=norm, image_size=image_size)
        if name == "resnet50":
            stem = network
            network = torchvision.models.resnet50(weights=None, norm_layer=NORMS[norm])
            network.conv1, network.maxpool = stem.conv1, stem.maxpool
        width = network.fc.in_features
        layers = OrderedDict(item for item in network.named_children() if item[0] not in ("avgpool", "fc"))
        return nn.Sequential(layers), width
    if name.startswith("vit_") and timm.is_model(name):
        backbone = TokenMap(name, channels=channels, image_size=image_size, patch_size=patch_size)
        return backbone, backbone.vit.embed_dim
    raise ValueError(f"no backbone {name!r}; there are small_cnn, resnet18, resnet50 and timm's vit_*")


@functools.cache
def backbone_width(name: str, *, channels: int = 3, image_size: int = 224, width: int = 32, norm: str = "batch") -> int:
    """D of `build_backbone`, without memory or random draws. Raises ValueError like it."""
    with torch.device("meta"):
        return build_backbone(name, channels=channels, image_size=image_size, width=width, norm=norm)[1]


class TokenMap(nn.Module):
    """A timm vision transformer whose patch tokens are laid out as a map; class and register tokens are dropped."""

    def __init__(self, name: str, *, channels: int, image_size: int, patch_size: int | None) -> None:
        super().__init__()
        changes = {} if patch_size is None else {"patch_size": patch_size}
        vit = timm.create_model(
            name, pretrained=False, num_classes=0, global_pool="", img_size=image_size, in_chans=channels, **changes
        )
        # A buffer would be state that neither the weights nor the constructor of a network made on "meta" restores.
        if type(vit) is not VisionTransformer or list(vit.buffers()):
            raise ValueError(f"{name} is not a plain vision transformer")
        if any(image_size % patch for patch in vit.patch_embed.patch_size):
            raise ValueError(f"patches of {vit.patch_embed.patch_size[0]} pixels do not tile {image_size} pixels")
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.vit.forward_features(images)[:, self.vit.num_prefix_tokens :]
        return tokens.transpose(1, 2).unflatten(2, self.vit.patch_embed.grid_size)
