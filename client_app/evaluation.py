"""How the received model does on the site's own samples, as counts that add up across sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from client_app.site import Site
from client_app.training import Build, Diverged, Job, Modules, load_batch, network_for, received_network
from federation.metrics import ScoreHistogram, confusion_matrix
from models.losses import LOSSES, probabilities

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Scores:
    """What leaves a site: the histogram's arrays (with ``confusion`` for one-label tasks), and the loss as a sum.

    ``extra``: the numbers that the site half declares in ``EVALUATION_EXTRA``.
    """

    arrays: dict[str, np.ndarray]
    num_examples: int
    loss_sum: float
    extra: Mapping[str, float | list[int]] = field(default_factory=dict)


def evaluate(site: Site, modules: Modules, job: Job, split: str, build: Build = network_for) -> Scores:
    """Scores of the module ``model`` on one split. A method that measures more gives its own `evaluate`."""
    return score(received_network(site, modules, job, build), site, job, split)


@torch.no_grad()
def score(
    network: nn.Module,
    site: Site,
    job: Job,
    split: str,
    *,
    rows: np.ndarray | None = None,
    forward: Callable[[np.ndarray, Tensor], Tensor] | None = None,
) -> Scores:
    """Scores of a network on one split; small cells are suppressed here, before anything leaves.

    ``rows``: samples to score (default all); ``forward``: rows and their images to logits (default the network's).
    ``num_examples`` counts samples with a known label; ``loss_sum`` is their mean loss times that count. Raises
    Diverged where a score is not a number.
    """
    samples, task, area = site.data.splits[split], site.data.task, job.settings.evaluation
    network.to(job.device).eval()
    num_labels = len(site.data.labels)
    histogram = ScoreHistogram(num_labels, area.bins)
    confusion = np.zeros((num_labels, num_labels), np.int64)
    total, entries, known_samples = 0.0, 0, 0
    unused = torch.Generator()
    rows = np.arange(len(samples)) if rows is None else rows
    for start in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[start : start + EVALUATION_BATCH]
        images, targets = load_batch(samples, batch, "none", unused, job.settings.model.normalise)
        images = images.to(job.device)
        logits = (network(images) if forward is None else forward(batch, images)).float().cpu()
        if not torch.isfinite(logits).all():
            raise Diverged(f"the model of round {job.server_round} gives scores that are no numbers")
        scores = probabilities(logits, task)
        histogram.update(scores, targets == 1, targets >= 0)
        batch_total, batch_entries = LOSSES[task](logits, targets)
        total, entries = total + float(batch_total), entries + batch_entries
        known_samples += int((targets >= 0).any(dim=1).sum())
        if task == "multiclass":
            truth = torch.where((targets == 1).any(dim=1), targets.argmax(dim=1), -1)
            confusion += confusion_matrix(scores.argmax(dim=1), truth, num_labels)
    arrays = histogram.suppress(job.settings.privacy.min_cell).to_arrays()
    if task == "multiclass":
        arrays["confusion"] = suppress_small(confusion, job.settings.privacy.min_cell)
    return Scores(arrays, known_samples, total / max(entries, 1) * known_samples)


def suppress_small(counts: np.ndarray, min_cell: int) -> np.ndarray:
    """Counts with every cell from 1 to ``min_cell - 1`` set to 0, same shape and dtype."""
    return np.where((counts > 0) & (counts < min_cell), 0, counts)
