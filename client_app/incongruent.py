"""`incongruent` at a site: train the modules of the site's profile, send their changes and nothing of what was read.

Saha et al., AAAI 2025 and arXiv 2402.05294; the project's incongruent specification, section 4.9. A site without a
modality builds no encoder for it, and its update cannot hold one. Report text is read in `incongruent_samples` only.

What leaves beside the changes: samples behind each module, mean trust in the labels, the means of the loss terms; with
an evaluation four counts of every two labels (section 3.5); at sites with reports the sums of text directions by label
(section 4.4), unless switched off. A hospital's node config has to allow ``text-module`` and ``text-prototypes`` by
name; a secure sum makes the first unnecessary.
"""

from __future__ import annotations

import copy
import functools
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from client_app import evaluation
from client_app.evaluation import Scores
from client_app.incongruent_memory import changes_to_send, keep_model, own_model, own_text, previous_model
from client_app.incongruent_objective import Around, objective
from client_app.incongruent_samples import (
    Samples,
    card_numbers,
    cooccurrence_numbers,
    learnable,
    modalities,
    read_samples,
    trust_of,
)
from client_app.incongruent_teachers import align_to_teachers, public_embeddings
from client_app.private_update import limited
from client_app.site import Site, site_logger
from client_app.training import Diverged, Fit, Job, Modules, Update, fit, on_meta, optimiser_for
from datasets.records import IMAGE, REPORT, DataError
from federation import seeding, wire
from federation.cooccurrence import PAIR_COUNTS
from federation.files import write_atomic
from federation.settings import Settings
from models.incongruent import MODULES, IncongruentNetwork, build_incongruent, load_modules, split_state
from models.incongruent_exchange import (
    CARD_NUMBERS,
    CONTEXT,
    GATE,
    IMPUTATION,
    LOSS_PARTS,
    PROTOTYPES,
    PUBLIC,
    TEXT,
    TRAIN_NUMBERS,
)
from models.incongruent_exchange import VIEWS as VIEWS
from models.incongruent_losses import prox_penalty
from models.incongruent_prototypes import prototype_sums
from models.losses import probabilities, proximal_term

PROFILE_EXTRA = CARD_NUMBERS
TRAIN_EXTRA = TRAIN_NUMBERS
EVALUATION_EXTRA = PAIR_COUNTS
CALLED = 0.5
"""A label is called where its score is above this. Choice: the plain threshold, not one fitted to a split."""
PROFILE_FILE = "profile"
MAX_BAD_SHARE = 0.01
"""Largest share of the samples seen in a training that may be left out for numbers that are not finite (spec 9)."""
IMPUTATION_EPOCHS, IMPUTATION_LR = 5, 1e-3
ENCODING_BATCH = 256


# -- round 0 ----------------------------------------------------------------------------------------------------------


def profile(site: Site, settings: Settings) -> Mapping[str, Any]:
    """The numbers that the site card has beside the usual ones; remembers the profile for the whole run.

    Raises DataError for a site with neither modality, and for one whose profile is not the remembered one.
    """
    found = site_profile(site, settings)
    path = site.folder / PROFILE_FILE
    if path.exists() and (before := path.read_text(encoding="utf-8")) != found:
        raise DataError(f"this site took part as {before!r} and its data now make it {found!r}; start a new run")
    write_atomic(path, found.encode())
    return card_numbers(site, settings)


def site_profile(site: Site, settings: Settings) -> str:
    """``paired``, ``image`` or ``text``, from the training samples. Raises DataError where there is neither."""
    found = modalities(site.data, settings)
    if not found and settings.options.modality == "any" and len(site.data.splits["train"]):
        raise DataError("no training sample has an image or a report; fill these columns of the manifest")
    return settings.options.profile_of(found or ["image"])


def build(
    labels: tuple[str, ...], settings: Settings, modules: tuple[str, ...] = ("vision", "fusion", "head")
) -> IncongruentNetwork:
    """The network with these modules only; the default is what an image-only hospital is served."""
    return build_incongruent(
        len(labels),
        modules=modules,
        vision=settings.options.vision or settings.model.name,
        **settings.network_shape(),
        **settings.options.network_options,
    )


def specs(labels: tuple[str, ...], settings: Settings) -> dict[str, dict[str, wire.TensorSpec]]:
    """The modules that every site builds; the encoders are checked when they are loaded."""
    states = split_state(on_meta(labels, settings, build))
    return {module: wire.spec_of(states[module]) for module in ("fusion", "head")}


def update_specs(modules: Modules, site: Site, job: Job) -> dict[str, dict[str, wire.TensorSpec]]:
    """What this site's reply holds in this round; `strategies.incongruent` declares the same."""
    dense = {name: wire.spec_of(state) for name, state in modules.items()}
    last, count = job.settings.federation.rounds, len(site.data.labels)
    return job.settings.options.sent_specs(dense, job.config["profile"], job.server_round, last, count)


# -- training ---------------------------------------------------------------------------------------------------------


def train(site: Site, modules: Modules, job: Job) -> Update:
    """Changes of the modules that this site trains in this round. Raises DataError for a profile that changed."""
    options, kind = job.settings.options, str(job.config["profile"])
    _check_profile(site, job, kind)
    received = {name: state for name, state in modules.items() if name in MODULES}
    network, samples = _opened(site, received, job, "train")
    reference = _frozen_copy(network)
    load_modules(network, {**split_state(network), **own_text(received, site, job)})
    trained = options.trained_modules(kind, job.server_round, job.settings.federation.rounds)
    _freeze(network, kind, options, trained)
    context = {name: value.to(job.device) for name, value in modules[CONTEXT].items()}
    if options.loot:
        align_to_teachers(network, modules[CONTEXT], site, job)
    rows, totals = learnable(samples.split, job.settings), Counter()
    pairs, previous = int(_pairs(samples, rows)), _previous(network, site, job)
    around = Around(kind, reference, previous, context, pairs, len(rows), job.precision)
    done = _fitted(network, samples, rows, around, site, job, totals)
    _check_left_out(network, totals, site, job)
    if kind == "paired" and options.fits_imputation(job.server_round):
        _fit_imputation(network, samples, rows, job)
    if TEXT in trained and not job.settings.privacy.secure_sum:
        site.check_consent("text-module")
    sent = _with_text_limits(changes_to_send(network, received, trained, site, job), site, job)
    keep_model(network, site, job)
    if options.sends_prototypes(kind):
        site.check_consent("text-prototypes")
        sent[PROTOTYPES] = _prototypes(network, samples, rows, site, job)
    if options.loot:
        sent[PUBLIC] = {"embeddings": public_embeddings(network, site, job)}
    return done.update(sent, _numbers(samples, rows, trained, options, totals))


def _check_profile(site: Site, job: Job, frozen: str) -> None:
    found = site_profile(site, job.settings)
    if found != frozen:
        raise DataError(f"this site's data make it {found!r}, round 0 froze it as {frozen!r}; start a new run")


def _opened(site: Site, received: Modules, job: Job, split: str) -> tuple[IncongruentNetwork, Samples]:
    """The network with the global weights (its own where the site is alone), and a split's inputs."""
    network = copy.deepcopy(_blueprint(site.data.labels, job.settings, tuple(received))).to_empty(device="cpu")
    try:
        load_modules(network, {**received, **(own_model(site, job) if job.settings.options.alone else {})})
    except (RuntimeError, ValueError) as error:
        raise wire.WireError("the received modules do not fit this site's network") from error
    return network, read_samples(site.data.splits[split], job.settings, network.built)


@functools.lru_cache(maxsize=8)
def _blueprint(labels: tuple[str, ...], settings: Settings, modules: tuple[str, ...]) -> IncongruentNetwork:
    """The network without memory, to be copied: building a text encoder takes longer than a small site's step."""
    return on_meta(labels, settings, functools.partial(build, modules=modules))


def _freeze(network: IncongruentNetwork, kind: str, options: Any, trained: tuple[str, ...]) -> None:
    """No gradient, no decay and no BatchNorm step for what this site does not train (spec 3.2, 3.3)."""
    moves = set(trained) | ({TEXT} if options.text_skip == "accumulate" or options.alone else set())
    if options.alone:
        moves = set(network.built)
    if kind != "paired" and not options.is_full:
        moves -= {GATE}
    moves -= set(IMPUTATION)  # fitted by themselves, on frozen encoders
    for name in network.built:
        getattr(network, name).requires_grad_(name in moves)


def _frozen_copy(network: IncongruentNetwork) -> IncongruentNetwork:
    return copy.deepcopy(network).requires_grad_(False).eval()


def _previous(network: IncongruentNetwork, site: Site, job: Job) -> IncongruentNetwork | None:
    """The site's own model of its last accepted round, frozen, where the run contrasts with it."""
    state = previous_model(site, job)
    if not state:
        return None
    previous = _frozen_copy(network)
    load_modules(previous, state)
    return previous.to(job.device)


def _fitted(
    network: IncongruentNetwork,
    samples: Samples,
    rows: np.ndarray,
    around: Around,
    site: Site,
    job: Job,
    totals: Counter,
) -> Fit:
    options, area = job.settings.options, job.settings.training
    around.reference.to(job.device)
    draws = seeding.generator(job.settings.seed, "dropped_modality", job.server_round, site.name)
    before = {name: value.detach().clone() for name, value in around.reference.named_parameters()}
    fusion = dict(around.reference.fusion.named_parameters())

    def penalty() -> Tensor:
        total = torch.zeros((), device=job.device)
        if around.profile != "paired" and options.prox_mode in ("both", "params"):
            total = total + prox_penalty(network.fusion, fusion, options.prox_mu)
        return total + proximal_term(network, before, options.fedprox_mu) if options.fedprox_mu else total

    return fit(
        network,
        site,
        job,
        rows=rows,
        load=lambda picked, generator: samples.load(picked, area.augment, generator),
        objective=objective(network, samples, around, options, draws, totals),
        optimiser=_optimiser(network.to(job.device), job),
        penalty=penalty,
        epochs=options.epochs(around.profile),
        clip=options.clip,
    )


def _check_left_out(network: IncongruentNetwork, totals: Counter, site: Site, job: Job) -> None:
    """Logs the samples that were left out. Raises DataError or Diverged above `MAX_BAD_SHARE` of those seen."""
    images, logits = totals["bad images"], totals["bad logits"]
    seen = totals["samples"] + images + logits
    if images + logits:
        site_logger(site.folder).warning(
            "round=%s of %s samples seen in all epochs %s were left out for an image and %s for a score that is not "
            "finite",
            job.server_round,
            seen,
            images,
            logits,
        )
    if images > MAX_BAD_SHARE * seen:
        raise DataError(
            f"{images} of {seen} images seen in training are not finite, {MAX_BAD_SHARE:.0%} may be; fix them"
        )
    buffers = sum(float(value.double().sum()) for value in network.buffers() if value.is_floating_point())
    if images + logits > MAX_BAD_SHARE * seen or not math.isfinite(buffers):
        raise Diverged(f"{logits} of {seen} samples gave scores that are not finite; lower training.lr")


def _optimiser(network: nn.Module, job: Job) -> torch.optim.Optimizer:
    """AdamW without decay on norms and biases (spec 4.9), or the runtime's SGD."""
    area = job.settings.training
    if area.optimizer != "adamw":
        return optimiser_for(network, job.settings)
    parameters = [value for value in network.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in parameters if value.ndim > 1], "weight_decay": area.weight_decay},
        {"params": [value for value in parameters if value.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=area.lr)


def _with_text_limits(sent: dict[str, dict[str, Any]], site: Site, job: Job) -> dict[str, dict[str, Any]]:
    """What is sent, the text encoder's change in it clipped and noised where the run wants that (spec 6.3).

    Choice: what leaves is limited, after sampling and with what was gathered since the last upload, so no message is
    longer than the clip. The residual gets neither what the clip cuts off nor the noise.
    """
    options = job.settings.options
    if TEXT not in sent or not options.text_clip:
        return sent
    text = {name: torch.as_tensor(value) for name, value in sent[TEXT].items()}
    sigma = options.text_clip * options.text_sigma
    return {**sent, **limited({TEXT: text}, options.text_clip, sigma, site, job)}


def _pairs(samples: Samples, rows: np.ndarray) -> Tensor:
    return samples.there[torch.from_numpy(rows)].all(dim=1).sum()


@torch.no_grad()
def _encoded(network: IncongruentNetwork, samples: Samples, rows: np.ndarray, job: Job) -> tuple[Tensor, Tensor]:
    """z of image and report of samples, each ``(n, d)``, zero where there is none; the network as it stands."""
    network.eval()
    found = []
    for start in range(0, len(rows), ENCODING_BATCH):
        index, images, _ = samples.load(rows[start : start + ENCODING_BATCH], "none", torch.Generator())
        tokens = samples.tokens_of(index)
        inputs = (None if part is None else part.to(job.device) for part in (images, tokens, samples.present[index]))
        image, text = network.encode(*inputs)
        found.append((image.z, text.z))
    return torch.cat([image for image, _ in found]), torch.cat([text for _, text in found])


def _fit_imputation(network: IncongruentNetwork, samples: Samples, rows: np.ndarray, job: Job) -> None:
    """MIN: each net learns to guess the other modality's z of real pairs, encoders frozen (spec 3.6)."""
    rows = rows[samples.there[torch.from_numpy(rows)].all(dim=1).numpy()]
    if len(rows) < 2:
        return
    image, text = _encoded(network, samples, rows, job)
    sound = image.isfinite().all(dim=1) & text.isfinite().all(dim=1)
    image, text = image[sound], text[sound]
    if not len(image):
        return
    for name, given, wanted in (("min_v2t", image, text), ("min_t2v", text, image)):
        net = getattr(network, name).requires_grad_(True)
        optimiser = torch.optim.Adam(net.parameters(), lr=IMPUTATION_LR)
        for _ in range(IMPUTATION_EPOCHS):
            loss = (net(given) - wanted).square().mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()


def _prototypes(
    network: IncongruentNetwork, samples: Samples, rows: np.ndarray, site: Site, job: Job
) -> dict[str, Tensor]:
    options = job.settings.options
    told = rows[samples.there[torch.from_numpy(rows), REPORT].numpy()]
    if not len(told):
        count = len(site.data.labels)
        return {"sums": torch.zeros(count, options.dim), "released": torch.zeros(count, dtype=torch.bool)}
    _, text = _encoded(network, samples, told, job)
    sound = text.isfinite().all(dim=1).cpu()
    text, told = text.cpu()[sound], told[sound.numpy()]
    targets = torch.from_numpy(samples.split.targets[told])
    sums, released = prototype_sums(
        text,
        targets,
        targets >= 0,
        samples.patients[torch.from_numpy(told)],
        options.proto_min_patients,
        options.proto_sigma,
        _noise(site, job),
    )
    return {"sums": sums, "released": released}


def _noise(site: Site, job: Job) -> torch.Generator:
    """Where the noise on prototype sums comes from. A hospital's is its secret: the server knows the run's seed."""
    if site.consents is None:
        return seeding.generator(job.settings.seed, "prototype_noise", job.server_round, site.name)
    return torch.Generator().manual_seed(secrets.randbits(63))


def _numbers(
    samples: Samples, rows: np.ndarray, trained: tuple[str, ...], options: Any, totals: Counter
) -> dict[str, float]:
    """Samples behind each module that was trained, mean trust, mean of each loss term (spec 5.3)."""
    index = torch.from_numpy(rows)
    there = samples.there[index]
    pairs = int(there.all(dim=1).sum())
    counts = dict.fromkeys((GATE, *IMPUTATION), pairs) | {
        "vision": int(there[:, IMAGE].sum()),
        TEXT: int(there[:, REPORT].sum()),
    }
    means = {f"loss_{part}": totals[part] / max(totals["samples"], 1) for part in LOSS_PARTS}
    return {
        **{f"n_{module}": counts.get(module, len(rows)) if module in trained else 0 for module in MODULES},
        "trust": float(trust_of(samples.sources[index], options).mean()),
        **means,
    }


def weights(update: Update, job: Job) -> dict[str, int]:
    """What the server's `weigh` gives, as whole numbers, for a secure sum."""
    options = job.settings.options
    everything = options.is_full or options.agg_count == "client_samples"
    counts = {module: update.extra[f"n_{module}"] for module in update.modules}
    trust = update.extra["trust"] ** options.trust_zeta
    return {
        module: round((update.num_examples if everything and (count or options.is_full) else count) * trust)
        for module, count in counts.items()
    }


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(site: Site, modules: Modules, job: Job, split: str) -> dict[str, Scores]:
    """Scores with what each sample has, and by view: pairs, images only, reports only (spec 7).

    The former with `cooccurrence_numbers`. Choice: the views tell none, since those of two views differ by few samples.
    """
    received = {name: state for name, state in modules.items() if name in MODULES}
    network, samples = _opened(site, received, job, split)
    network.to(job.device)
    there, impute = samples.there, job.settings.options.infer_impute
    masks = {
        "": there,
        "both": there & there.all(dim=1, keepdim=True),
        "image": there & torch.tensor([True, False]),
        "text": there & torch.tensor([False, True]),
    }

    def scores(view: str, shown: Tensor) -> Scores:
        rows = np.flatnonzero(shown.any(dim=1).numpy())
        called = [np.zeros((0, len(site.data.labels)), bool)]

        def forward(picked: np.ndarray, images: Tensor) -> Tensor:
            index = torch.from_numpy(picked)
            inputs = samples.seen(index, images, shown[index])
            logits = network(*(None if part is None else part.to(job.device) for part in inputs), impute=impute)
            called.append((probabilities(logits, site.data.task) > CALLED).cpu().numpy())
            return logits

        found = evaluation.score(network, site, job, split, rows=rows, forward=forward)
        if view:
            return replace(found, extra={name: [] for name in PAIR_COUNTS})
        targets = samples.split.targets[rows]
        return replace(found, extra=cooccurrence_numbers(np.concatenate(called), targets, site.data.task, job.settings))

    return {view: scores(view, mask) for view, mask in masks.items()}
