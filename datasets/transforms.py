"""From cached uint8 pixels to what a network eats: augmentation on the raw batch, then scaling to float32.

Augment before scaling: the padding of a crop is then black, as outside the film, and the batch is four times smaller.
Every random draw comes from the generator that is passed, on its own device (the CPU in this project), so a batch
is augmented alike on CPU and GPU. Do not flip where left and right differ: digits, and the heart in a chest X-ray.
"""

from __future__ import annotations

from typing import Literal

import torch

Normalisation = Literal["half", "imagenet"]

# Mean and standard deviation per channel of pixels scaled to 0..1.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = 0.5


def to_input(images: torch.Tensor, *, channels: int | None = None, normalise: Normalisation = "half") -> torch.Tensor:
    """Pixels ``(B, H, W, ch) uint8`` as network input ``(B, channels, H, W) float32``, contiguous, same device.

    ``channels`` repeats grey to 3 where it is 3 and ch is 1; None keeps ch. ``half`` maps 0..255 to -1..1 (mean and
    standard deviation 0.5); ``imagenet`` is for backbones with ImageNet weights and needs 3 channels. Raises
    ValueError for other shapes, dtypes and channel numbers; colour is never turned to grey here.
    """
    _require_pixels(images)
    found = images.shape[3]
    wanted = found if channels is None else channels
    if wanted != found and (found, wanted) != (1, 3):
        raise ValueError(f"cannot turn {found} channels into {wanted}; only grey (1) repeats to 3")
    if normalise not in ("half", "imagenet"):
        raise ValueError(f"normalise={normalise!r} is unknown; use 'half' or 'imagenet'")
    if normalise == "imagenet" and wanted != 3:
        raise ValueError(f"ImageNet statistics are for 3 channels, got {wanted}; set channels=3 or normalise='half'")

    scaled = images.permute(0, 3, 1, 2).to(torch.float32).div_(255).expand(-1, wanted, -1, -1)
    if normalise == "half":
        return ((scaled - HALF) / HALF).contiguous()
    mean = scaled.new_tensor(IMAGENET_MEAN).view(1, 3, 1, 1)
    std = scaled.new_tensor(IMAGENET_STD).view(1, 3, 1, 1)
    return ((scaled - mean) / std).contiguous()


def random_flip(images: torch.Tensor, generator: torch.Generator, *, probability: float = 0.5) -> torch.Tensor:
    """A copy of ``images (B, H, W, ch) uint8`` with each picture mirrored left to right with ``probability``."""
    _require_pixels(images)
    draw = torch.rand(len(images), generator=generator, device=generator.device)
    is_flipped = (draw < probability).to(images.device)
    return torch.where(is_flipped[:, None, None, None], images.flip(2), images)


def random_crop(images: torch.Tensor, generator: torch.Generator, *, padding: int) -> torch.Tensor:
    """A copy of ``images (B, H, W, ch) uint8`` with each picture shifted by up to ``padding`` pixels on both axes.

    The picture is framed by ``padding`` black pixels and an H x W window is cut out of it, every window equally likely.
    """
    _require_pixels(images)
    if padding < 0:
        raise ValueError(f"padding must be 0 or more pixels, got {padding}")
    batch, height, width, _ = images.shape
    framed = torch.nn.functional.pad(images, (0, 0, padding, padding, padding, padding))
    corner = torch.randint(2 * padding + 1, (2, batch), generator=generator, device=generator.device)
    top, left = corner.to(images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = left[:, None] + torch.arange(width, device=images.device)  # (B, W)
    picture = torch.arange(batch, device=images.device)
    return framed[picture[:, None, None], rows[:, :, None], columns[:, None, :]]


def _require_pixels(images: torch.Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"expected pixels (B, H, W, ch) uint8, got {tuple(images.shape)} {images.dtype}")
