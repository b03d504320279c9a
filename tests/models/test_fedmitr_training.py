"""The global model's training against plain loops, its ablations, and the whole method on two toy sites."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from models.fedmitr import (
    OBJECTIVES,
    DistilSettings,
    Teacher,
    batch_loss,
    cached_teacher,
    class_count_weights,
    label_loss,
    optimiser_of,
    relabel_loss,
    sample_targets,
    train_epoch,
)
from models.fedmitr_losses import soft_loss
from models.inversion import InversionSettings, Inverted, forward_subset, invert, join
from models.vit_tokens import complement, subset_logits

HALF = (0.5,) * 3
SETTINGS = DistilSettings(kd_epochs=4, kd_batch=3, kd_lr=0.05, mean=HALF, std=HALF)


def tiny_vit(seed=0, *, side=16, labels=4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(img_size=side, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=labels)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def pool_of(size=7, high=6, multilabel=False):
    generator = torch.Generator().manual_seed(0)
    keep = torch.stack([torch.randperm(16, generator=generator)[:high] + 1 for _ in range(size)])
    labels = torch.arange(size) % 4
    if multilabel:
        labels = torch.randint(-1, 2, (size, 4), generator=generator)
    return Inverted(torch.rand(size, 3, 16, 16, generator=generator), labels, keep, complement(keep, 16))


def teacher_of(pool, view, flip=True):
    if view is None:
        return None
    teachers = [Teacher(tiny_vit(seed), HALF, HALF) for seed in (5, 6)]
    return cached_teacher(teachers, torch.ones(2), pool, view, flip=flip)


# -- reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_of_a_batch_is_written_out(objective):
    pool, student, settings = pool_of(), tiny_vit().eval(), replace(SETTINGS, objective=objective, kd_lambda=0.7)
    teacher = teacher_of(pool, OBJECTIVES[objective], flip=False)
    seen = None if teacher is None else teacher[0].float()
    batch = pool._replace(images=(pool.images - 0.5) / 0.5)
    x, y, high, low = batch
    ce = torch.nn.functional.cross_entropy
    on_high, on_low = forward_subset(student, x, high), forward_subset(student, x, low)
    if objective == "token":
        tokens = student.head(student.forward_features(x)[:, 1:])
        taken = torch.stack([row[ids - 1] for row, ids in zip(tokens, high, strict=True)])
        rest = torch.stack([row[ids - 1] for row, ids in zip(tokens, low, strict=True)])
        expected = ce(student(x), y) + ce(taken.flatten(0, 1), y.repeat_interleave(6))
        expected = expected + 0.7 * soft_loss(rest, seen, 4.0).mean()
    else:
        expected = {
            "subset": lambda: ce(on_high, y) + 0.7 * soft_loss(on_low, seen, 4.0).mean(),
            "hard_low": lambda: ce(on_high, y) + 0.7 * ce(on_low, y),
            "high_only": lambda: ce(on_high, y),
            "whole_kd": lambda: soft_loss(student(x), seen, 4.0).mean(),
            "whole_ce": lambda: ce(student(x), y),
        }[objective]()
    torch.testing.assert_close(batch_loss(student, batch, seen, settings), expected, rtol=1e-4, atol=1e-5)


def test_an_epoch_is_a_plain_loop_of_sgd():
    pool, settings = pool_of(), replace(SETTINGS, kd_clip=0.5)
    teacher = teacher_of(pool, "low")
    student, other = tiny_vit(), tiny_vit()
    optimiser = optimiser_of(student, settings)
    losses = [
        train_epoch(student, optimiser, pool, teacher, settings, epoch, torch.Generator().manual_seed(epoch))
        for epoch in range(2)
    ]
    plain = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        generator = torch.Generator().manual_seed(epoch)
        order, flips = torch.randperm(7, generator=generator), torch.rand(7, generator=generator) < 0.5
        plain.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / 4)) / 2
        total = 0.0
        for rows in order.split(3):
            images, low, high = [], [], []
            for row in rows.tolist():
                turned = bool(flips[row])
                images.append(pool.images[row].flip(2) if turned else pool.images[row])
                for ids, out in ((pool.low[row], low), (pool.high[row], high)):
                    out.append((ids - 1) // 4 * 4 + 3 - (ids - 1) % 4 + 1 if turned else ids)
            x = (torch.stack(images) - 0.5) / 0.5
            seen = torch.stack([teacher[int(flips[row]), row] for row in rows.tolist()]).float()
            loss = relabel_loss(
                forward_subset(other, x, torch.stack(high)),
                pool.labels[rows],
                forward_subset(other, x, torch.stack(low)),
                seen,
                4.0,
                1.0,
            )
            plain.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            plain.step()
            total += loss.item() * len(rows)
        assert losses[epoch] == pytest.approx(total / 7, rel=1e-4)
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-5)


# -- properties -------------------------------------------------------------------------------------------------------


def test_a_run_that_stops_between_epochs_goes_on_to_the_same_bits():
    pool = pool_of()
    teacher = teacher_of(pool, "low")
    student = tiny_vit()
    optimiser = optimiser_of(student, SETTINGS)
    for epoch in range(3):
        if epoch == 1:
            held = copy.deepcopy((student.state_dict(), optimiser.state_dict()))
        train_epoch(student, optimiser, pool, teacher, SETTINGS, epoch, torch.Generator().manual_seed(epoch))
    again = tiny_vit(9)
    again.load_state_dict(held[0])
    resumed = optimiser_of(again, SETTINGS)
    resumed.load_state_dict(held[1])
    for epoch in (1, 2):
        train_epoch(again, resumed, pool, teacher, SETTINGS, epoch, torch.Generator().manual_seed(epoch))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in student.state_dict().items())


def test_the_head_alone_is_trained_where_asked():
    pool, student = pool_of(), tiny_vit()
    before = copy.deepcopy(student.state_dict())
    settings = replace(SETTINGS, train_scope="head", flip=False)
    teacher, optimiser = teacher_of(pool, "low", False), optimiser_of(student, settings)
    train_epoch(student, optimiser, pool, teacher, settings, 0, torch.Generator())
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("objective", ["subset", "hard_low", "token", "whole_kd", "whole_ce"])
def test_label_vectors_train_by_every_objective(objective):
    pool, settings = pool_of(multilabel=True), replace(SETTINGS, objective=objective)
    student = tiny_vit()
    loss = train_epoch(
        student,
        optimiser_of(student, settings),
        pool,
        teacher_of(pool, OBJECTIVES[objective]),
        settings,
        0,
        torch.Generator(),
    )
    assert math.isfinite(loss) and loss > 0


def test_without_low_patches_the_loss_is_ce_on_all():
    pool = pool_of(high=16)
    student = tiny_vit().eval()
    batch = pool._replace(images=(pool.images - 0.5) / 0.5)
    found = batch_loss(student, batch, torch.zeros(7, 4), SETTINGS)
    torch.testing.assert_close(found, label_loss(student(batch.images), batch.labels).mean())


# -- bad input --------------------------------------------------------------------------------------------------------


def test_contradictions_are_refused_together():
    with pytest.raises(ValueError, match=r"objective='x' is unknown.*train_scope='y'.*kd_T is positive.*kd_batch"):
        DistilSettings(objective="x", train_scope="y", kd_T=0, kd_batch=0)
    with pytest.raises(ValueError, match=r"kd_lambda is at least 0, got -1.*kd_momentum"):
        DistilSettings(kd_lambda=-1, kd_momentum=1.0)


def test_a_cached_teacher_of_another_kind_is_refused():
    pool, student = pool_of(), tiny_vit()
    optimiser = optimiser_of(student, SETTINGS)
    with pytest.raises(ValueError, match="needs the teacher's outputs on 'low'"):
        train_epoch(student, optimiser, pool, None, SETTINGS, 0, torch.Generator())
    with pytest.raises(ValueError, match="flip=True and the pool need"):
        train_epoch(student, optimiser, pool, teacher_of(pool, "low", False), SETTINGS, 0, torch.Generator())


# -- the method on two toy sites --------------------------------------------------------------------------------------


def toy(size, labels, seed):
    """Pictures whose class is the bright quarter, 16 x 16 pixels in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.tensor(labels)[torch.randint(0, len(labels), (size,), generator=generator)]
    images = 0.35 * torch.rand(size, 3, 16, 16, generator=generator)
    for quarter in range(4):
        y, x = 8 * (quarter // 2), 8 * (quarter % 2)
        images[classes == quarter, :, y : y + 8, x : x + 8] += 0.6
    return images, classes


@pytest.fixture(scope="module")
def two_sites():
    """Two models that know classes 0 to 2 and 1 to 3, from the same initial weights, and their class counts."""
    models, counts = [], torch.zeros(2, 4, dtype=torch.int64)
    for site, labels in enumerate(([0, 1, 2], [1, 2, 3])):
        model = tiny_vit()
        images, classes = toy(240, labels, site)
        counts[site] = torch.bincount(classes, minlength=4)
        adam = torch.optim.Adam(model.parameters(), lr=0.003)
        for _ in range(15):
            for x, y in zip(images.split(40), classes.split(40), strict=True):
                adam.zero_grad()
                torch.nn.functional.cross_entropy(model((x - 0.5) / 0.5), y).backward()
                adam.step()
        models.append(model.eval())
    return models, counts


def test_the_models_read_their_images_as_the_labels_asked_for(two_sites):
    models, counts = two_sites
    targets = sample_targets("balanced", 16, counts, torch.Generator().manual_seed(0))
    settings = InversionSettings(
        inv_iters=30, inv_lr=0.05, stops=(10, 20), ratios=(0.2, 0.2), mean=HALF, std=HALF, jitter=0.0, flip=False
    )
    shards = []
    for site, model in enumerate(models):
        shard = invert(model, targets.labels[targets.sites == site], settings, torch.Generator().manual_seed(site))
        read = subset_logits(model, (shard.images - 0.5) / 0.5, shard.high).argmax(dim=1)
        assert (read == shard.labels).float().mean() > 0.9
        shards.append(shard)
    pool = join(shards)
    assert len(pool.images) == 16 and torch.equal(pool.labels, targets.labels)


def test_a_global_model_learns_what_two_sites_know_apart(two_sites):
    # Stages B and C alone, on real pictures: what they give does not depend on how good an inversion is.
    models, counts = two_sites
    images, classes = toy(64, [0, 1, 2, 3], 7)
    generator = torch.Generator().manual_seed(0)
    keep = torch.stack([torch.randperm(16, generator=generator)[:10] + 1 for _ in range(64)])
    pool = Inverted(images, classes, keep, complement(keep, 16))
    teachers = [Teacher(model, HALF, HALF) for model in models]

    whole = {
        name: cached_teacher(teachers, weights, pool, "whole", flip=False)[0].argmax(dim=1)
        for name, weights in (("uniform", torch.ones(2)), ("class_count", class_count_weights(counts)))
    }
    right = {name: (read == classes).float().mean().item() for name, read in whole.items()}
    assert right["class_count"] > 0.95 > 0.8 > right["uniform"]  # a site says nothing sound of a class it never saw

    distil = replace(SETTINGS, kd_epochs=8, kd_batch=16, kd_lr=0.01, flip=False)
    teacher = cached_teacher(teachers, class_count_weights(counts), pool, flip=False)
    student = tiny_vit()
    first, second = (model.state_dict() for model in models)
    student.load_state_dict({name: (value + second[name]) / 2 for name, value in first.items()})
    optimiser = optimiser_of(student, distil)
    for epoch in range(distil.kd_epochs):
        train_epoch(student, optimiser, pool, teacher, distil, epoch, torch.Generator().manual_seed(epoch))
    fresh, wanted = toy(200, [0, 1, 2, 3], 9)
    with torch.no_grad():
        read = {
            name: (model.eval()((fresh - 0.5) / 0.5).argmax(dim=1) == wanted).float().mean().item()
            for name, model in (("student", student), ("first", models[0]), ("second", models[1]))
        }
    assert read["student"] > 0.9 > max(read["first"], read["second"])
