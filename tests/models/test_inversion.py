"""Sparse inversion against a plain loop that rolls whole pictures and uses torch's Adam, and its edge cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer

from models.fedmitr_losses import js_divergence
from models.inversion import (
    InversionSettings,
    InversionState,
    advance,
    cls_attention,
    finish,
    invert,
    join,
    keep_counts,
    merge,
    shift_ids,
    start,
    total_variation_l2,
)
from models.inversion_step import clamped, stop_patches
from models.inversion_terms import total_variation_l1
from models.vit_tokens import patch_pixels, take

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmitr"
QUICK = InversionSettings(inv_iters=14, stops=(3, 6, 9), ratios=(0.3, 0.3, 0.3), mean=(0.5,) * 3, std=(0.25,) * 3)
STILL = {"jitter": 0.0, "flip": False, "inv_lr": 0.05}
"""What a network of random weights can be inverted with: it knows nothing of shifted pictures."""
LABELS = torch.tensor([0, 1, 2, 3, 3])


def tiny_vit(seed=0, *, side=16, patch=4, labels=4, scale=0.2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(
            img_size=side, patch_size=patch, embed_dim=16, depth=2, num_heads=2, num_classes=labels
        )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=scale)
    return model.eval()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def bits(inverted):
    return torch.cat([inverted.images.flatten(), inverted.high.flatten().float()])


# -- a plain loop -----------------------------------------------------------------------------------------------------


def plain_forward(model, images, keep):
    """All patches are embedded, then rows are taken; the blocks and the head are timm's."""
    tokens = model._pos_embed(model.patch_embed(images))
    rows = torch.cat([torch.zeros(len(keep), 1, dtype=torch.int64), keep], dim=1)
    tokens = take(tokens, rows)
    for block in model.blocks[:-1]:
        tokens = block(tokens)
    last = model.blocks[-1].attn
    batch, length, width = tokens.shape
    q, k, _ = (
        last.qkv(model.blocks[-1].norm1(tokens)).reshape(batch, length, 3, last.num_heads, -1).permute(2, 0, 3, 1, 4)
    )
    attention = (q @ k.transpose(2, 3) * (width // last.num_heads) ** -0.5).softmax(dim=3).mean(dim=1)[:, 0, 1:]
    return model.forward_head(model.norm(model.blocks[-1](tokens))), attention


def plain_invert(model, labels, settings, state, student=None):
    """The specification's loop in its order, with noise and jitter of ``state``; the final normalised canvas."""
    side, patch = model.patch_embed.img_size[0], model.patch_embed.patch_size[0]
    grid = side // patch
    mean, std = (torch.tensor(values)[:, None, None] for values in (settings.mean, settings.std))
    x = state.canvas.view(len(labels), -1, side, side).clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=settings.inv_lr, betas=settings.inv_betas, eps=1e-8)
    keep = torch.arange(1, grid * grid + 1).repeat(len(labels), 1)
    recorded = None
    for iteration in range(settings.inv_iters):
        if iteration in settings.stops:
            count = keep_counts(grid * grid, settings.ratios)[settings.stops.index(iteration)]
            keep = keep.gather(1, recorded.topk(count, dim=1).indices)
        down, right, flip = state.jitter[iteration, 0].tolist()
        seen = x.roll((down, right), dims=(2, 3))
        seen = seen.flip(3) if flip else seen
        ids = shift_ids(keep, grid, down, right, bool(flip), patch)
        logits, attention = plain_forward(model, seen, ids)
        recorded = attention.detach() if iteration + 1 in settings.stops else None
        loss = settings.w_ce * torch.nn.functional.cross_entropy(logits, labels)
        loss = loss + settings.w_tv2 * total_variation_l2(x) + settings.w_tv1 * total_variation_l1(x)
        loss = loss + settings.w_l2 * x.norm()
        if student is not None:
            loss = loss - settings.w_adv * js_divergence(plain_forward(student, seen, ids)[0], logits).mean()
        before = x.detach().clone()
        (x.grad,) = torch.autograd.grad(loss, x)
        adam.step()
        with torch.no_grad():
            x.copy_(torch.minimum(torch.maximum(x, -mean / std), (1 - mean) / std))
            if settings.freeze_stopped:
                is_alive = torch.zeros(len(labels), grid * grid, dtype=torch.bool).scatter_(1, keep - 1, True)
                pixels = is_alive.view(-1, 1, grid, grid).repeat_interleave(patch, 2).repeat_interleave(patch, 3)
                x.copy_(torch.where(pixels, x, before))
    return x.detach(), keep


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freeze_stopped": True},
        {"w_tv1": 0.3, "w_l2": 0.05, "w_tv2": 0.01},
        {"stops": (), "ratios": ()},
        {"jitter": 0.0, "flip": False},
        {"ratios": (0.0, 0.5, 0.0), "freeze_stopped": True, "w_tv2": 0.01},
    ],
)
def test_the_images_are_those_of_a_plain_loop(changes):
    settings, model = replace(QUICK, **changes), tiny_vit()
    state = start(model, LABELS, settings, seeded())
    expected, keep = plain_invert(model, LABELS, settings, start(model, LABELS, settings, seeded()))
    advance(model, state, settings, settings.inv_iters)
    # Adam divides by the gradient's size, so a pixel whose gradient is rounding moves by chance: few do.
    off = (state.canvas.view_as(expected) - expected).abs()
    assert off.mean() < 1e-4 and (off > 1e-3).float().mean() < 2e-3
    assert torch.equal(state.alive.sort(dim=1).values, keep.sort(dim=1).values)


def test_with_a_student_the_images_are_those_of_a_plain_loop_too():
    settings, model, student = replace(QUICK, w_adv=2.0), tiny_vit(), tiny_vit(1)
    state = start(model, LABELS, settings, seeded())
    expected, _ = plain_invert(model, LABELS, settings, start(model, LABELS, settings, seeded()), student)
    advance(model, state, settings, settings.inv_iters, student=student)
    assert (state.canvas.view_as(expected) - expected).abs().mean() < 1e-4
    with pytest.raises(ValueError, match=r"w_adv=2\.0 compares with a student"):
        invert(model, LABELS, settings, seeded())


def test_the_most_attended_patches_stay_as_in_the_authors_code():
    with np.load(GOLDEN / "case01_topk.npz") as arrays:
        data = {key: torch.from_numpy(arrays[key]) for key in arrays}
    model = tiny_vit(side=14, patch=2)  # 49 patches
    settings = replace(QUICK, stops=(1,), ratios=(0.89,))  # int(49 * 0.11) = 5
    state = start(model, torch.tensor([0, 1, 2]), settings, seeded())
    state.iteration, state.alive, state.attention = 1, data["abs_before"][:, 1:], data["attn"]
    stop_patches(model, state, settings)
    assert torch.equal(state.alive, data["abs_after"][:, 1:])


def test_the_clip_range_is_what_pixels_from_0_to_1_become():
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    settings = replace(QUICK, mean=mean, std=std)
    extreme = torch.tensor([[-99.0, 99.0]]).repeat(3, 1)[None]
    expected = torch.tensor(json.loads((GOLDEN / "case10_closed_forms.json").read_text())["clip_range_cifar10"])
    torch.testing.assert_close(clamped(extreme, settings)[0], expected)


# -- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"iterate": "best"}, {"freeze_stopped": True}, {"freeze_stopped": True, "rebirth": True}]
)
def test_a_run_that_stops_anywhere_goes_on_to_the_same_bits(changes):
    settings, model = replace(QUICK, **changes), tiny_vit()
    whole = bits(invert(model, LABELS, settings, seeded()))
    for pause in (2, 3, 7):  # just before a stop, with the attention in hand; at it; between two
        state = start(model, LABELS, settings, seeded())
        advance(model, state, settings, pause)
        held = {name: value.clone() for name, value in state.state_dict().items()}
        again = InversionState.from_state_dict(held)
        advance(model, again, settings, 99)
        assert again.iteration == settings.inv_iters
        assert torch.equal(bits(finish(model, again, settings)), whole)
    with pytest.raises(ValueError, match="differing names"):
        InversionState.from_state_dict({"canvas": torch.zeros(1)})


def test_one_seed_gives_one_pool_and_another_another():
    model = tiny_vit()
    first, second, other = (bits(invert(model, LABELS, QUICK, seeded(seed))) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_frozen_patches_keep_their_bits_and_others_move():
    model, settings = tiny_vit(), replace(QUICK, freeze_stopped=True, w_tv2=0.1)
    state = start(model, LABELS, settings, seeded())
    advance(model, state, settings, 10)  # one iteration after the last stop
    before, result = state.canvas.clone(), None
    advance(model, state, settings, 99)
    result = finish(model, state, settings)
    change = patch_pixels((state.canvas - before).view(5, 3, 16, 16), 4).abs()
    assert (take(change, result.low - 1) == 0).all()
    assert (take(change, result.high - 1) > 0).float().mean() > 0.5
    free = replace(settings, freeze_stopped=False)
    state = start(model, LABELS, free, seeded())
    advance(model, state, free, 10)
    before = state.canvas.clone()
    advance(model, state, free, 99)
    change = patch_pixels((state.canvas - before).view(5, 3, 16, 16), 4).abs()
    assert (take(change, finish(model, state, free).low - 1) > 0).any()


@pytest.mark.parametrize("changes", [{}, {"freeze_stopped": True}, {"iterate": "best", "w_tv2": 0.05}])
def test_merged_batches_are_what_they_would_have_been_alone(changes):
    settings, model = replace(QUICK, **changes), tiny_vit()
    labels = [torch.tensor([0, 1, 2]), torch.tensor([3, 3, 1])]
    alone = join([invert(model, part, settings, seeded(seed)) for seed, part in enumerate(labels)])
    states = [start(model, part, settings, seeded(seed)) for seed, part in enumerate(labels)]
    for state in states:
        advance(model, state, settings, 10)
    together = merge(states)
    advance(model, together, settings, 99)
    found = finish(model, together, settings)
    assert (found.images - alone.images).abs().mean() < 1e-4
    assert torch.equal(found.labels, alone.labels) and torch.equal(found.high, alone.high)
    assert together.trace.shape == (14, 2)
    with pytest.raises(ValueError, match="same iteration"):
        merge([together, start(model, labels[0], settings, seeded())])


def test_several_models_are_inverted_by_their_mean_logits():
    models = [tiny_vit(seed) for seed in range(3)]
    alone, thrice = (invert(given, LABELS, QUICK, seeded()) for given in (models[0], [models[0]] * 3))
    assert (alone.images - thrice.images).abs().mean() < 1e-4

    state = start(models, LABELS, replace(QUICK, stops=(), ratios=(), jitter=0.0, flip=False), seeded())
    x = state.canvas.view(5, 3, 16, 16).clone().requires_grad_()
    mean = torch.stack([model(x) for model in models]).mean(dim=0)
    loss = torch.nn.functional.cross_entropy(mean, LABELS) + 1e-4 * total_variation_l2(x)
    (expected,) = torch.autograd.grad(loss, x)
    settings = replace(QUICK, inv_iters=1, stops=(), ratios=(), jitter=0.0, flip=False, inv_betas=(0.0, 0.0))
    state.jitter = state.jitter[:1]
    advance(models, state, settings, 1)
    torch.testing.assert_close(state.first, expected.flatten(2), rtol=1e-4, atol=1e-7)  # beta 0: the gradient itself


def test_networks_are_left_as_they_were():
    model = tiny_vit().train()
    model.head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    invert(model, LABELS, QUICK, seeded())
    assert model.training and all(module.training for module in model.modules())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_label_loss_falls_and_pixels_are_pixels():
    settings, model = replace(QUICK, inv_iters=30, stops=(10, 20), ratios=(0.3, 0.3), **STILL), tiny_vit(scale=0.4)
    state = start(model, LABELS, settings, seeded())
    advance(model, state, settings, 30)
    result = finish(model, state, settings)
    assert state.trace[-5:].mean() < 0.8 * state.trace[0].item()
    assert result.images.min() >= 0 and result.images.max() <= 1 and result.images.shape == (5, 3, 16, 16)
    assert result.high.shape == (5, 7) and result.low.shape == (5, 9)


@given(
    stops=st.lists(st.integers(1, 6), max_size=3).map(lambda gaps: tuple(np.cumsum([g + 1 for g in gaps]).tolist())),
    ratio=st.sampled_from([0.0, 0.3, 0.5, 0.95]),
    batch=st.integers(1, 3),
    freeze=st.booleans(),
)
@examples(max_examples=8, deadline=None)
def test_high_and_low_patches_are_all_patches_for_any_schedule(stops, ratio, batch, freeze):
    last = stops[-1] if stops else 0
    settings = replace(QUICK, inv_iters=last + 2, stops=stops, ratios=(ratio,) * len(stops), freeze_stopped=freeze)
    result = invert(tiny_vit(), LABELS[:batch], settings, seeded())
    both = torch.cat([result.high, result.low], dim=1).sort(dim=1).values
    assert torch.equal(both, torch.arange(1, 17).repeat(batch, 1))
    assert result.high.shape[1] == (keep_counts(16, settings.ratios) or [16])[-1]


# -- switches ---------------------------------------------------------------------------------------------------------


def test_rebirth_makes_images_of_equal_and_disjoint_sets():
    settings, model = replace(QUICK, freeze_stopped=True, rebirth=True), tiny_vit(side=20)  # 25 patches in 4 sets: 6
    state = start(model, LABELS, settings, seeded())
    advance(model, state, settings, 5)
    finished, canvas = state.detached[:, 0], state.canvas.clone()
    advance(model, state, settings, 99)
    result = finish(model, state, settings)
    assert result.high.shape == (20, 6) and result.low.shape == (20, 19) and result.images.shape == (20, 3, 20, 20)
    assert torch.equal(result.labels, LABELS.repeat_interleave(4))
    sets = result.high.view(5, 24).sort(dim=1).values
    assert (sets[:, 1:] > sets[:, :-1]).all()
    change = patch_pixels((state.canvas - canvas).view(5, 3, 20, 20), 4)
    assert (take(change, finished - 1) == 0).all()  # a finished set keeps its pixels
    assert torch.equal(result.high[::4], finished)
    with pytest.raises(ValueError, match="4 images of 1 patches"):
        invert(tiny_vit(side=4), LABELS, settings, seeded())


def test_the_recomputed_set_is_that_of_the_normalised_image():
    settings, model = replace(QUICK, high_set="recompute"), tiny_vit()
    state = start(model, LABELS, settings, seeded())
    advance(model, state, settings, 99)
    result = finish(model, state, settings)
    attention = cls_attention(model, (result.images - 0.5) / 0.25)
    count = int(17 * 0.7**3)
    assert torch.equal(result.high.sort(dim=1).values, (attention.topk(count).indices + 1).sort(dim=1).values)
    assert result.low.shape == (5, 16 - count)


def test_the_alive_tail_is_the_half_that_was_attended_least():
    settings, model = replace(QUICK, low_set="alive_tail"), tiny_vit()
    whole, halves = invert(model, LABELS, QUICK, seeded()), invert(model, LABELS, settings, seeded())
    assert torch.equal(torch.cat([halves.high, halves.low], dim=1), whole.high)
    assert halves.high.shape[1] - halves.low.shape[1] in (0, 1)


def test_the_best_iterate_has_the_lowest_loss_and_is_a_copy():
    settings, model = replace(QUICK, iterate="best", inv_lr=1.0, w_tv2=0.0, jitter=0.0, flip=False), tiny_vit()
    state = start(model, LABELS, settings, seeded())
    advance(model, state, settings, 99)
    assert state.best_loss.item() == state.trace[9:].min().item()  # from the last stop on
    assert state.best.data_ptr() != state.canvas.data_ptr() and not torch.equal(state.best, state.canvas)


def test_tied_channels_make_grey_pictures():
    settings = replace(QUICK, tie_channels=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    images = invert(tiny_vit(), LABELS, settings, seeded()).images
    assert (images.max(dim=1).values - images.min(dim=1).values).max() < 1e-6 and images.std() > 0.1


def test_one_channel_and_half_precision_work():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=8, patch_size=4, in_chans=1, embed_dim=8, depth=1, num_heads=1, num_classes=2
        )
    settings = replace(QUICK, mean=(0.5,), std=(0.5,), bf16=True)
    result = invert(model, torch.tensor([0, 1]), settings, seeded())
    assert result.images.shape == (2, 1, 8, 8) and result.images.dtype == torch.float32


def test_label_vectors_are_inverted_by_bce_and_unknown_labels_pull_nothing():
    model, settings = tiny_vit(scale=0.4), replace(QUICK, inv_iters=30, stops=(), ratios=(), **STILL)
    vectors = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.int8)
    state = start(model, vectors, settings, seeded())
    advance(model, state, settings, 99)
    assert state.trace[-5:].mean() < 0.9 * state.trace[0].item()
    unknown = torch.full((3, 4), -1, dtype=torch.int8)
    still = start(model, unknown, replace(settings, w_tv2=0.0), seeded())
    before = still.canvas.clone()
    advance(model, still, replace(settings, w_tv2=0.0), 1)
    assert torch.equal(still.canvas, clamped(before, settings))


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stops": (0, 6, 9)}, "at least 1"),
        ({"stops": (3, 4, 9)}, "increase by at least 2"),
        ({"stops": (9, 6, 3)}, "increase by at least 2"),
        ({"stops": (3, 6, 14)}, "before inv_iters=14"),
        ({"ratios": (0.3, 0.3)}, "3 stops and 2 ratios"),
        ({"ratios": (0.3, 0.3, 1.0)}, "0 to below 1"),
        ({"inv_iters": 0}, "at least 1, got 0.*; the last of stops"),
        ({"inv_lr": -1.0, "jitter": 1.0}, "inv_lr.*; jitter"),
        ({"w_tv2": float("nan")}, "w_tv2"),
        ({"inv_betas": (0.5, 1.0)}, "inv_betas"),
        ({"std": (0.0, 1.0, 1.0)}, "std positive"),
        ({"iterate": "first"}, "there are last, best"),
        ({"rebirth": True}, "freeze_stopped=True"),
        ({"rebirth": True, "freeze_stopped": True, "iterate": "best"}, "iterate='last'"),
        ({"rebirth": True, "freeze_stopped": True, "stops": (), "ratios": ()}, "at least one stop"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(QUICK, **changes)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 4]), "0 to 3, got 0 to 4"),
        (torch.tensor([-1]), "got -1"),
        (torch.tensor([0.0]), "int64"),
        (torch.zeros(2, 3), r"\(B, 4\)"),
        (torch.full((1, 4), 2), "1 present, 0 absent or -1"),
        (torch.empty(0, dtype=torch.int64), "no labels"),
    ],
)
def test_labels_that_the_model_does_not_have_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        invert(tiny_vit(), labels, QUICK, seeded())


def test_models_and_settings_must_fit():
    with pytest.raises(ValueError, match="models differ"):
        invert([tiny_vit(), tiny_vit(labels=5)], LABELS, QUICK, seeded())
    with pytest.raises(ValueError, match="1 values, the model has 3"):
        invert(tiny_vit(), LABELS, replace(QUICK, mean=(0.5,), std=(0.5,)), seeded())
    with pytest.raises(ValueError, match="no model"):
        invert([], LABELS, QUICK, seeded())


def test_a_loss_that_is_not_finite_is_an_error():
    model = tiny_vit()
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(FloatingPointError, match="another seed"):
        invert(model, LABELS, QUICK, seeded())
