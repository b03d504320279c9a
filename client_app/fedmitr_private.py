"""DP-SGD for the one upload of `fedmitr`: each image's gradient is clipped, noise is added, epsilon is counted.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, by opacus (the extra ``dp``), with its RDP
accountant. Every step takes each image with probability batch / n, as the accounting supposes; batches differ in size.

What epsilon covers: the weights, towards one image. A patient with m images is covered m times less (group privacy),
and the counts, losses, scores and the outcome of the audit that a site sends are not covered at all. At a hospital the
seed of sampling and noise is the operating system's secret; the numbers themselves come from torch's Mersenne Twister
in float32, which is no cryptographic generator, and an attacker who knows the exact bits of the noise is not defended
against (Mironov, CCS 2012).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from client_app.site import Site
from client_app.training import Diverged, Fit, Job, load_batch, optimiser_for, usable
from federation import seeding
from federation.settings import SettingsError


def fit_privately(
    network: nn.Module, site: Site, job: Job, objective: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Fit, float]:
    """Trains in place like `client_app.training.fit`, with ``fedmitr.dp_noise`` and ``dp_clip``; and epsilon.

    ``objective``: the mean loss of a batch. Choice: gradients are taken image by image, which any network and objective
    allow and which holds one gradient at a time; a batch costs as many small passes. Epsilon is for
    ``fedmitr.dp_delta``. Raises SettingsError where opacus is not installed, Diverged as `fit` does.
    """
    try:
        from opacus.accountants import RDPAccountant
        from opacus.optimizers import DPOptimizer
    except ImportError:
        raise SettingsError(
            ["fedmitr.dp_noise > 0 needs opacus; install it with python deploy/install.py dp, or set it to 0"]
        ) from None
    area, options, split = job.settings.training, job.settings.options, site.data.splits["train"]
    rows, draws = usable(split), _draws(site, job)
    rate = min(1.0, area.batch_size / len(rows))
    steps_per_epoch = math.ceil(1 / rate)
    network.to(job.device).train()
    optimiser = DPOptimizer(
        optimiser_for(network, job.settings),
        noise_multiplier=options.dp_noise,
        max_grad_norm=options.dp_clip,
        expected_batch_size=rate * len(rows),
        generator=torch.Generator(job.device).manual_seed(int(torch.randint(2**62, (), generator=draws))),
    )
    accountant, result = RDPAccountant(), Fit(num_examples=len(rows))
    for _ in range(area.epochs):
        result.losses = []
        for _ in range(steps_per_epoch):
            picked = rows[(torch.rand(len(rows), generator=draws) < rate).numpy()]
            images, targets = load_batch(split, picked, area.augment, draws, job.settings.model.normalise)
            losses = _noisy_step(optimiser, images.to(job.device), targets.to(job.device), objective)
            result.losses += losses
            result.num_steps += 1
            accountant.step(noise_multiplier=options.dp_noise, sample_rate=rate)
    result.loss_sum = math.fsum(result.losses) / max(1, len(result.losses)) * len(rows)
    if not math.isfinite(result.loss_sum) or not all(bool(value.isfinite().all()) for value in network.parameters()):
        raise Diverged(f"DP-SGD gave a loss of {result.loss_sum} or infinite weights; lower training.lr")
    return result, float(accountant.get_epsilon(options.dp_delta))


def _noisy_step(
    optimiser: Any, images: Tensor, targets: Tensor, objective: Callable[[Tensor, Tensor], Tensor]
) -> list[float]:
    """One step on a batch that may be empty: the noise is added all the same. The loss of each image."""
    losses = []
    for number in range(len(images)):
        loss = objective(images[number : number + 1], targets[number : number + 1])
        gradients = torch.autograd.grad(loss, optimiser.params)
        for parameter, gradient in zip(optimiser.params, gradients, strict=True):
            parameter.grad_sample = gradient[None]
        optimiser.signal_skip_step(True)
        optimiser.step()  # clips and adds up; the weights stay
        losses.append(float(loss.detach()))
    for parameter in optimiser.params:
        parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
    optimiser.signal_skip_step(False)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return losses


def _draws(site: Site, job: Job) -> torch.Generator:
    """Where sampling and noise come from. A hospital's is its secret: the server knows the run's seed."""
    if site.consents is None:
        return seeding.generator(job.settings.seed, "dp_sgd", job.server_round, site.name)
    return torch.Generator().manual_seed(secrets.randbits(63))
