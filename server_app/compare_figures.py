"""The figures of one finished cell, read from its ``run.json`` and ``metrics.jsonl``, and what its sites labelled."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from server_app.report_labels import label_balance, read_labelled
from server_app.report_words import number

WORST_SITE, WORST_LABEL, WEAKEST_GAIN = "worst_site_auroc", "worst_auroc", "weakest_site_gain"
LABEL_BALANCE = "label_balance"
BYTES, SECONDS, ROUND_SECONDS = "bytes_per_round", "seconds", "seconds_per_round"


@dataclass(frozen=True)
class Figures:
    """``values``: test figures by their name in the summary, and those above; undefined is None.

    ``worst``: which site and which label the worst figures belong to. ``bytes``: down and up in a round.
    ``sites``: mean AUROC over labels of each site on its own test examples, where it is defined.
    """

    values: Mapping[str, float | None]
    worst: Mapping[str, str]
    bytes: tuple[float | None, float | None]
    run: Mapping[str, Any]
    sites: Mapping[str, float] = field(default_factory=dict)


def read_figures(run_dir: Path) -> Figures:
    """The figures of a completed run."""
    run = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    test = (run.get("final") or {}).get("test") or {}
    summary = test.get("summary") or {}
    values = {name: number(value) for name, value in summary.items()}
    sites = {row["site"]: number(row["summary"].get("macro_auroc")) for row in test.get("per_site") or []}
    defined = {site: value for site, value in sites.items() if value is not None}
    worst_site = min(defined, key=defined.__getitem__, default=None)
    values[WORST_SITE] = None if worst_site is None else defined[worst_site]
    rounds = _rounds(run_dir)
    down, up, seconds = (_mean(rounds, key) for key in ("bytes_down", "bytes_up", "seconds"))
    values |= {
        LABEL_BALANCE: label_balance(read_labelled(run_dir)),
        BYTES: None if down is None or up is None else down + up,
        SECONDS: number(run.get("seconds")),
        ROUND_SECONDS: seconds,
    }
    worst = {WORST_SITE: worst_site, WORST_LABEL: summary.get("worst_auroc_label")}
    return Figures(values, {key: name for key, name in worst.items() if name}, (down, up), run, defined)


def with_gains(figures: Mapping[str, Mapping[int, Figures]], gain_row: str) -> dict[str, dict[int, Figures]]:
    """The figures, by row and seed, with the weakest site's gain over the row ``gain_row`` at the same seed.

    The weakest site is the one with the lowest mean AUROC in ``gain_row`` (of equals the first by name); the gain is
    the row's mean AUROC there minus that one, and None where either is undefined: a row without that site has no gain
    at another. The rule is that of `federation.blocks.four_blocks`.
    """
    alone = {seed: found.sites for seed, found in figures[gain_row].items()}
    return {
        name: {seed: _with_gain(found, alone.get(seed, {})) for seed, found in by_seed.items()}
        for name, by_seed in figures.items()
    }


def _with_gain(found: Figures, alone: Mapping[str, float]) -> Figures:
    weakest = min(sorted(alone), key=alone.__getitem__, default=None)
    gain = None if weakest not in found.sites else found.sites[weakest] - alone[weakest]
    worst = {**found.worst, **({} if weakest is None else {WEAKEST_GAIN: weakest})}
    return replace(found, values={**found.values, WEAKEST_GAIN: gain}, worst=worst)


def _rounds(run_dir: Path) -> list[dict[str, Any]]:
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if line["kind"] == "round"]


def _mean(rounds: list[dict[str, Any]], key: str) -> float | None:
    values = [value for record in rounds if (value := number(record.get(key))) is not None]
    return statistics.fmean(values) if values else None
