"""What every importer of a published set hands over, and how it reads the set's own files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from datasets.records import DataError, Task
from datasets.source import MAX_TABLE_BYTES, FolderSource, decode_text
from datasets.tables import Table, parse_csv


@dataclass(frozen=True)
class Imported:
    """A published set as rows: ``frame`` has string columns ``image`` (below the set's folder), any known records,
    the publisher's own columns, and one ``label:NAME`` a label (or ``label``)."""

    frame: pd.DataFrame
    labels: tuple[str, ...]
    task: Task = "multilabel"
    label_source: str = ""
    arrays: str = ""


def parse_xml(data: bytes, name: str, what: str) -> ElementTree.Element:
    """The root of one XML file; ``what`` such files are, in words. Raises DataError for damage, a DTD and entities.

    Entities can only be declared inside a DTD; these sets have none, so refusing both leaves nothing to expand.
    """
    text = decode_text(data, name)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise DataError(f"{name} declares a DTD or entities, which {what} never do; remove the declaration")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{name} is not valid XML ({error}); copy it again") from error


def read_table(source: FolderSource, name: str, needed: Sequence[str]) -> Table:
    """A published CSV as strings; raises DataError when a column of ``needed`` is absent."""
    table = parse_csv(source.read(name, max_bytes=MAX_TABLE_BYTES), name)
    missing = [column for column in needed if column not in table.frame.columns]
    if missing:
        raise DataError(f"{name} lacks the columns {missing}; is it the published file?")
    return table


def read_lines(source: FolderSource, name: str) -> list[str]:
    """Words that begin the lines of a list file; an absent file is an empty list."""
    if not source.has(name):
        return []
    return [line.split()[0] for line in decode_text(source.read(name), name).splitlines() if line.strip()]
