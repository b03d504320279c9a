"""A made-up patient, planted wherever a hospital may hold a name, reaches the server in no byte that it gets.

Three hospitals with data of their own; the first one's world is full of her. `test_handler` plants her in exceptions
of every kind, one message at a time; here whole runs are looked at: what comes back, the run folder, every log.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
from flwr.common.serde import message_to_proto
from PIL import Image

import client_app.fedavg
from federation.settings import Settings
from server_app import runner
from server_app.inprocess import InProcessGrid
from strategies.discovery import QuorumError
from tests.datasets.test_dicom import dicom
from tests.faults.ray_drills import copy_app

CANARY = "Zubrowka-Quintilla"
FORMS = (CANARY, CANARY.lower(), CANARY.upper(), CANARY.replace("-", "^"), CANARY.split("-")[0])
"""The name as a CSV, a log, DICOM (a caret between the parts) or a shortened message would write it."""
NAMES = ("north", "south", "west")
HONEST = client_app.fedavg.train


def holds_canary(data: bytes) -> bool:
    return any(form.encode() in data or form.encode("utf-16-le") in data for form in FORMS)


def write_rows(root: Path, site: str, *, canary: bool, broken: str = "") -> None:
    """Twelve samples; the canary's have her name in every column that a hospital might put it in."""
    (root / "images").mkdir(parents=True)
    with (root / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["image", "patient", "study", "site", "split", "report", "physician", "label:cat", "label:dog"])
        for number in range(12):
            name = f"{CANARY}-{number}" if canary else f"p{number}"
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            image = f"images/{name}.dcm" if canary and number % 2 else f"images/{name}.png"
            if image.endswith(".dcm"):
                tags = {"PatientName": CANARY.replace("-", "^"), "PatientID": CANARY, "InstitutionName": CANARY}
                data = dicom(pixels.astype(np.uint16), **tags)
                (root / image).write_bytes(data[:400] if broken == "dicom" and number == 3 else data)
            else:
                Image.fromarray(pixels).save(root / image)
            split = ("train", "train", "val", "test")[number % 4]
            report = f"{name} was seen again, lungs clear" if canary else ""
            cat = CANARY if broken == "cell" and number == 4 else number % 2
            table.writerow([image, name, name, site, split, report, CANARY if canary else "", cat, (number // 2) % 2])
    if broken == "missing":
        (root / f"images/{CANARY}-4.png").unlink()


@pytest.fixture
def world(tmp_path):
    """``world(broken)``: node configs of three hospitals, of which the first is the canary's, path included."""

    def make(broken=""):
        configs = []
        for index, name in enumerate(NAMES):
            canary = index == 0
            root = tmp_path / "hospitals" / (f"{CANARY}-pacs" if canary else name)
            write_rows(root, name, canary=canary, broken=broken if canary else "")
            configs.append({"site": name, "data-root": str(root), "state-dir": str(tmp_path / "state" / name)})
        configs[0]["note"] = f"ask {CANARY}"
        return configs

    return make


@pytest.fixture
def config(tmp_path):
    return {
        "data.partition": "own",
        "data.image_size": 8,
        "model.width": 4,
        "model.norm": "group",
        "evaluation.bins": 256,
        "evaluation.every": 0,
        "federation.expected_sites": 3,
        "federation.rounds": 1,
        "training.device": "cpu",
        "reporting.tensorboard": True,
        "reporting.runs_dir": str(tmp_path / "server"),
    }


@pytest.fixture
def run(world, config, tmp_path, caplog, capfd):
    """``run(broken, **changes)``: everything that the server got to see, and what the canary's hospital kept."""

    def go(broken="", *, node=(), **changes):
        seen: list[bytes] = []

        def spy(message, answer):
            reply = answer()
            seen.append(message_to_proto(reply).SerializeToString())
            return reply

        run_config = {**config, **{key.replace("__", "."): value for key, value in changes.items()}}
        nodes = world(broken)
        nodes[0].update(node)
        settings = Settings.from_run_config(run_config)
        caplog.set_level(logging.INFO)
        outcome = runner.run(settings, InProcessGrid(nodes, settings.flat(), dict.fromkeys(range(3), spy)))
        logging.shutdown()
        files = [path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file()]
        printed = capfd.readouterr()
        seen += [*files, printed.out.encode(), printed.err.encode(), caplog.text.encode()]
        own = next((tmp_path / "state" / NAMES[0]).glob("*/site.log"), None)
        return outcome, seen, own.read_text(encoding="utf-8") if own else ""

    return go


def sites_of(outcome):
    told = json.loads((outcome.run_dir / "run.json").read_text())
    return [site["site"] for site in told["sites"]], told["outstanding"]


def assert_unseen(seen):
    assert len(seen) > 10, "the run left nothing to look at"
    assert not [data[:200] for data in seen if holds_canary(data)]


def test_the_search_would_find_her():
    for text in (CANARY, f"x{CANARY.lower()}x", CANARY.replace("-", "^"), CANARY.split("-")[0]):
        assert holds_canary(text.encode()) and holds_canary(text.encode("utf-16-le"))
    assert not holds_canary(b"somebody else")


def test_paths_rows_reports_and_tags_of_sound_data_stay(run):
    """The whole way: opened, cached, trained, evaluated, reported."""
    outcome, seen, _ = run(evaluation__every=1, federation__rounds=2)
    assert sites_of(outcome)[0] == list(NAMES)
    assert_unseen(seen)


BROKEN_DATA = {
    "a label cell": "cell",
    "the path of a missing image": "missing",
    "the tags of a broken DICOM file": "dicom",
}


@pytest.mark.parametrize("name", BROKEN_DATA)
def test_what_broken_data_say_of_her_stays(run, name):
    outcome, seen, own = run(BROKEN_DATA[name])
    sites, outstanding = sites_of(outcome)
    assert sites == ["south", "west"] and outstanding[0]["reason"].startswith("E-DATA")
    assert holds_canary(own.encode()) and "Traceback" in own
    assert_unseen(seen)


def test_a_limit_with_her_name_in_it_stays(run):
    outcome, seen, own = run(node={"allowed_hours": f"when {CANARY} is there"})
    assert sites_of(outcome)[1][0]["reason"].startswith("E-LIMITS") and holds_canary(own.encode())
    assert_unseen(seen)


class Row(pydantic.BaseModel):
    """A method that reads rows by a model of its own."""

    age: int


def through_pydantic(*_):
    Row(age=f"{CANARY}, 71")  # type: ignore[arg-type]


def through_torch(site, modules, job):
    torch.nn.Linear(2, 2).load_state_dict({CANARY: torch.zeros(1)})


def through_a_chain(*_):
    try:
        raise KeyError(CANARY)
    except KeyError as error:
        print(traceback.format_exc())
        traceback.print_exc()
        raise RuntimeError(f"while reading {CANARY}") from error


def through_a_metric(*arguments):
    update = HONEST(*arguments)
    return replace(update, extra={CANARY: 1.0})


def through_a_module(*arguments):
    update = HONEST(*arguments)
    return replace(update, modules={**update.modules, CANARY: {"w": torch.zeros(1)}})


def through_a_tensor(*arguments):
    update = HONEST(*arguments)
    return replace(update, modules={"model": {**update.modules["model"], CANARY: torch.zeros(1)}})


def through_a_number(*arguments):
    return replace(HONEST(*arguments), loss_sum=CANARY)


FAILING = {
    "an error of pydantic": (through_pydantic, "E-INTERNAL"),
    "an error of torch": (through_torch, "E-INTERNAL"),
    "a printed traceback and a chain": (through_a_chain, "E-INTERNAL"),
    "the key of a metric": (through_a_metric, "E-EGRESS"),
    "the name of a module": (through_a_module, "E-EGRESS"),
    "the name of a tensor": (through_a_tensor, "E-EGRESS"),
    "the value of a metric": (through_a_number, "E-INTERNAL"),
}


def only_in_the_north(train):
    return lambda site, *rest: (train if site.name == NAMES[0] else HONEST)(site, *rest)


@pytest.mark.parametrize("name", FAILING)
def test_what_a_method_says_of_her_stays(run, monkeypatch, name):
    train, code = FAILING[name]
    monkeypatch.setattr(client_app.fedavg, "train", only_in_the_north(train))
    outcome, seen, own = run()
    lines = (outcome.run_dir / "metrics.jsonl").read_text().splitlines()
    refused = next(json.loads(line) for line in lines if '"round"' in line)["refused"]
    assert [entry["site"] for entry in refused] == ["north"] and refused[0]["reason"].startswith(code)
    assert f"{code} while answering train" in own and "Traceback" in own
    assert_unseen(seen)


def test_progress_lines_and_prints_of_a_training_that_works_stay(run, monkeypatch):
    def train(*arguments):
        for number in range(3):
            print(f"\r{CANARY} {number}/3", end="", file=sys.stderr)
        print("done with", CANARY)
        with redirect_stdout(io.StringIO()):
            return HONEST(*arguments)

    monkeypatch.setattr(client_app.fedavg, "train", only_in_the_north(train))
    outcome, seen, own = run()
    assert sites_of(outcome)[0] == list(NAMES)
    assert f"{CANARY} 2/3" in own and f"done with {CANARY}" in own
    assert_unseen(seen)


REJECTED = f"cat,{CANARY}"
"""Labels of a run config that no hospital has; what the server itself is told, its own files may hold."""


def test_a_value_of_the_run_config_that_a_site_rejects_is_not_sent_back(world, config):
    settings, replies = Settings.from_run_config({**config, "data.labels": REJECTED}), []

    def spy(message, answer):
        reply = answer()
        replies.append(message_to_proto(reply).SerializeToString())
        return reply

    with pytest.raises(QuorumError, match="E-DATA") as failed:
        runner.run(settings, InProcessGrid(world(), settings.flat(), dict.fromkeys(range(3), spy)))
    assert_rejected(replies, str(failed.value))


def assert_rejected(replies, said):
    assert len(replies) == 3 and all(b"E-DATA" in reply for reply in replies)
    assert not any(holds_canary(data) for data in (*replies, said.encode()))


PLANTED = """
import traceback
import uuid
from pathlib import Path

import pydantic
import torch
from flwr.common.serde import message_to_proto

from client_app import fedavg


class Row(pydantic.BaseModel):
    age: int


def answer(message, context, honest):
    if context.node_config["site"] == "south":
        fedavg.train = lambda *_: fails(context.node_config["note"])
    reply = honest(message, context)
    folder = Path(context.node_config["state-dir"]) / "replies"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / uuid.uuid4().hex).write_bytes(message_to_proto(reply).SerializeToString())
    return reply


def fails(name):
    try:
        Row(age=f"{name}, 71")
    except pydantic.ValidationError:
        traceback.print_exc()
    torch.nn.Linear(2, 2).load_state_dict({name: torch.zeros(1)})
"""
"""South's training fails over a name that only its node config has, since the server gets this app. Every site keeps
its replies: a SuperLink deletes them."""


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_deployed_she_is_in_no_file_of_the_server_either(world, config, tmp_path):
    """The same world over a SuperLink: its database, logs and bundles, the run folder, and what `flwr log` shows.

    North's data are broken, south's training fails. A second run names her in its config, for a site to reject.
    """
    from bench.deploy import supernode
    from server_app.superlink import FlowerCli, SuperLink

    app, nodes, running = copy_app(tmp_path / "app", PLANTED), world("cell"), []
    nodes[1]["note"] = CANARY
    short = {**config, "federation.wait_s": 240.0, "federation.timeout_s": 300.0, "federation.min_sites": 1}
    with SuperLink(tmp_path / "link", "--insecure") as link:
        try:
            running += [supernode(tmp_path / f"node-{node['site']}", link.address, node) for node in nodes]
            cli = FlowerCli(tmp_path, link.address)
            status, log = ended(cli, link, app, short)
            assert status.is_completed, status.details
            at_the_server = [log.encode(), *(data for place in ("server", "link") for data in kept(tmp_path / place))]
            before = replies(tmp_path)
            rejecting, _ = ended(cli, link, app, {**short, "data.labels": REJECTED})
        finally:
            left = [pid for node in running for pid in node.stop()]
    assert left == [] and rejecting.is_finished and not rejecting.is_completed
    for site, code in (("north", "E-DATA"), ("south", "E-INTERNAL while answering train")):
        own = "".join(log.read_text() for log in (tmp_path / "state" / site).glob("*/site.log"))  # one a run
        assert holds_canary(own.encode()) and code in own and "Traceback" in own
    assert_unseen(at_the_server)
    assert len(before) > 3 and not any(map(holds_canary, before.values()))
    assert_rejected([data for name, data in replies(tmp_path).items() if name not in before], str(rejecting.details))


def ended(cli, link, app, run_config):
    """A run of the app until it is over: its status, and what `flwr log` shows."""
    path = cli.folder / "run.toml"
    path.write_text("".join(f'"{key}" = {json.dumps(value)}\n' for key, value in run_config.items()))
    run_id, deadline = cli.submit(app, path), time.monotonic() + 600
    while not (status := cli.status(run_id)).is_finished:
        assert time.monotonic() < deadline, link.log_tail()
        time.sleep(2)
    return status, cli.call("log", run_id, "--show")


def kept(folder):
    return [file.read_bytes() for file in folder.rglob("*") if file.is_file()]


def replies(folder):
    """Every reply that a hospital has kept: path -> bytes."""
    return {path: path.read_bytes() for path in (folder / "state").glob("*/replies/*")}
