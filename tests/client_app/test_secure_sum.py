"""A site's half of the secure sum: what it keeps between messages, and what it refuses whatever the server asks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares

from client_app import secure_sum as half
from federation import secure_roster as protocol
from federation import wire
from federation.secure_roster import PublicKeys
from federation.secure_sum import SecureSumError, new_private_key, public_key
from tests.strategies.secure_driver import EXPERIMENT, RANGE, SPECS, TRAIN, hospitals, secure_round, training_reply


def kept(site, stage):
    """A look at the secrets on disk, which leaves them there."""
    return half._parsed(json.loads((site.folder / "secure_sum" / f"000001-{stage}.json").read_text()))


def upto(sites, stage):
    """Requests of ``stage``, with every site's secrets of the stage before on its disk."""
    server, requests = secure_round(sites), dict.fromkeys(sites, RecordDict())
    for done, add, following in (
        ("keys", server.add_keys, server.share_requests),
        ("shares", server.add_shares, server.masked_requests),
        ("masked", server.add_masked, server.unmask_requests),
    ):
        if done == stage:
            break
        for name, request in requests.items():
            add(name, sites[name].answer(done, request))
        requests = following()
    return server, requests


def shares(secrets, request, **changes):
    options = {"experiment": EXPERIMENT, "min_cohort": 3} | changes
    return half.site_shares(secrets, request, **options)


def masked(secrets, request, site, **changes):
    options = {"specs": SPECS, "value_range": RANGE, "min_cohort": 3, "reply": (training_reply(), TRAIN)} | changes
    return half.site_masked(secrets, request, site.changes, site.weights, **options)


def survivors(names):
    return RecordDict({protocol.SURVIVORS: ConfigRecord({"sites": list(names)})})


# -- between messages -------------------------------------------------------------------------------------------------


def test_secrets_survive_a_restart_and_only_their_owner_reads_them(tmp_path):
    sites = hospitals(tmp_path, 4)
    upto(sites, "masked")
    secrets = kept(sites["a"], "shares")
    half.keep(tmp_path / "other", secrets)
    (file,) = (tmp_path / "other" / "secure_sum").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert half.take(tmp_path / "other", 1, "shares") == secrets
    assert not list((tmp_path / "other" / "secure_sum").iterdir())


def test_secrets_are_given_once_and_to_their_round_and_stage(tmp_path):
    half.keep(tmp_path, half.site_keys("a", 3).secrets)
    for server_round, stage in ((2, "keys"), (3, "shares")):
        with pytest.raises(SecureSumError, match=f"no secrets of round {server_round} after '{stage}'"):
            half.take(tmp_path, server_round, stage)
    assert half.take(tmp_path, 3, "keys").server_round == 3
    with pytest.raises(SecureSumError, match="answered before, or never begun"):
        half.take(tmp_path, 3, "keys")


def test_a_round_begins_without_what_an_earlier_one_left(tmp_path):
    half.begin(tmp_path)  # nothing there yet
    half.keep(tmp_path, half.site_keys("a", 3).secrets)
    (tmp_path / "secure_sum" / ".000003-keys.json.torn").write_text("a crash while writing")
    (tmp_path / "secure_sum" / "000002-masked.taken").write_text("a crash while reading")
    half.begin(tmp_path)
    assert not (tmp_path / "secure_sum").exists()


def test_keys_and_seeds_are_forgotten_once_used(tmp_path):
    sites = hospitals(tmp_path, 4)
    upto(sites, "masked")
    before = kept(sites["a"], "shares")
    assert [file.name for file in (sites["a"].folder / "secure_sum").iterdir()] == ["000001-shares.json"]
    sites = hospitals(tmp_path / "again", 4)
    upto(sites, "unmask")
    after = kept(sites["a"], "masked")
    assert before.mask_key and before.share_key and set(before.seeds) == set(SPECS)
    assert (after.mask_key, after.share_key, after.seeds) == (b"", b"", {})
    assert set(after.held) == set("abcd") and after.roster == kept(sites["b"], "masked").roster


# -- what a site refuses ----------------------------------------------------------------------------------------------


def test_keys_are_fresh_every_time():
    first, second = half.site_keys("a", 1), half.site_keys("a", 1)
    assert (
        len({first.secrets.mask_key, first.secrets.share_key, second.secrets.mask_key, second.secrets.share_key}) == 4
    )


def test_a_roster_that_does_not_fit_this_site_is_refused(tmp_path):
    sites = hospitals(tmp_path, 4)
    _, requests = upto(sites, "shares")
    secrets = kept(sites["a"], "keys")
    with pytest.raises(SecureSumError, match="does not hold the keys that this site sent"):
        shares(replace(secrets, mask_key=new_private_key()), requests["a"])
    with pytest.raises(SecureSumError, match="cohorts of body, head are below min_cohort = 5"):
        shares(secrets, requests["a"], min_cohort=5)
    with pytest.raises(SecureSumError, match="min_cohort is 2, expected at least 3"):
        shares(secrets, requests["a"], min_cohort=2)


def test_a_module_that_is_not_trained_here_gets_no_vector(tmp_path):
    sites = hospitals(tmp_path, 4)
    _, requests = upto(sites, "masked")
    with pytest.raises(SecureSumError, match="cohort of head; not trained here"):
        masked(kept(sites["a"], "shares"), requests["a"], sites["a"], specs={"body": SPECS["body"]})


def test_no_vector_leaves_for_a_cohort_that_shrank(tmp_path):
    """Of the three with ``head`` one sent no shares: the site answers, and sends ``body`` alone."""
    sites = hospitals(tmp_path, 6, modules={"body": range(6), "head": range(3)})
    _, requests = upto(sites, "masked")
    senders = {name: record for name, record in wire.decode(requests["a"][protocol.SHARES]).items() if name != "b"}
    answer = masked(kept(sites["a"], "shares"), RecordDict({protocol.SHARES: wire.encode(senders)}), sites["a"])
    assert set(answer.content[protocol.MASKED]) == {"body"} == set(answer.payload.arrays[protocol.MASKED])
    assert answer.payload.violation(answer.content) is None


@pytest.mark.parametrize("harm", ["changed", "from another", "too few", "a stranger", "none"])
def test_shares_that_were_not_sealed_for_this_site_are_refused(tmp_path, harm):
    sites = hospitals(tmp_path, 4)
    _, requests = upto(sites, "masked")
    packets = {name: value.copy() for name, value in wire.decode(requests["a"][protocol.SHARES]).items()}
    if harm == "changed":
        packets["b"][20] ^= 1
    elif harm == "from another":
        packets["b"] = packets["c"]
    elif harm == "too few":
        packets = {"b": packets["b"]}
    elif harm == "a stranger":
        packets["zoe"] = packets["b"]
    request = RecordDict({} if harm == "none" else {protocol.SHARES: wire.encode(packets)})
    reasons = {
        "too few": "shares of 2 sites, 3 needed",
        "a stranger": "not declared 'zoe'",
        "none": "missing 'secure.shares'",
    }
    with pytest.raises(SecureSumError, match=reasons.get(harm, "sealed shares were changed")):
        masked(kept(sites["a"], "shares"), request, sites["a"])


def test_sites_with_different_rosters_cannot_read_each_others_shares(tmp_path):
    """A server that gives one site another key for a third is noticed: the roster is part of the sealing keys."""
    sites = hospitals(tmp_path, 4)
    _, requests = upto(sites, "shares")
    keys = {name: value.copy() for name, value in wire.decode(requests["a"][protocol.MASK_KEYS]).items()}
    keys["d"] = np.frombuffer(public_key(new_private_key()), np.uint8)
    swapped = RecordDict({**requests["a"], protocol.MASK_KEYS: wire.encode(keys)})
    packets = {name: sites[name].answer("shares", swapped if name == "a" else requests[name]) for name in "abcd"}
    to_b = {name: wire.decode(packets[name][protocol.SHARES])["b"] for name in "acd"}
    with pytest.raises(SecureSumError, match="do not have the same key table"):
        masked(kept(sites["b"], "shares"), RecordDict({protocol.SHARES: wire.encode(to_b)}), sites["b"])


def test_a_change_that_is_not_finite_does_not_leave(tmp_path):
    sites = hospitals(tmp_path, 4)
    _, requests = upto(sites, "masked")
    sites["a"].changes["head"]["w"][0] = np.nan
    with pytest.raises(SecureSumError, match="not finite"):
        masked(kept(sites["a"], "shares"), requests["a"], sites["a"])


# -- unmasking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("abc", "3 survivors, expected at least 4"),
        ("bcde", "this site among them"),
        ("abcz", "not a list of sites that sent shares"),
        ("abcdd", "each once"),
        ("", "survivors"),
    ],
)
def test_survivors_that_cannot_be_are_refused(tmp_path, names, reason):
    sites = hospitals(tmp_path, 5)
    upto(sites, "unmask")
    with pytest.raises(SecureSumError, match=reason):
        half.site_unmask(kept(sites["a"], "masked"), survivors(names), min_cohort=3)


def test_a_request_without_survivors_is_refused(tmp_path):
    sites = hospitals(tmp_path, 4)
    upto(sites, "unmask")
    for content in (RecordDict(), RecordDict({protocol.SURVIVORS: ConfigRecord({"sites": "abcd"})})):
        with pytest.raises(SecureSumError, match="not a list of sites"):
            half.site_unmask(kept(sites["a"], "masked"), content, min_cohort=3)


def test_a_site_gives_out_the_seed_or_the_mask_key_of_a_site_never_both(tmp_path):
    """Also over repeated requests: first b is said to have survived, then to have dropped."""
    sites = hospitals(tmp_path, 5)
    upto(sites, "unmask")
    first = sites["a"].answer("unmask", survivors("abcd"))
    assert set(first[protocol.KEY_SHARES]) == {"e"}
    assert set(first["secure.seed_shares.body"]) == set(first["secure.seed_shares.head"]) == set("abcd")
    for names in ("acde", "abcd"):
        with pytest.raises(SecureSumError, match="answered before"):
            sites["a"].answer("unmask", survivors(names))


def test_a_refused_request_ends_the_round_here(tmp_path):
    """The secrets are gone before the request is read, so no order of requests gets more out of a site."""
    sites = hospitals(tmp_path, 5)
    upto(sites, "unmask")
    with pytest.raises(SecureSumError, match="each once"):
        sites["a"].answer("unmask", survivors("aabcd"))
    with pytest.raises(SecureSumError, match="answered before"):
        sites["a"].answer("unmask", survivors("abcde"))


def test_the_same_masks_never_hide_two_vectors(tmp_path):
    sites = hospitals(tmp_path, 4)
    _, requests = upto(sites, "masked")
    sites["a"].answer("masked", requests["a"])
    with pytest.raises(SecureSumError, match="answered before"):
        sites["a"].answer("masked", requests["a"])


def test_the_shares_of_a_threshold_of_sites_give_the_mask_key_and_fewer_do_not(tmp_path):
    sites = hospitals(tmp_path, 5)
    _, requests = upto(sites, "masked")
    key = kept(sites["b"], "shares").mask_key
    held = {n: masked(kept(sites[n], "shares"), requests[n], sites[n]).secrets.held["b"][:52] for n in "abcde"}
    assert combine_shares([held[name] for name in "acde"]) == key
    try:
        guess = combine_shares([held[name] for name in "acd"])
    except ValueError:
        guess = b""
    assert guess != key


def test_public_keys_belong_to_the_secrets():
    answer = half.site_keys("a", 1)
    sent = protocol.read_bytes(answer.content, protocol.PUBLIC_KEYS, answer.payload.arrays[protocol.PUBLIC_KEYS])
    assert PublicKeys(**sent) == (public_key(answer.secrets.mask_key), public_key(answer.secrets.share_key))
