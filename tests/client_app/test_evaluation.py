"""What a site says of a model: counts that give scikit-learn's figures on its real scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import confusion_matrix as sklearn_confusion
from sklearn.metrics import roc_auc_score

from client_app.evaluation import EVALUATION_BATCH, evaluate, score, suppress_small
from client_app.site import open_site
from client_app.training import Diverged, Job, fit, load_batch, network_for
from federation.metrics import ScoreHistogram
from federation.settings import Settings


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """``digits(root)``: one site with all digits (or mosaics), a network trained on them for two epochs, and a job."""

    made = {}

    def make(root):
        if root not in made:
            folder = tmp_path_factory.mktemp("digits")
            single = root == "digits"
            settings = Settings.from_run_config(
                {
                    "data.root": root,
                    "data.partition": "iid",
                    "data.num_sites": 1,
                    "federation.min_sites": 1,
                    "data.image_size": 8 if single else 16,
                    "model.width": 4,
                    "training.epochs": 2,
                    "reporting.runs_dir": str(folder),
                }
            )
            site = open_site(settings, {"partition-id": 0}, folder)
            job = Job(settings, 1, 0, {}, torch.device("cpu"))
            torch.manual_seed(0)
            network = network_for(site.data.labels, settings)
            fit(network, site, job)
            made[root] = (site, job, network)
        return made[root]

    return make


def real_scores(site, network, split="test"):
    samples = site.data.splits[split]
    images, targets = load_batch(samples, np.arange(len(samples)), "none", torch.Generator())
    with torch.no_grad():
        logits = network.eval()(images)
    return logits, targets


def histogram_of(scores):
    return ScoreHistogram.from_arrays({name: value for name, value in scores.arrays.items() if name != "confusion"})


@pytest.mark.parametrize("root", ["digits", "digits-mosaic"])
def test_auroc_from_the_histogram_is_scikit_learns_on_the_real_scores(digits, root):
    site, job, network = digits(root)
    found = histogram_of(score(network, site, job, "test")).auroc()
    logits, targets = real_scores(site, network)
    probabilities = torch.softmax(logits, 1) if root == "digits" else torch.sigmoid(logits)
    expected = roc_auc_score(targets.numpy(), probabilities.numpy(), average=None)
    assert expected.min() < 0.999  # scores that separate everything would show nothing
    np.testing.assert_allclose(found, expected, atol=5e-4)


def test_confusion_is_scikit_learns_and_the_loss_torchs(digits):
    site, job, network = digits("digits")
    scores = score(network, site, job, "test")
    logits, targets = real_scores(site, network)
    truth = targets.argmax(1)
    np.testing.assert_array_equal(
        scores.arrays["confusion"], sklearn_confusion(truth, logits.argmax(1), labels=range(10))
    )
    assert scores.num_examples == len(truth) == 382
    assert scores.loss_sum == pytest.approx(F.cross_entropy(logits, truth, reduction="sum").item(), rel=1e-4)


def test_multilabel_loss_is_the_mean_entry_loss_times_the_samples(digits):
    site, job, network = digits("digits-mosaic")
    scores = score(network, site, job, "val")
    logits, targets = real_scores(site, network, "val")
    mean = F.binary_cross_entropy_with_logits(logits, targets.float()).item()
    assert scores.loss_sum == pytest.approx(mean * len(targets), rel=1e-4)
    assert "confusion" not in scores.arrays


def test_batches_do_not_change_the_counts(digits, monkeypatch):
    import client_app.evaluation as module

    site, job, network = digits("digits")
    assert len(site.data.splits["test"]) > EVALUATION_BATCH  # more than one batch already
    whole = score(network, site, job, "test").arrays
    monkeypatch.setattr(module, "EVALUATION_BATCH", 100_000)
    for name, value in score(network, site, job, "test").arrays.items():
        if name.endswith("_steps"):  # a position may round the other way where the sums of a batch differ
            np.testing.assert_allclose(value, whole[name], atol=2)
        else:
            np.testing.assert_array_equal(value, whole[name])


def test_evaluating_changes_neither_network_nor_received_state(digits):
    site, job, network = digits("digits")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    one = evaluate(site, {"model": dict(network.state_dict())}, job, "val")
    other = score(network, site, job, "val")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert one.loss_sum == other.loss_sum


def test_unknown_labels_are_in_no_count(opened):
    site, job = opened()
    site.data.splits["val"].targets[:] = [[1, -1], [0, -1], [-1, -1], [0, 1]]
    torch.manual_seed(0)
    scores = score(network_for(("cat", "dog"), job.settings), site, job, "val")
    positives, negatives = histogram_of(scores).support()
    assert positives.tolist() == [1, 1] and negatives.tolist() == [2, 0]
    assert scores.num_examples == 3
    assert histogram_of(scores).auroc()[1] != histogram_of(scores).auroc()[1]  # nan: no negative


def test_all_unknown_is_a_loss_of_nothing(opened):
    site, job = opened()
    site.data.splits["val"].targets[:] = -1
    scores = score(network_for(("cat", "dog"), job.settings), site, job, "val")
    assert scores.num_examples == 0 and scores.loss_sum == 0.0
    assert not scores.arrays["positives"].any() and not scores.arrays["negatives"].any()


@pytest.mark.parametrize(("min_cell", "blanked"), [(0, [0, 0]), (2, [0, 0]), (3, [1, 0]), (50, [1, 1])])
def test_a_class_with_few_samples_is_blanked_before_anything_leaves(opened, min_cell, blanked):
    site, job = opened(privacy__min_cell=min_cell)
    # cat: 2 positives and 2 negatives; dog: 4 positives and no negative, and 0 is no small cell
    site.data.splits["val"].targets[:] = [[1, 1], [1, 1], [0, 1], [0, 1]]
    arrays = score(network_for(("cat", "dog"), job.settings), site, job, "val").arrays
    assert arrays["suppressed"].tolist() == blanked
    for label, blank in enumerate(blanked):
        assert arrays["positives"][label].sum() == (0 if blank else [2, 4][label])


def test_small_cells_of_a_confusion_are_zero_and_the_others_stay():
    counts = np.array([[0, 1, 4], [5, 6, 100]])
    assert suppress_small(counts, 5).tolist() == [[0, 0, 0], [5, 6, 100]]
    assert suppress_small(counts, 0).tolist() == counts.tolist()
    assert counts.tolist() == [[0, 1, 4], [5, 6, 100]]


def test_a_model_that_gives_no_number_is_not_measured(opened):
    site, job = opened()
    network = network_for(("cat", "dog"), job.settings)
    with torch.no_grad():
        network.head.bias[0] = float("nan")
    with pytest.raises(Diverged, match="scores that are no numbers"):
        score(network, site, job, "val")
