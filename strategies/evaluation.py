"""Pooled evaluation: the sites' score histograms added up, beside every site's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from federation import wire
from federation.metrics import ScoreHistogram
from federation.summaries import per_class_table, recalls, summarise, summarise_confusion
from strategies.gate import Reply

POOLED = "pooled"


class PooledScores:
    """Scores of one split by site and over all sites, from accepted replies. Merging is exact and has no order.

    ``further``: a method's own figures of the whole, which join the pooled summary. ``counts``: by site, those of a
    method's own numbers that are lists; they enter no summary by themselves.
    """

    def __init__(self, labels: tuple[str, ...], task: str, bins: int) -> None:
        self.labels = labels
        self.task = task
        self._histograms = {POOLED: ScoreHistogram(len(labels), bins)}
        self._confusion = {POOLED: np.zeros((len(labels), len(labels)), np.int64)}
        self._loss = {POOLED: [0.0, 0]}
        self._extra: dict[str, dict[str, float]] = {}
        self.counts: dict[str, dict[str, list[int]]] = {}
        self.further: dict[str, float | None] = {}

    @property
    def sites(self) -> list[str]:
        """Sites that sent scores, sorted."""
        return sorted(set(self._histograms) - {POOLED})

    def add(self, reply: Reply, split: str) -> None:
        """Adds one reply's scores of a split (or of a view of it); a reply without them changes nothing."""
        arrays = reply.scores.get(split)
        if arrays is None:
            return
        histogram = ScoreHistogram.from_arrays({k: v for k, v in arrays.items() if k != "confusion"})
        self._histograms[reply.site] = histogram
        self._histograms[POOLED].merge(histogram)
        if "confusion" in arrays:
            self._confusion[reply.site] = arrays["confusion"].copy()
            self._confusion[POOLED] += arrays["confusion"]
        loss = reply.numbers[f"loss.{split}"]
        self._loss[reply.site] = [float(loss["loss_sum"]), int(loss["num_examples"])]
        self._loss[POOLED][0] += self._loss[reply.site][0]
        self._loss[POOLED][1] += self._loss[reply.site][1]
        extra = reply.numbers.get(f"{wire.EXTRA}.{split}", {})
        self.counts[reply.site] = {name: value for name, value in extra.items() if isinstance(value, list)}
        self._extra[reply.site] = {name: value for name, value in extra.items() if not isinstance(value, list)}

    def histogram(self, scope: str = POOLED) -> ScoreHistogram:
        """The scores of one site or of all. Raises KeyError for a site that sent none."""
        return self._histograms[scope]

    def best_thresholds(self) -> np.ndarray:
        """Per label ``(C,) float64``: the threshold of the best pooled F1; call it on validation scores only."""
        return self._histograms[POOLED].best_thresholds("f1")

    def rare(self, min_positives: int) -> set[str]:
        """Labels with fewer pooled positives than this: an AUROC of one positive is a coin."""
        positives, _ = self._histograms[POOLED].support()
        return {label for label, count in zip(self.labels, positives, strict=True) if count < min_positives}

    def summary(
        self,
        thresholds: np.ndarray | None,
        excluded: set[str],
        scope: str = POOLED,
        *,
        bootstrap_draws: int = 0,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Headline figures of one site or of all; undefined is None. ``thresholds``: per label, None for 0.5."""
        if scope not in self._histograms:
            return {}
        figures = summarise(
            self._histograms[scope],
            self.labels,
            thresholds=0.5 if thresholds is None else thresholds,
            excluded=excluded,
            bootstrap_draws=bootstrap_draws,
            seed=seed,
        )
        if self.task == "multiclass":
            figures |= summarise_confusion(self._confusion[scope], self.labels, excluded=excluded)
        total, count = self._loss[scope]
        loss = total / count if count else None
        # finite losses of two sites may add up to infinity, which JSON cannot say
        return (
            figures
            | {"loss": loss if loss is None or math.isfinite(loss) else None, "num_examples": count}
            | self._extras(scope)
            | (self.further if scope == POOLED else {})
        )

    def _extras(self, scope: str) -> dict[str, float]:
        """A method's own numbers: a site's, or their mean over the sites weighted by examples."""
        if scope != POOLED:
            return self._extra[scope]
        total = sum(self._loss[site][1] for site in self.sites)
        names = sorted({name for numbers in self._extra.values() for name in numbers})
        return {
            name: sum(self._extra[site][name] * self._loss[site][1] for site in self.sites) / total
            for name in names
            if total
        }

    def per_class(self, thresholds: np.ndarray | None, excluded: set[str], scope: str = POOLED) -> list[dict[str, Any]]:
        """One row a label with support, AUROC, AP, F1, sensitivity and specificity with intervals.

        For one-label tasks also the recall of the answer that scores highest, which no threshold enters.
        """
        thresholds = 0.5 if thresholds is None else thresholds
        rows = per_class_table(self._histograms[scope], self.labels, thresholds=thresholds, excluded=excluded)
        if self.task == "multiclass":
            rows = [{**row, "recall": value} for row, value in zip(rows, recalls(self._confusion[scope]), strict=True)]
        return rows
