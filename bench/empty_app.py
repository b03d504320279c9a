"""A Flower app that asks every site and does nothing else: what Flower and Ray cost by themselves.

Its client answers ``query.hello`` at once and ``train`` after one step of plain PyTorch. The same server can ask the
real app for its site cards (`write_card_app`).
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

from federation import wire

FILES = {
    "pyproject.toml": """
[project]
name = "empty-app"
version = "0.1.0"
description = "Asks every site"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["flwr[simulation]>=1.42.0,<1.43"]

[tool.flwr.app]
publisher = "bench"
fab-include = ["empty_server/*.py", "empty_client/*.py"]

[tool.flwr.app.components]
serverapp = "empty_server.app:app"
clientapp = "empty_client.app:app"
""",
    "empty_server/__init__.py": "",
    "empty_server/app.py": """
import json
import time
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from empty_server.plan import ACTION, ANSWER, EXCHANGES, NODES, OUT

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    seconds = []
    while len(list(grid.get_node_ids())) < NODES:
        time.sleep(0.2)
    for _ in range(EXCHANGES):
        started = time.perf_counter()
        content = RecordDict({"config": ConfigRecord({"server_round": 0, "experiment": "bench"})})
        messages = [Message(content, node, ACTION, group_id="0") for node in grid.get_node_ids()]
        waiting, replies = list(grid.push_messages(messages)), []
        while waiting:  # Flower's send_and_receive looks every three seconds only
            time.sleep(0.1)
            found = list(grid.pull_messages(waiting))
            answered = {reply.metadata.reply_to_message_id for reply in found}
            waiting, replies = [name for name in waiting if name not in answered], replies + found
        seconds.append(time.perf_counter() - started)
        if len(replies) != len(messages) or not all(ANSWER in reply.content for reply in replies):
            raise RuntimeError(f"expected a record {ANSWER} from each of {len(messages)} sites")
    if OUT:
        Path(OUT).write_text(json.dumps(seconds))
""",
    "empty_client/__init__.py": "",
    "empty_client/app.py": """
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return Message(RecordDict({"answer": ConfigRecord({})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    network = torch.nn.Linear(64, 24)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.ones(8, 64)).sum().backward()
    optimiser.step()
    return hello(message, context)
""",
}


def write_app(
    folder: Path, action: str = "query.hello", answer: str = "answer", exchanges: int = 1, nodes: int = 1, out: str = ""
) -> Path:
    """Writes the app into a folder and returns it.

    Once ``nodes`` sites are there it asks all of them ``exchanges`` times; every reply must have the record ``answer``.
    The seconds of each go to the file ``out``, where one is named.
    """
    plan = {"ACTION": action, "ANSWER": answer, "EXCHANGES": exchanges, "NODES": nodes, "OUT": out}
    lines = "".join(f"{name} = {value!r}\n" for name, value in plan.items())
    for name, text in {**FILES, "empty_server/plan.py": lines}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
    return folder


def write_card_app(folder: Path, app: Path, **plan: Any) -> Path:
    """Writes ``app``, this project, with the empty app's server in place of its own, and returns the folder."""
    write_app(folder, wire.PROFILE, wire.CARD, **plan)
    text = (app / "pyproject.toml").read_text(encoding="utf-8")
    for pattern in tomllib.loads(text)["tool"]["flwr"]["app"]["fab-include"]:
        for source in app.glob(pattern):
            target = folder / source.relative_to(app)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    text = text.replace("fab-include = [", 'fab-include = ["empty_server/*.py",', 1)
    text = text.replace('"server_app.app:app"', '"empty_server.app:app"', 1)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder
