"""A round whose updates stay under masks: what `privacy.secure_sum` puts in place of plain training messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from logging import WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from federation import wire
from federation.secure_roster import ACTIONS, ASK_MASKED
from federation.secure_sum import SecureSumError
from strategies import gate
from strategies.discovery import QuorumError
from strategies.exchange import Sent
from strategies.secure_round import checked_means, cohorts_of
from strategies.secure_sum import SecureRound


class SecureTraining:
    """The part of `FederatedStrategy` that runs a secure round; it works on the strategy's own messages and gates."""

    def _train_securely(self, grid: Grid, server_round: int) -> None:
        """A round whose updates stay under masks: four exchanges, then their sum. Raises QuorumError without one."""
        self._choose(server_round)
        area, limit = self.settings.privacy, gate.MAX_RELATIVE_NORM * max(1.0, self._longest())
        members: dict[str, dict[str, float]] = {}
        try:
            cohorts, specs = cohorts_of({card.site: self.update_specs(card, server_round) for card in self._selected})
            self._secure = SecureRound(
                experiment=self.experiment,
                server_round=server_round,
                cohorts=cohorts,
                specs=specs,
                value_range=area.secure_range,
                min_cohort=area.min_cohort,
            )
            sums = self._secure.run(functools.partial(self._exchange_secure, grid, server_round, members))
            means = checked_means(sums, members, limit)
        except SecureSumError as error:
            reasons = f" ({self._reasons()})" if self.record.refused or self.record.missing else ""
            raise QuorumError(f"{error}{reasons}. Mend the cause and resume.") from error
        self.record.frozen = dict(self._secure.frozen)
        self.record.clipped = {module: total.clipped for module, total in sums.items() if total.clipped}
        for module, reason in self.record.frozen.items():
            log(WARNING, "\t├── module %s stays as it is: %s", module, reason)
        for module, count in self.record.clipped.items():
            log(WARNING, "\t├── module %s: %s values cut to +-%g", module, count, area.secure_range)
        if self._split:
            self._measured(server_round - 1, self._split)
        self._advance(means, server_round)

    def _exchange_secure(
        self,
        grid: Grid,
        server_round: int,
        members: dict[str, dict[str, float]],
        action: str,
        requests: Mapping[str, RecordDict],
        add: Callable[[str, RecordDict], None],
    ) -> None:
        """One of the four exchanges; the third is the training. Fills ``members``: module -> site -> its weight."""
        assert self._secure is not None
        for message in self._replies(grid, self._secure_messages(action, server_round, requests)):
            sent = self._sent[message.metadata.src_node_id]
            if (reply := self._gated(message, 0.0)) is not None and self._added(sent, message.content, add):
                self._pool(reply)
                if sent.action == ASK_MASKED:
                    weights = {module: self.weigh(reply, module) for module in self._secure.masked_specs(reply.site)}
                    for module, weight in weights.items():
                        members.setdefault(module, {})[reply.site] = weight
                    self._accept(reply, weights)
            del message, reply  # one reply at a time is held in memory
        if action == ASK_MASKED:
            self._check_quorum(server_round)

    def _secure_messages(self, action: str, server_round: int, requests: Mapping[str, RecordDict]) -> Iterator[Message]:
        for card in (card for card in self._selected if card.site in requests):
            config = self._training_config(card, server_round) if action == ASK_MASKED else {}
            yield self._message(action, card, server_round, config, requests[card.site])
        if action == ASK_MASKED and self._split:
            silent = {*requests, *(entry["site"] for entry in self.record.refused + self.record.missing)}
            others = [card for card in self.table.cards if card.site not in silent]
            yield from self._evaluation_messages(others, server_round, ConfigRecord())

    def _added(self, sent: Sent, content: RecordDict, add: Callable[[str, RecordDict], None]) -> bool:
        """Whether the secure sum took a reply; what it refuses makes its site a dropout."""
        if sent.action not in ACTIONS:
            return True
        try:
            add(sent.card.site, content)
        except wire.WireError as error:
            self._refuse(sent.card.site, str(error), "secure sum")
            return False
        return True
