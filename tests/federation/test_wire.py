"""What travels arrives as it was, and what is damaged or undeclared is refused by name."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from federation import wire
from federation.wire import Payload, TensorSpec, WireError

SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 4), (1, 2, 3, 4)]


def as_array(values, **changes):
    """A Flower array as `wire.encode_array` makes it, with some of its parts replaced."""
    made = wire.encode_array(values)
    parts = {"dtype": made.dtype, "shape": tuple(made.shape), "stype": made.stype, "data": made.data}
    return Array(**{**parts, **changes})


def npy(values):
    """The bytes that NumPy itself writes."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


# -- the way of a tensor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", sorted(wire.DTYPES))
def test_a_tensor_of_every_dtype_and_shape_comes_back_bit_by_bit(dtype, shape):
    rng = np.random.default_rng(0)
    values = np.asarray(rng.integers(0, 2, shape) if dtype == "bool" else 100 * rng.random(shape)).astype(dtype)
    back = wire.decode_array(wire.encode_array(values))
    assert back.dtype == values.dtype and back.shape == shape and back.tobytes() == values.tobytes()
    tensor = wire.decode(wire.encode({"x": torch.from_numpy(values.copy())}))["x"]
    assert tensor.dtype == values.dtype and tensor.shape == shape and tensor.tobytes() == values.tobytes()


def test_nan_payloads_and_signed_zero_keep_their_bits():
    values = np.array([np.nan, -np.nan, -0.0, np.inf, 5e-324])
    assert wire.decode_array(wire.encode_array(values)).tobytes() == values.tobytes()


def test_the_bytes_are_numpys_own_format():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(np.load(io.BytesIO(wire.encode_array(values).data), allow_pickle=False), values)
    np.testing.assert_array_equal(wire.decode_array(as_array(values, data=npy(values))), values)


def test_views_that_are_not_contiguous_are_sent_in_c_order():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    for view in (values.T, values[:, ::2], values[::-1]):
        np.testing.assert_array_equal(wire.decode_array(wire.encode_array(view)), view)


def test_decoding_copies_nothing_and_the_view_cannot_be_written_to():
    array = wire.encode_array(np.arange(1000, dtype=np.float32))
    back = wire.decode_array(array)
    start = np.frombuffer(array.data, np.uint8).ctypes.data
    assert start < back.ctypes.data < start + len(array.data)
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1.0


def test_received_modules_are_writable_and_of_the_receiver_alone():
    record = wire.encode({"w": torch.zeros(3)})
    content = RecordDict({"module.model": record, "config": ConfigRecord({"a": 1})})
    modules = wire.modules_of(content)
    assert list(modules) == ["model"]
    modules["model"]["w"] += 1
    assert wire.decode(record)["w"].tolist() == [0.0, 0.0, 0.0]


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_a_torch_dtype_that_numpy_cannot_hold_or_nobody_declares_does_not_travel(dtype):
    with pytest.raises(WireError, match=r"weight is torch\.\w+, which does not travel"):
        wire.encode({"weight": torch.zeros(2, dtype=dtype)})


@pytest.mark.parametrize(
    "values", [np.array(["a"]), np.array([None]), np.zeros(2, "datetime64[s]"), np.zeros(1, "f4,f4")]
)
def test_a_numpy_dtype_that_nobody_declares_does_not_travel(values):
    with pytest.raises(WireError, match="does not travel"):
        wire.encode({"weight": values})


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
GOOD = npy(VALUES)
NO_HEADER = r"do not begin with the .npy header of float32\[2, 3\] in C order"
DAMAGED = {
    "empty": ({"data": b""}, NO_HEADER),
    "no magic": ({"data": b"X" + GOOD[1:]}, NO_HEADER),
    "version 3": ({"data": GOOD[:6] + b"\x03" + GOOD[7:]}, NO_HEADER),
    "header cut off": ({"data": GOOD[:40]}, NO_HEADER),
    "header no dict": ({"data": GOOD.replace(b"{'descr'", b"['descr'")}, NO_HEADER),
    "header with an unclosed bracket": ({"data": GOOD.replace(b"(2, 3)", b"(2, 3(")}, NO_HEADER),
    "Fortran order": ({"data": npy(np.asfortranarray(VALUES))}, NO_HEADER),
    "other endianness": ({"data": npy(VALUES.astype(">f4"))}, NO_HEADER),
    "bytes of float64": ({"data": npy(VALUES.astype(np.float64))}, NO_HEADER),
    "bytes of another shape": ({"data": npy(VALUES.reshape(3, 2))}, NO_HEADER),
    "last byte missing": ({"data": GOOD[:-1]}, "hold 23 bytes of values, expected 24"),
    "one byte too many": ({"data": GOOD + b"\0"}, "hold 25 bytes of values, expected 24"),
    "no body": ({"data": GOOD[:-24]}, "hold 0 bytes of values, expected 24"),
    "declared dtype": ({"dtype": "float64"}, r"header of float64\[2, 3\]"),
    "declared shape": ({"shape": (3, 2)}, r"header of float32\[3, 2\]"),
    "negative shape": (
        {"data": GOOD.replace(b"(2, 3), }  ", b"(-2, -3), }"), "shape": (-2, -3)},
        "hold 24 bytes of values",
    ),
    "stype": ({"stype": "torch.tensor"}, "serialisation is 'torch.tensor'"),
    "objects": ({"data": npy(VALUES.astype(object)), "dtype": "object"}, "tensor holds object"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_are_refused_as_such(name):
    changes, reason = DAMAGED[name]
    with pytest.raises(WireError, match=reason):
        wire.decode_array(as_array(VALUES, **changes))


def test_objects_are_refused_before_anything_is_unpickled():
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("it was unpickled",)

    data = npy(np.array([Trap()], object))
    with pytest.raises(WireError):
        wire.decode_array(as_array(np.zeros(1), data=data, dtype="object"))


@given(st.lists(st.tuples(st.integers(0, 151), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damage_to_the_bytes_is_refused_or_reads_as_numbers(changes):
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    try:
        back = wire.decode_array(as_array(VALUES, data=bytes(data)))
    except WireError:
        return
    assert back.shape == (2, 3) and back.dtype == np.float32


@given(st.text("()[]{}'\",: descrfortan_shpe<f4TruFals0123-\\#\n", max_size=200))
def test_any_text_as_header_is_refused_or_reads_as_numbers(text):
    header = text.encode()
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + VALUES.tobytes()
    try:
        back = wire.decode_array(as_array(VALUES, data=data))
    except WireError:
        return
    assert back.shape == (2, 3) and back.dtype == np.float32


@pytest.mark.parametrize("text", ["(" * 3000, "[" * 90 + "]" * 90, "-" * 3000 + "1", "{'descr': " * 200], ids=len)
def test_a_header_that_is_built_to_break_the_parser_is_refused(text):
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + VALUES.tobytes()
    with pytest.raises(WireError):
        wire.decode_array(as_array(VALUES, data=data))


# -- payload declarations -------------------------------------------------------------------------------------------

PAYLOAD = Payload(
    purpose="a test",
    arrays={"module.model": {"w": TensorSpec((2, 3), "float32"), "n": TensorSpec((), "int64")}},
    numbers={"metrics": {"count": "count", "loss": "real", "cells": "counts"}},
    texts={"card": frozenset({"site", "labels"})},
)


def fitting():
    return {
        "module.model": wire.encode({"w": VALUES, "n": np.int64(3)}),
        "metrics": MetricRecord({"count": 3, "loss": 0.5, "cells": [1, -1, 0]}),
        "card": ConfigRecord({"site": "st-mary", "labels": ["a", "b"]}),
    }


def test_what_fits_its_declaration_has_no_violation():
    assert PAYLOAD.violation(RecordDict(fitting())) is None


def module(**tensors):
    return {"module.model": wire.encode({"w": VALUES, "n": np.int64(3)} | tensors)}


def metrics(**numbers):
    return {"metrics": MetricRecord({"count": 3, "loss": 0.5, "cells": [1, -1, 0]} | numbers)}


def card(**texts):
    return {"card": ConfigRecord({"site": "st-mary", "labels": ["a", "b"]} | texts)}


def without(record, key):
    del record[key]
    return record


VIOLATIONS = {
    "an extra record": ({"notes": ConfigRecord({})}, "records: not declared 'notes'"),
    "arrays in place of numbers": ({"metrics": wire.encode({})}, "'metrics' is a ArrayRecord, expected a MetricRecord"),
    "numbers in place of arrays": ({"module.model": MetricRecord({})}, "is a MetricRecord, expected a ArrayRecord"),
    "numbers in place of texts": ({"card": MetricRecord({})}, "'card' is a MetricRecord, expected a ConfigRecord"),
    "an extra tensor": (module(x=VALUES), "tensors of 'module.model': not declared 'x'"),
    "a missing tensor": ({"module.model": wire.encode({"w": VALUES})}, "tensors of 'module.model': missing 'n'"),
    "another shape": (module(w=VALUES.T), "'w' of 'module.model' is float32[3, 2], expected float32[2, 3]"),
    "a shape that broadcasts": (module(w=VALUES[:1]), "is float32[1, 3], expected float32[2, 3]"),
    "another dtype": (module(w=VALUES.astype(np.float64)), "is float64[2, 3], expected float32[2, 3]"),
    "an extra number": (metrics(more=1), "numbers of 'metrics': not declared 'more'"),
    "a missing number": ({"metrics": without(metrics()["metrics"], "loss")}, "numbers of 'metrics': missing 'loss'"),
    "a count below zero": (metrics(count=-10), "metrics.count: found -10, expected count"),
    "a count with a fraction": (metrics(count=2.5), "metrics.count: found 2.5, expected count"),
    "a count that is NaN": (metrics(count=float("nan")), "metrics.count: found nan, expected count"),
    "a list in place of a count": (metrics(count=[1]), "metrics.count: found [1], expected count"),
    "a loss that is NaN": (metrics(loss=float("nan")), "metrics.loss: found nan, expected real"),
    "a loss that is infinite": (metrics(loss=float("-inf")), "metrics.loss: found -inf, expected real"),
    "cells below -1": (metrics(cells=[0, -2]), "metrics.cells: found [0, -2], expected counts"),
    "cells that are one number": (metrics(cells=4), "metrics.cells: found 4, expected counts"),
    "a number as text": (card(site=4), "card.site must hold strings"),
    "a long text": (card(labels=["a", "b" * 201]), "card.labels must hold strings of at most 200 characters"),
    "an extra text": (card(note="x"), "texts of 'card': not declared 'note'"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_names_what_does_not_fit(name):
    changes, reason = VIOLATIONS[name]
    found = PAYLOAD.violation(RecordDict({**fitting(), **changes}))
    assert found is not None and reason.replace("a ArrayRecord", "ArrayRecord") in found.replace(
        "an ArrayRecord", "ArrayRecord"
    ).replace("a ArrayRecord", "ArrayRecord")


@pytest.mark.parametrize("record", ["module.model", "metrics", "card"])
def test_a_missing_record_is_named(record):
    assert PAYLOAD.violation(RecordDict(without(fitting(), record))) == f"records: missing {record!r}"


def test_a_long_list_of_undeclared_names_is_cut():
    content = RecordDict({**fitting(), **{f"r{i}": ConfigRecord({}) for i in range(9)}})
    assert PAYLOAD.violation(content) == "records: not declared 'r0', 'r1', 'r2' and more"


def test_the_profile_payload_declares_no_array_and_no_free_text():
    payload = wire.profile_payload()
    assert not payload.arrays
    assert payload.texts == {"card": {"site", "labels", "task", "schema", "modalities", "data_sha256"}}


def test_training_and_evaluation_travel_in_one_declaration():
    evaluation = wire.evaluation_payload(["val"], num_labels=3, bins=256, task="multiclass")
    both = wire.train_payload({"model": {"w": TensorSpec((2,), "float32")}}, evaluation)
    assert set(both.arrays) == {"module.model", "scores.val"}
    assert both.arrays["scores.val"]["confusion"] == TensorSpec((3, 3), "int64")
    assert both.arrays["scores.val"]["positives"] == TensorSpec((3, 256), "int64")
    assert set(both.numbers["metrics"]) == {"server_round", "num_examples", "loss_sum", "num_steps"}
    assert "confusion" not in wire.evaluation_payload(["val"], 3, 256, "multilabel").arrays["scores.val"]


# -- hashes -----------------------------------------------------------------------------------------------------------


def test_state_hash_is_the_same_today_and_tomorrow():
    # Recorded once. It keys resumed runs and is what "same seed, same model" is checked by, so it may not drift.
    state = {"model": {"w": torch.arange(4, dtype=torch.float32), "n": torch.tensor(3)}}
    assert wire.state_sha256(state) == "f3c91439724c7b48c5c4936c3fc5344e4406720baba061fa51066cee0e816438"


def test_state_hash_ignores_the_order_of_names_and_nothing_else():
    w, b = torch.arange(4.0).reshape(2, 2), torch.zeros(2)
    base = wire.state_sha256({"m": {"w": w, "b": b}, "n": {"x": b}})
    assert wire.state_sha256({"n": {"x": b}, "m": {"b": b, "w": w}}) == base
    changed = w.clone()
    changed[0, 0] = -0.0  # equal to 0.0, other bits
    others = [
        {"m": {"w": changed, "b": b}, "n": {"x": b}},
        {"m": {"w": w.reshape(4), "b": b}, "n": {"x": b}},
        {"m": {"w": w.double(), "b": b}, "n": {"x": b}},
        {"m": {"v": w, "b": b}, "n": {"x": b}},
        {"m": {"w": w, "b": b, "x": b}},
        {"m": {"w": w.T, "b": b}, "n": {"x": b}},
    ]
    assert len({base, *(wire.state_sha256(other) for other in others)}) == 1 + len(others)


def test_content_hash_ignores_the_order_of_records_and_keys_and_nothing_else():
    records = fitting()
    base = wire.content_sha256(RecordDict(records))
    turned = {name: records[name] for name in reversed(records)}
    turned["metrics"] = MetricRecord({"cells": [1, -1, 0], "loss": 0.5, "count": 3})
    assert wire.content_sha256(RecordDict(turned)) == base
    for change in (metrics(count=4), card(site="st-mara"), module(n=np.int64(4)), metrics(loss=0.5000001)):
        assert wire.content_sha256(RecordDict({**records, **change})) != base


def test_schema_hash_covers_labels_in_order_task_tensors_and_frozen_weights():
    specs = {"model": {"w": TensorSpec((2,), "float32"), "b": TensorSpec((), "float32")}}
    base = wire.schema_sha256(["a", "b"], "multilabel", specs)
    turned = {"model": dict(reversed(specs["model"].items()))}
    assert wire.schema_sha256(("a", "b"), "multilabel", turned) == base
    others = [
        wire.schema_sha256(["b", "a"], "multilabel", specs),
        wire.schema_sha256(["a", "b"], "multiclass", specs),
        wire.schema_sha256(["a", "b"], "multilabel", {"model": specs["model"] | {"w": TensorSpec((3,), "float32")}}),
        wire.schema_sha256(["a", "b"], "multilabel", {"mode1": specs["model"]}),
        wire.schema_sha256(["a", "b"], "multilabel", specs, frozen="0" * 64),
    ]
    assert len({base, *others}) == 6


def test_size_counts_array_payload_only():
    content = RecordDict({"m": wire.encode({"w": VALUES}), "config": ConfigRecord({"long": "x" * 1000})})
    assert wire.size_bytes(content) == len(GOOD)


def test_spec_is_the_same_for_numpy_torch_and_meta_tensors():
    expected = {"w": TensorSpec((2, 3), "float32")}
    for value in (VALUES, torch.from_numpy(VALUES.copy()), torch.empty(2, 3, device="meta")):
        assert wire.spec_of({"w": value}) == expected
    assert str(expected["w"]) == "float32[2, 3]"


def test_a_record_of_no_tensor_is_empty():
    assert wire.decode(ArrayRecord()) == {} and len(wire.encode({})) == 0
