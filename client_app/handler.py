"""From a message to a reply: open the site, let the method's site half work, pass the egress gate.

Whatever fails inside becomes a code (`wire.CODES`); the story goes to the site's own log. Nothing that the code below
prints or warns reaches Flower's log, which the server can read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import warnings
from collections.abc import Iterator
from datetime import datetime
from logging import Logger
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from client_app import evaluation, secure_round, secure_sum, training
from client_app.device import computing
from client_app.egress import NO_LIMITS, EgressError, Ledger, release
from client_app.private_update import protected
from client_app.site import (
    ConsentError,
    IdleNode,
    Site,
    is_hospital,
    open_folder,
    open_site,
    site_logger,
    write_partition,
)
from client_app.training import Diverged, Job, Withheld
from datasets.records import IMAGE, REPORT, DataError, SiteData
from datasets.site import class_counts, hidden_labels, is_small
from federation import registry, wire
from federation.limits import LimitError, Limits, MethodRefused, OutOfHours, UploadTooLarge, parse_limits
from federation.secure_roster import ACTIONS
from federation.settings import Settings, SettingsError

FAILURES: tuple[tuple[type[BaseException], str], ...] = (
    (IdleNode, "E-EMPTY"),
    (SettingsError, "E-SETTINGS"),
    (DataError, "E-DATA"),
    (ConsentError, "E-CONSENT"),
    (MethodRefused, "E-METHOD"),
    (OutOfHours, "E-HOURS"),
    (UploadTooLarge, "E-UPLOAD"),
    (LimitError, "E-LIMITS"),
    (EgressError, "E-EGRESS"),
    (Diverged, "E-DIVERGED"),
    (Withheld, "E-WITHHELD"),
    (wire.WireError, "E-MISMATCH"),
    (MemoryError, "E-MEMORY"),
    (torch.OutOfMemoryError, "E-MEMORY"),
    (OSError, "E-DATA"),
)


def answer(message: Message, context: Context) -> Message:
    """The reply to one message. Never raises for anything that goes wrong at the site."""
    folder, limits = None, NO_LIMITS
    try:
        experiment = str(message.content[wire.CONFIG]["experiment"])
        if is_hospital(context.node_config):  # before the settings, so that wrong ones have a log to be told in
            folder = open_folder(None, context.node_config, experiment)
            limits = parse_limits(context.node_config)
        method = str(context.run_config.get("method", Settings.model_fields["method"].default))
        limits.check(method, datetime.now().astimezone())  # before the method's code is imported
        settings = _settings(json.dumps(dict(context.run_config)))
        folder = folder or open_folder(settings, context.node_config, experiment)
        with _private(site_logger(folder)):
            site = open_site(settings, context.node_config, folder)
            if message.metadata.message_type == wire.PROFILE and not is_hospital(context.node_config):
                write_partition(settings, folder.parent.parent / "partition.json")
            content = _respond(message, settings, site, limits)
    except Exception as error:
        content = _refusal(error, message, folder)
    return Message(content, reply_to=message)


@functools.lru_cache(maxsize=4)
def _settings(run_config: str) -> Settings:
    """A run config is parsed once a process, not once a message; a text, since 1 and true would be one key."""
    return Settings.from_run_config(json.loads(run_config))


def _respond(message: Message, settings: Settings, site: Site, limits: Limits) -> RecordDict:
    action = message.metadata.message_type
    half = importlib.import_module(registry.find(settings.method).site)
    server_round = int(message.content[wire.CONFIG]["server_round"])
    if action == wire.PROFILE:
        secure_sum.begin(site.folder)
        content = profile(site, settings, half)
        payload = wire.profile_payload(getattr(half, "PROFILE_EXTRA", None))
    else:
        with computing(settings.training) as (device, precision):
            config = dict(message.content[wire.CONFIG])
            last_accepted = int(config["last_accepted"])
            job = Job(settings, server_round, last_accepted, config, device, precision)
            if action in ACTIONS:
                content, payload = secure_work(action, message.content, site, job, half)
            else:
                do = answer_question if action == wire.ASK else work
                content, payload = do(action, wire.modules_of(message.content), site, job, half)
    site_logger(site.folder).info("round=%s action=%s bytes=%s", server_round, action, wire.size_bytes(content))
    ledger = Ledger(site.folder / "egress.jsonl")
    return release(content, payload, ledger, server_round=server_round, action=action, limits=limits)


def profile(site: Site, settings: Settings, half: ModuleType) -> RecordDict:
    """The site card: names, label list, hashes, counts.

    Both counts of a label are -1 where one is below ``privacy.min_cell`` (`hidden_labels`), or its positives below the
    half's own ``smallest_count(settings)``; so are negatives below that.
    """
    data = site.data
    train = data.splits["train"]
    _log_left_out(site)
    rows = half.learnable(train, settings) if hasattr(half, "learnable") else training.usable(train)
    counts = class_counts(train.targets[rows])

    smallest = half.smallest_count(settings) if hasattr(half, "smallest_count") else 0
    hidden = hidden_labels(counts, settings.privacy.min_cell, data.task) | is_small(counts.positives, smallest)
    hidden |= getattr(half, "HIDES_CLASS_COUNTS", False)

    def visible(values: np.ndarray) -> list[int]:
        return np.where(hidden | is_small(values, smallest), -1, values).tolist()

    card = {
        "site": data.name,
        "labels": list(data.labels),
        "task": data.task,
        "schema": schema(data.labels, data.task, settings, half),
        "modalities": modalities(data),
        "data_sha256": data.checksum,
    }
    numbers = {
        "num_train": len(rows),
        "num_val": len(data.splits["val"]),
        "num_test": len(data.splits["test"]),
        "positives": visible(counts.positives),
        "negatives": visible(counts.negatives),
    }
    content = RecordDict({wire.CARD: ConfigRecord(card), wire.METRICS: MetricRecord(numbers)})
    if hasattr(half, "profile"):
        content[wire.EXTRA] = MetricRecord(half.profile(site, settings))
    return content


def _log_left_out(site: Site) -> None:
    """A line in the site's log for every split of which samples were dropped or images could not be read."""
    for name, split in site.data.splits.items():
        if split.dropped or split.unreadable:
            site_logger(site.folder).warning(
                "%s: %s samples stay; dropped: %s, images that could not be read: %s",
                name,
                len(split),
                split.dropped,
                split.unreadable,
            )


def modalities(data: SiteData) -> list[str]:
    """What the training samples of a site (all samples, if it only evaluates) have: ``image``, ``report`` or both."""
    splits = [data.splits["train"]] if len(data.splits["train"]) else list(data.splits.values())
    if any(split.present is None for split in splits):
        return ["image", "report"] if any(split.reports for split in splits) else ["image"]
    found = np.concatenate([split.present for split in splits]).any(axis=0)
    return [name for name, there in (("image", found[IMAGE]), ("report", found[REPORT])) if there] or ["image"]


def answer_question(
    action: str, modules: training.Modules, site: Site, job: Job, half: ModuleType
) -> tuple[RecordDict, wire.Payload]:
    """A site half's answer to its strategy's own question: numbers, and nothing that is not declared."""
    content = RecordDict({wire.METRICS: MetricRecord({"server_round": job.server_round})})
    content[wire.EXTRA] = MetricRecord(half.answer(site, modules, job))
    declared = half.answer_numbers(job) if hasattr(half, "answer_numbers") else half.ANSWER_NUMBERS
    return content, wire.answer_payload(declared)


def work(
    action: str, modules: training.Modules, site: Site, job: Job, half: ModuleType
) -> tuple[RecordDict, wire.Payload]:
    """Evaluates what was received where the message asks for it, trains where it is a training message.

    A run with a secure sum is answered without updates only: training is `secure_work` then.
    """
    if action == wire.EVALUATE:
        return evaluated(modules, site, job, half)
    if job.settings.privacy.secure_sum:
        raise wire.WireError("a plain training message in a run with privacy.secure_sum = true; no update leaves so")
    update, specs, content, declared = trained(modules, site, job, half)
    for name, change in update.modules.items():
        content[wire.MODULE + name] = wire.encode(change)
    return content, wire.train_payload(specs, declared, getattr(half, "TRAIN_EXTRA", None))


def secure_work(
    action: str, request: RecordDict, site: Site, job: Job, half: ModuleType
) -> tuple[RecordDict, wire.Payload]:
    """One of the four answers of a secure sum; the third one trains."""
    if not job.settings.privacy.secure_sum:
        raise wire.WireError("a message of a secure sum in a run with privacy.secure_sum = false")
    train = functools.partial(trained, wire.modules_of(request), site, job, half)
    return secure_round.answer(action, request, site, job, half=half, train=train)


def evaluated(modules: training.Modules, site: Site, job: Job, half: ModuleType) -> tuple[RecordDict, wire.Payload]:
    """Scores of what was received, as far as the message asks for them."""
    split = str(job.config.get("evaluate", ""))
    content = RecordDict({wire.METRICS: MetricRecord({"server_round": job.server_round})})
    if split:
        build = getattr(half, "build", training.network_for)
        evaluate = getattr(half, "evaluate", functools.partial(evaluation.evaluate, build=build))
        found = evaluate(site, {name: dict(state) for name, state in modules.items()}, job, split)
        by_view = {"": found} if isinstance(found, evaluation.Scores) else found
        for view, scores in by_view.items():
            name = wire.view_of(split, view)
            content[wire.SCORES + name] = wire.encode(scores.arrays)
            content[f"loss.{name}"] = MetricRecord({"num_examples": scores.num_examples, "loss_sum": scores.loss_sum})
            if scores.extra:
                content[f"{wire.EXTRA}.{name}"] = MetricRecord(dict(scores.extra))
    declared = wire.evaluation_payload(
        wire.views_of(split, getattr(half, "VIEWS", ())),
        len(site.data.labels),
        job.settings.evaluation.bins,
        site.data.task,
        extra(job.settings) if callable(extra := getattr(half, "EVALUATION_EXTRA", None)) else extra,
    )
    return content, declared


def trained(modules: training.Modules, site: Site, job: Job, half: ModuleType) -> secure_round.Trained:
    """A local training after the evaluation that its message asks for; the reply still lacks the update."""
    content, declared = evaluated(modules, site, job, half)
    specs = getattr(half, "update_specs", _trained_specs)(modules, site, job)
    update = protected(half.train(site, modules, job), site, job)
    content[wire.METRICS] = MetricRecord(
        {
            "server_round": job.server_round,
            "num_examples": update.num_examples,
            "loss_sum": update.loss_sum,
            "num_steps": update.num_steps,
        }
    )
    if update.extra:
        content[wire.EXTRA] = MetricRecord(dict(update.extra))
    return secure_round.Trained(update, specs, content, declared)


def _trained_specs(modules: training.Modules, site: Site, job: Job) -> dict[str, dict[str, wire.TensorSpec]]:
    """What most methods send back: the change of every module they got."""
    return {name: wire.spec_of(state) for name, state in modules.items()}


def schema(labels: tuple[str, ...], task: str, settings: Settings, half: ModuleType) -> str:
    """The hash that server and sites compare: labels, task, tensors, and what the network holds fixed everywhere.

    A half with more modules than ``model`` gives its own ``specs(labels, settings)``.
    """
    network = training.on_meta(labels, settings, getattr(half, "build", training.network_for))
    specs = half.specs(labels, settings) if hasattr(half, "specs") else {"model": wire.spec_of(network.state_dict())}
    return wire.schema_sha256(labels, task, specs, getattr(network, "frozen_sha256", ""))


@contextlib.contextmanager
def _private(logger: Logger) -> Iterator[None]:
    """What the site's code prints or warns goes to the site's log."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as caught,
    ):
        try:
            yield
        finally:
            for warning in caught:
                logger.warning("%s: %s", warning.category.__name__, warning.message)
            if text := printed.getvalue().strip():
                logger.info("printed: %s", text)


def _refusal(error: Exception, message: Message, folder: Path | None) -> RecordDict:
    code = next((code for kind, code in FAILURES if isinstance(error, kind)), "E-INTERNAL")
    content = RecordDict({wire.REFUSAL: ConfigRecord({"code": code})})
    if folder is not None:
        action = message.metadata.message_type
        with contextlib.suppress(Exception):
            site_logger(folder).error("%s while answering %s", code, action, exc_info=error)
        with contextlib.suppress(Exception):
            release(content, wire.REFUSAL_PAYLOAD, Ledger(folder / "egress.jsonl"), server_round=0, action=action)
    return content
