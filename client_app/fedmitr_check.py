"""The check before the one upload of `fedmitr`: does this model give its own patients away when it is inverted?

The project's fedmitr specification, section 9; `models.fedmitr_audit` compares. The site inverts its own model,
briefly and without jitter, the plainest attack, and looks whether the images are nearer to those that the model was
trained on than to others of the same hospital. The distances are patients' data and stay in the site's log.

A passed check proves little: it is one weak attack, and what an attacker may do with hours is not tried. Measured on
the digits, it lets a small vision transformer pass that has learnt 20 images by heart, for so brief an inversion does
not bring them back; copies of images it does find.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from client_app.site import Site, site_logger
from client_app.training import Job, Withheld, usable
from federation import seeding
from models.fedmitr_audit import MIN_REFERENCES, Audit, has_memorised, memorisation_audit
from models.inversion import invert

UNAUDITED = "unaudited-model"
"""What a hospital's ``consents`` have to name before its model may leave without this check."""
IMAGES, ITERATIONS = 64, 100
"""Choice: a minute on a CPU for a small network."""
MAX_REFERENCES = 500
"""Images of each side that are held as floating-point numbers at a time."""


def check_memory(network: nn.Module, site: Site, job: Job) -> None:
    """Raises Withheld where inverted images are nearer to the training images than chance allows.

    Images of val and test stand for those it never saw. A site with fewer than 10 of them cannot be checked, and a
    hospital's model then leaves only with its consent to that: raises ConsentError without.
    """
    splits, log = site.data.splits, site_logger(site.folder)
    held_out = np.concatenate([splits["val"].images, splits["test"].images])
    rows = usable(splits["train"])
    if min(len(held_out), len(rows)) < MIN_REFERENCES:
        log.warning(
            "round=%s the audit needs %s training and held-out images, there are %s and %s: it was not made",
            job.server_round, MIN_REFERENCES, len(rows), len(held_out),
        )  # fmt: skip
        site.check_consent(UNAUDITED)
        return
    draws = seeding.generator(job.settings.seed, "audit", job.server_round, site.name)
    audit = memorisation_audit(
        _inverted(network, site, rows, job, draws),
        _drawn(splits["train"].images[rows], draws),
        _drawn(held_out, draws),
        draws,
    )
    log.info("round=%s audit: %s", job.server_round, _described(audit))
    if has_memorised(audit, level=job.settings.options.audit_level):
        raise Withheld(
            f"the audit found training images in what the model gives when it is inverted ({_described(audit)}); train "
            "for fewer epochs or with fedmitr.dp_noise, and look at the data for copies of one image"
        )


def _inverted(network: nn.Module, site: Site, rows: np.ndarray, job: Job, draws: torch.Generator) -> Tensor:
    """Synthetic images ``(S, ch, H, W) float32`` in [0, 1] for the labels of training samples drawn by ``draws``."""
    picked = rows[torch.randint(len(rows), (IMAGES,), generator=draws).numpy()]
    targets = torch.from_numpy(site.data.splits["train"].targets[picked])
    labels = targets if site.data.task == "multilabel" else targets.argmax(dim=1)
    settings = job.settings
    plain = {"stops": (), "ratios": (), "rebirth": False, "jitter": 0.0, "flip": False, "inv_iters": ITERATIONS}
    numbers = replace(settings.options.inversion(settings.model.normalise, settings.data.channels), **plain)
    return invert(network.to(job.device), labels, numbers, draws).images.cpu()


def _drawn(images: np.ndarray, draws: torch.Generator) -> Tensor:
    """Some of these pixels ``(n, H, W, ch) uint8``, as `invert` gives them: ``(m, ch, H, W) float32`` in [0, 1]."""
    rows = torch.randperm(len(images), generator=draws)[:MAX_REFERENCES]
    return torch.from_numpy(images[rows.numpy()]).permute(0, 3, 1, 2).float() / 255


def _described(audit: Audit) -> str:
    nearest = f"median distance {float(audit.trained.median()):.4f} and {float(audit.held_out.median()):.4f}"
    return f"nearer to training in {audit.closer} of {audit.trials}, p = {audit.p_value:.3g}, {nearest}"
