"""Rounds: one round of the federation beside a bare PyTorch loop that does the same arithmetic, ten sites."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from bench.rows import Row
from client_app.site import open_site, site_names
from client_app.training import batches, network_for, usable
from datasets.transforms import to_input
from federation import seeding
from federation.settings import Settings
from models.networks import SmallCNN
from server_app import inprocess, simulate

ROUNDS = 7
SITES = 10
WIDTHS = {"0.1 M": 33, "3.9 M": 208}
"""Parameters of small_cnn by its width: 90 width^2 and a little."""


def measure() -> list[Row]:
    """Median round in process and on Ray over the bare loop's, and the part of a Ray run that is not rounds."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for size, width in WIDTHS.items():
            config = run_config(folder, width)
            bare = bare_loop(Settings.from_run_config(config))
            ours = round_seconds(inprocess.run(config).run_dir)
            ray, fixed = on_ray(config)
            target = "<= 1.2" if size == "0.1 M" else "<= 1.05"
            rows.append(Row(f"round in process, {size} parameters", "s", ours, "bare PyTorch loop", bare, target))
            target = "" if size == "0.1 M" else "<= 1.15"
            note = "two actors share two cores, the loop has one"
            rows.append(Row(f"steady round on Ray, {size}", "s", ray, "bare PyTorch loop", bare, target, note))
            rows.append(Row(f"fixed part of a Ray run, {size}", "s", [fixed], "empty Flower app", [empty_app()]))
    return rows


def run_config(folder: str, width: int) -> dict[str, object]:
    """FedAvg on the embedded digits without evaluation between the rounds."""
    return {
        "data.root": "digits",
        "data.image_size": 8,
        "data.num_sites": SITES,
        "data.partition": "iid",
        "federation.rounds": ROUNDS,
        "model.width": width,
        "evaluation.every": 0,
        "reporting.runs_dir": folder,
        "reporting.tensorboard": False,
    }


def round_seconds(run_dir: Path) -> list[float]:
    """Wall seconds of every round but the first, which opens the data."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines if line["kind"] == "round"][1:]


def bare_loop(settings: Settings) -> list[float]:
    """The same training and averaging written down plainly: no messages, no gates, no Flower."""
    torch.set_num_threads(1)
    area = settings.training
    splits = []
    for index in range(len(site_names(settings))):
        site = open_site(settings, {"partition-id": index}, Path())
        rows = usable(site.data.splits["train"])
        split = site.data.splits["train"]
        splits.append((torch.from_numpy(split.images[rows]), torch.from_numpy(split.targets[rows])))
    labels = tuple(str(digit) for digit in range(10))
    state = network_for(labels, settings).state_dict()
    seconds = []
    for server_round in range(ROUNDS):
        started = time.perf_counter()
        means: dict[str, torch.Tensor] = {}
        total = 0
        for index, (images, targets) in enumerate(splits):
            network: SmallCNN = network_for(labels, settings)  # type: ignore[assignment]
            network.load_state_dict(state)
            network.train()
            optimiser = torch.optim.SGD(
                network.parameters(), lr=area.lr, momentum=area.momentum, weight_decay=area.weight_decay
            )
            draws = seeding.generator(1, "bare", server_round, str(index))
            for picked in batches(len(targets), area.batch_size, draws):
                loss = F.cross_entropy(network(to_input(images[picked])), targets[picked].argmax(dim=1))
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
            total += len(targets)
            for name, value in network.state_dict().items():
                if index == 0:
                    means[name] = value.clone()
                elif value.is_floating_point():
                    means[name].lerp_(value, len(targets) / total)
        state = means
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def on_ray(config: dict[str, object]) -> tuple[list[float], float]:
    """Steady rounds on Ray, and the wall time of the whole command less its rounds."""
    run_config = {key: value for key, value in config.items() if isinstance(value, int | float | bool | str)}
    simulation = simulate.Simulation(simulate.ROOT, run_config, SITES)
    started = time.perf_counter()
    code, run_dir = simulate.run(simulation, Console(quiet=True))
    wall = time.perf_counter() - started
    if code != simulate.COMPLETED or run_dir is None:
        raise RuntimeError(f"the simulation ended with {code}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    every = [line["seconds"] for line in lines if line["kind"] == "round"]
    return every[1:], wall - sum(every)


def empty_app() -> float:
    """Wall seconds of the launcher around an app that does nothing, on as many sites."""
    from bench.empty_app import write_app

    with tempfile.TemporaryDirectory() as folder:
        app = write_app(Path(folder))
        started = time.perf_counter()
        code, _ = simulate.run(simulate.Simulation(app, {}, SITES), Console(quiet=True))
        if code != simulate.COMPLETED:
            raise RuntimeError(f"the empty app ended with {code}")
        return time.perf_counter() - started
