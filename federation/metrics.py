"""Metrics of the pooled data from counts that add up across sites: no site sends a score, a patient or a file name.

Each site fills one `ScoreHistogram`; the sum of all sites' histograms gives the AUROC, average precision and threshold
metrics of the pooled scores. Everything a histogram holds is an integer, so merging is exact and independent of order.

Choice: the bins are equally wide in the logit within four stretches (1/8 of the bins on [-16, -6], 1/2 on [-6, 0], 1/4
on [0, 6], 1/8 on [6, 16]), because rare labels score near 0.01 and equal steps of probability would put them all in
one bin. One edge is exactly 0.5. Bins are closed on the right, so "score > edge" is counted without error at an edge.
Choice: beside its counts each bin keeps the summed position of its scores within it, in 1/1024 of its width. With
densities that are linear inside a bin, P(positive above negative) = 1/2 + the difference of the two mean positions;
counts alone miss scikit-learn's AUROC by up to 0.006 with 256 bins and 300 positives near 0.02, with it by 0.0002; the
default of 1024 bins stays within 0.0005 with 30 positives too, unless a tenth of the scores is saturated.
A histogram names no patient, but a bin with one score shows that score to 1/1024 of a bin: see `suppress`.
An undefined value is `nan` here and None in `federation/summaries.py`: never 0 or 0.5.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from federation.blocks import four_blocks as four_blocks  # a metric too, found under this name
from federation.ranking import cf1 as cf1  # and these, of scores that stay where they are
from federation.ranking import mean_average_precision as mean_average_precision
from federation.ranking import of1 as of1

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS_PER_BIN = 1024
_MAX_ENTRY = 1 << 40  # sums over bins, classes and sites stay far below the end of int64
_SCORE_SLACK = 1e-6  # float32 softmax may exceed 1 by a few ulp


CONFUSION_METRICS = ("accuracy", "balanced_accuracy", "worst_recall")
SELECTION_METRICS = (
    *(f"{kind}_{name}" for name in ("auroc", "ap", "f1") for kind in ("macro", "micro", "worst")),
    "neg_loss",
    *CONFUSION_METRICS,
)
"""Names a model may be selected by, on validation data; for each of them higher is better."""


class Counts(NamedTuple):
    """Confusion counts of every class at its threshold; each field (C,) int64."""

    tp: Ints
    fp: Ints
    fn: Ints
    tn: Ints


def bin_edges(bins: int) -> Floats:
    """Interior edges of the score bins, ascending, (bins - 1,) float64; one of them is exactly 0.5.

    The position of the edges is part of the wire contract: histograms add up only if all sites use the same.
    """
    if bins < 2:
        raise ValueError(f"a score histogram needs at least 2 bins, got {bins}")
    logits = np.interp(np.arange(1, bins) / bins, [0, 1 / 8, 5 / 8, 7 / 8, 1], [-16.0, -6.0, 0.0, 6.0, 16.0])
    edges = 1 / (1 + np.exp(-logits))
    edges[np.argmin(np.abs(logits))] = 0.5
    return edges


class ScoreHistogram:
    """Per class histograms of the scores of positives and of negatives, which add up across sites.

    Attributes, all int64: `positives`, `negatives` (C, bins) counts; `positive_steps`, `negative_steps` (C, bins)
    summed positions within the bin; `suppressed` (C,) how many of the merged histograms had blanked the class.
    """

    def __init__(self, num_classes: int, bins: int = 1024) -> None:
        if num_classes < 1:
            raise ValueError(f"a score histogram needs at least 1 class, got {num_classes}")
        self.edges = bin_edges(bins)
        shape = (num_classes, bins)
        self.positives, self.negatives = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.positive_steps, self.negative_steps = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.suppressed = np.zeros(num_classes, np.int64)

    @property
    def num_classes(self) -> int:
        return self.positives.shape[0]

    @property
    def bins(self) -> int:
        return self.positives.shape[1]

    def update(self, scores: Any, targets: Any, known: Any = None) -> None:
        """Counts one batch; numpy arrays or torch tensors on any device.

        `scores` (n, C) probabilities; `targets` (n, C) of 0 and 1; `known` (n, C) bool, None means all. A pair that is
        not known is not counted, whatever its target. Raises ValueError, and counts nothing, on a wrong shape, a score
        that is NaN or outside [0, 1] (known or not: the model is broken), or a known target that is neither 0 nor 1.
        """
        scores, targets = _to_numpy(scores).astype(np.float64), _to_numpy(targets)
        known = np.ones(scores.shape, bool) if known is None else _to_numpy(known).astype(bool)
        if scores.ndim != 2 or scores.shape[1] != self.num_classes:
            raise ValueError(f"scores must be (n, {self.num_classes}), got {scores.shape}")
        if targets.shape != scores.shape or known.shape != scores.shape:
            raise ValueError(f"scores {scores.shape}, targets {targets.shape} and known {known.shape} must agree")
        if np.isnan(scores).any():
            raise ValueError(f"{np.isnan(scores).sum()} of {scores.size} scores are NaN: did the model diverge?")
        if (np.abs(scores - 0.5) > 0.5 + _SCORE_SLACK).any():
            raise ValueError(f"scores must be probabilities in [0, 1], got [{scores.min()}, {scores.max()}]")
        if not np.isin(targets[known], (0, 1)).all():
            raise ValueError("targets of known pairs must be 0 or 1; mark the others as not known")

        scores = scores.clip(0.0, 1.0)
        bin_of = np.searchsorted(self.edges, scores, side="left")  # left: edge[i-1] < score <= edge[i]
        bounds = np.concatenate(([0.0], self.edges, [1.0]))
        low, high = bounds[bin_of], bounds[bin_of + 1]
        steps = np.rint((scores - low) / (high - low) * STEPS_PER_BIN)
        cell = bin_of + self.bins * np.arange(self.num_classes)
        for value, counts, sums in (
            (1, self.positives, self.positive_steps),
            (0, self.negatives, self.negative_steps),
        ):
            chosen = known & (targets == value)
            counts += np.bincount(cell[chosen], minlength=counts.size).reshape(counts.shape)
            sums += np.bincount(cell[chosen], steps[chosen], minlength=counts.size).astype(np.int64).reshape(sums.shape)

    def merge(self, other: "ScoreHistogram") -> Self:
        """Adds another site's counts to this histogram and returns it; raises ValueError if classes or bins differ."""
        if self.positives.shape != other.positives.shape:
            raise ValueError(f"(classes, bins) differ: {self.positives.shape} here, {other.positives.shape} there")
        for name, mine in self._arrays().items():
            mine += getattr(other, name)
        return self

    @staticmethod
    def shapes(num_classes: int, bins: int = 1024) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of `to_arrays`, by name: what a payload has to declare."""
        counts = ("positives", "negatives", "positive_steps", "negative_steps")
        return {**dict.fromkeys(counts, (num_classes, bins)), "suppressed": (num_classes,)}

    def to_arrays(self) -> dict[str, Ints]:
        """Copies of the five arrays that travel, by attribute name, int64: positions outgrow int32 at a large site."""
        return {name: array.copy() for name, array in self._arrays().items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, ArrayLike]) -> Self:
        """Copies of received arrays, checked: raises ValueError unless they could have come from `to_arrays`.

        `positives` and `negatives` are required, of any integer type. Without the two `*_steps` all scores of a bin
        count as tied; `suppressed` defaults to zeros.
        """
        for name in ("positives", "negatives"):
            if name not in arrays:
                raise ValueError(f"array {name!r} is missing, got {sorted(arrays)}")
        shape = np.shape(arrays["positives"])
        if len(shape) != 2:
            raise ValueError(f"'positives' must be (classes, bins), got {shape}")
        histogram = cls(*shape)
        for name, mine in histogram._arrays().items():
            if name not in arrays:
                continue
            received = np.asarray(arrays[name])
            if received.shape != mine.shape or received.dtype.kind not in "iu":
                raise ValueError(f"{name!r} must be {mine.shape} integers, got {received.shape} {received.dtype}")
            if (received < 0).any() or (received > _MAX_ENTRY).any():
                raise ValueError(f"{name!r} must be in 0..{_MAX_ENTRY}, got {received.min()}..{received.max()}")
            mine += received.astype(np.int64)
        for side in ("positive", "negative"):
            counts, steps = getattr(histogram, f"{side}s"), getattr(histogram, f"{side}_steps")
            if f"{side}_steps" not in arrays:
                steps += counts * (STEPS_PER_BIN // 2)
            if (steps > counts * STEPS_PER_BIN).any():
                raise ValueError(f"'{side}_steps' exceed their counts: no scores have these positions")
        return histogram

    def suppress(self, min_cell: int) -> Self:
        """A copy in which a class with 1 to min_cell - 1 positives, or as few negatives, is blank and so marked.

        Run it at the site, before the histogram leaves. `min_cell` of 0 or 1 blanks nothing.
        """
        small = [(count > 0) & (count < min_cell) for count in self.support()]
        blank = small[0] | small[1]
        arrays = {name: (array.T * ~blank).T for name, array in self._arrays().items()}
        return type(self).from_arrays({**arrays, "suppressed": self.suppressed + blank})

    def subset(self, classes: Sequence[int]) -> Self:
        """A copy with only the given classes, in that order; one class at least."""
        return type(self).from_arrays({name: array[np.asarray(classes)] for name, array in self._arrays().items()})

    def pooled(self) -> Self:
        """A copy with one class that holds every (example, class) pair: its metrics are the micro averages."""
        return type(self).from_arrays({name: a.sum(0, keepdims=True) for name, a in self._arrays().items()})

    def resample(self, generator: np.random.Generator) -> Self:
        """A bootstrap draw: every class's positives and negatives redrawn from its own bins, their numbers fixed.

        Histograms do not know which scores belong to one patient, so labels are redrawn independently. A drawn score
        takes the mean position of its bin.
        """
        drawn = {"suppressed": self.suppressed}
        for side, means in zip(("positive", "negative"), self._mean_positions(), strict=True):
            counts = getattr(self, f"{side}s")
            total = counts.sum(1, keepdims=True)
            redrawn = generator.multinomial(total[:, 0], counts / np.maximum(total, 1))
            drawn[f"{side}s"], drawn[f"{side}_steps"] = redrawn, np.rint(redrawn * means).astype(np.int64)
        return type(self).from_arrays(drawn)

    def support(self) -> tuple[Ints, Ints]:
        """Known positives and known negatives of each class, two (C,) int64."""
        return self.positives.sum(1), self.negatives.sum(1)

    def auroc(self) -> Floats:
        """Area under the ROC curve of each class, (C,) float64, nan without a positive or a negative."""
        below = self.negatives.cumsum(1) - self.negatives
        wins = (self.positives * (below + self._win_rate() * self.negatives)).sum(1)
        positives, negatives = self.support()
        return ratio(wins, positives.astype(np.float64) * negatives)

    def average_precision(self) -> Floats:
        """Average precision (sum of precision x recall step) of each class, (C,) float64, nan where AUROC is.

        Choice: scores in one bin are taken as spread out as their mean positions say, and as one tied value, as
        scikit-learn takes ties, where the two mean positions are equal.
        """
        mean_positive, mean_negative = self._mean_positions()
        tied = mean_positive == mean_negative
        positives_above = self.positives.sum(1, keepdims=True) - self.positives.cumsum(1)
        negatives_above = self.negatives.sum(1, keepdims=True) - self.negatives.cumsum(1)
        found = positives_above + np.where(tied, self.positives, (self.positives + 1) / 2)
        alarms = negatives_above + np.where(tied, self.negatives, self.negatives * (1 - self._win_rate()))
        precision = found / np.maximum(found + alarms, 1)
        positives, negatives = self.support()
        return np.where(negatives > 0, ratio((self.positives * precision).sum(1), positives), np.nan)

    def snap(self, thresholds: ArrayLike) -> Floats:
        """The bin edge nearest to each threshold, (C,) float64: the thresholds at which counts are exact.

        `thresholds` is a scalar or (C,); raises ValueError on nan or outside [0, 1].
        """
        wanted = np.broadcast_to(np.asarray(thresholds, np.float64), (self.num_classes,))
        if not ((wanted >= 0) & (wanted <= 1)).all():
            raise ValueError(f"thresholds must be in [0, 1], got {wanted.tolist()}")
        return self.edges[np.abs(wanted[:, None] - self.edges).argmin(1)]

    def counts(self, thresholds: ArrayLike = 0.5) -> Counts:
        """Confusion counts with "positive" meaning score > snap(threshold), threshold scalar or (C,)."""
        first = np.searchsorted(self.edges, self.snap(thresholds)) + 1
        above = np.arange(self.bins) >= first[:, None]
        positives, negatives = self.support()
        tp, fp = (self.positives * above).sum(1), (self.negatives * above).sum(1)
        return Counts(tp, fp, positives - tp, negatives - fp)

    def f1(self, thresholds: ArrayLike = 0.5) -> Floats:
        """F1 of each class, (C,) float64: nan without a positive, 0 if none of them is found."""
        tp, fp, fn, _ = self.counts(thresholds)
        return np.where(tp + fn > 0, ratio(2 * tp, 2 * tp + fp + fn), np.nan)

    def sensitivity(self, thresholds: ArrayLike = 0.5) -> Floats:
        """Share of positives found, (C,) float64, nan without a positive."""
        tp, _, fn, _ = self.counts(thresholds)
        return ratio(tp, tp + fn)

    def specificity(self, thresholds: ArrayLike = 0.5) -> Floats:
        """Share of negatives left alone, (C,) float64, nan without a negative."""
        _, fp, _, tn = self.counts(thresholds)
        return ratio(tn, tn + fp)

    def ppv(self, thresholds: ArrayLike = 0.5) -> Floats:
        """Share of true ones among those called positive (precision), (C,) float64, nan if none is called positive."""
        tp, fp, _, _ = self.counts(thresholds)
        return ratio(tp, tp + fp)

    def best_thresholds(self, criterion: str = "f1") -> Floats:
        """The bin edge that maximises "f1" or "youden" (sensitivity + specificity - 1) for each class, (C,) float64.

        Fit it on validation histograms only: fitted on the test data it reports a score nobody will reach.
        Choice: of equally good edges the one nearest 0.5; a class without positives or negatives keeps 0.5.
        """
        positives, negatives = (count[:, None] for count in self.support())
        tp = positives - self.positives.cumsum(1)[:, :-1]
        fp = negatives - self.negatives.cumsum(1)[:, :-1]
        if criterion == "f1":
            value = ratio(2 * tp, tp + fp + positives)
        elif criterion == "youden":
            value = ratio(tp, positives) - ratio(fp, negatives)
        else:
            raise ValueError(f"criterion must be 'f1' or 'youden', got {criterion!r}")
        best = value >= np.nanmax(np.where(np.isnan(value), -1.0, value), axis=1, keepdims=True)
        distance = np.where(best, np.abs(self.edges - 0.5), np.inf)
        defined = (positives > 0) & (negatives > 0)
        return np.where(defined[:, 0], self.edges[distance.argmin(1)], 0.5)

    def recall_thresholds(self, target: ArrayLike = 0.95) -> Floats:
        """The largest bin edge above which at least `target` of the positives lie, per class, (C,) float64.

        For classes that must not be missed; fit it on validation histograms only. `target` is a scalar or (C,) in
        [0, 1], else ValueError. Choice: where even the lowest edge misses the target it is the lowest edge; a class
        without positives keeps 0.5, as in `best_thresholds`.
        """
        wanted = np.broadcast_to(np.asarray(target, np.float64), (self.num_classes,))
        if not ((wanted >= 0) & (wanted <= 1)).all():
            raise ValueError(f"recall targets must be in [0, 1], got {wanted.tolist()}")
        positives = self.positives.sum(1)
        recall = ratio(positives[:, None] - self.positives.cumsum(1)[:, :-1], positives[:, None])
        reached = (recall >= wanted[:, None]).sum(1)  # recall falls from edge to edge, so these are the lowest ones
        return np.where(positives > 0, self.edges[np.maximum(reached, 1) - 1], 0.5)

    def _arrays(self) -> dict[str, Ints]:
        return {name: getattr(self, name) for name in self.shapes(1)}

    def _mean_positions(self) -> tuple[Floats, Floats]:
        """Mean position in each bin of its positives and of its negatives, (C, bins) in steps, 0 where empty."""
        return (
            self.positive_steps / np.maximum(self.positives, 1),
            self.negative_steps / np.maximum(self.negatives, 1),
        )

    def _win_rate(self) -> Floats:
        """Chance that a positive outranks a negative of the same bin, ties half, (C, bins) float64.

        One positive beside one negative is no chance: their positions say which is higher.
        """
        mean_positive, mean_negative = self._mean_positions()
        difference = (mean_positive - mean_negative) / STEPS_PER_BIN
        chance = np.where(self.positives * self.negatives == 1, np.sign(difference) / 2, difference)
        both = (self.positives > 0) & (self.negatives > 0)
        return np.where(both, np.clip(0.5 + chance, 0.0, 1.0), 0.5)


def confusion_matrix(predicted: Any, targets: Any, num_classes: int) -> Ints:
    """Counts of (true class, predicted class), (C, C) int64: add the sites' matrices to get the pooled one.

    `predicted`, `targets` (n,) class indices, numpy or torch; a negative target is unknown and not counted. Raises
    ValueError on other shapes or on an index of `num_classes` or more.
    """
    predicted, targets = _to_numpy(predicted), _to_numpy(targets)
    if predicted.ndim != 1 or predicted.shape != targets.shape:
        raise ValueError(f"predicted {predicted.shape} and targets {targets.shape} must both be (n,)")
    known = targets >= 0
    predicted, targets = predicted[known].astype(np.int64), targets[known].astype(np.int64)
    if known.any() and not (0 <= predicted.min() <= max(predicted.max(), targets.max()) < num_classes):
        raise ValueError(f"class indices must be in 0..{num_classes - 1}")
    return np.bincount(targets * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)


def check_selection_metric(name: str, task: str = "multiclass") -> str:
    """Returns `name` if a model can be selected by it, else raises ValueError naming the nearest.

    `task` "multilabel" has no confusion matrix, hence none of CONFUSION_METRICS.
    """
    allowed = [known for known in SELECTION_METRICS if task != "multilabel" or known not in CONFUSION_METRICS]
    if name in allowed:
        return name
    problem = f"selection metric {name!r} needs one label a sample" if name in SELECTION_METRICS else None
    nearest = difflib.get_close_matches(name, allowed, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"{problem or f'unknown selection metric {name!r}'}: did you mean {nearest!r}? Choose from {', '.join(allowed)}"
    )


def selection_value(summary: Mapping[str, Any], name: str) -> float | None:
    """The value of a selection metric in a summary, higher is better; None if it is undefined or was not measured."""
    if check_selection_metric(name) == "neg_loss":
        loss = none_if_nan(summary.get("loss"))
        return None if loss is None else -loss
    return none_if_nan(summary.get(name))


def none_if_nan(value: Any) -> Any:
    """The value as plain Python for JSON, None if it is nan."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and np.isnan(value) else value


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Floats:
    """numerator / denominator in float64, nan where the denominator is 0."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    shape = np.broadcast_shapes(numerator.shape, denominator.shape)
    return np.divide(numerator, denominator, out=np.full(shape, np.nan), where=denominator != 0)


def _to_numpy(values: Any) -> NDArray[Any]:
    """A numpy array of a numpy array or of a torch tensor, which this module knows by its methods only."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values  # numpy has no bfloat16
    return np.asarray(values)
