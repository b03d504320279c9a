"""Headline figures: what is averaged, what is left out, and that both are said."""

import json

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, recall_score

from federation.metrics import ScoreHistogram, confusion_matrix
from federation.summaries import per_class_table, summarise, summarise_confusion

LABELS = ["Atelectasis", "COVID-19", "Effusion", "Hernia", "Mass"]


@pytest.fixture
def histogram():
    """Five labels: Hernia has no positive, COVID-19 is perfect (and will be excluded), Mass is the worst."""
    generator = np.random.default_rng(0)
    targets = (generator.random((600, 5)) < [0.3, 0.2, 0.4, 0.0, 0.1]).astype(int)
    separation = np.array([1.5, 20.0, 2.0, 1.0, 0.5])
    scores = 1 / (1 + np.exp(-generator.normal(targets * separation - 1, 1.0)))
    histogram = ScoreHistogram(5)
    histogram.update(scores, targets, np.ones_like(targets, bool))
    return histogram


def test_macro_leaves_out_undefined_and_excluded_labels_and_names_them(histogram):
    summary = summarise(histogram, LABELS, excluded={"COVID-19"})
    kept = [0, 2, 4]
    assert summary["macro_auroc"] == pytest.approx(histogram.auroc()[kept].mean())
    assert summary["macro_ap"] == pytest.approx(histogram.average_precision()[kept].mean())
    assert summary["macro_f1"] == pytest.approx(histogram.f1()[kept].mean())
    assert summary["auroc_classes"] == 3
    assert summary["undefined_labels"] == ["Hernia"]
    assert summary["excluded_labels"] == ["COVID-19"]
    assert (summary["worst_auroc_label"], summary["worst_auroc"]) == ("Mass", histogram.auroc()[4])
    assert summary["auroc_q50"] == pytest.approx(np.median(histogram.auroc()[kept]))


def test_micro_pools_every_headline_pair_also_of_a_label_without_positives(histogram):
    summary = summarise(histogram, LABELS, excluded={"COVID-19"})
    pooled = histogram.subset([0, 2, 3, 4]).pooled()
    assert summary["micro_auroc"] == pooled.auroc()[0]
    assert summary["micro_f1"] == pytest.approx(pooled.f1()[0])


def test_nothing_to_average_is_none(histogram):
    for summary in (summarise(histogram, LABELS, excluded=LABELS), summarise(ScoreHistogram(5), LABELS)):
        assert {
            summary[f"{kind}_{name}"] for kind in ("macro", "micro", "worst") for name in ("auroc", "ap", "f1")
        } == {None}
        assert summary["auroc_classes"] == 0
        json.dumps(summary, allow_nan=False)


def test_macro_auroc_interval_surrounds_it_and_follows_the_seed(histogram):
    summary, again = (summarise(histogram, LABELS, bootstrap_draws=50, seed=1) for _ in range(2))
    assert summary == again
    assert summary["macro_auroc_low"] < summary["macro_auroc"] < summary["macro_auroc_high"]
    empty = summarise(ScoreHistogram(5), LABELS, bootstrap_draws=5)
    assert empty["macro_auroc_low"] is empty["macro_auroc_high"] is None


def test_table_rows_are_json_and_undefined_is_null(histogram):
    rows = per_class_table(histogram.suppress(60), LABELS, excluded={"COVID-19"}, thresholds=0.4)
    json.dumps(rows, allow_nan=False)
    assert [row["label"] for row in rows] == LABELS
    hernia = rows[3]
    assert hernia["positives"] == 0 and hernia["negatives"] == 600
    assert {hernia[name] for name in ("auroc", "auroc_low", "auroc_high", "ap", "f1", "sensitivity")} == {None}
    assert [row["in_headline"] for row in rows] == [True, False, True, True, True]
    assert [row["suppressed_sites"] for row in rows] == [0, 0, 0, 0, int(0 < histogram.support()[0][4] < 60)]
    first = rows[0]
    assert first["auroc_low"] < first["auroc"] < first["auroc_high"]
    assert first["sensitivity_low"] < first["sensitivity"] < first["sensitivity_high"]
    assert first["threshold"] == histogram.snap(0.4)[0]


def test_wrong_labels_are_refused(histogram):
    with pytest.raises(ValueError, match=r"excluded labels \['Covid'\]"):
        summarise(histogram, LABELS, excluded={"Covid"})
    with pytest.raises(ValueError, match="4 labels for 5 classes"):
        per_class_table(histogram, LABELS[:4])


def test_confusion_summary_is_scikit_learns():
    generator = np.random.default_rng(1)
    targets = generator.integers(0, 3, 150)
    predicted = np.where(generator.random(150) < 0.6, targets, generator.integers(0, 3, 150))
    summary = summarise_confusion(confusion_matrix(predicted, targets, 3), ["a", "b", "c"])
    assert summary["accuracy"] == (targets == predicted).mean()
    assert summary["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(targets, predicted))
    assert summary["macro_f1"] == pytest.approx(f1_score(targets, predicted, average="macro"))
    assert summary["worst_recall"] == recall_score(targets, predicted, average=None).min()


def test_confusion_classes_without_examples_are_left_out_and_counted():
    matrix = np.array([[4, 0, 1], [0, 0, 0], [2, 0, 2]])
    summary = summarise_confusion(matrix, ["a", "b", "c"])
    assert summary["recall_classes"] == 2
    assert (summary["worst_recall"], summary["worst_recall_label"]) == (0.5, "c")
    assert summarise_confusion(matrix, ["a", "b", "c"], excluded={"c"})["accuracy"] == 0.8
    empty = summarise_confusion(np.zeros((2, 2), int), ["a", "b"])
    assert empty["accuracy"] is None and empty["recall_classes"] == 0
    with pytest.raises(ValueError, match=r"2 labels need a \(2, 2\) matrix"):
        summarise_confusion(matrix, ["a", "b"])
