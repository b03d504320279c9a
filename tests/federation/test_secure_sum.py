"""Fixed point, masks and keys of the secure sum, against published test vectors, exact fractions and plain loops."""

from __future__ import annotations

import hmac
from fractions import Fraction

import numpy as np
import pytest
import torch
from Crypto.Cipher import ChaCha20
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from federation import secure_sum as ours
from federation.secure_sum import HEADER, LEVELS, MAX_SITES, MAX_WEIGHT, SecureSumError
from federation.wire import TensorSpec

SPECS = {"b": TensorSpec((), "float32"), "n": TensorSpec((2,), "int64"), "a": TensorSpec((2, 2), "float64")}
CHANGE = {"a": np.array([[0.5, -8.0], [1e-9, 3.0]]), "b": np.float32(-0.25), "n": np.array([1, 2])}


def test_the_vector_is_the_weight_the_clip_count_and_the_float_tensors_by_name():
    vector = ours.quantise(CHANGE, 3, SPECS, 8.0)
    unit = LEVELS // 8
    expected = [3, 0, 3 * unit // 2, -3 * LEVELS, 0, 9 * unit, -3 * unit // 4]  # weight, clipped, a row by row, b
    assert vector.dtype == np.uint64 and vector.view(np.int64).tolist() == expected
    assert ours.vector_size(SPECS) == len(expected)
    tensors = {name: torch.as_tensor(value) for name, value in CHANGE.items()}
    assert ours.quantise(tensors, 3, SPECS, 8.0).tolist() == vector.tolist()


def test_values_beyond_the_range_are_cut_and_counted_once_whatever_the_weight():
    change = {**CHANGE, "a": np.array([[1e300, -8.1], [8.0, -8.0]])}
    vector = ours.quantise(change, 5, SPECS, 8.0).view(np.int64)
    assert vector[:6].tolist() == [5, 2, 5 * LEVELS, -5 * LEVELS, 5 * LEVELS, -5 * LEVELS]


def test_weight_0_is_zeros_without_a_look_at_the_tensors():
    assert not ours.quantise({}, 0, SPECS, 8.0).any()


@pytest.mark.parametrize("weight", [-1, MAX_WEIGHT + 1, 2.0, True, None])
def test_a_weight_that_is_no_count_is_refused(weight):
    with pytest.raises(SecureSumError, match="expected a whole number"):
        ours.quantise(CHANGE, weight, SPECS, 8.0)


@pytest.mark.parametrize("value_range", [0.0, -1.0, float("inf"), float("nan")])
def test_a_range_that_is_none_is_refused(value_range):
    with pytest.raises(SecureSumError, match="expected a positive finite number"):
        ours.quantise(CHANGE, 1, SPECS, value_range)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"a": CHANGE["a"]}, "'b' is absent"),
        ({**CHANGE, "a": np.zeros(4)}, r"'a' is \[4\], expected \[2, 2\]"),
        ({**CHANGE, "b": np.float32("nan")}, "'b' holds a value that is not finite"),
        ({**CHANGE, "b": np.float32("-inf")}, "'b' holds a value that is not finite"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(change, reason):
    with pytest.raises(SecureSumError, match=reason):
        ours.quantise(change, 1, SPECS, 8.0)


@given(
    values=hnp.arrays(np.float64, (5, 4), elements=st.floats(-20, 20)),
    weights=st.lists(st.integers(0, MAX_WEIGHT), min_size=5, max_size=5),
    value_range=st.sampled_from([0.1, 1.0, 8.0]),
    order=st.permutations(range(5)),
)
def test_the_decoded_sum_is_the_mean_of_the_clipped_values_to_half_a_step(values, weights, value_range, order):
    """The reference is computed in exact fractions; float64 itself rounds at 2^-53 of the result."""
    specs = {"w": TensorSpec((4,), "float64")}
    vectors = [
        ours.quantise({"w": row}, weight, specs, value_range) for row, weight in zip(values, weights, strict=True)
    ]
    total = np.zeros(HEADER + 4, np.uint64)
    for site in order:
        total += vectors[site]
    assert total.tolist() == sum(vectors[1:], start=vectors[0]).tolist()  # bit-equal in any order
    found = ours.decode_sum(total, 5, specs, value_range)
    assert found.weight == sum(weights)
    clipped = np.abs(values) > value_range
    assert found.clipped == clipped[np.array(weights) > 0].sum()
    if not found.weight:
        assert found.mean == {}
        return
    cut = np.clip(values, -value_range, value_range)
    step = Fraction(value_range) / LEVELS
    for column in range(4):
        exact = sum(Fraction(float(x)) * w for x, w in zip(cut[:, column], weights, strict=True)) / sum(weights)
        slack = Fraction(1, 10**6) * step + abs(exact) * Fraction(1, 2**50)
        assert abs(Fraction(float(found.mean["w"][column])) - exact) <= step / 2 + slack


def test_the_largest_federation_does_not_wrap_around():
    specs = {"w": TensorSpec((2,), "float32")}
    one = ours.quantise({"w": np.array([8.0, -8.0])}, MAX_WEIGHT, specs, 8.0)
    total = one * np.uint64(MAX_SITES)
    found = ours.decode_sum(total, MAX_SITES, specs, 8.0)
    assert found.mean["w"].tolist() == [8.0, -8.0] and found.weight == MAX_SITES * MAX_WEIGHT
    assert MAX_SITES * MAX_WEIGHT * LEVELS < 2**63


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, -1),
        (0, 3 * MAX_WEIGHT + 1),
        (1, -1),
        (1, 3 * 5 + 1),
        (2, 7 * LEVELS + 1),
        (6, -7 * LEVELS - 1),
        (6, -(2**63)),
    ],
)
def test_a_sum_that_the_sites_cannot_have_is_refused(index, value):
    total = np.zeros(7, np.int64)
    total[0] = 7
    ours.decode_sum(total.view(np.uint64), 3, SPECS, 8.0)
    total[index] = value
    with pytest.raises(SecureSumError, match="outside the declared range"):
        ours.decode_sum(total.view(np.uint64), 3, SPECS, 8.0)


def test_a_total_of_another_length_is_refused():
    with pytest.raises(SecureSumError, match=r"uint64\[6\], expected uint64\[7\]"):
        ours.decode_sum(np.zeros(6, np.uint64), 3, SPECS, 8.0)


# -- masks and keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, ours.CHUNK - 1, ours.CHUNK, 2 * ours.CHUNK + 5])
def test_a_mask_is_the_chacha20_stream_and_comes_off_again(size):
    """Against another implementation of RFC 8439, made in one piece."""
    seed = bytes(range(32))
    vector = np.arange(size, dtype=np.uint64) + np.uint64(2**64 - 3)
    before = vector.copy()
    ours.add_mask(vector, seed)
    stream = ChaCha20.new(key=seed, nonce=bytes(12)).encrypt(bytes(8 * size))
    assert (vector - before).tobytes() == stream
    ours.add_mask(vector, seed, subtract=True)
    assert (vector == before).all()


def test_keys_agree_as_in_rfc_7748_and_5869():
    """The keys of RFC 7748, section 6.1; HKDF written out: extract under a zero salt, one block of expand."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    alice_public = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    bob_public = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert (ours.public_key(alice), ours.public_key(bob)) == (alice_public, bob_public)
    expected = hmac.digest(hmac.digest(bytes(32), shared, "sha256"), b"drill\x01", "sha256")
    assert ours.agreed_key(alice, bob_public, "drill") == ours.agreed_key(bob, alice_public, "drill") == expected
    assert ours.agreed_key(alice, bob_public, "other") != expected


@pytest.mark.parametrize("public", [bytes(32), bytes([1]) + bytes(31)])
def test_points_of_small_order_are_no_keys(public):
    with pytest.raises(SecureSumError, match="small order"):
        ours.check_public_key(public)
    with pytest.raises(SecureSumError, match="31 bytes, expected 32"):
        ours.check_public_key(public[:31])
    ours.check_public_key(ours.public_key(ours.new_private_key()))


def test_what_is_sealed_opens_under_its_key_unchanged_only():
    key, plain = bytes(range(32)), b"shares"
    sealed = ours.seal(key, plain)
    assert len(sealed) == len(plain) + ours.TAG_BYTES and ours.unseal(key, sealed) == plain
    for wrong_key, wrong in ((bytes(32), sealed), (key, sealed[:-1]), (key, bytes([sealed[0] ^ 1]) + sealed[1:])):
        with pytest.raises(SecureSumError, match="were changed"):
            ours.unseal(wrong_key, wrong)
    with pytest.raises(SecureSumError, match="were changed"):
        ours.unseal(key, b"")


@given(st.integers(3, MAX_SITES))
def test_two_answers_of_a_threshold_overlap_in_more_than_a_third_of_the_sites(num_sites):
    """So a server with a third of the sites on its side cannot have both secrets of one site (n + helpers < 2t)."""
    needed = ours.threshold(num_sites)
    assert needed <= num_sites and 2 * needed - num_sites > num_sites / 3
