"""FedMPT at a site: what is trained on what, what odd labels and broken towers do, what leaves, and its maps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from client_app import fedmpt, fedmpt_features, handler
from client_app.site import open_site
from client_app.training import Diverged, Job
from datasets.records import DataError
from datasets.transforms import to_input
from federation import wire
from federation.settings import Settings
from models.clip import WEIGHTS_FILE, load_clip, patch_features, prepare_images
from models.fedmpt import asymmetric_loss_probabilities
from strategies.initial import seeded
from tests.strategies.fedmpt_data import LABELS, run_config, write_clip

EIGHT = {f"prompt.{name}" for name in ("cond", "cls")} | {f"head.adapter.{name}" for name in ("down", "up")}
EIGHT |= {f"head.gate.{name}" for name in ("w1", "b1", "w2", "b2")}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def at_site(tmp_path, clip):
    """``at_site(**changes)``: site, the modules that it is sent in round 1, and its job."""

    def make(folder=clip, lr=0.01, **changes):
        settings = Settings.from_run_config(run_config(tmp_path, folder, **changes))
        site = open_site(settings, {"partition-id": 0}, tmp_path)
        network = seeded(lambda: fedmpt.build(LABELS, settings), settings)
        job = Job(settings, 1, 0, {"lr": lr, "evaluate": "val"}, torch.device("cpu"))
        return site, {"model": {name: value.clone() for name, value in network.state_dict().items()}}, job

    return make


def with_targets(site, targets, split="train"):
    part = replace(site.data.splits[split], targets=np.asarray(targets, np.int8))
    return replace(site, data=replace(site.data, splits={**site.data.splits, split: part}))


def moved(update):
    return {name for name, value in update.modules["model"].items() if value.any()}


# -- features ---------------------------------------------------------------------------------------------------------


def test_every_picture_passes_the_image_tower_once_in_all_rounds(at_site, monkeypatch):
    site, modules, job = at_site()
    seen = []

    def counted(clip, images):
        seen.append(len(images))
        return patch_features(clip, images)

    monkeypatch.setattr(fedmpt_features, "patch_features", counted)
    for server_round in (1, 2):
        fedmpt.train(site, modules, replace(job, server_round=server_round))
        fedmpt.evaluate(site, modules, job, "val")
    assert sum(seen) == len(site.data.splits["train"]) + len(site.data.splits["val"])
    fedmpt_features._features.cache_clear()  # as in a new process: from the disk
    found = fedmpt_features.site_features(site, job, "val")
    assert len(seen) == 2 and isinstance(found, np.memmap)
    pixels = torch.from_numpy(site.data.splits["val"].images[:].copy()).permute(0, 3, 1, 2)
    clip = fedmpt_features.site_clip(job.settings)
    expected = patch_features(clip, prepare_images(clip, pixels)).half()
    torch.testing.assert_close(torch.from_numpy(np.array(found)), expected, rtol=1e-3, atol=1e-3)


def test_other_towers_and_no_cache_give_features_of_their_own(at_site, tmp_path):
    site, _, job = at_site()
    other = at_site(write_clip(tmp_path / "other", seed=2))[2]
    plain = at_site(feature_cache_gb=0)[2]
    mine = fedmpt_features.site_features(site, job, "train")
    assert not np.array_equal(mine, fedmpt_features.site_features(site, other, "train"))
    in_memory = fedmpt_features.site_features(site, plain, "train")
    assert np.array_equal(mine, in_memory) and not isinstance(in_memory, np.memmap)


def test_a_tower_with_a_nan_is_found_before_anything_is_trained(at_site, clip, tmp_path):
    broken = write_clip(tmp_path / "broken")
    weights = load_file(broken / WEIGHTS_FILE)
    weights["visual.proj"][0, 0] = torch.nan
    save_file(weights, broken / WEIGHTS_FILE)
    site, modules, job = at_site(broken)
    with pytest.raises(DataError, match="not finite"):
        fedmpt.train(site, modules, job)
    with pytest.raises(DataError, match=f"has SHA-256 {load_clip(broken).sha256}, expected {load_clip(clip).sha256}"):
        at_site(broken, clip_sha256=load_clip(clip).sha256)


# -- training ---------------------------------------------------------------------------------------------------------


def test_a_step_is_the_specifications_sgd_at_the_rate_that_the_server_sent(at_site):
    site, modules, job = at_site(lr=0.03, training__batch_size=64, training__weight_decay=0.01)
    update = fedmpt.train(site, modules, job)
    assert (update.num_steps, update.num_examples) == (1, len(site.data.splits["train"]))
    network = fedmpt.received(site, modules, job)
    patches = torch.from_numpy(np.array(fedmpt_features.site_features(site, job, "train")))
    targets = torch.from_numpy(site.data.splits["train"].targets)
    text = network.text_features(fedmpt_features.site_clip(job.settings).model, "full")
    scores, _ = network(patches, text)
    loss = 0.02 * asymmetric_loss_probabilities(scores, targets)
    loss.backward()
    assert update.loss_sum / update.num_examples == pytest.approx(loss.item(), rel=1e-4)
    for name, value in network.named_parameters():
        expected = -0.03 * (value.grad + 0.01 * value.detach())
        torch.testing.assert_close(update.modules["model"][name], expected, rtol=1e-3, atol=1e-7)


def test_no_gradient_and_no_step_reaches_clip(at_site):
    site, modules, job = at_site()
    tower = fedmpt_features.site_clip(job.settings).model
    before = wire.state_sha256({"clip": tower.state_dict()})
    assert moved(fedmpt.train(site, modules, job)) == EIGHT
    assert wire.state_sha256({"clip": tower.state_dict()}) == before
    assert all(value.grad is None and not value.requires_grad for value in tower.parameters())


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({"condition_prompts": False}, EIGHT - {"prompt.cond"}),
        ({"adapter_rank": 0}, EIGHT - {"head.adapter.down", "head.adapter.up"}),
        ({"gate": "uniform"}, {name for name in EIGHT if "gate" not in name}),
        ({"gate": "std", "aggregation": "patch_softmax"}, {name for name in EIGHT if "gate" not in name}),
        ({"condition_prompts": False, "adapter_rank": 0, "gate": "uniform"}, {"prompt.cls"}),
        ({"ot_grad": "through", "marginal_on": "raw", "psi_similarity": "cosine"}, EIGHT),
        ({"variant": "official_v1"}, {"prompt.cond", "prompt.cls"}),
        ({"cls_ctx_init": "random", "beta_cls": 2, "beta_cond": 1, "adapter_residual": False}, EIGHT),
    ],
)
def test_every_ablation_trains_what_it_has_and_is_evaluated(at_site, changes, trained):
    site, modules, job = at_site(**changes)
    assert set(modules["model"]) == trained
    assert moved(fedmpt.train(site, modules, job)) == trained
    content, payload = handler.work(wire.EVALUATE, modules, site, job, fedmpt)
    assert payload.violation(content) is None


def test_the_literal_psi_learns_nothing_from_absent_labels_and_the_default_does(at_site):
    """Oracle 12, with 25 labels: 1 / C is below the margin of the loss."""
    labels = tuple(f"label {index}" for index in range(25))
    losses = {}
    for rescale in (True, False):
        site, _, job = at_site(psi_rescale=rescale, asl_clip=0.05)
        data = replace(site.data, labels=labels)
        site = with_targets(replace(site, data=data), np.zeros((len(data.splits["train"]), 25)))
        network = fedmpt.build(labels, job.settings)
        losses[rescale] = fedmpt.train(site, {"model": network.state_dict()}, job).loss_sum
    assert losses[False] == 0 < losses[True]


# -- odd labels (spec 10) ---------------------------------------------------------------------------------------------


def test_unknown_entries_and_rows_without_a_known_one_teach_nothing(at_site):
    site, modules, job = at_site(training__batch_size=64)
    targets = site.data.splits["train"].targets.copy()
    targets[::3, 1] = -1
    targets[5] = -1
    update = fedmpt.train(with_targets(site, targets), modules, job)
    rows = np.delete(np.arange(len(targets)), 5)
    assert (update.num_examples, update.num_steps) == (len(rows), 1)
    network = fedmpt.received(site, modules, job)
    text = network.text_features(fedmpt_features.site_clip(job.settings).model)
    scores, _ = network(torch.from_numpy(fedmpt_features.site_features(site, job, "train")[rows]), text)
    wanted = torch.from_numpy(targets[rows])
    lies = torch.where(wanted < 0, 1, wanted)
    (0.02 * asymmetric_loss_probabilities(scores, lies, wanted >= 0)).backward()
    for name, value in network.named_parameters():
        decay = job.settings.training.weight_decay * value.detach()
        torch.testing.assert_close(update.modules["model"][name], -0.01 * (value.grad + decay), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("column", [0, -1], ids=["absent class", "no finding at all"])
def test_a_class_that_is_absent_and_pictures_without_a_finding_are_trained_on(at_site, column):
    site, modules, job = at_site()
    targets = site.data.splits["train"].targets.copy()
    if column == 0:
        targets[:, 0] = 0
    else:
        targets[:] = 0
    update = fedmpt.train(with_targets(site, targets), modules, job)
    assert update.num_examples == len(targets) and update.loss_sum > 0 and moved(update) == EIGHT
    scores = fedmpt.evaluate(with_targets(site, targets[: len(site.data.splits["val"])], "val"), modules, job, "val")
    assert scores.num_examples == len(site.data.splits["val"])


def test_a_rate_that_diverges_sends_nothing(at_site):
    site, modules, job = at_site(lr=1e30, training__epochs=2)
    with pytest.raises(Diverged):
        fedmpt.train(site, modules, job)


def test_other_arrays_than_the_networks_are_a_mismatch(at_site):
    site, _, job = at_site()
    for wrong in ({}, {"model": {"prompt.cond": torch.zeros(1)}}):
        with pytest.raises(wire.WireError, match="does not fit"):
            fedmpt.received(site, wrong, job)


@pytest.mark.parametrize("labels", [("cat",), ("cat", "Cat"), ("cat", "dog " * 90)])
def test_the_card_of_labels_without_a_prompt_gets_through(at_site, labels):
    """The server refuses them with the reason; "the site's code failed" would be all that a site could say."""
    site, _, job = at_site()
    data = replace(site.data, labels=labels)
    width = len(labels)
    splits = {name: replace(part, targets=part.targets[:, :width]) for name, part in data.splits.items()}
    content = handler.profile(replace(site, data=replace(data, splits=splits)), job.settings, fedmpt)
    assert list(content[wire.CARD]["labels"]) == list(labels)


# -- what leaves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_update_is_the_change_in_the_agreed_precision(at_site, dtype):
    site, modules, job = at_site(upload_dtype=dtype)
    content, payload = handler.work(wire.TRAIN, modules, site, job, fedmpt)
    assert payload.violation(content) is None
    record = content[wire.MODULE + "model"]
    assert set(record) == EIGHT and {array.dtype for array in record.values()} == {dtype}
    reference = fedmpt.train(site, modules, at_site()[2]).modules["model"]
    for name, value in wire.tensors(wire.decode(record)).items():
        torch.testing.assert_close(value.float(), reference[name], rtol=1e-3, atol=1e-7)


def test_gate_weights_are_means_that_sum_to_one_and_small_splits_tell_none(at_site):
    site, modules, job = at_site(conditions="light, dark, even", num_conditions=3)
    modules["model"]["head.gate.b2"] = torch.tensor([2.0, 0.0, -1.0])
    told = fedmpt.evaluate(site, modules, job, "val").extra
    assert set(told) == set(fedmpt.EVALUATION_EXTRA(job.settings)) == {"gate of light", "gate of dark", "gate of even"}
    assert sum(told.values()) == pytest.approx(1) and told["gate of light"] > told["gate of dark"] > 0.05
    _, _, held_back = at_site(conditions="light, dark, even", num_conditions=3, privacy__min_cell=900)
    assert set(fedmpt.evaluate(site, modules, held_back, "val").extra.values()) == {0.0}


def test_scores_do_not_depend_on_how_many_fit_into_memory_at_once(at_site, monkeypatch):
    site, modules, job = at_site()
    whole = fedmpt.evaluate(site, modules, job, "val")
    monkeypatch.setattr(fedmpt, "TRANSPORT_ENTRIES", 1)
    single = fedmpt.evaluate(site, modules, job, "val")
    assert single.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
    assert single.extra == pytest.approx(whole.extra, rel=1e-5)
    assert single.arrays["positives"].sum() == whole.arrays["positives"].sum() > 0


def test_secure_sums_weigh_as_the_server_does(at_site):
    for aggregate, weighting, expected in (("uniform", "num_examples", 1), ("num_examples", "num_examples", 24)):
        site, modules, job = at_site(aggregate=aggregate, federation__weighting=weighting)
        assert fedmpt.weights(fedmpt.train(site, modules, job), job) == {"model": expected}


# -- maps -------------------------------------------------------------------------------------------------------------


def test_maps_show_where_the_mass_comes_from_and_what_the_gate_weighs(at_site):
    site, modules, job = at_site()
    network = fedmpt.build(LABELS, job.settings)
    modules["model"]["head.gate.b2"] = torch.tensor([float(np.log(3)), 0.0])
    network.load_state_dict(modules["model"])
    pixels = torch.from_numpy(site.data.splits["val"].images[:5].copy())
    maps = fedmpt.explain(network.eval(), to_input(pixels), 1)
    assert maps["transport"].shape == (5, 2, 2) and maps["gate"].shape[0] == 5
    torch.testing.assert_close(maps["transport"].sum(dim=(1, 2)), torch.ones(5))
    first, second = maps["gate"][0].chunk(2)  # two bars of 64 columns
    assert first.sum(dim=1).max() == 48 and second.sum(dim=1).max() == 16
    scores = network(to_input(pixels)).sigmoid()
    features = torch.from_numpy(fedmpt_features.site_features(site, job, "val")[np.arange(5)])
    trained = fedmpt.received(site, modules, job)
    expected, _ = trained(features, trained.text_features(fedmpt_features.site_clip(job.settings).model))
    torch.testing.assert_close(scores, expected, rtol=5e-3, atol=5e-3)


def test_the_first_codes_scores_have_no_maps(at_site):
    _, _, job = at_site(variant="official_v1")
    network = fedmpt.build(LABELS, job.settings)
    assert fedmpt.explain(network, to_input(torch.zeros(1, 8, 8, 1, dtype=torch.uint8)), 0) == {}
