"""Compares methods: every row of a plan in every setting with every seed, in process, then one page of tables.

    python -m server_app.compare PLAN.toml [--out FILE.md] [--html FILE.html] [--runs-dir runs] [--jobs 2] [--dry-run]
    python -m server_app.compare --smoke

`server_app.compare_plan` says what a plan is. Every cell is a run of its own with its run folder. A cell that has a
completed run is not run again, so the same command continues after Ctrl-C and repeats only what failed. Exit code: 0
every cell has a result or was skipped, 1 some failed, 2 nothing could be done, 128 + signal when interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from federation.files import write_atomic
from server_app.compare_cells import Cell, Index, code_state, prepare
from server_app.compare_figures import read_figures
from server_app.compare_html import html_page
from server_app.compare_plan import CompareError, Plan, read_plan
from server_app.compare_table import page
from server_app.compare_workers import run_cells
from server_app.report_words import duration, metric_name, number_of, plain
from server_app.simulate import Interrupted, interruptible

COMPLETED, FAILED, UNUSABLE = 0, 1, 2
SMOKE_PLAN = Path(__file__).resolve().parents[1] / "results" / "smoke.toml"


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(
        prog="python -m server_app.compare", description="Run every cell of a plan and write one page of tables."
    )
    options.add_argument("plan", type=Path, nargs="?", help="TOML file with settings, rows and seeds")
    options.add_argument(
        "--smoke", action="store_true", help="a small plan over all methods and embedded data: results/smoke.toml"
    )
    options.add_argument(
        "--out", type=Path, help="the page (default: beside the plan, ending in .md; of --smoke in the runs folder)"
    )
    options.add_argument("--html", type=Path, help="the page for a browser (default: in the runs folder, plan's name)")
    options.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run folders go (default: runs)")
    options.add_argument("--jobs", type=_jobs, default=2, help="cells at a time, one core each (default: 2)")
    options.add_argument(
        "--engine",
        choices=("inprocess", "ray"),
        default="inprocess",
        help="ray: every cell is a simulation on Ray, or on the cluster that RAY_ADDRESS names (default: inprocess)",
    )
    options.add_argument("--dry-run", action="store_true", help="say what would be run, and write nothing")
    options.add_argument(
        "--rerun-changed", action="store_true", help="run cells again that another state of the code has made"
    )
    return options


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    if (options.plan is None) != options.smoke:
        parser().error("give a plan or --smoke")
    options.plan = options.plan or SMOKE_PLAN
    runs_dir = options.runs_dir.expanduser().absolute()
    try:
        with interruptible():
            plan = read_plan(options.plan.expanduser())
            cells = prepare(plan, runs_dir)
            if options.rerun_changed:
                _forget_changed(cells)
            _say_states(cells)
            if options.dry_run:
                return COMPLETED
            _run(plan, cells, Index(runs_dir), options)
            out = options.out or (runs_dir / "smoke.md" if options.smoke else options.plan.with_suffix(".md"))
            command = shlex.join(["python", "-m", "server_app.compare", *arguments])
            written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
            text = page(plan, cells, command=command, jobs=options.jobs, written=written)
            write_atomic(out.expanduser(), text.encode(), 0o644)
            for_browser = options.html or runs_dir / f"{options.plan.stem}.html"
            write_atomic(for_browser.expanduser(), html_page(plan, cells, text).encode(), 0o644)
            print(f"page: {out}; for a browser: {for_browser}")
    except CompareError as error:
        print(f"compare: {error}", file=sys.stderr)
        return UNUSABLE
    except Interrupted as interruption:
        print(f"compare: ended by {interruption}; the same command continues", file=sys.stderr)
        return interruption.exit_code
    return FAILED if any(cell.status == "failed" for cell in cells) else COMPLETED


def _forget_changed(cells: list[Cell]) -> None:
    now = code_state()
    for cell in cells:
        if cell.status == "cached" and cell.code != now:
            cell.status, cell.run_dir, cell.code = "waiting", None, now


def _say_states(cells: list[Cell]) -> None:
    words = {"waiting": "to run", "cached": "cached", "failed": "cannot run", "skipped": "skipped"}
    for cell in cells:
        reason = cell.run_dir.name if cell.run_dir else cell.reason
        print(f"{words[cell.status]}: {cell.name}" + (f": {reason}" if reason else ""))
    counts = Counter(words[cell.status] for cell in cells)
    print(f"{number_of(len(cells), 'cell')}: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    now = code_state()
    if stale := sum(cell.status == "cached" and cell.code != now for cell in cells):
        print(f"{number_of(stale, 'cached cell')} made by another state of the code; --rerun-changed runs them again")
    sys.stdout.flush()


def _run(plan: Plan, cells: list[Cell], index: Index, options: argparse.Namespace) -> None:
    waiting = [cell for cell in cells if cell.status == "waiting"]
    finished = 0

    def done(cell: Cell) -> None:
        nonlocal finished
        finished += 1
        text = cell.reason
        if cell.run_dir is not None:
            index.put(cell)
            values = read_figures(cell.run_dir).values
            shown = f"{metric_name(plan.metrics[0])} {plain(values.get(plan.metrics[0]))}"
            text = f"{duration(values['seconds'])}, {shown}"
        print(f"{finished} of {len(waiting)}: {cell.status}: {cell.name}: {text}", flush=True)

    run_cells(waiting, options.jobs, done, options.engine)


if __name__ == "__main__":
    sys.exit(main())
