"""What goes to a reader and what comes back: a worklist with thumbnails and a page, and a table of answers.

The worklist is ``worklist.csv``, ``label.html`` and ``thumbnails/``, in a numbered folder of its own, because readers
fill in the table where it lies and the next export must not overwrite it. Both the filled table and the file that the
page downloads are answers: columns ``id``, ``reader``, ``time`` and the labels, as in a manifest (``label`` with a
class name, or one ``label:NAME`` with 1, 0 or blank each). Everything stays at the site, mode 0600 in folders of 0700.

Choice: a pending sample is in every export until the rule decides it, and no export shows another reader's answer.
Choice: an image that cannot be decoded is listed without a thumbnail, with the reason; it does not stop the others.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.annotation_page import Case, render
from datasets.annotation_pool import Answer, Marks, Pool, objection, reader_name, utc
from datasets.labels import CLASS_COLUMN, LABEL_PREFIX
from datasets.records import ABSENT, PRESENT, UNKNOWN, DataError
from datasets.source import MAX_TABLE_BYTES, shown
from datasets.tables import parse_csv
from federation.files import write_atomic

WORKLIST, PAGE, THUMBNAILS = "worklist.csv", "label.html", "thumbnails"
READER_COLUMNS = ("id", "reader", "time")
MODEL_COLUMNS = ("thumbnail", "pseudo_label", "reason", "uncertainty", "cycle")
THUMBNAIL_SIDE = 384
_MARKS = {"": UNKNOWN, "-1": UNKNOWN, "-1.0": UNKNOWN, "0": ABSENT, "0.0": ABSENT, "1": PRESENT, "1.0": PRESENT}


@dataclass(frozen=True)
class Refusal:
    """A row of answers that was not taken: its row in the file as a spreadsheet counts, and why."""

    line: int
    why: str


def label_columns(pool: Pool) -> tuple[str, ...]:
    """The label columns of a worklist and of its answers."""
    return (CLASS_COLUMN,) if pool.task == "multiclass" else tuple(LABEL_PREFIX + label for label in pool.labels)


def export(pool: Pool, folder: Path, read: Callable[[str], np.ndarray], *, side: int = THUMBNAIL_SIDE) -> Path:
    """Writes the pending samples below ``folder / "worklists"`` and returns the new folder.

    ``read`` gives the pixels of an id as `datasets.records.Images.read` does. A thumbnail is at most ``side`` pixels
    wide and high and keeps its proportions. Raises DataError where nothing is pending and for a side below 1.
    """
    if side < 1:
        raise DataError(f"a thumbnail's side is {side} pixels; use 1 or more")
    if not pool.pending:
        raise DataError("nothing is pending: every requested sample has its label; wait for the next cycle")
    home = _next_folder(folder / "worklists")
    rows: list[list[str]] = []
    cases: list[Case] = []
    for id in pool.pending:
        cycle, reason = pool.requests[id]
        uncertainty = "" if reason.uncertainty is None else f"{reason.uncertainty:.6g}"
        name, picture, trouble = f"{THUMBNAILS}/{hashlib.sha256(id.encode()).hexdigest()[:16]}.png", b"", ""
        try:
            picture = thumbnail(read(id), side)
            write_atomic(home / name, picture)
        except DataError as error:
            name, trouble = "", str(error)
        rows.append([id, "", "", name, reason.pseudo_label, reason.text, uncertainty, str(cycle)])
        uri = f"data:image/png;base64,{base64.b64encode(picture).decode()}" if picture else ""
        cases.append(Case(id, uri, trouble, reason.text, reason.pseudo_label, uncertainty, cycle))
    labels = label_columns(pool)
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow([*READER_COLUMNS, *MODEL_COLUMNS, *labels])
    writer.writerows([*row, *[""] * len(labels)] for row in rows)
    write_atomic(home / WORKLIST, table.getvalue().encode("utf-8-sig"))  # the mark makes Excel read it as UTF-8
    page = render(cases, labels=pool.labels, columns=labels, single=pool.task == "multiclass")
    write_atomic(home / PAGE, page.encode())
    return home


def thumbnail(pixels: np.ndarray, side: int) -> bytes:
    """PNG bytes of uint8 pixels ``(H, W)`` or ``(H, W, 3)``, at most ``side`` x ``side``, never enlarged."""
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _next_folder(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
    home = parent / f"{max(numbers, default=0) + 1:04d}"
    home.mkdir(mode=0o700)
    (home / THUMBNAILS).mkdir(mode=0o700)
    return home


def read_answers(
    path: Path, pool: Pool, *, reader: str = "", time: str = ""
) -> tuple[tuple[Answer, ...], tuple[Refusal, ...]]:
    """The answers in a CSV file that `datasets.annotation_pool.receive` would take, and the rows that it would not.

    A row without any mark is not answered yet and is passed over. ``reader`` and ``time`` stand in for blank cells.
    Raises DataError where the file is no such table at all; then nothing of it is taken.
    """
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise DataError(f"{path.name} is larger than {MAX_TABLE_BYTES} bytes; is it the right file?")
        table = parse_csv(path.read_bytes(), path.name)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give the file of answers") from error
    columns = list(table.frame.columns)
    if "id" not in columns or not set(columns) & set(label_columns(pool)):
        raise DataError(
            f"{path.name} has the columns {shown(', '.join(columns), 200)}; answers need 'id' and the labels, "
            f"such as {shown(label_columns(pool)[0])}"
        )
    defaults = {"reader": reader, "time": time}
    answers: list[Answer] = []
    refusals: list[Refusal] = []
    for line, row in zip(table.lines.tolist(), table.frame.to_dict("records"), strict=True):
        cells = {name: cell.strip() for name, cell in row.items()}
        try:
            marks = _marks(cells, pool)
            if marks is None:
                continue
            said = {name: cells.get(name) or default for name, default in defaults.items()}
            answer = Answer(cells["id"], marks, reader_name(said["reader"]), utc(said["time"]))
            if wrong := objection(pool, answer):
                raise DataError(wrong)
        except DataError as error:
            refusals.append(Refusal(line, str(error)))
        else:
            answers.append(answer)
    return tuple(answers), tuple(refusals)


def _marks(cells: Mapping[str, str], pool: Pool) -> Marks | None:
    """The marks of one row, None where no cell is filled. Raises DataError for other labels and values."""
    if pool.task == "multiclass":
        if not (name := cells[CLASS_COLUMN]):
            return None
        if name not in pool.labels:
            raise DataError(f"{shown(name, 40)} is no class; the classes are {shown(', '.join(pool.labels), 200)}")
        return tuple(PRESENT if name == label else ABSENT for label in pool.labels)
    given = {name.removeprefix(LABEL_PREFIX): cell for name, cell in cells.items() if name.startswith(LABEL_PREFIX)}
    marks = {label: _MARKS.get(cell) for label, cell in given.items()}
    for label, mark in marks.items():
        if mark is None:
            raise DataError(f"label {shown(label, 40)}: {shown(given[label], 40)} is no mark; write 1, 0 or nothing")
        if mark != UNKNOWN and label not in pool.labels:
            raise DataError(f"{shown(label, 40)} is no label; the labels are {shown(', '.join(pool.labels), 200)}")
    found = tuple(marks.get(label, UNKNOWN) for label in pool.labels)
    return found if set(found) != {UNKNOWN} else None
