"""Small things that many tests share: tiny settings, tiny hospitals on disk, quick in-process runs."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from PIL import Image

hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.load_profile("repeatable")  # --hypothesis-profile=default draws new examples


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Plain loops that a site's training is compared with sum in the same order: the thread count changes the bits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def tiny(tmp_path):
    """A run config that trains two rounds on the embedded mosaics in about a second."""
    return {
        "reporting.runs_dir": str(tmp_path / "runs"),
        "reporting.tensorboard": False,
        "data.root": "digits-mosaic",
        "federation.rounds": 2,
        "model.width": 4,
        "evaluation.bins": 256,
        "training.threads": 1,
    }


@pytest.fixture
def run_tiny(tiny, monkeypatch):
    """``run_tiny(**changes)``: a whole federation in process; keys with ``__`` for the dot."""
    from server_app import inprocess, run_folder

    monkeypatch.setattr(run_folder, "BOOTSTRAP_DRAWS", 10)  # the intervals of a report, not what is tested here

    def run(*, faults=None, **changes):
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        return inprocess.run({**tiny, **dotted}, faults=faults)

    return run


@pytest.fixture
def write_hospital():
    """``write_hospital(folder, rows, labels)`` writes 8x8 grey PNGs and a manifest.csv, and returns the folder.

    ``rows``: dicts with ``site``, ``split``, ``patient`` and one entry a label; what is absent is made up (a patient
    of its own, blank labels). The pixels follow from the row's number, so two calls write the same bytes.
    """

    def write(folder, rows, labels=("cat", "dog"), *, label_columns=None):
        (folder / "images").mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        columns = list(label_columns or labels)
        with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "patient", "site", "split", *(f"label:{label}" for label in columns)])
            for number, row in enumerate(rows):
                pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
                writer.writerow(
                    [
                        f"images/{number}.png",
                        row.get("patient", f"p{number}"),
                        row.get("site", "north"),
                        row.get("split", "train"),
                        *(row.get(label, "") for label in columns),
                    ]
                )
        return folder

    return write


@pytest.fixture
def ward():
    """``ward(site, train, val, test)``: rows of one site whose two labels alternate, all known."""

    def rows(site, train=8, val=4, test=4):
        sizes = {"train": train, "val": val, "test": test}
        return [
            {"site": site, "split": split, "patient": f"{site}-{split}-{i}", "cat": i % 2, "dog": (i // 2) % 2}
            for split, size in sizes.items()
            for i in range(size)
        ]

    return rows


@pytest.fixture
def hospital(tmp_path, write_hospital, ward):
    """The node config of a hospital ``north`` with a tiny manifest, and a run config that fits it."""
    from types import SimpleNamespace

    root = write_hospital(tmp_path / "data", ward("north", train=9, val=4, test=4))
    node_config = {"site": "north", "data-root": str(root), "state-dir": str(tmp_path / "state")}
    run_config = {
        "data.image_size": 8,
        "model.width": 4,
        "evaluation.bins": 256,
        "training.batch_size": 4,
        "training.device": "cpu",
        "reporting.runs_dir": str(tmp_path / "runs"),
    }
    return SimpleNamespace(node_config=node_config, run_config=run_config, root=root, state=tmp_path / "state")


@pytest.fixture
def opened(hospital):
    """``opened(**changes)``: the hospital's Site and a Job for round 1, with changed run-config keys (``a__b``)."""
    import torch

    from client_app.site import open_folder, open_site
    from client_app.training import Job
    from federation.settings import Settings

    def make(*, server_round=1, last_accepted=0, config=(), **changes):
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        settings = Settings.from_run_config({**hospital.run_config, **dotted})
        folder = open_folder(settings, hospital.node_config, "exp-1")
        site = open_site(settings, hospital.node_config, folder)
        return site, Job(settings, server_round, last_accepted, dict(config), torch.device("cpu"))

    return make
