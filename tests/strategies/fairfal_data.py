"""What the FairFAL tests share: three kinds of picture at three sites, short cycles, and a look at every message."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from federation.settings import Settings
from server_app import inprocess, run_folder, runner
from server_app.inprocess import InProcessGrid

LABELS = ("cat", "dog", "fox")
SITES = ("site-00", "site-01", "site-02")


def pictures(targets, seed=0):
    """``(n, 8, 8) uint8``: a class brightens its own corner of a noisy picture."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 120, (len(targets), 8, 8))
    for label, (top, left) in enumerate(((0, 0), (0, 4), (4, 0))):
        images[:, top : top + 4, left : left + 4] += 110 * (np.asarray(targets) == label)[:, None, None]
    return images.astype(np.uint8)


def write_data(path: Path, *, train: int = 66, val: int = 12, test: int = 18, multilabel: bool = False) -> Path:
    """An array file, the first class half of it."""
    rng, arrays = np.random.default_rng(1), {}
    for number, (split, size) in enumerate((("train", train), ("val", val), ("test", test))):
        classes = rng.choice(3, size, p=[0.5, 0.3, 0.2])
        arrays[f"{split}_images"] = pictures(classes, number)
        marks = np.eye(3, dtype=np.int64)[classes] | (rng.random((size, 3)) < 0.2)
        arrays[f"{split}_labels"] = marks.astype(np.int64) if multilabel else classes[:, None].astype(np.int64)
    np.savez(path, **arrays)
    return path


def config_of(data: Path, runs: Path, **changes):
    """A run config over that file: cycles of 2 rounds; further keys with ``__`` for the dot."""
    quick = {
        "method": "fairfal",
        "reporting__runs_dir": str(runs),
        "reporting__tensorboard": False,
        "data__root": str(data),
        "data__labels": ",".join(LABELS),
        "data__partition": "iid",
        "data__num_sites": len(SITES),
        "data__image_size": 8,
        "data__cache_dir": str(data.parent / "cache"),
        "model__width": 4,
        "training__batch_size": 8,
        "evaluation__bins": 256,
        "evaluation__every": 0,
        "federation__rounds": 4,
        "federation__timeout_s": 0.05,
        "federation__wait_s": 0,
        "fairfal__backbone": "small_cnn",
        "fairfal__rounds_per_cycle": 2,
        "fairfal__label_share": 0.2,
        "fairfal__local_epochs": 2,
        **changes,
    }
    return {key.replace("__", "."): value for key, value in quick.items()}


def run(run_config, faults=None):
    """A federation in this process that waits for no disk."""
    with _quick():
        return inprocess.run(run_config, faults=faults)


def run_hospitals(nodes, faults=None, **changes):
    """Hospitals with data of their own; ``nodes``: node configs."""
    settings = Settings.from_run_config({key.replace("__", "."): value for key, value in changes.items()})
    with _quick():
        return runner.run(settings, InProcessGrid(nodes, settings.flat(), faults))


@contextlib.contextmanager
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(run_folder, "BOOTSTRAP_DRAWS", 2)
        yield


def watching(seen, sites=SITES):
    """Faults that only look: ``(site, action, question, message's content, reply's content)`` of every exchange."""

    def look(site):
        def fault(message, answer):
            reply = answer()
            question = str(message.content["config"].get("question", ""))
            seen.append((site, message.metadata.message_type, question, message.content, reply.content))
            return reply

        return fault

    return {site: look(site) for site in sites}
