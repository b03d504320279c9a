"""The folder that a run leaves behind: ``run.json``, ``metrics.jsonl``, checkpoints, ``model.safetensors``, TensorBoard
events, ``report.html``; in simulation also ``partition.json`` and the sites' folders with their ledgers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from federation import differential_privacy, wire
from federation.files import save_tensors, write_atomic
from federation.settings import Settings
from server_app import checkpoint
from server_app.checkpoint import Facts, ResumeError
from strategies.cards import SiteCard, SiteTable
from strategies.evaluation import POOLED, PooledScores
from strategies.progress import Modules, Progress, RoundRecord

BOOTSTRAP_DRAWS = 1000


class RunFolder:
    """Writes down what the strategy does (`strategies.progress.Observer`)."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.settings = settings
        self.resumed: tuple[Progress, Facts] | None = None
        self._started = time.time()
        self._facts = Facts({}, [], "", "", {})
        self._run: dict[str, Any] = {}
        self._board: Any = None

    @property
    def experiment(self) -> str:
        """Name of the folder, which also keys the sites' state."""
        return self.path.name

    # -- opening --------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, settings: Settings) -> RunFolder:
        """A new folder, or the one to resume, not written to before the sites are known. Raises ResumeError."""
        if settings.resume:
            return cls._reopen(Path(settings.resume).expanduser().absolute(), settings)
        runs = Path(settings.reporting.runs_dir).expanduser().absolute()
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = settings.method.replace(":", ".")
        for attempt in range(1000):
            path = runs / (f"{stamp}-{name}" + (f"-{attempt}" if attempt else ""))
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(path, settings)
        raise OSError(f"no free name for a run folder below {runs}")

    @classmethod
    def _reopen(cls, path: Path, settings: Settings) -> RunFolder:
        if not path.is_dir():
            raise ResumeError(f"resume = {str(path)!r} is no folder; give the run folder that was printed at its start")
        runs = Path(settings.reporting.runs_dir).expanduser().absolute()
        if path.parent != runs:
            raise ResumeError(
                f"resume = {str(path)!r} is not in reporting.runs_dir = {str(runs)!r}; set that to {str(path.parent)!r}"
            )
        folder = cls(path, settings)
        progress, facts = checkpoint.load_checkpoint(path)
        checkpoint.check_same_settings(facts, settings)
        folder.resumed = (progress, facts)
        return folder

    # -- what the strategy tells ----------------------------------------------------------------------------------

    def sites_known(self, table: SiteTable, modules: Modules, headline_excluded: Mapping[str, str]) -> None:
        data_sha256 = {card.site: card.data_sha256 for card in table.cards}
        architecture = checkpoint.architecture_sha256(modules)
        if self.resumed and (known := self.resumed[1].architecture) != architecture:
            raise ResumeError(
                f"the run's architecture is {known}, this code's is {architecture}; use the same code version"
            )
        if self.resumed:
            self._cut_back(self.resumed[1].metrics_bytes)
        self._facts = Facts(self.settings.flat(), list(table.labels), table.task, architecture, data_sha256)
        self._excluded = dict(headline_excluded)
        self._run = {
            "method": self.settings.method,
            "status": "running",
            "experiment": self.experiment,
            "started": _iso(self._started),
            "resumed_after_round": self.resumed[0].server_round if self.resumed else None,
            "versions": versions(),
            "settings": _by_area(self.settings),
            "labels": list(table.labels),
            "task": table.task,
            "num_parameters": sum(value.numel() for state in modules.values() for value in state.values()),
            "selection_metric": self.settings.evaluation.selection_metric,
            "headline_excluded": [{"label": label, "reason": why} for label, why in headline_excluded.items()],
            "sites": [_described(card) for card in table.cards],
            "outstanding": [{"site": site, "reason": why} for site, why in sorted(table.refused.items())],
            "warnings": _warnings(table) + self._noise_warnings(modules),
        }
        self._write_run()
        if self.settings.reporting.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            after = self.resumed[0].server_round + 1 if self.resumed else None
            self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=after)

    def _noise_warnings(self, modules: Modules) -> list[str]:
        names = (name for state in modules.values() for name in state)
        return differential_privacy.warnings_of(names) if self.settings.privacy.dp_clips else []

    def _cut_back(self, metrics_bytes: int) -> None:
        """Drops the metrics of rounds after the checkpoint: they are measured again."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size > metrics_bytes:
            os.truncate(metrics, metrics_bytes)

    def round_done(self, record: RoundRecord) -> None:
        self._append([{"kind": "round", **asdict(record)}])
        if self._board is not None:
            for site, loss in record.train_loss.items():
                self._board.add_scalar(f"train_loss/{site}", loss, record.round)
            self._board.add_scalar("seconds", record.seconds, record.round)

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a method's own page of facts, ``name.json``."""
        write_atomic(self.path / f"{name}.json", json.dumps(content, indent=1).encode(), 0o644)

    def evaluated(
        self, server_round: int, split: str, pools: Mapping[str, PooledScores], thresholds: np.ndarray | None
    ) -> None:
        excluded, scores = set(self._excluded), pools[""]
        draws = BOOTSTRAP_DRAWS if split == "test" else 0
        lines = []
        for scope in (POOLED, *scores.sites):
            lines.append(
                {
                    "kind": "evaluation",
                    "round": server_round,
                    "split": split,
                    "scope": scope,
                    "summary": scores.summary(
                        thresholds, excluded, scope, bootstrap_draws=draws, seed=self.settings.seed
                    ),
                    "per_class": scores.per_class(thresholds, excluded, scope),
                }
            )
        views = [
            {
                "kind": "view",
                "view": view,
                "round": server_round,
                "split": split,
                "scope": scope,
                "summary": pool.summary(thresholds, excluded, scope),
                "per_class": pool.per_class(thresholds, excluded, scope),
            }
            for view, pool in pools.items()
            if view
            for scope in (POOLED, *pool.sites)
        ]
        self._append(lines + views)
        if split == "test":
            pooled, sites = lines[0], lines[1:]
            self._run["final"] = {
                "test": {
                    "round": server_round,
                    "summary": pooled["summary"],
                    "per_class": pooled["per_class"],
                    "per_site": [
                        {
                            "site": line["scope"],
                            "summary": line["summary"],
                            "num_examples": line["summary"]["num_examples"],
                        }
                        for line in sites
                    ],
                }
            }
        if self._board is not None:
            for line in lines:
                for key, value in line["summary"].items():
                    if isinstance(value, float):
                        self._board.add_scalar(f"{split}_{key}/{line['scope']}", value, server_round)

    def left_out(self, split: str, entries: Iterable[Mapping[str, str]]) -> None:
        self._run["outstanding"] += [
            {"site": entry["site"], "reason": f"{split} scores: {entry['reason']}"} for entry in entries
        ]

    def keep_best(self, server_round: int, modules: Modules) -> None:
        """Keeps a copy on disk. Older ones go with the next checkpoint, which is the first to name this one; the last
        of them stays, since the checkpoint before names it.
        """
        tensors = {f"{module}/{name}": value for module, state in modules.items() for name, value in state.items()}
        save_tensors(self._best(server_round), tensors)

    def load_best(self, server_round: int) -> Modules:
        modules: Modules = {}
        for name, value in load_file(self._best(server_round)).items():
            module, _, key = name.partition("/")
            modules.setdefault(module, {})[key] = value
        return modules

    def _account(self, releases: int) -> None:
        if self.settings.privacy.dp_clips:
            self._run["differential_privacy"] = differential_privacy.statement(self.settings.privacy, releases)

    def checkpoint(self, progress: Progress) -> None:
        self._account(progress.releases)
        metrics = self.path / "metrics.jsonl"
        facts = Facts(**{**asdict(self._facts), "metrics_bytes": metrics.stat().st_size if metrics.exists() else 0})
        checkpoint.save_checkpoint(self.path, progress, facts)
        best = self._best(progress.best_round)
        older = sorted(path for path in best.parent.glob("best-*.safetensors") if path.stem < best.stem)
        for old in older[: 1 - checkpoint.GENERATIONS]:
            old.unlink(missing_ok=True)

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, progress: Progress, exported: wire.State, program: bytes | None = None) -> str:
        """Writes the selected model and the report; returns the model's SHA-256.

        ``program``: the model as one file that runs without this code (``inference.pt2``), where the method has one.
        """
        if program is not None:
            write_atomic(self.path / "inference.pt2", program)
        model_sha256 = wire.state_sha256({"model": exported})
        header = {
            "method": self.settings.method,
            "labels": json.dumps(self._facts.labels),
            "task": self._facts.task,
            "thresholds": json.dumps(progress.best_thresholds),
            "round": str(progress.best_round),
            "model": json.dumps({**self.settings.model.model_dump(), **_input(self.settings)}),
            "sha256": model_sha256,
        }
        save_tensors(self.path / "model.safetensors", exported, header)
        self._account(progress.releases)
        self._run |= {
            "model_sha256": model_sha256,
            "selected_round": progress.best_round,
            "selection_value": progress.best_value,
        }
        self._close("completed")
        return model_sha256

    def fail(self, reason: str) -> None:
        """Marks the run as failed, with what there is of a report. A completed run that cannot be resumed stays so."""
        if self.resumed and not self._run and (self.path / "run.json").exists():
            self._run = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            if self._run["status"] == "completed":
                return
        self._run.setdefault("warnings", []).append(reason)
        self._account(self._run.get("differential_privacy", {}).get("rounds", -1) + 1)  # what failed may be out
        self._run = {
            "method": self.settings.method,
            "experiment": self.experiment,
            "settings": _by_area(self.settings),
        } | self._run
        self._close("failed")

    @property
    def test(self) -> dict[str, Any]:
        """The test result: summary, per_class, per_site."""
        return dict(self._run.get("final", {}).get("test", {}))

    def _close(self, status: str) -> None:
        from server_app.report import write_report

        now = time.time()
        self._run |= {"status": status, "finished": _iso(now), "seconds": now - self._started}
        self._write_run()
        if self._board is not None:
            self._board.close()
        write_report(self.path)

    def _best(self, server_round: int) -> Path:
        return self.path / checkpoint.FOLDER / f"best-{server_round:06d}.safetensors"

    def _write_run(self) -> None:
        write_atomic(self.path / "run.json", json.dumps(self._run, indent=1).encode(), 0o644)

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


def versions() -> dict[str, str]:
    """Versions of what shapes the numbers."""
    packages = ("flwr", "torch", "torchvision", "numpy", "scikit-learn", "consilium")
    found = {"python": platform.python_version(), "machine": platform.machine(), "cuda": str(torch.version.cuda)}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _by_area(settings: Settings) -> dict[str, dict[str, Any]]:
    areas: dict[str, dict[str, Any]] = {}
    for key, value in settings.flat().items():
        area, _, name = key.rpartition(".")
        areas.setdefault(area or "run", {})[name] = value
    return areas


def _input(settings: Settings) -> dict[str, Any]:
    return {"image_size": settings.data.image_size, "channels": settings.data.channels}


def _described(card: SiteCard) -> dict[str, Any]:
    return {
        "site": card.site,
        **{f"num_{split}": size for split, size in card.split_sizes.items()},
        "positives": [None if count < 0 else count for count in card.positives],
        "modalities": list(card.modalities),
        "checksum": card.data_sha256,
    }


def _warnings(table: SiteTable) -> list[str]:
    return [
        f"label {label!r} has no training positive at any site: nothing can be learnt of it"
        for index, label in enumerate(table.labels)
        if table.sites_with_positives(index) == 0
    ]
