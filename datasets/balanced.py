"""Sites of equal size whose class mixes follow a Dirichlet draw: the partition ``dir_balance`` of FairFAL and LoGo."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from datasets.records import DataError

SINKHORN_STEPS = 5
TINY = 1e-12


def dirichlet_balanced(labels: np.ndarray, num_sites: int, alpha: float, seed: int) -> list[np.ndarray]:
    """The samples of every site, K arrays ``int64``, class by class; sizes differ by at most 1 (spec 9).

    ``labels (n,)`` or ``(n, 1) int``, classes 0..max. Small ``alpha``: few classes a site (at 0.1 even single-class
    sites); 100: every site has nearly the same mix. Each class is shuffled and dealt by `balanced_counts` in the order
    of the sites. The draws are the authors' for the same seed, but from private generators, and ``seed`` is the
    partition's own. Raises DataError for numbers that make no partition.
    """
    labels = np.asarray(labels).reshape(-1)
    if num_sites < 1 or not 0 < alpha < np.inf:
        raise DataError(f"need at least 1 site and a positive, finite alpha, got {num_sites} sites, alpha {alpha}")
    if len(labels) and labels.min() < 0:
        raise DataError(f"labels are class numbers of at least 0, the smallest is {labels.min()}")
    if len(labels) < num_sites:
        raise DataError(f"{len(labels)} samples cannot be dealt to {num_sites} sites; ask for fewer sites")
    class_counts = np.bincount(labels)
    counts = balanced_counts(dirichlet_shares(num_sites, len(class_counts), alpha, seed), class_counts)
    shuffler = random.Random(seed)  # one stream for all classes
    parts: list[list[np.ndarray]] = [[] for _ in range(num_sites)]
    for label in range(len(class_counts)):
        members = np.flatnonzero(labels == label).tolist()
        shuffler.shuffle(members)
        cuts = np.cumsum(counts[:, label])[:-1]
        for site, part in enumerate(np.split(np.array(members, dtype=np.int64), cuts)):
            parts[site].append(part)
    return [np.concatenate(of_site) for of_site in parts]


def dirichlet_shares(num_sites: int, num_classes: int, alpha: float, seed: int) -> Tensor:
    """Shares ``(K, C) float32``: rows drawn from Dirichlet(alpha), then rows and columns scaled in turn, five times."""
    generator = torch.Generator().manual_seed(seed)
    concentration = torch.full((num_classes,), float(alpha))
    # What torch.distributions.Dirichlet calls; that class takes no generator.
    shares = torch.stack([torch._sample_dirichlet(concentration, generator=generator) for _ in range(num_sites)])
    for _ in range(SINKHORN_STEPS):
        shares = shares / (shares.sum(dim=1, keepdim=True) + TINY)
        shares = shares / (shares.sum(dim=0, keepdim=True) + TINY)
    return shares


def balanced_counts(shares: Tensor, class_counts: np.ndarray) -> np.ndarray:
    """Samples of each site and class ``(K, C) int64``: columns sum to ``class_counts (C,)``, rows differ by <= 1.

    Each class is apportioned by its column of ``shares (K, C)`` (largest remainder, ties: the lower site), then samples
    move from sites with too many to sites with too few. A class without shares is dealt evenly.
    """
    num_sites, num_classes = shares.shape
    counts = np.stack([_apportion(shares[:, label], int(class_counts[label])) for label in range(num_classes)], axis=1)
    total = int(np.sum(class_counts))
    wanted = total // num_sites + (np.arange(num_sites) < total % num_sites)
    missing = wanted - counts.sum(axis=1)
    while missing.any():
        _repair(counts, missing)
    return counts


def _apportion(shares: Tensor, count: int) -> np.ndarray:
    """float32, as in the source: another precision rounds some remainders the other way."""
    shares = shares.clamp(min=0)
    if shares.sum() <= 0:
        shares = torch.ones(len(shares)) / len(shares)
    exact = shares / shares.sum() * count
    whole = exact.floor()
    counts = whole.long().numpy()
    order = np.argsort(-(exact - whole).numpy(), kind="stable")
    missing = count - counts.sum()
    if not 0 <= missing <= len(counts):
        raise DataError(f"a class of {count} samples is too large to be apportioned in float32")
    counts[order[:missing]] += 1
    return counts


def _repair(counts: np.ndarray, missing: np.ndarray) -> None:
    """One sweep over the classes, in place. ``missing (K,)`` is what each site lacks, negative where it has too much.

    Sites are listed once: those that lack most first, those that have most to give first. In each class the giver with
    the most to give serves the receivers in turn. Some giver holds some class, so a sweep always moves a sample.
    """
    receivers = [site for site in np.argsort(-missing, kind="stable") if missing[site] > 0]
    givers = [site for site in np.argsort(missing, kind="stable") if missing[site] < 0]
    for label in range(counts.shape[1]):
        supply = {giver: min(counts[giver, label], -missing[giver]) for giver in givers}
        for receiver in receivers:
            for giver in sorted(givers, key=lambda site: -supply[site]):
                moved = min(supply[giver], missing[receiver])
                counts[giver, label] -= moved
                counts[receiver, label] += moved
                missing[giver] += moved
                missing[receiver] -= moved
                supply[giver] -= moved
