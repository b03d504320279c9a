"""The server's half of the secure sum: one round, four exchanges, a sum of every module and nothing of a single site.

`SecureRound` holds a round in memory and knows no transport (`run` is given one): each ``*_requests`` closes the
exchange before and gives the next requests by site; each ``add_*`` takes one reply, whole or not at all. A reply that
an ``add_*`` refuses makes its site a dropout; too few sites raise SecureSumError from the next ``*_requests``, and the
global state is kept. See `federation.secure_sum` for the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares

from federation import secure_roster as protocol
from federation import wire
from federation.secure_roster import KEY_SPEC, PublicKeys, Roster
from federation.secure_sum import (
    KEY_BYTES,
    MIN_COHORT,
    ModuleSum,
    SecureSumError,
    Specs,
    add_mask,
    check_public_key,
    decode_sum,
    public_key,
    vector_size,
)
from federation.wire import TensorSpec

Exchanged = Callable[[str, Mapping[str, RecordDict], Callable[[str, RecordDict], None]], None]
"""Sends an action's requests (by site) and hands every usable reply to the function given, with the site's name."""


class SecureRound:
    """One secure round. ``cohorts``: module -> the sites asked to train it; ``specs``: module -> its tensors.

    ``frozen`` fills with the modules that cannot be summed, each with the reason.
    """

    def __init__(
        self,
        *,
        experiment: str,
        server_round: int,
        cohorts: Mapping[str, Iterable[str]],
        specs: Mapping[str, Specs],
        value_range: float,
        min_cohort: int = MIN_COHORT,
    ) -> None:
        self.experiment = experiment
        self.server_round = server_round
        self.specs = specs
        self.value_range = value_range
        self.min_cohort = min_cohort
        self.frozen: dict[str, str] = {}
        self._stage = "keys"
        self._cohorts = {module: tuple(sorted(sites)) for module, sites in sorted(cohorts.items())}
        self._keys: dict[str, PublicKeys] = {}
        self._roster: Roster | None = None
        self._packets: dict[str, dict[str, bytes]] = {}
        self._totals: dict[str, np.ndarray] = {}
        self._masked: set[str] = set()
        self._unmasked: dict[str, dict[str, dict[str, bytes]]] = {}

    @property
    def roster(self) -> Roster:
        """Who takes part; known once the requests for shares are made."""
        if self._roster is None:
            raise SecureSumError("the roster is not closed yet; ask for the shares first")
        return self._roster

    def run(self, exchanged: Exchanged) -> dict[str, ModuleSum]:
        """All four exchanges; see the class. Raises SecureSumError where a sum cannot be had."""
        members = sorted({site for cohort in self._cohorts.values() for site in cohort})
        exchanged(protocol.ASK_KEYS, dict.fromkeys(members, RecordDict()), self.add_keys)
        exchanged(protocol.ASK_SHARES, self.share_requests(), self.add_shares)
        exchanged(protocol.ASK_MASKED, self.masked_requests(), self.add_masked)
        exchanged(protocol.ASK_UNMASK, self.unmask_requests(), self.add_unmask)
        return self.result()

    def payload(self, action: str, site: str, reply: wire.Payload) -> wire.Payload:
        """The declaration of a site's reply to one of the four actions.

        ``reply``: that of a training reply without modules, which the masked vectors travel with.
        """
        if action == protocol.ASK_KEYS:
            return protocol.keys_payload()
        if action == protocol.ASK_SHARES:
            return protocol.shares_payload(self.roster, site)
        if action == protocol.ASK_MASKED:
            return protocol.masked_payload(self.masked_specs(site), reply)
        return self.unmask_payload()

    # -- keys ---------------------------------------------------------------------------------------------------------

    def add_keys(self, site: str, content: RecordDict) -> None:
        """Takes a site's public keys. Raises SecureSumError."""
        self._check_expected("keys", site, {name for cohort in self._cohorts.values() for name in cohort}, self._keys)
        self._check_round(content)
        pair = protocol.read_bytes(content, protocol.PUBLIC_KEYS, {"mask": KEY_SPEC, "share": KEY_SPEC})
        keys = PublicKeys(pair["mask"], pair["share"])
        if len({key for known in (*self._keys.values(), keys) for key in known}) != 2 * len(self._keys) + 2:
            raise SecureSumError(f"a public key of {site} occurs twice")
        for key in keys:
            check_public_key(key)
        self._keys[site] = keys

    def share_requests(self) -> dict[str, RecordDict]:
        """Closes the roster: sites with keys, in the cohorts that are large enough. Raises SecureSumError for none."""
        cohorts = self._open(self._cohorts, self._keys, "sent keys")
        self._check_open(cohorts)
        members = sorted({site for cohort in cohorts.values() for site in cohort})
        keys = {site: self._keys[site] for site in members}
        self._roster = Roster(self.experiment, self.server_round, cohorts, keys)
        self._stage = "shares"
        request = protocol.roster_records(self._roster)
        return dict.fromkeys(members, request)

    # -- shares -------------------------------------------------------------------------------------------------------

    def add_shares(self, site: str, content: RecordDict) -> None:
        """Takes a site's sealed packets for the others. Raises SecureSumError."""
        self._check_expected("shares", site, self.roster.keys, self._packets)
        self._check_round(content)
        specs = protocol.shares_payload(self.roster, site).arrays[protocol.SHARES]
        self._packets[site] = protocol.read_bytes(content, protocol.SHARES, specs)

    def masked_requests(self) -> dict[str, RecordDict]:
        """For every site that sent shares, the packets that the others made for it. Raises SecureSumError."""
        self._check_enough(self._packets, "sent shares")
        cohorts = self._open(self.roster.cohorts, self._packets, "sent shares")
        self._check_open(cohorts)
        self._totals = {module: np.zeros(vector_size(self.specs[module]), np.uint64) for module in cohorts}
        self._stage = "masked"
        senders = sorted(self._packets)
        return {
            site: RecordDict(
                {protocol.SHARES: protocol.bytes_record({s: self._packets[s][site] for s in senders if s != site})}
            )
            for site in senders
        }

    # -- masked vectors -----------------------------------------------------------------------------------------------

    def masked_specs(self, site: str) -> dict[str, Specs]:
        """The modules that a site's masked reply holds, for `secure_roster.masked_payload`."""
        return {module: self.specs[module] for module in self.roster.modules_of(site) if module in self._totals}

    def add_masked(self, site: str, content: RecordDict) -> None:
        """Folds a site's masked vectors into the totals; they are not kept. Raises SecureSumError."""
        self._check_expected("masked", site, self._packets, self._masked)
        self._check_round(content)
        specs = {m: TensorSpec((vector_size(s),), "int64") for m, s in self.masked_specs(site).items()}
        vectors = protocol.read_arrays(content, protocol.MASKED, specs)
        for module, vector in vectors.items():
            self._totals[module] += vector.view(np.uint64)
        self._masked.add(site)

    def unmask_requests(self) -> dict[str, RecordDict]:
        """For every survivor, the list of survivors. A vector that comes later than this is not added."""
        self._check_enough(self._masked, "sent a masked vector")
        cohorts = self._open({m: self.roster.cohorts[m] for m in self._totals}, self._masked, "sent a masked vector")
        self._check_open(cohorts)
        self._totals = {module: self._totals[module] for module in cohorts}
        self._stage = "unmask"
        request = RecordDict({protocol.SURVIVORS: ConfigRecord({"sites": sorted(self._masked)})})
        return dict.fromkeys(sorted(self._masked), request)

    # -- unmasking ----------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> list[str]:
        """Sites that sent shares and then no usable vector: their pairwise masks are still in the totals."""
        return sorted(set(self._packets) - self._masked)

    def unmask_payload(self) -> wire.Payload:
        """The declaration of every survivor's reply."""
        return protocol.unmask_payload(self._survivors(), self.dropped)

    def add_unmask(self, site: str, content: RecordDict) -> None:
        """Takes one survivor's shares. Raises SecureSumError."""
        self._check_expected("unmask", site, self._masked, self._unmasked)
        self._check_round(content)
        arrays = self.unmask_payload().arrays
        found = {record: protocol.read_bytes(content, record, specs) for record, specs in arrays.items()}
        index = self.roster.share_index(site)
        if any(int.from_bytes(s[:4], "little") != index for shares in found.values() for s in shares.values()):
            raise SecureSumError(f"a share from {site} does not carry its number {index}")
        self._unmasked[site] = found

    def result(self) -> dict[str, ModuleSum]:
        """The sum of every module that is open, its masks taken off. Raises SecureSumError below the threshold."""
        self._check_enough(self._unmasked, "sent their shares to unmask")
        keys = {site: self._dropped_key(site) for site in self.dropped}
        sums = {}
        for module, survivors in self._survivors().items():
            total = self._totals.pop(module)
            for site in survivors:
                add_mask(total, self._secret(protocol.SEED_SHARES + module, site), subtract=True)
            for site in (name for name in self.dropped if name in self.roster.cohorts[module]):
                for survivor in survivors:
                    seed = self.roster.pair_seed(keys[site], site, survivor, module)
                    add_mask(total, seed, subtract=not protocol.subtracts(survivor, site))
            sums[module] = decode_sum(total, len(survivors), self.specs[module], self.value_range)
        return sums

    def _survivors(self) -> dict[str, tuple[str, ...]]:
        return protocol.open_modules(
            {module: self.roster.cohorts[module] for module in self._totals}, self._masked, self.min_cohort
        )

    def _dropped_key(self, site: str) -> bytes:
        key = self._secret(protocol.KEY_SHARES, site)
        if public_key(key) != self.roster.keys[site].mask:
            raise self._refused(f"the shares of {site}'s mask key do not give its key")
        return key

    def _secret(self, record: str, owner: str) -> bytes:
        holders = sorted(self._unmasked)[: self.roster.threshold]
        try:
            secret = combine_shares([self._unmasked[holder][record][owner] for holder in holders])
        except ValueError as error:
            raise self._refused(f"the shares of a secret of {owner} do not fit together") from error
        if len(secret) != KEY_BYTES:
            raise self._refused(f"a secret of {owner} has {len(secret)} bytes, expected {KEY_BYTES}")
        return secret

    # -- checks -------------------------------------------------------------------------------------------------------

    def _open(
        self, cohorts: Mapping[str, Collection[str]], sites: Collection[str], did: str
    ) -> dict[str, tuple[str, ...]]:
        """The modules that are still open; freezes the others with the reason."""
        found = protocol.open_modules(cohorts, sites, self.min_cohort)
        for module in sorted(set(cohorts) - set(found)):
            count = len(set(cohorts[module]) & set(sites))
            self.frozen[module] = f"{count} of {len(cohorts[module])} sites {did}, {self.min_cohort} needed"
        return found

    def _check_expected(self, stage: str, site: str, asked: Collection[str], answered: Collection[str]) -> None:
        if self._stage != stage:
            raise SecureSumError(f"a reply of {site} to {stage!r} came too late or too early: now is {self._stage!r}")
        if site not in asked or site in answered:
            raise SecureSumError(f"{site} was not asked, or answered before")

    def _check_round(self, content: RecordDict) -> None:
        found = content.metric_records.get(wire.METRICS, {}).get("server_round")
        if found != self.server_round:
            raise SecureSumError(f"the reply is for round {found}, expected round {self.server_round}")

    def _check_open(self, cohorts: Mapping[str, Collection[str]]) -> None:
        if not cohorts:
            raise self._refused(f"no module has the {self.min_cohort} sites that a sum needs")

    def _check_enough(self, sites: Collection[str], did: str) -> None:
        if len(sites) < self.roster.threshold:
            raise self._refused(
                f"{len(sites)} of {len(self.roster.sites)} sites {did}, {self.roster.threshold} needed to unmask a sum"
            )

    def _refused(self, reason: str) -> SecureSumError:
        return SecureSumError(f"round {self.server_round} of the secure sum: {reason}; the state is kept")
