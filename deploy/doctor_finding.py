"""What a check of the doctor says: one level, one code, one sentence, one fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MAX_ROWS = 8


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``fix`` is what to do, "" where nothing is to be done.

    A sentence names rows by their numbers; it never holds a patient's identifier, an image's path or report text,
    since the report is made to be sent to whoever runs the federation.
    """

    level: Literal["ok", "warning", "error"]
    code: str
    sentence: str
    fix: str = ""


def ok(code: str, sentence: str) -> Finding:
    return Finding("ok", code, sentence)


def warning(code: str, sentence: str, fix: str) -> Finding:
    return Finding("warning", code, sentence, fix)


def error(code: str, sentence: str, fix: str) -> Finding:
    return Finding("error", code, sentence, fix)


def rows(numbers: Iterable[int]) -> str:
    """Row numbers for a sentence, the first few of them.

    >>> rows([7, 3])
    'rows 3 and 7'
    >>> rows(range(2, 14))
    'rows 2, 3, 4, 5, 6, 7, 8, 9 and 4 more'
    """
    ordered = sorted({int(number) for number in numbers})
    if len(ordered) == 1:
        return f"row {ordered[0]}"
    if len(ordered) > MAX_ROWS:
        return f"rows {', '.join(map(str, ordered[:MAX_ROWS]))} and {len(ordered) - MAX_ROWS} more"
    return f"rows {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
