"""One iteration of sparse inversion: the gradient on the pixels, the stop of patches, the step of Adam."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.utils.checkpoint import checkpoint

from models.fedmitr_losses import js_divergence, label_loss
from models.inversion_settings import InversionSettings
from models.inversion_state import InversionState
from models.inversion_terms import (
    keep_counts,
    norm_of,
    pixel_places,
    shift_ids,
    total_variation_l1_of,
    total_variation_l2_of,
)
from models.vit_tokens import embed, grid_of, patch_of, read_class

ADAM_EPS = 1e-8


def pixel_gradient(
    models: Sequence[nn.Module], student: nn.Module | None, state: InversionState, settings: InversionSettings
) -> Tensor:
    """dL / dcanvas ``(B, ch, H * W)`` of this iteration; records the trace, the best canvas and the attention."""
    iteration, groups = state.iteration, state.num_groups
    grid, patch = grid_of(models[0]), patch_of(models[0])
    batch, channels, _ = state.canvas.shape
    offset_y, offset_x, flip = state.jitter[iteration].repeat_interleave(batch // groups, dim=0).unsqueeze(2).unbind(1)
    ids = shift_ids(state.alive, grid, offset_y, offset_x, flip, patch)
    places = pixel_places(ids, grid, patch, offset_y, offset_x, flip)

    canvas = state.canvas.detach().requires_grad_()
    pixels = canvas.gather(2, places[:, None].expand(-1, channels, -1))
    pixels = pixels.view(batch, channels, ids.shape[1], patch * patch).transpose(1, 2).flatten(2)  # (B, n, ch * P * P)
    with torch.autocast(canvas.device.type, torch.bfloat16, enabled=settings.bf16):
        logits, attention = _read(models, pixels, ids, with_attention=iteration + 1 in settings.stops)
        given = None if student is None else read_class(student, embed(student, pixels, ids)).logits
    fit = _group_means(label_loss(logits, state.labels), groups)
    total = settings.w_ce * fit
    if settings.w_adv:
        total = total - settings.w_adv * _group_means(js_divergence(given, logits), groups)
    images = canvas.view(groups, batch // groups, channels, grid * patch, grid * patch)
    for weight, prior in (
        (settings.w_tv2, total_variation_l2_of),
        (settings.w_tv1, total_variation_l1_of),
        (settings.w_l2, norm_of),
    ):
        if weight:
            total = total + weight * prior(images)
    (gradient,) = torch.autograd.grad(total.sum(), canvas)

    state.trace[iteration] = fit.detach()
    if attention is not None:
        state.attention = attention.detach().float()
    if settings.iterate == "best" and iteration >= max(settings.stops, default=0):
        _keep_best(state, total.detach())
    return gradient


def _read(
    models: Sequence[nn.Module], pixels: Tensor, ids: Tensor, *, with_attention: bool
) -> tuple[Tensor, Tensor | None]:
    """Mean logits and mean attention. Several models: each forward pass is repeated when its gradient is due, so
    the activations of one model are held, not of all."""
    if len(models) == 1:
        return read_class(models[0], embed(models[0], pixels, ids), with_attention=with_attention)

    def outputs(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        return tuple(read_class(model, embed(model, pixels, ids), with_attention=with_attention))

    logits, attention = zip(*(checkpoint(outputs, model, use_reentrant=False) for model in models), strict=True)
    return torch.stack(logits).mean(dim=0), torch.stack(attention).mean(dim=0) if with_attention else None


def _keep_best(state: InversionState, total: Tensor) -> None:
    """Choice: compared from the last stop on, when the patch sets are final; a copy, where SMI keeps an alias (D3)."""
    is_better = total < state.best_loss
    rows = is_better.repeat_interleave(len(state.canvas) // state.num_groups)[:, None, None]
    state.best = torch.where(rows, state.canvas, state.best)
    state.best_loss = torch.where(is_better, total, state.best_loss)


def stop_patches(model: nn.Module, state: InversionState, settings: InversionSettings) -> None:
    """Fewer patches from here on: the most attended stay, or, with rebirth, those are finished and the rest goes on."""
    num_patches, channels = grid_of(model) ** 2, state.canvas.shape[1]
    number = settings.stops.index(state.iteration)
    ranked = state.alive.gather(1, state.attention.argsort(dim=1, descending=True, stable=True))
    if settings.rebirth:
        size = state.detached.shape[2]
        state.detached = torch.cat([state.detached, ranked[:, None, :size]], dim=1)
        is_last = number + 1 == len(settings.stops)
        alive = ranked[:, size : 2 * size] if is_last else ranked[:, size:]  # what N / (S + 1) leaves over is dropped
    else:
        alive = ranked[:, : keep_counts(num_patches, settings.ratios)[number]]
    if settings.freeze_stopped and alive.shape[1] < num_patches:
        old, new = (pixel_places(ids, grid_of(model), patch_of(model)) for ids in (state.alive, alive))
        old, new = (places[:, None].expand(-1, channels, -1) for places in (old, new))
        for name in ("first", "second"):
            moment = getattr(state, name)
            if moment.shape != state.canvas.shape:
                moment = torch.zeros_like(state.canvas).scatter_(2, old, moment)
            setattr(state, name, moment.gather(2, new))
    state.alive = alive.contiguous()
    state.attention = state.attention[:, :0]


def alive_places(model: nn.Module, state: InversionState) -> Tensor | None:
    """Pixels that are optimised ``(B, ch, K * P * P)``; None where they all are."""
    if state.first.shape == state.canvas.shape:
        return None
    places = pixel_places(state.alive, grid_of(model), patch_of(model))
    return places[:, None].expand(-1, state.canvas.shape[1], -1)


def adam_step(state: InversionState, gradient: Tensor, places: Tensor | None, settings: InversionSettings) -> None:
    """One step of Adam on the alive pixels (all of them unless stopped ones are frozen), then the clamp."""
    pixels = state.canvas if places is None else state.canvas.gather(2, places)
    adam(
        [pixels],
        [gradient if places is None else gradient.gather(2, places)],
        [state.first],
        [state.second],
        [],
        [torch.tensor(float(state.iteration), device=pixels.device)],
        fused=True,
        amsgrad=False,
        beta1=settings.inv_betas[0],
        beta2=settings.inv_betas[1],
        lr=settings.inv_lr,
        weight_decay=0.0,
        eps=ADAM_EPS,
        maximize=False,
    )
    pixels = clamped(pixels, settings)
    state.canvas = pixels if places is None else state.canvas.scatter_(2, places, pixels)


def tied(pixels: Tensor, settings: InversionSettings) -> Tensor:
    """Normalised pixels ``(B, ch, ...)``, equal in all channels of the picture where ``tie_channels`` says so."""
    if not settings.tie_channels:
        return pixels
    mean, deviation = statistics(pixels, settings)
    return ((pixels * deviation + mean).mean(dim=1, keepdim=True) - mean) / deviation


def clamped(pixels: Tensor, settings: InversionSettings) -> Tensor:
    """Normalised pixels ``(B, ch, n)``, in place, within what [0, 1] becomes: -m / s to (1 - m) / s of each channel."""
    mean, deviation = statistics(pixels, settings)
    return tied(pixels, settings).clamp_(-mean / deviation, (1 - mean) / deviation)


def statistics(pixels: Tensor, settings: InversionSettings) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the model's normalisation, ``(ch, 1)`` each."""
    return tuple(pixels.new_tensor(values)[:, None] for values in (settings.mean, settings.std))


def _group_means(losses: Tensor, groups: int) -> Tensor:
    return losses.view(groups, -1).mean(dim=1)
