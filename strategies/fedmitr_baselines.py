"""One-shot methods that train a generator instead of inverting: DENSE, Co-Boosting and FedFTG on the same uploads.

Their losses are in `models.fedmitr_baselines`. Each epoch the generator takes ``gen_steps`` steps on one batch of noise
and labels, the batch joins the history, and the student takes as many steps on the history as it would on FedMITR's
pool. All models are on the device together, as in the published codes.

Choices, the same for the three so that they are compared alike: the label enters the generator beside the noise; labels
are drawn evenly from those that may be inverted; the generator goes on from epoch to epoch; the history holds the
newest ``pool_size`` images; the student starts, and its learning rate falls, as FedMITR's.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from federation import seeding
from models.fedmitr import class_count_weights, ensemble_logits, kd_loss, label_loss, normalised, optimiser_of
from models.fedmitr_baselines import (
    ImageGenerator,
    coboost_adversarial_loss,
    dense_adversarial_loss,
    diversity_loss,
    fedftg_class_loss,
    fedftg_distillation_loss,
    hard_sample_loss,
    perturbed,
    reweighted,
)
from models.inversion import frozen
from strategies.fedmitr_area import statistics
from strategies.fedmitr_distil import cpu_state, fresh_student, keep, restore, run_epochs, teachers
from strategies.fedmitr_progress import Monitor
from strategies.fedmitr_uploads import Job, State

METHODS = ("dense", "coboosting", "fedftg")
NOISE = 256


def distil_by_generator(job: Job, folder: Path, device: torch.device, monitor: Monitor) -> State:
    """The student's state after ``kd_epochs`` of a method in `METHODS` (``fedmitr.server``), on the CPU.

    Only for tasks with one label an image; the losses have no other form.
    """
    run = _GeneratorRun(job, device)
    networks = {"student": run.student, "generator": run.generator}
    held = networks, {"student": run.optimiser, "generator": run.generator_optimiser}
    first = restore(folder, *held, run.history)
    save = functools.partial(keep, folder, *held, further=run.history)
    run_epochs(monitor, first, job.options.kd_epochs, run.epoch, save)
    return cpu_state(run.student)


class _GeneratorRun:
    """Student, generator, history and the sites' weights; an epoch is a function of them and its number."""

    def __init__(self, job: Job, device: torch.device) -> None:
        data, self.options, self.seed, self.device = job.settings.data, job.options, job.settings.seed, device
        self.mean, self.std = statistics(job.settings.model.normalise, data.channels)
        self.models = [teacher.model for teacher in teachers(job, device)]
        self.student = fresh_student(job).to(device)
        self.settings = self.options.distillation("whole_kd", job.settings.model.normalise, data.channels)
        self.optimiser = optimiser_of(self.student, self.settings)
        self.num_labels = len(job.labels)
        with seeding.scope(self.seed, "image generator"):
            self.generator = ImageGenerator(
                nz=NOISE + self.num_labels, channels=data.channels, image_size=data.image_size
            ).to(device)
        self.generator_optimiser = torch.optim.Adam(self.generator.parameters(), lr=self.options.gen_lr)
        self.by_class = class_count_weights(job.counts).to(device)
        self.classes = (job.counts >= self.options.min_class_count).any(dim=0).nonzero()[:, 0]
        self.size = self.options.pool_size or max(50 * self.num_labels, 2000)
        self.history: State = {
            "images": torch.zeros(0, data.channels, data.image_size, data.image_size, dtype=torch.float16),
            "labels": torch.zeros(0, dtype=torch.int64),
            "weights": torch.full((len(self.models),), 1 / len(self.models)),
        }

    def epoch(self, epoch: int) -> float:
        """One batch of new images, then the student's steps; its mean loss."""
        draws = seeding.generator(self.seed, "generator epoch", epoch)
        images, labels = self._generated(draws)
        if self.options.server == "coboosting":
            with torch.no_grad():
                logits = self._site_logits(images)
            weights = reweighted(self.history["weights"].to(self.device), logits, labels, epoch)
            self.history["weights"] = weights.cpu()
        for name, new in (("images", images.half().cpu()), ("labels", labels.cpu())):
            self.history[name] = torch.cat([self.history[name], new])[-self.size :]
        for group in self.optimiser.param_groups:
            group["lr"] = 0.5 * self.settings.kd_lr * (1 + math.cos(math.pi * epoch / self.settings.kd_epochs))
        order = torch.randint(len(self.history["images"]), (self.size,), generator=draws)
        total = 0.0
        for rows in order.split(self.settings.kd_batch):
            total += self._student_step(rows, draws) * len(rows)
        return total / self.size

    def _generated(self, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """The generator's images ``(B, ch, H, W)`` for drawn labels ``(B,)``, after its steps of this epoch."""
        batch = self.settings.kd_batch
        labels = self.classes[torch.randint(len(self.classes), (batch,), generator=draws)]
        noise = torch.cat([torch.randn(batch, NOISE, generator=draws), F.one_hot(labels, self.num_labels)], dim=1)
        noise, labels = noise.to(self.device), labels.to(self.device)
        self.generator.train()
        with frozen(self.student):
            for _ in range(self.options.gen_steps):
                images = self.generator(noise)
                student = self.student(self._as_input(images))
                loss = self._generator_loss(images, noise, labels, student)
                self.generator_optimiser.zero_grad(set_to_none=True)
                loss.backward()
                self.generator_optimiser.step()
        with torch.no_grad():
            return self.generator(noise), labels

    def _generator_loss(self, images: Tensor, noise: Tensor, labels: Tensor, student: Tensor) -> Tensor:
        logits = self._site_logits(images)
        if self.options.server == "fedftg":
            weights = self.by_class[:, labels, None]
            known = fedftg_class_loss(logits, labels, weights)
            return known - fedftg_distillation_loss(student, logits, weights) + diversity_loss(images, noise)
        teacher = ensemble_logits(logits, self._weights())
        if self.options.server == "dense":
            return label_loss(teacher, labels).mean() + dense_adversarial_loss(student, teacher)
        return hard_sample_loss(teacher, labels) + coboost_adversarial_loss(student, teacher)

    def _student_step(self, rows: Tensor, draws: torch.Generator) -> float:
        images, labels = self.history["images"][rows].to(self.device).float(), self.history["labels"][rows]
        if self.options.server == "coboosting":
            images = perturbed(images, self._ensemble, draws)
        with torch.no_grad():
            logits = self._site_logits(images)
        self.student.train()
        student = self.student(self._as_input(images))
        if self.options.server == "fedftg":
            weights = self.by_class[:, labels.to(self.device), None]
            loss = fedftg_distillation_loss(student, logits, weights, self.settings.kd_T)
        else:
            loss = kd_loss(student, ensemble_logits(logits, self._weights()), self.settings.kd_T)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        trained = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(trained, self.settings.kd_clip)
        self.optimiser.step()
        return float(loss.detach())

    def _site_logits(self, images: Tensor) -> Tensor:
        """All sites' logits on pixels in [0, 1], ``(K, B, C)``; their weights get no gradient."""
        given = self._as_input(images)
        with frozen(*self.models):
            return torch.stack([model(given) for model in self.models])

    def _ensemble(self, images: Tensor) -> Tensor:
        return ensemble_logits(self._site_logits(images), self._weights())

    def _weights(self) -> Tensor:
        return self.history["weights"].to(self.device)

    def _as_input(self, images: Tensor) -> Tensor:
        return normalised(images, self.mean, self.std)
