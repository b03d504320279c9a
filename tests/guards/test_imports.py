"""The house of architecture.md as a test: which room may import which, and which names it must not know."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.guards.sources import ROOMS, ROOT, calls, dotted, files_of, imports, place, tree_of

MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "federation": (set(), {"torch", "numpy", "flwr", "pydantic", "safetensors", "cryptography", "dp_accounting"}),
    "models": (set(), {"torch", "torchvision", "timm", "open_clip", "transformers", "ot", "numpy", "safetensors"}),
    "datasets": (
        {"federation"},
        {"torch", "PIL", "pandas", "pyarrow", "numpy", "sklearn", "pydicom", "jinja2", "markupsafe"},
    ),
    "strategies": ({"federation", "models"}, {"flwr", "torch", "numpy", "pydantic"}),
    "client_app": ({"federation", "models", "datasets"}, {"flwr", "torch", "numpy", "safetensors", "opacus"}),
    "server_app": (
        {"federation", "models", "datasets", "strategies", "client_app"},
        {"flwr", "torch", "numpy", "safetensors", "jinja2", "markupsafe", "markdown", "rich", "matplotlib", "onnx"},
    ),
    "deploy": ({"federation", "datasets"}, {"cryptography", "flwr", "pydantic", "yaml", "jinja2", "rich"}),
}
"""Room -> other rooms, packages from elsewhere. Beyond the table of architecture.md: safetensors where weights are
read or written, numpy everywhere, and what the embedded digits, DICOM and the report are made with. The data room takes
atomic files and seeded generators from `federation`; the secure sum is made with cryptography; the preflight signs one
request as a SuperNode does."""

METHODS = sorted(
    path.stem
    for path in files_of("strategies")
    if any(name == "register" or name.endswith(".register") for _, name in calls(path))
)
DEFAULT_METHOD = ("federation/settings.py", "fedavg")
"""The one method that shared code names: what a run config without ``method`` means."""

OTHER_MEANINGS = {("federation/settings.py", "local")}
"""Words that name something else there than the method of that name: where the noise of `privacy.dp` is added."""


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_its_row_allows(room):
    rooms, packages = MAY_IMPORT[room]
    allowed = {room, *rooms, *packages, *sys.stdlib_module_names}
    wrong = [
        f"{place(path, node)} imports {module}"
        for path in files_of(room)
        for node, module in imports(path)
        if module.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_row():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert folders == {*MAY_IMPORT, "bench"}, "a new room needs a row here and in architecture.md"


def test_federation_takes_only_records_and_messages_of_flower():
    allowed = ("flwr.app", "flwr.supercore")
    wrong = [place(p, node) for p in files_of("federation") for node, m in imports(p) if m.startswith("flwr")
             and not m.startswith(allowed)]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_the_app_never_imports_the_other_package_called_datasets():
    """Every name taken from ``datasets`` is a module of ours, so the other package's API is not used by accident."""
    ours = {"datasets", *(f"datasets.{path.stem}" for path in files_of("datasets"))}
    used = {module: place(path, node) for path in files_of(*ROOMS) for node, module in imports(path)
            if module.partition(".")[0] == "datasets"}  # fmt: skip
    assert not {module: where for module, where in used.items() if module not in ours}


# -- names of methods -------------------------------------------------------------------------------------------------


def shared_files() -> list[Path]:
    """Files in which no method may be named: everything but the methods' own, ``x.py`` and ``x_part.py``."""
    return [
        path
        for path in files_of("federation", "datasets", "models", "server_app", "strategies", "client_app", "deploy")
        if path.stem not in METHODS and not any(path.stem.startswith(f"{method}_") for method in METHODS)
    ]


def docstrings(path: Path) -> set[int]:
    """Ids of constants that stand alone as a statement: documentation, not code."""
    return {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)}


def test_there_are_methods_to_look_for():
    assert {"fedavg", "fedprox", "scaffold", "local", "centralised"} <= set(METHODS)


@pytest.mark.parametrize("path", shared_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_shared_code_knows_no_method_by_name(path):
    quiet = docstrings(path)
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            words = [node.value]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            words = [alias.name for alias in node.names] + str(getattr(node, "module", "")).split(".")
        elif isinstance(node, ast.Name | ast.Attribute):
            words = [dotted(node).rpartition(".")[2]]
        else:
            continue
        found += [(place(path, node), word) for word in words if word.lower() in METHODS]
    found = [(where, word) for where, word in found if (str(path.relative_to(ROOT)), word) not in OTHER_MEANINGS]
    if str(path.relative_to(ROOT)) == DEFAULT_METHOD[0]:
        found = [(where, word) for where, word in found if word != DEFAULT_METHOD[1]]
    assert not found, f"shared code names a method: {found}"


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_one_base_name_in_every_room(method):
    """``strategies/x.py`` registers ``x`` with the site half ``client_app.x``: deleting it is deleting those files."""
    (call,) = [c for c, name in calls(ROOT / "strategies" / f"{method}.py") if name.rpartition(".")[2] == "register"]
    assert isinstance(call.args[0], ast.Constant) and call.args[0].value == method
    (site,) = [given.value for given in call.keywords if given.arg == "site"]
    assert isinstance(site, ast.Constant) and site.value == f"client_app.{method}"
    assert (ROOT / "client_app" / f"{method}.py").is_file()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_imports_no_other_methods_server_half(method):
    """Shared parts live in files of their own, so that any one method can be deleted."""
    others = {f"strategies.{other}" for other in METHODS if other != method}
    assert not others & {module for _, module in imports(ROOT / "strategies" / f"{method}.py")}
