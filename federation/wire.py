"""What travels: message actions, record names, declared payloads, and the way of tensors to bytes and back.

A `Payload` declares everything that one action's reply may hold. The site's egress gate refuses to send anything
else and the server's update gate refuses to take anything else; both read the same table.
Weights travel as NumPy's .npy bytes inside Flower's arrays: no pickle, and decoding copies nothing.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from federation.metrics import ScoreHistogram

PROFILE = "query.profile"
TRAIN = "train"
EVALUATE = "evaluate"
ASK = "query.ask"

CONFIG = "config"
METRICS = "metrics"
CARD = "card"
REFUSAL = "refusal"
MODULE = "module."
SCORES = "scores."
EXTRA = "extra"

State = Mapping[str, torch.Tensor]
"""A module's tensors by name, as `torch.nn.Module.state_dict` gives them."""

SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,63}")
"""What a site may be called: it names files and folders, and it is printed."""

FLOAT_DTYPES = frozenset({"float16", "float32", "float64"})
DTYPES = FLOAT_DTYPES | {"int8", "uint8", "int32", "int64", "bool"}


MAX_TEXTS = 10_000
"""Strings in one list: more than any label list has."""


class WireError(ValueError):
    """Bytes or records that are not what the protocol declares."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and NumPy dtype name of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Payload:
    """Everything that a reply to one action may hold.

    ``arrays``: record -> tensor name -> spec. ``numbers``: record -> key -> kind, where kind is ``count`` (a whole
    number from 0), ``real`` (finite) or ``counts`` (a list of whole numbers from -1, which means suppressed).
    ``texts``: record -> keys that hold strings or lists of strings. ``purpose`` is the sentence in the ledger.
    """

    purpose: str
    arrays: Mapping[str, Mapping[str, TensorSpec]] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def violation(self, content: RecordDict) -> str | None:
        """What in these records is not declared, or declared and absent; None where they fit.

        Looks at names, kinds, shapes and dtypes as declared by the sender, never at tensor values.
        """
        return (
            _differ("records", set(content), {*self.arrays, *self.numbers, *self.texts})
            or next(filter(None, (self._array_violation(content[name], name) for name in sorted(self.arrays))), None)
            or next(filter(None, (self._number_violation(content[name], name) for name in sorted(self.numbers))), None)
            or next(filter(None, (self._text_violation(content[name], name) for name in sorted(self.texts))), None)
        )

    def _array_violation(self, record: object, name: str) -> str | None:
        if not isinstance(record, ArrayRecord):
            return f"record {name!r} is a {type(record).__name__}, expected an ArrayRecord"
        specs = self.arrays[name]
        if wrong := _differ(f"tensors of {name!r}", set(record), set(specs)):
            return wrong
        for key in sorted(specs):
            found, wanted = TensorSpec(tuple(record[key].shape), record[key].dtype), specs[key]
            if found != wanted:
                return f"tensor {key!r} of {name!r} is {cut(str(found))}, expected {wanted}"
        return None

    def _number_violation(self, record: object, name: str) -> str | None:
        if not isinstance(record, MetricRecord):
            return f"record {name!r} is a {type(record).__name__}, expected a MetricRecord"
        kinds = self.numbers[name]
        if wrong := _differ(f"numbers of {name!r}", set(record), set(kinds)):
            return wrong
        return next((f"{name}.{key}: {bad}" for key in sorted(kinds) if (bad := _bad(record[key], kinds[key]))), None)

    def _text_violation(self, record: object, name: str) -> str | None:
        if not isinstance(record, ConfigRecord):
            return f"record {name!r} is a {type(record).__name__}, expected a ConfigRecord"
        if wrong := _differ(f"texts of {name!r}", set(record), set(self.texts[name])):
            return wrong
        for key in sorted(record):
            values = record[key] if isinstance(record[key], list) else [record[key]]
            if len(values) > MAX_TEXTS or not all(isinstance(value, str) and len(value) <= 200 for value in values):
                return f"{name}.{key} must hold strings of at most 200 characters, {MAX_TEXTS} at most"
        return None


def _differ(what: str, found: set[str], expected: set[str]) -> str | None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if not missing and not extra:
        return None
    return f"{what}: " + "; ".join(
        f"{word} {', '.join(cut(repr(name)) for name in names[:3])}{' and more' if len(names) > 3 else ''}"
        for word, names in (("missing", missing), ("not declared", extra))
        if names
    )


def _bad(value: object, kind: str) -> str | None:
    if kind == "counts":
        fine = isinstance(value, list) and all(isinstance(item, int) and item >= -1 for item in value)
    elif kind == "count":
        fine = isinstance(value, int) and value >= 0
    else:
        fine = isinstance(value, (int, float)) and math.isfinite(value)
    return None if fine else f"found {cut(repr(value))}, expected {kind}"


def cut(text: str, at_most: int = 80) -> str:
    """A short form of what the other side sent: it is quoted in logs and reports, and may be a megabyte."""
    return text if len(text) <= at_most else f"{text[: at_most - 3]}..."


def spec_of(arrays: Mapping[str, np.ndarray | torch.Tensor]) -> dict[str, TensorSpec]:
    """Shapes and dtypes of tensors, also of tensors on torch's meta device."""
    return {
        name: TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in arrays.items()
    }


def encode(arrays: Mapping[str, np.ndarray | torch.Tensor]) -> ArrayRecord:
    """Tensors as one record. Raises WireError for a dtype that does not travel (bfloat16, objects)."""
    return ArrayRecord({name: encode_array(value, name) for name, value in arrays.items()})


def encode_array(value: np.ndarray | torch.Tensor, name: str = "array") -> Array:
    if isinstance(value, torch.Tensor):
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise WireError(f"{name} is {value.dtype}, which does not travel; send one of {', '.join(sorted(DTYPES))}")
        value = value.detach().cpu().numpy()
    if value.dtype.name not in DTYPES:
        raise WireError(f"{name} is {value.dtype}, which does not travel; send one of {', '.join(sorted(DTYPES))}")
    value = np.asarray(value, order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(value))
    body = value.reshape(-1).view(np.uint8).data
    return Array(
        dtype=value.dtype.name,
        shape=tuple(value.shape),
        stype="numpy.ndarray",
        data=b"".join((header.getvalue(), body)),
    )


def decode_array(array: Array) -> np.ndarray:
    """The array's values as a read-only view of its bytes: nothing is copied, nothing is unpickled.

    Raises WireError where header, length and declared shape or dtype disagree, and for another order than C.
    """
    if array.stype != "numpy.ndarray":
        raise WireError(f"serialisation is {cut(repr(array.stype))}, expected 'numpy.ndarray'")
    if array.dtype not in DTYPES:
        raise WireError(f"the tensor holds {cut(array.dtype)}, expected one of {', '.join(sorted(DTYPES))}")
    dtype, shape = np.dtype(array.dtype), tuple(int(side) for side in array.shape)
    body = 10 + int.from_bytes(array.data[8:10], "little")
    # Compared, not parsed: NumPy's parser evaluates the text and fails in a dozen ways on hostile bytes.
    expected = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    if array.data[:8] != b"\x93NUMPY\x01\x00" or array.data[10:body].rstrip(b" \n") != expected:
        raise WireError(f"the bytes do not begin with the .npy header of {array.dtype}{list(shape)} in C order")
    count = math.prod(shape)
    if min(shape, default=0) < 0 or len(array.data) - body != count * dtype.itemsize:
        raise WireError(f"the bytes hold {len(array.data) - body} bytes of values, expected {count * dtype.itemsize}")
    return np.frombuffer(array.data, dtype, count, body).reshape(shape)


def decode(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Every array of a record; see `decode_array`."""
    return {name: decode_array(array) for name, array in record.items()}


def tensors(arrays: Mapping[str, np.ndarray], *, copy: bool = True) -> dict[str, torch.Tensor]:
    """Decoded arrays as torch tensors. With ``copy=False`` they share the read-only bytes: never write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(value.copy() if copy else value) for name, value in arrays.items()}


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """The records of a message that hold arrays.

    Not Flower's property of that name: it ties the message into a reference cycle, which keeps a model's worth of
    bytes until the next collection.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def modules_of(content: RecordDict) -> dict[str, dict[str, torch.Tensor]]:
    """The modules in a message, as writable tensors by module name."""
    return {
        name.removeprefix(MODULE): tensors(decode(record))
        for name, record in array_records(content).items()
        if name.startswith(MODULE)
    }


def size_bytes(content: RecordDict) -> int:
    """Bytes of array payload in a message."""
    return sum(len(array.data) for record in array_records(content).values() for array in record.values())


def digest_parts(content: RecordDict) -> Iterator[bytes]:
    for name in sorted(content):
        record = content[name]
        for key in sorted(record):
            value = record[key]
            yield f"{name}\x1f{key}\x1f".encode()
            yield value.data if isinstance(value, Array) else repr(value).encode()


def content_sha256(content: RecordDict) -> str:
    """SHA-256 over every record, key and byte of a message, in sorted order."""
    return sha256(digest_parts(content))


def state_sha256(modules: Mapping[str, State]) -> str:
    """SHA-256 of a model: names, dtypes, shapes and bytes of every tensor, in sorted order."""

    def parts() -> Iterator[bytes]:
        for module in sorted(modules):
            for name in sorted(modules[module]):
                value = modules[module][name].detach().cpu().contiguous()
                yield f"{module}\x1f{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode()
                yield value.reshape(-1).view(torch.uint8).numpy().tobytes()

    return sha256(parts())


def schema_sha256(
    labels: Iterable[str], task: str, specs: Mapping[str, Mapping[str, TensorSpec]], frozen: str = ""
) -> str:
    """SHA-256 of what server and site must agree on before round 1: labels, task, tensors, frozen weights."""
    lines = [task, *labels, frozen]
    lines += [
        f"{module}\x1f{name}\x1f{spec.dtype}{spec.shape}"
        for module in sorted(specs)
        for name, spec in sorted(specs[module].items())
    ]
    return sha256(f"{line}\n".encode() for line in lines)


def sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


CARD_NUMBERS = {
    "num_train": "count",
    "num_val": "count",
    "num_test": "count",
    "positives": "counts",
    "negatives": "counts",
}
CARD_TEXTS = frozenset({"site", "labels", "task", "schema", "modalities", "data_sha256"})


def profile_payload(extra: Mapping[str, str] | None = None) -> Payload:
    """What a site card holds: names, label list, hashes, sample and per-class counts (small cells suppressed).

    ``extra``: a method's own numbers, key -> kind.
    """
    return Payload(
        purpose="site card: who takes part, with how many samples of each label",
        numbers={METRICS: CARD_NUMBERS, **({EXTRA: dict(extra)} if extra else {})},
        texts={CARD: CARD_TEXTS},
    )


CODES = {
    "E-SETTINGS": "the run config is not valid at this site",
    "E-DATA": "the site's data cannot be used",
    "E-EMPTY": "the site has no sample for this",
    "E-MISMATCH": "the message does not fit the site's model or labels",
    "E-DIVERGED": "training gave a number that is not finite",
    "E-WITHHELD": "a check of the site's own keeps its update back",
    "E-CONSENT": "the site does not consent to send what was asked for",
    "E-METHOD": "the site does not take part in this method",
    "E-HOURS": "the site does not take part at this time of day",
    "E-UPLOAD": "the reply is larger than the site lets out in a round",
    "E-LIMITS": "the site's own limits cannot be read",
    "E-EGRESS": "the reply held something that may not leave the site",
    "E-MEMORY": "the site ran out of memory",
    "E-INTERNAL": "the site's code failed",
}
"""Everything a site says about a failure. The story is in the site's own log."""

REFUSAL_PAYLOAD = Payload(purpose="a neutral code in place of a reply", texts={REFUSAL: frozenset({"code"})})
"""The one thing a site may always send: that it could not do what was asked."""


def answer_payload(numbers: Mapping[str, str]) -> Payload:
    """A site's answer to a method's own question: nothing but the numbers that the method declares."""
    return Payload(
        purpose=f"answer to the method's question: {', '.join(sorted(numbers))}",
        numbers={METRICS: {"server_round": "count"}, EXTRA: dict(numbers)},
    )


def view_of(split: str, view: str) -> str:
    """The name under which a split's scores travel when it is seen in some way: ``val@image``; ``val`` for "".

    >>> view_of("val", "image"), view_of("val", "")
    ('val@image', 'val')
    """
    return f"{split}@{view}" if view else split


def split_of(name: str) -> str:
    """The split behind a name of `view_of`."""
    return name.partition("@")[0]


def views_of(split: str, views: Iterable[str]) -> list[str]:
    """Every name under which a split is scored; none where no split is."""
    return [view_of(split, view) for view in ("", *views)] if split else []


def evaluation_payload(
    splits: Iterable[str], num_labels: int, bins: int, task: str, extra: Mapping[str, str] | None = None
) -> Payload:
    """Per-class score histograms, a confusion matrix for one-label tasks, and the loss as a sum with its count.

    ``extra``: a method's own numbers, key -> kind.
    """
    tensor_specs = {name: TensorSpec(shape, "int64") for name, shape in ScoreHistogram.shapes(num_labels, bins).items()}
    if task == "multiclass":
        tensor_specs["confusion"] = TensorSpec((num_labels, num_labels), "int64")
    splits = tuple(splits)
    named = sorted({split_of(split) for split in splits})
    return Payload(
        purpose=f"how the global model does on this site's {' and '.join(named)} samples, as counts",
        arrays={SCORES + split: tensor_specs for split in splits},
        numbers={
            METRICS: {"server_round": "count"},
            **{f"loss.{split}": {"num_examples": "count", "loss_sum": "real"} for split in splits},
            **({f"{EXTRA}.{split}": dict(extra) for split in splits} if extra else {}),
        },
    )


TRAIN_NUMBERS = {"server_round": "count", "num_examples": "count", "loss_sum": "real", "num_steps": "count"}


def train_payload(
    specs: Mapping[str, Mapping[str, TensorSpec]],
    evaluation: Payload | None = None,
    extra: Mapping[str, str] | None = None,
) -> Payload:
    """The change of every trained module, with the number of examples and the training loss as a sum.

    ``evaluation``: the declaration of an evaluation that travels in the same reply. ``extra``: a method's own
    numbers, key -> kind.
    """
    arrays = {MODULE + module: dict(tensor_specs) for module, tensor_specs in specs.items()}
    numbers = {METRICS: TRAIN_NUMBERS, **({EXTRA: dict(extra)} if extra else {})}
    purpose = f"trained change of {', '.join(sorted(specs)) or 'no module'}"
    if evaluation is not None:
        arrays |= evaluation.arrays
        numbers = {**evaluation.numbers, **numbers}
        purpose += f"; {evaluation.purpose}" if evaluation.arrays else ""
    return Payload(purpose=purpose, arrays=arrays, numbers=numbers)
