"""Aggregation: ten ResNet-18 updates folded into a mean, decoding and update gate included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from bench.rows import Row, alternate, seconds
from federation import wire
from models.networks import resnet18
from server_app.runner import SERVER_THREADS
from strategies import gate
from strategies.aggregation import StreamingMean

SITES = 10
REPEATS = 15


def measure() -> list[Row]:
    """GB/s of update bytes, ours beside flwr's own function; then the share of the gate, with and without it."""
    torch.set_num_threads(SERVER_THREADS)
    replies, expected = _replies()
    size_gb = sum(wire.size_bytes(reply) for reply in replies) / 1e9
    ours, peer = alternate(
        lambda: size_gb / seconds(lambda: _fold(replies, expected)),
        lambda: size_gb / seconds(lambda: _flower(replies)),
        REPEATS,
    )
    gated, bare = alternate(
        lambda: seconds(lambda: _fold(replies, expected)), lambda: seconds(lambda: _fold_ungated(replies)), REPEATS
    )
    added = [100 * (with_gate / without - 1) for with_gate, without in zip(gated, bare, strict=True)]
    packed = [_packed(reply) for reply in replies]
    whole_way, gateless = alternate(
        lambda: seconds(lambda: _fold(map(_unpacked, packed), expected)),
        lambda: seconds(lambda: _fold_ungated(map(_unpacked, packed))),
        REPEATS,
    )
    share = [100 * (with_gate / without - 1) for with_gate, without in zip(whole_way, gateless, strict=True)]
    threads = f"{SERVER_THREADS} thread, as the server runs"
    folded = "10 x 45 MB updates, decoded, gated, averaged"
    return [
        Row(folded, "GB/s", ours, "flwr aggregate_arrayrecords", peer, ">= 6", threads),
        Row("time that the gate adds to decoding and averaging", "%", added, target="<= 15", note=threads),
        Row(
            "the same from Flower's packed objects on", "%", share, target="<= 15", note="as a SuperLink hands them out"
        ),
    ]


def _replies() -> tuple[list[RecordDict], gate.Expected]:
    state = resnet18(channels=3, num_labels=14).state_dict()
    replies = []
    for site in range(SITES):
        generator = torch.Generator().manual_seed(site)
        update = {
            name: torch.randn(value.shape, generator=generator) * 0.01 if value.is_floating_point() else value
            for name, value in state.items()
        }
        numbers = {"server_round": 1, "num_examples": 100 + site, "loss_sum": 1.0, "num_steps": 4}
        replies.append(RecordDict({"module.model": wire.encode(update), "metrics": MetricRecord(numbers)}))
    payload = wire.train_payload({"model": wire.spec_of(state)})
    return replies, gate.Expected("site", 1, payload, max_examples=1000, reference_norm=100.0)


def _packed(reply: RecordDict) -> tuple[str, dict[str, bytes]]:
    """A reply in the form in which it travels: Flower's objects by their hash."""
    return reply.object_id, {key: value.deflate() for key, value in get_all_nested_objects(reply).items()}


def _unpacked(packed: tuple[str, dict[str, bytes]]) -> RecordDict:
    root, objects = packed
    reply = inflate_object_from_contents(root, dict(objects))
    assert isinstance(reply, RecordDict)
    return reply


def _fold(replies: Iterable[RecordDict], expected: gate.Expected) -> dict:
    mean = StreamingMean()
    for site, content in enumerate(replies):
        reply, reason = gate.inspect(content, expected)
        assert reply is not None, reason
        mean.add(str(site), reply.modules["model"], reply.num_examples)
    return mean.result()


def _fold_ungated(replies: Iterable[RecordDict]) -> dict:
    mean = StreamingMean()
    for site, content in enumerate(replies):
        mean.add(str(site), wire.decode(content["module.model"]), content["metrics"]["num_examples"])
    return mean.result()


def _flower(replies: list[RecordDict]) -> ArrayRecord:
    return aggregate_arrayrecords(
        [
            RecordDict({"a": content["module.model"], "m": MetricRecord({"n": content["metrics"]["num_examples"]})})
            for content in replies
        ],
        "n",
    )
