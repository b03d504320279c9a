"""FedMITR on the server: every site trains a vision transformer once; the server makes one model of the uploads.

Shen et al., arXiv 2605.10748; `models.fedmitr` has the method, the project's fedmitr specification the numbers. Up
travels one model a site (its change, in ``fedmitr.upload_dtype``), down the initial model and at the end the global
one, and beside it the plain average (`strategies.fedmitr_average`). All else, hours of it, is a job on the server
(`strategies.fedmitr_job`) that no message waits for: the uploads are on the disk when it begins, and a run that is
killed goes on without asking the sites again.

Choice: only one round. Further rounds would start from the global model, which the specification leaves for later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import nn

from federation import wire
from federation.registry import register
from federation.settings import Settings
from models.fedmitr_exchange import TRAIN_NUMBERS
from models.inversion import keep_counts
from models.vit_tokens import grid_of
from strategies.aggregation import Arrays, StreamingMean
from strategies.base import MODEL, FederatedStrategy
from strategies.cards import CardError, SiteCard
from strategies.evaluation import PooledScores
from strategies.fedmitr_area import FedMITRArea
from strategies.fedmitr_average import PAGE, compared, log_compared, to_score
from strategies.fedmitr_job import complete, job_folder, unfit
from strategies.fedmitr_progress import stop_on_sigterm
from strategies.fedmitr_uploads import Job, State, Upload, begin, has_begun, read_job, spool, spooled, vit_of
from strategies.gate import Reply
from strategies.progress import Modules, RoundRecord
from strategies.secure_round import SecureMean

MIN_PATCHES = 4
"""Fewer patches than this at the end of a schedule are warned of (spec 10)."""


class FedMITR(FederatedStrategy):
    """One round whose replies are spooled to the disk, then the job."""

    train_extra = TRAIN_NUMBERS
    secure_summable = False
    """The server inverts each site's model: it has to see every one of them in the clear, a sum is of no use."""

    def __init__(self, settings: Settings, experiment: str = "experiment") -> None:
        super().__init__(settings, experiment)
        self._folder = job_folder(settings, experiment)
        self._on_disk: tuple[Upload, ...] = ()

    @staticmethod
    def contradictions(settings: Settings) -> list[str]:
        """What cannot be run, found before any site is asked."""
        return _of_the_round(settings) + _of_the_schedule(settings)

    def network(self, labels: tuple[str, ...], task: str) -> nn.Module:
        """The network, pretrained where weights are given. Raises CardError where the sites' cards allow no job."""
        counts = torch.tensor([card.positives for card in self.table.trainable]).clamp(min=0)
        if wrong := unfit(self.options, task, counts):
            raise CardError(wrong)
        return vit_of(self.settings, len(labels), pretrained=True)

    def update_specs(self, card: SiteCard, server_round: int) -> dict[str, dict[str, wire.TensorSpec]]:
        """The change of the model, its float tensors in ``fedmitr.upload_dtype``."""
        return {
            MODEL: {
                name: wire.TensorSpec(spec.shape, self.options.upload_dtype)
                for name, spec in wire.spec_of(self.progress.modules[MODEL]).items()
            }
        }

    def summary(self) -> None:
        super().summary()
        data, options = self.settings.data, self.options
        with torch.device("meta"):
            patches = grid_of(vit_of(self.settings, 2)) ** 2
        ratios = options.inversion(self.settings.model.normalise, data.channels).ratios
        kept = keep_counts(patches, ratios)[-1] if ratios else patches
        log(INFO, "\tjob folder: %s; %s of %s patches stay", self._folder, kept, patches)
        if kept < MIN_PATCHES:
            log(
                WARNING,
                "\tonly %s of %s patches are left after the last stop; lower fedmitr.ratios or take a larger image",
                kept,
                patches,
            )

    # -- the one round --------------------------------------------------------------------------------------------

    def before_round(self, grid: Grid, server_round: int) -> None:
        """Looks for uploads of this run on the disk: their sites are not asked again."""
        begun = has_begun(self._folder)
        self._on_disk = read_job(self._folder).uploads if begun else tuple(spooled(self._folder))
        if self._on_disk:
            log(INFO, "on the disk, not asked again: %s", ", ".join(upload.site for upload in self._on_disk))

    def select_sites(self, server_round: int) -> list[SiteCard]:
        if has_begun(self._folder):
            return []
        there = {upload.site for upload in self._on_disk}
        return [card for card in super().select_sites(server_round) if card.site not in there]

    def quorum(self) -> int:
        """Replies that are still needed beside the uploads on the disk."""
        return max(0, self.settings.federation.min_sites - len(self._on_disk))

    def received(self, reply: Reply) -> Mapping[str, Arrays]:
        """The reply has passed every gate: its model goes to the disk. The base's mean is of float32."""
        if MODEL in reply.modules:
            arrays = reply.modules[MODEL]
            card = next(card for card in self.table.cards if card.site == reply.site)
            sent = wire.tensors(arrays, copy=False)
            spool(self._folder, card, sent, reply.num_examples, reply.numbers[wire.EXTRA])
            return {MODEL: {name: value.astype("float32", copy=False) for name, value in arrays.items()}}
        return reply.modules

    def combine(self, means: Mapping[str, StreamingMean | SecureMean], server_round: int) -> Modules:
        """The global model that the job makes of the uploads on the disk.

        ``means`` is not read: a resumed run has none for the sites that sent before it was killed, and the job takes
        the same mean from the disk.
        """
        if not has_begun(self._folder):
            labels, task, initial = self.table.labels, self.table.task, self.progress.modules[MODEL]
            begin(self._folder, self.settings, labels, task, initial, self._left_out())
        self._count_in(read_job(self._folder))
        with stop_on_sigterm() as stop:
            result = complete(self._folder, stop)
        assert self._observer is not None
        self._observer.keep("fedmitr", result.facts)
        return {MODEL: result.state}

    def _left_out(self) -> list[dict[str, str]]:
        """The round's refused and missing sites, as a job keeps them."""
        return [{"kind": kind, **entry} for kind in ("refused", "missing") for entry in getattr(self.record, kind)]

    def _count_in(self, job: Job) -> None:
        """The round's record names the sites whose uploads were on the disk, too, and those that had been left out."""
        for entry in job.left_out:
            known, found = getattr(self.record, entry["kind"]), {key: entry[key] for key in ("site", "reason")}
            if found not in known:
                known.append(found)
        for upload in job.uploads:
            if upload.site not in self.record.accepted:
                self.record.accepted.append(upload.site)
                self.record.weights[upload.site] = job.weights[upload.site]
                self.record.extra[upload.site] = dict(upload.extra)

    # -- at the end -----------------------------------------------------------------------------------------------

    def _finish(self, grid: Grid, last: int) -> MetricRecord:
        """After the test, the sites that scored the final model score the plain average on the same samples (spec 5).

        It chooses nothing, and nothing of the result depends on it.
        """
        measured, final = super()._finish(grid, last), self._pools[""]
        state, reason = to_score(self._folder)
        page: dict[str, Any] = {"not_scored": reason or "no site scored the final model"}
        if state is not None and final.sites:
            average = self._scored(grid, last, state, final.sites)
            page = {"split": self._split, "figures": compared(final, average, self.headline_excluded)}
        log_compared(page)
        assert self._observer is not None
        self._observer.keep(PAGE, page)
        return measured

    def _scored(self, grid: Grid, last: int, state: State, sites: Collection[str]) -> PooledScores:
        """Scores of another model than the global one, by these sites, on the split that was measured last."""
        self.record, self._pools = RoundRecord(last), self._empty_pools()
        self._records = {MODEL: wire.encode(state)}  # what the messages carry, this once
        cards = [card for card in self.table.cards if card.site in sites]
        for message in self._replies(grid, self._evaluation_messages(cards, last, ConfigRecord())):
            if (reply := self._gated(message, 0.0)) is not None:
                self._pool(reply)
        if trouble := self.record.refused + self.record.missing:
            assert self._observer is not None
            self._observer.left_out("plain average", trouble)
        return self._pools[""]


def _of_the_round(settings: Settings) -> list[str]:
    found, fed = [], settings.federation
    if fed.rounds != 1:
        found.append(f"method = 'fedmitr' with federation.rounds = {fed.rounds}: it has one round; use 1")
    if settings.privacy.secure_sum:
        found.append(
            "method = 'fedmitr' with privacy.secure_sum = true: the server inverts each site's model and has to see "
            "every one in the clear; use false, and say so in the sites' consent"
        )
    if fed.norm_bound:
        found.append(
            f"method = 'fedmitr' with federation.norm_bound = {fed.norm_bound}: models are inverted as they were sent, "
            "not scaled; use 0"
        )
    if settings.model.weights:
        found.append(
            f"method = 'fedmitr' with model.weights = {settings.model.weights!r}: those are of another network; use "
            "fedmitr.init_weights"
        )
    return found


def _of_the_schedule(settings: Settings) -> list[str]:
    """Networks and schedules that cannot be inverted."""
    found, options, data = [], settings.options, settings.data
    try:
        with torch.device("meta"):
            vit_of(settings, 2)
    except (ValueError, AssertionError) as error:
        found.append(f"fedmitr.model = {options.model!r} with data.image_size = {data.image_size}: {error}")
    try:
        options.inversion(settings.model.normalise, data.channels)
    except ValueError as error:
        found.append(f"fedmitr.stops = {options.stops!r}, fedmitr.ratios = {options.ratios!r}: {error}")
    return found


register("fedmitr", FedMITR, settings=FedMITRArea, site="client_app.fedmitr")
