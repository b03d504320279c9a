"""The cells of a comparison: which are done, which can be run, which cannot and why.

A finished cell is remembered in an index below the runs folder under the fingerprint of its settings and data, so that
the same command continues where it was stopped, and two plans share the cells they have in common.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from datasets.catalogue import EMBEDDED
from federation.files import write_atomic
from federation.settings import Scalar, Settings
from server_app.compare_plan import DATA_ROOT, DATA_VARIABLE, CompareError, Plan, Row, Setting

INDEX = "compare-index.json"
SHAPING_ROOMS = ("federation", "models", "datasets", "strategies", "client_app")
ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Cell:
    """One setting, row and seed, and how far it is. ``reason``: why it was skipped or failed.

    ``code``: the state of the code that made the run, see `code_state`.
    """

    setting: Setting
    row: Row
    seed: int
    status: Literal["waiting", "cached", "completed", "failed", "skipped"] = "waiting"
    reason: str = ""
    run_config: Mapping[str, Scalar] = field(default_factory=dict)
    key: str = ""
    run_dir: Path | None = None
    code: str = ""

    @property
    def name(self) -> str:
        """The cell in a line of text."""
        return f"{self.setting.name} / {self.row.name} / seed {self.seed}"

    @property
    def is_done(self) -> bool:
        """Whether there is a completed run."""
        return self.status in ("cached", "completed")


class Index:
    """Which run folder holds the completed run of which settings. Read again before every write, which is atomic."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._path = runs_dir / INDEX

    def find(self, key: str) -> tuple[Path, str] | None:
        """Run folder and code state of a completed run that is still there."""
        entry = self._read().get(key)
        if entry is None:
            return None
        folder = self._runs_dir / entry["run"]
        try:
            status = json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"]
        except FileNotFoundError:
            return None
        return (folder, entry["code"]) if status == "completed" else None

    def put(self, cell: Cell) -> None:
        """Remembers a completed cell."""
        assert cell.run_dir is not None
        entry = {
            "run": cell.run_dir.name,
            "setting": cell.setting.name,
            "row": cell.row.name,
            "seed": cell.seed,
            "code": cell.code,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_atomic(self._path, json.dumps({**self._read(), cell.key: entry}, indent=1).encode(), 0o644)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise CompareError(f"{self._path} is broken ({error}); delete it, and every cell is run again") from None


def prepare(plan: Plan, runs_dir: Path) -> list[Cell]:
    """Every cell of a plan, in the order in which they run best, with its state before anything is run."""
    index, code = Index(runs_dir), code_state()
    return [_prepared(plan, Cell(*parts, code=code), runs_dir, index) for parts in plan.cells()]


def _prepared(plan: Plan, cell: Cell, runs_dir: Path, index: Index) -> Cell:
    setting = cell.setting
    if setting.name in cell.row.skip:
        cell.status, cell.reason = "skipped", "the plan skips it"
        return cell
    if setting.needs and plan.data_path(setting) is None:
        absent = f"the data is absent: {setting.needs}, looked for beside the plan and in {DATA_VARIABLE}"
        cell.status, cell.reason = "skipped", absent
        return cell
    cell.run_config = plan.run_config(setting, cell.row, cell.seed, runs_dir)
    try:
        cell.key = cell_key(Settings.from_run_config(cell.run_config))
    except Exception as error:  # SettingsError, or whatever importing a method's file raises: the other rows go on
        cell.status, cell.reason = "failed", reason_of(error)
        return cell
    if (run := index.find(cell.key)) is not None:
        cell.status, (cell.run_dir, cell.code) = "cached", run
    return cell


def cell_key(settings: Settings) -> str:
    """SHA-256 of a run's settings and of what ``data.root`` names, which their own fingerprint leaves out.

    Choice: a file is known by place, size and time of change, a folder by those of the files right in it.
    """
    root = settings.data.root
    data: list[Any] = [root]
    if root not in EMBEDDED:
        path = Path(root).expanduser().resolve()
        files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.exists()]
        data = [str(path), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    return hashlib.sha256(json.dumps([settings.fingerprint(), DATA_ROOT, data]).encode()).hexdigest()


def code_state() -> str:
    """Twelve digits that change with the source of what trains and measures; a method of a user's own is not in it."""
    digest = hashlib.sha256()
    for room in SHAPING_ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def reason_of(error: BaseException) -> str:
    """What went wrong in one line."""
    lines = " ".join(str(error).split())
    return f"{type(error).__name__}: {lines}" if lines else type(error).__name__
