"""A site's half of the secure sum: four answers, each from the secrets that the answer before left behind.

The four functions are pure but for the operating system's randomness; `begin`, `keep` and `take` hold the secrets
between messages, since every message may come to a new process. See `federation.secure_sum` for the protocol.

What a site watches over, whatever the server asks: no cohort below ``min_cohort``; one roster, one masked vector and
one list of survivors in a round; never shares of both the seed and the mask key of one site.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import create_shares

from federation import secure_roster as protocol
from federation import wire
from federation.files import write_atomic
from federation.secure_roster import SHARE_BYTES, PublicKeys, Roster
from federation.secure_sum import (
    KEY_BYTES,
    SecureSumError,
    Specs,
    add_mask,
    new_private_key,
    public_key,
    quantise,
    seal,
    unseal,
)

FOLDER = "secure_sum"


@dataclass(frozen=True)
class Secrets:
    """What a site keeps from one message to the next. ``stage``: what it answered last, keys, shares or masked.

    ``seeds``: module -> self-mask seed. ``held``: site -> its shares in this site's keeping, the mask key's first, then
    those of its modules' seeds. Keys and seeds are forgotten as soon as they are used.
    """

    site: str
    server_round: int
    stage: str
    mask_key: bytes = b""
    share_key: bytes = b""
    roster: Roster | None = None
    seeds: Mapping[str, bytes] = field(default_factory=dict)
    held: Mapping[str, bytes] = field(default_factory=dict)


class Answer(NamedTuple):
    """A reply with its declaration, and the secrets to keep before it leaves: None where nothing is left to keep."""

    secrets: Secrets | None
    content: RecordDict
    payload: wire.Payload


def site_keys(site: str, server_round: int) -> Answer:
    """First answer: two public keys, fresh for this round."""
    secrets = Secrets(site, server_round, "keys", new_private_key(), new_private_key())
    keys = {"mask": public_key(secrets.mask_key), "share": public_key(secrets.share_key)}
    content = RecordDict({protocol.PUBLIC_KEYS: protocol.bytes_record(keys), wire.METRICS: _round(secrets)})
    return Answer(secrets, content, protocol.keys_payload())


def site_shares(secrets: Secrets, request: RecordDict, *, experiment: str, min_cohort: int) -> Answer:
    """Second answer: this site's secrets, shared among the sites of the roster and sealed for each of them.

    Raises SecureSumError for a roster with other keys under this site's name, or with a cohort below ``min_cohort``.
    """
    roster = protocol.read_roster(request, experiment, secrets.server_round)
    ours = PublicKeys(public_key(secrets.mask_key), public_key(secrets.share_key))
    if roster.keys.get(secrets.site) != ours:
        raise SecureSumError("the roster does not hold the keys that this site sent")
    if small := set(roster.cohorts) - set(protocol.open_modules(roster.cohorts, roster.sites, min_cohort)):
        raise SecureSumError(f"the cohorts of {', '.join(sorted(small))} are below min_cohort = {min_cohort}")
    seeds = {module: os.urandom(KEY_BYTES) for module in roster.modules_of(secrets.site)}
    shared = [
        create_shares(secret, roster.threshold, len(roster.sites)) for secret in (secrets.mask_key, *seeds.values())
    ]
    packets = dict(zip(roster.sites, map(b"".join, zip(*shared, strict=True)), strict=True))
    held = {secrets.site: packets.pop(secrets.site)}
    sealed = {
        other: seal(roster.seal_key(secrets.share_key, secrets.site, other, sender=secrets.site), packet)
        for other, packet in packets.items()
    }
    content = RecordDict({protocol.SHARES: protocol.bytes_record(sealed), wire.METRICS: _round(secrets)})
    after = replace(secrets, stage="shares", roster=roster, seeds=seeds, held=held)
    return Answer(after, content, protocol.shares_payload(roster, secrets.site))


def site_masked(
    secrets: Secrets,
    request: RecordDict,
    changes: Mapping[str, Mapping[str, np.ndarray | torch.Tensor]],
    weights: Mapping[str, int],
    *,
    specs: Mapping[str, Specs],
    value_range: float,
    min_cohort: int,
    reply: tuple[RecordDict, wire.Payload],
) -> Answer:
    """Third answer: the masked vector of every module that is open among the sites that sent shares.

    ``changes``, ``weights`` and ``specs`` by module; a module without a weight was not updated here and adds zeros.
    ``reply``: the training reply without modules, with its declaration. Raises SecureSumError, also where the roster
    has this site in the cohort of a module that it does not train.
    """
    roster = _roster(secrets)
    if unknown := set(roster.modules_of(secrets.site)) - set(specs):
        raise SecureSumError(
            f"the roster has this site in the cohort of {', '.join(sorted(unknown))}; not trained here"
        )
    after = replace(secrets, stage="masked", mask_key=b"", share_key=b"", seeds={}, held=_opened(secrets, request))
    cohorts = protocol.open_modules(roster.cohorts, after.held, min_cohort)
    vectors = {}
    for module in (name for name in roster.modules_of(secrets.site) if name in cohorts):
        vector = quantise(changes.get(module, {}), weights.get(module, 0), specs[module], value_range)
        add_mask(vector, secrets.seeds[module])
        for other in cohorts[module]:
            if other != secrets.site:
                seed = roster.pair_seed(secrets.mask_key, secrets.site, other, module)
                add_mask(vector, seed, subtract=protocol.subtracts(secrets.site, other))
        vectors[module] = vector.view(np.int64)
    content = RecordDict({**reply[0], protocol.MASKED: wire.encode(vectors)})
    return Answer(after, content, protocol.masked_payload({module: specs[module] for module in vectors}, reply[1]))


def site_unmask(secrets: Secrets, request: RecordDict, *, min_cohort: int) -> Answer:
    """Last answer: shares of the seeds of the survivors, and of the mask keys of those that sent shares and dropped.

    A module with fewer than ``min_cohort`` survivors stays masked. Nothing is kept, so there is no second answer.
    Raises SecureSumError for survivors that this site shares no masks with, or fewer than the threshold.
    """
    roster = _roster(secrets)
    survivors = request.config_records.get(protocol.SURVIVORS, {}).get("sites")
    if (
        not isinstance(survivors, list)
        or len(set(survivors)) != len(survivors)
        or not set(survivors) <= set(secrets.held)
    ):
        raise SecureSumError("the survivors are not a list of sites that sent shares, each once")
    if secrets.site not in survivors or len(survivors) < roster.threshold:
        raise SecureSumError(
            f"{len(survivors)} survivors, expected at least {roster.threshold} and this site among them"
        )
    dropped = sorted(set(secrets.held) - set(survivors))
    opened = protocol.open_modules(roster.cohorts, survivors, min_cohort)
    records = {
        protocol.SEED_SHARES + module: protocol.bytes_record(
            {site: _share(secrets.held[site], 1 + roster.modules_of(site).index(module)) for site in cohort}
        )
        for module, cohort in opened.items()
    }
    records[protocol.KEY_SHARES] = protocol.bytes_record({site: _share(secrets.held[site], 0) for site in dropped})
    content = RecordDict({**records, wire.METRICS: _round(secrets)})
    return Answer(None, content, protocol.unmask_payload(opened, dropped))


def _opened(secrets: Secrets, request: RecordDict) -> dict[str, bytes]:
    """All shares in this site's keeping, its own among them, checked to be whole and numbered as its own."""
    roster = _roster(secrets)
    record = request.array_records.get(protocol.SHARES, {})
    senders = sorted(set(record) & set(roster.sites) - {secrets.site})
    specs = {
        sender: protocol.shares_payload(roster, sender).arrays[protocol.SHARES][secrets.site] for sender in senders
    }
    held = dict(secrets.held)
    for sender, sealed in protocol.read_bytes(request, protocol.SHARES, specs).items():
        key = roster.seal_key(secrets.share_key, secrets.site, sender, sender=sender)
        held[sender] = unseal(key, sealed)
        count = 1 + len(roster.modules_of(sender))
        if {_index(_share(held[sender], number)) for number in range(count)} != {roster.share_index(secrets.site)}:
            raise SecureSumError(f"the shares from {sender} do not carry this site's number")
    if len(held) < roster.threshold:
        raise SecureSumError(f"shares of {len(held)} sites, {roster.threshold} needed to unmask a sum")
    return held


def _share(packet: bytes, number: int) -> bytes:
    return packet[number * SHARE_BYTES : (number + 1) * SHARE_BYTES]


def _index(share: bytes) -> int:
    return int.from_bytes(share[:4], "little")


def _roster(secrets: Secrets) -> Roster:
    if secrets.roster is None:
        raise SecureSumError(f"round {secrets.server_round} has no roster here yet")
    return secrets.roster


def _round(secrets: Secrets) -> MetricRecord:
    return MetricRecord({"server_round": secrets.server_round})


# -- between messages -------------------------------------------------------------------------------------------------


def begin(folder: Path) -> None:
    """Removes whatever an earlier round left in the site's folder. To be called before `site_keys`."""
    if (folder / FOLDER).is_dir():
        shutil.rmtree(folder / FOLDER)


def keep(folder: Path, secrets: Secrets) -> None:
    """Writes the secrets for the next message, whole and with mode 0600. To be called before the answer leaves."""
    write_atomic(_file(folder, secrets.server_round, secrets.stage), json.dumps(_plain(secrets)).encode())


def take(folder: Path, server_round: int, stage: str) -> Secrets:
    """The secrets that ``stage`` of this round left, which are gone then: of two messages, one gets them.

    So an answer is given once, also where it fails half-way; the site then counts as dropped. Raises SecureSumError.
    """
    path = _file(folder, server_round, stage)
    claimed = path.with_suffix(".taken")
    try:
        path.rename(claimed)
    except FileNotFoundError as error:
        raise SecureSumError(
            f"there are no secrets of round {server_round} after {stage!r}: it was answered before, or never begun"
        ) from error
    text = claimed.read_text(encoding="utf-8")
    claimed.unlink()
    return _parsed(json.loads(text))


def _file(folder: Path, server_round: int, stage: str) -> Path:
    return folder / FOLDER / f"{server_round:06d}-{stage}.json"


def _plain(secrets: Secrets) -> dict[str, Any]:
    roster = secrets.roster
    return {
        "site": secrets.site,
        "server_round": secrets.server_round,
        "stage": secrets.stage,
        "mask_key": secrets.mask_key.hex(),
        "share_key": secrets.share_key.hex(),
        "seeds": {module: seed.hex() for module, seed in secrets.seeds.items()},
        "held": {site: packet.hex() for site, packet in secrets.held.items()},
        "roster": None
        if roster is None
        else {
            "experiment": roster.experiment,
            "cohorts": {module: list(cohort) for module, cohort in roster.cohorts.items()},
            "keys": {site: [key.hex() for key in pair] for site, pair in roster.keys.items()},
        },
    }


def _parsed(plain: Mapping[str, Any]) -> Secrets:
    roster = None
    if found := plain["roster"]:
        cohorts = {module: tuple(cohort) for module, cohort in found["cohorts"].items()}
        keys = {site: PublicKeys(*map(bytes.fromhex, pair)) for site, pair in found["keys"].items()}
        roster = Roster(found["experiment"], plain["server_round"], cohorts, keys)
    return Secrets(
        plain["site"],
        plain["server_round"],
        plain["stage"],
        bytes.fromhex(plain["mask_key"]),
        bytes.fromhex(plain["share_key"]),
        roster,
        {module: bytes.fromhex(seed) for module, seed in plain["seeds"].items()},
        {site: bytes.fromhex(packet) for site, packet in plain["held"].items()},
    )
