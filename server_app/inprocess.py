"""The in-process engine: the same ServerApp code, strategies and ClientApp in one process behind Flower's Grid.

For tests, small sweeps and benchmarks. It starts no process and moves no bytes; Ray and the SuperLink are the engines
for real runs. A message is executed when its reply is pulled, so one reply is in memory at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from client_app.app import app as client_app
from client_app.site import site_names
from federation import registry
from federation.settings import Settings
from server_app.runner import Outcome
from server_app.runner import run as run_on

Fault = Callable[[Message, Callable[[], Message]], Message | None]
"""A fault of one node: gets the message and the honest answer as a function; gives a reply, None for silence, or
raises (``SystemExit`` stands for a killed process)."""


class InProcessGrid(Grid):
    """Executes every message in the calling thread, in the order of pulling.

    Each node keeps its Context over the run, records are copied at the border, and an exception becomes Flower's error
    reply, as in both of Flower's runtimes. ``faults`` maps a node's index to what goes wrong there.
    """

    def __init__(
        self,
        node_configs: Sequence[Mapping[str, Any]],
        run_config: Mapping[str, Any],
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        self._run = Run.create_empty(run_id=1)
        self._faults = dict(faults or {})
        self._waiting: dict[str, Message] = {}
        self._sent = 0
        ids = random.Random(len(node_configs))
        self._nodes = [ids.getrandbits(63) for _ in node_configs]
        self._contexts = {
            node_id: Context(1, node_id, dict(config), RecordDict(), dict(run_config))
            for node_id, config in zip(self._nodes, node_configs, strict=True)
        }
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self._nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node_id) for node_id in self._nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = f"m{self._sent}"
            self._waiting[message.metadata.message_id] = Message(copied(message.content), metadata=message.metadata)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = (self._execute(self._waiting.pop(i)) for i in message_ids if i in self._waiting)
        return [reply for reply in replies if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _execute(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id

        def answer() -> Message:
            return client_app(message, self._contexts[node_id])

        try:
            fault = self._faults.get(self._nodes.index(node_id))
            reply = answer() if fault is None else fault(message, answer)
        except SystemExit:
            return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "the process ended"), reply_to=message)
        except Exception as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"), reply_to=message)
        if reply is not None and reply.has_content():
            reply.content = copied(reply.content)
        return reply


def copied(records: RecordDict) -> RecordDict:
    """New containers around the same immutable array bytes, so that neither side sees the other's objects."""
    return RecordDict(
        {
            name: ArrayRecord(dict(record))
            if isinstance(record, ArrayRecord)
            else type(record)({key: list(value) if isinstance(value, list) else value for key, value in record.items()})
            for name, record in records.items()
        }
    )


def run(run_config: Mapping[str, Any], *, faults: Mapping[str, Fault] | None = None) -> Outcome:
    """A whole federation in this process; ``run_config`` as for `flwr run`, absent keys take their defaults.

    ``faults`` maps a site's name to what goes wrong there. Raises SettingsError, DataError, and what ends a run.
    """
    settings = Settings.from_run_config(run_config)
    registry.prepare_simulation(settings.method, settings)
    names = site_names(settings)
    node_configs = [{"partition-id": index, "num-partitions": len(names)} for index in range(len(names))]
    by_node = {names.index(site): fault for site, fault in (faults or {}).items()}
    return run_on(settings, InProcessGrid(node_configs, settings.flat(), by_node))
