"""Tables of text from CSV and Parquet bytes, where every cell is a string and every row knows where it came from."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from datasets.records import DataError
from datasets.source import decode_text, shown

SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True)
class Table:
    """``frame`` has string cells only ("" for a missing one) and the index 0..n-1; ``lines (n,) int64`` is the row
    of each in the file ``name``.

    Rows count as a spreadsheet shows them: the header of a CSV is row 1, its first sample row 2, whether or not
    a quoted report spans several lines. A Parquet file has no header, so its first sample is row 1.
    """

    name: str
    frame: pd.DataFrame
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.frame)

    def error(self, row: int, message: str) -> DataError:
        """A DataError that begins with the file and the row as a person would look it up."""
        return DataError(f"{self.name} row {self.lines[row]}: {message}")

    def refuse_cell(
        self, column: str, codes: np.ndarray, values: Sequence[str], read: Sequence[object], why: str
    ) -> None:
        """Raises DataError at the first cell of ``column`` that was read as None.

        ``codes (n,)`` number the distinct ``values`` (as `pandas.factorize` does), ``read`` is what each became.
        """
        bad = [code for code, result in enumerate(read) if result is None]
        if bad:
            row = int(np.flatnonzero(np.isin(codes, bad))[0])
            raise self.error(row, f"column {shown(column)}: {shown(str(values[codes[row]]), 40)} {why}")


def parse_table(data: bytes, name: str, encoding: str | None = None) -> Table:
    """The table in ``data``: Parquet when ``name`` says so, CSV otherwise; raises DataError naming file and row."""
    return parse_parquet(data, name) if name.lower().endswith(".parquet") else parse_csv(data, name, encoding)


def parse_csv(data: bytes, name: str, encoding: str | None = None) -> Table:
    """The table in CSV bytes, separated by whichever of comma, semicolon and tab the header holds most of.

    Choice: a row with more or fewer fields than the header is refused, because padding a short row would turn a
    truncated file into unknown labels. Blank lines are skipped; a column without a name (a written index) is dropped.
    """
    text = decode_text(data, name, encoding)
    header_line = text.partition("\n")[0]
    separator = max(SEPARATORS, key=header_line.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    try:
        rows.extend(reader)
    except csv.Error as error:
        raise DataError(f"{name} row {len(rows) + 1} is not valid CSV ({error}); check its quotes") from error
    if not rows or not any(rows[0]):
        raise DataError(f"{name} has no header row; the first row names the columns")
    header = [column.strip() for column in rows[0]]
    filled = [(line, row) for line, row in enumerate(rows[1:], start=2) if row]
    for line, row in filled:
        if len(row) != len(header):
            raise DataError(
                f"{name} row {line} has {len(row)} fields, the header has {len(header)}; quote cells that hold "
                f"{shown(separator)}, or copy the file again if it was cut off"
            )
    columns = list(zip(*(row for _, row in filled), strict=True)) if filled else [()] * len(header)
    return _table(name, header, [pd.Series(cells, dtype=str) for cells in columns], [line for line, _ in filled])


def parse_parquet(data: bytes, name: str) -> Table:
    """The table in Parquet bytes, its cells as text: booleans as 1 and 0, lists joined by ``|``, missing as ""."""
    try:
        frame = pd.read_parquet(io.BytesIO(data), engine="pyarrow", dtype_backend="numpy_nullable")
        header = [str(column).strip() for column in frame.columns]
        columns = [_as_text(frame.iloc[:, position]) for position in range(len(header))]
    except Exception as error:  # Arrow raises a dozen unrelated kinds on damaged bytes
        raise DataError(f"{name} is not a readable Parquet file ({error}); write it again") from error
    return _table(name, header, columns, list(range(1, len(frame) + 1)))


def _as_text(column: pd.Series) -> pd.Series:
    # Through Python objects, because Arrow checks the bytes of a string only when somebody looks at it.
    return pd.Series([_cell_text(cell) for cell in column.tolist()], dtype=str)


def _cell_text(cell: object) -> str:
    if isinstance(cell, (list, np.ndarray)):
        return "|".join(map(str, cell))
    if isinstance(cell, bool):
        return str(int(cell))
    return "" if pd.isna(cell) else str(cell)


def _table(name: str, header: list[str], columns: list[pd.Series], lines: list[int]) -> Table:
    named = [(column, cells) for column, cells in zip(header, columns, strict=True) if column]
    names = [column for column, _ in named]
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise DataError(f"{name} has the column {shown(twice[0])} more than once; rename or remove one")
    frame = pd.DataFrame(dict(named), index=range(len(lines)))
    return Table(name, frame, np.asarray(lines, dtype=np.int64))
