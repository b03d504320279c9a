"""The prompt-tuning baselines at a site: the trained part on the cached patch features of its own pictures.

See `strategies.promptclip`. Only FedMVP's visual prompt reads the pictures again in every step.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from torch import Tensor

from client_app import evaluation
from client_app.evaluation import Scores
from client_app.fedmpt_features import site_clip, site_features, without_pixels
from client_app.site import Site
from client_app.training import Job, Modules, Update, change, fit, optimiser_for, usable
from federation import seeding, wire
from federation.settings import Settings, SettingsError
from models.clip import prepare_images
from models.fedmpt import asymmetric_loss_probabilities
from models.promptclip import PromptClip
from models.promptclip_variants import build_promptclip

LOSS_WEIGHT = 0.02
"""That of fedmpt: the loss is a sum over batch and labels."""
STATE = "own"


def build(labels: tuple[str, ...], settings: Settings) -> PromptClip:
    """The trained part on the CPU. Raises DataError without the right CLIP, SettingsError for labels without prompt."""
    return copy.deepcopy(_blueprint(labels, settings))


@functools.lru_cache(maxsize=4)
def _blueprint(labels: tuple[str, ...], settings: Settings) -> PromptClip:
    clip = site_clip(settings)
    try:
        with seeding.scope(settings.seed, "blueprint"):
            return build_promptclip(clip, labels, **settings.options.network_options())
    except ValueError as error:
        raise SettingsError([f"promptclip: {error}"]) from error


def specs(labels: tuple[str, ...], settings: Settings) -> dict[str, dict[str, wire.TensorSpec]]:
    """The tensors of every module, for the schema."""
    travelling = _blueprint(labels, settings).modules_that_travel()
    return {name: wire.spec_of(state) for name, state in travelling.items()}


def received(site: Site, modules: Modules, job: Job) -> PromptClip:
    """The trained part as the site has it: what was received, and its own tensors as it kept them. Raises WireError."""
    network = build(site.data.labels, job.settings)
    try:
        network.load_state_dict({name: value for state in modules.values() for name, value in state.items()})
    except RuntimeError as error:
        raise wire.WireError("the received modules do not fit this site's network") from error
    if job.last_accepted and (kept := site.load_state(STATE, job.last_accepted)):
        network.load_state_dict(kept, strict=False)
    site_clip(job.settings).model.to(job.device)
    return network.to(job.device)


def update_specs(modules: Modules, site: Site, job: Job) -> dict[str, dict[str, wire.TensorSpec]]:
    """What the site sends: ``model`` unless it trains alone or not at all."""
    options = job.settings.options
    sends = not options.alone and options.variant != "zero_shot"
    return {"model": wire.spec_of(modules["model"])} if sends else {}


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of ``model`` after local training at the round's rate; what stays is saved at the site."""
    options, split = job.settings.options, site.data.splits["train"]
    if options.variant == "zero_shot":
        return Update({}, len(usable(split)), 0.0, 0)
    network, clip = received(site, modules, job), site_clip(job.settings)
    inputs = _inputs(network, site, job, "train")

    def load(rows: np.ndarray, _: torch.Generator) -> tuple[Tensor, Tensor]:
        return inputs(rows), torch.from_numpy(split.targets[rows])

    def objective(loaded: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast(job.device.type, job.precision, enabled=job.precision is not None):
            text = network.text_features(clip.model)
            patches = network.patches(clip, loaded)
        probabilities = network(patches, text).sigmoid()
        return LOSS_WEIGHT * asymmetric_loss_probabilities(probabilities, wanted, wanted >= 0)

    optimiser = optimiser_for(network, job.settings)
    for group in optimiser.param_groups:
        group["lr"] = float(job.config["lr"])
    done = fit(network, site, job, load=load, objective=objective, optimiser=optimiser)
    state = {name: value.cpu() for name, value in network.state_dict().items()}
    kept = {name: value for name, value in state.items() if options.alone or name in network.kept}
    if kept:
        site.save_state(STATE, job.server_round, kept, job.last_accepted)
    if options.alone:
        return done.update({})
    return done.update({"model": change(modules["model"], {name: state[name] for name in modules["model"]})})


@torch.no_grad()
def evaluate(site: Site, modules: Modules, job: Job, split: str) -> Scores:
    """Scores of what was received with what the site keeps.

    Choice: as logits over the gain. That changes no ranking of a label's pictures and moves nothing across 0.5, but
    logits beyond 16, which a histogram cannot tell apart, are rare then.
    """
    network, clip = received(site, modules, job).eval(), site_clip(job.settings)
    text, inputs = network.text_features(clip.model), _inputs(network, site, job, split)

    def forward(rows: np.ndarray, _: Tensor) -> Tensor:
        patches = network.patches(clip, inputs(rows).to(job.device))
        return network(patches, text) / network.gain

    return evaluation.score(network, without_pixels(site, split), job, split, forward=forward)


def _inputs(network: PromptClip, site: Site, job: Job, split: str) -> functools.partial[Tensor]:
    """Rows of a split to what the network reads: cached patch features, or prepared pictures."""
    if network.reads_pixels:
        return functools.partial(_pictures, site, job, split)
    return functools.partial(_features, site_features(site, job, split))


def _features(features: np.ndarray, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(features[rows])


def _pictures(site: Site, job: Job, split: str, rows: np.ndarray) -> Tensor:
    images = np.ascontiguousarray(site.data.splits[split].images[rows])
    return prepare_images(site_clip(job.settings), torch.from_numpy(images).permute(0, 3, 1, 2))
