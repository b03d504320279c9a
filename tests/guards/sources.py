"""The app's source files as syntax trees, for guards that read code instead of running it."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("federation", "models", "datasets", "strategies", "client_app", "server_app", "deploy", "bench")


def files_of(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the dotted name of what is called; a method of an expression is ``.name``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if not name and isinstance(node.func, ast.Attribute):
                name = f".{node.func.attr}"
            yield node, name


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every module that a file imports, at its top or later, by statement or by a name given to importlib."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parent.relative_to(ROOT).parts[: len(path.parent.relative_to(ROOT).parts) + 1 - node.level]
            yield node, ".".join([*package, node.module or ""]) if node.level else str(node.module)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "__import__"):
            yield from ((node, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword, None where it is absent or computed."""
    for given in call.keywords:
        if given.arg == name and isinstance(given.value, ast.Constant):
            return given.value.value
    return None


def repository_files() -> list[Path]:
    """Files that are tracked or would be added; every text file below the root where git cannot say."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    if listed.returncode == 0:
        return sorted({ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()})
    hidden = (".git", ".venv", "runs")
    return [path for path in ROOT.rglob("*") if path.is_file() and path.relative_to(ROOT).parts[0] not in hidden]
