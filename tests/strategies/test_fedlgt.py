"""FedLGT in a federation: the same embeddings at every site, masks that follow the received model, labels not told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from client_app import fedlgt
from client_app.evaluation import evaluate
from client_app.site import open_site
from client_app.training import Job, on_meta, received_network
from datasets.records import SiteData, Split
from federation.settings import SettingsError
from strategies.cards import CardError
from strategies.fedlgt import FedLGT
from strategies.initial import seeded

LABELS = tuple("abcdefghij")


def start(settings, labels=LABELS):
    """The state that a run starts from."""
    strategy = FedLGT(settings)
    return strategy.build(seeded(lambda: strategy.network(labels, "multilabel"), settings))


def frozen(settings):
    """The hash of the server's fixed part, and of a site's, which must be one."""
    ours = FedLGT(settings).network(LABELS, "multilabel").frozen_sha256
    assert on_meta(LABELS, settings, fedlgt.build).frozen_sha256 == ours and len(ours) == 64
    return ours


def test_embeddings_are_the_same_at_two_sites_and_the_server_and_follow_from_the_seed(plain_settings, tmp_path):
    settings = plain_settings(method="fedlgt")
    modules, job, found = start(settings), Job(settings, 1, 0, {}, torch.device("cpu")), []
    for index in (0, 1):
        site = open_site(settings, {"partition-id": index}, tmp_path)
        found.append(received_network(site, modules, job, fedlgt.build))
    assert torch.equal(*(network.label_embeddings for network in found))
    assert torch.equal(*(network.state_embeddings for network in found))
    assert frozen(settings) == frozen(settings) != frozen(plain_settings(method="fedlgt", seed=2))


def test_embeddings_are_on_no_message(plain_settings):
    settings = plain_settings(method="fedlgt")
    module = start(settings)["model"]
    assert set(module) == set(on_meta(LABELS, settings, fedlgt.build).state_dict())
    assert not any("embeddings" in name for name in module)


def test_a_file_of_embeddings_is_part_of_what_sites_compare(plain_settings, tmp_path):
    path = tmp_path / "clip.safetensors"
    settings = plain_settings(method="fedlgt", fedlgt__label_embeddings=str(path))
    hashes = []
    for seed in (0, 1):
        rows = torch.randn(12, 24, generator=torch.Generator().manual_seed(seed))
        save_file({"labels": rows[:10].contiguous(), "states": rows[10:].contiguous()}, path)
        hashes.append(frozen(settings))
    assert hashes[0] != hashes[1]
    with pytest.raises(SettingsError, match=r"expected labels \(9, E\)"):
        on_meta(LABELS[:9], settings, fedlgt.build)


def test_two_rounds_lower_the_loss_on_every_sites_training_images(plain_settings, trained, tmp_path):
    """With no label told, as at inference: the training loss itself asks for fewer labels as the model gets sure."""
    settings = plain_settings(method="fedlgt", training__momentum=0.9)
    strategy, _ = trained(settings)
    before = start(settings, strategy.table.labels)
    job = Job(settings, 2, 0, {}, torch.device("cpu"))
    for index in range(3):
        site = open_site(settings, {"partition-id": index}, tmp_path)
        first, last = (
            evaluate(site, modules, job, "train", fedlgt.build).loss_sum
            for modules in (before, strategy.progress.modules)
        )
        assert last < first


def test_the_same_seed_gives_the_same_model_twice(run_tiny):
    one, two = (run_tiny(method="fedlgt", data__num_sites=2, federation__rounds=1) for _ in range(2))
    assert one.model_sha256 == two.model_sha256
    assert one.metrics["macro_auroc"] is not None


@pytest.fixture
def seen(monkeypatch):
    """What every training batch told the network and what it was asked: (targets, states) in order."""
    batches = []
    loss = fedlgt.fedlgt_loss

    def watched(logits, targets, states, loss_labels):
        batches.append((targets, states))
        return loss(logits, targets, states, loss_labels)

    monkeypatch.setattr(fedlgt, "fedlgt_loss", watched)
    return batches


def begin(job, bias=None):
    """The start of the hospital's two labels; with ``bias`` the model gives these logits for every image."""
    modules = start(job.settings, ("cat", "dog"))
    if bias is not None:
        modules["model"]["head.weight"].zero_()
        modules["model"]["head.bias"].copy_(torch.tensor(bias))
    return modules


def test_labels_are_hidden_where_the_received_model_is_unsure_and_told_elsewhere(opened, seen):
    """The received scores are exactly 1/2 for cats and far from it for dogs; later steps do not change the guide."""
    site, job = opened(method="fedlgt", fedlgt__random_masks=False, fedlgt__loss_labels="all", training__epochs=3)
    fedlgt.train(site, begin(job, bias=[0.0, 3.0]), job)
    assert len(seen) == 6
    for targets, states in seen:
        assert (states[:, 0] == 0).all()
        assert torch.equal(states[:, 1], targets[:, 1].long() + 1)


def test_random_masks_hide_labels_of_a_model_that_is_sure_too(opened, seen):
    site, job = opened(method="fedlgt", training__epochs=3)
    fedlgt.train(site, begin(job, bias=[3.0, -3.0]), job)
    states = torch.cat([states for _, states in seen])
    targets = torch.cat([targets for targets, _ in seen])
    told = states > 0
    assert told.any() and (~told).any() and torch.equal(states[told], targets[told].long() + 1)
    assert (~told).any(dim=1).all()  # of two labels at most floor(1.5) are told


def test_labels_that_a_site_does_not_know_are_told_to_nobody_and_change_nothing(opened, seen):
    site, job = opened(method="fedlgt")
    split = site.data.splits["train"]
    targets = split.targets.copy()
    targets[:, 1] = -1
    data = SiteData(
        site.data.name,
        site.data.labels,
        site.data.task,
        {**site.data.splits, "train": Split(split.images, targets)},
        site.data.checksum,
    )
    update = fedlgt.train(replace(site, data=data), begin(job), job)
    assert all((states[:, 1] == 0).all() for _, states in seen)
    head = update.modules["model"]["head.bias"]
    assert head[0] != 0
    assert head[1].abs() < 1e-4  # weight decay only


def test_evaluation_tells_nothing(opened, monkeypatch):
    site, job = opened(method="fedlgt")
    given = []
    forward = fedlgt.FedLGTNetwork.forward
    monkeypatch.setattr(
        fedlgt.FedLGTNetwork, "forward", lambda self, *args: given.append(len(args)) or forward(self, *args)
    )
    evaluate(site, begin(job), job, "test", fedlgt.build)
    assert given == [1]  # the images alone


def test_resnet18_trains(opened):
    site, job = opened(method="fedlgt", model__name="resnet18", fedlgt__hidden=32)
    modules = begin(job)
    update = fedlgt.train(site, modules, job)
    assert set(update.modules["model"]) == set(modules["model"]) and update.num_examples == 9
    assert update.modules["model"]["image_projection.weight"].shape == (32, 512)


def test_one_label_a_sample_is_refused(run_tiny):
    with pytest.raises(CardError, match="task is 'multiclass', but fedlgt needs several labels a sample"):
        run_tiny(method="fedlgt", data__root="digits", data__image_size=8, data__partition="iid")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fedlgt__unsure_from": 0.6}, r"unsure_from = 0.6 is above fedlgt.unsure_to = 0.52"),
        ({"fedlgt__random_masks": False}, r"random_masks = false with fedlgt.loss_labels = 'masked'"),
        ({"fedlgt__hidden": 30}, r"width 30, which is not divisible by fedlgt.num_heads = 4"),
        ({"fedlgt__num_heads": 3}, r"fedlgt.hidden = 0 gives an encoder of width 16"),
    ],
)
def test_contradictions_are_refused_at_the_door(plain_settings, changes, reason):
    with pytest.raises(SettingsError, match=reason):
        plain_settings(method="fedlgt", **changes)
