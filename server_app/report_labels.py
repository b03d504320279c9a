"""What a run with cycles of labelling has to show: learning curves, and how even labelled sets are over the classes.

The curves are the server's (``cycles.json``). Counts of labels leave no site, so a real federation shows no such
figures: only a simulation keeps the sites' folders, from which they are read, below the run's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.report_charts import Chart, line_chart
from server_app.report_words import metric_name

KIND, CURVE = "labelled", "learning_curve"
PRESENT = 1


def read_labelled(run_dir: Path) -> list[dict[str, Any]]:
    """One record a cycle: ``cycle``, ``site`` -> labelled samples of each class; none where sites keep no such set.

    A site that has no file for a cycle is not in its record: it did not train in it. Damaged files are passed over.
    """
    cycles: dict[int, dict[str, list[int]]] = {}
    for path in sorted(run_dir.glob("sites/*/labelled/*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            marks, labels = content["marks"].values(), content["labels"]
            counts = [sum(mark[label] == PRESENT for mark in marks) for label in range(len(labels))]
            cycles.setdefault(int(content["cycle"]), {})[path.parent.parent.name] = counts
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError):
            continue
    return [{"kind": KIND, "cycle": cycle, "sites": cycles[cycle]} for cycle in sorted(cycles)]


def read_curve(run_dir: Path) -> list[dict[str, Any]]:
    """One record a cycle: its ``ratio`` of labelled images and the figures there; none without such a file."""
    try:
        points = json.loads((run_dir / "cycles.json").read_text(encoding="utf-8"))["curve"]
        return [{**point, "kind": CURVE} for point in points if "ratio" in point]
    except (ValueError, KeyError, TypeError, OSError):
        return []


def ratio(record: Mapping[str, Any]) -> float | None:
    """The smallest class over the largest in the union of the sites' labelled sets; None where nothing has a label."""
    totals = [sum(column) for column in zip(*record["sites"].values(), strict=True)]
    return min(totals) / max(totals) if totals and max(totals) else None


def label_balance(records: Sequence[Mapping[str, Any]]) -> float | None:
    """`ratio` of the last cycle."""
    return ratio(records[-1]) if records else None


def label_charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Learning curves, the curve of `ratio` over the cycles, and the number of classes in the labelled sets."""
    points = [record for record in records if record.get("kind") == CURVE]
    names = sorted({name for point in points for name in point} - {"kind", "cycle", "ratio"})
    curves = [(metric_name(name), [(point["ratio"], point.get(name)) for point in points]) for name in names]
    found = [record for record in records if record.get("kind") == KIND]
    balance = [(float(record["cycle"]), ratio(record)) for record in found]
    present = [
        (float(record["cycle"]), float(sum(sum(column) > 0 for column in zip(*record["sites"].values(), strict=True))))
        for record in found
    ]
    drawn = (
        line_chart("Test, at the end of each cycle", "share of all images that is labelled", curves),
        line_chart("Labelled images: smallest class over largest", "cycle", [("all sites", balance)]),
        line_chart("Labelled images: classes with a label", "cycle", [("all sites", present)]),
    )
    return [chart for chart in drawn if chart is not None]
