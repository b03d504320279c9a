"""What the fault drills share: a tiny federation of four sites, faults by round, and what a run left behind.

The sites hold 8x8 images whose brightness in a corner is their label, so that every round changes the model and every
site matters to it; a whole federation of three rounds takes a third of a second of one core.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from federation import wire
from server_app import checkpoint, inprocess, run_folder
from server_app.inprocess import Fault
from server_app.runner import Outcome

LABELS = ("cat", "dog", "fox")
SITES = ("site-00", "site-01", "site-02", "site-03")
BAD = SITES[1]
TIMES = ("seconds",)


def write_data(path: Path, *, seed: int = 0, train: int = 96, val: int = 48, test: int = 48) -> Path:
    """A multi-label array file: each label brightens its own corner of a noisy image."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for split, size in (("train", train), ("val", val), ("test", test)):
        targets = rng.integers(0, 2, (size, len(LABELS)))
        images = rng.integers(0, 120, (size, 8, 8))
        for label, (top, left) in enumerate(((0, 0), (0, 4), (4, 0))):
            images[:, top : top + 4, left : left + 4] += 60 * targets[:, label, None, None]
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images.astype(np.uint8), targets
    np.savez(path, **arrays)
    return path


def settings(data: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """A run config over that file; further keys with ``__`` for the dot."""
    return {
        "reporting.runs_dir": str(runs),
        "reporting.tensorboard": False,
        "data.root": str(data),
        "data.labels": ",".join(LABELS),
        "data.partition": "iid",
        "data.num_sites": len(SITES),
        "data.image_size": 8,
        "data.cache_dir": str(data.parent / "cache"),
        "model.width": 4,
        "training.batch_size": 8,
        "evaluation.bins": 256,
        "federation.rounds": 3,
        "federation.timeout_s": 0.02,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


def run(run_config: dict[str, Any], faults: dict[str, Fault] | None = None, *, as_it_is: bool = False) -> Outcome:
    """A federation in this process, with few draws for the report's intervals unless ``as_it_is``.

    Nothing waits for the disk: flushing is half of a tiny run, and only a power cut can tell.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        if not as_it_is:
            patch.setattr(run_folder, "BOOTSTRAP_DRAWS", 2)
        return inprocess.run(run_config, faults=faults)


@contextlib.contextmanager
def server_log() -> Iterator[list[str]]:
    """The lines that Flower's logger writes inside the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def in_rounds(rounds: Collection[int], fault: Fault, action: str = wire.TRAIN) -> Fault:
    """A fault that happens in the given rounds of one action only; else the site answers honestly."""

    def limited(message: Message, answer: Callable[[], Message]) -> Message | None:
        config = message.content[wire.CONFIG]
        hit = message.metadata.message_type == action and int(config["server_round"]) in rounds
        return fault(message, answer) if hit else answer()

    return limited


def silent(message: Message, answer: Callable[[], Message]) -> None:
    """The site never sees the message."""


def state_sha256(run_dir: Path) -> str:
    """Hash of everything the newest checkpoint carries on: modules, the method's own tensors, the last round."""
    progress, _ = checkpoint.load_checkpoint(run_dir)
    return f"{progress.server_round}:{wire.state_sha256({**progress.modules, 'method': progress.method})}"


def lines_of(run_dir: Path, *without: str) -> list[dict[str, Any]]:
    """``metrics.jsonl`` without times and the keys named."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key not in (*TIMES, *without)} for line in lines]


def run_json(run_dir: Path) -> dict[str, Any]:
    """``run.json``, read as strictly as a browser would."""

    def refuse(name: str) -> None:
        raise AssertionError(f"run.json holds {name}, which is not JSON")

    return json.loads((run_dir / "run.json").read_text(encoding="utf-8"), parse_constant=refuse)


# -- kills ------------------------------------------------------------------------------------------------------------


class KillSwitch:
    """Ends this process with SIGKILL at the n-th moment that matters to what lies on the disk.

    Moments: a site starts or ends its work; a file is flushed, renamed, cut or removed. At a flush of a file that is
    being appended to, the last ``torn`` bytes are taken off first, as a machine that loses its power would leave it.
    """

    def __init__(self, at: int = 0, torn: int = 0) -> None:
        self.at, self.torn, self.moments = at, torn, 0

    def tick(self, descriptor: int | None = None) -> None:
        self.moments += 1
        if self.moments != self.at:
            return
        if descriptor is not None and self.torn:
            with contextlib.suppress(OSError):  # a folder, or a file opened for reading only
                os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - self.torn))
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(os, "fsync", self.tick)  # a kill does not lose what the kernel holds: no need to wait for disks
        for owner, name in (
            (os, "replace"),
            (os, "truncate"),
            (Path, "unlink"),
            (inprocess.InProcessGrid, "_execute"),
        ):
            patch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.tick()
            result = original(*arguments, **named)
            self.tick()
            return result

        return wrapped


def count_moments(run_config: dict[str, Any]) -> tuple[int, Outcome]:
    """How many kill points a run has, and the run."""
    switch = KillSwitch()
    with pytest.MonkeyPatch.context() as patch:
        switch.install(patch)
        patch.setattr(run_folder, "BOOTSTRAP_DRAWS", 2)
        outcome = inprocess.run(run_config)
    return switch.moments, outcome


def killed(run_config: dict[str, Any], switch: KillSwitch | None = None, after_s: float | None = None) -> bool:
    """Runs a federation in a child process that is killed; returns whether it was, or had ended before.

    The child is a fork: it starts at once, with everything imported, and SIGKILL lets it clean up nothing.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the parent's thread pool does not live in a fork
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run_folder, "BOOTSTRAP_DRAWS", 2)
                if switch is not None:
                    switch.install(patch)
                inprocess.run(run_config)
            os._exit(0)
        except BaseException:
            os._exit(77)
    if after_s is not None:
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code != 0
