"""FedNCA-ML at a site: what is trained and how, what a batch of odd labels costs, and what leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client_app import fednca
from client_app.handler import profile, work
from client_app.site import open_site
from client_app.training import fit, load_batch, received_network
from datasets.records import SiteData, Split
from federation import wire
from federation.settings import SettingsError
from models.fednca import simplex_etf
from strategies.initial import seeded

LABELS = ("cat", "dog")


@pytest.fixture
def at_site(opened):
    """``at_site(**changes)``: site, job and the received modules; at 16 pixels the attention chooses of four cells."""
    usual = {"method": "fednca", "training__optimizer": "adamw", "training__lr": 1e-3, "data__image_size": 16}

    def make(**changes):
        site, job = opened(**{**usual, **changes})
        network = seeded(lambda: fednca.build(site.data.labels, job.settings), job.settings)
        return site, job, {"model": network.state_dict()}

    return make


def with_train(site, images, targets):
    splits = {**site.data.splits, "train": Split(images, np.asarray(targets, np.int8))}
    return replace(site, data=SiteData(site.name, site.data.labels, site.data.task, splits, site.data.checksum))


def rows_of(site, count):
    """So many training images, the site's own repeated."""
    images = site.data.splits["train"].images
    return np.resize(images, (count, *images.shape[1:]))


def parts_of(site, job, modules, targets):
    """Loss, logits and mean parts of one batch with these targets, as training computes them."""
    network, totals = received_network(site, modules, job, fednca.build).train(), Counter()
    images, _ = load_batch(site.data.splits["train"], np.arange(len(targets)), "none", torch.Generator())
    loss = fednca._objective(network, site, job, totals)(images, torch.tensor(targets, dtype=torch.int8))
    loss.backward()
    finite = all(torch.isfinite(value.grad).all() for value in network.parameters() if value.grad is not None)
    logits = received_network(site, modules, job, fednca.build).train()(images).detach()
    return (
        float(loss.detach()),
        logits,
        {name: totals[name] / totals["samples"] for name in fednca.LOSS_NUMBERS},
        finite,
    )


# -- training -------------------------------------------------------------------------------------------------------


def test_adamw_decays_everything_but_biases_and_takes_the_papers_betas(at_site):
    site, job, modules = at_site(training__weight_decay=0.01, fednca__beta2=0.9)
    network = received_network(site, modules, job, fednca.build)
    names = {id(value): name for name, value in network.named_parameters()}
    decayed, plain = fednca._optimiser(network, job).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert decayed["betas"] == plain["betas"] == (0.9, 0.9) and decayed["lr"] == 1e-3 and decayed["eps"] == 1e-8
    told = [{names[id(value)] for value in group["params"]} for group in (decayed, plain)]
    assert (
        {name for name in names.values() if "bias" in name} == told[1] >= {"head.bias", "ladm.attention.in_proj_bias"}
    )
    # as in the authors' code, the scale of the logits and BatchNorm's weights are decayed too
    assert told[0] >= {"head.logit_scale", "ladm.attention.out_proj.weight", "backbone.0.1.weight"}


def test_sgd_is_the_runtimes(at_site):
    site, job, modules = at_site(training__optimizer="sgd")
    assert isinstance(fednca._optimiser(received_network(site, modules, job, fednca.build), job), torch.optim.SGD)


def test_the_etf_is_bit_identical_after_training_and_nowhere_in_the_state(at_site):
    site, job, modules = at_site(training__epochs=3, training__lr=0.05)
    network = received_network(site, modules, job, fednca.build)
    before = network.etf.clone()
    fit(network, site, job, objective=fednca._objective(network, site, job, Counter()),
        optimiser=fednca._optimiser(network, job))  # fmt: skip
    assert network.etf.numpy().tobytes() == before.numpy().tobytes() == simplex_etf(2, network.dim).numpy().tobytes()
    assert not network.etf.requires_grad and "etf" not in network.state_dict()
    assert not torch.equal(network.state_dict()["head.bias"], modules["model"]["head.bias"])


def test_the_received_module_is_not_written_to_and_the_same_job_gives_the_same_bits(at_site):
    site, job, modules = at_site(fednca__rejection_select="random")
    before = wire.state_sha256(modules)
    updates = [fednca.train(site, modules, job) for _ in range(2)]
    assert wire.state_sha256(modules) == before
    assert wire.state_sha256(updates[0].modules) == wire.state_sha256(updates[1].modules)
    assert updates[0].extra == updates[1].extra and updates[0].num_examples == 9


def test_parts_are_means_over_the_samples_and_make_up_the_loss(at_site):
    site, job, modules = at_site(training__batch_size=16, fednca__lambda_neg=0.25, fednca__lambda_pos=0.5)
    update = fednca.train(site, modules, job)
    parts = update.extra
    assert set(parts) == {"bce", "neg", "pos"} and all(value > 0 for value in parts.values())
    # one batch of all 9 samples, so the loss of the epoch is that of the parts before the step
    total = parts["bce"] + 0.25 * parts["neg"] + 0.5 * parts["pos"]
    assert update.loss_sum / update.num_examples == pytest.approx(total, rel=1e-5)


def test_a_module_that_does_not_fit_is_refused(at_site):
    site, job, modules = at_site()
    del modules["model"]["head.bias"]
    with pytest.raises(wire.WireError, match="does not fit this site's network"):
        fednca.train(site, modules, job)


# -- the published schedule -------------------------------------------------------------------------------------------


def rates(site, job, modules, steps):
    optimiser = fednca._optimiser(received_network(site, modules, job, fednca.build), job)
    after_step, seen = fednca._schedule(optimiser, site, job), []
    for _ in range(steps):
        seen.append(optimiser.param_groups[1]["lr"])
        after_step()
    return seen


def test_official_schedule_of_twenty_steps_climbs_to_6_33e_5(at_site):
    site, job, modules = at_site(fednca__lr_schedule="official_restart", training__lr=1e-4, training__batch_size=2)
    site = with_train(site, rows_of(site, 40), np.ones((40, 2)))
    seen = rates(site, job, modules, 20)
    # lr * s / int(1.5 * 20), s = 0..19 (spec, disagreement 8)
    assert seen == pytest.approx([1e-4 * step / 30 for step in range(20)])
    # the specification's numbers, which have three digits
    assert max(seen) == pytest.approx(6.33e-5, abs=5e-8) and np.mean(seen) == pytest.approx(3.17e-5, abs=5e-8)


def test_official_schedule_of_one_step_teaches_nothing(at_site):
    site, job, modules = at_site(fednca__lr_schedule="official_restart", training__batch_size=16)
    network = received_network(site, modules, job, fednca.build)
    change = fednca.train(site, modules, job).modules["model"]
    assert all(not change[name].any() for name, _ in network.named_parameters())
    assert change["backbone.0.1.running_mean"].any()  # the batch was seen


def test_official_schedule_counts_the_steps_that_are_taken(at_site):
    """9 samples in batches of 4 are 4 + 5, two steps: the second has lr / int(1.5 * 2)."""
    site, job, modules = at_site(fednca__lr_schedule="official_restart", training__lr=0.3, training__batch_size=4)
    assert fednca.train(site, modules, job).num_steps == 2
    assert rates(site, job, modules, 2) == pytest.approx([0.0, 0.1])


def test_constant_schedule_leaves_the_optimiser_alone(at_site):
    site, job, modules = at_site()
    assert (
        fednca._schedule(fednca._optimiser(received_network(site, modules, job, fednca.build), job), site, job) is None
    )


# -- odd labels -------------------------------------------------------------------------------------------------------


def test_all_zero_batch_costs_bce_only(at_site):
    loss, logits, parts, finite = parts_of(*at_site(), [[0, 0]] * 4)
    assert parts["neg"] == parts["pos"] == 0 and finite
    assert loss == pytest.approx(float(F.softplus(logits).sum(dim=1).mean()), rel=1e-5)


def test_all_positive_batch_has_no_rejection(at_site):
    _, _, parts, finite = parts_of(*at_site(), [[1, 1]] * 4)
    assert parts["neg"] == 0 < parts["pos"] and finite


@pytest.mark.parametrize("target", [[0, 0], [1, 1], [1, 0], [1, -1], [-1, 0]])
def test_batch_of_one_is_defined(at_site, target):
    site, job, modules = at_site(model__norm="group")
    loss, _, _, finite = parts_of(site, job, modules, [target])
    assert np.isfinite(loss) and finite


def test_unknown_label_is_in_no_term(at_site):
    """Cat is absent everywhere, dog unknown: only cat's BCE is left, and K counts no positive."""
    loss, logits, parts, finite = parts_of(*at_site(), [[0, -1]] * 4)
    assert parts["neg"] == parts["pos"] == 0 and finite
    assert loss == pytest.approx(float(F.softplus(logits[:, 0]).mean()), rel=1e-5)
    # with one cat present, K = 1: one negative (of cat) is rejected, and never one of dog
    _, _, parts, _ = parts_of(*at_site(), [[1, -1], [0, -1], [-1, -1]])
    assert 0 < parts["neg"] * 3 <= 0.7 and parts["pos"] > 0


@pytest.mark.parametrize("head", ["etf", "linear"])
def test_unknown_label_is_in_no_term_of_the_ablations(at_site, head):
    loss, logits, parts, _ = parts_of(*at_site(fednca__head=head), [[0, -1]] * 4)
    assert parts["neg"] == parts["pos"] == 0
    assert loss == pytest.approx(float(F.softplus(logits[:, 0]).mean()), rel=1e-5)


def test_nan_blank_and_minus_one_train_the_same_bits(at_site, write_hospital, ward, tmp_path):
    found = []
    for cell in ("nan", "", -1):
        _, job, modules = at_site()
        rows = [{**row, "dog": cell if number % 2 else row["dog"]} for number, row in enumerate(ward("north", train=9))]
        root = write_hospital(tmp_path / f"d{cell}", rows)
        node = {"site": "north", "data-root": str(root), "state-dir": str(tmp_path / "state")}
        site = open_site(job.settings, node, tmp_path)
        assert (site.data.splits["train"].targets[1::2, 1] == -1).all()
        update = fednca.train(site, modules, job)
        assert np.isfinite(update.loss_sum)
        found.append(wire.state_sha256(update.modules))
    assert len(set(found)) == 1


def test_site_with_one_sample_and_site_without_a_class_train(at_site):
    site, job, modules = at_site()
    images = site.data.splits["train"].images
    for rows in ([[1, 0]], [[1, 0]] * 9, [[0, 0]] * 9):
        update = fednca.train(with_train(site, images[: len(rows)], rows), modules, job)
        values = update.modules["model"].values()
        assert update.num_examples == len(rows) and all(torch.isfinite(value).all() for value in values)


# -- what leaves and what is shown ------------------------------------------------------------------------------------


def test_a_reply_holds_the_model_its_scores_and_seven_numbers_of_the_method(at_site):
    site, job, modules = at_site()
    job = replace(job, config={"evaluate": "val"})
    content, declared = work(wire.TRAIN, modules, site, job, fednca)
    assert declared.violation(content) is None
    assert set(content) == {"module.model", "metrics", "extra", "scores.val", "loss.val", "extra.val"}
    assert set(content["extra"]) == {"bce", "neg", "pos"}
    assert set(content["extra.val"]) == set(fednca.COLLAPSE_NUMBERS)
    assert set(content["module.model"]) == set(modules["model"])
    assert not [name for name in content["module.model"] if "etf" in name or "quer" in name]


def test_a_trained_etf_travels_because_it_is_trained(at_site):
    site, job, modules = at_site(fednca__etf_trainable=True)
    change = fednca.train(site, modules, job).modules["model"]
    assert change["etf"].any() and change["learned_queries"].any()


def test_card_of_a_label_list_without_room_still_shows_the_list(at_site):
    site, job, _ = at_site()
    splits = {name: Split(part.images, part.targets[:, :1]) for name, part in site.data.splits.items()}
    lone = SiteData(site.name, ("cat",), "multilabel", splits, "0" * 64)
    card = profile(replace(site, data=lone), job.settings, fednca)
    assert wire.profile_payload().violation(card) is None and card[wire.CARD]["labels"] == ["cat"]
    assert fednca.build(("cat",), job.settings).frozen_sha256 == ""


def test_heads_that_do_not_divide_the_width_are_refused_with_both_numbers(opened):
    with pytest.raises(SettingsError, match=r"fednca.num_heads = 3 does not divide the width 16 of small_cnn; use 4"):
        opened(method="fednca", fednca__num_heads=3)


def test_maps_of_a_label_are_shown_by_title(at_site):
    site, job, modules = at_site()
    images, _ = load_batch(site.data.splits["test"], np.arange(3), "none", torch.Generator())
    found = fednca.explain(received_network(site, modules, job, fednca.build).eval(), images, 1)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "attention": (3, 2, 2),
        "Grad-CAM": (3, 2, 2),
    }
    torch.testing.assert_close(found["attention"].sum(dim=(1, 2)), torch.ones(3))
    site, job, modules = at_site(fednca__head="etf")
    assert list(fednca.explain(received_network(site, modules, job, fednca.build).eval(), images, 1)) == ["Grad-CAM"]
