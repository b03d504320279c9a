"""The round protocol that every method runs on.

`FederatedStrategy.start` is the one loop: site cards, then rounds of (select, send, gate, fold, apply, checkpoint),
then the last evaluation and the test. A method overrides what `strategies.hooks.MethodHooks` lists and nothing else; it
never talks to the Grid.

Evaluation of round r's model travels with the training of round r + 1: a deployed exchange costs a process start at
every site, so a run of R rounds takes R + 3 exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from federation import metrics, wire
from federation.differential_privacy import require_accountant
from federation.secure_roster import ACTIONS, ASK_MASKED
from federation.settings import Settings, names_in
from strategies import gate
from strategies.aggregation import ModularMean, StreamingMean, capped_weights, scaled_to_norm
from strategies.cards import CardError, SiteCard, SiteTable
from strategies.discovery import QuorumError, collect_table, wait_for_nodes
from strategies.evaluation import PooledScores
from strategies.exchange import Sent, exchange, failure
from strategies.hooks import MODEL as MODEL
from strategies.hooks import MethodHooks
from strategies.initial import seeded, state_norm
from strategies.private_training import PrivateTraining
from strategies.progress import Modules, Observer, Progress, RoundRecord
from strategies.secure_round import SecureMean
from strategies.secure_sum import SecureRound
from strategies.secure_training import SecureTraining


class FederatedStrategy(SecureTraining, PrivateTraining, MethodHooks, Strategy):
    """A Flower strategy with named sites, gates, per-module state, a quorum and checkpoints.

    Its five Flower methods work on ``self.progress``; `start` calls them in order. ``settings`` is the whole run
    config, ``self.options`` the method's own section.
    """

    def __init__(self, settings: Settings, experiment: str = "experiment") -> None:
        self.settings = settings
        self.options: Any = settings.options
        self.experiment = experiment
        self.progress = Progress()
        self.table = SiteTable((), {})
        self.record = RoundRecord(0)
        self.headline_excluded: dict[str, str] = {}
        self.weight_ceiling = float("inf")
        self._records: dict[str, ArrayRecord] = {}
        self._sent: dict[int, Sent] = {}
        self._answered: set[str] = set()
        self._selected: list[SiteCard] = []
        self._split = ""
        self._timeout = settings.federation.timeout_s
        self._secure: SecureRound | None = None
        self._observer: Observer | None = None

    # -- the loop -----------------------------------------------------------------------------------------------

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        *,
        observer: Observer,
        resume_from: Progress | None = None,
        data_sha256: Mapping[str, str] | None = None,
        labels: Iterable[str] | None = None,
    ) -> Result:
        """Runs the federation to its end and returns the selected model with its metrics.

        ``initial_arrays`` replaces the initial ``model`` module. ``resume_from`` continues after its round;
        ``data_sha256`` (site -> checksum) and ``labels`` then have to match the cards.
        Raises QuorumError and CardError.
        """
        self._observer = observer
        self._timeout = timeout or self.settings.federation.timeout_s
        last = num_rounds or self.settings.federation.rounds
        self.summary()
        if self.settings.privacy.dp_clips:
            require_accountant()
        self.table = self._discovered(grid)
        self._check_labels(tuple(labels or self.table.labels))
        self._initialise(initial_arrays, resume_from, data_sha256 or {})
        self._begin_privacy(resumed=resume_from is not None)
        observer.sites_known(self.table, self.progress.modules, self.headline_excluded)
        if resume_from is None:
            self.progress.method = self.state_dict()
            observer.checkpoint(self.progress)  # a run that is killed in its first round can be resumed too
        result = Result()
        for server_round in range(self.progress.server_round + 1, last + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", server_round, last)
            self.before_round(grid, server_round)
            self._train_round(grid, server_round)
            result.train_metrics_clientapp[server_round] = MetricRecord({"num-sites": len(self.record.accepted)})
        result.evaluate_metrics_clientapp[last] = self._finish(grid, last)
        result.arrays = self.arrays
        return result

    def _discovered(self, grid: Grid) -> SiteTable:
        fed, quorum = self.settings.federation, self.quorum()
        node_ids = wait_for_nodes(grid, expected=fed.expected_sites, quorum=quorum, wait_s=fed.wait_s)
        content = RecordDict({wire.CONFIG: self._config(0)})
        payload = wire.profile_payload(self.profile_extra)
        table = collect_table(grid, node_ids, content, payload, quorum=quorum, timeout_s=self._timeout)
        if fed.sites_per_round > len(table.trainable):
            asked, there = fed.sites_per_round, len(table.trainable)
            log(WARNING, "federation.sites_per_round = %s but %s sites can train; all are used", asked, there)
        return table

    def _initialise(
        self, initial_arrays: ArrayRecord | None, resume_from: Progress | None, data_sha256: Mapping[str, str]
    ) -> None:
        metrics.check_selection_metric(self.settings.evaluation.selection_metric, self.table.task)
        self._start_state()
        counts = {card.site: float(card.num_train) for card in self.table.trainable}
        self.weight_ceiling = max(capped_weights(counts, self.settings.federation.max_site_share).values())
        self.headline_excluded = self._headline_excluded()
        if resume_from is not None:
            for card in self.table.cards:
                if data_sha256.get(card.site, card.data_sha256) != card.data_sha256:
                    raise CardError(
                        f"the data of {card.site} changed: checksum {card.data_sha256}, the run had "
                        f"{data_sha256[card.site]}; start a new run or restore the data"
                    )
            self._check_same_names(self.progress.modules, resume_from.modules)
            self.progress = resume_from
            self.load_state_dict(resume_from.method)
        elif initial_arrays is not None:
            given = wire.tensors(wire.decode(initial_arrays))
            self._check_same_names({MODEL: self.progress.modules[MODEL]}, {MODEL: given})
            self.progress.modules[MODEL] = given

    def _check_labels(self, before: tuple[str, ...]) -> None:
        if before != self.table.labels:
            raise CardError(
                f"the label list changed: the sites have {', '.join(self.table.labels)}, the run had "
                f"{', '.join(before)}; start a new run or restore the labels"
            )

    def _start_state(self) -> None:
        """Builds the initial state; refuses to start where the sites' schema is another. Raises CardError."""
        labels, task = self.table.labels, self.table.task
        network = seeded(lambda: self.network(labels, task), self.settings)
        self.progress.modules = self.build(network)
        specs = {name: wire.spec_of(self.progress.modules[name]) for name in self.shared_modules()}
        ours = wire.schema_sha256(labels, task, specs, getattr(network, "frozen_sha256", ""))
        theirs = self.table.cards[0].schema
        if ours != theirs:
            raise CardError(
                f"the sites' schema is {theirs}, the server's {ours}: they run other code or other settings"
            )

    def _headline_excluded(self) -> dict[str, str]:
        named = names_in(self.settings.evaluation.exclude)
        needed = min(self.settings.evaluation.min_label_sites, len(self.table.trainable))
        out = {}
        for index, label in enumerate(self.table.labels):
            count = self.table.sites_with_positives(index)
            if label in named:
                out[label] = "named in evaluation.exclude"
            elif count < needed:
                out[label] = f"positives at {count} training site{'s' * (count != 1)}: it would measure the site"
        for label in sorted(set(named) - set(self.table.labels)):
            log(WARNING, "evaluation.exclude names %r, which is not among the labels", label)
        return out

    def _train_round(self, grid: Grid, server_round: int) -> None:
        started = time.monotonic()
        self.record = RoundRecord(server_round)
        self._pools = self._empty_pools()
        if self.settings.privacy.secure_sum:
            self._train_securely(grid, server_round)
        else:
            messages = self.configure_train(server_round, self.arrays, ConfigRecord(), grid)
            self.aggregate_train(server_round, self._replies(grid, messages))
        self.record.seconds = time.monotonic() - started
        assert self._observer is not None
        self._observer.round_done(self.record)
        self._observer.checkpoint(self.progress)
        log(
            INFO,
            "\t└──> accepted %s of %s, %.1f s",
            len(self.record.accepted),
            len(self._selected),
            self.record.seconds,
        )

    def _finish(self, grid: Grid, last: int) -> MetricRecord:
        """Evaluates the last model, chooses, and measures the chosen model on the test split, once."""
        assert self._observer is not None
        self._evaluate(grid, last, "val")
        if self.progress.best_round and self.progress.best_round != last:
            log(INFO, "selected: the model of round %s", self.progress.best_round)
            self.progress.modules = self._observer.load_best(self.progress.best_round)
            self._records = {}
        selected = self.progress.best_round or last
        self.progress.best_round = selected
        return self._evaluate(grid, selected, "test")

    def _evaluate(self, grid: Grid, server_round: int, split: str) -> MetricRecord:
        self._pools = self._empty_pools()
        self._split = split
        messages = self.configure_evaluate(server_round, self.arrays, ConfigRecord(), grid)
        measured = self.aggregate_evaluate(server_round, self._replies(grid, messages))
        if trouble := self.record.refused + self.record.missing:
            assert self._observer is not None
            self._observer.left_out(split, trouble)
        return measured or MetricRecord()

    # -- Flower's five methods ------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Training messages for the selected sites; where evaluation is due, evaluation messages for the others."""
        self._choose(server_round)
        chosen = {card.site for card in self._selected}
        for card in self._selected:
            extra = {**config, **self._training_config(card, server_round)}
            yield self._message(wire.TRAIN, card, server_round, extra)
        if self._split:
            others = [card for card in self.table.cards if card.site not in chosen]
            yield from self._evaluation_messages(others, server_round, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Gates and folds replies one by one, then moves the global state. Raises QuorumError below the quorum."""
        mean = ModularMean()
        norm = self._longest()
        loss = examples = 0.0
        for message in replies:
            if (reply := self._gated(message, norm)) is not None:
                self._pool(reply)
                if self._sent[message.metadata.src_node_id].action == wire.TRAIN:
                    self._fold(mean, reply)
                    loss += float(reply.numbers[wire.METRICS]["loss_sum"])
                    examples += reply.num_examples
            del message, reply  # one reply at a time is held in memory
        self._check_quorum(server_round)
        if self._split:
            self._measured(server_round - 1, self._split)
        self._advance(mean.means, server_round)
        return self.arrays, MetricRecord({"train-loss-sum": loss, "num-examples": int(examples)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluation messages for every site with samples of the split that is being measured."""
        self.record = RoundRecord(server_round)
        yield from self._evaluation_messages(self.table.cards, server_round, config)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Adds up the sites' score histograms and measures the pooled result; None where no site answered."""
        for message in replies:
            if (reply := self._gated(message, 0.0)) is not None:
                self._pool(reply)
        if not self._pools[""].sites:
            log(WARNING, "no site sent %s scores, so nothing is measured", self._split)
            return None
        summary = self._measured(server_round, self._split)
        return MetricRecord({key: value for key, value in summary.items() if isinstance(value, int | float)})

    def summary(self) -> None:
        """Logs what is about to run, in Flower's manner."""
        fed = self.settings.federation
        log(INFO, "Starting %s: %s rounds, seed %s", self.settings.method, fed.rounds, self.settings.seed)
        log(
            INFO,
            "\t├── weighting: %s; quorum: %s sites; time limit of a reply: %g s",
            self.weighting,
            self.quorum(),
            fed.timeout_s,
        )
        log(
            INFO,
            "\t└── model: %s; selection: best validation %s",
            self.settings.model.name,
            self.settings.evaluation.selection_metric,
        )

    # -- parts ----------------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> ArrayRecord:
        """The ``model`` module as Flower's record; empty for a method without one."""
        return self.module_record(MODEL) if MODEL in self.progress.modules else ArrayRecord()

    def module_record(self, module: str) -> ArrayRecord:
        """One module as a record, encoded once per round and shared by all messages."""
        if module not in self._records:
            self._records[module] = wire.encode(self.progress.modules[module])
        return self._records[module]

    def _longest(self) -> float:
        """L2 norm of the longest module, which bounds what the update gate lets through."""
        return max((state_norm(state) for state in self.progress.modules.values()), default=0.0)

    def _choose(self, server_round: int) -> None:
        self._selected = self.select_sites(server_round)
        self._split = "val" if self._evaluation_due(server_round - 1) else ""
        log(
            INFO,
            "configure_train: %s of %s sites: %s",
            len(self._selected),
            len(self.table.trainable),
            ", ".join(sorted(card.site for card in self._selected)),
        )

    def _training_config(self, card: SiteCard, server_round: int) -> dict[str, int | float | str]:
        split = self._split if self._split and card.split_sizes[self._split] else ""
        return {**self.round_config(card, server_round), "evaluate": split}

    def _config(self, server_round: int) -> ConfigRecord:
        return ConfigRecord({"server_round": server_round, "experiment": self.experiment})

    def _message(
        self,
        action: str,
        card: SiteCard,
        server_round: int,
        config: Mapping[str, Any],
        request: RecordDict | None = None,
    ) -> Message:
        """A message to one site; of a secure sum's only the one that trains carries the modules."""
        last_accepted = self.progress.accepted.get(card.site, 0)
        config = ConfigRecord({**self._config(server_round), "last_accepted": last_accepted, **config})
        content = RecordDict({**(request or {}), wire.CONFIG: config})
        modules = self.sent_modules(card, server_round) if action not in ACTIONS - {ASK_MASKED} else ()
        for module in modules:
            content[wire.MODULE + module] = self.module_record(module)
        self.record.bytes_down += wire.size_bytes(content)
        message = Message(content, card.node_id, action, ttl=self._timeout, group_id=str(server_round))
        self._sent[card.node_id] = Sent(card, action, server_round, str(config.get("evaluate", "")))
        return message

    def _evaluation_messages(
        self, cards: Iterable[SiteCard], server_round: int, config: ConfigRecord
    ) -> Iterator[Message]:
        for card in cards:
            if card.split_sizes[self._split]:
                yield self._message(wire.EVALUATE, card, server_round, {**config, "evaluate": self._split})

    def _replies(self, grid: Grid, messages: Iterable[Message]) -> Iterator[Message]:
        self._sent, self._answered = {}, set()
        messages = list(messages)
        names = {node_id: sent.card.site for node_id, sent in self._sent.items()}
        replies = exchange(grid, messages, names, self._timeout)
        self._records = {}  # what was sent is with the SuperLink now
        return replies

    def ask(
        self,
        grid: Grid,
        server_round: int,
        cards: Iterable[SiteCard],
        config: Mapping[str, Any] | Callable[[SiteCard], Mapping[str, Any]] | None = None,
    ) -> Iterator[tuple[SiteCard, dict[str, Any]]]:
        """Puts the method's own question to sites, with the global modules; gives each usable answer's numbers.

        ``config``: what the question says, to all or to each. In the order of the sites' names. A site that fails or
        answers something undeclared is left out and named in the log and the run folder.
        """
        assert self._observer is not None
        self.record = RoundRecord(server_round)
        told = config if callable(config) else lambda card: config or {}
        messages = (self._message(wire.ASK, card, server_round, told(card)) for card in cards)
        for message in self._replies(grid, messages):
            if (reply := self._gated(message, 0.0)) is not None:
                yield self._sent[message.metadata.src_node_id].card, dict(reply.numbers[wire.EXTRA])
        if trouble := self.record.refused + self.record.missing:
            self._observer.left_out("answers", trouble)

    def payload(self, action: str, card: SiteCard, server_round: int, evaluated_split: str) -> wire.Payload:
        """The declared payload of one site's reply to one action; the site's half declares the same."""
        if action == wire.ASK:
            return wire.answer_payload(self.answer_numbers)
        splits = wire.views_of(evaluated_split, self.views)
        labels, bins = self.table.labels, self.settings.evaluation.bins
        evaluation = wire.evaluation_payload(splits, len(labels), bins, self.table.task, self.evaluation_extra)
        if action == wire.EVALUATE:
            return evaluation
        if action in ACTIONS:
            assert self._secure is not None
            return self._secure.payload(action, card.site, wire.train_payload({}, evaluation, self.train_extra))
        return wire.train_payload(self.update_specs(card, server_round), evaluation, self.train_extra)

    def _gated(self, message: Message, reference_norm: float) -> gate.Reply | None:
        """The accepted reply, or None with the reason in the round's record."""
        sent = self._sent[message.metadata.src_node_id]
        card = sent.card
        if reason := failure(message):
            found = self.record.refused if reason.startswith("E-") else self.record.missing
            found.append({"site": card.site, "reason": reason})
            log(WARNING, "\t├── %s: %s", card.site, reason)
            return None
        self.record.bytes_up += wire.size_bytes(message.content)
        expected = gate.Expected(
            site=card.site,
            server_round=sent.server_round,
            payload=self.payload(sent.action, card, sent.server_round, sent.evaluated_split),
            max_examples=card.num_train,
            reference_norm=reference_norm,
            split_sizes=card.split_sizes,
        )
        if card.site in self._answered:
            reply, reason = None, "a second reply to the same message"
        else:
            reply, reason = gate.inspect(message.content, expected, self.received)
        self._answered.add(card.site)
        if reply is None:
            self._refuse(card.site, reason, "update gate")
        return reply

    def _refuse(self, site: str, reason: str, by: str) -> None:
        self.record.refused.append({"site": site, "reason": reason})
        log(WARNING, "\t├── %s refused by the %s: %s", site, by, reason)

    def _pool(self, reply: gate.Reply) -> None:
        for view, pool in self._pools.items():
            pool.add(reply, wire.view_of(self._split, view))

    def _empty_pools(self) -> dict[str, PooledScores]:
        arguments = self.table.labels, self.table.task, self.settings.evaluation.bins
        return {view: PooledScores(*arguments) for view in ("", *self.views)}

    def _fold(self, mean: ModularMean, reply: gate.Reply) -> None:
        bound = self._update_bound()
        weights = {module: self.weigh(reply, module) for module in reply.changes}
        changes = {
            module: scaled_to_norm(arrays, reply.norm, bound) if bound else arrays
            for module, arrays in reply.changes.items()
        }
        mean.add(reply.site, changes, weights)
        self._accept(reply, weights)

    def _accept(self, reply: gate.Reply, weights: Mapping[str, float]) -> None:
        self.record.weights[reply.site] = max(weights.values(), default=0.0)
        self.record.accepted.append(reply.site)
        self.record.extra[reply.site] = dict(reply.numbers.get(wire.EXTRA, {}))
        self.record.train_loss[reply.site] = float(reply.numbers[wire.METRICS]["loss_sum"]) / reply.num_examples

    def _check_quorum(self, server_round: int) -> None:
        good = len(self.record.accepted)
        if good >= self.quorum():
            return
        raise QuorumError(
            f"round {server_round}: {good} usable replies, {self.quorum()} needed (federation.min_sites); "
            f"{self._reasons()}. The state before this round is kept; mend the cause and resume."
        )

    def _reasons(self) -> str:
        return "; ".join(f"{entry['site']}: {entry['reason']}" for entry in self.record.refused + self.record.missing)

    def _advance(self, means: Mapping[str, StreamingMean | SecureMean], server_round: int) -> None:
        modules = self._after_noise(self.combine(self._released(means, server_round), server_round))
        self._check_same_names(self.progress.modules, modules)
        self.progress.modules = modules
        self.progress.server_round = server_round
        self.progress.accepted.update(dict.fromkeys(self.record.accepted, server_round))
        self.progress.method = self.state_dict()
        self._records = {}

    @staticmethod
    def _check_same_names(before: Modules, after: Modules) -> None:
        """A state never loses a tensor or changes a shape."""
        for module in sorted(set(before) | set(after)):
            old, new = (wire.spec_of(modules.get(module, {})) for modules in (before, after))
            if old != new:
                names = sorted(name for name in set(old) | set(new) if old.get(name) != new.get(name))
                shown = "; ".join(f"{name}: {old.get(name)} before, {new.get(name)} now" for name in names[:3])
                raise ValueError(f"module {module!r} changed its tensors ({shown}); the state must keep its shape")

    def _evaluation_due(self, server_round: int) -> bool:
        every = self.settings.evaluation.every
        return server_round > 0 and every > 0 and server_round % every == 0

    def _measured(self, server_round: int, split: str) -> dict[str, Any]:
        """Records a pooled evaluation; on validation, keeps the model where it is the best so far."""
        assert self._observer is not None
        best = self.progress.best_thresholds
        thresholds = None if best is None else np.array(best)
        pool = self._pools[""]
        if split == "val":
            thresholds = pool.best_thresholds()
        pool.further = self.figures(self._pools)
        summary = pool.summary(thresholds, set(self.headline_excluded))
        self._observer.evaluated(server_round, split, self._pools, thresholds)
        if split == "val":
            self._select(server_round, thresholds, summary)
        log(INFO, "\t├── %s of round %s: %s", split, server_round, _shown(summary, self.settings))
        return summary

    def _select(self, server_round: int, thresholds: np.ndarray, summary: Mapping[str, Any]) -> None:
        """Keeps the measured model and its thresholds where it is the best on validation so far."""
        area, progress = self.settings.evaluation, self.progress
        if not self.selects_model:
            progress.best_thresholds = thresholds.tolist()
            return
        pool = self._pools[""]
        if rare := pool.rare(area.min_selection_positives):
            summary = pool.summary(thresholds, set(self.headline_excluded) | rare)
        value = metrics.selection_value(summary, area.selection_metric)
        if value is not None and (progress.best_value is None or value > progress.best_value):
            progress.best_round, progress.best_value = server_round, float(value)
            progress.best_thresholds = thresholds.tolist()
            assert self._observer is not None
            self._observer.keep_best(server_round, progress.modules)


def _shown(summary: Mapping[str, Any], settings: Settings) -> str:
    value = metrics.selection_value(summary, settings.evaluation.selection_metric)
    return f"{settings.evaluation.selection_metric} = " + ("not defined" if value is None else f"{value:.4f}")
