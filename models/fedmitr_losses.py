"""Distillation and relabel losses of FedMITR: soft targets in the safe form, every mean over the rows that count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

JS_FLOOR, JS_CEILING = 0.01, 0.99
UNKNOWN = -1


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of each row ``(B,) float32``: cross-entropy for ``labels (B,) int64``, BCE for ``labels (B, C)``.

    Choice: the BCE is summed over the labels, as cross-entropy is; a label that is -1 (the site never saw it) adds
    nothing and has zero gradient.
    """
    logits = logits.float()
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    wanted = labels.to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, wanted.clamp(min=0), reduction="none")
    return torch.where(wanted == UNKNOWN, 0.0, losses).sum(dim=1)


def kl_rows(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of each row: ``(..., C) -> (...) float32``.

    Gradients reach both sides, as generators need it. For large T it tends to |z - u|^2 / (2 C), z and u the centred
    logits. The logarithm of the softmax is taken at once: nothing is rounded to 0 first.
    """
    _check_temperature(temperature)
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """`kl_rows` for a student that learns (spec 5): no gradient reaches the teacher."""
    return kl_rows(student, teacher.detach(), temperature)


def soft_label_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The multi-label form of `soft_loss`: T^2 sum_c KL of two Bernoulli, ``(..., C) -> (...) float32`` (spec 13.1)."""
    _check_temperature(temperature)
    given, found = teacher.detach().float() / temperature, student.float() / temperature
    p = torch.sigmoid(given)
    present = p * (F.logsigmoid(given) - F.logsigmoid(found))
    absent = (1 - p) * (F.logsigmoid(-given) - F.logsigmoid(-found))
    return temperature**2 * (present + absent).sum(dim=-1)


def kd_loss(student: Tensor, teacher: Tensor, temperature: float, *, multilabel: bool = False) -> Tensor:
    """Plain distillation: the mean of `soft_loss` (or `soft_label_loss`) over the rows; 0 without rows."""
    loss = soft_label_loss if multilabel else soft_loss
    return mean_of(loss(student, teacher, temperature))


def js_divergence(student: Tensor, teacher: Tensor, temperature: float = 3.0) -> Tensor:
    """(KL(M || P) + KL(M || Q)) / 2 of each row ``(B,)``, M = (P + Q) / 2, as SMI and DeepInversion code it.

    P and Q at temperature T, all three clamped to [0.01, 0.99]. Choice: their order of arguments, which is not the
    textbook's (there M stands second).
    """
    _check_temperature(temperature)
    p = (student.float() / temperature).softmax(dim=1).clamp(JS_FLOOR, JS_CEILING)
    q = (teacher.float() / temperature).softmax(dim=1).clamp(JS_FLOOR, JS_CEILING)
    middle = (0.5 * (p + q)).clamp(JS_FLOOR, JS_CEILING)
    return 0.5 * (middle * (2 * middle.log() - p.log() - q.log())).sum(dim=1)


def relabel_loss(
    high_logits: Tensor | None,
    labels: Tensor,
    low_logits: Tensor | None,
    low_teacher_logits: Tensor | None,
    temperature: float,
    weight: float,
    *,
    has_high: Tensor | None = None,
    has_low: Tensor | None = None,
) -> Tensor:
    """CE(g(x; H), y) + weight * T^2 KL(softmax(z_low / T) || softmax(g(x; L) / T)), a float32 scalar (spec 5).

    ``high_logits (B, C)`` of the student on the high patches, ``labels (B,) int64``; ``low_logits`` and
    ``low_teacher_logits (B, C)`` on the low ones. ``labels (B, C)`` with -1, 0, 1 make it the multi-label form. A row
    that is False in ``has_high`` or ``has_low (B,) bool`` has no such patches and is left out of that mean; a term
    without rows, or given as None, is 0.
    """
    multilabel = labels.ndim == 2
    total = torch.zeros((), device=labels.device)
    if high_logits is not None:
        total = total + mean_of(label_loss(high_logits, labels), has_high)
    if low_logits is not None and weight:
        if low_teacher_logits is None:
            raise ValueError("low patches need the teachers' logits; got None")
        soft = soft_label_loss if multilabel else soft_loss
        total = total + weight * mean_of(soft(low_logits, low_teacher_logits, temperature), has_low)
    return total


def token_relabel_loss(
    class_logits: Tensor,
    labels: Tensor,
    token_logits: Tensor,
    teacher_logits: Tensor,
    is_high: Tensor,
    is_low: Tensor,
    temperature: float,
    weight: float,
) -> Tensor:
    """CE on the class token, CE on the high tokens, T^2 KL on the low ones, a float32 scalar (spec 5, ``token``).

    ``class_logits (B, C)``, ``labels (B,) int64``, ``token_logits`` and ``teacher_logits (B, N, C)``, ``is_high`` and
    ``is_low (B, N) bool``. Each mean runs over all such tokens of the batch; none: 0. The teachers' rows outside
    ``is_low`` are not read, they may be anything finite.
    """
    batch, num_patches, num_labels = token_logits.shape
    of_token = labels.repeat_interleave(num_patches, dim=0)
    hard = label_loss(token_logits.reshape(-1, num_labels), of_token).view(batch, num_patches)
    soft = soft_loss if labels.ndim == 1 else soft_label_loss
    low = soft(token_logits, teacher_logits, temperature)
    return mean_of(label_loss(class_logits, labels)) + mean_of(hard, is_high) + weight * mean_of(low, is_low)


def mean_of(losses: Tensor, counts: Tensor | None = None) -> Tensor:
    """The mean of ``losses`` over the entries where ``counts`` (bool, same shape) is True; 0 without any, never nan."""
    if counts is None:
        return losses.sum() / max(1, losses.numel())
    return torch.where(counts, losses, 0.0).sum() / counts.sum().clamp(min=1)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"a temperature is positive, got {temperature}")
