"""The networks that baselines share: a small CNN and ResNet-18, each with one linear head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(_groups(channels), channels),
}
"""Normalisation by name. Group norm has no running statistics to average, so sites may differ in brightness."""


def _groups(channels: int) -> int:
    return next(groups for groups in (32, 16, 8, 4, 2, 1) if channels % groups == 0)


class SmallCNN(nn.Module):
    """Three convolution blocks (width, 2 width, 4 width), global mean, linear head; any input from 8x8.

    ``forward``: ``(B, channels, H, W) float32 -> (B, C) float32`` logits.
    """

    def __init__(self, *, channels: int, num_labels: int, width: int = 32, norm: str = "batch") -> None:
        super().__init__()
        self.features = nn.Sequential(
            self._block(channels, width, norm),
            self._block(width, 2 * width, norm),
            self._block(2 * width, 4 * width, norm),
        )
        self.head = nn.Linear(4 * width, num_labels)

    @staticmethod
    def _block(inner: int, outer: int, norm: str) -> nn.Sequential:
        convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
        return nn.Sequential(convolution, NORMS[norm](outer), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


def resnet18(*, channels: int, num_labels: int, norm: str = "batch", image_size: int = 224) -> nn.Module:
    """torchvision's ResNet-18 with a linear head.

    Choice: inputs below 96 pixels get the usual small-image stem (3x3 stride 1, no pooling), else the last map would
    be 1 or 2 pixels wide.
    """
    from torchvision.models import resnet18  # heavy, and a deployed site starts a process for every message

    network = resnet18(weights=None, num_classes=num_labels, norm_layer=NORMS[norm])
    if image_size < 96:
        network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    elif channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return network


def build_network(name: str, *, channels: int, num_labels: int, image_size: int, width: int, norm: str) -> nn.Module:
    """A network by name, initialised from torch's current generator. Raises ValueError for an unknown name."""
    if name == "small_cnn":
        return SmallCNN(channels=channels, num_labels=num_labels, width=width, norm=norm)
    if name == "resnet18":
        return resnet18(channels=channels, num_labels=num_labels, norm=norm, image_size=image_size)
    raise ValueError(f"no network {name!r}; there are small_cnn and resnet18")


def load_backbone(network: nn.Module, path: Path) -> None:
    """Loads a safetensors file into a network; only the head (``head.*``, ``fc.*``) may be absent from the file."""
    given = load_file(path)
    wanted = network.state_dict()
    wrong = sorted(name for name in given if name not in wanted or wanted[name].shape != given[name].shape)
    absent = sorted(name for name in wanted if name not in given and not name.startswith(("head.", "fc.")))
    if wrong or absent:
        raise ValueError(f"{path.name} does not fit the network: wrong {wrong[:3]}, absent {absent[:3]}")
    network.load_state_dict({**wanted, **given}, strict=True)
