"""The TOML file that lists the data roots of a union.

labels = ["Cardiomegaly", "Effusion"]     # of the federation; a source that lacks one does not record it (-1)

[[sources]]
name = "nih"                               # required; also the site's name, or its beginning
root = "chest.zip"                         # required; a path from this file, an embedded name, or $VARIABLE/...
modality = "image"                         # required; image, text or paired
site_columns = ["site", "view"]            # one site for each combination; none: the source is one site
prefix = ""                                # begins the sites' names; the source's name unless stated
where = { site = ["nih_a", "nih_b64"] }    # only rows whose column holds one of the values
rename = { "Pleural Effusion" = "Effusion" }   # label of the source -> label of the federation
label_source = "auto"                      # reviewed, auto or unknown for all rows; else what the rows say
encoding = "latin-1"                       # of the source's CSV
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from datasets.records import LABEL_SOURCES, DataError
from datasets.sidecar import distinct_labels
from datasets.source import decode_text, shown

Modality = Literal["image", "text", "paired"]


@dataclass(frozen=True)
class UnionSource:
    """One ``[[sources]]`` entry; the keys are those of the file."""

    name: str
    root: str
    modality: Modality
    site_columns: tuple[str, ...] = ()
    prefix: str | None = None
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    label_source: str = ""
    encoding: str = ""


def parse_union(data: bytes, name: str) -> tuple[tuple[str, ...], list[UnionSource]]:
    """Labels and sources in TOML bytes; raises DataError with every problem of the file."""
    try:
        stated = tomllib.loads(decode_text(data, name))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{name} is not valid TOML ({error}); correct it") from error
    problems = [f"{key} is unknown; there are labels and sources" for key in stated if key not in ("labels", "sources")]
    labels, entries = stated.get("labels"), stated.get("sources")
    if not _is_names(labels) or not labels:
        problems.append('labels must list the federation\'s labels, as in labels = ["Cardiomegaly", "Effusion"]')
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        problems.append("there must be at least one [[sources]] with name, root and modality")
        entries = []
    for number, entry in enumerate(entries, start=1):
        where = f"source {shown(str(entry['name']))}" if "name" in entry else f"source {number}"
        problems += [f"{where}: {problem}" for problem in _problems(entry, labels if _is_names(labels) else [])]
    called = [str(entry.get("name")) for entry in entries]
    problems += [
        f"source {shown(twice)} is listed twice" for twice in sorted({n for n in called if called.count(n) > 1})
    ]
    if problems:
        raise DataError(f"{name}: {'; '.join(problems)}")
    return distinct_labels(labels, name), [UnionSource(**_frozen(entry)) for entry in entries]


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a text", lambda value: isinstance(value, str) and value.strip() != ""),
    "root": ("a text", lambda value: isinstance(value, str) and value.strip() != ""),
    "modality": ("image, text or paired", lambda value: value in get_args(Modality)),
    "site_columns": ("a list of columns", lambda value: _is_names(value)),
    "prefix": ("a text", lambda value: isinstance(value, str)),
    "where": ("a table of column = [values]", lambda v: isinstance(v, dict) and all(map(_is_names, v.values()))),
    "rename": ("a table of label = label", lambda v: isinstance(v, dict) and _is_names(list(v.values()))),
    "label_source": ("reviewed, auto or unknown", lambda value: value in ("", *LABEL_SOURCES)),
    "encoding": ("a text", lambda value: isinstance(value, str)),
}


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one.strip() for one in value)


def _problems(entry: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    found = []
    for key, value in entry.items():
        if key not in _KINDS:
            near = difflib.get_close_matches(key, _KINDS, n=1)
            found.append(f"{key} is unknown; " + (f"did you mean {near[0]}?" if near else f"use {', '.join(_KINDS)}"))
        elif not _KINDS[key][1](value):
            found.append(f"{key} = {shown(repr(value))} must be {_KINDS[key][0]}")
    required = [one.name for one in fields(UnionSource) if one.default is MISSING and one.default_factory is MISSING]
    found += [f"{key} is missing" for key in required if key not in entry]
    if entry.get("prefix") == "" and not entry.get("site_columns"):
        found.append("prefix is empty and site_columns names none, so its site has no name; state one of them")
    if isinstance(entry.get("rename"), dict):
        odd = [new for new in entry["rename"].values() if new not in labels]
        found += [f"rename leads to {shown(str(new))}, which is none of the labels" for new in odd]
    return found


def _frozen(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with tuples for its lists."""
    where = {column: tuple(values) for column, values in entry.get("where", {}).items()}
    return {**entry, "site_columns": tuple(entry.get("site_columns", ())), "where": where}
