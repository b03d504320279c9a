"""A Flower app that asks every site and does nothing else: what Flower and Ray cost by themselves.

``exchanges`` times, once ``nodes`` sites are there; the seconds of each go to the file ``out``, where one is named.
"""

from __future__ import annotations

from pathlib import Path

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

[tool.flwr.app.config]
exchanges = 1
nodes = 1
out = ""
""",
    "empty_server/__init__.py": "",
    "empty_server/app.py": """
import json
import time
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, seconds = context.run_config, []
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.2)
    for _ in range(config["exchanges"]):
        started = time.perf_counter()
        content = RecordDict({"config": ConfigRecord({})})
        messages = [Message(content, dst_node_id=node, message_type="query.hello") for node in grid.get_node_ids()]
        grid.send_and_receive(messages, timeout=600.0)
        seconds.append(time.perf_counter() - started)
    if config["out"]:
        Path(config["out"]).write_text(json.dumps(seconds))
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
""",
}


def write_app(folder: Path) -> Path:
    """Writes the app into a folder and returns it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
    return folder
