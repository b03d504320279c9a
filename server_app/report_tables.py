"""The result a report is about, and the report's tables, as plain text that the template escapes."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server_app.report_collapse import COLLAPSE, pooled_collapse, with_collapse
from server_app.report_words import (
    METRIC_NAMES,
    NOT_DEFINED,
    SUPPRESSED,
    count,
    data_size,
    duration,
    interval_of,
    metric_name,
    number,
    number_of,
    plain,
    round_ranges,
)

HEADLINES = ("macro_auroc", "balanced_accuracy", "accuracy", "macro_ap", "macro_f1", "micro_auroc")
SITE_COLUMNS = (
    "macro_auroc",
    "worst_auroc",
    "macro_ap",
    "macro_f1",
    "accuracy",
    "balanced_accuracy",
    "worst_recall",
    "loss",
    *COLLAPSE,
)


@dataclass(frozen=True)
class Cell:
    """A table cell: its text and, in small type below it, what qualifies it."""

    text: str
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """A table row; `mark` is "weak" (weakest of its table), "out" (not in the headline) or empty."""

    name: str
    cells: Sequence[Cell]
    note: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first of `columns` names the rows. `wordy` ones hold text rather than figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ""
    wordy: bool = False


@dataclass(frozen=True)
class Result:
    """The evaluation the page is about: the final test, or the last one there was; `where` says which in words."""

    where: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    per_class: Sequence[Mapping[str, Any]] = ()
    per_site: Sequence[Mapping[str, Any]] = ()

    @property
    def headline(self) -> str | None:
        """The first of HEADLINES with a value, None if no figure is defined."""
        return next((name for name in HEADLINES if number(self.summary.get(name)) is not None), None)


def shown_result(run: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> Result:
    """The final test of `run.json`; without one the last pooled evaluation, test before validation."""
    test = (run.get("final") or {}).get("test") or {}
    if test.get("summary"):
        return _result("held-out test", test, test.get("per_site") or ())
    for split, word in (("test", "test"), ("val", "validation")):
        pooled = [record for record in evaluations if record.get("split") == split and record.get("scope") == "pooled"]
        if pooled:
            last = pooled[-1]
            sites = [
                {"site": record.get("scope"), "summary": record.get("summary") or {}}
                for record in evaluations
                if (record.get("split"), record.get("round")) == (split, last.get("round"))
                and record.get("scope") != "pooled"
            ]
            where = f"{word} (round {last.get('round')}, not the final test)"
            return _result(where, last, sites)
    return Result()


def _result(where: str, pooled: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> Result:
    sites = [{**site, "summary": with_collapse(site.get("summary") or {})} for site in sites]
    summary = pooled_collapse(pooled.get("summary") or {}, [site["summary"] for site in sites])
    return Result(where, summary, pooled.get("per_class") or (), sites)


def weakest_site(result: Result) -> Mapping[str, Any] | None:
    """The entry of the site with the lowest headline figure; None where no two sites differ."""
    values = site_values(result)
    return result.per_site[min(values, key=values.__getitem__)] if len(set(values.values())) > 1 else None


def weakest_label(result: Result) -> Mapping[str, Any] | None:
    """The row of the headline label with the lowest AUROC; None where no two labels differ."""
    rows = [row for row in result.per_class if row.get("in_headline", True) and number(row.get("auroc")) is not None]
    return min(rows, key=lambda row: row["auroc"]) if len({row["auroc"] for row in rows}) > 1 else None


def site_values(result: Result) -> dict[int, float]:
    """The headline figure by position in `per_site`, where it is defined."""
    values = (number((site.get("summary") or {}).get(result.headline)) for site in result.per_site)
    return {index: value for index, value in enumerate(values) if value is not None}


def labels_table(run: Mapping[str, Any], result: Result) -> Table | None:
    """One row a label, with support and intervals; labels outside the headline are greyed, the weakest is marked."""
    if not result.per_class:
        return None
    weakest, reasons = weakest_label(result), exclusions(run)
    rows = []
    for entry in result.per_class:
        label = str(entry.get("label"))
        inside = entry.get("in_headline", True)
        hidden = number(entry.get("suppressed_sites"))
        note = f"not in the averages: {reasons.get(label, 'set aside')}" if not inside else ""
        cells = [
            Cell(count(entry.get("positives")), f"{SUPPRESSED} at {number_of(int(hidden), 'site')}" if hidden else "")
        ]
        cells.append(Cell(count(entry.get("negatives"))))
        cells += [
            Cell(plain(entry.get(key)), interval_of(entry, key))
            for key in ("auroc", "ap", "f1", "sensitivity", "specificity")
        ]
        cells.append(Cell(plain(entry.get("threshold"))))
        mark = "weak" if entry is weakest else "" if inside else "out"
        rows.append(Row(label, cells, "weakest label" if mark == "weak" else note, mark))
    columns = ("Label", "With", "Without", "AUROC", "AP", "F1", "Sensitivity", "Specificity", "Threshold")
    caption = "With, without: examples that have the finding and that do not, of all sites. Small type: 95 % intervals."
    return Table(f"By label, {result.where} data", columns, rows, caption)


def sites_table(result: Result) -> Table | None:
    """One row a site with the figures its summary holds, the weakest marked."""
    if not result.per_site:
        return None
    summaries = [site.get("summary") or {} for site in result.per_site]
    present = dict.fromkeys(key for summary in summaries for key in summary)
    others = [key for key in present if key not in METRIC_NAMES and _is_figure(key, summaries)]
    keys = [key for key in SITE_COLUMNS if key in present] + others
    weakest = weakest_site(result)
    rows = []
    for site, summary in zip(result.per_site, summaries, strict=True):
        cells = [Cell(count(site["num_examples"]) if "num_examples" in site else "")]
        cells += [Cell(plain(summary.get(key)), interval_of(summary, key) or _label_of(summary, key)) for key in keys]
        weak = site is weakest
        rows.append(Row(str(site.get("site")), cells, "weakest site" if weak else "", "weak" if weak else ""))
    caption = "Each site's own examples, measured with the same model and the same thresholds."
    return Table(f"By site, {result.where} data", ["Site", "Examples", *map(metric_name, keys)], rows, caption)


def trouble_table(run: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Table | None:
    """Which site's reply was refused or did not come, why and in which rounds; None if there was nothing.

    With a secure sum also which modules were frozen or had values cut.
    """
    seen: dict[tuple[str, str, str], list[int]] = {}
    for record in rounds:
        at = int(number(record.get("round")) or 0)
        for module, reason in (record.get("frozen") or {}).items():
            seen.setdefault((f"module {module}", "frozen", reason), []).append(at)
        for module in record.get("clipped") or {}:
            reason = "changes beyond privacy.secure_range were cut; metrics.jsonl says how many"
            seen.setdefault((f"module {module}", "clipped", reason), []).append(at)
        for kind in ("refused", "missing"):
            for entry in record.get(kind) or []:
                site, reason = _site_and_reason(entry)
                seen.setdefault((site, kind, reason), []).append(at)
    rows = [
        Row(site, [Cell(kind), Cell(round_ranges(at)), Cell(reason)], mark="")
        for (site, kind, reason), at in sorted(seen.items())
    ]
    for entry in run.get("outstanding") or []:
        site, reason = _site_and_reason(entry)
        rows.append(Row(site, [Cell("outstanding"), Cell("at the end"), Cell(reason)]))
    caption = (
        "Refused: the reply came but failed a check and was left out. Missing: no reply in time. The rounds went on "
        "without them, with the result they would have had if the site had not been asked."
    )
    if any(kind in ("frozen", "clipped") for _, kind, _ in seen):
        caption += " Frozen: too few sites trained the module for a secure sum, so it stayed as it was."
    return (
        Table("Refused replies and missing sites", ("Site", "What", "Rounds", "Reason"), rows, caption, wordy=True)
        if rows
        else None
    )


def rounds_table(rounds: Sequence[Mapping[str, Any]]) -> Table | None:
    """Time, traffic and replies of every round."""
    if not rounds:
        return None
    rows = []
    for record in rounds:
        losses = [value for value in map(number, (record.get("train_loss") or {}).values()) if value is not None]
        rows.append(
            Row(
                plain(record.get("round")),
                [
                    Cell(duration(record.get("seconds"))),
                    Cell(data_size(record.get("bytes_down"))),
                    Cell(data_size(record.get("bytes_up"))),
                    *(Cell(str(len(record.get(kind) or []))) for kind in ("accepted", "refused", "missing")),
                    Cell(plain(statistics.fmean(losses)) if losses else NOT_DEFINED),
                ],
            )
        )
    columns = (
        "Round",
        "Time",
        "To the sites",
        "Back",
        "Accepted",
        "Refused",
        "Missing",
        "Training loss, mean of sites",
    )
    return Table(f"All {len(rounds)} rounds" if len(rounds) > 1 else "The round", columns, rows)


def data_table(run: Mapping[str, Any]) -> Table | None:
    """What each site brought: examples by split, modalities, checksum."""
    if not (sites := run.get("sites")):
        return None
    rows = []
    for site in sites:
        cells = [Cell(count(site.get(key))) for key in ("num_train", "num_val", "num_test")]
        cells += [
            Cell(", ".join(map(str, site.get("modalities") or [])) or "-"),
            Cell(str(site.get("checksum") or "-")[:12]),
        ]
        rows.append(Row(str(site.get("site")), cells))
    sums = [sum(number(site.get(key)) or 0 for site in sites) for key in ("num_train", "num_val", "num_test")]
    rows.append(Row("All sites", [*(Cell(f"{int(total):,}") for total in sums), Cell(""), Cell("")]))
    caption = f"Patients are in one split only. Counts marked {SUPPRESSED} were small and stayed at the site."
    return Table("The data", ("Site", "Training", "Validation", "Test", "Modalities", "Checksum"), rows, caption)


def positives_table(run: Mapping[str, Any]) -> Table | None:
    """How many examples have each finding at each site; None where no site says."""
    sites = [site for site in run.get("sites") or [] if site.get("positives")]
    labels = run.get("labels") or []
    if not sites or not labels:
        return None
    rows = []
    for index, label in enumerate(labels):
        counts = [site["positives"][index] if index < len(site["positives"]) else None for site in sites]
        rows.append(Row(str(label), [Cell(count(value)) for value in counts]))
    return Table("Examples with the finding, by site", ["Label", *(str(site.get("site")) for site in sites)], rows)


def exclusions(run: Mapping[str, Any]) -> dict[str, str]:
    entries = run.get("headline_excluded") or []
    return {str(entry.get("label")): str(entry.get("reason") or "no reason given") for entry in entries}


def _is_figure(key: str, summaries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an unknown summary key is a figure of its own, not the bound, quantile or count of another."""
    secondary = key.endswith(("_low", "_high", "_classes", "_label", "_q10", "_q50", "_q90"))
    known = key.startswith(("micro_", "worst_")) or key == "num_examples"
    return not secondary and not known and any(number(summary.get(key)) is not None for summary in summaries)


def _label_of(summary: Mapping[str, Any], key: str) -> str:
    return str(summary.get(f"{key}_label") or "")


def _site_and_reason(entry: Any) -> tuple[str, str]:
    """An entry is a site's name, or an object with `site` and `reason`."""
    if isinstance(entry, Mapping):
        return str(entry.get("site")), str(entry.get("reason") or "no reason given")
    return str(entry), "no reply in time"
