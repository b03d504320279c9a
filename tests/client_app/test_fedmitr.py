"""FedMITR at a site: what is trained, what is checked before the one upload, and what leaves."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client_app import fedmitr, fedmitr_check
from client_app.fedmitr_private import fit_privately
from client_app.handler import profile, work
from client_app.site import ConsentError
from client_app.training import Withheld, fit, load_batch, optimiser_for, received_network
from datasets.records import SiteData, Split
from federation import wire
from federation.settings import SettingsError
from models.fedmitr_exchange import NO_GUARANTEE
from models.inversion import Inverted
from strategies.fedmitr_uploads import vit_of
from strategies.initial import seeded

TINY = {
    "method": "fedmitr",
    "federation__rounds": 1,
    "data__image_size": 16,
    "training__lr": 0.01,
    "fedmitr__model": "vit",
    "fedmitr__patch": 8,
    "fedmitr__width": 16,
    "fedmitr__depth": 2,
    "fedmitr__heads": 2,
    "fedmitr__ratios": "0,0,0,0",
}


@pytest.fixture
def at_site(opened):
    """``at_site(consents=..., **changes)``: site, job and the received modules. ``consents``: None in a simulation."""

    def make(consents=None, **changes):
        site, job = opened(**{**TINY, **changes})
        network = seeded(lambda: vit_of(job.settings, len(site.data.labels)), job.settings)
        return replace(site, consents=consents), job, {"model": network.state_dict()}

    return make


def with_images(site, train, held_out, task="multiclass"):
    """The site with random pictures and alternating labels."""
    draws = np.random.default_rng(0)

    def split(count):
        images = draws.integers(0, 256, (count, 16, 16, 1), dtype=np.uint8)
        return Split(images, np.eye(2, dtype=np.int8)[np.arange(count) % 2])

    splits = {"train": split(train), "val": split(0), "test": split(held_out)}
    return replace(site, data=SiteData(site.name, site.data.labels, task, splits, "0" * 64))


def length(state):
    return float(torch.cat([value.float().flatten() for value in state.values()]).norm())


# -- training and upload ----------------------------------------------------------------------------------------------


def test_the_upload_is_the_change_of_fit_in_half_precision(at_site):
    site, job, modules = at_site()
    network = received_network(site, modules, job, fedmitr.build)
    fit(network, site, job, clip=10.0)
    sent = fedmitr.train(site, modules, job).modules["model"]
    assert set(sent) == set(modules["model"])
    for name, value in network.state_dict().items():
        assert sent[name].dtype == torch.float16
        torch.testing.assert_close(modules["model"][name] + sent[name].float(), value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_reply_holds_the_model_in_the_dtype_that_was_asked_for_and_one_number(at_site, dtype):
    site, job, modules = at_site(fedmitr__upload_dtype=dtype)
    content, declared = work(wire.TRAIN, modules, site, job, fedmitr)
    assert declared.violation(content) is None
    assert set(content) == {"module.model", "metrics", "extra"}
    assert {array.dtype for array in content["module.model"].values()} == {dtype}
    assert dict(content["extra"]) == {"epsilon": NO_GUARANTEE}


def test_gradients_are_clipped(at_site):
    """Five steps of SGD without momentum, each no longer than lr * clip."""
    site, job, modules = at_site(
        fedmitr__clip=0.01, training__momentum=0.0, training__weight_decay=0.0, training__batch_size=2
    )
    update = fedmitr.train(site, modules, job)
    assert update.num_steps == 4 and 0 < length(update.modules["model"]) <= 4 * 0.01 * 0.01 * 1.01


def test_small_classes_are_not_told(at_site):
    """Cat and dog are present in 4 of 9 training samples and absent in 5."""
    site, job, _ = at_site(fedmitr__min_class_count=5)
    numbers = profile(site, job.settings, fedmitr)[wire.METRICS]
    assert list(numbers["positives"]) == list(numbers["negatives"]) == [-1, -1], "9 less 5 would be told"
    site, job, _ = at_site(fedmitr__min_class_count=4)
    assert list(profile(site, job.settings, fedmitr)[wire.METRICS]["positives"]) == [4, 4]


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_token_loss_adds_the_mean_loss_of_every_patch_token(at_site, task):
    site, job, modules = at_site(fedmitr__relabel_mode="token")
    site = with_images(site, 6, 0, task)
    network = received_network(site, modules, job, fedmitr.build)
    images, targets = load_batch(site.data.splits["train"], np.arange(6), "none", torch.Generator())
    states = network.forward_features(images)  # (6, 1 + 4, 16)
    logits, total = network.head(states), 0.0
    for place in range(5):
        if task == "multilabel":
            loss = F.binary_cross_entropy_with_logits(logits[:, place], targets.float())
        else:
            loss = F.cross_entropy(logits[:, place], targets.argmax(dim=1))
        total += loss if place == 0 else loss / 4
    torch.testing.assert_close(fedmitr._objective(network, site, job)(images, targets), total)


# -- what a hospital has to allow -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("consents", "audit", "missing"),
    [((), False, "model-inversion"), (("model-inversion",), False, "unaudited-model"), ((), True, "model-inversion")],
)
def test_a_hospital_allows_inversion_and_an_unaudited_model_by_name(at_site, consents, audit, missing):
    site, job, modules = at_site(frozenset(consents), fedmitr__audit=audit)
    with pytest.raises(ConsentError, match=f"would send '{missing}'"):
        fedmitr.train(site, modules, job)


def test_with_both_consents_a_model_leaves(at_site):
    site, job, modules = at_site(frozenset({"model-inversion", "unaudited-model"}))
    assert fedmitr.train(site, modules, job).num_examples == 9


# -- the audit --------------------------------------------------------------------------------------------------------


def pretend_inversion(images):
    """In place of `invert`: these pixels ``(n, H, W, ch)``, repeated, whatever is asked for."""

    def invert(model, labels, settings, generator):
        assert settings.stops == () and settings.jitter == 0 and not settings.flip
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        return Inverted(pixels[torch.arange(len(labels)) % len(pixels)], labels, labels[:, None], labels[:, None])

    return invert


def test_a_model_that_gives_training_images_back_is_withheld_and_the_log_says_why(at_site, monkeypatch):
    site, job, modules = at_site(frozenset({"model-inversion"}), fedmitr__audit=True)
    site = with_images(site, 20, 20)
    monkeypatch.setattr(fedmitr_check, "invert", pretend_inversion(site.data.splits["train"].images))
    with pytest.raises(Withheld, match="found training images"):
        fedmitr.train(site, modules, job)
    assert "nearer to training in 64 of 64" in (site.folder / "site.log").read_text(encoding="utf-8")


def test_a_model_that_gives_other_images_passes(at_site, monkeypatch):
    site, job, modules = at_site(frozenset({"model-inversion"}), fedmitr__audit=True)
    site = with_images(site, 20, 20)
    monkeypatch.setattr(fedmitr_check, "invert", pretend_inversion(site.data.splits["test"].images))
    assert fedmitr.train(site, modules, job).num_examples == 20


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_the_audit_really_inverts_the_model(at_site, monkeypatch, task):
    """Ten iterations of a hardly trained model: images come out for both tasks, and they give nobody away."""
    monkeypatch.setattr(fedmitr_check, "ITERATIONS", 10)
    site, job, modules = at_site(fedmitr__audit=True)
    fedmitr.train(with_images(site, 30, 30, task), modules, job)
    (line,) = [line for line in (site.folder / "site.log").read_text().splitlines() if "audit:" in line]
    assert "of 64, p =" in line


def test_without_held_out_images_the_audit_needs_the_hospitals_consent_to_be_skipped(at_site):
    site, job, modules = at_site(frozenset({"model-inversion"}), fedmitr__audit=True)
    site = with_images(site, 20, 9)
    with pytest.raises(ConsentError, match="unaudited-model"):
        fedmitr.train(site, modules, job)
    consenting = replace(site, consents=frozenset({"model-inversion", "unaudited-model"}))
    assert fedmitr.train(consenting, modules, job).num_examples == 20
    assert "the audit needs 10" in (site.folder / "site.log").read_text(encoding="utf-8")


# -- DP-SGD -----------------------------------------------------------------------------------------------------------

extreme_noise = pytest.mark.filterwarnings("ignore:Optimal order is the")
"""The accountant warns that its epsilon is not tight for noise that nobody would choose."""


@pytest.fixture
def private(at_site):
    """``private(**changes)``: changes of the model by DP-SGD, how it went, and epsilon."""
    pytest.importorskip("opacus")

    def run(consents=None, **changes):
        usual = {"fedmitr__dp_noise": 1.0, "training__momentum": 0.0, "training__weight_decay": 0.0}
        site, job, modules = at_site(consents, **{**usual, **changes})
        network = received_network(site, modules, job, fedmitr.build)
        done, epsilon = fit_privately(network, site, job, fedmitr._objective(network, site, job))
        state = network.state_dict()
        return {name: state[name] - before for name, before in modules["model"].items()}, done, epsilon

    return run


@extreme_noise
def test_without_noise_and_clipping_a_whole_batch_is_a_step_of_sgd(at_site, private):
    changes, done, _ = private(fedmitr__dp_noise=1e-13, fedmitr__dp_clip=1e6, training__batch_size=9)
    site, job, modules = at_site(training__momentum=0.0, training__weight_decay=0.0)
    network = received_network(site, modules, job, fedmitr.build)
    images, targets = load_batch(site.data.splits["train"], np.arange(9), "none", torch.Generator())
    optimiser = optimiser_for(network, job.settings)
    loss = fedmitr._objective(network, site, job)(images, targets)
    loss.backward()
    optimiser.step()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(changes[name], value - modules["model"][name], rtol=1e-3, atol=1e-4 * 0.01)
    assert done.num_steps == 1 and done.loss_sum == pytest.approx(9 * float(loss.detach()), rel=1e-5)


@extreme_noise
def test_each_images_gradient_is_clipped_before_it_is_added(private):
    """Nine images of length at most 1e-3, divided by the batch of nine: the step is no longer than lr * 1e-3."""
    changes, _, _ = private(fedmitr__dp_noise=1e-9, fedmitr__dp_clip=1e-3, training__batch_size=9)
    assert 0 < length(changes) <= 0.01 * 1e-3 * 1.001


@extreme_noise
def test_noise_has_the_promised_size(private):
    """One step: lr * noise * clip / batch in every value; nine clipped gradients are at most a tenth of that."""
    changes, _, _ = private(fedmitr__dp_noise=50.0, fedmitr__dp_clip=0.01, training__batch_size=9)
    values = torch.cat([value.flatten() for value in changes.values()])
    assert float(values.std()) == pytest.approx(0.01 * 50 * 0.01 / 9, rel=0.05)


def test_epsilon_is_the_accountants_and_falls_with_noise(private):
    from opacus.accountants import RDPAccountant

    _, done, epsilon = private(training__batch_size=3, training__epochs=2)
    accountant = RDPAccountant()
    for _ in range(6):
        accountant.step(noise_multiplier=1.0, sample_rate=3 / 9)
    assert done.num_steps == 6 and epsilon == pytest.approx(accountant.get_epsilon(1e-5))
    _, _, less = private(training__batch_size=3, training__epochs=2, fedmitr__dp_noise=4.0)
    assert 0 < less < epsilon


def test_a_step_without_an_image_is_noise_all_the_same(private):
    """Batches of 1 in 9 images: a third of the steps draw none."""
    changes, done, _ = private(training__batch_size=1, training__epochs=2)
    assert done.num_steps == 18 and all(bool(value.isfinite().all()) for value in changes.values())


def test_a_simulation_repeats_its_noise_and_a_hospital_does_not(private):
    first, second = private()[0], private()[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    hospital = frozenset({"model-inversion", "unaudited-model"})
    first, second = private(hospital)[0], private(hospital)[0]
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_epsilon_travels_with_the_model(at_site):
    pytest.importorskip("opacus")
    site, job, modules = at_site(fedmitr__dp_noise=1.0)
    content, declared = work(wire.TRAIN, modules, site, job, fedmitr)
    assert declared.violation(content) is None and content["extra"]["epsilon"] > 0


def test_without_opacus_the_site_says_what_to_install(at_site, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    site, job, modules = at_site(fedmitr__dp_noise=1.0)
    with pytest.raises(SettingsError, match="needs opacus; install it with python"):
        fedmitr.train(site, modules, job)
