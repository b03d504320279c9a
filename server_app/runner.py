"""One run from settings to report, on whatever Grid it is given: Ray, SuperLink, or in process."""

from __future__ import annotations

from dataclasses import dataclass
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from flwr.supercore import log

from federation import registry
from federation.settings import Settings
from server_app.run_folder import RunFolder

SERVER_THREADS = 1


@dataclass(frozen=True)
class Outcome:
    """A finished run. ``metrics``: the test summary, with ``per_class`` and ``per_site`` tables; undefined is None."""

    model_sha256: str
    run_dir: Path
    metrics: dict[str, Any]


def run(settings: Settings, grid: Grid) -> Outcome:
    """Runs a federation; whatever ends it early is written into the run folder and raised again.

    The server computes on one thread: folding updates is bound by memory, a second thread that is taken away by another
    process makes it several times slower, and the number of threads would change the last bits of a norm.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(SERVER_THREADS)
    try:
        return _run(settings, grid)
    finally:
        torch.set_num_threads(threads)


def _run(settings: Settings, grid: Grid) -> Outcome:
    folder = RunFolder.open(settings)
    log(INFO, "run folder: %s", folder.path)
    strategy = registry.find(settings.method).strategy(settings, folder.experiment)
    progress, facts = folder.resumed or (None, None)
    if progress is not None:
        log(INFO, "resuming after round %s", progress.server_round)
    try:
        strategy.start(
            grid,
            observer=folder,
            resume_from=progress,
            data_sha256=facts.data_sha256 if facts else None,
            labels=facts.labels if facts else None,
        )
        model_sha256 = folder.finish(strategy.progress, strategy.export(), strategy.inference_program())
    except BaseException as error:
        log(ERROR, "the run failed: %s", error)
        folder.fail(f"{type(error).__name__}: {error}")
        raise
    log(INFO, "model sha256: %s", model_sha256)
    log(INFO, "report: %s", folder.path / "report.html")
    test = folder.test
    metrics = {**test.get("summary", {}), "per_class": test.get("per_class", []), "per_site": test.get("per_site", [])}
    return Outcome(model_sha256, folder.path, metrics)
