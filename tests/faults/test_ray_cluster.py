"""`compare --engine ray` on a cluster of two Ray nodes: both work, and the models are those of one process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_app.processes import ProcessFamily
from server_app.superlink import command, environment, free_port
from tests.faults.drills import run_json
from tests.faults.ray_drills import ROOT

pytestmark = pytest.mark.slow

PLAN = """
title = "two rows"
seeds = [1]
metrics = ["macro_auroc"]
[base]
federation.rounds = 1
evaluation.every = 0
reporting.tensorboard = false
training.threads = 1
[settings.digits]
data.root = "digits"
data.num_sites = 3
[rows.fedavg]
method = "fedavg"
[rows.fedprox]
method = "fedprox"
"""
WHO_WORKED = """
import json, sys, ray
from ray._private import state  # the public listing needs Ray's dashboard
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
actors = [actor for actor in state.actors().values() if actor["ActorClassName"] == "ClientAppActor"]
print(json.dumps([len(ray.nodes()), len({actor["Address"]["NodeID"] for actor in actors})]))
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Two Ray nodes of one core each on loopback; gives the address."""
    address = f"127.0.0.1:{free_port()}"
    head = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard", "false", "--temp-dir", str(folder)]
    running: list[ProcessFamily] = []
    try:
        for where in (head, ["--address", address]):
            running.append(ray_node(where, folder.parent))
            wait_until_listed(address, len(running), folder.parent)
        yield address
    finally:
        for node in reversed(running):
            assert not node.stop()


def ray_node(where: list[str], home: Path) -> ProcessFamily:
    """`ray start --block` in a session of its own."""
    arguments = ["start", *where, "--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--block"]
    with (home / "ray.log").open("ab") as log:
        process = subprocess.Popen(
            [command("ray"), *arguments],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return ProcessFamily(process)


def wait_until_listed(address: str, count: int, home: Path) -> None:
    deadline = time.monotonic() + 120
    while who_worked(address, home)[0] != count:
        assert time.monotonic() < deadline, (home / "ray.log").read_text()
        time.sleep(1)


def who_worked(address: str, home: Path) -> tuple[int, int]:
    """How many nodes the cluster has, and on how many of them sites were simulated."""
    done = subprocess.run(
        [sys.executable, "-c", WHO_WORKED, address], env=environment(home), capture_output=True, text=True, timeout=120
    )
    return tuple(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else (0, 0)


def models(plan: Path, folder: Path, *arguments: str, **changes: str) -> dict[str, str]:
    """Runs a plan by its command; SHA-256 of the model by method."""
    done = subprocess.run(
        [sys.executable, "-m", "server_app.compare", str(plan), "--runs-dir", str(folder), "--jobs", "1", *arguments],
        cwd=ROOT,
        env=environment(folder.parent, changes),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    runs = [run_json(path.parent) for path in folder.glob("*/run.json")]
    return {run["method"]: run["model_sha256"] for run in runs}


def test_a_plan_on_two_ray_nodes_gives_the_models_of_one_process(tmp_path, tmp_path_factory):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN, encoding="utf-8")
    short = tmp_path_factory.mktemp("ray")  # Ray's sockets lie there, and their paths must be short
    with cluster(short / "r") as address:
        on_ray = models(plan, tmp_path / "ray", "--engine", "ray", RAY_ADDRESS=address)
        assert who_worked(address, tmp_path) == (2, 2)
    assert on_ray == models(plan, tmp_path / "alone")
    assert sorted(on_ray) == ["fedavg", "fedprox"]
