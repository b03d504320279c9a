"""FedMITR's losses and ensembles against the authors' numbers, slow float64 sums and closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer

from models.fedmitr import (
    Teacher,
    cached_teacher,
    class_count_weights,
    ensemble_logits,
    js_divergence,
    kd_loss,
    label_count_weights,
    label_loss,
    relabel_loss,
    token_relabel_loss,
)
from models.fedmitr_losses import soft_label_loss, soft_loss
from models.inversion import Inverted, forward_subset, shift_ids
from models.vit_tokens import complement

GOLDEN = Path(__file__).parents[1] / "golden" / "fedmitr"


def golden():
    with np.load(GOLDEN / "case04_losses.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def drawn(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slow_kl(teacher, student, temperature):
    """T^2 sum p log(p / q) of two lists of logits, float64."""
    p = np.exp(np.array(teacher, dtype=np.float64) / temperature)
    q = np.exp(np.array(student, dtype=np.float64) / temperature)
    p, q = p / p.sum(), q / q.sum()
    return temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def slow_ce(logits, label):
    logits = np.array(logits, dtype=np.float64)
    return math.log(np.exp(logits).sum()) - logits[label]


# -- reference --------------------------------------------------------------------------------------------------------


def test_ensembles_are_the_authors():
    data = golden()
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(ensemble_logits(data["z"], None), data["ens_uniform"], **close)
    scale = data["w"].sum()  # the authors' weighted sum is not divided by the sum of its weights
    found = ensemble_logits(data["z"], data["w"])
    is_sum = torch.allclose(found * scale, data["ens_weighted"], **close)
    assert is_sum or torch.allclose(found, data["ens_weighted"], **close)


def test_distillation_is_the_authors_at_every_temperature():
    data = golden()
    for temperature, expected in zip(data["T"].tolist(), data["kl_T"].tolist(), strict=True):
        assert kd_loss(data["student"], data["ens_uniform"], temperature).item() == pytest.approx(expected, rel=1e-4)


def test_js_is_the_authors():
    data = golden()
    found = js_divergence(data["student"], data["ens_uniform"], 3.0).mean().item()
    assert found == pytest.approx(data["js_T3"].item(), rel=1e-4)


def test_cross_entropy_is_the_authors():
    data = golden()
    assert label_loss(data["student"], data["y"]).mean().item() == pytest.approx(data["ce"].item(), rel=1e-5)


def test_relabel_loss_is_that_of_a_slow_sum():
    high, low, teacher, labels = drawn(5, 4), drawn(5, 4, seed=1), drawn(5, 4, seed=2), torch.tensor([0, 3, 1, 1, 2])
    found = relabel_loss(high, labels, low, teacher, 4.0, 0.7)
    hard = [slow_ce(row, label) for row, label in zip(high.tolist(), labels.tolist(), strict=True)]
    soft = [slow_kl(p, q, 4.0) for p, q in zip(teacher.tolist(), low.tolist(), strict=True)]
    assert found.item() == pytest.approx(np.mean(hard) + 0.7 * np.mean(soft), rel=1e-5)
    without = relabel_loss(
        high, labels, low, teacher, 4.0, 0.7, has_high=labels != 3, has_low=torch.tensor([1, 0, 0, 1, 0]) == 1
    )
    kept = [hard[0], *hard[2:]]
    assert without.item() == pytest.approx(np.mean(kept) + 0.7 * (soft[0] + soft[3]) / 2, rel=1e-5)


def test_token_loss_is_that_of_a_slow_sum():
    classes, tokens, teacher = drawn(3, 4), drawn(3, 5, 4, seed=1), drawn(3, 5, 4, seed=2)
    labels = torch.tensor([2, 0, 3])
    is_high = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]) == 1
    is_low = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]) == 1
    found = token_relabel_loss(classes, labels, tokens, teacher, is_high, is_low, 3.0, 0.5)
    hard = [slow_ce(tokens[b, i].tolist(), labels[b]) for b, i in is_high.nonzero().tolist()]
    soft = [slow_kl(teacher[b, i].tolist(), tokens[b, i].tolist(), 3.0) for b, i in is_low.nonzero().tolist()]
    first = [slow_ce(row, label) for row, label in zip(classes.tolist(), labels.tolist(), strict=True)]
    assert found.item() == pytest.approx(np.mean(first) + np.mean(hard) + 0.5 * np.mean(soft), rel=1e-5)


def test_multi_label_losses_are_those_of_a_slow_sum():
    logits, teacher = drawn(3, 4), drawn(3, 4, seed=1)
    labels = torch.tensor([[1, 0, -1, 0], [0, 0, 1, 1], [-1, -1, -1, -1]], dtype=torch.int8)

    def sigmoid(value):
        return 1 / (1 + math.exp(-value))

    for row in range(3):
        hard = [
            -math.log(sigmoid(logit) if label == 1 else sigmoid(-logit))
            for logit, label in zip(logits[row].tolist(), labels[row].tolist(), strict=True)
            if label >= 0
        ]
        assert label_loss(logits, labels)[row].item() == pytest.approx(sum(hard), rel=1e-5)
        soft = 0.0
        for given_logit, found_logit in zip(teacher[row].tolist(), logits[row].tolist(), strict=True):
            p, q = sigmoid(given_logit / 2), sigmoid(found_logit / 2)
            soft += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        assert soft_label_loss(logits, teacher, 2.0)[row].item() == pytest.approx(4 * soft, rel=1e-4)
    found = relabel_loss(logits, labels, logits, teacher, 2.0, 1.0)
    expected = label_loss(logits, labels).mean() + soft_label_loss(logits, teacher, 2.0).mean()
    torch.testing.assert_close(found, expected)


# -- properties and closed forms --------------------------------------------------------------------------------------


@given(seed=st.integers(0, 500), temperature=st.sampled_from([0.5, 1.0, 4.0, 20.0]), labels=st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_distillation_is_at_least_zero_and_zero_for_equals(seed, temperature, labels):
    student, teacher = drawn(4, labels, seed=seed).requires_grad_(), drawn(4, labels, seed=seed + 1)
    for loss in (soft_loss, soft_label_loss):
        assert (loss(student, teacher, temperature) > -1e-5).all()
        same = loss(student, student.detach(), temperature).sum()
        (gradient,) = torch.autograd.grad(same, student)
        assert same.item() == pytest.approx(0, abs=1e-5) and gradient.abs().max() < 1e-5


def test_distillation_tends_to_a_square_for_large_temperatures():
    student, teacher = drawn(3, 5), drawn(3, 5, seed=1)
    centred = (teacher - teacher.mean(dim=1, keepdim=True)) - (student - student.mean(dim=1, keepdim=True))
    limit = centred.double().square().sum(dim=1) / (2 * 5)
    torch.testing.assert_close(soft_loss(student.double(), teacher.double(), 100.0).double(), limit, rtol=0.05, atol=0)


def test_no_gradient_reaches_the_teacher():
    student, teacher = drawn(2, 3).requires_grad_(), drawn(2, 3, seed=1).requires_grad_()
    (relabel_loss(student, torch.tensor([0, 1]), student, teacher, 4.0, 1.0)).backward()
    assert teacher.grad is None and student.grad.abs().sum() > 0


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_extreme_logits_are_finite_in_value_and_gradient(logit):
    student = torch.tensor([[logit, 0.0, 1.0]]).requires_grad_()
    for labels in (torch.tensor([2]), torch.tensor([[0, 1, 1]])):
        loss = relabel_loss(student, labels, student, -student.detach(), 4.0, 1.0)
        assert loss.isfinite() and torch.autograd.grad(loss, student)[0].isfinite().all()


def test_terms_without_rows_are_zero_and_never_nan():
    high, labels = drawn(2, 3), torch.tensor([0, 1])
    ce = label_loss(high, labels).mean()
    never = torch.zeros(2, dtype=torch.bool)
    torch.testing.assert_close(relabel_loss(high, labels, None, None, 4.0, 1.0), ce)
    torch.testing.assert_close(relabel_loss(high, labels, high, -high, 4.0, 0.0), ce)
    torch.testing.assert_close(relabel_loss(high, labels, high, -high, 4.0, 1.0, has_low=never), ce)
    assert relabel_loss(high, labels, high, -high, 4.0, 0.0, has_high=never).item() == 0
    empty = relabel_loss(
        torch.empty(0, 3), torch.empty(0, dtype=torch.int64), torch.empty(0, 3), torch.empty(0, 3), 4, 1
    )
    assert empty.item() == 0
    no_token, all_tokens = torch.zeros(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    tokens = drawn(2, 4, 3, seed=1)
    found = token_relabel_loss(high, labels, tokens, -tokens, all_tokens, no_token, 4.0, 1.0)
    expected = ce + label_loss(tokens.reshape(8, 3), labels.repeat_interleave(4)).mean()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(token_relabel_loss(high, labels, tokens, tokens, no_token, no_token, 4.0, 1.0), ce)


def test_low_patches_without_a_teacher_and_temperatures_of_zero_are_refused():
    with pytest.raises(ValueError, match="need the teachers' logits"):
        relabel_loss(drawn(1, 2), torch.tensor([0]), drawn(1, 2), None, 4.0, 1.0)
    with pytest.raises(ValueError, match="positive, got 0"):
        kd_loss(drawn(1, 2), drawn(1, 2), 0)


def test_soft_labels_take_the_noise_of_hard_ones_out_of_the_gradient():
    # E_{y ~ q} |p - e_y|^2 - |p - q|^2 = 1 - |q|^2: what one pseudo-label adds to the gradient of the logits.
    noise = json.loads((GOLDEN / "case10_closed_forms.json").read_text())["label_noise"]
    p, q = (torch.tensor(noise[key], dtype=torch.float64) for key in "pq")
    logits = p.log().repeat(len(q), 1).float().requires_grad_()
    hard = label_loss(logits, torch.arange(len(q))).sum()
    (each,) = torch.autograd.grad(hard, logits)
    expected_hard = (q * each.double().square().sum(dim=1)).sum().item()
    (soft,) = torch.autograd.grad(soft_loss(logits, q.log().expand(len(q), -1).float(), 1.0)[0], logits)
    gap = expected_hard - soft.double().square().sum().item()
    assert expected_hard == pytest.approx(noise["E_hard"], rel=1e-5)
    assert gap == pytest.approx(noise["gap"], rel=1e-5) == pytest.approx(1 - q.square().sum().item(), rel=1e-5)
    assert each.norm(dim=1).max() <= math.sqrt(2)


# -- ensembles --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 500), sites=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_identical_models_are_their_own_ensemble_and_scale_does_not_matter(seed, sites):
    one = drawn(3, 4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(sites, generator=generator) + 0.1
    torch.testing.assert_close(ensemble_logits(one.expand(sites, -1, -1), weights), one)
    logits = drawn(sites, 3, 4, seed=seed)
    torch.testing.assert_close(ensemble_logits(logits, 17 * weights), ensemble_logits(logits, weights))
    order = torch.randperm(sites, generator=generator)
    torch.testing.assert_close(ensemble_logits(logits[order], weights[order]), ensemble_logits(logits, weights))
    by_class = weights[:, None].expand(sites, 4)
    torch.testing.assert_close(ensemble_logits(logits, by_class), ensemble_logits(logits, weights))
    by_sample = weights[:, None, None].expand(sites, 3, 1)
    torch.testing.assert_close(ensemble_logits(logits, by_sample), ensemble_logits(logits, weights))


def test_class_counts_weigh_each_column_and_an_unseen_class_is_shared():
    weights = class_count_weights(torch.tensor([[30, 0, 0], [10, 5, 0]]))
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.0, 0.5], [0.25, 1.0, 0.5]]))
    torch.testing.assert_close(weights.sum(dim=0), torch.ones(3))
    logits = torch.tensor([[[4.0, 4.0, 4.0]], [[0.0, 1.0, 2.0]]])
    torch.testing.assert_close(ensemble_logits(logits, weights), torch.tensor([[3.0, 1.0, 3.0]]))
    of_label = label_count_weights(torch.tensor([[30, 0, 0], [10, 5, 0]]), torch.tensor([0]))
    torch.testing.assert_close(ensemble_logits(logits, of_label), torch.tensor([[3.0, 3.25, 3.5]]))


@pytest.mark.parametrize(
    "weights", [torch.tensor([0.0, 0.0]), torch.tensor([1.0, -0.5]), torch.tensor([1.0, float("nan")]), torch.ones(3)]
)
def test_weights_that_make_no_mean_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        ensemble_logits(drawn(2, 3, 4), weights)


def test_counts_that_are_none_are_refused():
    with pytest.raises(ValueError, match="suppressed ones 0"):
        class_count_weights(torch.tensor([[1, -1]]))


# -- the cached teacher -----------------------------------------------------------------------------------------------


def tiny_vit(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def pool_of(size=5, high=6):
    generator = torch.Generator().manual_seed(0)
    keep = torch.stack([torch.randperm(16, generator=generator)[:high] + 1 for _ in range(size)])
    images = torch.rand(size, 3, 16, 16, generator=generator)
    return Inverted(images, torch.arange(size) % 3, keep, complement(keep, 16))


TEACHERS = [Teacher(tiny_vit(seed), (0.1 * seed,) * 3, (0.5,) * 3) for seed in range(3)]


@pytest.mark.parametrize("view", ["low", "high", "whole", "tokens"])
@pytest.mark.parametrize("kind", ["site", "class", "sample"])
def test_the_cached_teacher_is_the_ensemble_of_every_view(view, kind):
    pool = pool_of()
    weights = {"site": drawn(3).abs(), "class": drawn(3, 3).abs(), "sample": drawn(3, 5, 1).abs()}[kind]
    found = cached_teacher((teacher for teacher in TEACHERS), weights, pool, view, batch_size=2)
    assert found.dtype == torch.float16 and len(found) == 2
    assert all(teacher.model.training for teacher in TEACHERS)
    for flipped in (False, True):
        images = pool.images.flip(3) if flipped else pool.images
        low, high = (shift_ids(ids, 4, 0, 0, flipped, 4) for ids in (pool.low, pool.high))
        logits = []
        for model, mean, std in TEACHERS:
            x = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
            model.eval()
            with torch.no_grad():
                if view == "tokens":
                    every = model.head(model.forward_features(x)[:, 1:])
                    logits.append(torch.stack([row[ids - 1] for row, ids in zip(every, low, strict=True)]))
                elif view == "whole":
                    logits.append(model(x))
                else:
                    logits.append(forward_subset(model, x, {"low": low, "high": high}[view]))
            model.train()
        if view == "tokens" and kind == "sample":
            expected = torch.stack([ensemble_logits(torch.stack(logits)[:, :, i], weights) for i in range(10)], dim=1)
        elif view == "tokens":
            expected = ensemble_logits(torch.stack(logits).flatten(1, 2), weights).view(5, 10, 3)
        else:
            expected = ensemble_logits(torch.stack(logits), weights)
        torch.testing.assert_close(found[int(flipped)].float(), expected, rtol=2e-3, atol=2e-3)


def test_the_cached_teacher_takes_one_weight_a_teacher_and_known_views():
    with pytest.raises(ValueError, match="more teachers than the 2"):
        cached_teacher(TEACHERS, torch.ones(2), pool_of())
    with pytest.raises(ValueError, match="got 1 teachers and 3 weights"):
        cached_teacher(TEACHERS[:1], torch.ones(3), pool_of())
    with pytest.raises(ValueError, match="there are low, high"):
        cached_teacher(TEACHERS, torch.ones(3), pool_of(), "middle")
    assert len(cached_teacher(TEACHERS, torch.ones(3), pool_of(), flip=False)) == 1
