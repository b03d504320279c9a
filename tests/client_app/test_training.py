"""Local training: which samples are used, in what batches, and that nothing but the seed decides the result."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from client_app import training
from client_app.training import (
    Diverged,
    batch_loss,
    batches,
    change,
    fit,
    load_batch,
    network_for,
    optimiser_for,
    usable,
)
from datasets.records import SiteData, Split
from federation import wire

ROOT = Path(__file__).resolve().parents[2]


def start(job, labels=("cat", "dog")):
    torch.manual_seed(0)
    return network_for(labels, job.settings)


def with_train(site, images, targets):
    """The same site with another training split."""
    splits = {**site.data.splits, "train": Split(images, targets)}
    data = SiteData(site.name, site.data.labels, site.data.task, splits, site.data.checksum)
    return replace(site, data=data)


def weights(network):
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# -- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [
        (8, 4, [4, 4]),
        (9, 4, [4, 5]),  # batch + 1: BatchNorm cannot train on the one left over
        (5, 4, [5]),
        (10, 4, [4, 4, 2]),
        (4, 4, [4]),
        (3, 4, [3]),
        (1, 4, [1]),
        (1, 1, [1]),
        (3, 1, [1, 2]),
    ],
)
def test_a_last_batch_of_one_is_joined_to_the_one_before(count, size, sizes):
    parts = list(batches(count, size, torch.Generator().manual_seed(0)))
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(count))


def test_batches_are_shuffled_anew_by_the_generator():
    def order(seed):
        return torch.cat(list(batches(20, 4, torch.Generator().manual_seed(seed)))).tolist()

    assert order(1) == order(1) != order(2)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.cat(list(batches(20, 4, generator))).tolist() for _ in range(2))
    assert first != second


# -- which samples --------------------------------------------------------------------------------------------------


def test_rows_without_a_known_label_are_neither_counted_nor_seen(opened, monkeypatch):
    site, job = opened()
    images, targets = site.data.splits["train"].images, site.data.splits["train"].targets.copy()
    targets[[1, 4]] = -1
    assert usable(Split(images, targets)).tolist() == [0, 2, 3, 5, 6, 7, 8]
    blackened = images.copy()
    blackened[[1, 4]] = 255 - blackened[[1, 4]]
    results = []
    for pixels in (images, blackened):
        network = start(job)
        done = fit(network, with_train(site, pixels, targets), job)
        assert done.num_examples == 7
        results.append(weights(network))
    assert same(*results)


def test_one_known_label_is_enough_to_learn_from_and_the_unknown_one_has_no_gradient(opened):
    site, job = opened()
    targets = site.data.splits["train"].targets.copy()
    targets[:, 1] = -1
    network = start(job)
    before = weights(network)
    job = replace(job, settings=job.settings.model_copy(update={"training": no_decay(job)}))
    fit(network, with_train(site, site.data.splits["train"].images, targets), job)
    after = weights(network)
    assert torch.equal(after["head.weight"][1], before["head.weight"][1])
    assert torch.equal(after["head.bias"][1], before["head.bias"][1])
    assert not torch.equal(after["head.weight"][0], before["head.weight"][0])


def no_decay(job):
    return job.settings.training.model_copy(update={"weight_decay": 0.0})


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_one_sample_trains_and_keeps_the_running_statistics_it_received(opened, norm):
    site, job = opened(model__norm=norm)
    split = site.data.splits["train"]
    network = start(job)
    before = weights(network)
    done = fit(network, with_train(site, split.images[:1], split.targets[:1]), job)
    after = weights(network)
    assert done.num_examples == 1 and done.num_steps == 1 and np.isfinite(done.loss_sum)
    assert not torch.equal(after["head.weight"], before["head.weight"])
    for name in before:
        if "running" in name or "num_batches" in name:
            assert torch.equal(after[name], before[name]), name


# -- what training does -----------------------------------------------------------------------------------------------


def test_the_loss_of_an_entry_weighs_the_same_however_many_others_are_known():
    class Fixed(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :2]

    images = torch.tensor([[0.3, -1.2], [2.0, 0.1]]).reshape(2, 1, 1, 2)
    targets = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    found = batch_loss(Fixed(), images, targets, "multilabel", None)
    # one known entry of four: -log(sigmoid(0.3)) / 4
    assert found.item() == pytest.approx(F.softplus(torch.tensor(-0.3)).item() / 4, rel=1e-6)
    nothing = batch_loss(Fixed(), images, torch.full_like(targets, -1), "multilabel", None)
    assert nothing.item() == 0.0


def test_steps_losses_and_examples_are_counted(opened):
    site, job = opened(training__epochs=3, training__batch_size=4)
    done = fit(start(job), site, job)
    assert done.num_examples == 9 and done.num_steps == 3 * 2  # 9 = 4 + 5
    assert len(done.losses) == 2 and done.loss_sum == pytest.approx(sum(done.losses))


def test_training_lowers_the_loss_of_its_own_samples(opened):
    site, job = opened(training__epochs=30, training__lr=0.1)
    network = start(job)
    images, targets = load_batch(site.data.splits["train"], np.arange(9), "none", torch.Generator())
    before = batch_loss(network.train(), images, targets, "multilabel", None).item()
    fit(network, site, job)
    assert batch_loss(network.train(), images, targets, "multilabel", None).item() < 0.7 * before


def test_a_batch_has_the_statistics_of_the_run(opened):
    site, job = opened(data__channels=3, model__normalise="imagenet")
    split = site.data.splits["train"]
    images, _ = load_batch(split, np.arange(9), "none", torch.Generator(), job.settings.model.normalise)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(images.permute(0, 2, 3, 1).numpy(), (split.images / 255 - mean) / std, atol=1e-5)


@pytest.mark.parametrize("room", ["client_app", "server_app"])
def test_whoever_makes_network_input_says_which_statistics(room):
    """A call without would train on one input and be measured on another once ``model.normalise`` is set."""
    silent = [
        f"{path.name}:{call.lineno}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", "")) in ("load_batch", "to_input")
        and "normalise" not in ast.unparse(call)
    ]
    assert not silent, "pass job.settings.model.normalise"


@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
def test_the_same_seed_round_and_site_give_the_same_bits(opened, augment):
    site, job = opened(training__augment=augment, training__epochs=2)
    results = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        torch.rand(noise * 7)
        network = network_for(("cat", "dog"), job.settings)
        torch.manual_seed(5)
        nn.init.normal_(network.head.weight)
        network.load_state_dict({**start(job).state_dict(), "head.weight": network.head.weight})
        torch.manual_seed(noise)  # the process's own generator is in another state each time
        fit(network, site, job)
        results.append(weights(network))
    assert same(*results)


@pytest.mark.parametrize("what", ["seed", "server_round"])
def test_another_seed_or_round_gives_other_batches(opened, what):
    results = []
    for value in (1, 2):
        site, job = opened(**{what: value})
        network = start(job)
        fit(network, site, job)
        results.append(weights(network))
    assert not same(*results)


def test_training_leaves_the_process_generator_alone(opened):
    site, job = opened()
    network = start(job)
    before = torch.random.get_rng_state()
    fit(network, site, job)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_loss_that_is_not_finite_is_divergence_and_no_update(opened):
    site, job = opened(training__lr=100.0, training__epochs=40, model__norm="group")
    network = start(job)
    with torch.no_grad():
        network.head.weight.fill_(1e38)
    with pytest.raises(Diverged, match=r"round 1 gave a loss of (nan|inf) or infinite weights; lower training.lr"):
        fit(network, site, job)


def test_hooks_run_at_every_step(opened):
    site, job = opened(training__epochs=2)
    calls = []

    def penalty():
        calls.append("penalty")
        return torch.zeros(())

    done = fit(start(job), site, job, penalty=penalty, after_step=lambda: calls.append("step"))
    assert calls == ["penalty", "step"] * done.num_steps


def test_the_received_modules_are_not_written_to(opened):
    from client_app import fedavg

    site, job = opened()
    modules = {"model": start(job).state_dict()}
    before = {name: value.clone() for name, value in modules["model"].items()}
    fedavg.train(site, modules, job)
    assert same(modules["model"], before)


def test_a_received_model_that_does_not_fit_is_refused(opened):
    site, job = opened()
    state = start(job).state_dict()
    del state["head.bias"]
    with pytest.raises(wire.WireError, match="does not fit this site's network"):
        training.received_network(site, {"model": state}, job)


def test_change_is_a_difference_for_floats_and_the_new_value_for_integers():
    before = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(4)}
    found = change(before, {"w": torch.tensor([1.5, 0.0]), "n": torch.tensor(7)})
    assert found["w"].tolist() == [0.5, -2.0] and found["n"] == 7


def test_optimisers_take_their_settings_and_skip_frozen_parameters(opened):
    _, job = opened(training__lr=0.3, training__momentum=0.5, training__weight_decay=0.01)
    network = start(job)
    network.head.bias.requires_grad_(False)
    sgd = optimiser_for(network, job.settings)
    (group,) = sgd.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.5, 0.01)
    assert not any(value is network.head.bias for value in group["params"])
    _, job = opened(training__optimizer="adamw")
    assert isinstance(optimiser_for(network, job.settings), torch.optim.AdamW)


# -- devices ------------------------------------------------------------------------------------------------------


def test_network_images_and_targets_go_to_the_jobs_device(opened, monkeypatch):
    """On the meta device every operation refuses tensors of another device; only the numbers are missing."""
    site, job = opened()
    seen = []

    def loss_on_device(network, images, targets, task, precision):
        seen.append({images.device.type, targets.device.type, *(value.device.type for value in network.parameters())})
        return network(images).sum()

    monkeypatch.setattr(training, "batch_loss", loss_on_device)
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: 1.0)
    done = fit(start(job), site, replace(job, device=torch.device("meta")))
    assert seen == [{"meta"}] * done.num_steps


def test_specs_are_known_without_building_weights(opened):
    _, job = opened()
    specs = wire.spec_of(training.on_meta(("cat", "dog"), job.settings).state_dict())
    assert specs == wire.spec_of(start(job).state_dict())
    assert specs["features.0.1.num_batches_tracked"].dtype == "int64"
