"""Our own arithmetic beside well-kept libraries: pooled AUROC beside scikit-learn, entropic transport beside POT."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from bench.rows import Row, alternate, seconds
from federation.metrics import ScoreHistogram
from models.fedmpt_transport import sinkhorn

REPEATS = 7
SITES, SAMPLES, LABELS, BINS = 10, 20_000, 14, 1024
PROBLEMS, PATCHES, CONDITIONS, REG = 640, 49, 5, 0.1


def measure() -> list[Row]:
    """Milliseconds each. Raises RuntimeError where the results differ by more than a histogram or float32 may."""
    return [_auroc(), _transport()]


def _auroc() -> Row:
    """Every site's histogram and their sum beside all raw scores at one place, which no server has."""
    rng = np.random.default_rng(0)
    targets = (rng.random((SITES, SAMPLES, LABELS)) < 0.1).astype(np.int8)
    scores = 1 / (1 + np.exp(-(rng.standard_normal(targets.shape) + targets - 2))).astype(np.float32)

    def ours() -> np.ndarray:
        total = ScoreHistogram(LABELS, BINS)
        for part, truth in zip(scores, targets, strict=True):
            total.update(part, truth)
        return np.asarray(total.auroc())

    def peer() -> np.ndarray:
        return roc_auc_score(targets.reshape(-1, LABELS), scores.reshape(-1, LABELS), average=None)

    gap = float(np.abs(ours() - peer()).max())
    if gap > 1e-3:
        raise RuntimeError(f"the AUROC of histograms is {gap:g} off that of the scores")
    mine, other = alternate(lambda: 1000 * seconds(ours), lambda: 1000 * seconds(peer), REPEATS)
    note = f"{SITES} sites of {SAMPLES} samples, {LABELS} labels, {BINS} bins; largest difference {gap:.1e}"
    return Row("AUROC of added histograms", "ms", mine, "scikit-learn, pooled scores", other, "<= 1", note)


def _transport() -> Row:
    """FedMPT's transport problems of a batch, without gradients."""
    draws = torch.Generator().manual_seed(0)
    cost = torch.rand(PROBLEMS, PATCHES, CONDITIONS, generator=draws)
    a, b = (torch.full((PROBLEMS, size), 1 / size) for size in (PATCHES, CONDITIONS))

    def solved(solver: str) -> torch.Tensor:
        with torch.no_grad():
            return sinkhorn(cost, a, b, REG, solver=solver)

    gap = float((solved("kernel") - solved("pot")).abs().max())
    if gap > 1e-5:
        raise RuntimeError(f"our plans are {gap:g} off those of POT")
    mine, other = alternate(
        lambda: 1000 * seconds(lambda: solved("kernel")), lambda: 1000 * seconds(lambda: solved("pot")), REPEATS
    )
    note = f"{PROBLEMS} problems of {PATCHES} x {CONDITIONS}, 20 iterations; largest difference {gap:.1e}"
    return Row("entropic transport, a batch", "ms", mine, "POT, solve_batch", other, "<= 1", note)
