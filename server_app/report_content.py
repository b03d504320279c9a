"""What the report says: sentences, tables and curves from the run's own figures, as plain text the template escapes."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server_app.report_charts import Chart, Point, line_chart
from server_app.report_collapse import COLLAPSE, COLLAPSE_WORDS, with_collapse
from server_app.report_cooccurrence import cooccurrence_words
from server_app.report_labels import label_charts
from server_app.report_one_shot import one_shot
from server_app.report_privacy import privacy_words, spent_words
from server_app.report_tables import (
    Result,
    data_table,
    exclusions,
    labels_table,
    positives_table,
    rounds_table,
    shown_result,
    site_values,
    sites_table,
    trouble_table,
    weakest_label,
    weakest_site,
)
from server_app.report_words import (
    GLOSSARY,
    data_size,
    duration,
    interval_of,
    metric_name,
    names_in,
    number,
    number_of,
    plain,
    spoken,
)

CURVES = ("macro_auroc", "worst_auroc", "macro_ap", "macro_f1", "accuracy", "balanced_accuracy")
MAX_CURVES = 8  # more sites than colours are drawn as weakest, median and best


def page_of(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]], problems: Sequence[str]) -> dict[str, Any]:
    """Everything the template prints, by the name it has there; absent parts are None or empty."""
    rounds = [record for record in records if record.get("kind") == "round"]
    evaluations = [record for record in records if record.get("kind") == "evaluation"]
    result = shown_result(run, evaluations)
    status = str(run.get("status") or "unknown")
    method = str(run.get("method") or "an unnamed method")
    trouble = trouble_table(run, rounds)
    return {
        "title": f"{method}: {run['experiment']}" if run.get("experiment") else f"Training with {method}",
        "status": status,
        "status_mark": {"completed": "good", "running": "note"}.get(status, "bad"),
        "when": _when(run),
        "warnings": [*_failure(run, status), *problems, *map(str, run.get("warnings") or [])],
        "lead": lead(run, rounds, result, method, status),
        "figures": figures(run, rounds, result),
        "remarks": [*remarks(run, result), *privacy_words(run), *spent_words(rounds)],
        "charts": [*charts(run, rounds, evaluations, result), *label_charts(records)],
        "labels": labels_table(run, result),
        "sites": sites_table(result),
        "one_shot": one_shot(run, records),
        "trouble": trouble,
        "no_trouble": "Every site that was asked answered, and no reply was refused."
        if rounds
        else "No round was finished.",
        "rounds": rounds_table(rounds),
        "data": data_table(run),
        "positives": positives_table(run),
        "made": made(run),
        "settings": [
            (str(section), [(str(key), plain(value)) for key, value in values.items()])
            for section, values in _sections(run.get("settings"))
        ],
        "all_figures": [(metric_name(key), plain(value)) for key, value in result.summary.items()],
        "glossary": [*GLOSSARY, *([COLLAPSE_WORDS] if "collapse_cosine" in result.summary else [])],
    }


def lead(
    run: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], result: Result, method: str, status: str
) -> list[str]:
    """The headline in sentences: what was trained by whom, how well it does, and where it does worst."""
    sites = run.get("sites") or []
    trained = f"{method} trained one model"
    if run.get("labels"):
        trained += f" for {number_of(len(run['labels']), 'label')}"
    if sites:
        trained += f" at {number_of(len(sites), 'site')} ({names_in([str(site.get('site')) for site in sites])})"
    effort = []
    if rounds:
        effort.append(f"in {number_of(len(rounds), 'round')}")
    if number(run.get("seconds")):
        effort.append(f"in {duration(run['seconds'])}" if not rounds else f"and {duration(run['seconds'])}")
    sentences = [
        " ".join([trained, *effort]) + (f". The run is not complete: {status}." if status != "completed" else ".")
    ]
    if result.headline is None:
        return [*sentences, "There is no result yet." if not result.where else "No figure of the result is defined."]

    name = result.headline
    text = f"On the {result.where} data"
    examples = [number(site.get("num_examples")) for site in result.per_site]
    if examples and None not in examples:
        text += f" of all sites ({number_of(int(sum(examples)), 'example')})"
    text += f" its {spoken(name)} is {plain(result.summary[name])}"
    if interval := interval_of(result.summary, name):
        text += f", 95 % interval {interval}"
    sentences.append(text + ".")
    worst = []
    if site := weakest_site(result):
        worst.append(f"It does worst at {site['site']} ({plain(site['summary'][name])})")
    if label := weakest_label(result):
        interval = interval_of(label, "auroc")
        bounds = f", interval {interval}" if interval else ""
        start = "and" if worst else "It does worst"
        worst.append(f"{start} on {label['label']} (AUROC {plain(label.get('auroc'))}{bounds})")
    return [*sentences, *([" ".join(worst) + "."] if worst else [])]


def figures(run: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], result: Result) -> list[tuple[str, str, str]]:
    """The tiles under the headline: (name, value, note)."""
    tiles = []
    if (name := result.headline) is not None:
        tiles.append((metric_name(name), plain(result.summary[name]), interval_of(result.summary, name)))
        if site := weakest_site(result):
            values = site_values(result)
            gap = max(values.values()) - min(values.values())
            tiles.append(
                ("Weakest site", str(site["site"]), f"{plain(site['summary'][name])}, {gap:.3f} below the best")
            )
        if label := weakest_label(result):
            tiles.append(("Weakest label", str(label["label"]), f"AUROC {plain(label.get('auroc'))}"))
    if run.get("selected_round") is not None:
        tiles.append(("Round kept", plain(run["selected_round"]), f"of {len(rounds)}" if rounds else ""))
    if rounds:
        down, up = (sum(number(record.get(key)) or 0 for record in rounds) for key in ("bytes_down", "bytes_up"))
        tiles.append(("Data moved", data_size(down + up), f"{data_size(down)} to the sites, {data_size(up)} back"))
    if number(run.get("seconds")):
        tiles.append(("Time", duration(run["seconds"]), ""))
    return tiles


def remarks(run: Mapping[str, Any], result: Result) -> list[str]:
    """How sites weigh in the headline, how the model was chosen, and what the averages leave out and why."""
    texts = []
    if result.headline is not None and (values := site_values(result)):
        undefined = len(result.per_site) - len(values)
        texts.append(
            "The headline pools the examples of all sites. Equal-site mean, the mean over "
            f"{number_of(len(values), 'site')} of each site's own {spoken(result.headline)}: "
            f"{plain(statistics.fmean(values.values()))}"
            + (f" ({number_of(undefined, 'site')} without a value left out)." if undefined else ".")
        )
    if run.get("selected_round") is not None and run.get("selection_metric"):
        texts.append(
            f"The model kept is that of round {run['selected_round']}, the best on validation data by "
            f"{spoken(str(run['selection_metric']))} ({plain(run.get('selection_value'))}); test data had no say."
        )
    if left_out := exclusions(run):
        texts.append("Not in the averages: " + "; ".join(f"{label} ({why})" for label, why in left_out.items()) + ".")
    if undefined := result.summary.get("undefined_labels"):
        texts.append(f"Without an AUROC, and so in no average: {', '.join(map(str, undefined))}.")
    return texts + cooccurrence_words(result.summary)


def charts(
    run: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    result: Result,
) -> list[Chart]:
    """Curves over rounds and over megabytes, of validation data where there are any, else of test data."""
    split = "val" if any(record.get("split") == "val" for record in evaluations) else "test"
    word = {"val": "Validation", "test": "Test"}[split]
    shown = [
        {**record, "summary": with_collapse(record.get("summary") or {})}
        for record in evaluations
        if record.get("split") == split and number(record.get("round")) is not None
    ]
    pooled = [record for record in shown if record.get("scope") == "pooled"]
    name = result.headline or "macro_auroc"
    kept = number(run.get("selected_round"))

    def curve(records: Iterable[Mapping[str, Any]], key: str, at: Mapping[Any, float] | None = None) -> list[Point]:
        pairs = ((record["round"], number(record["summary"].get(key))) for record in records)
        points = [(at[r] if at is not None else float(r), y) for r, y in pairs if at is None or r in at]
        return sorted(points, key=lambda point: point[0])

    moved, total = {0: 0.0}, 0.0
    for record in rounds:
        total += sum(number(record.get(key)) or 0.0 for key in ("bytes_down", "bytes_up")) / 1e6
        moved[record.get("round")] = total
    scopes = sorted({str(record.get("scope")) for record in shown} - {"pooled"})

    def by_site(key: str, low_is_weak: bool = True) -> Chart | None:
        curves = [(scope, curve((record for record in shown if record.get("scope") == scope), key)) for scope in scopes]
        return line_chart(f"{word} by site: {metric_name(key)}", "round", few(curves, low_is_weak), kept)

    sites = sorted({str(site) for record in rounds for site in record.get("train_loss") or {}})
    losses = [
        (
            site,
            [
                (float(record.get("round") or 0), number((record.get("train_loss") or {}).get(site)))
                for record in rounds
            ],
        )
        for site in sites
    ]
    drawn = (
        line_chart(f"{word}, all sites", "round", [(metric_name(key), curve(pooled, key)) for key in CURVES], kept),
        by_site(name),
        line_chart(
            f"{word} against data moved",
            "megabytes, both ways, all sites",
            [(metric_name(key), curve(pooled, key, moved)) for key in dict.fromkeys((name, "worst_auroc"))],
            moved.get(kept) if kept is not None else None,
        ),
        line_chart("Training loss by site", "round", few(losses, low_is_weak=False), kept),
        *(by_site(key, low_is_weak=key == "collapse_cosine") for key in COLLAPSE),
    )
    return [chart for chart in drawn if chart is not None]


def few(series: Sequence[tuple[str, list[Point]]], low_is_weak: bool = True) -> list[tuple[str, list[Point]]]:
    """The curves themselves if there are at most MAX_CURVES, else the weakest, median and best value at each x."""
    if len(series) <= MAX_CURVES:
        return list(series)
    at: dict[float, list[float]] = {}
    for _, points in series:
        for x, y in points:
            if y is not None:
                at.setdefault(x, []).append(y)
    weakest, best = (min, max) if low_is_weak else (max, min)
    return [
        (f"{word} of {len(series)} sites", [(x, choose(values)) for x, values in sorted(at.items())])
        for word, choose in (("weakest", weakest), ("median", statistics.median), ("best", best))
    ]


def made(run: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The run's identity and the versions it ran with, as titled pairs."""
    names = {
        "method": "Method",
        "task": "Task",
        "num_parameters": "Parameters",
        "model_sha256": "Model SHA-256",
        "selection_metric": "Selected by",
        "started": "Started",
        "finished": "Finished",
    }
    model = [(name, plain(run[key])) for key, name in names.items() if run.get(key) is not None]
    versions = [(str(name), str(version)) for name, version in (run.get("versions") or {}).items()]
    return [(title, rows) for title, rows in (("Model", model), ("Versions", versions)) if rows]


def _sections(settings: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Settings as sections; keys outside any section come first, under "run"."""
    settings = settings if isinstance(settings, Mapping) else {}
    loose = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    sections = [(key, value) for key, value in settings.items() if isinstance(value, Mapping) and value]
    return [("run", loose), *sections] if loose else sections


def _failure(run: Mapping[str, Any], status: str) -> list[str]:
    reason = run.get("error") or run.get("reason")
    return [f"The run {status}: {reason}"] if reason else []


def _when(run: Mapping[str, Any]) -> str:
    times = [str(run[key]) for key in ("started", "finished") if run.get(key)]
    return " to ".join(times)
