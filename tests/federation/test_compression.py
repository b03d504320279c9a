"""Sparse updates: against a plain selection, the law that nothing is lost, and hostile indices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.torch import load_file

from federation import seeding, wire
from federation.compression import TopK
from federation.files import save_tensors
from federation.wire import Payload, TensorSpec, WireError

ratios = st.floats(0.01, 1.0)
seeds = st.integers(0, 2**32 - 1)
dyadic = st.integers(-4096, 4096).map(lambda steps: steps / 1024)
"""Multiples of 2^-10 up to 4: sums of a hundred of them are exact in float32 (24 bits) and so are differences."""


def drawn(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        "z.bias": rng.normal(size=()).astype(dtype),
        "a.weight": rng.normal(size=(3, 4)).astype(dtype),
        "m": rng.normal(size=(5,)).astype(dtype),
    }


def flat(tensors):
    return np.concatenate([np.asarray(tensors[name]).reshape(-1) for name in sorted(tensors)])


# -- reference ------------------------------------------------------------------------------------------------------


@given(npst.arrays(np.float32, st.integers(1, 60), elements=st.integers(-5, 5)), ratios)
def test_the_selection_is_a_plain_sort_by_magnitude_then_index(values, ratio):
    sent, residual = TopK(ratio).encode({"w": values})
    count = max(1, math.ceil(ratio * values.size - 1e-9))
    plain = sorted(sorted(range(values.size), key=lambda index: (-abs(values[index]), index))[:count])
    assert sent["idx"].tolist() == plain and sent["idx"].dtype == np.int32
    assert sent["val"].tolist() == [values[index] for index in plain] and sent["val"].dtype == np.float32
    rest = [0.0 if index in plain else values[index] for index in range(values.size)]
    assert residual["w"].tolist() == rest


def test_by_hand_with_a_residual():
    # accumulated = [1.5, -3, 0.5, 1.5]: 2 of 4 go, -3 and of the two 1.5 the first
    change = {"a": np.float32([1.0, -3.0]), "b": np.float32([0.5, 0.5])}
    kept = {"a": torch.tensor([0.5, 0.0]), "b": torch.tensor([0.0, 1.0])}
    topk = TopK(0.5)
    sent, residual = topk.encode(change, kept)
    assert sent["idx"].tolist() == [0, 1] and sent["val"].tolist() == [1.5, -3.0]
    assert residual["a"].tolist() == [0.0, 0.0] and residual["b"].tolist() == [0.5, 1.5]
    dense = topk.decode(sent, wire.spec_of(change))
    assert dense["a"].tolist() == [1.5, -3.0] and dense["b"].tolist() == [0.0, 0.0]
    assert kept["a"].tolist() == [0.5, 0.0] and change["a"].tolist() == [1.0, -3.0]  # neither is written to


@pytest.mark.parametrize(
    ("ratio", "size", "count"),
    [(0.05, 100, 5), (0.05, 101, 6), (0.01, 20, 1), (1.0, 7, 7), (0.07, 100, 7), (0.29, 100, 29)],
)
def test_count_forgives_binary_fractions(ratio, size, count):
    assert TopK(ratio).count(size) == count  # 0.07 * 100 is 7.000000000000001


def test_torch_tensors_give_what_arrays_give():
    arrays = drawn(3)
    ours, rest = TopK(0.3).encode(arrays)
    theirs, other = TopK(0.3).encode({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    assert all(np.array_equal(ours[name], theirs[name]) for name in ("idx", "val"))
    assert all(torch.equal(rest[name], other[name]) for name in arrays)


# -- nothing is lost ------------------------------------------------------------------------------------------------


@given(seeds, ratios, st.sampled_from(["float32", "float16"]), st.sampled_from([np.float32, np.float64]))
def test_one_round_sends_and_keeps_exactly_what_there_was(seed, ratio, value_dtype, dtype):
    topk = TopK(ratio, value_dtype=value_dtype)
    change, kept = drawn(seed, dtype), drawn(seed + 1, dtype)
    sent, residual = topk.encode(change, kept)
    dense = topk.decode(sent, wire.spec_of(change))
    for name in change:
        accumulated = change[name] + kept[name]  # in the working precision, as declared
        np.testing.assert_array_equal(dense[name] + residual[name].numpy(), accumulated)


@given(npst.arrays(np.float32, (6, 9), elements=dyadic), ratios, st.sampled_from(["magnitude", "shared_seed"]), seeds)
def test_all_that_was_sent_plus_the_residual_is_the_sum_of_the_changes(changes, ratio, index, seed):
    topk = TopK(ratio, index=index)
    specs = {"w": TensorSpec((9,), "float32")}
    total, residual = np.zeros(9, np.float32), None
    for server_round, change in enumerate(changes, 1):
        indices = None
        if index == "shared_seed":
            indices = topk.shared_indices(specs, seeding.numpy_generator(seed, "topk", server_round))
        sent, residual = topk.encode({"w": change}, residual, indices=indices)
        total += topk.decode(sent, specs, indices=indices)["w"]
    np.testing.assert_array_equal(total + residual["w"].numpy(), changes.sum(0))  # exact: see `dyadic`


def test_a_value_beyond_half_precision_arrives_in_parts():
    topk = TopK(1.0, value_dtype="float16")
    sent, residual = topk.encode({"w": np.float32([1e5, -1e5])})
    assert sent["val"].tolist() == [65504.0, -65504.0] and residual["w"].tolist() == [34496.0, -34496.0]


def test_every_coordinate_is_sent_in_the_end():
    topk = TopK(0.1)
    change, residual, seen = {"w": np.linspace(1, 2, 20, dtype=np.float32)}, None, set()
    for _ in range(20):
        sent, residual = topk.encode(change, residual)
        seen |= set(sent["idx"].tolist())
    assert seen == set(range(20))


# -- age and schema -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age", "used"), [(1, True), (10, True), (11, False)])
def test_a_residual_is_used_until_it_is_too_old(age, used):
    sent, _ = TopK(1.0, max_age=10).encode({"w": np.float32([1.0])}, {"w": torch.tensor([4.0])}, age=age)
    assert sent["val"].tolist() == [5.0 if used else 1.0]


@pytest.mark.parametrize(
    "kept",
    [
        {"w": torch.ones(4)},
        {"v": torch.ones(2, 2)},
        {"w": torch.ones(2, 2), "v": torch.ones(1)},
        {},
    ],
    ids=["same size, other shape", "other name", "one more", "none"],
)
def test_a_residual_of_another_schema_is_dropped(kept):
    sent, _ = TopK(1.0).encode({"w": np.zeros((2, 2), np.float32)}, kept)
    assert sent["val"].tolist() == [0.0] * 4


def test_a_residual_survives_the_sites_disk(tmp_path):
    _, residual = TopK(0.2).encode(drawn(5))
    save_tensors(tmp_path / "residual.safetensors", residual)
    back = load_file(tmp_path / "residual.safetensors")
    assert set(back) == set(residual) and all(torch.equal(back[name], residual[name]) for name in back)


# -- the wire -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", ["float32", "float16"])
@pytest.mark.parametrize("index", ["magnitude", "shared_seed"])
def test_what_is_sent_is_what_was_declared_and_survives_the_wire(value_dtype, index):
    topk = TopK(0.25, value_dtype=value_dtype, index=index)
    change = {**drawn(7), "steps": np.array(41)}
    specs = wire.spec_of(change)
    indices = topk.shared_indices(specs, np.random.default_rng(1)) if index == "shared_seed" else None
    sent, _ = topk.encode(change, indices=indices)
    assert wire.spec_of(sent) == topk.specs(specs)
    content = RecordDict({"module.vision": wire.encode(sent)})
    assert Payload("", arrays={"module.vision": topk.specs(specs)}).violation(content) is None
    dense = topk.decode(wire.decode(content["module.vision"]), specs, indices=indices)
    assert wire.spec_of(dense) == specs and dense["steps"] == 41
    assert np.count_nonzero(flat({name: dense[name] for name in drawn(7)})) == topk.count(18) == 5


def test_shared_indices_are_the_rounds_own_and_cost_no_bytes():
    topk, specs = TopK(0.3, index="shared_seed"), {"w": TensorSpec((50,), "float32")}
    draw = [topk.shared_indices(specs, seeding.numpy_generator(7, "topk", r)) for r in (1, 1, 2)]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert draw[0].tolist() != draw[2].tolist()
    assert len(set(draw[0].tolist())) == 15 and (np.diff(draw[0]) > 0).all()
    assert "idx" not in topk.specs(specs)


def test_with_shared_indices_the_sum_of_what_is_sent_is_the_sum_of_the_changes_there():
    """What a secure sum needs: the server decodes the sum and never sees a site's own values."""
    topk, changes = TopK(0.5, index="shared_seed"), [drawn(seed) for seed in range(3)]
    specs = wire.spec_of(changes[0])
    indices = topk.shared_indices(specs, np.random.default_rng(3))
    total = sum(topk.encode(change, indices=indices)[0]["val"] for change in changes)
    found = flat(topk.decode({"val": total}, specs, indices=indices))
    wanted = np.zeros(18, np.float32)
    wanted[indices] = sum(flat(change) for change in changes)[indices]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


# -- refusals -------------------------------------------------------------------------------------------------------

HONEST = {"idx": np.int32([0, 2]), "val": np.float32([1.0, 2.0])}
HOSTILE = {
    "negative": ({"idx": np.int32([-1, 2])}, "reach from -1 to 2, expected 0 to 3"),
    "beyond": ({"idx": np.int32([0, 4])}, "reach from 0 to 4, expected 0 to 3"),
    "twice": ({"idx": np.int32([2, 2])}, "ascending order"),
    "descending": ({"idx": np.int32([2, 0])}, "ascending order"),
    "wide": ({"idx": np.int64([0, 2])}, r"'idx' is int64\[2\], expected int32\[2\]"),
    "too many": ({"val": np.float32([1, 2, 3])}, r"'val' is float32\[3\], expected float32\[2\]"),
    "one more": ({"w": np.float32([1.0])}, r"'w' is float32\[1\], expected absent"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_indices_are_refused(name):
    change, reason = HOSTILE[name]
    with pytest.raises(WireError, match=reason):
        TopK(0.5).decode({**HONEST, **change}, {"w": TensorSpec((4,), "float32")})


def test_absent_indices_are_refused():
    with pytest.raises(WireError, match=r"'idx' is absent, expected int32\[2\]"):
        TopK(0.5).decode({"val": HONEST["val"]}, {"w": TensorSpec((4,), "float32")})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_change_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="NaN or an infinity"):
        TopK(0.25).encode({"w": np.float32([1.0, bad, 0.0, 0.0])})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ratio": 0.0}, "ratio is 0.0"),
        ({"ratio": 1.1}, "ratio is 1.1"),
        ({"ratio": math.nan}, "ratio is nan"),
        ({"ratio": 0.1, "max_age": 0}, "max_age is 0"),
        ({"ratio": 0.1, "value_dtype": "float64"}, "value_dtype is 'float64'"),
        ({"ratio": 0.1, "index": "random"}, "index is 'random'"),
    ],
)
def test_options_out_of_range_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        TopK(**options)


@pytest.mark.parametrize(
    ("dense", "reason"),
    [
        ({"idx": TensorSpec((3,), "float32")}, "tensor 'idx', a name that a sparse update needs"),
        ({"steps": TensorSpec((), "int64")}, "has 0 float coordinates"),
        ({"w": TensorSpec((2**16, 2**15), "float32")}, "has 2147483648 float coordinates"),
    ],
)
def test_modules_that_cannot_be_sparse_are_refused(dense, reason):
    with pytest.raises(ValueError, match=reason):
        TopK(0.1).specs(dense)


def test_index_mode_and_indices_must_agree():
    change = {"w": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match="index = 'magnitude' and indices given"):
        TopK(0.5).encode(change, indices=np.array([0, 1]))
    with pytest.raises(ValueError, match="index = 'shared_seed' and indices absent"):
        TopK(0.5, index="shared_seed").encode(change)
    with pytest.raises(ValueError, match="do not fit 2 of 4"):
        TopK(0.5, index="shared_seed").encode(change, indices=np.array([0, 1, 2]))


def test_running_statistics_travel_whole_and_leave_no_residual():
    change = {"bn.running_var": np.float32([5.0, -4.0]), "conv.weight": np.float32([1.0, 2.0, 3.0, 4.0])}
    topk = TopK(0.25)
    sent, residual = topk.encode(change)
    assert sent["bn.running_var"].tolist() == [5.0, -4.0] and sent["val"].tolist() == [4.0]
    assert set(residual) == {"conv.weight"}
    dense = topk.decode(sent, wire.spec_of(change))
    assert dense["bn.running_var"].tolist() == [5.0, -4.0] and dense["conv.weight"].tolist() == [0.0, 0.0, 0.0, 4.0]
