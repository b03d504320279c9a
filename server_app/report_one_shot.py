"""What the report says of a one-shot run: whose uploads the server's job used, and what it made of them.

From the page that such a method keeps in the run folder under its own name, the round's record and the method's
settings. It shows no image and names no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.report_tables import Cell, Row, Table
from server_app.report_words import count, duration, metric_name, number, number_of, plain

JOB, AVERAGE = "one_shot_job", "plain_average"
"""Kinds of the records of a job and of the plain average beside its model; the page of the latter has that name."""
SERVERS = {
    "average": "the plain average of the uploads; nothing is trained on the server",
    "ensemble": "the plain average; the ensemble itself is several models, so it is not what was saved",
    "kd": "plain distillation on the same images, a baseline",
    "whole_ce": "an ablation: whole images with their labels, no relabelling",
    "hard_low": "an ablation: the other patches get the image's label",
    "high_only": "an ablation: the kept patches only",
    "dense_inversion": "DeepInversion, a baseline: no patch is dropped, plain distillation",
    "dense": "DENSE, a baseline with an image generator",
    "coboosting": "Co-Boosting, a baseline with an image generator",
    "fedftg": "FedFTG, a baseline with an image generator",
}
"""What a job can do instead of its method, in words that follow "by"."""
STAGES = {"A": "Synthetic images", "B": "All models' answers on them", "C": "Training the global model"}
ALWAYS = ("server", "model", "upload_dtype", "min_class_count", "audit", "dp_noise", "keep_synthetic")
INVERTING = ("label_sampler", "inv_iters", "inv_batch", "stops", "ratios", "freeze_stopped", "rebirth", "low_set")
SPARSE = frozenset(("stops", "ratios", "freeze_stopped", "rebirth", "low_set"))
LEARNING = ("relabel_mode", "ensemble_weight", "global_init", "kd_T", "kd_lambda", "kd_lr", "kd_epochs")
"""Settings that are in force in every job, where images are made, where patches are dropped, where a model learns."""


@dataclass(frozen=True)
class OneShot:
    """The section's parts, in the order in which they are printed; ``pairs``: titled names and values."""

    title: str
    sentences: Sequence[str]
    tables: Sequence[Table]
    pairs: Sequence[tuple[str, list[tuple[str, str]]]]


def read_one_shot(run_dir: Path, method: Any) -> list[dict[str, Any]]:
    """The pages that ``method`` keeps of a job, as records; none where it keeps none or they are damaged."""
    job, average = _page(run_dir / f"{method}.json"), _page(run_dir / f"{AVERAGE}.json")
    found = [{**job, "kind": JOB}] if {"server", "sites"} <= set(job) else []
    return found + ([{**average, "kind": AVERAGE}] if average else [])


def _page(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def one_shot(run: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> OneShot | None:
    """The section, or None for a run without such a job (or whose job is not done)."""
    records = list(records)
    job = next((record for record in records if record.get("kind") == JOB), None)
    if job is None:
        return None
    options = (run.get("settings") or {}).get(run.get("method")) or {}
    seconds = job.get("seconds") or {}
    rounds = [record for record in records if record.get("kind") == "round"]
    times = [(word, duration(seconds[stage])) for stage, word in STAGES.items() if stage in seconds]
    where = [("Device", str(job["device"]))] if job.get("device") else []
    pairs = [("Time", times + where), ("Settings of the job", settings_in_force(job, options))]
    average: Mapping[str, Any] = next((record for record in records if record.get("kind") == AVERAGE), {})
    beside = average_table(average)
    return OneShot(
        "The server's job",
        sentences(job, options, str(run.get("method"))) + average_words(average),
        [*([beside] if beside else []), uploads_table(job, rounds)],
        [(title, rows) for title, rows in pairs if rows],
    )


def sentences(job: Mapping[str, Any], options: Mapping[str, Any], method: str) -> list[str]:
    """What the job is and made, what it never asked for, and what is left of it."""
    server = str(job.get("server"))
    what = f"{method} itself" if server == method else SERVERS.get(server, server)
    texts = [f"The server made the model of {number_of(len(job['sites']), 'upload')} by {what}."]
    if number(job.get("images")) is not None:
        text = f"It made {number_of(job['images'], 'synthetic image')}"
        if job.get("dropped"):
            text += f" and left {job['dropped']:,} out whose loss was no number"
        if number(job.get("patches_high")) is not None:
            high, low = job["patches_high"], job.get("patches_low")
            text += f". Of each image {high} patches count as rich in information, {low} as poor"
        texts.append(text + ".")
    if not job.get("is_average") and job.get("warnings"):
        texts.append(f"Of note: {'; '.join(map(str, job['warnings']))}.")
    if "keep_synthetic" in options:
        kept = options["keep_synthetic"]
        texts.append(
            "Uploads and what was made of them are kept on the server (keep_synthetic)."
            if kept
            else "Uploads and what was made of them were deleted when the model had been read back."
        )
    return texts


def uploads_table(job: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> Table:
    """One row a site: used, refused, missing or late, with why and with what its model gave."""
    sites = job["sites"]
    has_epsilon = any((number(told.get("epsilon")) or -1) >= 0 for told in sites.values())
    has_images = any("images" in told for told in sites.values())

    def row(site: str, what: str, told: Mapping[str, Any], why: str) -> Row:
        cells = [Cell(what), Cell(count(told["num_examples"]) if told else "-")]
        if has_images:
            cells.append(Cell(count(told["images"]) if "images" in told else "-"))
        if has_epsilon:
            cells.append(Cell(_epsilon(told) if told else "-"))
        return Row(site, [*cells, Cell(why)])

    rows = [row(site, "used", told, _as_teacher(told)) for site, told in sorted(sites.items())]
    for record in rounds:
        for kind in ("refused", "missing"):
            rows += [row(str(one["site"]), kind, {}, str(one["reason"])) for one in record.get(kind) or []]
    rows += [
        row(str(site), "late", {}, "it came after the job had begun: kept, not used") for site in job.get("late") or []
    ]
    columns = [
        "Site",
        "Upload",
        "Examples",
        *["Images"] * has_images,
        *["Epsilon"] * has_epsilon,
        "Why, and as a teacher",
    ]
    caption = (
        "Images: synthetic ones made by inverting this site's model. A site that was not inverted still counts in what "
        "all models together say. Times are of the last start of the job, but for the images, whose whole time is told."
        if has_images
        else ""
    )
    return Table("Uploads", columns, rows, caption, wordy=True)


def average_words(average: Mapping[str, Any]) -> list[str]:
    """Where the final model loses to the plain average, or why that was not scored."""
    if reason := average.get("not_scored"):
        return [f"The plain average of the uploads was not scored beside it: {reason}."]
    pooled = (average.get("figures") or {}).get("pooled") or {}
    lost = ", ".join(metric_name(name) for name, (final, plainly) in pooled.items() if plainly > final)
    text = f"The plain average of the uploads does better on the {average.get('split')} data by {lost}"
    return [f"{text}: server = average gives that model."] if lost else []


def average_table(average: Mapping[str, Any]) -> Table | None:
    """The final model and the plain average on the same samples, of all sites and of each; None where not scored."""
    rows = []
    for scope, figures in (average.get("figures") or {}).items():
        where = "All sites" if scope == "pooled" else scope
        for name, (final, plainly) in figures.items():
            gap = f"{final - plainly:+.3f}".replace("+0.000", "0.000").replace("-0.000", "0.000")
            cells = [Cell(plain(final)), Cell(plain(plainly)), Cell(gap)]
            rows.append(Row(f"{where}: {metric_name(name)}", cells, mark="weak" if plainly > final else ""))
    caption = (
        "Both models on the same samples; marked rows are those that the plain average wins. Small differences may be "
        "chance. A choice between the two by these figures has to be measured on other data."
    )
    columns = ("Figure", "Final model", "Plain average", "Difference")
    return Table("Beside the plain average of the uploads", columns, rows, caption) if rows else None


def settings_in_force(job: Mapping[str, Any], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The method's own settings that this kind of job reads, under their names."""
    names = list(ALWAYS)
    if number(job.get("images")) is not None:
        dense = job.get("server") == "dense_inversion"
        names += [name for name in INVERTING if not (dense and name in SPARSE)]
    if not job.get("is_average"):
        names += LEARNING
    return [(name, plain(options[name])) for name in names if name in options]


def _as_teacher(told: Mapping[str, Any]) -> str:
    if reason := told.get("not_inverted"):
        return f"not inverted: {reason}; kept in the ensemble"
    if "images" not in told:
        return ""
    dropped = told.get("dropped")
    return "inverted" + (f"; {number_of(dropped, 'image')} left out, their loss was no number" if dropped else "")


def _epsilon(told: Mapping[str, Any]) -> str:
    value = number(told.get("epsilon"))
    return "none" if value is None or value < 0 else plain(value)
