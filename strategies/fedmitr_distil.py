"""Stages B and C of a job: the ensemble's outputs on the pool, and the student that learns from them.

Stage B streams the sites' models over blocks of the pool, so memory grows neither with the sites nor with their
number. A block that is finished is a file; an epoch of stage C is a function of (state, epoch, seed), so a checkpoint
is the student, its momentum and the epoch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from logging import INFO
from pathlib import Path

import torch
from flwr.supercore import log
from torch import Tensor, nn

from federation import seeding
from federation.files import load_tensors, save_tensors
from models.fedmitr import (
    DistilSettings,
    Teacher,
    cached_teacher,
    class_count_weights,
    label_count_weights,
    optimiser_of,
    train_epoch,
)
from models.inversion import Inverted
from strategies.fedmitr_area import statistics
from strategies.fedmitr_progress import Monitor, load_checkpoint, save_checkpoint
from strategies.fedmitr_uploads import Job, JobError, State

BLOCK = 1024
"""Images whose teacher outputs are one file. A multiple of the batch that teachers are run with."""


# -- stage B ----------------------------------------------------------------------------------------------------------


def ensemble_weights(job: Job, labels: Tensor | None = None) -> Tensor:
    """The sites' weights as `models.fedmitr.ensemble_logits` takes them, by ``fedmitr.ensemble_weight``.

    ``labels (M,)`` of the images, for ``label_count``; without them that is ``class_count``, which needs none. A label
    that a site records but has no positive of weighs nothing there, in multi-label tasks too.
    """
    kind = job.options.ensemble_weight
    if kind == "uniform":
        return torch.ones(len(job.uploads))
    if kind == "class_count" or labels is None:
        return class_count_weights(job.counts)
    return label_count_weights(job.counts, labels)


def teachers(job: Job, device: torch.device, before_each: Callable[[int], None] | None = None) -> Iterator[Teacher]:
    """The sites' models in order, each loaded when it is asked for; the one before is free then."""
    mean, std = statistics(job.settings.model.normalise, job.settings.data.channels)
    for site in range(len(job.uploads)):
        if before_each is not None:
            before_each(site)
        yield Teacher(job.model(site).to(device), mean, std)


def teach(job: Job, pool: Inverted, view: str, folder: Path, device: torch.device, monitor: Monitor) -> Tensor:
    """The ensemble's logits on the pool, float16 on the CPU, as `models.fedmitr.cached_teacher` gives them."""
    blocks = list(torch.arange(len(pool.images)).split(BLOCK))
    files = [folder / f"teacher-{number:05d}.safetensors" for number in range(len(blocks))]
    sites = len(job.uploads)
    first = sum(file.exists() for file in files) * sites
    monitor.stage("B", len(blocks) * sites, first, images_done=sum(len(b) for b in blocks[: first // sites]))
    for number, (rows, file) in enumerate(zip(blocks, files, strict=True)):
        if file.exists():
            continue

        def before_each(site: int, number: int = number) -> None:
            monitor.step(number * sites + site, site=f"{site + 1}/{sites}", block=number)

        part = Inverted(*(values[rows] for values in pool))
        weights = ensemble_weights(job, part.labels)
        logits = cached_teacher(teachers(job, device, before_each), weights, part, view, flip=job.options.flip)
        save_tensors(file, {"logits": logits.cpu()})
    return torch.cat([load_tensors(file)[0]["logits"] for file in files], dim=1)


# -- stage C ----------------------------------------------------------------------------------------------------------


def fresh_student(job: Job) -> nn.Module:
    """The network that stage C starts from, on the CPU, by ``fedmitr.global_init``."""
    with seeding.scope(job.settings.seed, "fresh student"):
        student = job.network()
    if job.options.global_init == "average":
        student.load_state_dict(job.average(), strict=True)
    elif job.options.global_init == "pretrained":
        student.load_state_dict(job.initial(), strict=True)
    return student


def distil(
    job: Job,
    pool: Inverted,
    teacher: Tensor | None,
    settings: DistilSettings,
    folder: Path,
    device: torch.device,
    monitor: Monitor,
) -> State:
    """The student's state after ``kd_epochs``, on the CPU. Raises JobError where its loss is not finite."""
    student = fresh_student(job).to(device)
    optimiser = optimiser_of(student, settings)
    held = {"student": student}, {"student": optimiser}

    def one_epoch(epoch: int) -> float:
        draws = seeding.generator(job.settings.seed, "distillation", epoch)
        return train_epoch(student, optimiser, pool, teacher, settings, epoch, draws)

    run_epochs(monitor, restore(folder, *held), settings.kd_epochs, one_epoch, functools.partial(keep, folder, *held))
    return cpu_state(student)


def run_epochs(
    monitor: Monitor, first: int, epochs: int, one_epoch: Callable[[int], float], save: Callable[[int], None]
) -> None:
    """Stage C from epoch ``first`` on: ``one_epoch(number)`` gives its loss, ``save(epochs done)`` a checkpoint.

    Raises JobError for a loss that is not finite.
    """
    monitor.stage("C", epochs, first, epoch=first, epochs=epochs)
    for epoch in range(first, epochs):
        loss = one_epoch(epoch)
        if not math.isfinite(loss):
            raise JobError(f"the student's loss is {loss} in epoch {epoch + 1}; lower fedmitr.kd_lr in a new job")
        monitor.step(
            epoch + 1,
            loss=functools.partial(float, loss),
            save=functools.partial(save, epoch + 1),
            epoch=epoch + 1,
            epochs=epochs,
        )


def cpu_state(network: nn.Module) -> State:
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}


# -- checkpoints of networks with their optimisers --------------------------------------------------------------------


def keep(
    folder: Path,
    networks: dict[str, nn.Module],
    optimisers: dict[str, torch.optim.Optimizer],
    epoch: int,
    *,
    further: State | None = None,
) -> None:
    """Writes networks, their optimisers' moments and ``further`` tensors after ``epoch`` epochs."""
    tensors: State = {f"further/{name}": value for name, value in (further or {}).items()}
    for name, network in networks.items():
        tensors |= {f"network/{name}/{key}": value for key, value in network.state_dict().items()}
    for name, optimiser in optimisers.items():
        for place, moments in optimiser.state_dict()["state"].items():
            tensors |= {
                f"optimiser/{name}/{place}/{key}": torch.as_tensor(value)
                for key, value in moments.items()
                if value is not None
            }
    save_checkpoint(folder, tensors, {"epoch": epoch})


def restore(
    folder: Path,
    networks: dict[str, nn.Module],
    optimisers: dict[str, torch.optim.Optimizer],
    further: State | None = None,
) -> int:
    """Puts back what `keep` wrote, in place; the epochs that are done, 0 without a checkpoint."""
    found = load_checkpoint(folder)
    if found is None:
        return 0
    tensors, about = found
    for name, network in networks.items():
        network.load_state_dict(_below(tensors, f"network/{name}/"), strict=True)
    for name, optimiser in optimisers.items():
        moments: dict[int, State] = {}
        for key, value in _below(tensors, f"optimiser/{name}/").items():
            place, _, moment = key.partition("/")
            moments.setdefault(int(place), {})[moment] = value
        optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
    if further is not None:
        further |= _below(tensors, "further/")
    log(INFO, "\tstage C goes on after epoch %s", about["epoch"])
    return int(about["epoch"])


def _below(tensors: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
