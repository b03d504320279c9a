"""How the report puts values into words: figures, counts, intervals, times, sizes and the names of metrics."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOT_DEFINED, SUPPRESSED = "not defined", "suppressed"

METRIC_NAMES = {
    "macro_auroc": "AUROC, mean over labels",
    "micro_auroc": "AUROC, all labels pooled",
    "worst_auroc": "AUROC, weakest label",
    "macro_ap": "Average precision, mean",
    "macro_f1": "F1, mean over labels",
    "micro_f1": "F1, all labels pooled",
    "worst_f1": "F1, weakest label",
    "accuracy": "Accuracy",
    "balanced_accuracy": "Balanced accuracy",
    "worst_recall": "Recall, weakest label",
    "label_ratio": "Labelled share of all images",
    "label_balance": "Labelled: smallest class over largest",
    "aulc_accuracy": "Accuracy, area under the learning curve",
    "aulc_balanced_accuracy": "Balanced accuracy, area under the learning curve",
    "aulc_macro_f1": "F1, area under the learning curve",
    "aulc_macro_auroc": "AUROC, area under the learning curve",
    "loss": "Loss",
    "neg_loss": "Loss, sign turned",
    "map": "mAP",
    "official_map": "mAP, labels without a positive as 0",
    "map_labels": "Labels with a positive",
    "cf1": "CF1 at 0.5",
    "of1": "OF1 at 0.5",
    "cf1_tuned": "CF1 at validation thresholds",
    "of1_tuned": "OF1 at validation thresholds",
    "official_best_cf1_optimistic": "CF1 at the best of 0.1 to 0.9 on these data (optimistic)",
    "official_best_of1_optimistic": "OF1 at the best of 0.1 to 0.9 on these data (optimistic)",
    "collapse_cosine": "Cosine to the label's direction",
    "collapse_ratio": "Scatter within labels over between",
    "cooc_fp_lift": "False positives by co-occurrence, times as many",
    "cooc_fp_lift_pairs": "Pairs of labels it is a mean of",
    "cooc_fp_lift_left_out": "Pairs of labels without a value",
}
GLOSSARY = (
    ("AUROC", "How often a patient with the finding scores higher than one without: 1 is always, 0.5 is a coin toss."),
    ("AP", "Average precision: the share of true findings among the alarms, averaged from the surest alarm downwards. "
     "A coin toss scores the share of patients who have the finding, so rare findings have low values."),
    ("Sensitivity, specificity", "The share of findings that are called at the threshold, and the share of patients "
     "without it who are not. Thresholds are fitted on validation data."),
    ("F1", "Balances sensitivity with the share of alarms that are true, at the same threshold."),
    ("Interval", "95 % interval for patients like the tested ones of these sites. It does not say how the model does "
     "elsewhere, and it does not cover another training with another seed."),
    ("Not defined", "There was no patient with the finding, or none without. Such a value enters no average."),
    ("Suppressed", "The site kept a count to itself because it was small enough to point at patients."),
)  # fmt: skip


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def plain(value: Any) -> str:
    """Any value as people read it: three decimals, grouped counts, None as "not defined"."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOT_DEFINED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value)) or "none"
    return str(value)


def count(value: Any) -> str:
    """A number of examples; None is one that a site suppressed."""
    return SUPPRESSED if number(value) is None else f"{int(value):,}"


def interval_of(figures: Mapping[str, Any], key: str) -> str:
    """The interval stored beside a figure as `<key>_low` and `<key>_high`, empty if there is none."""
    low, high = number(figures.get(f"{key}_low")), number(figures.get(f"{key}_high"))
    return "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def duration(seconds: Any) -> str:
    """Seconds in the two units that matter."""
    if (seconds := number(seconds)) is None:
        return NOT_DEFINED
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def data_size(size_bytes: Any) -> str:
    """Bytes in kB, MB or GB of 1e3, 1e6, 1e9 bytes."""
    if (size_bytes := number(size_bytes)) is None:
        return NOT_DEFINED
    unit, scale = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if size_bytes >= pair[1]), ("kB", 1e3))
    return f"{size_bytes / scale:,.{2 if unit == 'GB' else 1}f} {unit}"


def round_ranges(rounds: Iterable[int]) -> str:
    """Rounds as runs: 1, 3-5, 9."""
    runs: list[list[int]] = []
    for server_round in sorted(set(rounds)):
        if runs and server_round == runs[-1][-1] + 1:
            runs[-1].append(server_round)
        else:
            runs.append([server_round])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def metric_name(key: str) -> str:
    """A summary key in words; an unknown one with spaces."""
    return METRIC_NAMES.get(key, key.replace("_", " "))


def spoken(key: str) -> str:
    """A metric's name inside a sentence: "mean AUROC over labels" rather than a heading."""
    words = {
        "macro_auroc": "mean AUROC over labels",
        "micro_auroc": "AUROC with all labels pooled",
        "worst_auroc": "AUROC of the weakest label",
        "macro_ap": "mean average precision over labels",
        "macro_f1": "mean F1 over labels",
    }
    return words.get(key, metric_name(key).lower())


def number_of(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def names_in(names: Sequence[str], most: int = 6) -> str:
    """The names in a sentence, the rest as a number when there are many."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
