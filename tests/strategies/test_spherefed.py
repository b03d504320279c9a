"""SphereFed in a federation: the same points at every site, none on the wire, and features that learn."""

from __future__ import annotations

import pytest
import torch

from client_app import spherefed
from client_app.evaluation import evaluate
from client_app.site import open_site
from client_app.training import Job, on_meta, received_network
from federation.settings import SettingsError
from strategies.initial import seeded
from strategies.spherefed import SphereFed

LABELS = tuple("abcdefghij")


def start(settings, labels=LABELS):
    """The state that a run starts from."""
    strategy = SphereFed(settings)
    return strategy.build(seeded(lambda: strategy.network(labels, "multilabel"), settings))


def frozen(settings):
    """The hash of the server's fixed part, and of a site's, which must be one."""
    ours = SphereFed(settings).network(LABELS, "multilabel").frozen_sha256
    assert on_meta(LABELS, settings, spherefed.build).frozen_sha256 == ours and len(ours) == 64
    return ours


def test_points_are_the_same_at_two_sites_and_the_server_and_follow_from_the_seed(plain_settings, tmp_path):
    settings = plain_settings(method="spherefed")
    modules, job, points = start(settings), Job(settings, 1, 0, {}, torch.device("cpu")), []
    for index in (0, 1):
        site = open_site(settings, {"partition-id": index}, tmp_path)
        points.append(received_network(site, modules, job, spherefed.build).points)
    assert torch.equal(*points)
    assert frozen(settings) == frozen(settings) != frozen(plain_settings(method="spherefed", seed=2))


def test_points_are_on_no_message(plain_settings):
    settings = plain_settings(method="spherefed")
    module = start(settings)["model"]
    assert set(module) == set(on_meta(LABELS, settings, spherefed.build).state_dict())
    assert not any("points" in name or "head" in name for name in module)


def test_two_rounds_lower_the_loss_on_every_sites_training_images(plain_settings, trained, tmp_path):
    settings = plain_settings(method="spherefed", training__momentum=0.9)
    strategy, _ = trained(settings)
    before = start(settings, strategy.table.labels)
    job = Job(settings, 2, 0, {}, torch.device("cpu"))
    for index in range(3):
        site = open_site(settings, {"partition-id": index}, tmp_path)
        first, last = (
            evaluate(site, modules, job, "train", spherefed.build).loss_sum
            for modules in (before, strategy.progress.modules)
        )
        assert last < first


def test_the_same_seed_gives_the_same_model_twice(run_tiny):
    one, two = (run_tiny(method="spherefed", data__num_sites=2, federation__rounds=1) for _ in range(2))
    assert one.model_sha256 == two.model_sha256
    assert one.metrics["macro_auroc"] is not None


def test_one_label_a_sample_works_too(run_tiny):
    options = {"data__root": "digits", "data__image_size": 8, "data__partition": "iid", "data__num_sites": 2}
    outcome = run_tiny(method="spherefed", **options, federation__rounds=3)
    assert outcome.metrics["macro_auroc"] > 0.6


def test_resnet18_trains(opened):
    site, job = opened(method="spherefed", model__name="resnet18")
    modules = start(job.settings, ("cat", "dog"))
    update = spherefed.train(site, modules, job)
    assert set(update.modules["model"]) == set(modules["model"])
    assert update.modules["model"]["projection.weight"].any() and update.num_examples == 9


def test_more_labels_than_the_features_have_room_for_are_refused(plain_settings):
    settings, labels = plain_settings(method="spherefed"), tuple(f"label {index}" for index in range(16))
    with pytest.raises(SettingsError, match=r"16 class points need features wider than 16, got width 16; use fewer"):
        on_meta(labels, settings, spherefed.build)
