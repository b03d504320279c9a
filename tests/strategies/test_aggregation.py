"""The mean of updates: against NumPy and published code, and the algebra that a federation relies on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies.aggregation import StreamingMean, apply_mean, capped_weights, scaled_to_norm

GOLDEN = Path(__file__).parents[1] / "golden"

seeds = st.integers(0, 2**32 - 1)
counts = st.integers(1, 8)
weights = st.lists(st.floats(1, 1e6), min_size=2, max_size=8)


def mean_of(updates, weights, names=None):
    names = names or [f"site-{index}" for index in range(len(updates))]
    mean = StreamingMean()
    for name, update, weight in zip(names, updates, weights, strict=True):
        mean.add(name, update, weight)
    return mean.result()


def drawn(seed, count, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [{"w": rng.normal(size=(3, 4)).astype(dtype), "b": rng.normal(size=()).astype(dtype)} for _ in range(count)]


def assert_same_bits(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes(), name


# -- reference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mean_is_numpys_weighted_average_in_float64(dtype):
    updates, given_weights = drawn(0, 7, dtype), [1, 5, 2.5, 1000, 3, 0.25, 60]
    found = mean_of(updates, given_weights)
    for name in ("w", "b"):
        exact = np.average([update[name].astype(np.float64) for update in updates], axis=0, weights=given_weights)
        # a running mean of 7 rounds at most 7 times by half an ulp of values near 3
        np.testing.assert_allclose(found[name], exact, atol=20 * np.finfo(dtype).eps)
        assert found[name].dtype == dtype and found[name].shape == updates[0][name].shape


@pytest.mark.parametrize(("prefix", "site_weights"), [("equal", (1, 1, 1)), ("weighted", (10, 30, 60))])
def test_golden_mean_of_fednca(prefix, site_weights):
    golden = np.load(GOLDEN / "fednca_aggregate.npz")
    updates = [{name: golden[f"c{site}_{name}"] for name in ("w", "rm", "nbt")} for site in range(3)]
    found = mean_of(updates, site_weights)
    for name in ("w", "rm"):
        np.testing.assert_allclose(found[name], golden[f"{prefix}_{name}"], atol=1e-6)  # the source's own tolerance
    assert found["nbt"] == max(update["nbt"] for update in updates) and found["nbt"].dtype == np.int64


def test_golden_mean_of_fairfal():
    golden = np.load(GOLDEN / "fairfal_fedavg_aggregate.npz")
    names = [key.removeprefix("out__") for key in golden.files if key.startswith("out__")]
    updates = [{name: golden[f"client{site}__{name}"] for name in names} for site in range(3)]
    found = mean_of(updates, golden["sizes"])
    for name in names:
        if name == "bn.num_batches_tracked":
            assert found[name] == max(update[name] for update in updates) and found[name].dtype == np.int64
        else:
            np.testing.assert_allclose(found[name], golden[f"out__{name}"], atol=1e-5)


# -- properties -----------------------------------------------------------------------------------------------------


@given(seeds, weights)
def test_order_of_arrival_changes_the_mean_by_rounding_only(seed, site_weights):
    updates = drawn(seed, len(site_weights))
    order = np.random.default_rng(seed).permutation(len(updates))
    straight = mean_of(updates, site_weights)
    turned = mean_of([updates[i] for i in order], [site_weights[i] for i in order])
    for name in straight:
        np.testing.assert_allclose(turned[name], straight[name], atol=1e-5)  # values near 3, float32, 8 sites


@given(seeds, weights)
def test_the_same_order_gives_the_same_bits(seed, site_weights):
    updates = drawn(seed, len(site_weights))
    assert_same_bits(mean_of(updates, site_weights), mean_of(drawn(seed, len(site_weights)), list(site_weights)))


@given(seeds, weights)
def test_renaming_the_sites_changes_nothing(seed, site_weights):
    updates = drawn(seed, len(site_weights))
    names = [f"hospital {chr(90 - index)}" for index in range(len(updates))]
    assert_same_bits(mean_of(updates, site_weights), mean_of(updates, site_weights, names))


@given(seeds, weights, st.sampled_from([2.0**-10, 2.0, 2.0**20]))
def test_scaling_all_weights_by_a_power_of_two_changes_no_bit(seed, site_weights, factor):
    updates = drawn(seed, len(site_weights))
    assert_same_bits(mean_of(updates, site_weights), mean_of(updates, [factor * weight for weight in site_weights]))


@given(seeds, weights, st.floats(1e-6, 1e6))
def test_scaling_all_weights_changes_the_mean_by_rounding_only(seed, site_weights, factor):
    updates = drawn(seed, len(site_weights))
    base, scaled = mean_of(updates, site_weights), mean_of(updates, [factor * weight for weight in site_weights])
    for name in base:
        np.testing.assert_allclose(scaled[name], base[name], atol=1e-6)


@given(seeds, weights, st.sampled_from([np.float16, np.float32, np.float64]))
def test_the_mean_of_identical_updates_is_that_update_bit_by_bit(seed, site_weights, dtype):
    (update,) = drawn(seed, 1, dtype)
    assert_same_bits(mean_of([update] * len(site_weights), site_weights), update)


@given(seeds, weights)
def test_the_mean_lies_between_the_smallest_and_the_largest(seed, site_weights):
    updates = drawn(seed, len(site_weights))
    found = mean_of(updates, site_weights)
    for name in found:
        stack = np.stack([update[name] for update in updates])
        assert (found[name] >= stack.min(0) - 1e-6).all() and (found[name] <= stack.max(0) + 1e-6).all()


@given(seeds, counts)
def test_one_large_weight_does_not_overflow(seed, count):
    updates = drawn(seed, count + 1)
    found = mean_of(updates, [1e300] + [1.0] * count)
    np.testing.assert_allclose(found["w"], updates[0]["w"], atol=1e-6)


# -- names, integers, halves ------------------------------------------------------------------------------------------


def test_a_tensor_is_averaged_over_the_sites_that_sent_it():
    mean = StreamingMean()
    mean.add("a", {"w": np.float32([1]), "text": np.float32([8])}, 1)
    mean.add("b", {"w": np.float32([3])}, 1)
    mean.add("c", {"w": np.float32([8]), "text": np.float32([2])}, 2)
    # w: (1 + 3 + 2 * 8) / 4; text: (8 + 2 * 2) / 3, b has no text and weighs nothing there
    assert mean.result()["w"] == 5.0 and mean.result()["text"] == 4.0
    assert mean.weights == {"w": 4.0, "text": 3.0} and mean.sites == {"a", "b", "c"}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integer_buffers_keep_the_largest_value_and_their_dtype(dtype):
    found = mean_of([{"n": np.array([3, 100], dtype)}, {"n": np.array([7, 90], dtype)}], [1000, 1])["n"]
    assert found.tolist() == [7, 100] and found.dtype == dtype


def test_an_integer_beyond_float_precision_is_kept_exactly():
    assert mean_of([{"n": np.array(2**53 + 1)}, {"n": np.array(2**53)}], [1, 1])["n"] == 2**53 + 1


def test_bool_buffers_are_true_where_one_site_says_so():
    found = mean_of([{"m": np.array([True, False, False])}, {"m": np.array([False, True, False])}], [1, 9])["m"]
    assert found.tolist() == [True, True, False] and found.dtype == bool


def test_half_precision_is_summed_in_single_precision():
    # 2048 + 1 is 2048 in float16, so a float16 running mean would never leave 2048
    updates = [{"w": np.float16([2048])}] + [{"w": np.float16([2050])}] * 3
    found = mean_of(updates, [1, 1, 1, 1])["w"]
    assert found.dtype == np.float16 and found == np.float16(2049.5)


def test_results_do_not_change_when_more_is_added():
    mean = StreamingMean()
    mean.add("a", {"w": np.float64([1.0])}, 1)
    before = mean.result()["w"].copy()
    mean.add("b", {"w": np.float64([3.0])}, 1)
    assert before == 1.0 and mean.result()["w"] == 2.0


# -- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "zero weight": (("c", {"w": np.float32([1])}, 0), "weight of 'c' is 0, expected a positive finite number"),
    "negative weight": (("c", {"w": np.float32([1])}, -2.0), "weight of 'c' is -2.0"),
    "NaN weight": (("c", {"w": np.float32([1])}, float("nan")), "weight of 'c' is nan"),
    "infinite weight": (("c", {"w": np.float32([1])}, float("inf")), "weight of 'c' is inf"),
    "a site twice": (("a", {"w": np.float32([1])}, 1), "site 'a' was added before"),
    "another shape": (("c", {"w": np.float32([1, 2])}, 1), r"'w' of 'c' is float32\[2\], expected float32\[1\]"),
    "another dtype": (("c", {"w": np.float64([1])}, 1), r"'w' of 'c' is float64\[1\], expected float32\[1\]"),
    "one good and one bad name": (("c", {"a": np.float32([9]), "w": np.float64([1])}, 1), "'w' of 'c'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_update_changes_nothing(name):
    arguments, reason = REFUSED[name]
    mean = StreamingMean()
    mean.add("a", {"w": np.float32([1.5])}, 2)
    mean.add("b", {"w": np.float32([4.25])}, 3)
    before, weights_before, sites_before = mean.result()["w"].tobytes(), mean.weights, mean.sites
    with pytest.raises(ValueError, match=reason):
        mean.add(*arguments)
    assert mean.result()["w"].tobytes() == before
    assert (mean.weights, mean.sites) == (weights_before, sites_before)


def test_the_mean_of_nothing_is_no_mean():
    with pytest.raises(ValueError, match="no site was added"):
        StreamingMean().result()


def test_inputs_are_read_only_and_stay_as_they_were():
    updates = drawn(1, 3)
    copies = [{name: value.copy() for name, value in update.items()} for update in updates]
    for update in updates:
        for value in update.values():
            value.flags.writeable = False  # as decoded from a message; a write would raise
    mean_of(updates, [1, 2, 3])
    for update, copy in zip(updates, copies, strict=True):
        assert_same_bits(update, copy)


# -- caps, application, norm ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_no_site_holds_more_than_its_share_where_that_can_be(sizes, max_share):
    given_counts = {f"s{index:02d}": size for index, size in enumerate(sizes)}
    capped = capped_weights(given_counts, max_share)
    total = sum(capped.values())
    allowed = max(max_share, 1 / len(sizes))  # K sites cannot all be below 1/K
    assert max(capped.values()) / total <= allowed * (1 + 1e-9)
    assert all(0 < capped[site] <= given_counts[site] for site in given_counts)
    ranked = sorted(given_counts, key=given_counts.get)
    assert all(capped[a] <= capped[b] for a, b in itertools.pairwise(ranked))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.floats(0.3, 1.0))
def test_the_cap_takes_no_more_than_it_must(sizes, max_share):
    given_counts = {f"s{index}": size for index, size in enumerate(sizes)}
    capped = capped_weights(given_counts, max_share)
    cut = [site for site in capped if capped[site] < given_counts[site]]
    if cut and len(sizes) * max_share > 1:  # who is cut stands exactly at the share
        assert max(capped.values()) / sum(capped.values()) == pytest.approx(max_share)


def test_cap_by_hand():
    assert capped_weights({"a": 900, "b": 800, "c": 10}, 0.4) == pytest.approx({"a": 20, "b": 20, "c": 10})
    assert capped_weights({"a": 3, "b": 2}, 1.0) == {"a": 3.0, "b": 2.0}
    assert capped_weights({"a": 3, "b": 0, "c": 9}, 0.5) == {"a": 3.0, "b": 0.0, "c": 3.0}
    assert capped_weights({"a": 0, "b": 0}, 0.5) == {"a": 0.0, "b": 0.0}


def test_apply_adds_floats_replaces_integers_and_keeps_what_has_no_mean():
    state = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(5), "kept": torch.tensor([7.0])}
    after = apply_mean(state, {"w": np.float32([0.5, -1.0]), "n": np.array(9)})
    assert after["w"].tolist() == [1.5, 1.0] and after["n"] == 9 and after["kept"].tolist() == [7.0]
    after["kept"] += 1
    after["w"] += 1
    assert state["kept"].tolist() == [7.0] and state["w"].tolist() == [1.0, 2.0]


def test_apply_refuses_a_name_that_the_state_does_not_have():
    with pytest.raises(ValueError, match=r"names \['v'\], which the state does not have"):
        apply_mean({"w": torch.zeros(1)}, {"v": np.zeros(1, np.float32)})


def test_a_long_update_is_scaled_to_the_bound_in_its_direction_and_integers_stay():
    update = {"w": np.float32([3.0, 4.0]), "n": np.array(8)}
    scaled = scaled_to_norm(update, 5.0, 1.0)
    np.testing.assert_allclose(scaled["w"], [0.6, 0.8], rtol=1e-6)
    assert scaled["w"].dtype == np.float32 and scaled["n"] == 8
    assert update["w"].tolist() == [3.0, 4.0]
    assert scaled_to_norm(update, 5.0, 5.0) is update
