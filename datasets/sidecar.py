"""The small JSON file beside a table that says what its columns mean."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from datasets.records import DataError, Task
from datasets.source import clean_name, decode_text, shown

# What a manifest records of a sample, and the columns it is taken from when the sidecar names none.
COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "file", "path"),
    "report": ("report", "text"),
    "patient": ("patient",),
    "study": ("study",),
    "site": ("site",),
    "time": ("time",),
    "split": ("split",),
    "label_source": ("label_source",),
}


@dataclass(frozen=True)
class Sidecar:
    """What a site states about its table. ``labels`` is None where it names none.

    ``unlabelled``: a blank class of a single-label table is a sample that waits for its label, not an error.
    """

    labels: tuple[str, ...] | None = None
    task: Task | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    encoding: str | None = None
    site: str = ""
    label_source: str = ""
    image_folder: str = ""
    image_root: str = ""
    arrays: str = ""
    unlabelled: bool = False


def parse_sidecar(data: bytes, name: str) -> Sidecar:
    """The sidecar in JSON bytes; raises DataError for unknown keys and values of the wrong kind.

    A pack's ``info.json`` is free text but for two keys: ``labels`` (multi-label) or ``classes`` (one of them).
    """
    try:
        stated = json.loads(decode_text(data, name))
        # JSON can escape half a character, which no file name, table or text can hold.
        json.dumps(stated, ensure_ascii=False).encode("utf-8")
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON ({error}); correct it") from error
    if not isinstance(stated, dict):
        raise DataError(f'{name} must be an object such as {{"labels": [...]}}, not a {type(stated).__name__}')
    if name.rpartition("/")[2] == "info.json":
        task: Task = "multilabel" if "labels" in stated else "multiclass"
        names = _names(stated.get("labels", stated.get("classes")), name)
        return Sidecar(names, task if names else None, image_folder="images")
    return Sidecar(**_checked(stated, name))


def _checked(stated: dict[str, Any], name: str) -> dict[str, Any]:
    known = Sidecar.__dataclass_fields__
    for key, value in stated.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {shown(near[0])}?" if near else f"the known keys are {', '.join(known)}"
            raise DataError(f"{name} has the unknown key {shown(key)}; {hint}")
        if key == "unlabelled":
            if not isinstance(value, bool):
                raise DataError(f"{name}: unlabelled must be true or false, not {shown(repr(value))}")
        elif key not in ("labels", "columns") and not isinstance(value, str):
            raise DataError(f"{name}: {key} must be a text, not {shown(repr(value))}")
    if "task" in stated and stated["task"] not in get_args(Task):
        raise DataError(f"{name}: task is {shown(stated['task'])}; it can be {' or '.join(get_args(Task))}")
    try:
        folder = clean_name(stated["image_folder"]) if stated.get("image_folder") else ""
    except DataError as error:
        raise DataError(f"{name}: image_folder {error}") from error
    columns = stated.get("columns", {})
    if not isinstance(columns, dict) or not all(isinstance(column, str) for column in columns.values()):
        raise DataError(f'{name}: columns must map records to columns, as in {{"image": "file"}}')
    odd = sorted(set(columns) - set(COLUMN_NAMES))
    if odd:
        raise DataError(f"{name}: columns names {shown(odd[0])}; the records are {', '.join(COLUMN_NAMES)}")
    return {**stated, "labels": _names(stated.get("labels"), name), "columns": columns, "image_folder": folder}


def _names(value: object, name: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one.strip() for one in value):
        raise DataError(f"{name}: the labels must be a list of names, not {shown(repr(value))}")
    return distinct_labels(value, name)


def distinct_labels(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The names as a tuple; raises DataError for one that is listed twice."""
    if not all(name.strip() for name in names):
        raise DataError(f"{where}: a label has no name; name every label")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{where}: the label {shown(twice[0])} is listed twice; list every label once")
    return tuple(names)
