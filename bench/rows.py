"""A measured row, repeated timing, and the table they end up in."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from server_app.run_folder import versions


@dataclass(frozen=True)
class Row:
    """One comparison. ``ours`` and ``peer`` are repeated measurements in the same unit; ``target`` is what we want."""

    what: str
    unit: str
    ours: Sequence[float]
    peer_name: str = ""
    peer: Sequence[float] = ()
    target: str = ""
    note: str = ""

    @property
    def ratio(self) -> str:
        """Median of the pairwise ratios ours / peer, which stays true when the machine's speed drifts."""
        if not self.peer:
            return ""
        pairs = [mine / other for mine, other in zip(self.ours, self.peer, strict=False)]
        return f"{statistics.median(pairs):.2f}"


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(ours: Callable[[], float], peer: Callable[[], float], repeats: int) -> tuple[list[float], list[float]]:
    """Measures two things in turn, A B A B, after one uncounted round of each."""
    ours(), peer()
    pairs = [(ours(), peer()) for _ in range(repeats)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def spread(values: Sequence[float]) -> str:
    """Median (minimum to maximum)."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


HEADER = ("what", "unit", "ours: median (min to max)", "peer", "peer: median (min to max)", "ratio", "target", "note")


def markdown(sections: Iterable[tuple[str, Sequence[Row]]]) -> str:
    """All rows as one Markdown page, with the machine and the versions they were measured on."""
    lines = ["# Measurements", "", "Made by `make bench`. " + machine(), ""]
    for title, rows in sections:
        lines += [f"## {title}", "", "| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
        for row in rows:
            cells = (
                row.what, row.unit, spread(row.ours), row.peer_name, spread(row.peer), row.ratio, row.target, row.note
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def machine() -> str:
    """The machine in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {gpu}, {platform.system()}; {found}."


def write_results(path: Path, text: str) -> None:
    """Writes the measured page."""
    path.write_text(text, encoding="utf-8")
