"""Aggregation: ten ResNet-18 updates folded into a mean, decoding and update gate included."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

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
    threads = f"{SERVER_THREADS} thread, as the server runs"
    folded = "10 x 45 MB updates, decoded, gated, averaged"
    return [
        Row(folded, "GB/s", ours, "flwr aggregate_arrayrecords", peer, ">= 6", threads),
        Row("time that the gate adds to decoding and averaging", "%", added, target="<= 15", note=threads),
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


def _fold(replies: list[RecordDict], expected: gate.Expected) -> dict:
    mean = StreamingMean()
    for site, content in enumerate(replies):
        reply, reason = gate.inspect(content, expected)
        assert reply is not None, reason
        mean.add(str(site), reply.modules["model"], reply.num_examples)
    return mean.result()


def _fold_ungated(replies: list[RecordDict]) -> dict:
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
