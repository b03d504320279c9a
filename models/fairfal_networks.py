"""Networks of the FairFAL experiments, each with the features that its linear layer reads (spec section 3)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from models.networks import SmallCNN, resnet18

NETWORKS = ("cnn4conv", "mobilenet", "resnet18", "small_cnn")

MOBILENET_BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""Width and stride of each block (MobileNet, arXiv 1704.04861, with the strides used for 32x32 images)."""


class FeatureNetwork(nn.Module):
    """``features`` to a map, pooled or flattened to ``(B, D)``, then ``linear``; its bias starts at 0.

    ``forward``: ``(B, channels, H, W) float32 -> (B, C) float32`` logits; `outputs` has the features beside them.
    """

    def __init__(self, features: nn.Module, dim: int, num_labels: int, *, pooled: bool) -> None:
        super().__init__()
        self.features, self.dim, self.pooled = features, dim, pooled
        self.linear = nn.Linear(dim, num_labels)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.outputs(images)[0]

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(B, C)`` and features ``(B, D)``."""
        feature_map = self.features(images)
        features = feature_map.mean(dim=(2, 3)) if self.pooled else feature_map.flatten(1)
        return self.linear(features), features


class CNN4Conv(FeatureNetwork):
    """Four blocks of 64 channels, each halving the picture; D = 64 floor(S/16)^2. Features are >= 0.

    Choice: any side of at least 16 pixels; the source knows 28 and 32.
    """

    def __init__(self, *, channels: int, num_labels: int, image_size: int) -> None:
        if image_size < 16:
            raise ValueError(f"cnn4conv halves the picture four times: it needs 16 pixels, got {image_size}")
        blocks = [self._block(inner) for inner in (channels, 64, 64, 64)]
        super().__init__(nn.Sequential(*blocks), 64 * (image_size // 16) ** 2, num_labels, pooled=False)

    @staticmethod
    def _block(inner: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inner, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))


class MobileNet(FeatureNetwork):
    """MobileNet for small pictures, D = 1024. Choice: a global mean, which at 32 pixels is the source's 2x2 mean."""

    def __init__(self, *, channels: int, num_labels: int) -> None:
        layers, inner = [*_convolution(channels, 32, 3)], 32
        for outer, stride in MOBILENET_BLOCKS:
            layers += [*_convolution(inner, inner, 3, stride, groups=inner), *_convolution(inner, outer, 1)]
            inner = outer
        super().__init__(nn.Sequential(*layers), inner, num_labels, pooled=True)


class ResNet18(FeatureNetwork):
    """ResNet-18, D = 512, the last normalisation of each block starting at 0; below 96 pixels with the small stem."""

    def __init__(self, *, channels: int, num_labels: int, image_size: int) -> None:
        body = resnet18(channels=channels, num_labels=num_labels, image_size=image_size)
        for name, module in body.named_modules():
            if name.endswith("bn2"):
                nn.init.zeros_(module.weight)
        layers = OrderedDict(item for item in body.named_children() if item[0] not in ("avgpool", "fc"))
        super().__init__(nn.Sequential(layers), body.fc.in_features, num_labels, pooled=True)


def build_feature_network(
    name: str, *, channels: int, num_labels: int, image_size: int, width: int = 32, norm: str = "batch"
) -> FeatureNetwork:
    """A network by name, initialised from torch's current generator. Raises ValueError for an unknown name.

    ``width`` and ``norm`` are those of ``small_cnn``, which is not of the paper: it is there for small machines.
    """
    if name == "cnn4conv":
        return CNN4Conv(channels=channels, num_labels=num_labels, image_size=image_size)
    if name == "mobilenet":
        return MobileNet(channels=channels, num_labels=num_labels)
    if name == "resnet18":
        return ResNet18(channels=channels, num_labels=num_labels, image_size=image_size)
    if name == "small_cnn":
        body = SmallCNN(channels=channels, num_labels=num_labels, width=width, norm=norm).features
        return FeatureNetwork(body, 4 * width, num_labels, pooled=True)
    raise ValueError(f"no network {name!r} with features; there are {', '.join(NETWORKS)}")


def _convolution(inner: int, outer: int, size: int, stride: int = 1, groups: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inner, outer, size, stride=stride, padding=size // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(outer), nn.ReLU()
