"""The report of a run: one HTML file that needs nothing beside it, for a reader who is both clinician and engineer.

It is made from two files of the run folder, `run.json` and `metrics.jsonl`, from pages that a method keeps beside them,
in a simulation also from what its sites had labelled, and shows what it finds there: a run that failed, or has not been
evaluated yet, still gets its page. Null reads "not defined" or "suppressed", never a number.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from federation.files import write_atomic
from server_app.report_content import page_of
from server_app.report_labels import read_curve, read_labelled
from server_app.report_one_shot import read_one_shot
from server_app.report_template import COLOURS, CSS, TEMPLATE


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run folder and returns its path; it replaces an older one in one step.

    Missing or damaged input is named on the page instead of raised: the report is most needed when a run went wrong.
    """
    problems: list[str] = []
    run = read_run(run_dir / "run.json", problems)
    records = read_records(run_dir / "metrics.jsonl", problems)
    records += read_curve(run_dir) + read_labelled(run_dir) + read_one_shot(run_dir, run.get("method"))
    path = run_dir / "report.html"
    write_atomic(path, render(run, records, problems).encode("utf-8", errors="replace"))
    return path


def render(run: Mapping[str, Any], records: list[dict[str, Any]], problems: list[str]) -> str:
    """The page as text; every value that comes from a site, a label or a setting is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    css = Markup(CSS + COLOURS)  # ours, no foreign text in it
    return environment.from_string(TEMPLATE).render(page=page_of(run, records, problems), css=css)


def read_run(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in `run.json`; empty, with a line added to `problems`, if the file is missing or damaged."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(
            f"{path.name} is missing: this page knows only what {path.with_name('metrics.jsonl').name} says."
        )
        return {}
    except ValueError as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(run, dict):
        problems.append(f"{path.name} holds no object but a {type(run).__name__}.")
        return {}
    return run


def read_records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects in `metrics.jsonl` in order; damaged lines, as a crash leaves them, are counted and skipped."""
    if not path.exists():
        return []
    records, damaged = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    if damaged:
        problems.append(f"{damaged} damaged lines of {path.name} were left out.")
    return records
