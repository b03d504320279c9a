"""FairFAL at a site: the picks of the plain algorithm, the local model, the labelled set on disk, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client_app import fairfal, fairfal_models
from client_app.fairfal_models import Seen, local_network, seen_by
from client_app.fairfal_pool import NothingLabelled, frozen_labels, known_at, labelled_part, open_site_pool, rows_of
from client_app.handler import profile
from client_app.site import open_folder, open_site
from client_app.training import Diverged, Job
from datasets.annotation_pool import Answer, receive
from datasets.annotation_store import change, read_pool
from datasets.records import DataError
from federation.settings import Settings
from models import fairfal as maths
from models.fairfal_exchange import ONE_CLASS
from strategies.initial import seeded
from tests.strategies.fairfal_data import LABELS, config_of, write_data

NODE = {"partition-id": 0, "num-partitions": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("fairfal") / "data.npz")


@pytest.fixture
def at_site(data, tmp_path):
    """``at_site(**changes)``: the only site with 66 images, a job of round 3, and the received model."""

    def make(source=data, server_round=3, **changes):
        changes = {"data__num_sites": 1, "federation__min_sites": 1, **changes}
        settings = Settings.from_run_config(config_of(source, tmp_path / "runs", **changes))
        site = open_site(settings, NODE, open_folder(settings, NODE, "exp-1"))
        network = seeded(lambda: fairfal.build(site.data.labels, settings), settings)
        return site, Job(settings, server_round, 0, {}, torch.device("cpu")), {"model": network.state_dict()}

    return make


def ask(site, job, modules, question="select", cycle=1, budget=9, gamma_bar=0.2, **config):
    told = {"question": question, "cycle": cycle, "budget": budget, "gamma_bar": gamma_bar, **config}
    return fairfal.answer(site, modules, replace(job, config=told))


def pool_of(site):
    return read_pool(site.folder / "annotation")


# -- the picks --------------------------------------------------------------------------------------------------------


def plain_picks(site, job, modules, weight, gamma_bar, budget):
    """The query of spec 5 written out on dense gradient embeddings; which model is trusted is given."""
    pool = pool_of(site)
    known, names = known_at(pool, 1), pool.unlabelled
    part = labelled_part(site, known)
    rows = np.concatenate([rows_of(site, known), rows_of(site, names)])
    network = fairfal.build(site.data.labels, job.settings)
    network.load_state_dict(modules["model"])
    by_global = seen_by(network, site, job, rows)
    by_local = seen_by(local_network(part, modules, job, 2, "scratch"), site, job, rows)
    n, count = len(known), len(site.data.labels)
    labels = np.argmax(list(known.values()), axis=1)

    features = by_global.features.double()
    unit = F.normalize(features, dim=1)
    means = torch.zeros(count, features.shape[1], dtype=torch.float64)
    for label in np.unique(labels):
        means[label] = unit[:n][labels == label].mean(dim=0)
    similar = unit[n:] @ F.normalize(means, dim=1).T
    for label in range(count):
        if not (labels == label).any():
            similar[:, label] = -torch.inf
    pseudo = similar.argmax(dim=1)
    trusted = (by_global if weight else by_local).logits[n:].double().softmax(dim=1)
    entropy = -(trusted * (trusted + 1e-12).log()).sum(dim=1) / np.log(count)
    p = (by_global if gamma_bar < 0.5 else by_local).logits.double().softmax(dim=1)
    truth = torch.cat([torch.tensor(labels), p[n:].argmax(dim=1)])
    dense = ((F.one_hot(truth, count) - p)[:, :, None] * features[:, None, :]).flatten(1)
    quotas = maths.class_quotas([int((pseudo == c).sum()) for c in range(count)], budget)
    picks = []
    for label, quota in enumerate(quotas):
        bucket = [i for i in entropy.argsort(descending=True, stable=True).tolist() if pseudo[i] == label]
        candidates = bucket[: max(1, int(4 * quota))] if quota else []
        if quota >= len(candidates):
            picks += candidates
            continue
        chosen = [dense[i] for i in np.flatnonzero(labels == label)]
        left = list(candidates)
        for _ in range(quota):
            far = [min((((dense[n + i] - other) ** 2).sum() for other in chosen), default=torch.inf) for i in left]
            best = int(np.argmax([float(value) for value in far]))
            chosen.append(dense[n + left[best]])
            picks.append(left.pop(best))
    return {names[i] for i in picks}


@pytest.mark.parametrize(("gamma_bar", "model", "weight"), [(0.2, "global", 1), (0.9, "local", 0)])
def test_picks_are_those_of_the_plain_algorithm_on_dense_embeddings(at_site, gamma_bar, model, weight):
    site, job, modules = at_site(fairfal__query_model=model)
    ask(site, job, modules)
    expected = plain_picks(site, job, modules, weight, gamma_bar, 9)
    assert ask(site, job, modules, cycle=2, gamma_bar=gamma_bar) == {"num_selected": 9, "num_labelled": 18}
    assert set(pool_of(site).picked(2)) == expected


def test_adaptive_takes_one_model_and_opposite_the_other(at_site, tmp_path):
    site, job, modules = at_site()
    ask(site, job, modules)
    part = labelled_part(site, known_at(pool_of(site), 1))
    labels = torch.tensor(np.argmax(list(known_at(pool_of(site), 1).values()), axis=1))
    seen = Seen(torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(9, 2))
    cases = (("adaptive", 0.1, 1), ("opposite", 0.1, 0), ("adaptive", 0.9, 0), ("opposite", 0.9, 1))
    for mode, gamma_bar, expected in cases:
        _, job, _ = at_site(fairfal__query_model=mode)
        job = replace(job, config={"gamma_bar": gamma_bar})
        assert fairfal._weight(seen, seen, labels, part, job, 2) == expected
    _, job, _ = at_site(fairfal__soft_tau=0.1)
    job = replace(job, config={"gamma_bar": 0.3})
    assert fairfal._weight(seen, seen, labels, part, job, 2) == pytest.approx(torch.tensor(1.0).sigmoid().item())


RULES = (
    *("entropy", "margin", "least_confidence", "coreset", "badge"),
    *("logo", "kafal", "feal", "ensemble_logit", "ensemble_rank", "ifal"),
)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_picks_the_budget_once_from_what_is_unlabelled(at_site, rule, monkeypatch):
    monkeypatch.setattr("client_app.fairfal_models.DISTIL_EPOCHS", 2)
    site, job, modules = at_site(fairfal__rule=rule)
    ask(site, job, modules)
    first = set(pool_of(site).labelled)
    assert ask(site, job, modules, cycle=2)["num_selected"] == 9
    picked = pool_of(site).picked(2)
    assert len(set(picked)) == 9 and not first & set(picked)


def test_rules_without_any_label_fall_back_to_the_global_model(at_site):
    for rule in ("fairfal", "kafal", "coreset", "logo"):
        site, job, modules = at_site(fairfal__rule=rule)
        site = replace(site, folder=site.folder / rule)
        site.folder.mkdir()
        assert ask(site, job, modules, cycle=2) == {"num_selected": 9, "num_labelled": 9}


def test_the_reason_names_model_pseudo_label_and_uncertainty(at_site):
    site, job, modules = at_site(fairfal__query_model="global")
    ask(site, job, modules)
    ask(site, job, modules, cycle=2)
    pool = pool_of(site)
    for id in pool.picked(2):
        reason = pool.requests[id].reason
        assert "the global model (entropy)" in reason.text and reason.pseudo_label in LABELS
        assert 0 <= reason.uncertainty <= 1


# -- gamma ------------------------------------------------------------------------------------------------------------


def test_gamma_is_the_ratio_of_the_balanced_prior_over_present_classes(at_site):
    site, job, modules = at_site(fairfal__balanced_prior="class_mean")
    ask(site, job, modules)
    known = known_at(pool_of(site), 1)
    labels = np.argmax(list(known.values()), axis=1)
    network = fairfal.build(site.data.labels, job.settings)
    network.load_state_dict(modules["model"])
    p = seen_by(network, site, job, rows_of(site, known)).logits.double().softmax(dim=1)
    prior = torch.stack([p[labels == label].mean(dim=0) for label in np.unique(labels)]).mean(dim=0)
    present = prior[np.unique(labels)]
    expected = float(present.min() / present.max())
    assert ask(site, job, modules, "stats", cycle=2)["gamma"] == pytest.approx(expected, rel=1e-12)


def test_a_site_without_labels_sends_no_gamma(at_site):
    site, job, modules = at_site()
    with pytest.raises(NothingLabelled):
        ask(site, job, modules, "stats", cycle=2)


def test_a_site_of_one_class_sends_gamma_1_unless_such_sites_are_left_out(at_site):
    for skips, expected in ((False, 1.0), (True, ONE_CLASS)):
        site, job, modules = at_site(fairfal__skip_single_class=skips)
        ask(site, job, modules, budget=1)
        assert ask(site, job, modules, "stats", cycle=2) == {"gamma": expected}


def test_a_site_of_two_classes_is_never_left_out(at_site):
    site, job, modules = at_site(fairfal__skip_single_class=True)
    ask(site, job, modules)
    assert 0 < ask(site, job, modules, "stats", cycle=2)["gamma"] <= 1


def test_noise_of_counts_is_the_sites_own_and_stays_the_same(at_site):
    site, job, modules = at_site(fairfal__class_budget="global_inverse", fairfal__count_noise=50)
    ask(site, job, modules)
    first = ask(site, job, modules, "counts", cycle=2)
    assert first == ask(site, job, modules, "counts", cycle=2) != ask(site, job, modules, "counts", cycle=3)
    (site.folder / "noise.key").unlink()
    assert ask(site, job, modules, "counts", cycle=2) != first


# -- the local model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "dropped_after"), [("step", 3), ("epoch", 6)])
def test_the_local_rate_drops_after_three_quarters_of_the_epochs_in_steps_or_epochs(
    at_site, unit, dropped_after, monkeypatch
):
    rates = []

    def spy(network, site, job, *, optimiser, after_step, epochs):
        for _ in range(2):  # two steps an epoch
            rates.append(optimiser.param_groups[0]["lr"])
            if after_step:
                after_step()

    monkeypatch.setattr("client_app.fairfal_models.fit", spy)
    site, job, modules = at_site(fairfal__local_epochs=4, fairfal__local_lr_unit=unit, training__lr=0.01)
    ask(site, job, modules)
    local_network(labelled_part(site, known_at(pool_of(site), 1)), modules, job, 2, "scratch")
    expected = [0.01] * dropped_after + [0.001] * (8 - dropped_after)
    assert rates == pytest.approx(expected)


def test_the_local_model_stops_once_it_knows_its_images(at_site):
    site, job, modules = at_site(fairfal__local_epochs=500, training__lr=0.1)
    ask(site, job, modules, budget=4)
    part = labelled_part(site, known_at(pool_of(site), 1))
    network = local_network(part, modules, job, 2, "scratch")
    seen = seen_by(network, part, job, np.arange(4))
    truth = torch.from_numpy(part.data.splits["train"].targets).argmax(dim=1)
    assert (seen.logits.argmax(dim=1) == truth).all()


def test_the_last_rounds_model_is_kept_for_the_rules_that_ask_it(at_site):
    site, job, modules = at_site(server_round=2, fairfal__local_model="last_fl")
    ask(site, job, modules)
    update = fairfal.train(site, modules, job)
    kept = site.load_state("last", 2)
    for name, value in update.modules["model"].items():
        expected = modules["model"][name] + value if value.is_floating_point() else value
        assert torch.equal(kept[name], expected)
    network = local_network(site, modules, replace(job, server_round=3), 2, "last_fl")
    assert all(torch.equal(value, kept[name]) for name, value in network.state_dict().items())


# -- the labelled set -------------------------------------------------------------------------------------------------


def test_a_repeated_question_changes_nothing_even_with_another_model_or_budget(at_site):
    site, job, modules = at_site()
    ask(site, job, modules)
    first = ask(site, job, modules, cycle=2)
    journal = (site.folder / "annotation" / "journal.jsonl").read_bytes()
    other = {"model": {name: torch.zeros_like(value) for name, value in modules["model"].items()}}
    assert ask(site, job, other, cycle=2, budget=30) == first
    assert (site.folder / "annotation" / "journal.jsonl").read_bytes() == journal


def test_an_older_cycle_that_is_trained_again_sees_no_later_label(at_site):
    site, job, modules = at_site(server_round=2)
    ask(site, job, modules)
    before = fairfal.train(site, modules, job)
    for cycle in (2, 3):
        ask(site, job, modules, cycle=cycle)
    again = fairfal.train(site, modules, job)
    assert before.num_examples == again.num_examples == 9
    assert all(torch.equal(value, again.modules["model"][name]) for name, value in before.modules["model"].items())
    assert ask(site, job, modules, cycle=1) == {"num_selected": 9, "num_labelled": 9}


def test_labels_that_arrive_in_a_cycle_count_from_the_next(at_site):
    site, job, modules = at_site(fairfal__labels="readers", server_round=1)
    split = site.data.splits["train"]
    unlabelled = replace(split, targets=np.where(np.arange(66)[:, None] < 5, split.targets, -1).astype(np.int8))
    site = replace(site, data=replace(site.data, splits={**site.data.splits, "train": unlabelled}))
    assert ask(site, job, modules) == {"num_selected": 9, "num_labelled": 5}
    assert fairfal.train(site, modules, job).num_examples == 5
    picked = pool_of(site).picked(1)
    truth = split.targets[rows_of(site, picked)].tolist()
    answers = [
        Answer(id, tuple(marks), "ann", "2026-01-01T12:00:00")
        for id, marks in list(zip(picked, truth, strict=True))[:4]
    ]
    change(site.folder / "annotation", lambda pool: receive(pool, answers, "last"))
    assert fairfal.train(site, modules, replace(job, server_round=2)).num_examples == 5
    assert ask(site, job, modules, cycle=2)["num_labelled"] == 9
    assert fairfal.train(site, modules, replace(job, server_round=3)).num_examples == 9
    assert not set(pool_of(site).picked(2)) & set(picked), "what is pending is not picked again"


def test_given_labels_start_without_a_pick(at_site):
    site, job, modules = at_site(fairfal__labels="readers", fairfal__first_round="given")
    assert ask(site, job, modules) == {"num_selected": 0, "num_labelled": 66}


def test_a_damaged_labelled_set_and_other_data_are_told(at_site):
    site, job, modules = at_site()
    ask(site, job, modules)
    frozen_labels(site, job.settings, 1)
    path = site.folder / "labelled" / "0001.json"
    assert set(json.loads(path.read_text())) == {"cycle", "labels", "marks"} and path.stat().st_mode & 0o77 == 0
    path.write_text("{")
    with pytest.raises(DataError, match="damaged; delete it"):
        fairfal.train(site, modules, replace(job, server_round=1))
    other = replace(site, data=replace(site.data, manifest_sha256="of other data"))
    with pytest.raises(DataError, match="was made of data with the checksum"):
        open_site_pool(other, job.settings)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_no_budget_and_no_pool_train_no_local_model(at_site, monkeypatch):
    monkeypatch.setattr("client_app.fairfal.local_network", lambda *_: pytest.fail("trained for nothing"))
    site, job, modules = at_site()
    ask(site, job, modules, budget=66)
    assert ask(site, job, modules, cycle=2) == {"num_selected": 0, "num_labelled": 66}
    assert ask(site, job, modules, cycle=3, budget=0)["num_selected"] == 0


def test_a_model_that_is_not_finite_picks_nothing_and_is_named_with_the_count(at_site):
    site, job, modules = at_site()
    ask(site, job, modules)
    modules["model"]["linear.bias"][0] = torch.nan
    with pytest.raises(Diverged, match="site-00: the model gives 66 of 66 images values that are not finite"):
        ask(site, job, modules, cycle=2)
    assert not pool_of(site).picked(2)


def not_finite_for(monkeypatch, site, ids):
    """Both models say NaN of these images of the pool or the labelled set."""
    bad = set(rows_of(site, tuple(ids)).tolist())
    whole = fairfal_models.load_batch

    def load(split, batch, *how, **named):
        images, targets = whole(split, batch, *how, **named)
        if split is site.data.splits["train"]:
            images[[row in bad for row in batch.tolist()]] = torch.nan
        return images, targets

    monkeypatch.setattr(fairfal_models, "load_batch", load)


@pytest.mark.parametrize("rule", ["fairfal", "entropy", "coreset", "logo"])
def test_images_of_which_a_model_says_nan_are_never_picked_where_they_are_skipped(at_site, rule, monkeypatch):
    site, job, modules = at_site(fairfal__rule=rule, fairfal__skip_not_finite=True)
    ask(site, job, modules)
    before = pool_of(site)
    not_finite_for(monkeypatch, site, bad := before.unlabelled[::2])
    assert ask(site, job, modules, cycle=2, budget=40) == {"num_selected": 28, "num_labelled": 37}
    after = pool_of(site)
    assert set(after.unlabelled) == set(bad) and not set(after.picked(2)) & set(bad)
    log = (site.folder / "site.log").read_text()
    assert "cycle=2 29 of 57 images of the pool have values that are not finite: not picked from" in log


def test_without_bad_images_skipping_changes_no_pick(at_site):
    picked = []
    for skips in (False, True):
        site, job, modules = at_site(fairfal__skip_not_finite=skips)
        site = replace(site, folder=site.folder / str(skips))
        site.folder.mkdir()
        ask(site, job, modules)
        ask(site, job, modules, cycle=2)
        picked.append(pool_of(site).picked(2))
    assert picked[0] == picked[1]


def test_nan_of_a_labelled_image_or_of_the_whole_pool_is_not_skipped(at_site, monkeypatch):
    site, job, modules = at_site(fairfal__skip_not_finite=True)
    ask(site, job, modules)
    pool = pool_of(site)
    for ids, text in ((pool.unlabelled, "57 of 57 images of the pool"), (list(pool.labelled)[:2], "2 of 9 images")):
        with monkeypatch.context() as patch, pytest.raises(Diverged, match=f"site-00: .*{text}"):
            not_finite_for(patch, site, ids)
            ask(site, job, modules, cycle=2)
    assert not pool_of(site).picked(2)


def test_all_zero_features_go_to_the_lowest_present_class_and_are_counted_in_the_log(at_site):
    site, job, modules = at_site(fairfal__query_model="global")
    ask(site, job, modules)
    dead = {name: torch.zeros_like(value) for name, value in modules["model"].items()}
    assert ask(site, job, {"model": dead}, cycle=2)["num_selected"] == 9
    pool = pool_of(site)
    lowest = LABELS[min(np.argmax(list(known_at(pool, 1).values()), axis=1))]
    assert {pool.requests[id].reason.pseudo_label for id in pool.picked(2)} == {lowest}
    assert "66 of 66 images have features that are all zero" in (site.folder / "site.log").read_text()


def test_the_card_counts_the_pool_and_withholds_the_classes(at_site):
    site, job, _ = at_site()
    card = profile(site, job.settings, fairfal)["metrics"]
    assert card["num_train"] == 66 and card["positives"] == card["negatives"] == [-1, -1, -1]


def test_blind_classes_are_told_in_the_sites_log(at_site):
    site, job, modules = at_site()
    ask(site, job, modules, budget=1)
    ask(site, job, modules, cycle=2)
    assert "blind classes, never labelled here" in (site.folder / "site.log").read_text()


def test_samples_without_a_label_are_no_oracles_business(at_site):
    site, job, _ = at_site()
    split = site.data.splits["train"]
    targets = split.targets.copy()
    targets[:10] = -1
    part = replace(site, data=replace(site.data, splits={**site.data.splits, "train": replace(split, targets=targets)}))
    assert len(open_site_pool(part, job.settings).ids) == 56
