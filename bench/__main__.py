"""Runs every benchmark of this folder, prints its rows and writes ``bench/results.md``.

python -m bench            all of them
python -m bench memory     only these; results.md is left alone
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import bench
from bench.rows import HEADER, Row, markdown, spread, write_results

SHARED = {"empty_app", "rows", "__main__"}


def main(names: list[str]) -> int:
    """Measures, prints, and without names writes the page. Exit code 2 for an unknown name.

    A benchmark that fails has a row that says why; it fails no other.
    """
    there = sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if module.name not in SHARED)
    if unknown := sorted(set(names) - set(there)):
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(there)}")
        return 2
    sections = []
    for name in names or there:
        module = importlib.import_module(f"bench.{name}")
        try:
            rows = module.measure()
        except Exception as error:  # the others are still worth having
            rows = [Row("not measured", "", (), note=f"{type(error).__name__}: {error}".replace("\n", " ")[:300])]
        show(module.__doc__.split("\n")[0], rows)
        sections.append((module.__doc__.split("\n")[0], rows))
    if not names:
        write_results(Path(__file__).with_name("results.md"), markdown(sections))
    return 0


def show(title: str, rows: list[Row]) -> None:
    """Prints one benchmark's rows."""
    table = Table(*HEADER, title=title)
    for row in rows:
        table.add_row(
            row.what, row.unit, spread(row.ours), row.peer_name, spread(row.peer), row.ratio, row.target, row.note
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
