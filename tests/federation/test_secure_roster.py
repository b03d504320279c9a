"""The roster of a secure sum: what all sites derive from it, what is refused, and the declared payloads."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from federation import secure_roster as ours
from federation import wire
from federation.secure_roster import PublicKeys, Roster
from federation.secure_sum import MAX_SITES, SecureSumError, new_private_key, public_key
from federation.wire import TensorSpec

PRIVATE = {site: (new_private_key(), new_private_key()) for site in ("north", "south", "st-mary")}
KEYS = {site: PublicKeys(*map(public_key, pair)) for site, pair in PRIVATE.items()}
COHORTS = {"head": ("north", "south", "st-mary"), "body": ("north", "south")}


def roster(**changes):
    return Roster(**{"experiment": "drill", "server_round": 4, "cohorts": COHORTS, "keys": KEYS} | changes)


def test_a_roster_travels_unchanged():
    assert ours.read_roster(ours.roster_records(roster()), "drill", 4) == roster()


def test_order_and_modules_do_not_depend_on_who_came_first():
    other = roster(keys=dict(reversed(KEYS.items())), cohorts=dict(reversed(COHORTS.items())))
    assert other.digest == roster().digest and other.sites == ("north", "south", "st-mary")
    assert roster().modules_of("north") == ("body", "head") and roster().modules_of("st-mary") == ("head",)
    assert [roster().share_index(site) for site in roster().sites] == [1, 2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"experiment": "other"},
        {"server_round": 5},
        {"cohorts": {"head": COHORTS["head"]}},
        {"keys": {**KEYS, "south": PublicKeys(KEYS["south"].share, KEYS["south"].mask)}},
    ],
    ids=["experiment", "round", "cohorts", "keys"],
)
def test_every_part_of_the_roster_is_in_every_key(changes):
    other = roster(**changes)
    assert other.digest != roster().digest
    mask, share = PRIVATE["north"]
    assert other.pair_seed(mask, "north", "st-mary", "head") != roster().pair_seed(mask, "north", "st-mary", "head")
    seal = [r.seal_key(share, "north", "st-mary", sender="north") for r in (other, roster())]
    assert seal[0] != seal[1]


def test_two_sites_derive_the_same_seeds_one_for_each_module_and_seal_with_one_key_each_way():
    north, south = PRIVATE["north"], PRIVATE["south"]
    seeds = {module: roster().pair_seed(north[0], "north", "south", module) for module in COHORTS}
    assert seeds == {module: roster().pair_seed(south[0], "south", "north", module) for module in COHORTS}
    there, back = (roster().seal_key(north[1], "north", "south", sender=site) for site in ("north", "south"))
    assert (there, back) == tuple(
        roster().seal_key(south[1], "south", "north", sender=site) for site in ("north", "south")
    )
    assert len({*seeds.values(), there, back}) == 4
    assert ours.subtracts("south", "north") and not ours.subtracts("north", "south")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": {site: KEYS[site] for site in ("north", "south")}}, "a roster of 2 sites"),
        ({"keys": {f"s{i}": PublicKeys(b"", b"") for i in range(MAX_SITES + 1)}}, "a roster of 257 sites"),
        ({"keys": {**KEYS, "../x": KEYS["north"]}}, "names a site that is not"),
        ({"keys": {**KEYS, "west": KEYS["north"]}}, "not sorted lists of the sites"),
        ({"cohorts": {"head": ("south", "north", "st-mary")}}, "not sorted lists of the sites"),
        ({"cohorts": {"head": ("north", "north", "south", "st-mary")}}, "not sorted lists of the sites"),
        ({"keys": {**KEYS, "south": KEYS["north"]}}, "occurs twice"),
        ({"keys": {**KEYS, "south": PublicKeys(KEYS["south"].mask, KEYS["south"].mask)}}, "occurs twice"),
    ],
)
def test_a_roster_that_no_honest_server_sends_is_refused(changes, reason):
    with pytest.raises(SecureSumError, match=reason):
        roster(**changes)


@pytest.mark.parametrize("cohorts", [{"head": "north"}, {"head": [1, 2, 3]}, {"head": 3}])
def test_cohorts_that_are_no_lists_of_names_are_refused(cohorts):
    content = RecordDict({**ours.roster_records(roster()), ours.COHORTS: ConfigRecord(cohorts)})
    with pytest.raises(SecureSumError, match="not lists of sites"):
        ours.read_roster(content, "drill", 4)


@pytest.mark.parametrize("record", [ours.MASK_KEYS, ours.SHARE_KEYS, ours.COHORTS])
def test_a_request_without_one_of_its_records_is_refused(record):
    content = RecordDict({name: value for name, value in ours.roster_records(roster()).items() if name != record})
    with pytest.raises(SecureSumError):
        ours.read_roster(content, "drill", 4)


def test_open_modules_are_those_that_enough_of_the_present_sites_have():
    cohorts = {"head": ("d", "a", "c", "b"), "body": ("a", "b", "c")}
    assert ours.open_modules(cohorts, {"a", "c", "d", "z"}, 3) == {"head": ("a", "c", "d")}
    assert ours.open_modules(cohorts, {"a", "b", "c"}, 4) == {}
    with pytest.raises(SecureSumError, match="min_cohort is 2, expected at least 3"):
        ours.open_modules(cohorts, {"a"}, 2)


def test_payloads_declare_exactly_what_is_sent():
    shares = ours.shares_payload(roster(), "north")
    assert shares.arrays == {ours.SHARES: dict.fromkeys(("south", "st-mary"), TensorSpec((3 * 52 + 16,), "uint8"))}
    train = wire.train_payload({}, extra={"bce": "real"})
    specs = {"head": {"w": TensorSpec((4, 2), "float32"), "steps": TensorSpec((), "int64")}}
    masked = ours.masked_payload(specs, train)
    assert masked.arrays == {ours.MASKED: {"head": TensorSpec((10,), "int64")}} and masked.numbers == train.numbers
    unmask = ours.unmask_payload({"head": ("a", "b")}, ["c"])
    share = np.zeros(52, np.uint8)
    content = RecordDict(
        {
            "secure.seed_shares.head": wire.encode({"a": share, "b": share}),
            ours.KEY_SHARES: wire.encode({"c": share}),
            wire.METRICS: MetricRecord({"server_round": 4}),
        }
    )
    assert unmask.violation(content) is None
    assert "never both" in unmask.purpose
    assert "not declared 'c'" in str(ours.unmask_payload({"head": ("a", "b")}, []).violation(content))
