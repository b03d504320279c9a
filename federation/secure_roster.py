"""What travels in a secure sum: the roster that all sites share, the four exchanges, and their declared payloads.

| exchange | the server sends | a site answers |
|---|---|---|
| keys | the round | two fresh public keys |
| shares | the roster: everybody's keys, the cohorts | for every other site its sealed shares |
| masked | the shares that others made for this site | one masked vector for each of its open modules |
| unmask | who survived | shares of the seeds of survivors, of the mask keys of the others |

A site sends all its vectors in one reply, so it survives or drops as a whole. Self-mask seeds are one for each module:
where a module's surviving cohort is too small, its seeds stay shared, although those of other modules are given out.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from federation import wire
from federation.secure_sum import (
    KEY_BYTES,
    MAX_SITES,
    MIN_COHORT,
    TAG_BYTES,
    SecureSumError,
    Specs,
    agreed_key,
    threshold,
    vector_size,
)
from federation.wire import Payload, TensorSpec

ASK_KEYS = "query.secure_keys"
ASK_SHARES = "query.secure_shares"
ASK_MASKED = "train.secure_masked"
ASK_UNMASK = "query.secure_unmask"

ACTIONS = frozenset({ASK_KEYS, ASK_SHARES, ASK_MASKED, ASK_UNMASK})

PUBLIC_KEYS = "secure.public_keys"
MASK_KEYS = "secure.mask_keys"
SHARE_KEYS = "secure.share_keys"
COHORTS = "secure.cohorts"
SHARES = "secure.shares"
MASKED = "secure.masked"
SURVIVORS = "secure.survivors"
KEY_SHARES = "secure.key_shares"
SEED_SHARES = "secure.seed_shares."

SHARE_BYTES = 52
"""One Shamir share of 32 bytes as Flower makes it: the index in 4 bytes, then three blocks of 16."""

KEY_SPEC = TensorSpec((KEY_BYTES,), "uint8")
SHARE_SPEC = TensorSpec((SHARE_BYTES,), "uint8")
ROUND_NUMBER = {wire.METRICS: {"server_round": "count"}}


class PublicKeys(NamedTuple):
    """A site's two public keys of one round: for pairwise masks, and for sealing shares."""

    mask: bytes
    share: bytes


@dataclass(frozen=True)
class Roster:
    """Who takes part in a secure round. ``cohorts``: module -> sites; every site is in one cohort at least.

    Raises SecureSumError for what no honest server sends.
    """

    experiment: str
    server_round: int
    cohorts: Mapping[str, tuple[str, ...]]
    keys: Mapping[str, PublicKeys]

    def __post_init__(self) -> None:
        if not MIN_COHORT <= len(self.keys) <= MAX_SITES:
            raise SecureSumError(f"a roster of {len(self.keys)} sites, expected {MIN_COHORT} to {MAX_SITES}")
        if not all(wire.SITE_NAME.fullmatch(site) for site in self.keys):
            raise SecureSumError("the roster names a site that is not 1 to 64 letters, digits, '.', '_', '-' or spaces")
        members = {site for cohort in self.cohorts.values() for site in cohort}
        if members != set(self.keys) or any(tuple(sorted(set(c))) != c for c in self.cohorts.values()):
            raise SecureSumError("the cohorts are not sorted lists of the sites that have keys")
        if len({key for pair in self.keys.values() for key in pair}) != 2 * len(self.keys):
            raise SecureSumError("a public key occurs twice in the roster")

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self.keys))

    @property
    def threshold(self) -> int:
        return threshold(len(self.keys))

    def modules_of(self, site: str) -> tuple[str, ...]:
        """The modules a site is in the cohort of, sorted."""
        return tuple(module for module in sorted(self.cohorts) if site in self.cohorts[module])

    def share_index(self, holder: str) -> int:
        """The number of the share that a site holds of every secret, from 1."""
        return self.sites.index(holder) + 1

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the roster. It is part of every derived key: sites with different rosters read nothing."""
        parts = [self.experiment, str(self.server_round)]
        parts += [f"{module}\x1f{site}" for module in sorted(self.cohorts) for site in self.cohorts[module]]
        parts += [f"{site}\x1f{self.keys[site].mask.hex()}\x1f{self.keys[site].share.hex()}" for site in self.sites]
        return wire.sha256(f"{part}\n".encode() for part in parts)

    def pair_seed(self, private: bytes, owner: str, other: str, module: str) -> bytes:
        """The seed of the mask between ``owner``, whose mask key is ``private``, and another site, for one module."""
        purpose = "\x1f".join(("mask", self.digest, module, *sorted((owner, other))))
        return agreed_key(private, self.keys[other].mask, purpose)

    def seal_key(self, private: bytes, owner: str, other: str, *, sender: str) -> bytes:
        """The key, used once, that seals what ``sender`` sends to the other of the two."""
        recipient = other if sender == owner else owner
        return agreed_key(private, self.keys[other].share, "\x1f".join(("seal", self.digest, sender, recipient)))


def subtracts(site: str, other: str) -> bool:
    """Whether ``site`` subtracts the mask that it shares with ``other``; the other one adds it."""
    return site > other


def open_modules(
    cohorts: Mapping[str, Iterable[str]], sites: Collection[str], min_cohort: int
) -> dict[str, tuple[str, ...]]:
    """Modules that ``min_cohort`` of these sites have, each with those sites, sorted; the others are frozen.

    Raises SecureSumError for a ``min_cohort`` below MIN_COHORT.
    """
    if min_cohort < MIN_COHORT:
        raise SecureSumError(f"min_cohort is {min_cohort}, expected at least {MIN_COHORT}")
    present = {module: tuple(sorted(set(cohorts[module]) & set(sites))) for module in sorted(cohorts)}
    return {module: cohort for module, cohort in present.items() if len(cohort) >= min_cohort}


# -- records ----------------------------------------------------------------------------------------------------------


def roster_records(roster: Roster) -> RecordDict:
    """The request for shares, the same for all sites of the roster."""
    return RecordDict(
        {
            MASK_KEYS: bytes_record({site: roster.keys[site].mask for site in roster.sites}),
            SHARE_KEYS: bytes_record({site: roster.keys[site].share for site in roster.sites}),
            COHORTS: ConfigRecord({module: list(cohort) for module, cohort in roster.cohorts.items()}),
        }
    )


def read_roster(content: RecordDict, experiment: str, server_round: int) -> Roster:
    """The roster in a request for shares. Raises SecureSumError."""
    lists = content.config_records.get(COHORTS, ConfigRecord())
    if not all(isinstance(cohort, list) and all(isinstance(site, str) for site in cohort) for cohort in lists.values()):
        raise SecureSumError("the cohorts are not lists of sites")
    sites = {site for cohort in lists.values() for site in cohort}
    mask, share = (read_bytes(content, name, dict.fromkeys(sites, KEY_SPEC)) for name in (MASK_KEYS, SHARE_KEYS))
    keys = {site: PublicKeys(mask[site], share[site]) for site in sorted(sites)}
    return Roster(experiment, server_round, {module: tuple(lists[module]) for module in lists}, keys)


def bytes_record(values: Mapping[str, bytes]) -> ArrayRecord:
    """Byte strings by name as a record of uint8 arrays."""
    return wire.encode({name: np.frombuffer(value, np.uint8) for name, value in values.items()})


def read_arrays(content: RecordDict, record: str, specs: Specs) -> dict[str, np.ndarray]:
    """One record's arrays, exactly those of ``specs``. Raises SecureSumError and WireError."""
    found = RecordDict({record: content[record]} if record in content else {})
    if wrong := Payload("", arrays={record: specs}).violation(found):
        raise SecureSumError(wrong)
    return wire.decode(found[record])


def read_bytes(content: RecordDict, record: str, specs: Specs) -> dict[str, bytes]:
    """As `read_arrays`, for uint8 arrays."""
    return {name: value.tobytes() for name, value in read_arrays(content, record, specs).items()}


# -- declared payloads of the replies ---------------------------------------------------------------------------------


def keys_payload() -> Payload:
    return Payload(
        "secure sum: two public keys for this round",
        {PUBLIC_KEYS: {"mask": KEY_SPEC, "share": KEY_SPEC}},
        ROUND_NUMBER,
    )


def shares_payload(roster: Roster, site: str) -> Payload:
    """For every other site one sealed packet: a share of the mask key, and of the self-mask seed of every module."""
    size = SHARE_BYTES * (1 + len(roster.modules_of(site))) + TAG_BYTES
    packets = {other: TensorSpec((size,), "uint8") for other in roster.sites if other != site}
    return Payload("secure sum: shares of this round's masks, sealed for other sites", {SHARES: packets}, ROUND_NUMBER)


def masked_payload(specs: Mapping[str, Specs], reply: Payload) -> Payload:
    """A training reply's declaration with masked vectors for its modules (``specs``: module -> its tensors).

    ``reply``: the declaration without modules, `wire.train_payload({}, evaluation, extra)`.
    """
    vectors = {module: TensorSpec((vector_size(specs[module]),), "int64") for module in specs}
    purpose = f"secure sum: masked change of {', '.join(sorted(specs)) or 'no module'}; {reply.purpose}"
    return Payload(purpose, {**reply.arrays, MASKED: vectors}, reply.numbers, reply.texts)


def unmask_payload(opened: Mapping[str, Iterable[str]], dropped: Iterable[str]) -> Payload:
    """Shares of the seeds of every opened module's survivors, and of the mask keys of the sites that dropped."""
    arrays = {SEED_SHARES + module: dict.fromkeys(survivors, SHARE_SPEC) for module, survivors in opened.items()}
    return Payload(
        "secure sum: shares that take the masks off the sum, never both of one site's",
        {**arrays, KEY_SHARES: dict.fromkeys(dropped, SHARE_SPEC)},
        ROUND_NUMBER,
    )
