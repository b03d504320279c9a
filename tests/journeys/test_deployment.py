"""The app as hospitals run it: one SuperLink, one SuperNode a hospital with its own data, on loopback without TLS.

The same settings and data give the same model as in one process, and what a failing hospital knows stays there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.deploy import supernode
from federation.settings import Settings
from server_app import runner
from server_app.inprocess import InProcessGrid
from server_app.processes import ProcessFamily
from server_app.superlink import FlowerCli, SuperLink

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PLANTED = "PATIENT-Jane-Doe"


@pytest.fixture
def hospitals(tmp_path, write_hospital, ward):
    """Node configs of three hospitals; the manifest of the last names an image that is not there, after a patient."""
    configs = []
    for name in ("north", "south", "west"):
        root = write_hospital(tmp_path / "data" / name, ward(name, train=10, val=4, test=4))
        configs.append({"site": name, "data-root": str(root), "state-dir": str(tmp_path / "state" / name)})
    broken = tmp_path / "data" / "west" / "manifest.csv"
    broken.write_text(broken.read_text().replace("images/3.png", f"images/{PLANTED}.png"))
    return configs


@pytest.fixture
def config(tmp_path):
    return {
        "data.partition": "own",
        "data.image_size": 8,
        "model.width": 4,
        "evaluation.bins": 256,
        "federation.rounds": 2,
        "federation.expected_sites": 3,
        "federation.wait_s": 60.0,
        "federation.timeout_s": 120.0,
        "training.device": "cpu",
        "reporting.tensorboard": False,
        "reporting.runs_dir": str(tmp_path / "server"),
    }


def test_hospitals_train_the_same_model_as_one_process_and_keep_their_secrets(tmp_path, hospitals, config):
    run = deployed(tmp_path, hospitals, config)
    assert [site["site"] for site in run["sites"]] == ["north", "south"]
    assert len(run["outstanding"]) == 1 and run["outstanding"][0]["reason"].startswith("E-DATA")

    for place in (tmp_path / "server", tmp_path / "link"):
        told = [path for path in place.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]
        assert told == [], "the server learnt what the hospital's error said"
    own_log = next((tmp_path / "state" / "west").glob("*/site.log")).read_text()
    assert PLANTED in own_log
    assert in_process(tmp_path, hospitals, config).model_sha256 == run["model_sha256"]


def test_a_secure_sum_of_hospitals_is_that_of_one_process(tmp_path, hospitals, config):
    """Four exchanges a round over real SuperNodes; the sum is of whole numbers, so not a bit differs."""
    manifest = tmp_path / "data" / "west" / "manifest.csv"
    manifest.write_text(manifest.read_text().replace(f"images/{PLANTED}.png", "images/3.png"))
    config |= {"privacy.secure_sum": True, "federation.rounds": 1, "federation.min_sites": 3}
    run = deployed(tmp_path, hospitals, config)
    assert [site["site"] for site in run["sites"]] == ["north", "south", "west"]
    assert in_process(tmp_path, hospitals, config).model_sha256 == run["model_sha256"]


def deployed(tmp_path, hospitals, config):
    """``run.json`` of a run over a SuperLink and one SuperNode a hospital; all processes are stopped."""
    config_file = tmp_path / "run.toml"
    config_file.write_text("".join(f'"{key}" = {json.dumps(value)}\n' for key, value in config.items()))
    nodes: list[ProcessFamily] = []
    with SuperLink(tmp_path / "link", "--insecure") as link:
        try:
            nodes += [supernode(tmp_path / f"node-{node['site']}", link.address, node) for node in hospitals]
            cli = FlowerCli(tmp_path, link.address)
            run_id = cli.submit(ROOT, config_file)
            deadline = time.monotonic() + 400
            while not (status := cli.status(run_id)).is_finished:
                assert time.monotonic() < deadline, link.log_tail()
                time.sleep(2)
        finally:
            left = [pid for node in nodes for pid in node.stop()]
    assert left == []
    assert status.is_completed, status.details
    return json.loads(next((tmp_path / "server").glob("*/run.json")).read_text())


def in_process(tmp_path, hospitals, config):
    """The same hospitals and settings in this process, in folders of their own."""
    settings = Settings.from_run_config({**config, "reporting.runs_dir": str(tmp_path / "again")})
    again = [{**node, "state-dir": str(tmp_path / "state-again" / node["site"])} for node in hospitals]
    return runner.run(settings, InProcessGrid(again, settings.flat()))
