"""FedMITR: making synthetic images by sparse inversion beside dense inversion, and what a student learns of either."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.rows import Row, seconds
from datasets.embedded import digits
from datasets.transforms import to_input
from models.fedmitr import kd_loss
from models.fedmitr_networks import build_vit
from models.inversion import InversionSettings, Inverted, advance, forward_subset, invert, join, start

SPARSE_TARGET, FAST_TARGET = "<= 0.25", "<= 0.125"
SMI = InversionSettings(mean=(0.5,), std=(0.5,), flip=False)
"""Sparse Model Inversion's schedule: 4000 iterations, stops at 50, 100, 200 and 300, each of 30 % of the patches."""

SIZE, PATCH = 64, 8
IMAGES, BATCH, ITERATIONS = 120, 30, 120
SEEDS, TEACHER_EPOCHS, STUDENT_FROM, STUDENT_EPOCHS = 3, 14, 6, 25


@dataclass(frozen=True)
class Way:
    """A way of making images: its settings, how many images a label gives, and what we want of its time over dense."""

    name: str
    settings: InversionSettings
    images_per_label: int
    target: str


def ways(iterations: int, stops: tuple[int, ...], channels: int) -> list[Way]:
    """Dense inversion, SMI's schedule, and the fast path: five sparse images of one canvas, nothing else moved."""
    common = {"inv_iters": iterations, "mean": (0.5,) * channels, "std": (0.5,) * channels, "flip": False}
    even = tuple(iterations * part // 5 for part in range(1, 5))
    dense = InversionSettings(**common, stops=(), ratios=())
    sparse = InversionSettings(**common, stops=stops)
    fast = InversionSettings(**common, stops=even, freeze_stopped=True, rebirth=True)
    return [
        Way("dense inversion", dense, 1, ""),
        Way("SMI's schedule", sparse, 1, SPARSE_TARGET),
        Way("freeze_stopped and rebirth", fast, 5, FAST_TARGET),
    ]


def measure() -> list[Row]:
    """Seconds an image on a trained network of 64 patches, then what a whole run of DeiT-tiny would take."""
    return [*_trained(), *_published()]


# -- a trained network, whole runs ------------------------------------------------------------------------------------


def _trained() -> list[Row]:
    """Digits at 64 pixels: the same number of images, iterations and batch, three seeds, one half-trained student."""
    train, test = _digits("train"), _digits("test")
    teacher, early = _teacher(*train)
    before = f"teacher {_accuracy(teacher, *test):.3f}, student before {_accuracy(early, *test):.3f}"
    rows, dense = [], []
    for way in ways(ITERATIONS, (2, 4, 6, 9), 1):
        taken, learnt = [], []
        for seed in range(SEEDS):
            started = time.perf_counter()
            pool = _made(teacher, way, seed)
            taken.append((time.perf_counter() - started) / len(pool.images))
            learnt.append(_accuracy(_student(copy.deepcopy(early), teacher, pool, seed), *test))
        dense = dense or taken
        note = (
            f"{IMAGES} images, {ITERATIONS} iterations, batch {BATCH}, {pool.high.shape[1]} of 64 patches; accuracy of "
            f"the student {statistics.mean(learnt):.3f} ± {statistics.stdev(learnt):.3f} over {SEEDS} seeds "
            f"({before}); {torch.get_num_threads()} threads"
        )
        rows.append(Row(f"{way.name}, vit {SIZE} px", "s/image", taken, "dense inversion", dense, way.target, note))
    return rows


def _made(teacher: nn.Module, way: Way, seed: int) -> Inverted:
    labels = torch.arange(IMAGES // way.images_per_label) % 10
    return join(
        [
            invert(teacher, part, way.settings, torch.Generator().manual_seed(1000 * seed + number))
            for number, part in enumerate(labels.split(BATCH))
        ]
    )


def _digits(split: str) -> tuple[Tensor, Tensor]:
    """Network input ``(n, 1, 64, 64)`` and classes ``(n,)``."""
    source = digits()
    picked = np.flatnonzero(source.table["split"].to_numpy() == split)
    pixels = torch.from_numpy(np.stack([source.images.read(row) for row in picked]))[..., None]
    images = F.interpolate(to_input(pixels), size=SIZE, mode="bilinear")
    return images, torch.from_numpy(source.targets[picked].argmax(axis=1))


def _teacher(images: Tensor, labels: Tensor) -> tuple[nn.Module, nn.Module]:
    """A small vision transformer trained from scratch, and as it was before it was done."""
    torch.manual_seed(0)
    options = SimpleNamespace(model="vit", patch=PATCH, width=64, depth=3, heads=4, init_sha256="")
    network = build_vit(options, num_labels=10, image_size=SIZE, channels=1)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    early = network
    for epoch in range(TEACHER_EPOCHS):
        if epoch == STUDENT_FROM:
            early = copy.deepcopy(network)
        for rows in torch.randperm(len(images)).split(32):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimiser.step()
    return network.eval(), early


def _student(student: nn.Module, teacher: nn.Module, pool: Inverted, seed: int) -> nn.Module:
    """Plain distillation on the patches that a way has made, which are all of them for dense inversion only."""
    images, draws = (pool.images - 0.5) / 0.5, torch.Generator().manual_seed(seed)
    with torch.no_grad():
        given = forward_subset(teacher, images, pool.high)
    optimiser = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STUDENT_EPOCHS)
    for _ in range(STUDENT_EPOCHS):
        for rows in torch.randperm(len(images), generator=draws).split(32):
            optimiser.zero_grad(set_to_none=True)
            kd_loss(forward_subset(student, images[rows], pool.high[rows]), given[rows], 4.0).backward()
            nn.utils.clip_grad_norm_(student.parameters(), 10.0)
            optimiser.step()
        schedule.step()
    return student


@torch.no_grad()
def _accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((network.eval()(images).argmax(dim=1) == labels).float().mean())


# -- the published size, added up from measured iterations ------------------------------------------------------------

DEIT_BATCH, REPEATS = 16, 2


def _published() -> list[Row]:
    """DeiT-tiny at 224 pixels, random weights: every phase of a schedule is timed, times how long it lasts."""
    options = SimpleNamespace(model="deit_tiny_patch16_224", init_sha256="")
    network = build_vit(options, num_labels=10, image_size=224, channels=3)
    rows, dense = [], []
    for way in ways(SMI.inv_iters, SMI.stops, 3):
        taken = [_whole_run(network, way.settings) / (DEIT_BATCH * way.images_per_label)]
        dense = dense or taken
        note = f"batch {DEIT_BATCH}, {SMI.inv_iters} iterations added up from {REPEATS} timed ones of each phase"
        rows.append(Row(f"{way.name}, DeiT-tiny", "s/image", taken, "dense inversion", dense, way.target, note))
    return rows


def _whole_run(network: nn.Module, settings: InversionSettings) -> float:
    """Seconds that a run of these settings would take: phases of 1 + REPEATS iterations, the first not counted."""
    ends = [*settings.stops, settings.inv_iters]
    lengths = [end - begin for begin, end in zip([0, *settings.stops], ends, strict=True)]
    phase = REPEATS + 2  # the last iteration of a phase ranks the patches and is not counted either
    short = {**vars(settings), "stops": tuple(phase * (n + 1) for n in range(len(settings.stops)))}
    short = InversionSettings(**short | {"inv_iters": phase * len(lengths)})
    state = start(network, torch.arange(DEIT_BATCH) % 10, short, torch.Generator().manual_seed(0))
    total = 0.0
    for length in lengths:
        times = [seconds(functools.partial(advance, network, state, short, 1)) for _ in range(phase)]
        total += length * statistics.median(times[1:-1])
    return total
