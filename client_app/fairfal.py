"""FairFAL at a site: training on what is labelled, and the choice of what to have labelled next (arXiv 2603.10341).

The project's fairfal specification; `models.fairfal` has the arithmetic. Up go the change of the weights, the number of
labelled images, the number of picks, and once `imbalance`, one float64. Row keys, labels, features, priors, prototypes
and the local model stay here: the pool and each cycle's labelled set in files (`fairfal_pool`), so that a repeated
question changes nothing and a restarted site goes on with the same picks.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from client_app import fedprox, scaffold
from client_app.fairfal_models import LAST, Seen, build, distilled_network, local_network, seen_by
from client_app.fairfal_pool import POOL, frozen_labels, known_at, labelled_part, open_site_pool, pool_rows, rows_of
from client_app.fairfal_rules import LAST_ROUND_RULES, TWO_MODEL_RULES, View, picked_by
from client_app.site import Site, site_logger
from client_app.training import Diverged, Job, Modules, Update, change, fit, on_meta, received_network
from datasets.annotation_pool import Pool, Reason, oracle, request
from datasets.annotation_store import change as change_pool
from datasets.records import PRESENT, Split
from federation import seeding, wire
from federation.files import write_atomic
from federation.settings import Settings
from models import fairfal, selection
from models.fairfal_exchange import ANSWERS, COUNTS, ONE_CLASS, STATS, closes_cycle, cycle_of, learning_rate
from models.fairfal_select import Samples, memberships

__all__ = ["answer", "answer_numbers", "build", "learnable", "specs", "train"]

HIDES_CLASS_COUNTS = True
"""The site card says how many images the site has and nothing of their classes."""

learnable = pool_rows
"""The card counts the whole pool: what will be labelled is not known yet."""


class Picks(NamedTuple):
    """Samples to have labelled, in the order of the pool, and why each."""

    ids: tuple[str, ...]
    reasons: tuple[Reason, ...]


def specs(labels: tuple[str, ...], settings: Settings) -> dict[str, dict[str, wire.TensorSpec]]:
    """The network; with SCAFFOLD a control variate for every parameter too."""
    network = on_meta(labels, settings, build)
    found = {"model": wire.spec_of(network.state_dict())}
    if settings.options.optimiser == "scaffold":
        found["control"] = wire.spec_of(dict(network.named_parameters()))
    return found


# -- training ---------------------------------------------------------------------------------------------------------


def train(site: Site, modules: Modules, job: Job) -> Update:
    """The change of the model after local training on the cycle's labelled set (spec 4). Raises NothingLabelled."""
    settings, rounds = job.settings, job.settings.options.rounds_per_cycle
    cycle = cycle_of(job.server_round, rounds)
    part = labelled_part(site, frozen_labels(site, settings, cycle))
    area = settings.training.model_copy(update={"lr": learning_rate(settings.training.lr, job.server_round, rounds)})
    job = replace(job, settings=settings.model_copy(update={"training": area}))
    optimiser = settings.options.optimiser
    if optimiser == "scaffold":
        update = scaffold.train(part, modules, job, build, first_round=(cycle - 1) * rounds + 1)
    elif optimiser == "fedprox":
        update = fedprox.train(part, modules, job, build)
    else:
        network = received_network(part, modules, job, build)
        update = fit(network, part, job).update({"model": change(modules["model"], network.state_dict())})
    if _asks_last_model(settings) and closes_cycle(job.server_round, rounds):
        own = {
            name: modules["model"][name] + value if value.is_floating_point() else value
            for name, value in update.modules["model"].items()
        }
        site.save_state(LAST, job.server_round, own, job.last_accepted)
    return update


def _asks_last_model(settings: Settings) -> bool:
    return settings.options.rule in LAST_ROUND_RULES or settings.options.local_model == "last_fl"


# -- the server's questions -------------------------------------------------------------------------------------------


def answer_numbers(job: Job) -> dict[str, str]:
    """What the answer to this question declares."""
    return dict(ANSWERS[str(job.config["question"])])


def answer(site: Site, modules: Modules, job: Job) -> dict[str, float | int | list[int]]:
    """The answer to one question of a cycle; asked again it is the same."""
    question, cycle = str(job.config["question"]), int(job.config["cycle"])
    pool = open_site_pool(site, job.settings)
    if question == STATS:
        return {"gamma": imbalance(site, pool, modules, job, cycle)}
    if question == COUNTS:
        return {"noisy_counts": noisy_counts(site, pool, job, cycle)}
    if not pool.picked(cycle):
        picks = choose(site, pool, modules, job, cycle)
        pool = change_pool(site.folder / POOL, lambda now: _requested(now, picks, cycle, site, job.settings))
    picked, known = pool.picked(cycle), known_at(pool, cycle)
    log = site_logger(site.folder)
    log.info("cycle=%s picked=%s labelled=%s pending=%s", cycle, len(picked), len(known), len(pool.pending))
    return {"num_selected": len(picked), "num_labelled": len(known)}


def _requested(pool: Pool, picks: Picks, cycle: int, site: Site, settings: Settings) -> Pool:
    """The pool with the picks pending; an oracle labels them in the same step."""
    pool = request(pool, picks.ids, cycle, picks.reasons)
    if settings.options.labels == "readers" or not picks.ids:
        return pool
    return oracle(pool, picks.ids, site.data.splits["train"].targets[rows_of(site, picks.ids)])


def imbalance(site: Site, pool: Pool, modules: Modules, job: Job, cycle: int) -> float:
    """gamma of the received model on what was labelled before a cycle (spec 5.2). Raises NothingLabelled.

    `ONE_CLASS` where at most one class is labelled and such sites are left out of the mean (spec 14).
    """
    part = labelled_part(site, known_at(pool, cycle - 1))
    labels = _labels(part)
    present = memberships(labels, len(site.data.labels)).any(dim=0)
    if job.settings.options.skip_single_class and int(present.sum()) <= 1:
        return ONE_CLASS
    network = received_network(part, modules, job, build)
    seen = seen_by(network, part, job, np.arange(len(part.data.splits["train"])))
    if not bool(present.any()):  # multi-label images without a finding
        return 1.0
    return fairfal.imbalance_ratio(_prior(seen.logits, labels, job), present.tolist())


def noisy_counts(site: Site, pool: Pool, job: Job, cycle: int) -> list[int]:
    """Labelled samples of each class with Laplace noise of scale ``count_noise``, at least 0 (spec 17-3).

    The noise comes from a key that only this site has: from the run's seed the server could take it off again. A
    question that is asked again gets the same noise. Raises ConsentError unless the hospital allows ``label counts``.
    """
    site.check_consent("label counts")
    path = site.folder / "noise.key"
    if not path.exists():
        write_atomic(path, secrets.token_bytes(32))
    seed = hashlib.sha256(path.read_bytes() + cycle.to_bytes(8, "big")).digest()
    noise = np.random.default_rng(list(seed)).laplace(0, job.settings.options.count_noise, len(site.data.labels))
    marks = np.array(list(known_at(pool, cycle - 1).values()), dtype=np.int64).reshape(-1, len(site.data.labels))
    return np.maximum(0, np.rint((marks == PRESENT).sum(axis=0) + noise)).astype(int).tolist()


# -- the query --------------------------------------------------------------------------------------------------------


def choose(site: Site, pool: Pool, modules: Modules, job: Job, cycle: int) -> Picks:
    """What to have labelled at the start of a cycle: at random in the first, then by ``fairfal.rule``.

    Choice: a site whose pool is used up, or smaller than the budget, gives what it has and trains no local model for
    nothing (spec 14). One without any labelled sample trains none either; rules that ask it get the global one.
    """
    options, log, budget = job.settings.options, site_logger(site.folder), int(job.config["budget"])
    if cycle == 1 and options.first_round == "given":
        return Picks((), ())
    if budget > len(pool.unlabelled):
        log.warning("cycle=%s the budget is %s, %s samples are left", cycle, budget, len(pool.unlabelled))
    if budget == 0 or not pool.unlabelled:
        return Picks((), ())
    draws = seeding.generator(job.settings.seed, "picks", cycle, site.name)
    if cycle == 1 or options.rule == "random":
        positions = selection.random(len(pool.unlabelled), budget, draws)
        return _picks(pool.unlabelled, positions, lambda position: Reason("drawn at random"))
    part = _known_part(site, pool, cycle)
    view = _view(site, part, pool, modules, job, cycle)
    if options.rule == "fairfal":
        return _two_stage(site, view, job, budget)

    def distilled() -> Seen:
        assert part is not None
        return seen_by(distilled_network(part, modules, job, cycle), site, job, _rows(site, pool, cycle, view.ids))

    positions = picked_by(
        options.rule,
        view,
        budget,
        draws,
        scores=lambda probabilities, kind: fairfal.uncertainty(probabilities, kind, multilabel=True),
        residuals=lambda logits: fairfal.residuals(logits, multilabel=view.multilabel),
        distilled=distilled,
    )
    return _picks(view.ids, positions, lambda position: Reason(f"picked by the rule {options.rule}"))


def _picks(ids: tuple[str, ...], positions: Tensor, reason_of) -> Picks:
    ordered = positions.sort().values.tolist()
    return Picks(tuple(ids[i] for i in ordered), tuple(reason_of(i) for i in ordered))


def _known_part(site: Site, pool: Pool, cycle: int) -> Site | None:
    """The site with what was labelled before a cycle; None where nothing was."""
    known = known_at(pool, cycle - 1)
    return labelled_part(site, known) if known else None


def _rows(site: Site, pool: Pool, cycle: int, ids: tuple[str, ...]) -> np.ndarray:
    """Rows of the labelled samples, then of these of the pool."""
    return np.concatenate([rows_of(site, known_at(pool, cycle - 1)), rows_of(site, ids)])


def _view(site: Site, part: Site | None, pool: Pool, modules: Modules, job: Job, cycle: int) -> View:
    """What both models see, each in one pass over labelled and pool images, and which is trusted (spec 5.2).

    With ``skip_not_finite`` without the images of the pool of which either says what is not finite (spec 14). Choice:
    that of a labelled image stays an error, for the picks depend on all of them.
    """
    options, log, ids = job.settings.options, site_logger(site.folder), pool.unlabelled
    rows = _rows(site, pool, cycle, ids)
    num_checked = len(rows) - len(ids) if options.skip_not_finite else len(rows)
    multilabel, num_labels = site.data.task == "multilabel", len(site.data.labels)
    by_global = seen_by(received_network(site, modules, job, build), site, job, rows, num_checked)
    if empty := int((by_global.features == 0).all(dim=1).sum()):
        log.warning("cycle=%s %s of %s images have features that are all zero", cycle, empty, len(rows))
    if part is None:
        log.warning("cycle=%s nothing is labelled: the global model alone, all images in one bucket", cycle)
        labels = torch.empty((0, num_labels) if multilabel else (0,), dtype=torch.int64)
        return _finite(View(ids, by_global, by_global, labels, 1.0, multilabel), site, cycle)
    labels, by_local = _labels(part), by_global
    present = memberships(labels, num_labels).any(dim=0).tolist()
    if not all(present):
        blind = (name for name, seen in zip(site.data.labels, present, strict=True) if not seen)
        log.warning("cycle=%s blind classes, never labelled here: %s", cycle, ", ".join(blind))
    if _needs_local(job):
        kind = "last_fl" if options.rule in LAST_ROUND_RULES else options.local_model
        by_local = seen_by(local_network(part, modules, job, cycle, kind), site, job, rows, num_checked)
    weight = _weight(by_global, by_local, labels, site, job, cycle)
    return _finite(View(ids, by_global, by_local, labels, weight, multilabel), site, cycle)


def _finite(view: View, site: Site, cycle: int) -> View:
    """The view without bad images of the pool, whose number the log says. Raises Diverged where no other is there."""
    good = view.without_bad()
    if num_bad := len(view.ids) - len(good.ids):
        told = f"{num_bad} of {len(view.ids)} images of the pool have values that are not finite"
        if not good.ids:
            raise Diverged(f"{site.name}: {told}")
        site_logger(site.folder).warning("cycle=%s %s: not picked from", cycle, told)
    return good


def _needs_local(job: Job) -> bool:
    options = job.settings.options
    if options.query_model != "global" or options.rule in TWO_MODEL_RULES:
        return True
    return options.rule == "fairfal" and not _gradients_from_global(job)


def _gradients_from_global(job: Job) -> bool:
    mode = job.settings.options.grad_model
    return mode == "global" or (mode == "auto" and fairfal.gradients_from_global(float(job.config["gamma_bar"])))


def _weight(by_global: Seen, by_local: Seen, labels: Tensor, site: Site, job: Job, cycle: int) -> float:
    """Weight of the global model's uncertainty: 1 or 0, or between them with ``soft_tau`` (spec 5.2, 17-5)."""
    options = job.settings.options
    if options.query_model in ("global", "local"):
        return float(options.query_model == "global")
    priors = (_prior(seen.logits[: len(labels)], labels, job) for seen in (by_global, by_local))
    divergence, gamma_bar = fairfal.prior_divergence(*priors), float(job.config["gamma_bar"])
    if options.soft_tau:
        weight = fairfal.mixing_weight(divergence, gamma_bar, options.soft_tau, options.delta)
    else:
        weight = float(fairfal.prefers_global(divergence, gamma_bar, options.delta))
    weight = 1 - weight if options.query_model == "opposite" else weight
    log = site_logger(site.folder)
    log.info("cycle=%s divergence=%.6f gamma_bar=%.6f global_weight=%.3f", cycle, divergence, gamma_bar, weight)
    return weight


def _two_stage(site: Site, view: View, job: Job, budget: int) -> Picks:
    """FairFAL's own picks: prototypes, uncertainty, gradient embeddings, quotas, k-center (spec 5.3 to 5.7)."""
    options, labels = job.settings.options, view.labels
    features = view.by_global.features.double()
    pseudo = fairfal.prototype_labels(
        features[view.known],
        labels,
        features[view.pool],
        len(site.data.labels),
        normalise=options.normalise_prototypes,
    )
    scores = torch.zeros(len(pseudo), dtype=torch.float64)
    for weight, seen in ((view.weight, view.by_global), (1 - view.weight, view.by_local)):
        if weight:
            probabilities = view.probabilities(seen.logits[view.pool])
            scores += weight * fairfal.uncertainty(probabilities, options.uncertainty, multilabel=view.multilabel)
    logits = (view.by_global if _gradients_from_global(job) else view.by_local).logits
    own = fairfal.residuals(logits[view.pool], multilabel=view.multilabel)
    of_anchors = fairfal.residuals(logits[view.known], labels, multilabel=view.multilabel)
    positions = fairfal.picks_by_class(
        scores,
        Samples(own, features[view.pool], pseudo),
        Samples(of_anchors, features[view.known], labels),
        budget,
        options.kappa,
        anchor_mode=options.anchor_mode,
        class_weights=job.config.get("class_weights"),
    )
    whose = {1.0: "the global model", 0.0: "the local model"}.get(view.weight, "both models")
    text = f"uncertain to {whose} ({options.uncertainty}), and unlike what is labelled of its class"

    def reason_of(position: int) -> Reason:
        return Reason(text, site.data.labels[int(pseudo[position])], float(scores[position]))

    return _picks(view.ids, torch.cat(positions), reason_of)


def _prior(logits: Tensor, labels: Tensor, job: Job) -> Tensor:
    """The class-balanced prior of the labelled samples (spec 5.1); multi-label data have its expectation only."""
    if labels.ndim == 2:
        return fairfal.balanced_prior(logits.double().sigmoid(), labels, "class_mean")
    return fairfal.balanced_prior(logits.double().softmax(dim=1), labels, job.settings.options.balanced_prior)


def _labels(part: Site) -> Tensor:
    """Labels of the labelled part: class numbers ``(n,)``, or marks ``(n, C)`` in multi-label data."""
    split: Split = part.data.splits["train"]
    targets = torch.from_numpy(split.targets).long()
    return targets if part.data.task == "multilabel" else targets.argmax(dim=1)
