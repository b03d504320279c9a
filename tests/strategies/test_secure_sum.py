"""The secure sum, end to end in memory: five sites and more, dropouts in every exchange, bad replies, what is seen."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from federation import secure_roster as protocol
from federation import wire
from federation.secure_sum import LEVELS, SecureSumError, add_mask, quantise
from tests.strategies.secure_driver import RANGE, SPECS, hospitals, plain_mean, run, secure_round

BOUND = RANGE / (2 * LEVELS) + 8 * 2.0**-24
"""Half a step of the fixed point, and the rounding of a result below 8 to float32."""


def assert_mean(sums, sites, names, modules=tuple(SPECS)):
    assert set(sums) == set(modules)
    for module in modules:
        expected = plain_mean(sites, names, module)
        assert set(sums[module].mean) == set(expected)  # the integer counter is not summed
        for name, value in expected.items():
            assert sums[module].mean[name].dtype == SPECS[module][name].dtype
            assert sums[module].mean[name].shape == value.shape
            np.testing.assert_allclose(sums[module].mean[name], value, rtol=0, atol=BOUND)
        assert sums[module].weight == sum(sites[name].weights[module] for name in names)
        assert sums[module].num_sites == len(names)


def test_the_sum_of_five_sites_is_their_weighted_mean(tmp_path):
    sites = hospitals(tmp_path, 5)
    server, sums = run(sites)
    assert_mean(sums, sites, "abcde")
    assert server.frozen == {} and server.dropped == []
    assert all(not list((site.folder / "secure_sum").iterdir()) for site in sites.values()), "no secret is left"


@pytest.mark.parametrize(
    ("stage", "counted"), [("keys", "acde"), ("shares", "acde"), ("masked", "acde"), ("unmask", "abcde")]
)
def test_a_dropout_in_any_one_exchange_leaves_the_sum_of_the_others(tmp_path, stage, counted):
    """Five sites share with a threshold of 4. Whoever is lost after its masked vector still counts."""
    sites = hospitals(tmp_path, 5)
    server, sums = run(sites, {stage: "b"})
    assert_mean(sums, sites, counted)
    assert server.dropped == (["b"] if stage == "masked" else [])


def test_one_site_lost_in_each_of_the_four_exchanges(tmp_path):
    sites = hospitals(tmp_path, 13)  # 12 with keys: threshold 9
    server, sums = run(sites, {"keys": "a", "shares": "d", "masked": "g", "unmask": "m"})
    assert server.roster.threshold == 9
    assert_mean(sums, sites, "bcefhijklm")


@pytest.mark.parametrize("stage", ["shares", "masked", "unmask"])
def test_below_the_threshold_the_round_is_refused_with_the_numbers(tmp_path, stage):
    sites = hospitals(tmp_path, 5)
    with pytest.raises(SecureSumError, match=r"round 1 .* 3 of 5 sites .*, 4 needed to unmask.*the state is kept"):
        run(sites, {stage: "bd"})


def test_the_next_round_starts_clean_after_a_refused_one(tmp_path):
    sites = hospitals(tmp_path, 5)
    with pytest.raises(SecureSumError, match="the state is kept"):
        run(sites, {"masked": "bd"})
    assert list((sites["a"].folder / "secure_sum").iterdir())
    for site in sites.values():
        site.server_round = 2
    _, sums = run(sites, server=secure_round(sites, server_round=2))
    assert_mean(sums, sites, "abcde")
    assert not list((sites["a"].folder / "secure_sum").iterdir())


def test_sums_have_the_same_bits_whoever_comes_first_and_whatever_the_masks(tmp_path):
    sites = hospitals(tmp_path / "one", 5)
    again = hospitals(tmp_path / "two", 5)
    _, first = run(sites)
    _, second = run(dict(sorted(again.items(), reverse=True)))
    for module in SPECS:
        for name, value in first[module].mean.items():
            assert value.tobytes() == second[module].mean[name].tobytes()


# -- cohorts ----------------------------------------------------------------------------------------------------------


def test_every_module_is_summed_over_the_sites_that_have_it(tmp_path):
    sites = hospitals(tmp_path, 6, modules={"body": range(4), "head": range(2, 6)})
    _, sums = run(sites)
    for module, names in (("body", "abcd"), ("head", "cdef")):
        assert sums[module].num_sites == 4
        for name, value in plain_mean(sites, names, module).items():
            np.testing.assert_allclose(sums[module].mean[name], value, rtol=0, atol=BOUND)
    assert set(sites["a"].sent["masked"][protocol.MASKED]) == {"body"}


def test_a_cohort_of_two_is_frozen_and_its_sites_send_nothing_of_it(tmp_path):
    sites = hospitals(tmp_path, 5, modules={"body": range(5), "head": range(2)})
    server, sums = run(sites)
    assert_mean(sums, sites, "abcde", ["body"])
    assert server.frozen == {"head": "2 of 2 sites sent keys, 3 needed"}
    assert set(sites["a"].sent["masked"][protocol.MASKED]) == {"body"}


@pytest.mark.parametrize(
    ("stage", "did"), [("keys", "sent keys"), ("shares", "sent shares"), ("masked", "sent a masked vector")]
)
def test_a_cohort_that_falls_below_three_is_frozen_in_whatever_exchange(tmp_path, stage, did):
    """``head`` is at a, b, c; without b its sum would be that of two. The seeds of a and c for it stay shared."""
    sites = hospitals(tmp_path, 6, modules={"body": range(6), "head": range(3)})
    server, sums = run(sites, {stage: "b"})
    assert_mean(sums, sites, "acdef", ["body"])
    assert server.frozen == {"head": f"2 of 3 sites {did}, 3 needed"}
    assert all("secure.seed_shares.head" not in site.sent.get("unmask", {}) for site in sites.values())


@pytest.mark.parametrize(
    ("modules", "lost"),
    [
        ({"body": range(2), "head": range(2, 4)}, {}),
        ({"body": range(3), "head": range(1, 4)}, {"shares": "b"}),
        ({"body": range(3), "head": range(1, 4)}, {"masked": "b"}),
    ],
)
def test_no_module_with_three_sites_refuses_the_round(tmp_path, modules, lost):
    sites = hospitals(tmp_path, 4, modules=modules)
    with pytest.raises(SecureSumError, match="no module has the 3 sites that a sum needs; the state is kept"):
        run(sites, lost)


def test_a_site_that_did_not_update_a_module_adds_zeros(tmp_path):
    sites = hospitals(tmp_path, 4)
    sites["c"].weights = {"body": sites["c"].weights["body"]}
    _, sums = run(sites)
    assert sums["head"].num_sites == 4
    np.testing.assert_allclose(sums["head"].mean["w"], plain_mean(sites, "abd", "head")["w"], rtol=0, atol=BOUND)


def test_a_module_that_nobody_updated_has_no_mean(tmp_path):
    sites = hospitals(tmp_path, 4)
    for site in sites.values():
        site.weights = {"body": 1}
    _, sums = run(sites)
    assert sums["head"].mean == {} and sums["head"].weight == 0


def test_clipped_values_are_counted_in_the_sum_only(tmp_path):
    sites = hospitals(tmp_path, 4)
    sites["b"].changes["head"]["w"][:2] = 1e6, -9.0
    sites["d"].changes["head"]["w"][0] = RANGE  # at the end of the range: not clipped
    _, sums = run(sites)
    assert sums["head"].clipped == 2 and sums["body"].clipped == 0
    assert "clipped" not in str(sites["b"].sent["masked"][wire.METRICS])
    sites["b"].changes["head"]["w"][:2] = RANGE, -RANGE
    np.testing.assert_allclose(sums["head"].mean["w"], plain_mean(sites, "abcd", "head")["w"], rtol=0, atol=BOUND)


# -- what the server sees ---------------------------------------------------------------------------------------------


def masked(site, module):
    return wire.decode_array(site.sent["masked"][protocol.MASKED][module]).view(np.uint64)


def test_a_vector_that_comes_too_late_stays_masked(tmp_path):
    """The server rebuilt b's mask key, so it knows b's pairwise masks; b's self mask still hides all."""
    sites = hospitals(tmp_path, 5)
    server, _ = run(sites, {"masked": "b"})
    with pytest.raises(SecureSumError, match="of b to 'masked' came too late"):
        server.add_masked("b", sites["b"].sent["masked"])
    with pytest.raises(SecureSumError, match="b was not asked, or answered before"):
        server.add_unmask("b", sites["b"].sent["masked"])
    key = server._dropped_key("b")
    late = masked(sites["b"], "head").copy()
    for other in "acde":
        mask = np.zeros_like(late)
        add_mask(mask, server.roster.pair_seed(key, "b", other, "head"), subtract=protocol.subtracts("b", other))
        late -= mask
    bare = quantise(sites["b"].changes["head"], sites["b"].weights["head"], SPECS["head"], RANGE)
    assert not (late == bare).any()
    assert all("b" not in site.sent["unmask"]["secure.seed_shares.head"] for name, site in sites.items() if name != "b")


def test_masks_differ_between_modules_and_rounds_and_hide_equal_vectors(tmp_path):
    sites = hospitals(tmp_path, 3)
    for site in sites.values():
        site.weights = {"body": 0, "head": 0}
    run(sites)
    seen = [masked(site, module)[:4].tobytes() for site in sites.values() for module in SPECS]
    for site in sites.values():
        site.server_round = 2
    run(sites, server=secure_round(sites, server_round=2))
    seen += [masked(site, module)[:4].tobytes() for site in sites.values() for module in SPECS]
    assert len(set(seen)) == 12


def test_shares_that_come_too_late_make_no_dropout(tmp_path):
    """Nobody masked with b, whose shares were not forwarded: counting it as dropped would ask for shares not there."""
    sites = hospitals(tmp_path, 5)
    server, requests = asked(sites, "shares")
    late = sites["b"].answer("shares", requests["b"])
    for name in "acde":
        server.add_shares(name, sites[name].answer("shares", requests[name]))
    requests = server.masked_requests()
    with pytest.raises(SecureSumError, match="of b to 'shares' came too late"):
        server.add_shares("b", late)
    for name, request in requests.items():
        server.add_masked(name, sites[name].answer("masked", request))
    server.unmask_requests()
    assert server.dropped == []


# -- bad replies ------------------------------------------------------------------------------------------------------


def altered(content, record, name, value):
    changed = RecordDict(dict(content))
    changed[record] = wire.encode({**wire.decode(content[record]), name: value})
    return changed


def asked(sites, upto):
    """A server after the exchanges before ``upto``, with the requests of that one."""
    server, requests = secure_round(sites), dict.fromkeys(sites, RecordDict())
    for stage, add, following in (
        ("keys", server.add_keys, server.share_requests),
        ("shares", server.add_shares, server.masked_requests),
        ("masked", server.add_masked, server.unmask_requests),
    ):
        if stage == upto:
            break
        for name, request in requests.items():
            add(name, sites[name].answer(stage, request))
        requests = following()
    return server, requests


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros(32, np.uint8), "small order"),
        (np.ones(31, np.uint8), r"uint8\[31\], expected uint8\[32\]"),
        (np.ones(32, np.int8), r"int8\[32\], expected uint8\[32\]"),
    ],
)
def test_a_public_key_that_is_none_is_refused(tmp_path, value, reason):
    sites = hospitals(tmp_path, 4)
    server, requests = asked(sites, "keys")
    content = sites["a"].answer("keys", requests["a"])
    with pytest.raises(wire.WireError, match=reason):
        server.add_keys("a", altered(content, protocol.PUBLIC_KEYS, "mask", value))
    server.add_keys("a", content)  # nothing of the refused reply was kept


def test_keys_of_another_round_a_stranger_or_copied_are_refused(tmp_path):
    sites = hospitals(tmp_path, 4)
    server, requests = asked(sites, "keys")
    content = sites["a"].answer("keys", requests["a"])
    server.add_keys("a", content)
    for name in ("a", "zoe"):
        with pytest.raises(SecureSumError, match=f"{name} was not asked, or answered before"):
            server.add_keys(name, content)
    with pytest.raises(SecureSumError, match="a public key of b occurs twice"):
        server.add_keys("b", content)
    stale = RecordDict({**content, wire.METRICS: MetricRecord({"server_round": 7})})
    with pytest.raises(SecureSumError, match="for round 7, expected round 1"):
        server.add_keys("b", stale)


def test_shares_for_too_few_sites_or_of_another_length_are_refused(tmp_path):
    sites = hospitals(tmp_path, 4)
    server, requests = asked(sites, "shares")
    content = sites["a"].answer("shares", requests["a"])
    record = wire.decode(content[protocol.SHARES])
    short = RecordDict({**content, protocol.SHARES: wire.encode({"b": record["b"], "c": record["c"]})})
    with pytest.raises(SecureSumError, match="missing 'd'"):
        server.add_shares("a", short)
    with pytest.raises(SecureSumError, match="expected uint8"):
        server.add_shares("a", altered(content, protocol.SHARES, "b", record["b"][:-1]))
    with pytest.raises(SecureSumError, match=r"missing 'secure\.shares'"):
        server.add_shares("a", RecordDict({wire.METRICS: content[wire.METRICS]}))
    server.add_shares("a", content)


def test_a_masked_vector_of_another_length_dtype_or_module_is_refused_and_folds_nothing(tmp_path):
    sites = hospitals(tmp_path, 5)
    server, requests = asked(sites, "masked")
    content = sites["a"].answer("masked", requests["a"])
    head = wire.decode(content[protocol.MASKED])["head"]
    for value in (head[:-1], head.astype(np.float64), head.reshape(1, -1)):
        with pytest.raises(SecureSumError, match=r"expected int64\[6\]"):
            server.add_masked("a", altered(content, protocol.MASKED, "head", value))
    with pytest.raises(SecureSumError, match="not declared 'tail'"):
        server.add_masked("a", altered(content, protocol.MASKED, "tail", head))
    for name in "bcde":
        server.add_masked(name, sites[name].answer("masked", requests[name]))
    for name, request in server.unmask_requests().items():
        server.add_unmask(name, sites[name].answer("unmask", request))
    assert_mean(server.result(), sites, "bcde")


def test_a_share_under_another_number_is_refused(tmp_path):
    sites = hospitals(tmp_path, 5)
    server, requests = asked(sites, "unmask")
    content = sites["a"].answer("unmask", requests["a"])
    share = wire.decode(content["secure.seed_shares.head"])["b"].copy()
    share[0] = 2
    with pytest.raises(SecureSumError, match="does not carry its number 1"):
        server.add_unmask("a", altered(content, "secure.seed_shares.head", "b", share))


@pytest.mark.parametrize("byte", [4, 30, 51])
def test_a_changed_share_is_found_and_the_round_refused(tmp_path, byte):
    """Either the secret has no valid form any more, or a mask stays in the sum and takes it out of its range."""
    sites = hospitals(tmp_path, 5)
    server, requests = asked(sites, "unmask")
    for name, request in requests.items():
        content = sites[name].answer("unmask", request)
        if name == "a":
            share = wire.decode(content["secure.seed_shares.head"])["b"].copy()
            share[byte] ^= 1
            content = altered(content, "secure.seed_shares.head", "b", share)
        server.add_unmask(name, content)
    with pytest.raises(SecureSumError, match=r"do not fit together|outside the declared range|bytes, expected 32"):
        server.result()


def test_a_site_beyond_the_declared_range_is_found_in_the_sum(tmp_path, monkeypatch):
    """A site that ignores the fixed point and sends the largest numbers there are."""
    sites = hospitals(tmp_path, 4)

    def huge(change, weight, specs, value_range):
        vector = quantise(change, weight, specs, value_range)
        vector[2:] = 2**62
        return vector

    server, requests = asked(sites, "masked")
    for name, request in requests.items():
        with monkeypatch.context() as patch:
            if name == "c":
                patch.setattr("client_app.secure_sum.quantise", huge)
            server.add_masked(name, sites[name].answer("masked", request))
    for name, request in server.unmask_requests().items():
        server.add_unmask(name, sites[name].answer("unmask", request))
    with pytest.raises(SecureSumError, match="outside the declared range"):
        server.result()
