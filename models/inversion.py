"""Sparse model inversion: images that a vision transformer takes for its classes, only where it looks.

Hu et al., "Sparse Model Inversion", ICML 2024 (arXiv 2510.27186), as stage A of the project's fedmitr specification,
section 3. Noise is optimised until the model reads the wanted label in it. At a few stops the patches that the class
token attends to least leave the encoder for good: tokens are dropped, not masked, so an iteration costs what the
alive patches cost. Which patches are alive is an explicit list of ids; a black pixel means nothing.

`invert` does it all. A job that saves its work uses the parts: `start`, `advance` (any number of iterations), `finish`;
`InversionState` holds tensors only, and all jitter is drawn at the start, so 10 + 10 iterations give the bits of 20.

Three ways to be faster than SMI's schedule: ``freeze_stopped`` leaves the optimiser with the alive patches alone;
`merge` puts several batches together once few patches are left, with the gradients each had alone; ``rebirth`` (Heo
and Choi, "Patch Rebirth", arXiv 2509.23235) makes several sparse images of one canvas.

Choices: the parts where sources disagree are named D1 to D11 in the specification; the defaults are SMI's. Dense
inversion (the baseline DeepInversion without batch norm) is ``stops=()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from models.inversion_settings import InversionSettings
from models.inversion_state import InversionState, Inverted, join, merge
from models.inversion_step import adam_step, alive_places, pixel_gradient, statistics, stop_patches, tied
from models.inversion_terms import keep_counts, recomputed_count, shift_ids, total_variation_l2
from models.vit_tokens import all_patches, check_vit, cls_attention, complement, forward_subset, grid_of, patch_of

__all__ = [
    "InversionSettings",
    "InversionState",
    "Inverted",
    "advance",
    "cls_attention",
    "finish",
    "forward_subset",
    "frozen",
    "invert",
    "join",
    "keep_counts",
    "merge",
    "shift_ids",
    "start",
    "total_variation_l2",
]


def invert(
    model: nn.Module | Sequence[nn.Module],
    labels: Tensor,
    settings: InversionSettings,
    generator: torch.Generator,
    *,
    student: nn.Module | None = None,
) -> Inverted:
    """Images that ``model`` reads as ``labels (B,) int64``, or ``(B, C)`` with 1, 0 and -1 for multi-label models.

    ``model``: one vision transformer, or several for their mean logits (``inversion_teacher=ensemble``; one model's
    activations are held at a time). ``generator`` is a CPU generator: the noise and all jitter come from it.
    ``student`` is needed with ``w_adv``. Networks are left as they were; their weights get no gradient. Rebirth gives
    S + 1 images for each label. Raises ValueError for what cannot be inverted, FloatingPointError where the loss was
    not finite.
    """
    state = start(model, labels, settings, generator)
    advance(model, state, settings, settings.inv_iters, student=student)
    return finish(model, state, settings)


def start(
    model: nn.Module | Sequence[nn.Module], labels: Tensor, settings: InversionSettings, generator: torch.Generator
) -> InversionState:
    """Noise and jitter for ``labels``, on the model's device."""
    models = _models(model)
    channels, grid, patch = _geometry(models, settings)
    _check_labels(labels, models[0].num_classes)
    device = models[0].patch_embed.proj.weight.device
    batch, side, num_patches = len(labels), grid * patch, grid * grid
    if settings.rebirth and num_patches <= len(settings.stops):
        raise ValueError(f"rebirth makes {len(settings.stops) + 1} images of {num_patches} patches; use fewer stops")
    canvas = torch.randn(batch, channels, side * side, generator=generator).to(device)
    canvas = tied(canvas, settings)
    best = settings.iterate == "best"
    return InversionState(
        iteration=0,
        labels=labels.to(device),
        canvas=canvas,
        first=torch.zeros_like(canvas),
        second=torch.zeros_like(canvas),
        alive=all_patches(batch, num_patches, device),
        attention=canvas.new_empty(batch, 0),
        detached=torch.empty(batch, 0, _rebirth_size(num_patches, settings), dtype=torch.int64, device=device),
        jitter=_jitter(settings, side, generator)[:, None].to(device),
        trace=canvas.new_full((settings.inv_iters, 1), float("nan")),
        best=canvas.clone() if best else canvas.new_empty(0),
        best_loss=canvas.new_full((1 if best else 0,), float("inf")),
    )


def advance(
    model: nn.Module | Sequence[nn.Module],
    state: InversionState,
    settings: InversionSettings,
    iterations: int,
    *,
    student: nn.Module | None = None,
) -> None:
    """Runs up to ``iterations`` more, in place, never past ``inv_iters``. Does not wait for the device."""
    models = _models(model)
    _geometry(models, settings)
    if settings.w_adv and student is None:
        raise ValueError(f"w_adv={settings.w_adv} compares with a student; pass one, or set w_adv to 0")
    with frozen(*models, *([] if student is None else [student])):
        places = alive_places(models[0], state)
        for iteration in range(state.iteration, min(settings.inv_iters, state.iteration + iterations)):
            if iteration in settings.stops:
                stop_patches(models[0], state, settings)
                places = alive_places(models[0], state)
            gradient = pixel_gradient(models, student, state, settings)
            adam_step(state, gradient, places, settings)
            state.iteration = iteration + 1


def finish(model: nn.Module | Sequence[nn.Module], state: InversionState, settings: InversionSettings) -> Inverted:
    """Pixels and patch sets of a state that is done.

    ``high_set="loop"``: the patches alive at the end. ``"recompute"``: the most attended of a fresh pass over the
    whole finished image, one more than alive by SMI's count (D1); normalised, which SMI forgets (D2).
    ``low_set="alive_tail"`` divides the alive patches in two halves instead (D10).
    Raises FloatingPointError where pixels or losses are not finite: invert that batch again with another seed.
    """
    models = _models(model)
    channels, grid, patch = _geometry(models, settings)
    num_patches, side = grid * grid, grid * patch
    canvas = state.best if settings.iterate == "best" else state.canvas
    # A pixel that is not finite stays so, and everything else is bounded: one look at the end is enough.
    if not bool(canvas.isfinite().all()) or not bool(state.trace[: state.iteration].isfinite().all()):
        raise FloatingPointError("the inversion's loss was not finite; invert the batch again with another seed")
    mean, deviation = statistics(canvas, settings)
    images = (canvas * deviation + mean).clamp(0, 1).view(-1, channels, side, side)
    labels, high = state.labels, state.alive
    if settings.rebirth:
        sets = torch.cat([state.detached, state.alive[:, None]], dim=1)  # (B, S + 1, n)
        images, labels = (part.repeat_interleave(sets.shape[1], dim=0) for part in (images, labels))
        high = sets.flatten(0, 1)
    elif settings.high_set == "recompute":
        with frozen(*models), torch.no_grad():
            whole = canvas.view(-1, channels, side, side)
            attention = torch.stack([cls_attention(one, whole) for one in models]).mean(dim=0)
        high = attention.topk(recomputed_count(num_patches, settings.ratios), dim=1).indices + 1
    if settings.low_set == "alive_tail":
        half = -(-high.shape[1] // 2)
        return Inverted(images, labels, high[:, :half], high[:, half:])
    return Inverted(images, labels, high, complement(high, num_patches))


@contextlib.contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients for weights inside the block (D5); as they were after it."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    wanted = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    try:
        for model in models:
            model.eval().requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in wanted:
            parameter.requires_grad_(True)


def _jitter(settings: InversionSettings, side: int, generator: torch.Generator) -> Tensor:
    """Offsets and flip of every iteration ``(T, 3) int64``; none at a stop nor just before it (spec 3)."""
    reach, iterations = int(side * settings.jitter), settings.inv_iters
    offsets = torch.randint(-reach, reach + 1, (iterations, 2), generator=generator)
    flips = torch.randint(0, 2, (iterations, 1), generator=generator) * int(settings.flip)
    table = torch.cat([offsets, flips], dim=1)
    for stop in settings.stops:
        table[stop - 1 : stop + 1] = 0
    return table


def _rebirth_size(num_patches: int, settings: InversionSettings) -> int:
    return num_patches // (len(settings.stops) + 1) if settings.rebirth else 0


def _models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ValueError("there is no model to invert")
    return models


def _geometry(models: Sequence[nn.Module], settings: InversionSettings) -> tuple[int, int, int]:
    """Channels, patches along a side, pixels along a patch. Raises ValueError where the models or settings differ."""
    for model in models:
        check_vit(model)
    found = {(m.patch_embed.proj.in_channels, grid_of(m), patch_of(m), m.num_classes) for m in models}
    if len(found) != 1:
        raise ValueError(f"models differ in (channels, grid, patch, labels): {sorted(found)}")
    channels, grid, patch, _ = found.pop()
    if len(settings.mean) != channels:
        raise ValueError(f"mean and std have {len(settings.mean)} values, the model has {channels} channels")
    return channels, grid, patch


def _check_labels(labels: Tensor, num_labels: int) -> None:
    if labels.ndim == 1 and labels.dtype == torch.int64:
        if len(labels) and (labels.min() < 0 or labels.max() >= num_labels):
            raise ValueError(f"labels run from 0 to {num_labels - 1}, got {int(labels.min())} to {int(labels.max())}")
    elif labels.ndim != 2 or labels.shape[1] != num_labels:
        raise ValueError(f"labels are (B,) int64 or (B, {num_labels}), got {tuple(labels.shape)} {labels.dtype}")
    elif not bool(((labels == 1) | (labels == 0) | (labels == -1)).all()):
        raise ValueError("label vectors hold 1 present, 0 absent or -1 unknown")
    if not len(labels):
        raise ValueError("there are no labels to invert")
