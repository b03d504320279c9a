"""FedMITR at a site: one long training of a vision transformer, a check, one upload (arXiv 2605.10748; spec 2, 9).

The server inverts what is sent: it makes images that look like training images to the model, which is a reconstruction
attack by design, and it needs every model in the clear. So a hospital's node config has to allow ``model-inversion``
by name. What can be done here first: DP-SGD (`client_app.fedmitr_private`), the only formal protection, and the
memorisation audit (`client_app.fedmitr_check`); a hospital may insist on the audit by not allowing
``unaudited-model``.

What leaves: the change of every weight in float16 or float32, the epsilon spent, and the counts of every site card,
where classes of fewer than ``fedmitr.min_class_count`` samples are not told and, at the server, never asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from client_app.fedmitr_check import UNAUDITED, check_memory
from client_app.fedmitr_private import fit_privately
from client_app.site import Site
from client_app.training import Job, Modules, Update, batch_loss, change, fit, received_network
from federation import wire
from federation.settings import Settings
from models.fedmitr_exchange import NO_GUARANTEE, TRAIN_NUMBERS
from models.fedmitr_networks import build_vit
from models.losses import LOSSES
from models.vit_tokens import embed, patch_of, patch_pixels, read_tokens

TRAIN_EXTRA = TRAIN_NUMBERS
INVERSION = "model-inversion"
"""What a hospital's ``consents`` have to name before its model may leave to be inverted."""


def build(labels: tuple[str, ...], settings: Settings) -> nn.Module:
    """The network with the weights of torch's generator; pretrained ones come from the server with the first round."""
    data = settings.data
    return build_vit(settings.options, num_labels=len(labels), image_size=data.image_size, channels=data.channels)


def smallest_count(settings: Settings) -> int:
    """Per-class counts below this do not leave the site."""
    return settings.options.min_class_count


def update_specs(modules: Modules, site: Site, job: Job) -> dict[str, dict[str, wire.TensorSpec]]:
    """The model's tensors in the dtype of the upload; `strategies.fedmitr` declares the same."""
    dtype, specs = job.settings.options.upload_dtype, wire.spec_of(modules["model"])
    return {"model": {name: wire.TensorSpec(spec.shape, dtype) for name, spec in specs.items()}}


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The site's change of the model, after the audit. Raises ConsentError, Withheld and Diverged."""
    options = job.settings.options
    site.check_consent(INVERSION)
    if not options.audit:
        site.check_consent(UNAUDITED)
    network = received_network(site, modules, job, build)
    objective = _objective(network, site, job)
    epsilon = NO_GUARANTEE
    if options.dp_noise:
        done, epsilon = fit_privately(network, site, job, objective)
    else:
        done = fit(network, site, job, objective=objective, clip=options.clip)
    dtype = getattr(torch, options.upload_dtype)
    sent = {name: value.to(dtype) for name, value in change(modules["model"], network.state_dict()).items()}
    if options.audit:
        check_memory(network, site, job)
    return done.update({"model": sent}, {"epsilon": epsilon})


def _objective(network: nn.Module, site: Site, job: Job) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a batch, a scalar: cross-entropy (or BCE) of the class token, and with ``relabel_mode = token`` as
    much again of the head on every patch token, which the server then asks (spec 4; Jiang et al., NeurIPS 2021).

    Choice: without a dense teacher, a patch token's target is the image's label.
    """
    task = site.data.task
    if job.settings.options.relabel_mode != "token":
        return lambda images, targets: batch_loss(network, images, targets, task, job.precision)

    def objective(images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(images.device.type, job.precision, enabled=job.precision is not None):
            logits, tokens = read_tokens(network, embed(network, patch_pixels(images, patch_of(network))))
        num_patches = tokens.shape[1]
        total, _ = LOSSES[task](logits, targets)
        dense, _ = LOSSES[task](tokens.flatten(0, 1), targets.repeat_interleave(num_patches, dim=0))
        return (total + dense / num_patches) / (targets.numel() if task == "multilabel" else len(targets))

    return objective
