"""A deployed site starts a process for every message, so a message imports what it needs and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import json, sys
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
before = set(sys.modules)
from client_app.app import app
declared = set(sys.modules) - before
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
action, node_config, run_config = sys.argv[1], *map(json.loads, sys.argv[2:])
config = {"server_round": 1, "experiment": "exp-1", "last_accepted": 0, "evaluate": ""}
content = RecordDict({"config": ConfigRecord(config)})
if action == "train":
    from federation import wire
    from federation.settings import Settings
    from client_app.training import network_for
    network = network_for(("cat", "dog"), Settings.from_run_config(run_config))
    content["module.model"] = wire.encode(network.state_dict())
message = Message(content, 1, action, ttl=60.0, group_id="1")
reply = app(message, Context(1, 1, node_config, RecordDict(), run_config))
print(json.dumps({"records": sorted(reply.content), "declared": sorted(declared), "loaded": sorted(sys.modules)}))
"""
NEVER = {"sklearn", "torchvision", "timm", "open_clip", "transformers", "ot", "matplotlib", "tensorboard", "ray"}


@pytest.fixture
def answered(hospital):
    """``answered(action)``: what a fresh process answered, and what it had imported by then."""

    def send(action):
        run_config = {**hospital.run_config, "data.partition": "own"}
        arguments = [action, json.dumps(hospital.node_config), json.dumps(run_config)]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return send


@pytest.mark.parametrize(("action", "record"), [("query.profile", "card"), ("train", "module.model")])
def test_the_plain_method_needs_neither_image_models_nor_language_models_nor_a_plotter(answered, action, record):
    found = answered(action)
    assert record in found["records"]
    loaded = {name.partition(".")[0] for name in found["loaded"]}
    assert {"torch", "datasets", "pandas"} <= loaded, "the child must have done the work"
    assert not loaded & NEVER
    # torch brings its compiler along with the first step of an optimiser; a message without one must not pay for it
    assert ("torch._dynamo" in found["loaded"]) is (action == "train")


def test_the_app_itself_imports_nothing_heavy(answered):
    """What cannot be imported becomes a code only if it is imported inside the handler."""
    declared = {name.partition(".")[0] for name in answered("query.profile")["declared"]}
    assert declared <= {"client_app", *sys.stdlib_module_names}
