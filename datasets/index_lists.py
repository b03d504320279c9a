"""Ready lists of rows that come with a data set: ``splits.json`` beside the manifest.

    {"seed0": {"NAME": [[rows of site 0], [rows of site 1], ...]}, "seed1": {"NAME": ...}, ...}

Row numbers count the manifest's rows from 0. A set has one object for each draw, whose keys begin with ``seed``.
"""

from __future__ import annotations

import json
from pathlib import Path

from datasets.records import DataError
from datasets.source import MAX_TABLE_BYTES, open_source, shown

FILE = "splits.json"


def index_lists(root: str | Path, name: str, seed: int) -> list[list[int]]:
    """The lists of one name, one a site. Choice: of several draws, seed 1 takes the first, and so on around.

    Raises DataError where the file or the name is not there, or the lists are not lists of row numbers.
    """
    try:
        content = json.loads(open_source(root).read(FILE, max_bytes=MAX_TABLE_BYTES))
    except ValueError as error:
        if isinstance(error, DataError):
            raise DataError(f"{error}; 'listed' needs {FILE} in the data root") from error
        raise DataError(f"{FILE} is no JSON ({error}); restore it") from error
    draws = sorted(key for key in content if key.startswith("seed")) if isinstance(content, dict) else []
    found = content[draws[(seed - 1) % len(draws)]] if draws else {}
    if not isinstance(found, dict) or name not in found:
        there = ", ".join(sorted(found)) if isinstance(found, dict) else ""
        raise DataError(f"{FILE} has no lists {shown(name)}; it has: {there or 'none'}")
    lists = found[name]
    if not isinstance(lists, list) or not all(isinstance(part, list) for part in lists):
        raise DataError(f"{shown(name)} of {FILE} is no list of lists, one a site; choose another name")
    if not all(isinstance(row, int) and not isinstance(row, bool) for part in lists for row in part):
        raise DataError(f"{shown(name)} of {FILE} holds something that is no row number")
    return lists
