"""`incongruent` at a site: train the modules of the site's profile, send their changes and nothing of what was read.

Saha et al., AAAI 2025 and arXiv 2402.05294; the project's incongruent specification, section 4.9. A site without a
modality builds no encoder for it, and its update cannot hold one. Report text is read in `incongruent_samples` only.

What leaves beside the changes: samples behind each module, mean trust in the labels, the means of the loss terms; at
sites with reports the sums of text directions by label (section 4.4), unless switched off. A hospital's node config has
to allow ``text-module`` and ``text-prototypes`` by name; a secure sum makes the first unnecessary.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from client_app import evaluation
from client_app.evaluation import Scores
from client_app.incongruent_objective import Around, objective
from client_app.incongruent_samples import Samples, card_numbers, learnable, modalities, read_samples, trust_of
from client_app.incongruent_teachers import align_to_teachers, public_embeddings
from client_app.site import Site
from client_app.training import Fit, Job, Modules, Update, change, fit, on_meta, optimiser_for
from datasets.records import IMAGE, REPORT, DataError
from federation import seeding, wire
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
from models.losses import proximal_term

PROFILE_EXTRA = CARD_NUMBERS
TRAIN_EXTRA = TRAIN_NUMBERS
PROFILE_FILE = "profile"
OWN, OWN_TEXT, PREVIOUS = "own", "text", "previous"
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
    network, samples, received = _opened(site, modules, job, "train")
    trained = options.trained_modules(kind, job.server_round, job.settings.federation.rounds)
    _freeze(network, samples, kind, options, trained)
    context = {name: value.to(job.device) for name, value in modules[CONTEXT].items()}
    reference = _frozen_copy(network)
    if options.loot:
        align_to_teachers(network, modules[CONTEXT], site, job)
    rows, totals = learnable(samples.split, job.settings), Counter()
    around = Around(kind, reference, _previous(network, site, job), context, int(_pairs(samples, rows)), len(rows))
    done = _fitted(network, samples, rows, around, site, job, totals)
    if kind == "paired" and options.fits_imputation(job.server_round):
        _fit_imputation(network, samples, rows, job)
    sent = _sent(network, received, trained, site, job)
    _keep(network, site, job)
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


def _opened(site: Site, modules: Modules, job: Job, split: str) -> tuple[IncongruentNetwork, Samples, Modules]:
    """The network with the received weights (the site's own where it keeps them), and a split's inputs."""
    received = {name: state for name, state in modules.items() if name in MODULES}
    network = on_meta(site.data.labels, job.settings, lambda labels, settings: build(labels, settings, tuple(received)))
    network.to_empty(device="cpu")
    try:
        load_modules(network, {**received, **_own_modules(received, site, job)})
    except (RuntimeError, ValueError) as error:
        raise wire.WireError("the received modules do not fit this site's network") from error
    samples = read_samples(site.data.splits[split], job.settings, reads_text=TEXT in received)
    return network, samples, received


def _own_modules(received: Modules, site: Site, job: Job) -> Modules:
    """Modules that the site goes on with instead of the global ones: all of them alone, its text between uploads."""
    options = job.settings.options
    if options.alone:
        state = site.load_state(OWN, job.last_accepted) if job.last_accepted else None
        return {} if state is None else _by_module(state)
    if TEXT not in received or options.text_skip == "freeze" or not job.last_accepted:
        return {}
    since = range(job.last_accepted, job.server_round)
    if any(options.uploads_text(earlier, job.settings.federation.rounds) for earlier in since):
        return {}  # the global text encoder moved: what was gathered on the old one is dropped (spec 6.3)
    state = site.load_state(OWN_TEXT, job.last_accepted)
    return {} if state is None else {TEXT: state}


def _freeze(network: IncongruentNetwork, samples: Samples, kind: str, options: Any, trained: tuple[str, ...]) -> None:
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
    """The site's model of the last round that counted, for MOON."""
    state = (
        site.load_state(PREVIOUS, job.last_accepted) if job.settings.options.moon_weight and job.last_accepted else None
    )
    if state is None:
        return None
    previous = _frozen_copy(network)
    load_modules(previous, _by_module(state))
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


def _pairs(samples: Samples, rows: np.ndarray) -> Tensor:
    return (samples.real & samples.present)[torch.from_numpy(rows)].all(dim=1).sum()


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
    rows = rows[(samples.real & samples.present)[torch.from_numpy(rows)].all(dim=1).numpy()]
    if len(rows) < 2:
        return
    image, text = _encoded(network, samples, rows, job)
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
    told = rows[samples.present[torch.from_numpy(rows), REPORT].numpy()]
    if not len(told):
        count = len(site.data.labels)
        return {"sums": torch.zeros(count, options.dim), "released": torch.zeros(count, dtype=torch.bool)}
    _, text = _encoded(network, samples, told, job)
    targets = torch.from_numpy(samples.split.targets[told])
    sums, released = prototype_sums(
        text.cpu(),
        targets,
        targets >= 0,
        samples.patients[torch.from_numpy(told)],
        options.proto_min_patients,
        options.proto_sigma,
        seeding.generator(job.settings.seed, "prototype_noise", job.server_round, site.name),
    )
    return {"sums": sums, "released": released}


def _sent(
    network: IncongruentNetwork, received: Modules, trained: tuple[str, ...], site: Site, job: Job
) -> dict[str, dict[str, Any]]:
    """Changes of the trained modules, sparse where the run wants it; what is not sent waits in the residual."""
    options, states, sent = job.settings.options, split_state(network), {}
    for module in trained:
        if module == TEXT and not getattr(job.settings.privacy, "secure_sum", False):
            site.check_consent("text-module")
        dense = change(received[module], states[module])
        topk = options.compressor(module)
        if topk is None:
            sent[module] = dense
            continue
        residual = site.load_state(f"residual-{module}", job.last_accepted) if job.last_accepted else None
        indices = None
        if topk.index == "shared_seed":
            draws = seeding.numpy_generator(job.settings.seed, f"sparse/{module}", job.server_round)
            indices = topk.shared_indices(wire.spec_of(dense), draws)
        age = job.server_round - job.last_accepted
        sent[module], rest = topk.encode(dense, residual, age=age, indices=indices)
        site.save_state(f"residual-{module}", job.server_round, rest, job.last_accepted)
    return sent


def _keep(network: IncongruentNetwork, site: Site, job: Job) -> None:
    """What the next round starts from at this site."""
    options, states = job.settings.options, split_state(network)
    flat = {f"{module}/{name}": value for module, state in states.items() for name, value in state.items()}
    if options.alone:
        site.save_state(OWN, job.server_round, flat, job.last_accepted)
    elif TEXT in states and options.text_skip == "accumulate" and options.text_every > 1:
        site.save_state(OWN_TEXT, job.server_round, states[TEXT], job.last_accepted)
    if options.moon_weight:
        site.save_state(PREVIOUS, job.server_round, flat, job.last_accepted)


def _by_module(flat: Mapping[str, Tensor]) -> Modules:
    modules: Modules = {}
    for key, value in flat.items():
        module, _, name = key.partition("/")
        modules.setdefault(module, {})[name] = value
    return modules


def _numbers(
    samples: Samples, rows: np.ndarray, trained: tuple[str, ...], options: Any, totals: Counter
) -> dict[str, float]:
    """Samples behind each module that was trained, mean trust, mean of each loss term (spec 5.3)."""
    index = torch.from_numpy(rows)
    real = samples.real[index] & samples.present[index]
    pairs = int(real.all(dim=1).sum())
    counts = dict.fromkeys((GATE, *IMPUTATION), pairs) | {
        "vision": int(real[:, IMAGE].sum()),
        TEXT: int(real[:, REPORT].sum()),
    }
    means = {f"loss_{part}": totals[part] / max(totals["samples"], 1) for part in LOSS_PARTS}
    return {
        **{f"n_{module}": counts.get(module, len(rows)) if module in trained else 0 for module in MODULES},
        "trust": float(trust_of(samples.sources[index], options).mean()),
        **means,
    }


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(site: Site, modules: Modules, job: Job, split: str) -> dict[str, Scores]:
    """Scores with what each sample has, and by view: pairs, images only, reports only (spec 7)."""
    network, samples, _ = _opened(site, modules, job, split)
    network.to(job.device)
    given, impute = samples.present, job.settings.options.infer_impute
    masks = {
        "": given,
        "both": given & samples.real.all(dim=1, keepdim=True),
        "image": given & torch.tensor([True, False]) & samples.real[:, :1],
        "text": given & torch.tensor([False, True]) & samples.real[:, 1:],
    }

    def scores(present: Tensor) -> Scores:
        rows = np.flatnonzero(present.any(dim=1).numpy())

        def forward(picked: np.ndarray, images: Tensor) -> Tensor:
            index = torch.from_numpy(picked)
            tokens = samples.tokens_of(index)
            tokens = None if tokens is None else tokens.to(job.device)
            return network(images, tokens, present[index].to(job.device), impute=impute)

        return evaluation.score(network, site, job, split, rows=rows, forward=forward)

    return {view: scores(mask) for view, mask in masks.items()}
