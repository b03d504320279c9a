"""Pooled figures are those of all scores together, whatever site they came from and in whatever order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, roc_auc_score

from federation.metrics import ScoreHistogram, confusion_matrix
from strategies.evaluation import PooledScores
from strategies.gate import Reply

LABELS = ("cat", "dog", "owl")


def site_scores(seed, count, task="multilabel"):
    rng = np.random.default_rng(seed)
    scores = rng.random((count, 3))
    if task == "multiclass":
        scores /= scores.sum(1, keepdims=True)
        return scores, np.eye(3, dtype=int)[rng.integers(0, 3, count)]
    return scores, (rng.random((count, 3)) < 0.3 + 0.4 * scores).astype(int)


def reply(site, scores, targets, loss_sum=1.0, confusion=False):
    histogram = ScoreHistogram(3, 1024)
    histogram.update(scores, targets)
    arrays = histogram.to_arrays()
    if confusion:
        arrays["confusion"] = confusion_matrix(scores.argmax(1), targets.argmax(1), 3)
    numbers = {"loss.val": {"loss_sum": loss_sum, "num_examples": len(scores)}}
    return Reply(site, 1, {}, {"val": arrays}, numbers, 0.0)


def pooled(replies, task="multilabel"):
    pool = PooledScores(LABELS, task, 1024)
    for item in replies:
        pool.add(item, "val")
    return pool


@pytest.fixture
def sites():
    return {name: site_scores(seed, count) for seed, (name, count) in enumerate({"a": 40, "b": 400, "c": 90}.items())}


def test_pooled_auroc_is_scikit_learns_on_all_scores_together(sites):
    summary = pooled([reply(name, *data) for name, data in sites.items()]).summary(None, set())
    scores, targets = (np.concatenate(parts) for parts in zip(*sites.values(), strict=True))
    expected = roc_auc_score(targets, scores, average=None)
    assert summary["macro_auroc"] == pytest.approx(expected.mean(), abs=5e-4)
    assert summary["worst_auroc"] == pytest.approx(expected.min(), abs=5e-4)
    assert summary["num_examples"] == 530


def test_each_sites_own_figures_stand_beside(sites):
    pool = pooled([reply(name, *data) for name, data in sites.items()])
    assert pool.sites == ["a", "b", "c"]
    for name, (scores, targets) in sites.items():
        expected = roc_auc_score(targets, scores, average=None)
        assert pool.summary(None, set(), name)["macro_auroc"] == pytest.approx(expected.mean(), abs=5e-4)


def test_the_order_of_replies_changes_nothing(sites):
    replies = [reply(name, *data) for name, data in sites.items()]
    assert pooled(replies).summary(None, set()) == pooled(replies[::-1]).summary(None, set())


def test_a_reply_without_scores_changes_nothing(sites):
    replies = [reply(name, *data) for name, data in sites.items()]
    pool = pooled(replies)
    before = pool.summary(None, set())
    pool.add(Reply("d", 1, {}, {}, {}, 0.0), "val")
    assert pool.summary(None, set()) == before and pool.sites == ["a", "b", "c"]
    assert pool.summary(None, set(), "d") == {}


def test_the_loss_is_the_mean_over_all_samples_not_over_sites():
    pool = pooled([reply("a", *site_scores(0, 10), loss_sum=5.0), reply("b", *site_scores(1, 30), loss_sum=45.0)])
    assert pool.summary(None, set())["loss"] == (5.0 + 45.0) / 40
    assert pool.summary(None, set(), "a")["loss"] == 0.5


def test_losses_that_add_up_to_infinity_are_undefined_not_infinite():
    pool = pooled([reply(name, *site_scores(0, 2), loss_sum=1.7e308) for name in ("a", "b")])
    assert pool.summary(None, set())["loss"] is None


def test_a_methods_own_counts_stand_by_site_and_enter_no_mean():
    """A list of counts is nothing that a mean over sites could be made of; a number beside it is."""
    numbers = {"a": {"calls": [3, -1], "cosine": 0.5}, "b": {"calls": [4, 5], "cosine": 1.0}}
    pool = PooledScores(LABELS, "multilabel", 1024)
    for seed, (site, extra) in enumerate(numbers.items()):
        found = reply(site, *site_scores(seed, 10))
        pool.add(replace(found, numbers={**found.numbers, "extra.val": extra}), "val")
    assert pool.counts == {"a": {"calls": [3, -1]}, "b": {"calls": [4, 5]}}
    assert pool.summary(None, set())["cosine"] == 0.75 and pool.summary(None, set(), "a")["cosine"] == 0.5
    assert "calls" not in pool.summary(None, set()) and "calls" not in pool.summary(None, set(), "a")


def test_nothing_measured_is_undefined_not_zero():
    summary = pooled([]).summary(None, set())
    assert summary["macro_auroc"] is None and summary["loss"] is None and summary["num_examples"] == 0


def test_an_excluded_label_is_in_its_row_and_in_no_headline(sites):
    pool = pooled([reply(name, *data) for name, data in sites.items()])
    summary = pool.summary(None, {"owl"})
    rows = {row["label"]: row for row in pool.per_class(None, {"owl"})}
    assert summary["excluded_labels"] == ["owl"] and summary["auroc_classes"] == 2
    assert summary["macro_auroc"] == pytest.approx((rows["cat"]["auroc"] + rows["dog"]["auroc"]) / 2)
    assert rows["owl"]["auroc"] is not None


def test_one_label_tasks_have_accuracy_from_added_confusions():
    sites = {name: site_scores(seed, 50 + seed, "multiclass") for seed, name in enumerate("ab")}
    pool = pooled([reply(name, *data, confusion=True) for name, data in sites.items()], "multiclass")
    scores, targets = (np.concatenate(parts) for parts in zip(*sites.values(), strict=True))
    assert pool.summary(None, set())["accuracy"] == pytest.approx(accuracy_score(targets.argmax(1), scores.argmax(1)))
    own_scores, own_targets = sites["a"]
    own = accuracy_score(own_targets.argmax(1), own_scores.argmax(1))
    assert pool.summary(None, set(), "a")["accuracy"] == pytest.approx(own)


def test_received_arrays_are_not_written_to(sites):
    replies = [reply(name, *data, confusion=True) for name, data in sites.items()]
    copies = [{key: value.copy() for key, value in item.scores["val"].items()} for item in replies]
    pool = pooled([*replies, reply("z", *site_scores(9, 5), confusion=True)], "multiclass")
    assert math.isfinite(pool.summary(None, set())["loss"])
    for item, copy in zip(replies, copies, strict=True):
        for key, value in copy.items():
            np.testing.assert_array_equal(item.scores["val"][key], value)


def test_thresholds_of_the_best_f1_are_no_worse_than_one_half(sites):
    pool = pooled([reply(name, *data) for name, data in sites.items()])
    thresholds = pool.best_thresholds()
    assert thresholds.shape == (3,)
    best, plain = (pool.summary(which, set())["macro_f1"] for which in (thresholds, None))
    assert best >= plain
