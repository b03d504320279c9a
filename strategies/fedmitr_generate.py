"""Stage A of a job: the pool of synthetic images, one site's model after the other.

A group of batches that is finished is a file, the one in the middle is a checkpoint. All draws are functions of (seed,
purpose, batch, site): it does not matter where the work was cut, in which order the sites are inverted, or by how many
processes.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log
from torch import Tensor, nn

from federation import seeding
from federation.files import load_tensors, save_tensors
from models.fedmitr import Targets, sample_label_vectors, sample_targets, teaching_sites
from models.inversion import InversionSettings, InversionState, Inverted, advance, finish, join, merge, start
from strategies.fedmitr_progress import Monitor, drop_checkpoints, load_checkpoint, locked, save_checkpoint
from strategies.fedmitr_uploads import Job, JobError, private_folder

CHUNK_S = 0.5
"""Seconds of inversion between two looks at the clock; how many iterations that is changes no bit."""
ATTEMPTS = ("inversion", "inversion again")
"""Purposes of a batch's seeds: a batch whose loss was not finite is tried once more, then dropped (spec 10)."""
IMAGE_NAMES = ("images", "labels", "high", "low")


@dataclass(frozen=True)
class Group:
    """Batches of one site that are inverted together: their numbers at the site and their labels."""

    site: int
    batches: tuple[tuple[int, Tensor], ...]

    @property
    def size(self) -> int:
        """Labels in the group."""
        return sum(len(labels) for _, labels in self.batches)


def targets_of(job: Job, settings: InversionSettings) -> Targets:
    """The label of every image and the site that it is drawn from.

    Choice: with rebirth, which gives several images a label, there are so many fewer labels.
    """
    options, floor = job.options, job.options.min_class_count
    images = options.pool_size or max(50 * len(job.labels), 2000)
    size = max(1, round(images / (len(settings.stops) + 1 if settings.rebirth else 1)))
    draws = seeding.generator(job.settings.seed, "inversion targets")
    if job.task == "multilabel":
        return sample_label_vectors(size, job.counts, job.negatives, draws, min_class_count=floor)
    return sample_targets(options.label_sampler, size, job.counts, draws, min_class_count=floor)


def warnings_of(job: Job) -> list[str]:
    """What of the uploads a reader of the result has to know (spec 10)."""
    found = []
    floor = job.options.min_class_count
    if len(job.uploads) == 1:
        found.append(f"there is one upload, of {job.uploads[0].site}: the ensemble is that model")
    held = job.counts >= max(1, floor)
    never = [label for label, there in zip(job.labels, held.any(dim=0).tolist(), strict=True) if not there]
    if never:
        found.append(f"no site holds {floor} samples of {', '.join(never)}: never asked for in synthetic images")
    silent = not_inverted(job)
    for reason in dict.fromkeys(silent.values()):
        sites = ", ".join(site for site, why in silent.items() if why == reason)
        found.append(f"{sites}: {reason}; not inverted, kept in the ensemble")
    return found


def not_inverted(job: Job) -> dict[str, str]:
    """Sites whose models are asked for no image, with the reason (spec 10)."""
    floor = job.options.min_class_count
    if job.task == "multilabel":
        teaches, reason = (job.counts >= max(1, floor)).any(dim=1), f"no label of {floor} samples"
    else:
        teaches, reason = teaching_sites(job.counts, min_class_count=floor), f"fewer than two classes of {floor}"
    return {upload.site: reason for upload, does in zip(job.uploads, teaches.tolist(), strict=True) if not does}


def groups_of(targets: Targets, batch: int, together: int) -> list[Group]:
    """Batches of each site, ``together`` of equal size in a group."""
    groups = []
    for site in targets.sites.unique().tolist():
        batches = list(enumerate(targets.labels[targets.sites == site].split(batch)))
        full = [one for one in batches if len(one[1]) == batch]
        rest = [one for one in batches if len(one[1]) < batch]
        parts = [full[first : first + together] for first in range(0, len(full), together)]
        groups += [Group(site, tuple(part)) for part in (*parts, rest) if part]
    return groups


def pool_name(job: Job, settings: InversionSettings) -> str:
    """Folder of the pool of these uploads and settings: runs of a job that differ elsewhere share it."""
    options = job.options
    drawn_by = ("label_sampler", "pool_size", "inv_batch", "merge_batches", "min_class_count")
    facts = {
        "inversion": asdict(settings),
        "seed": job.settings.seed,
        "task": job.task,
        "uploads": [asdict(upload) for upload in job.uploads],
        **{name: getattr(options, name) for name in drawn_by},
    }
    return "pool-" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def generate(
    job: Job, settings: InversionSettings, device: torch.device, monitor: Monitor
) -> tuple[Inverted, dict[str, Any]]:
    """The pool of synthetic images, float16 on the CPU, and what is to be said of it.

    One site's model is on the device at a time. A second process that needs the same pool waits for the first.
    """
    folder = private_folder(job.folder / pool_name(job, settings))
    targets = targets_of(job, settings)
    groups = groups_of(targets, job.options.inv_batch, job.options.merge_batches)
    with locked(folder, wait=True):
        total = float(sum(group.size for group in groups)) * settings.inv_iters
        shards = [folder / f"shard-{number:05d}.safetensors" for number in range(len(groups))]
        finished = sum(group.size for group, shard in zip(groups, shards, strict=True) if shard.exists())
        monitor.stage("A", total, finished * settings.inv_iters, images_done=finished, images=len(targets.labels))
        network, loaded = None, None
        for number, (group, shard) in enumerate(zip(groups, shards, strict=True)):
            if shard.exists():
                continue
            if loaded != group.site:
                network, loaded = None, group.site  # the one before is freed first
                network = job.model(group.site).to(device)
            work = _Inversion(job, settings, folder, number, group, monitor, finished)
            work.run(network, shard)
            finished += group.size
        drop_checkpoints(folder)
    parts = [load_tensors(shard) for shard in shards]
    shown = [Inverted(*(tensors[name] for name in IMAGE_NAMES)) for tensors, _ in parts if len(tensors["images"])]
    if not shown:
        raise JobError(
            "every batch of the inversion gave a loss that is not finite; lower fedmitr.inv_lr, or look at the sites' "
            "training losses"
        )
    pool = join(shown)
    by_site = {upload.site: {"images": 0, "dropped": 0} for upload in job.uploads}
    for tensors, header in parts:
        by_site[header["site"]]["images"] += len(tensors["images"])
        by_site[header["site"]]["dropped"] += int(header["dropped"])
    facts = {
        "images": len(pool.images),
        "dropped": sum(made["dropped"] for made in by_site.values()),
        "by_site": by_site,
        "seconds": sum(float(header["seconds"]) for _, header in parts),
        "patches_high": pool.high.shape[1],
        "patches_low": pool.low.shape[1],
    }
    return pool, facts


class _Inversion:
    """One group of batches on its way from noise to a shard."""

    def __init__(
        self,
        job: Job,
        settings: InversionSettings,
        folder: Path,
        number: int,
        group: Group,
        monitor: Monitor,
        finished: int,
    ) -> None:
        self.job, self.settings, self.folder, self.number, self.group = job, settings, folder, number, group
        self.monitor, self.finished = monitor, finished
        self.attempt = 0
        self.states: list[InversionState] = []
        self.spent_s, self._since = 0.0, time.monotonic()

    def run(self, network: nn.Module, shard: Path) -> None:
        """Inverts the group, from its checkpoint where there is one, and writes its shard."""
        self._restore(network)
        site, images = self.job.uploads[self.group.site].site, None
        while images is None and self.attempt < len(ATTEMPTS):
            self.states = self.states or self._started(network, site)
            try:
                images = self._images(network)
            except FloatingPointError as error:
                log(WARNING, "\tinversion of %s, group %s: %s", site, self.number, error)
                self.states, self.attempt = [], self.attempt + 1
        if images is None:
            log(WARNING, "\tgroup %s of %s is dropped: its loss was not finite twice", self.number, site)
        held = (torch.zeros(0),) * len(IMAGE_NAMES) if images is None else images
        tensors = {name: value.cpu() for name, value in zip(IMAGE_NAMES, held, strict=True)}
        tensors["images"] = tensors["images"].half()
        dropped = self.group.size if images is None else 0
        save_tensors(shard, tensors, {"dropped": str(dropped), "seconds": f"{self._seconds():.3f}", "site": site})

    def _started(self, network: nn.Module, site: str) -> list[InversionState]:
        seed, purpose = self.job.settings.seed, ATTEMPTS[self.attempt]
        return [
            start(network, labels, self.settings, seeding.generator(seed, purpose, batch, site))
            for batch, labels in self.group.batches
        ]

    def _images(self, network: nn.Module) -> Inverted:
        if len(self.states) > 1:
            together = max(self.settings.stops, default=self.settings.inv_iters - 1) + 1
            for state in self.states:
                self._advance(network, state, together)
            if together < self.settings.inv_iters:
                self.states = [merge(self.states)]
        for state in self.states:
            self._advance(network, state, self.settings.inv_iters)
        return join([finish(network, state, self.settings) for state in self.states])

    def _advance(self, network: nn.Module, state: InversionState, until: int) -> None:
        chunk = 1
        while state.iteration < until:
            began = time.monotonic()
            advance(network, state, self.settings, min(chunk, until - state.iteration))
            chunk = max(1, min(2 * chunk, int(chunk * CHUNK_S / max(1e-6, time.monotonic() - began))))
            done = sum(len(each.labels) * each.iteration for each in self.states)
            self.monitor.step(
                self.finished * self.settings.inv_iters + done,
                loss=lambda: float(state.trace[state.iteration - 1].mean()),
                save=self._save,
                site=f"{self.group.site + 1}/{len(self.job.uploads)}",
                batch=self.number,
                iteration=state.iteration,
                images_done=self.finished,
            )

    def _save(self) -> None:
        tensors = {
            f"{place}/{name}": value
            for place, one in enumerate(self.states)
            for name, value in one.state_dict().items()
        }
        about = {"group": self.number, "attempt": self.attempt, "states": len(self.states), "spent_s": self._seconds()}
        save_checkpoint(self.folder, tensors, about)

    def _restore(self, network: nn.Module) -> None:
        found = load_checkpoint(self.folder)
        if found is None or found[1]["group"] != self.number:
            return
        tensors, about = found
        device = next(network.parameters()).device
        for place in range(about["states"]):
            own = {name.partition("/")[2]: value for name, value in tensors.items() if name.startswith(f"{place}/")}
            moved = {name: value if name == "iteration" else value.to(device) for name, value in own.items()}
            self.states.append(InversionState.from_state_dict(moved))
        self.attempt, self.spent_s = about["attempt"], about["spent_s"]
        log(INFO, "\tstage A goes on at group %s, iteration %s", self.number, self.states[-1].iteration)

    def _seconds(self) -> float:
        return self.spent_s + time.monotonic() - self._since
