"""Real simulations for tests: a copy of the app, run by the launcher on Ray, with faults planted in the sites' half."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from server_app import simulate

ROOT = Path(__file__).resolve().parents[2]
PLANT = """

from client_app import planted

_honest = _answer


def _answer(message, context):
    return planted.answer(message, context, _honest)
"""


@dataclass(frozen=True)
class Simulated:
    """One finished simulation: its exit code, its run folder, and everything Flower and Ray wrote about it."""

    exit_code: int
    run_dir: Path
    logs: str


def copy_app(folder: Path, planted: str = "") -> Path:
    """The app as a user would copy it; ``planted`` becomes ``client_app/planted.py``, through which all messages go.

    It may import ``client_app.hostile``, a copy of `tests.faults.hostile`.
    """
    for entry in ("federation", "models", "datasets", "strategies", "client_app", "server_app", "deploy"):
        shutil.copytree(ROOT / entry, folder / entry, ignore=shutil.ignore_patterns("__pycache__"))
    for entry in ("pyproject.toml", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / entry, folder / entry)
    if planted:
        shutil.copy(ROOT / "tests" / "faults" / "hostile.py", folder / "client_app")
        (folder / "client_app" / "planted.py").write_text(planted, encoding="utf-8")
        with (folder / "client_app" / "app.py").open("a", encoding="utf-8") as app:
            app.write(PLANT)
    return folder


def simulated(app: Path, run_config: dict[str, Any], sites: int, timeout_s: float = 400.0) -> Simulated:
    """Runs a copy of the app on Ray, keeps its logs as text and removes them."""
    console = Console(file=io.StringIO(), record=True, width=400)
    simulation = simulate.Simulation(app, run_config, sites, timeout_s=timeout_s, keep_logs=True)
    exit_code, run_dir = simulate.run(simulation, console)
    said = console.export_text()
    folder = Path(next(line for line in said.splitlines() if "simulate: logs: " in line).partition("logs: ")[2].strip())
    try:
        logs = [
            path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in (".log", ".out", ".err")
        ]
        text = said + "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert run_dir is not None, text[-5000:]
    return Simulated(exit_code, run_dir, text)
