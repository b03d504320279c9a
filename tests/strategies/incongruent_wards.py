"""Five tiny hospitals with images, reports, or both, and runs of method `incongruent` over them in a second or two.

Every image is 8x8 noise with a bright corner for each label that it shows; its report names the labels.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
from flwr.app import Message, RecordDict
from PIL import Image

from client_app.site import site_names
from federation import registry, wire
from federation.settings import Settings
from server_app.inprocess import InProcessGrid
from strategies.progress import RoundRecord

NUMBERS = itertools.count()

LABELS = ("cat", "dog", "fox")
PROFILES = {"a-paired": "paired", "b-paired": "paired", "c-image": "image", "d-image": "image", "e-text": "text"}
SIZES = {"train": 12, "val": 6, "test": 6}
COLUMNS = (
    "image",
    "report",
    "patient",
    "study",
    "site",
    "split",
    "label_source",
    *(f"label:{name}" for name in LABELS),
)


def ward(site: str, profile: str, sizes: dict[str, int] | None = None, *, shift: int = 0) -> list[dict]:
    """Rows of one site; labels follow from the row's number, so every split has positives and negatives of each."""
    rows = []
    for split, size in (sizes or SIZES).items():
        for i in range(size):
            shown = [name for bit, name in enumerate(LABELS) if (i + shift) >> bit & 1]
            row = {"site": site, "split": split, "patient": f"{site}-{split}-{i}", "label_source": "reviewed"}
            row |= {"image": f"{site}-{split}-{i}.png" if profile != "text" else ""}
            row |= {"report": f"seen: {' and '.join(shown) or 'nothing'}" if profile != "image" else ""}
            rows.append(row | {f"label:{name}": int(name in shown) for name in LABELS})
    return rows


def wards(profiles: dict[str, str] | None = None, **arguments) -> list[dict]:
    return [row for site, profile in (profiles or PROFILES).items() for row in ward(site, profile, **arguments)]


def write(folder: Path, rows: list[dict]) -> Path:
    """The rows as a manifest with its images; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for number, row in enumerate(rows):
        if row["image"]:
            pixels = np.random.default_rng(number).integers(0, 120, (8, 8))
            for bit, (top, left) in enumerate(((0, 0), (0, 4), (4, 0))):
                pixels[top : top + 4, left : left + 4] += 100 * (row[f"label:{LABELS[bit]}"] == 1)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / row["image"])
    return folder


def run_config(root: Path, runs: Path, **changes) -> dict:
    """Two rounds, d = 8; further keys with ``__`` for the dot, and without a dot those of the method."""
    return {
        "method": "incongruent",
        "reporting.runs_dir": str(runs),
        "reporting.tensorboard": False,
        "data.root": str(root),
        "data.labels": ",".join(LABELS),
        "data.partition": "by_site",
        "data.min_samples": 1,
        "data.image_size": 8,
        "model.width": 4,
        "training.optimizer": "adamw",
        "training.lr": 0.01,
        "training.batch_size": 6,
        "training.threads": 1,
        "training.device": "cpu",
        "evaluation.bins": 256,
        "federation.rounds": 2,
        "federation.timeout_s": 0.1,
        "incongruent.dim": 8,
        "incongruent.vocab_size": 64,
        "incongruent.epochs_paired": 1,
        "incongruent.proto_min_patients": 2,
        **{(key.replace("__", ".") if "__" in key else f"incongruent.{key}"): value for key, value in changes.items()},
    }


class Listening(InProcessGrid):
    """Keeps every message and reply, as (action, sent, answered)."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.heard: list[tuple[str, RecordDict, RecordDict | None]] = []
        self.addressed: list[tuple[str, RecordDict, int]] = []

    def _execute(self, message: Message) -> Message | None:
        reply = super()._execute(message)
        content = reply.content if reply is not None and reply.has_content() else None
        self.addressed.append((message.metadata.message_type, message.content, message.metadata.dst_node_id))
        self.heard.append((message.metadata.message_type, message.content, content))
        return reply

    def trainings(self) -> list[tuple[RecordDict, RecordDict | None]]:
        return [(sent, got) for action, sent, got in self.heard if action == wire.TRAIN]


class Notes:
    """An observer that writes nothing to disk."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.kept: dict[str, dict] = {}
        self.states: list[dict] = []
        self.summaries: dict[str, dict] = {}
        self.pools: dict[str, dict] = {}
        self.best: dict[int, dict] = {}

    def sites_known(self, table, modules, headline_excluded) -> None:
        self.table = table
        self.states.append(modules)

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)

    def evaluated(self, server_round, split, pools, thresholds) -> None:
        self.pools[f"{split}-{server_round}"] = dict(pools)
        self.summaries[f"{split}-{server_round}"] = dict(pools[""].further)

    def keep(self, name, content) -> None:
        self.kept[name] = dict(content)

    def left_out(self, split, entries) -> None:
        self.left = list(entries)

    def keep_best(self, server_round, modules) -> None:
        self.best[server_round] = modules

    def load_best(self, server_round):
        return self.best[server_round]

    def checkpoint(self, progress) -> None:
        self.states.append(progress.modules)


def federate(config: dict, faults: dict | None = None, names: list[str] | None = None):
    """A run without a run folder: the strategy at its end, what was noted, what was sent."""
    settings = Settings.from_run_config(config)
    names = names or site_names(settings)
    nodes = [{"partition-id": index, "num-partitions": len(names)} for index in range(len(names))]
    by_node = {names.index(site): fault for site, fault in (faults or {}).items()}
    grid, notes = Listening(nodes, settings.flat(), by_node), Notes()
    strategy = registry.find(settings.method).strategy(settings, f"exp-{next(NUMBERS)}")
    strategy.start(grid, observer=notes)
    return strategy, notes, grid
