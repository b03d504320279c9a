"""The plan of a comparison: a TOML file with settings (data and partitions), rows (methods) and seeds.

    title = "..."                 notes = "free text"
    seeds = [1, 2, 3]             metrics = ["macro_auroc", "macro_f1"]
    gain_row = "local"            a row; the tables show what its weakest site gains in the other rows (optional)
    [base]                        run config of every cell, as in a preset
    [settings.NAME]               run config of one data set and partition; also `needs`, `note` and
                                  `rows = ["row", ...]`, where only some rows make sense there
    [rows.NAME]                   run config of one method or ablation; also `skip = ["setting", ...]` and `note`

A cell is one setting, one row and one seed. Where two tables say the same key, the row wins over the setting and the
setting over the base. ``needs`` is a data path that may be absent: relative to the plan, or its last part in the folder
that the environment variable CONSILIUM_DATA names. It becomes ``data.root`` unless the setting says another one.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from federation.settings import Scalar, flatten

DATA_VARIABLE = "CONSILIUM_DATA"
DATA_ROOT, RUNS_DIR = "data.root", "reporting.runs_dir"
TOP = ("title", "notes", "seeds", "metrics", "gain_row", "base", "settings", "rows")
OWN = ("seed", "resume", RUNS_DIR)
"""Keys of the run config that the command sets itself."""


class CompareError(ValueError):
    """The comparison cannot go on; the message says what to change."""


class PlanError(CompareError):
    """Every problem of a plan at once."""

    def __init__(self, path: Path, problems: Iterable[str]) -> None:
        super().__init__("\n".join([f"{path} is no plan of a comparison:", *problems]))


@dataclass(frozen=True)
class Setting:
    """One data set and partition: a table of the result."""

    name: str
    run_config: Mapping[str, Scalar]
    needs: str = ""
    note: str = ""
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One method or ablation: a row of every table."""

    name: str
    run_config: Mapping[str, Scalar]
    skip: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """A plan that was read and checked; settings and rows are in the order of the file."""

    path: Path
    title: str
    notes: str
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    base: Mapping[str, Scalar]
    settings: tuple[Setting, ...]
    rows: tuple[Row, ...]
    gain_row: str = ""

    def cells(self) -> Iterator[tuple[Setting, Row, int]]:
        """Every cell; those that share a partition follow each other, so that a worker opens the data once."""
        return (
            (setting, row, seed) for setting in self.settings for seed in self.seeds for row in self.of(setting).rows
        )

    def of(self, setting: Setting) -> Plan:
        """The plan with the rows of one setting."""
        rows = tuple(row for row in self.rows if not setting.rows or row.name in setting.rows)
        return replace(self, rows=rows, gain_row=self.gain_row if self.gain_row in {row.name for row in rows} else "")

    def run_config(self, setting: Setting, row: Row, seed: int, runs_dir: Path) -> dict[str, Scalar]:
        """The run config of one cell."""
        config = {**self.base, **setting.run_config, **row.run_config}
        data = self.data_path(setting)
        if data is not None and DATA_ROOT not in setting.run_config:
            config[DATA_ROOT] = str(data)
        return {**config, "seed": seed, RUNS_DIR: str(runs_dir)}

    def data_path(self, setting: Setting) -> Path | None:
        """Where the data lies that a setting needs; None where it needs none or it is absent."""
        if not setting.needs:
            return None
        folder = os.environ.get(DATA_VARIABLE, "")
        there = [Path(folder).expanduser() / Path(setting.needs).name] if folder else []
        there.append(self.path.parent / Path(setting.needs).expanduser())
        return next((path.resolve() for path in there if path.exists()), None)


def read_plan(path: Path, given_rows: Iterable[Row] = ()) -> Plan:
    """Reads and checks a plan. Raises PlanError with every problem; the run configs are checked cell by cell later.

    ``given_rows``: rows of a command that brings its own; the file has no tables of them then.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(path, [f"it cannot be read ({error.strerror})"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(path, [f"it is not valid TOML: {error}"]) from None
    problems = [f"{key} is unknown; there are {', '.join(TOP)}" for key in found if key not in TOP]
    for key in ("title", "notes", "gain_row"):
        if not isinstance(found.get(key, ""), str):
            problems.append(f"{key} = {found[key]!r} must be text")
    seeds, metrics = found.get("seeds"), found.get("metrics")
    if not _is_list(seeds, int):
        problems.append(f"seeds = {seeds!r} must be a list of different whole numbers, e.g. [1, 2, 3]")
    if not _is_list(metrics, str):
        problems.append(f'metrics = {metrics!r} must be a list of different names, e.g. ["macro_auroc"]')
    base, _ = _split("base", found.get("base", {}), {}, problems)
    settings, rows = [], list(given_rows)
    if rows and "rows" in found:
        problems.append("rows: this command brings its own, take them out of the plan")
    for name, table in _tables("settings", found, problems):
        config, own = _split(f"settings.{name}", table, {"needs": str, "note": str, "rows": list}, problems)
        settings.append(Setting(name, config, **own))
    for name, table in [] if rows else _tables("rows", found, problems):
        config, own = _split(f"rows.{name}", table, {"skip": list, "note": str}, problems)
        rows.append(Row(name, config, **own))
    known = {setting.name for setting in settings}
    for row in rows:
        problems += [f"rows.{row.name}: skip names {name!r}, no such setting" for name in row.skip if name not in known]
    names = {row.name for row in rows}
    for setting in settings:
        problems += [
            f"settings.{setting.name}: rows names {name!r}, no such row" for name in setting.rows if name not in names
        ]
    gain_row = found.get("gain_row", "")
    if gain_row and gain_row not in names:
        problems.append(f"gain_row = {gain_row!r} is no row; there are {', '.join(row.name for row in rows)}")
    if problems:
        raise PlanError(path, problems)
    title = found.get("title", "") or path.stem
    notes, seeds, metrics = found.get("notes", ""), tuple(seeds), tuple(metrics)
    return Plan(path, title, notes, seeds, metrics, base, tuple(settings), tuple(rows), gain_row)


def _is_list(value: Any, kind: type) -> bool:
    """A list of at least one value of this type, none of them twice."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
        and len(set(value)) == len(value)
    )


def _tables(name: str, found: Mapping[str, Any], problems: list[str]) -> list[tuple[str, Any]]:
    tables = found.get(name)
    if not isinstance(tables, dict) or not tables:
        problems.append(f"there is no table [{name}.NAME]; at least one is needed")
        return []
    return list(tables.items())


def _split(
    where: str, table: Any, own: Mapping[str, type], problems: list[str]
) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """A table's run config, flattened, and the keys that are the plan's own."""
    if not isinstance(table, dict):
        problems.append(f"{where} = {table!r} must be a table")
        return {}, {}
    mine: dict[str, Any] = {}
    for key, kind in own.items():
        if key in table and not (_is_list(table[key], str) if kind is list else isinstance(table[key], kind)):
            problems.append(f"{where}: {key} = {table[key]!r} must be {'a list of names' if kind is list else 'text'}")
        elif key in table:
            mine[key] = tuple(table[key]) if kind is list else table[key]
    config = flatten({key: value for key, value in table.items() if key not in own})
    for key, value in config.items():
        if key in OWN:
            problems.append(f"{where}: {key} is set by the command, not by the plan")
        elif not isinstance(value, Scalar):
            problems.append(f"{where}: {key} = {value!r}; a run config holds numbers, true/false and text only")
    return config, mine
