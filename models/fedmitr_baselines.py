"""Losses of the one-shot methods that FedMITR is compared with, and the generator that they train.

DENSE (Zhang et al., NeurIPS 2022), Co-Boosting (Dai et al., ICLR 2024), FedFTG (Zhang et al., CVPR 2022). The project's
fedmitr specification, section 8. All of them distil an ensemble into a student on generated images; they differ in what
the generator is asked for and in how sites are weighed. DeepInversion is `models.inversion` without stops; plain
distillation is `kd_loss`. Their batch-norm term has no meaning for vision transformers and is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.fedmitr_ensemble import ensemble_logits
from models.fedmitr_losses import kl_rows, mean_of


def dense_adversarial_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """-KL where student and teacher disagree about the class, a scalar for the generator to make small (DENSE).

    Both ``(B, C)``. Choice: divided by the whole batch, as the published code does, not by the rows that disagree.
    """
    disagree = student.argmax(dim=1) != teacher.argmax(dim=1)
    return -mean_of(torch.where(disagree, kl_rows(student, teacher, temperature), 0.0))


def coboost_adversarial_loss(student: Tensor, teacher: Tensor, temperature: float = 3.0) -> Tensor:
    """-KL over the whole batch, a scalar for the generator to make small (Co-Boosting)."""
    return -mean_of(kl_rows(student, teacher, temperature))


def hard_sample_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """mean (1 - p_y) CE with the weight detached: samples that the ensemble knows well count little (Co-Boosting).

    ``logits (B, C)`` of the ensemble, ``labels (B,) int64``.
    """
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    return mean_of((1 - torch.exp(-losses.detach())) * losses)


def reweighted(weights: Tensor, site_logits: Tensor, labels: Tensor, epoch: int, *, step: float = 0.01) -> Tensor:
    """The sites' weights ``(K,)`` after one signed gradient step of the ensemble's CE, in [0, 1] (Co-Boosting).

    ``site_logits (K, B, C)``; the step is ``step * 0.99 ** epoch``. Choice: a step that would leave every site with
    weight 0 is not taken.
    """
    given = weights.detach().clone().requires_grad_()
    loss = F.cross_entropy(ensemble_logits(site_logits.detach(), given), labels)
    (gradient,) = torch.autograd.grad(loss, given)
    moved = (weights - step * 0.99**epoch * gradient.sign()).clamp(0, 1)
    return moved if bool((moved > 0).any()) else weights


def perturbed(
    images: Tensor, teacher: Callable[[Tensor], Tensor], generator: torch.Generator, *, epsilon: float = 8 / 255
) -> Tensor:
    """Images moved by ``epsilon`` in every pixel, along a random direction of the teacher's output (Co-Boosting).

    ``teacher`` maps ``images (B, ch, H, W)``, pixels in [0, 1], to logits ``(B, C)``; each image draws u from [-1, 1]^C
    and moves by the sign of the gradient of u . logits. Choice: the sign, for 8/255 is a size per pixel; the paper
    writes a normalised gradient.
    """
    pixels = images.detach().requires_grad_()
    logits = teacher(pixels)
    direction = 2 * torch.rand(logits.shape, generator=generator).to(logits) - 1
    (gradient,) = torch.autograd.grad((direction * logits).sum(), pixels)
    return (images.detach() + epsilon * gradient.sign()).clamp(0, 1)


def fedftg_class_loss(site_logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """mean_b sum_k W[k, b] CE(z_k, y_b): generated images must look like their label to the sites that know it.

    ``site_logits (K, B, C)``, ``labels (B,) int64``, ``weights (K, B, 1)`` of `label_count_weights` (FedFTG).
    """
    num_sites, batch, num_labels = site_logits.shape
    losses = F.cross_entropy(
        site_logits.reshape(-1, num_labels).float(), labels.repeat(num_sites), reduction="none"
    ).view(num_sites, batch)
    return mean_of((weights[:, :, 0] * losses).sum(dim=0))


def fedftg_distillation_loss(student: Tensor, site_logits: Tensor, weights: Tensor, temperature: float = 1.0) -> Tensor:
    """mean_b sum_k W[k, b] KL(site k || student): the student makes it small, the generator large (FedFTG).

    ``student (B, C)``, ``site_logits (K, B, C)``, ``weights (K, B, 1)``. Gradients reach both sides: detach what is
    fixed.
    """
    losses = kl_rows(student.expand_as(site_logits), site_logits, temperature)
    return mean_of((weights[:, :, 0] * losses).sum(dim=0))


def diversity_loss(images: Tensor, noise: Tensor) -> Tensor:
    """exp(-mean_ij |x_i - x_j| |z_i - z_j|): large where different noise gives equal images (FedFTG).

    ``images (B, ch, H, W)``, ``noise (B, nz)``. Choice: the image distance is a mean absolute difference, as FedGen's
    code has it, so that it does not grow with the image.
    """
    flat = images.flatten(1)
    apart = torch.cdist(flat, flat, p=1) / flat.shape[1]
    return torch.exp(-(apart * torch.cdist(noise, noise)).mean())


class ImageGenerator(nn.Module):
    """DENSE's generator: noise ``(B, nz)`` to pixels in [0, 1], ``(B, channels, image_size, image_size) float32``.

    A linear layer to a quarter of the size, then twice: double and convolve. ``image_size`` is a multiple of 4.
    """

    def __init__(self, *, nz: int = 256, width: int = 64, channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        if image_size % 4:
            raise ValueError(
                f"the generator doubles its size twice, so image_size is a multiple of 4; got {image_size}"
            )
        self.nz = nz
        start = image_size // 4
        self.layers = nn.Sequential(
            nn.Linear(nz, 2 * width * start * start),
            nn.Unflatten(1, (2 * width, start, start)),
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)
