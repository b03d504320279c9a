"""Targets of a table: which columns are labels, and what their cells mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from datasets.records import ABSENT, PRESENT, UNKNOWN, DataError, Task
from datasets.sidecar import Sidecar, distinct_labels
from datasets.source import shown
from datasets.tables import Table

LABEL_PREFIX = "label:"
CLASS_COLUMN = "label"
# A class number above this is a mistake (a patient number in the wrong column), not a class.
MAX_CLASSES = 4096


def read_targets(
    table: Table, sidecar: Sidecar, labels: Sequence[str] | None
) -> tuple[tuple[str, ...], Task, np.ndarray, set[str]]:
    """Label names, task, targets ``(n, C) int8`` (1, 0, -1) and the columns they came from; raises DataError.

    Which columns are labels, first match: the sidecar's list; columns that begin with ``label:``; the columns that
    ``labels`` names; one column ``label`` with a class number or name.
    """
    columns = list(table.frame.columns)
    wanted = distinct_labels(list(labels), "the federation's labels") if labels is not None else None
    if wanted == ():
        raise DataError("the federation's label list is empty; name at least one label, or leave the list out")
    prefixed = [column.removeprefix(LABEL_PREFIX) for column in columns if column.startswith(LABEL_PREFIX)]

    def column_of(label: str) -> str | None:
        return next((column for column in (LABEL_PREFIX + label, label) if column in columns), None)

    names = sidecar.labels or distinct_labels(prefixed, table.name) or None
    if names is None and wanted and all(map(column_of, wanted)):
        names = wanted
    has_columns = names is not None and all(map(column_of, names))
    if sidecar.task == "multiclass" or (sidecar.task is None and not has_columns and CLASS_COLUMN in columns):
        return _read_classes(table, names, wanted, sidecar.unlabelled)
    if names is None:
        raise DataError(
            f"{table.name} does not say which columns are labels; name them 'label:...', list them in a "
            f'manifest.json as {{"labels": [...]}}, or add one column {CLASS_COLUMN!r} with the class; '
            f"its columns are {shown(', '.join(columns), 300)}"
        )
    listed = (*names, *(name for name in prefixed if name not in names))
    if sidecar.labels and len(listed) > len(names):
        _refuse_other_labels(table.name, "sidecar", names, listed)
    missing = [name for name in names if column_of(name) is None]
    if missing:
        raise DataError(f"{table.name} has no column for the labels {missing}; add them, or correct the sidecar's list")
    if wanted is not None and set(wanted) != set(names):
        _refuse_other_labels(table.name, "federation", wanted, names)
    names = wanted if wanted is not None else names
    used = [str(column_of(name)) for name in names]
    targets = np.stack([parse_marks(table, column) for column in used], axis=1)
    return names, "multilabel", targets, set(used)


def parse_marks(table: Table, column: str) -> np.ndarray:
    """One label column as ``(n,) int8``: 1 present, 0 absent, -1 unknown (-1, blank or NaN)."""
    codes, values = pd.factorize(table.frame[column])
    marks = [mark_of(value) for value in values]
    table.refuse_cell(column, codes, values, marks, "is no label value; write 1, 0, or -1 or blank for unknown")
    return np.asarray(marks, dtype=np.int8)[codes]


def mark_of(cell: str) -> int | None:
    """A label cell as 1, 0 or -1 (unknown); None for one that is no label value."""
    if _is_blank(cell):
        return UNKNOWN
    number = _number(cell)
    return int(number) if number in (PRESENT, ABSENT, UNKNOWN) else None


def _is_blank(cell: str) -> bool:
    return cell.strip().lower() in ("", "nan")


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _refuse_other_labels(name: str, owner: str, expected: Sequence[str], found: Sequence[str]) -> None:
    raise DataError(
        f"{name} has other labels than the {owner}: missing {sorted(set(expected) - set(found))}, extra "
        f"{sorted(set(found) - set(expected))}; the {owner} has {list(expected)}, the manifest {list(found)}. "
        "Add a blank column for a label this site does not record, and remove those nobody asked for"
    )


def _read_classes(
    table: Table, names: tuple[str, ...] | None, wanted: tuple[str, ...] | None, unlabelled: bool
) -> tuple[tuple[str, ...], Task, np.ndarray, set[str]]:
    """Targets of a single-label table as one-hot rows. A cell is a class name, else a number into ``names``.

    ``unlabelled``: a blank cell is a row of unknowns; otherwise it is refused.
    """
    if CLASS_COLUMN not in table.frame.columns:
        raise DataError(f"{table.name} is single-label but has no column {CLASS_COLUMN!r}; add it with the class")
    if names is not None and wanted is not None and set(names) != set(wanted):
        _refuse_other_labels(table.name, "federation", wanted, names)
    codes, values = pd.factorize(table.frame[CLASS_COLUMN])
    values = [str(value).strip() for value in values]
    known = names or wanted or _class_names(values)
    places = {name: place for place, name in enumerate(known)}
    read = [None if _is_blank(value) else places.get(value, class_number(value, len(known))) for value in values]
    why = f"is no class; a sample has one class, a name or a number from 0 to {len(known) - 1}"
    waits = np.array([unlabelled and _is_blank(value) for value in values], dtype=bool)
    table.refuse_cell(
        CLASS_COLUMN, codes, values, [0 if wait else place for wait, place in zip(waits, read, strict=True)], why
    )
    order = wanted or known
    column = {name: place for place, name in enumerate(order)}
    targets = np.zeros((len(table), len(order)), dtype=np.int8)
    targets[np.arange(len(table)), np.asarray([column[known[place or 0]] for place in read])[codes]] = PRESENT
    targets[waits[codes]] = UNKNOWN
    return tuple(order), "multiclass", targets, {CLASS_COLUMN}


def _class_names(values: Sequence[str]) -> tuple[str, ...]:
    """Names for a table that lists none: "0" to the largest number, or the sorted names that occur."""
    stated = sorted({value for value in values if not _is_blank(value)})
    if all(_number(value) is not None for value in stated):
        numbers = [class_number(value, MAX_CLASSES) for value in stated]
        return tuple(str(number) for number in range(max((n for n in numbers if n is not None), default=0) + 1))
    if len(stated) > MAX_CLASSES:
        raise DataError(f"column {CLASS_COLUMN!r} has {len(stated)} different classes; is it free text?")
    return tuple(stated)


def class_number(value: str, count: int) -> int | None:
    """A cell such as "3" or "3.0" as a whole number from 0 to ``count`` - 1; None for anything else."""
    number = _number(value)
    return int(number) if number is not None and 0 <= number < count and number.is_integer() else None
