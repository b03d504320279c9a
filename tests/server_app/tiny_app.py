"""Throw-away Flower apps for tests of the runtime: real FABs, real processes, and no learning at all."""

from pathlib import Path
from textwrap import dedent

PACKAGES = ("server_app", "client_app")

PYPROJECT = """
[project]
name = "tiny-app"
version = "0.1.0"
description = "Asks every site once"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["flwr[simulation]>=1.42.0,<1.43"]

{build_system}

[tool.flwr.app]
publisher = "tests"
fab-include = [{include}]

[tool.flwr.app.components]
serverapp = "server_app.app:app"
clientapp = "client_app.app:app"

[tool.flwr.app.config]
{config}
"""

# Waits for all sites, asks each one `query.hello` and leaves what they say in `answers`.
SERVER = """
import json, sys, time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    until = time.monotonic() + 60
    while len(nodes := list(grid.get_node_ids())) < config["sites"] and time.monotonic() < until:
        time.sleep(0.2)
    content = RecordDict({"config": ConfigRecord({})})
    messages = [Message(content, dst_node_id=node, message_type="query.hello", ttl=120.0) for node in nodes]
    replies = [m for m in grid.send_and_receive(messages, timeout=120.0) if not m.has_error()]
    answers = sorted((dict(m.content["answer"]) for m in replies), key=lambda answer: answer["site"])
    print(f"asked {len(nodes)} sites, {len(answers)} answered", flush=True)
"""

CLIENT = """
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    print("a site speaks", flush=True)
    answer = {"site": int(context.node_config["partition-id"])}
"""

REPLY = """
    return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)
"""


def write_app(
    folder: Path,
    *,
    server: str = "",
    client: str = "",
    config: dict[str, str] | None = None,
    build_system: str = "",
    more_packages: tuple[str, ...] = (),
) -> Path:
    """A Flower app in `folder`; `server` and `client` are statements that are appended to the two handlers' bodies.

    `config` holds further keys of the run config as TOML text. The server's statements see `grid`, `config` and
    `answers` (one dict a site), the client's may add to `answer`.
    """
    (folder / "server_app").mkdir(parents=True)
    (folder / "client_app").mkdir()
    for package in PACKAGES:
        (folder / package / "__init__.py").write_text("")
    (folder / "server_app" / "app.py").write_text(SERVER + _indented(server))
    (folder / "client_app" / "app.py").write_text(CLIENT + _indented(client) + REPLY)
    include = ", ".join(f'"{package}/**/*.py"' for package in (*PACKAGES, *more_packages))
    lines = "\n".join(f"{key} = {value}" for key, value in {"sites": "2", **(config or {})}.items())
    (folder / "pyproject.toml").write_text(PYPROJECT.format(include=include, config=lines, build_system=build_system))
    return folder


def _indented(statements: str) -> str:
    return "".join(f"    {line}\n" for line in dedent(statements).strip().splitlines())
