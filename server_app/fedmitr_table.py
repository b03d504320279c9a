"""FedMITR beside its ablations and baselines on the same uploads: sites train once, every row follows, one page.

    python -m server_app.fedmitr_table PLAN.toml [--out FILE.md] [--runs-dir runs] [--jobs 2] [--dry-run]

The plan is that of `server_app.compare_plan` without rows: these are `strategies.fedmitr_job.rows`. A cell is one
setting, one row and one seed. The cells of a setting and seed share one federation, whose sites train once, in process;
its uploads are deleted when the last of its rows is done. A cell that has a result is not run again, and a row that was
stopped goes on at its last checkpoint: the same command continues after Ctrl-C. Exit codes as of `server_app.compare`.

Figures are those of one model (the row ``ensemble``: of all the uploads together) on the pooled test samples of all
sites. Seconds a run are those of the server's work alone; rows on the same synthetic images count their making each.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_app.evaluation import score
from client_app.fedmitr import build
from client_app.site import open_folder, open_site, site_names
from client_app.training import Job
from federation.files import write_atomic
from federation.settings import Scalar, Settings, SettingsError
from server_app import inprocess
from server_app.compare import COMPLETED, FAILED, UNUSABLE
from server_app.compare_cells import Cell, cell_key, prepare, reason_of
from server_app.compare_plan import CompareError, Plan, Row, read_plan
from server_app.compare_table import page
from server_app.compare_workers import _workers
from server_app.report_words import plain
from server_app.run_folder import versions
from server_app.simulate import Interrupted, interruptible
from strategies.evaluation import PooledScores
from strategies.fedmitr_job import JobError, Result, ensemble_predict, job_folder, rows, run_job
from strategies.fedmitr_uploads import clear, has_begun
from strategies.gate import Reply

SITES = Row("sites", {"fedmitr.server": "average", "fedmitr.keep_synthetic": True})
"""The federation that makes the uploads."""
SHOWN = "accuracy"


@dataclass(frozen=True)
class Group:
    """The cells of one setting and seed: run config of their federation, where it lies, and theirs by row."""

    folder: Path
    run_config: Mapping[str, Scalar]
    row_configs: Mapping[str, Mapping[str, Scalar]]
    row_folders: Mapping[str, Path]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    runs_dir = options.runs_dir.expanduser().absolute()
    try:
        with interruptible():
            plan = read_plan(options.plan.expanduser(), [Row(name, changes) for name, changes in rows().items()])
            cells = prepare(plan, runs_dir)
            groups = _groups(plan, cells, runs_dir)
            waiting = sum(cell.status == "waiting" for cell in cells)
            print(f"{len(cells)} cells, {waiting} to run, of {len(groups)} federations", flush=True)
            if options.dry_run:
                return COMPLETED
            _run(groups, cells, options.jobs)
            out = options.out or options.plan.with_suffix(".md")
            command = shlex.join(["python", "-m", "server_app.fedmitr_table", *arguments])
            written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
            text = page(plan, cells, command=command, jobs=options.jobs, written=written)
            write_atomic(out.expanduser(), text.encode(), 0o644)
            print(f"page: {out}")
    except CompareError as error:
        print(f"fedmitr_table: {error}", file=sys.stderr)
        return UNUSABLE
    except Interrupted as interruption:
        print(f"fedmitr_table: ended by {interruption}; the same command continues", file=sys.stderr)
        return interruption.exit_code
    return FAILED if any(cell.status == "failed" for cell in cells) else COMPLETED


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m server_app.fedmitr_table", description="Run every row on the same uploads; write one page."
    )
    options.add_argument("plan", type=Path, help="TOML file with settings and seeds")
    options.add_argument("--out", type=Path, help="the page (default: beside the plan, ending in .md)")
    options.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the work goes (default: runs)")
    options.add_argument("--jobs", type=int, default=2, help="federations at a time, one core each (default: 2)")
    options.add_argument("--dry-run", action="store_true", help="say what would be run, and write nothing")
    return options


# -- in the command's process -----------------------------------------------------------------------------------------


def _groups(plan: Plan, cells: Sequence[Cell], runs_dir: Path) -> list[Group]:
    """One group for each setting and seed with something to do; cells with a result are marked as such."""
    by_federation = defaultdict(list)
    for cell in cells:
        if cell.status == "waiting":
            by_federation[cell.setting.name, cell.seed].append(cell)
    groups = []
    for waiting in by_federation.values():
        one = waiting[0]
        run_config = plan.run_config(one.setting, SITES, one.seed, runs_dir)
        run_config.setdefault("data.cache_dir", str(runs_dir / ".cache"))
        folder = runs_dir / f"fedmitr-{cell_key(Settings.from_run_config(run_config))[:16]}"
        for cell in waiting:
            cell.run_dir = folder / f"row-{cell.key[:16]}"
            if (found := _finished(cell.run_dir)) is not None:
                cell.status, cell.code = "cached", found["code"]
        left = {cell.row.name: cell for cell in waiting if cell.status == "waiting"}
        if left:
            changes = {name: cell.row.run_config for name, cell in left.items()}
            groups.append(Group(folder, run_config, changes, {name: cell.run_dir for name, cell in left.items()}))
    return groups


def _finished(folder: Path) -> dict[str, Any] | None:
    path = folder / "run.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if found.get("status") == "completed" else None


def _run(groups: Sequence[Group], cells: Sequence[Cell], jobs: int) -> None:
    by_folder = {cell.run_dir: cell for cell in cells}
    for outcome in _outcomes(groups, cells[0].code, jobs):
        for folder, reason in outcome.items():
            cell = by_folder[folder]
            cell.status, cell.reason = ("failed", reason) if reason else ("completed", "")
            print(f"{cell.status}: {cell.name}: {reason}", flush=True)


def _outcomes(groups: Sequence[Group], code: str, jobs: int) -> Iterator[dict[Path, str]]:
    """What became of each group, as they end; with one job at a time in this process, which keeps to one thread."""
    if jobs > 1:
        with _workers(jobs) as pool:
            yield from (done.result() for done in as_completed([pool.submit(run_group, g, code) for g in groups]))
        return
    torch.set_num_threads(1)
    for group in groups:
        yield run_group(group, code)


# -- in a worker ------------------------------------------------------------------------------------------------------


def run_group(group: Group, code: str) -> dict[Path, str]:
    """Trains the sites unless their uploads are there, then every row; why each row failed, "" where it did not."""
    try:
        base = _federation(group)
    except (Exception, SystemExit) as error:  # whatever ends this federation, the others go on
        return dict.fromkeys(group.row_folders.values(), reason_of(error))
    settings = Settings.from_run_config({**group.run_config, "reporting.runs_dir": str(group.folder)})
    job, outcome = job_folder(settings, base.name), {}
    for name, changes in group.row_configs.items():
        folder = group.row_folders[name]
        try:
            result = run_job(job, changes, name=folder.name)
            summary = _measured(settings, changes, result, job)
            _write_row(folder, base, name, result, summary, code)
            print(f"{group.folder.name} {name}: {plain(summary['summary'][SHOWN])}", flush=True)
            outcome[folder] = ""
        except (JobError, SettingsError) as error:  # the other rows go on
            outcome[folder] = reason_of(error)
    if not any(outcome.values()):
        clear(job)
    return outcome


def _federation(group: Group) -> Path:
    """Run folder of the group's federation, whose job folder holds the uploads."""
    settings = Settings.from_run_config({**group.run_config, "reporting.runs_dir": str(group.folder)})
    for folder in sorted(group.folder.glob(f"*-{settings.method}*")):
        job = job_folder(settings, folder.name)
        if _finished(folder) is not None and has_begun(job) and any(job.glob("uploads/*")):
            return folder
    return inprocess.run({**group.run_config, "reporting.runs_dir": str(group.folder)}).run_dir


def _measured(settings: Settings, changes: Mapping[str, Scalar], result: Result, job: Path) -> dict[str, Any]:
    """Test figures of a row: pooled, and by site. Scored as a site scores: by its own code, on its own samples."""
    pool = None
    for index in range(len(site_names(settings))):
        node = {"partition-id": index}
        site = open_site(settings, node, open_folder(settings, node, "scores"))
        if not len(site.data.splits["test"]):
            continue
        if pool is None:
            pool = PooledScores(site.data.labels, site.data.task, settings.evaluation.bins)
            network = build(site.data.labels, settings)
            network.load_state_dict(result.state, strict=True)
        forward = None
        if changes.get("fedmitr.server") == "ensemble":
            images = site.data.splits["test"].images
            forward = functools.partial(_ensemble, job, images, changes)
        found = score(network, site, Job(settings, 1, 0, {}, torch.device("cpu")), "test", forward=forward)
        loss = {"num_examples": found.num_examples, "loss_sum": found.loss_sum}
        pool.add(Reply(site.name, 1, {}, {"test": found.arrays}, {"loss.test": loss}, 0.0), "test")
    assert pool is not None
    per_site = [{"site": name, "summary": pool.summary(None, set(), name)} for name in pool.sites]
    return {"summary": pool.summary(None, set()), "per_class": pool.per_class(None, set()), "per_site": per_site}


def _ensemble(job: Path, images: np.ndarray, changes: Mapping[str, Scalar], rows: np.ndarray, _: Tensor) -> Tensor:
    """Logits of all uploads together; they take pixels in [0, 1] and normalise by themselves."""
    pixels = torch.from_numpy(np.ascontiguousarray(images[rows])).permute(0, 3, 1, 2).float() / 255
    return ensemble_predict(job, pixels, changes)


def _write_row(folder: Path, base: Path, name: str, result: Result, test: Mapping[str, Any], code: str) -> None:
    """A row's folder in the form of a run's, so that the page of a comparison can be made of it."""
    run = {
        "status": "completed",
        "row": name,
        "code": code,
        "versions": versions(),
        "seconds": sum(result.facts["seconds"].values()),
        "facts": result.facts,
        "final": {"test": test},
    }
    folder.mkdir(parents=True, exist_ok=True)
    rounds = (base / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in rounds if json.loads(line)["kind"] == "round"]
    write_atomic(folder / "metrics.jsonl", "".join(kept).encode())
    write_atomic(folder / "run.json", json.dumps(run, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main())
