"""Honest replies bent into hostile ones. Needs nothing of the tests: a copy of it works inside a copy of the app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from federation import wire

MODULE = "module.model"
SCORES = "scores.val"

Edit = Callable[[RecordDict], None]


def weight_of(content: RecordDict) -> str:
    """A float tensor with more than one axis: the first layer's weights."""
    return next(key for key in sorted(content[MODULE]) if len(content[MODULE][key].shape) > 1)


def put(content: RecordDict, name: str, array: Array, record: str = MODULE) -> None:
    content[record] = ArrayRecord({**content[record], name: array})


def values(change: Callable[[np.ndarray], np.ndarray | None], record: str = MODULE, name: str | None = None) -> Edit:
    """Bends one tensor's values; the result is encoded honestly."""

    def edit(content: RecordDict) -> None:
        key = name or weight_of(content)
        array = wire.decode_array(content[record][key]).copy()
        changed = change(array)
        put(content, key, wire.encode_array(array if changed is None else changed), record)

    return edit


def set_first(value: float) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array.flat[0] = value

    return change


def raw(change: Callable[[Array], Array]) -> Edit:
    """Bends one tensor's bytes or what is declared of them."""

    def edit(content: RecordDict) -> None:
        key = weight_of(content)
        put(content, key, change(content[MODULE][key]))

    return edit


def header(text: str) -> Edit:
    """Another .npy header in front of the same bytes of values."""

    def change(array: Array) -> Array:
        body = array.data[-int(np.prod(array.shape)) * 4 :]
        line = text.encode()
        return replace(array, data=b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + body)

    return raw(change)


def numbers(record: str = wire.METRICS, without: tuple[str, ...] = (), **changes: object) -> Edit:
    def edit(content: RecordDict) -> None:
        kept = {key: value for key, value in content[record].items() if key not in without}
        content[record] = MetricRecord({**kept, **changes})

    return edit


def drop_tensor(content: RecordDict) -> None:
    content[MODULE] = ArrayRecord({k: v for k, v in content[MODULE].items() if k != weight_of(content)})


def extra(name: str) -> Edit:
    return lambda content: put(content, name, wire.encode_array(np.zeros(2, np.float32)))


def many_extra(content: RecordDict) -> None:
    zero = wire.encode_array(np.zeros(2, np.float32))
    content[MODULE] = ArrayRecord({**content[MODULE], **{f"t{number}": zero for number in range(2000)}})


def record(name: str, value: object) -> Edit:
    def edit(content: RecordDict) -> None:
        content[name] = value

    return edit


def drop_record(content: RecordDict) -> None:
    del content[MODULE]


def config_for_numbers(content: RecordDict) -> None:
    content[wire.METRICS] = ConfigRecord(dict(content[wire.METRICS]))


def declared_dtype(dtype: str) -> Edit:
    return raw(lambda array: replace(array, dtype=dtype))


def big_endian(array: Array) -> Array:
    return replace(array, data=array.data.replace(b"'<f4'", b"'>f4'"))


def everywhere(value: float) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[...] = value

    return change


DECLARED = {
    "NaN tensor": (values(set_first(np.nan)), "no finite norm"),
    "+Inf tensor": (values(set_first(np.inf)), "no finite norm"),
    "1e30 tensor": (values(everywhere(1e30)), "no finite norm|norm is"),
    "wrong shape": (values(lambda a: np.zeros((*a.shape[:-1], a.shape[-1] + 1), a.dtype)), r"expected float32\["),
    "broadcastable wrong shape": (values(lambda a: a.reshape(-1)[:1]), r"is float32\[1\], expected float32\["),
    "missing tensor": (drop_tensor, "missing"),
    "extra tensor": (extra("backdoor"), "not declared 'backdoor'"),
    "all counts 0": (numbers(num_examples=0, num_steps=0, loss_sum=0.0), "num_examples is 0"),
    "count -10": (numbers(num_examples=-10), "found -10, expected count"),
    "count NaN": (numbers(num_examples=float("nan")), "found nan, expected count"),
    "count 1e12": (numbers(num_examples=10**12), "num_examples is 1000000000000, expected 1 to"),
    "NaN metric": (numbers(loss_sum=float("nan")), "found nan, expected real"),
    "metric key missing": (numbers(without=("loss_sum",)), "missing 'loss_sum'"),
    "metric key extra": (numbers(accuracy=1.0), "not declared 'accuracy'"),
    "wrong dtype": (values(lambda a: a.astype(np.float64)), r"is float64\["),
}
"""The fourteen hostile replies of the plan; the thirteenth, a metric key missing or extra, is two here."""


def bent(edit: Edit):
    """A fault that answers honestly, state files and all, and bends what it sends."""

    def fault(message: Message, answer: Callable[[], Message]) -> Message:
        reply = answer()
        edit(reply.content)
        return reply

    return fault
