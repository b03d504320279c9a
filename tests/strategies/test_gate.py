"""The update gate: fourteen hostile replies of issue 3, an honest one, and what else a reply may lie about."""

from __future__ import annotations

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from federation import wire
from federation.metrics import ScoreHistogram
from federation.wire import TensorSpec
from strategies import gate

SPECS = {"w": TensorSpec((2, 3), "float32"), "b": TensorSpec((3,), "float32"), "n": TensorSpec((), "int64")}
EXPECTED = gate.Expected(
    site="st-mary",
    server_round=3,
    payload=wire.train_payload({"model": SPECS}),
    max_examples=100,
    reference_norm=2.0,
)


def tensors(**changes):
    """The honest change: norm sqrt(6 * 0.25 + 3 * 1) = 2.1213."""
    honest = {"w": np.full((2, 3), 0.5, np.float32), "b": np.ones(3, np.float32), "n": np.array(7)}
    return {**honest, **changes}


def reply(arrays=None, *, drop=None, **numbers):
    arrays = tensors() if arrays is None else arrays
    metrics = {"server_round": 3, "num_examples": 80, "loss_sum": 41.5, "num_steps": 10} | numbers
    if drop:
        del metrics[drop]
    return RecordDict({"module.model": wire.encode(arrays), "metrics": MetricRecord(metrics)})


def test_an_honest_reply_passes_with_its_tensors_numbers_and_norm():
    accepted, reason = gate.inspect(reply(), EXPECTED)
    assert reason == "" and accepted is not None
    assert accepted.site == "st-mary" and accepted.server_round == 3 and accepted.num_examples == 80
    assert accepted.numbers["metrics"]["loss_sum"] == 41.5
    np.testing.assert_array_equal(accepted.modules["model"]["w"], tensors()["w"])
    assert accepted.norm == pytest.approx(np.sqrt(4.5))  # the integer buffer is no part of it
    assert not accepted.modules["model"]["w"].flags.writeable


def poisoned(value):
    w = np.full((2, 3), 0.5, np.float32)
    w[1, 2] = value
    return reply(tensors(w=w))


def missing_tensor():
    arrays = tensors()
    del arrays["b"]
    return reply(arrays)


HOSTILE = {
    "NaN tensor": (lambda: poisoned(np.nan), "tensor 'w' of module 'model' has no finite norm"),
    "+Inf tensor": (lambda: poisoned(np.inf), "tensor 'w' of module 'model' has no finite norm"),
    "1e30 tensor": (lambda: poisoned(1e30), "tensor 'w' of module 'model' has no finite norm"),
    "wrong shape": (
        lambda: reply(tensors(w=np.zeros((3, 2), np.float32))),
        "tensor 'w' of 'module.model' is float32[3, 2], expected float32[2, 3]",
    ),
    "broadcastable wrong shape": (
        lambda: reply(tensors(w=np.zeros((1, 3), np.float32))),
        "tensor 'w' of 'module.model' is float32[1, 3], expected float32[2, 3]",
    ),
    "missing tensor": (missing_tensor, "tensors of 'module.model': missing 'b'"),
    "extra tensor": (
        lambda: reply(tensors(extra=np.zeros(1, np.float32))),
        "tensors of 'module.model': not declared 'extra'",
    ),
    "count 0": (lambda: reply(num_examples=0), "num_examples is 0, expected 1 to 100"),
    "count -10": (lambda: reply(num_examples=-10), "metrics.num_examples: found -10, expected count"),
    "count NaN": (lambda: reply(num_examples=float("nan")), "metrics.num_examples: found nan, expected count"),
    "count 1e12": (lambda: reply(num_examples=10**12), "num_examples is 1000000000000, expected 1 to 100"),
    "NaN metric": (lambda: reply(loss_sum=float("nan")), "metrics.loss_sum: found nan, expected real"),
    "metric key missing": (lambda: reply(drop="loss_sum"), "numbers of 'metrics': missing 'loss_sum'"),
    "metric key extra": (lambda: reply(accuracy=0.9), "numbers of 'metrics': not declared 'accuracy'"),
    "wrong dtype": (
        lambda: reply(tensors(w=np.zeros((2, 3), np.float64))),
        "tensor 'w' of 'module.model' is float64[2, 3], expected float32[2, 3]",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_reply_is_refused_with_what_is_wrong(name):
    make, reason = HOSTILE[name]
    accepted, found = gate.inspect(make(), EXPECTED)
    assert accepted is None and reason in found


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_one_value_that_is_not_finite_is_found_in_every_dtype_and_place(dtype, value):
    expected = gate.Expected("s", 3, wire.train_payload({"model": {"w": TensorSpec((257,), dtype)}}), 100)
    for place in (0, 128, 256):
        values = np.zeros(257, dtype)
        values[place] = value
        accepted, reason = gate.inspect(reply({"w": values}), expected)
        assert accepted is None and "tensor 'w' of module 'model' has no finite norm" in reason


def test_half_precision_values_whose_squares_overflow_are_still_finite():
    # 300 ** 2 is infinite in float16 (largest 65504); the norm is taken in float32
    expected = gate.Expected("s", 3, wire.train_payload({"model": {"w": TensorSpec((4,), "float16")}}), 100)
    accepted, reason = gate.inspect(reply({"w": np.full(4, 300, np.float16)}), expected)
    assert reason == "" and accepted.norm == pytest.approx(600)


def test_an_absurdly_long_update_is_refused_beside_the_models_norm():
    # 1e4 times the reference norm of 2 is the limit; 1e5 in nine float entries is far above, and finite
    accepted, reason = gate.inspect(reply(tensors(w=np.full((2, 3), 1e5, np.float32))), EXPECTED)
    assert accepted is None and "the update's norm is 2.45e+05, expected at most 2e+04" in reason


@pytest.mark.parametrize("server_round", [2, 4, 0])
def test_a_reply_for_another_round_is_refused(server_round):
    accepted, reason = gate.inspect(reply(server_round=server_round), EXPECTED)
    assert accepted is None and reason == f"the reply is for round {server_round}, expected round 3"


@pytest.mark.parametrize("count", [1, 100])
def test_the_count_may_reach_the_site_card(count):
    assert gate.inspect(reply(num_examples=count), EXPECTED)[1] == ""
    assert "expected 1 to 100" in gate.inspect(reply(num_examples=101), EXPECTED)[1]


def test_integer_buffers_of_the_wrong_kind_are_refused_too():
    accepted, reason = gate.inspect(reply(tensors(n=np.array(7.0))), EXPECTED)
    assert accepted is None and "tensor 'n' of 'module.model' is float64[], expected int64[]" in reason


def test_other_records_are_refused():
    content = reply()
    content["notes"] = ConfigRecord({"text": "hello"})
    assert "records: not declared 'notes'" in gate.inspect(content, EXPECTED)[1]
    assert "missing 'metrics', 'module.model'" in gate.inspect(RecordDict(), EXPECTED)[1]


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


GOOD = npy(np.zeros((2, 3), np.float32))
LYING = {
    "bytes of another shape": npy(np.zeros((3, 2), np.float32)),
    "bytes of another dtype": npy(np.zeros((2, 3), np.float64)),
    "bytes cut off": GOOD[:-4],
    "bytes added": GOOD + b"more",
    "no header": b"",
    "a header that breaks parsers": GOOD.replace(b"(2, 3)", b"(2, 3("),
    "a pickle": npy(np.zeros((2, 3), np.float32)).replace(b"<f4", b"|O8"),
}


@pytest.mark.parametrize("name", LYING)
def test_bytes_that_are_not_what_is_declared_never_raise(name):
    content = reply()
    arrays = dict(content["module.model"])
    arrays["w"] = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=LYING[name])
    content["module.model"] = ArrayRecord(arrays)
    accepted, reason = gate.inspect(content, EXPECTED)
    assert accepted is None and reason


# -- scores -------------------------------------------------------------------------------------------------------


def scored(**changes):
    histogram = ScoreHistogram(2, 256)
    histogram.update(np.array([[0.2, 0.9], [0.7, 0.4], [0.1, 0.3]]), np.array([[0, 1], [1, 0], [0, 0]]))
    arrays = {**histogram.to_arrays(), "confusion": np.array([[2, 0], [0, 1]])} | changes.pop("arrays", {})
    numbers = {"num_examples": 3, "loss_sum": 1.5} | changes
    return RecordDict(
        {
            "scores.val": wire.encode(arrays),
            "loss.val": MetricRecord(numbers),
            "metrics": MetricRecord({"server_round": 3}),
        }
    )


SCORES = gate.Expected("s", 3, wire.evaluation_payload(["val"], 2, 256, "multiclass"), split_sizes={"val": 3})


def test_honest_scores_pass():
    accepted, reason = gate.inspect(scored(), SCORES)
    assert reason == "" and accepted.scores["val"]["confusion"].sum() == 3 and accepted.norm == 0


def cells(value):
    array = np.zeros((2, 256), np.int64)
    array[0, 100] = value
    return array


BAD_SCORES = {
    "a negative bin": ({"arrays": {"positives": cells(-1)}}, "the scores of 'val' are no histogram"),
    "a bin beyond all patients on earth": ({"arrays": {"negatives": cells(2**62)}}, "are no histogram"),
    "positions without counts": ({"arrays": {"positive_steps": cells(5000)}}, "are no histogram"),
    "more samples than the site has": (
        {"arrays": {"positives": cells(4), "positive_steps": cells(0)}},
        "count 6 samples, expected at most 3",
    ),
    "more losses than the site has": ({"num_examples": 9}, "count 9 samples, expected at most 3"),
    "a negative confusion": ({"arrays": {"confusion": np.array([[3, -1], [0, 1]])}}, "holds negative counts"),
    "a confusion that is too full": ({"arrays": {"confusion": np.full((2, 2), 2)}}, "expected at most 3"),
    "a confusion whose sum wraps to 0": ({"arrays": {"confusion": np.full((2, 2), 2**62)}}, "expected at most 3"),
    "an infinite loss": ({"loss_sum": float("inf")}, "loss.val.loss_sum: found inf, expected real"),
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_scores_that_cannot_be_are_refused(name):
    changes, reason = BAD_SCORES[name]
    accepted, found = gate.inspect(scored(**changes), SCORES)
    assert accepted is None and reason in found
