"""FairFAL's query: the sampler on factors beside the same picks from dense gradient embeddings, time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from bench.memory import peak_mb, resident_mb
from bench.rows import Row, alternate, seconds
from models.fairfal import class_quotas, prototype_labels, residuals, select, uncertainty

POOL, LABELLED, CLASSES, WIDTH, BUDGET, KAPPA = 1500, 79, 100, 256, 79, 4
REPEATS = 7
MEMORY_REPEATS = 3
TIME_TARGET, MEMORY_TARGET = "<= 0.05", "<= 0.10"


class Query(NamedTuple):
    """The arguments of `select` but for the budget."""

    uncertainty: Tensor
    pseudo_labels: Tensor
    residuals: Tensor
    features: Tensor
    anchor_residuals: Tensor
    anchor_features: Tensor
    anchor_labels: Tensor


def measure() -> list[Row]:
    """Milliseconds a query without the network's forward passes, and the peak above the process that holds its inputs.

    The peer forms every embedding of C D numbers with one product, which is itself faster than the loop over samples
    and classes of the authors' code. Raises RuntimeError where the picks differ.
    """
    query = drawn()
    if not torch.equal(ours(query), dense(query)):
        raise RuntimeError("the sampler on factors and the dense one pick different samples")
    mine, other = alternate(
        lambda: 1000 * seconds(lambda: ours(query)), lambda: 1000 * seconds(lambda: dense(query)), REPEATS
    )
    size = f"{POOL} in the pool, {LABELLED} labelled, {CLASSES} classes, {WIDTH} features, budget {BUDGET}"
    note = f"{size}, {torch.get_num_threads()} threads; same picks"
    rows = [Row("one query", "ms", mine, "dense embeddings", other, TIME_TARGET, note)]
    peaks = {name: [_peak_of(name) for _ in range(MEMORY_REPEATS)] for name in WAYS}
    return [*rows, Row("peak memory", "MB", peaks["ours"], "dense embeddings", peaks["dense"], MEMORY_TARGET, note)]


def drawn() -> Query:
    """A query as of a network: features of at least 0, a long tail of labels, every class labelled at most often."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(CLASSES, WIDTH, generator=generator)
    shares = 20.0 ** -(torch.arange(CLASSES) / (CLASSES - 1))
    labels = torch.multinomial(shares, POOL + LABELLED, replacement=True, generator=generator)
    features = (centres[labels] + 0.5 * torch.randn(len(labels), WIDTH, generator=generator)).relu()
    logits = features @ torch.randn(WIDTH, CLASSES, generator=generator) / WIDTH**0.5
    pool, known = slice(LABELLED, None), slice(LABELLED)
    return Query(
        uncertainty(logits[pool].softmax(dim=1)),
        prototype_labels(features[known], labels[known], features[pool], CLASSES),
        residuals(logits[pool]),
        features[pool],
        residuals(logits[known], labels[known]),
        features[known],
        labels[known],
    )


def ours(query: Query) -> Tensor:
    """The sampler of the method."""
    return select(*query, BUDGET, KAPPA)


def dense(query: Query) -> Tensor:
    """The same picks as the method reads: embeddings ``(N, C D) float64``, then distances between them."""
    points = (query.residuals[:, :, None] * query.features.double()[:, None, :]).flatten(1)
    anchors = (query.anchor_residuals[:, :, None] * query.anchor_features.double()[:, None, :]).flatten(1)
    quotas = class_quotas(torch.bincount(query.pseudo_labels, minlength=CLASSES).tolist(), BUDGET)
    picks = []
    for label, quota in enumerate(quotas):
        bucket = (query.pseudo_labels == label).nonzero()[:, 0]
        order = query.uncertainty[bucket].argsort(descending=True, stable=True)
        candidates = bucket[order[: KAPPA * quota]]
        if len(candidates) <= quota:
            picks.append(candidates)
            continue
        own, covered = points[candidates], anchors[query.anchor_labels == label]
        nearest = torch.full((len(own),), torch.inf, dtype=torch.float64)
        for anchor in covered:
            nearest = torch.minimum(nearest, (own - anchor).square().sum(dim=1))
        for _ in range(quota):
            pick = int(nearest.argmax())
            picks.append(candidates[pick : pick + 1])
            nearest = torch.minimum(nearest, (own - own[pick]).square().sum(dim=1))
            nearest[pick] = -torch.inf
    return torch.cat(picks).sort().values


WAYS = {"ours": ours, "dense": dense}


def _peak_of(name: str) -> float:
    """Measured in a process of its own: a peak is of the whole life of a process."""
    command = [sys.executable, "-m", "bench.fairfal", name]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def main(name: str) -> None:
    """Prints the peak of one query above the resident memory before it, in MB."""
    query = drawn()
    before = resident_mb()
    WAYS[name](query)
    print(json.dumps(max(0.0, peak_mb() - before)))


if __name__ == "__main__":
    main(sys.argv[1])
