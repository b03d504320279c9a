"""The figures of a finished run as tables for a terminal, read from its `run.json`."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

from rich.console import Console
from rich.table import Table

# The few figures that fit a terminal; the report has all of them.
SUMMARY = ("macro_auroc", "micro_auroc", "worst_auroc", "worst_auroc_label", "macro_ap", "macro_f1", "num_examples")
PER_CLASS = ("label", "positives", "negatives", "auroc", "ap", "f1", "sensitivity", "specificity")
PER_SITE = ("site", "num_examples", "macro_auroc", "worst_auroc", "worst_auroc_label", "macro_ap", "macro_f1")
CAVEATS = ("undefined_labels", "excluded_labels")
WIDEST = 8  # columns, where a run has none of these


def newest_run_folder(runs_dir: Path, since: float) -> Path | None:
    """The folder below `runs_dir` whose `run.json` was written last, not before the time `since` (seconds, epoch)."""
    written = {path.parent: path.stat().st_mtime for path in runs_dir.glob("*/run.json")}
    recent = {folder: when for folder, when in written.items() if when >= since}
    return max(recent, key=recent.__getitem__) if recent else None


def print_results(run_folder: Path, console: Console) -> None:
    """Prints the final test figures: overall, per class and per site, then where the report lies."""
    final = json.loads((run_folder / "run.json").read_text(encoding="utf-8")).get("final") or {}
    test = final.get("test") or {}
    tables = (
        _pairs("Test result over all sites", test.get("summary") or {}),
        _rows("Per class", test.get("per_class") or [], PER_CLASS),
        _rows("Per site", [_flat_site(row) for row in test.get("per_site") or []], PER_SITE),
    )
    for table in filter(None, tables):
        console.print(table)
    if not any(tables):
        console.print("the run wrote no final test figures")
    report = run_folder / "report.html"
    console.print(
        f"report: {report}" if report.exists() else f"run folder: {run_folder}", soft_wrap=True, highlight=False
    )


def cell(value: object) -> str:
    """A figure as people read it: three decimals, counts whole, names in a row, undefined as a dash."""
    if value is None:
        return "—"
    if isinstance(value, Real) and not isinstance(value, int):
        return f"{float(value):.3f}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(cell, value)) or "none"
    return str(value)


def figure(row: Mapping[str, object], name: str) -> str:
    """The figure `name` of a row, with its interval behind it where the row has one (`NAME_low`, `NAME_high`)."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    interval = "" if low is None or high is None else f" ({cell(low)}–{cell(high)})"
    return cell(row.get(name)) + interval


def _pairs(title: str, figures: Mapping[str, object]) -> Table | None:
    if not figures:
        return None
    table = Table("figure", title=title, title_justify="left")
    table.add_column("value", justify="right")
    for name in (*_chosen([figures], SUMMARY), *(name for name in CAVEATS if figures.get(name))):
        table.add_row(_words(name), figure(figures, name))
    return table


def _rows(title: str, rows: Sequence[Mapping[str, object]], wanted: Sequence[str]) -> Table | None:
    if not rows:
        return None
    columns = _chosen(rows, wanted)
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(_words(column), justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(figure(row, column) for column in columns))
    return table


def _chosen(rows: Sequence[Mapping[str, object]], wanted: Sequence[str]) -> list[str]:
    there = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, Mapping))
    return [name for name in wanted if name in there] or list(there)[:WIDEST]


def _flat_site(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "summary"} | dict(row.get("summary") or {})


def _words(name: str) -> str:
    return name.replace("_", " ")
