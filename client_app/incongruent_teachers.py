"""Leave-one-out teachers of `incongruent` at a site (LOOT, the project's incongruent specification, section 4.7).

Every site sends its fused features of the same public samples; the server adds them up. Before the next round's
training a site takes its own part out of the sum and moves its features towards the others' mean.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from client_app.incongruent_samples import Samples, read_samples
from client_app.site import Site
from client_app.training import Job, Modules
from datasets.catalogue import open_manifest
from datasets.records import DataError, Split
from datasets.site import load_site
from federation import seeding
from federation.settings import Settings
from models.incongruent import IncongruentNetwork
from models.incongruent_losses import loot_loss, loot_teachers

STATE = "public"
ALIGNMENT_BATCH = 64


@functools.lru_cache(maxsize=2)
def _public_split(settings: Settings, labels: tuple[str, ...]) -> Split:
    """The first training samples of the public data, the same at every site."""
    options, area = settings.options, settings.data
    manifest = open_manifest(
        options.public_root, labels=labels, rng_for=functools.partial(seeding.numpy_generator, settings.seed + 1)
    )
    rows = np.flatnonzero(manifest.table["split"].to_numpy() == "train")[: options.public_samples]
    if len(rows) < options.public_samples:
        raise DataError(
            f"incongruent.public_root has {len(rows)} training samples, {options.public_samples} are needed"
        )
    data = load_site(
        manifest,
        {"train": rows},
        name="public",
        size=area.image_size,
        channels=area.channels,
        cache_dir=None,
        reads_reports=True,
    )
    return data.splits["train"]


def _public(network: IncongruentNetwork, site: Site, job: Job) -> Samples:
    split = _public_split(job.settings, site.data.labels)
    return read_samples(split, job.settings, network.built)


def _features(network: IncongruentNetwork, samples: Samples, rows: np.ndarray, job: Job) -> Tensor:
    """Fused features ``(B, d)`` with the modalities that the site has; zero where it has none of a sample."""
    index, images, _ = samples.load(rows, "none", torch.Generator())
    present = samples.present[index]
    usable = present.any(dim=1)
    tokens = samples.tokens_of(index)
    inputs = (None if part is None else part[usable].to(job.device) for part in (images, tokens, present))
    found = torch.zeros(len(rows), network.dim, device=job.device)
    return found.index_put((usable.nonzero().squeeze(1).to(job.device),), network.features(*inputs).f)


@torch.no_grad()
def public_embeddings(network: IncongruentNetwork, site: Site, job: Job) -> Tensor:
    """The site's features of the public samples ``(n, d)``, kept for the next round and sent."""
    samples = _public(network.eval().to(job.device), site, job)
    rows = np.arange(len(samples.split))
    parts = [
        _features(network, samples, rows[i : i + ALIGNMENT_BATCH], job) for i in range(0, len(rows), ALIGNMENT_BATCH)
    ]
    found = torch.cat(parts).cpu()
    site.save_state(STATE, job.server_round, {"embeddings": found}, job.last_accepted)
    return found


def _teachers(context: Modules, site: Site, job: Job) -> Tensor | None:
    """Mean features of the other sites of the last round ``(n, d)``, None where there were none.

    A site that was not in that round has no part in its sum, whatever it kept of an earlier one.
    """
    total, count = context["public_sum"], int(context["public_sites"])
    if job.last_accepted < job.server_round - 1:
        return total / count if count else None
    own = site.load_state(STATE, job.last_accepted) if job.last_accepted else None
    return None if own is None or count < 2 else loot_teachers(total, own["embeddings"], count)


def align_to_teachers(network: IncongruentNetwork, context: Modules, site: Site, job: Job) -> None:
    """One epoch on the public samples towards the mean of the other sites' features; nothing without teachers."""
    teachers = _teachers(context, site, job)
    if teachers is None:
        return
    teachers = teachers.to(job.device)
    samples = _public(network.to(job.device).train(), site, job)
    parameters = [value for value in network.parameters() if value.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=job.settings.training.lr)
    order = torch.randperm(
        len(teachers), generator=seeding.generator(job.settings.seed, "teachers", job.server_round, site.name)
    )
    with seeding.scope(job.settings.seed, "teachers", job.server_round, site.name):
        for picked in order.split(ALIGNMENT_BATCH):
            loss = loot_loss(
                _features(network, samples, picked.numpy(), job), teachers[picked], job.settings.options.loot_loss
            )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
