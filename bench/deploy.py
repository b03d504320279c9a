"""Deployment: an exchange of the app with SuperNodes beside the platform's own floor, and 45 MB beside one process.

Three SuperNodes on loopback without TLS or proxy. Every message starts a process at every node, so the floor is an
empty ClientApp that imports torch, and for a round one that takes a step with ``torch.optim.SGD``, which by itself
imports torch's compiler. Takes about five minutes on two quiet cores.
"""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.empty_app import write_app, write_card_app
from bench.rounds import round_seconds
from bench.rows import Row
from federation.settings import Settings
from server_app import runner
from server_app.inprocess import InProcessGrid
from server_app.processes import ProcessFamily
from server_app.simulate import ROOT
from server_app.superlink import FlowerCli, SuperLink, command, environment, free_port

SITES = ("east", "north", "west")
ROUNDS = 4
SAMPLES = 8
LIMIT_S = 600.0
SMALL = {"model.width": 4}
LARGE = {"model.name": "resnet18", "model.norm": "group"}


def measure() -> list[Row]:
    """Seconds of an exchange without training, of a round with 6 KB and with 45 MB, each beside its floor."""
    with tempfile.TemporaryDirectory() as place, federation(Path(place)) as (cli, nodes):
        folder = Path(place)
        plan = {"exchanges": ROUNDS, "nodes": len(SITES), "out": str(folder / "seconds.json")}
        floor = exchanges(cli, write_app(folder / "empty-app", **plan), folder)
        card = exchanges(
            cli, write_card_app(folder / "card-app", ROOT, **plan), folder, run_config(folder / "none", {})
        )
        step = exchanges(cli, write_app(folder / "step-app", "train", **plan), folder)
        small = deployed_rounds(cli, folder, "small", SMALL)
        large = deployed_rounds(cli, folder, "large", LARGE)
        small_inside, inside = (in_process(folder, nodes, name, what) for name, what in (("s", SMALL), ("l", LARGE)))
    sites = f"{len(SITES)} sites"
    return [
        Row(f"exchange of 1 KB (site cards), {sites}", "s", card, "empty Flower app", floor, "<= 1.2"),
        Row(f"round of a 6 KB model, {sites}", "s", small, "Flower app of one SGD step", step, "<= 1.2"),
        Row(
            f"round of a 6 KB model, {sites}", "s", small, "the same in one process", small_inside, "", "with training"
        ),
        Row(f"round of a 45 MB model, {sites}", "s", large, "the same in one process", inside, "", "with training"),
    ]


def run_config(runs_dir: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """FedAvg over hospitals' own data without evaluation between the rounds."""
    return {
        "data.partition": "own",
        "data.image_size": 8,
        "evaluation.every": 0,
        "federation.expected_sites": len(SITES),
        "federation.rounds": ROUNDS,
        "federation.timeout_s": LIMIT_S,
        "reporting.runs_dir": str(runs_dir),
        "reporting.tensorboard": False,
        "training.device": "cpu",
        **changes,
    }


@contextlib.contextmanager
def federation(folder: Path) -> Iterator[tuple[FlowerCli, list[dict[str, str]]]]:
    """A SuperLink with a SuperNode a site; gives its command line and the sites' node configs."""
    nodes = [node_config(folder, name) for name in SITES]
    running: list[ProcessFamily] = []
    with SuperLink(folder / "link", "--insecure") as link:
        try:
            running += [supernode(folder / f"node-{node['site']}", link.address, node) for node in nodes]
            yield FlowerCli(folder, link.address), nodes
        finally:
            for node in running:
                node.stop()


def node_config(folder: Path, name: str) -> dict[str, str]:
    """Writes a site's data, a few grey images with two labels, and returns its node config."""
    root = folder / "data" / name
    root.mkdir(parents=True)
    with (root / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "patient", "split", "label:odd", "label:large"])
        for number in range(2 * SAMPLES):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"{number}.png")
            split = "train" if number < SAMPLES else "test"
            rows.writerow([f"{number}.png", f"p{number}", split, number % 2, int(number % 4 > 1)])
    return {"site": name, "data-root": str(root), "state-dir": str(folder / "state" / name)}


def supernode(home: Path, address: str, node: Mapping[str, str]) -> ProcessFamily:
    """One SuperNode in a folder of its own."""
    home.mkdir()
    config = " ".join(f'{key}="{value}"' for key, value in node.items())
    arguments = ["--insecure", "--superlink", address, "--host", "127.0.0.1", "--port", str(free_port())]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [command("flower-supernode"), *arguments, "--node-config", config],
            cwd=home,
            env=environment(home, {"OMP_NUM_THREADS": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return ProcessFamily(process)


def exchanges(cli: FlowerCli, app: Path, folder: Path, config: Mapping[str, Any] | None = None) -> list[float]:
    """Seconds of every exchange of an app of `bench.empty_app` but the first, which fetches the app."""
    finish(cli, app, config or {}, folder)
    return json.loads((folder / "seconds.json").read_text())[1:]


def deployed_rounds(cli: FlowerCli, folder: Path, name: str, changes: Mapping[str, Any]) -> list[float]:
    """Seconds of every round but the first."""
    runs = folder / name
    finish(cli, ROOT, run_config(runs, changes), folder)
    return round_seconds(next(path for path in runs.iterdir() if path.is_dir()))


def in_process(folder: Path, nodes: list[dict[str, str]], name: str, changes: Mapping[str, Any]) -> list[float]:
    """Seconds of every round but the first, of the same hospitals in this process."""
    settings = Settings.from_run_config(run_config(folder / f"in-process-{name}", changes))
    return round_seconds(runner.run(settings, InProcessGrid(nodes, settings.flat())).run_dir)


def finish(cli: FlowerCli, app: Path, config: Mapping[str, Any], folder: Path) -> None:
    """Runs an app to its end. Raises RuntimeError where it did not complete in time."""
    path = folder / "run.toml"
    path.write_text("".join(f'"{key}" = {json.dumps(value)}\n' for key, value in config.items()), encoding="utf-8")
    run_id, deadline = cli.submit(app, path), time.monotonic() + LIMIT_S
    while not (status := cli.status(run_id)).is_finished and time.monotonic() < deadline:
        time.sleep(1)
    if not status.is_completed:
        raise RuntimeError(f"the run of {app.name} is {status.status}: {status.details}")
