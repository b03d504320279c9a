"""Training the global vision transformer on a pool of synthetic images: FedMITR's objective, ablations and baselines.

The project's fedmitr specification, section 5. An epoch is a function of (student, optimiser, pool, cached teacher,
epoch number, generator): nothing else is remembered, so a run that stopped between epochs goes on to the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.fedmitr_ensemble import mirrored, normalised
from models.fedmitr_losses import kd_loss, label_loss, mean_of, relabel_loss, token_relabel_loss
from models.inversion import Inverted
from models.vit_tokens import check_vit, embed, grid_of, patch_of, patch_pixels, read_tokens, subset_logits

OBJECTIVES = {
    "subset": "low",
    "token": "tokens",
    "hard_low": None,
    "high_only": None,
    "whole_kd": "whole",
    "whole_ce": None,
}
"""Objective -> the view of `cached_teacher` that it needs.

``subset`` and ``token`` are FedMITR. The ablations: ``hard_low``, the pseudo-label on the low patches too;
``high_only``, no low patches. The baselines on the same images: ``whole_kd``, plain distillation; ``whole_ce``, the
pseudo-label of the whole image.
"""
SCOPES = ("full", "head")


@dataclass(frozen=True)
class DistilSettings:
    """Numbers of stage C (spec 5 and 14); the learning rate falls by a cosine over ``kd_epochs``.

    ``train_scope="head"`` trains the linear head alone, as SMI's transfer test does. ``mean`` and ``std`` are the
    student's normalisation. Raises ValueError that names every contradiction.
    """

    objective: str = "subset"
    kd_T: float = 4.0
    kd_lambda: float = 1.0
    kd_epochs: int = 200
    kd_batch: int = 128
    kd_lr: float = 0.01
    kd_momentum: float = 0.9
    kd_wd: float = 1e-4
    kd_clip: float = 10.0
    flip: bool = True
    train_scope: str = "full"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        wrong = []
        if self.objective not in OBJECTIVES:
            wrong.append(f"objective={self.objective!r} is unknown; there are {', '.join(OBJECTIVES)}")
        if self.train_scope not in SCOPES:
            wrong.append(f"train_scope={self.train_scope!r} is unknown; there are {', '.join(SCOPES)}")
        wrong += [f"{n} is positive, got {getattr(self, n)}" for n in ("kd_T", "kd_clip") if not getattr(self, n) > 0]
        wrong += [
            f"{n} is at least 0, got {getattr(self, n)}"
            for n in ("kd_lambda", "kd_lr", "kd_wd")
            if getattr(self, n) < 0
        ]
        wrong += [
            f"{n} is at least 1, got {getattr(self, n)}" for n in ("kd_epochs", "kd_batch") if getattr(self, n) < 1
        ]
        if not 0 <= self.kd_momentum < 1:
            wrong.append(f"kd_momentum is from 0 to below 1, got {self.kd_momentum}")
        if wrong:
            raise ValueError("; ".join(wrong))


def optimiser_of(student: nn.Module, settings: DistilSettings) -> torch.optim.SGD:
    """SGD on the parameters of ``train_scope``; the others are frozen on ``student``."""
    check_vit(student)
    student.requires_grad_(settings.train_scope == "full")
    student.head.requires_grad_(True)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=settings.kd_lr, momentum=settings.kd_momentum, weight_decay=settings.kd_wd)


def train_epoch(
    student: nn.Module,
    optimiser: torch.optim.Optimizer,
    pool: Inverted,
    teacher: Tensor | None,
    settings: DistilSettings,
    epoch: int,
    generator: torch.Generator,
) -> float:
    """One pass over the pool in an order drawn from ``generator`` (a CPU generator of its own); the mean loss.

    ``teacher``: `cached_teacher` with the view that `OBJECTIVES` names and with ``flip`` as in ``settings``; None where
    the objective needs none. ``epoch`` counts from 0 and sets the learning rate.
    """
    _check_teacher(pool, teacher, settings)
    device = student.head.weight.device
    size = len(pool.images)
    for group in optimiser.param_groups:
        group["lr"] = 0.5 * settings.kd_lr * (1 + math.cos(math.pi * epoch / settings.kd_epochs))
    order = torch.randperm(size, generator=generator)
    flips = torch.rand(size, generator=generator) < 0.5 if settings.flip else torch.zeros(size, dtype=torch.bool)
    student.train()
    total = torch.zeros((), device=device)
    for rows in order.split(settings.kd_batch):
        batch, seen = _batch(pool, teacher, rows, flips[rows], settings, grid_of(student), device)
        total += train_step(student, optimiser, batch, seen, settings) * len(rows)
    return total.item() / max(1, size)


def train_step(
    student: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: Inverted,
    teacher: Tensor | None,
    settings: DistilSettings,
) -> Tensor:
    """One step of SGD with clipped gradients; the batch's loss, detached. ``batch.images`` are normalised."""
    optimiser.zero_grad(set_to_none=True)
    loss = batch_loss(student, batch, teacher, settings)
    loss.backward()
    trained = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    nn.utils.clip_grad_norm_(trained, settings.kd_clip)
    optimiser.step()
    return loss.detach()


def batch_loss(student: nn.Module, batch: Inverted, teacher: Tensor | None, settings: DistilSettings) -> Tensor:
    """The objective on one batch, a float32 scalar. ``teacher (B, C)``, or ``(B, l, C)`` for ``token``."""
    images, labels, high, low = batch
    objective, multilabel = settings.objective, labels.ndim == 2
    if objective == "whole_ce":
        return mean_of(label_loss(subset_logits(student, images, None), labels))
    if objective == "whole_kd":
        logits = subset_logits(student, images, None)
        return kd_loss(logits, teacher, settings.kd_T, multilabel=multilabel)
    if objective == "token":
        return _token_loss(student, batch, teacher, settings)
    high_logits = subset_logits(student, images, high)
    uses_low = low.shape[1] > 0 and objective != "high_only" and settings.kd_lambda > 0
    low_logits = subset_logits(student, images, low) if uses_low else None
    if objective == "hard_low":
        hard = 0.0 if low_logits is None else settings.kd_lambda * mean_of(label_loss(low_logits, labels))
        return mean_of(label_loss(high_logits, labels)) + hard
    return relabel_loss(high_logits, labels, low_logits, teacher, settings.kd_T, settings.kd_lambda)


def _token_loss(student: nn.Module, batch: Inverted, teacher: Tensor, settings: DistilSettings) -> Tensor:
    images, labels, high, low = batch
    class_logits, token_logits = read_tokens(student, embed(student, patch_pixels(images, patch_of(student))))
    is_high, is_low = (
        torch.zeros(token_logits.shape[:2], dtype=torch.bool, device=images.device).scatter_(1, ids - 1, True)
        for ids in (high, low)
    )
    places = (low - 1)[:, :, None].expand(-1, -1, token_logits.shape[2])
    given = torch.zeros_like(token_logits).scatter(1, places, teacher.to(token_logits.dtype))
    return token_relabel_loss(
        class_logits, labels, token_logits, given, is_high, is_low, settings.kd_T, settings.kd_lambda
    )


def _batch(
    pool: Inverted,
    teacher: Tensor | None,
    rows: Tensor,
    flips: Tensor,
    settings: DistilSettings,
    grid: int,
    device: torch.device,
) -> tuple[Inverted, Tensor | None]:
    """Rows of the pool on the student's device, normalised; those in ``flips (B,) bool`` as mirror images."""
    images, labels, high, low = (part[rows.to(part.device)].to(device) for part in pool)
    seen = None
    if teacher is not None:
        seen = teacher[flips.long().to(teacher.device), rows.to(teacher.device)].to(device).float()
    images = normalised(images, settings.mean, settings.std)
    if settings.flip:
        turned, (turned_high, turned_low) = mirrored(images, (high, low), grid)
        flips = flips.to(device)
        images = torch.where(flips[:, None, None, None], turned, images)
        high, low = (torch.where(flips[:, None], *pair) for pair in ((turned_high, high), (turned_low, low)))
    return Inverted(images, labels, high, low), seen


def _check_teacher(pool: Inverted, teacher: Tensor | None, settings: DistilSettings) -> None:
    view = OBJECTIVES[settings.objective]
    if view is None:
        return
    if teacher is None:
        raise ValueError(f"objective={settings.objective!r} needs the teacher's outputs on {view!r}; got None")
    wanted = (2 if settings.flip else 1, len(pool.images))
    if tuple(teacher.shape[:2]) != wanted:
        raise ValueError(
            f"the cached teacher is {tuple(teacher.shape)}; flip={settings.flip} and the pool need {wanted}"
        )
