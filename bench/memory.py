"""Server memory: peak of a run of two rounds while 5 and 50 sites of 45 MB answer, above the idle process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from bench.rows import Row
from client_app.training import on_meta
from federation import wire
from federation.settings import Settings

MODEL_MB = 44.8
LABELS = tuple(f"finding-{index:02d}" for index in range(14))
REPEATS = 3


def measure() -> list[Row]:
    """Peak resident memory above the process with everything imported, in models of 45 MB; ResNet-18, FedAvg."""
    rows = []
    for sites in (5, 50):
        command = [sys.executable, "-m", "bench.memory", str(sites)]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(REPEATS)]
        models = [json.loads(run.stdout.strip().splitlines()[-1]) / MODEL_MB for run in runs]
        note = "the state, the running mean and one reply are three"
        rows.append(Row(f"server's peak, {sites} sites", "models", models, target="<= 3, flat", note=note))
    return rows


class AnsweringGrid(Grid):
    """A Grid whose sites cost nothing: each reply is made of fresh bytes when it is pulled, as after a download."""

    def __init__(self, sites: int, settings: Settings) -> None:
        self._ids = list(range(1, sites + 1))
        self._specs = {"model": wire.spec_of(on_meta(LABELS, settings).state_dict())}
        self._update = wire.encode(
            {name: np.zeros(spec.shape, spec.dtype) for name, spec in self._specs["model"].items()}
        )
        self._waiting: dict[str, tuple[Message, int]] = {}
        self._run = Run.create_empty(run_id=1)
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return self._ids

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node_id) for node_id in self._ids]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            key = f"m{len(self._waiting)}-{message.metadata.dst_node_id}-{message.metadata.group_id}"
            message.metadata.__dict__["_message_id"] = key
            server_round = int(message.content[wire.CONFIG]["server_round"])
            self._waiting[key] = (Message(RecordDict(), metadata=message.metadata), server_round)
            ids.append(key)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [Message(self._content(*self._waiting[key]), reply_to=self._waiting.pop(key)[0]) for key in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _content(self, message: Message, server_round: int) -> RecordDict:
        if message.metadata.message_type == wire.PROFILE:
            return self._card(message.metadata.dst_node_id)
        numbers = {"server_round": server_round, "num_examples": 100, "loss_sum": 1.0, "num_steps": 4}
        fresh = {name: Array(a.dtype, a.shape, a.stype, bytes(memoryview(a.data))) for name, a in self._update.items()}
        return RecordDict({wire.MODULE + "model": ArrayRecord(fresh), wire.METRICS: MetricRecord(numbers)})

    def _card(self, node_id: int) -> RecordDict:
        card = {
            "site": f"site-{node_id:02d}",
            "labels": list(LABELS),
            "task": "multilabel",
            "schema": wire.schema_sha256(LABELS, "multilabel", self._specs),
            "modalities": ["image"],
            "data_sha256": "0" * 64,
        }
        counts = [50] * len(LABELS)
        numbers = {"num_train": 100, "num_val": 0, "num_test": 0, "positives": counts, "negatives": counts}
        return RecordDict({wire.CARD: ConfigRecord(card), wire.METRICS: MetricRecord(numbers)})


def resident_mb() -> float:
    """Resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak_mb() -> float:
    """Largest resident memory of this process so far, in MB.

    Not getrusage's ru_maxrss, which a child takes over from the process that started it.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def main(sites: int) -> None:
    """Runs the real ServerApp code against the costless sites and prints the peak above its start, in MB."""
    from server_app import report  # noqa: F401 - its import is not the run's
    from server_app.runner import run

    with tempfile.TemporaryDirectory() as folder:
        config = {"federation.rounds": 2, "reporting.runs_dir": folder, "reporting.tensorboard": False}
        small = Settings.from_run_config(config)
        run(small, AnsweringGrid(2, small))  # what is imported and allocated once is not the model's
        settings = Settings.from_run_config(
            {**config, "model.name": "resnet18", "data.image_size": 224, "data.channels": 3}
        )
        grid = AnsweringGrid(sites, settings)
        before = resident_mb()
        run(settings, grid)
    print(json.dumps(peak_mb() - before))


if __name__ == "__main__":
    main(int(sys.argv[1]))
