"""Three small hospitals' vision transformers, trained on real digits, as the folder of a FedMITR job."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from datasets.embedded import digits
from federation import seeding, wire
from federation.files import load_tensors
from federation.settings import Settings
from models.vit_tokens import subset_logits
from strategies.cards import SiteCard
from strategies.fedmitr_uploads import begin, spool, vit_of

LABELS = tuple("0123456789")
HOLDS = {"east": (0, 1, 2, 3, 4), "north": (3, 4, 5, 6, 7), "west": (8,)}
"""Digits by site: `west` has one class, and nobody has nines."""
SIDE = 16
TINY = {
    "method": "fedmitr",
    "federation.rounds": 1,
    "data.root": "digits",
    "data.image_size": SIDE,
    "training.device": "cpu",
    "evaluation.bins": 256,
    "reporting.tensorboard": False,
    "fedmitr.model": "vit",
    "fedmitr.patch": 4,
    "fedmitr.width": 32,
    "fedmitr.depth": 2,
    "fedmitr.heads": 2,
    "fedmitr.pool_size": 12,
    "fedmitr.inv_batch": 4,
    "fedmitr.inv_iters": 8,
    "fedmitr.stops": "2,5",
    "fedmitr.ratios": "0.3,0.3",
    "fedmitr.kd_epochs": 2,
    "fedmitr.kd_batch": 8,
    "fedmitr.gen_steps": 2,
    "fedmitr.keep_synthetic": True,
}


def settings(**changes):
    """Settings of a tiny job; keys with ``__`` for the dot, bare ones are the method's own."""
    dotted = {(key if "__" in key else f"fedmitr__{key}").replace("__", "."): value for key, value in changes.items()}
    return Settings.from_run_config({**TINY, **dotted})


@functools.cache
def pictures(split="train"):
    """Digits as pixels ``(M, 1, 16, 16) float32`` in [0, 1] and their classes ``(M,) int64``."""
    source = digits()
    rows = [row for row, name in enumerate(source.table["split"]) if name == split]
    images = torch.from_numpy(source.images.array[rows])
    classes = torch.from_numpy(source.targets[rows]).argmax(dim=1)
    return functional.interpolate(images[:, None].float() / 255, size=SIDE), classes


@functools.cache
def trained():
    """The initial state, and each site's change and card after a few dozen steps."""
    given = settings()
    with seeding.scope(1, "wards"):
        network = vit_of(given, len(LABELS))
    initial = {name: value.clone() for name, value in network.state_dict().items()}
    images, classes = pictures()
    out = {}
    for site, held in HOLDS.items():
        mine = torch.isin(classes, torch.tensor(held))
        network.load_state_dict(initial)
        optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
        draws = seeding.generator(1, "wards", 0, site)
        for _ in range(80):
            rows = torch.randint(int(mine.sum()), (64,), generator=draws)
            logits = subset_logits(network, 2 * images[mine][rows] - 1, None)
            loss = functional.cross_entropy(logits, classes[mine][rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        change = {name: (value.detach() - initial[name]).half() for name, value in network.state_dict().items()}
        out[site] = change, card(site, classes[mine])
    return initial, out


def card(site, classes):
    """A site card with these classes as training samples."""
    counts = torch.bincount(classes, minlength=len(LABELS)).tolist()
    return SiteCard(
        node_id=len(site),
        site=site,
        labels=LABELS,
        task="multiclass",
        schema="s",
        modalities=("image",),
        data_sha256=site,
        split_sizes={"train": len(classes), "val": 0, "test": 0},
        positives=tuple(counts),
        negatives=tuple(len(classes) - count for count in counts),
    )


def job(folder, *, sites=tuple(HOLDS), task="multiclass", **changes):
    """A job folder with the uploads of ``sites``, which arrive in that order, and ``settings(**changes)``."""
    initial, done = trained()
    for site in sites:
        change, its_card = done[site]
        spool(folder, its_card, change, its_card.num_train, {"epsilon": -1.0})
    return begin(folder, settings(**changes), LABELS, task, initial)


def pool_of(folder):
    """The shards of the one pool of a job folder, each as tensors by name."""
    (pool,) = folder.glob("pool-*")
    return [load_tensors(shard)[0] for shard in sorted(pool.glob("shard-*.safetensors"))]


def sha256(state):
    """SHA-256 of a model, as a result states it."""
    return wire.state_sha256({"model": state})
