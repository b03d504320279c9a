"""Calls that have no place in code which reads other people's bytes and guards patients' data, found in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.guards.sources import (
    ROOMS,
    ROOT,
    calls,
    dotted,
    files_of,
    imports,
    keyword,
    place,
    repository_files,
    tree_of,
)

SOURCES = files_of(*ROOMS)
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def assert_none(found: list[str]) -> None:
    assert not found, "\n".join(found)


def test_the_guards_see_the_app():
    assert len(SOURCES) > 50


# -- bytes of others --------------------------------------------------------------------------------------------------


def test_nothing_is_pickled():
    assert_none(
        [f"{place(p, node)} imports {m}" for p in SOURCES for node, m in imports(p) if m.split(".")[0] in UNPICKLERS]
    )
    names = {"read_pickle", "to_pickle"}
    assert_none([place(p, call) for p in SOURCES for call, name in calls(p) if name.rpartition(".")[2] in names])


def test_torch_load_reads_weights_only():
    assert_none(
        [
            place(path, call)
            for path in SOURCES
            for call, name in calls(path)
            if name in ("torch.load", "torch.hub.load", "torch.jit.load")
            and (name != "torch.load" or keyword(call, "weights_only") is not True)
        ]
    )
    assert_none(
        [place(p, node) for p in SOURCES for node, m in imports(p) if m in ("torch.hub", "torch.serialization")]
    )


def test_np_load_never_unpickles():
    loads = ("np.load", "numpy.load", "np.lib.format.read_array", "numpy.lib.format.read_array")
    found = [
        (place(p, call), keyword(call, "allow_pickle")) for p in SOURCES for call, name in calls(p) if name in loads
    ]
    assert found, "the guard must see the loads there are"
    assert_none([where for where, allow in found if allow is not False])
    header = [place(p, call) for p in SOURCES for call, name in calls(p) if "read_array_header" in name]
    assert_none(header)  # NumPy evaluates the header's text and fails in a dozen ways on hostile bytes


@pytest.mark.parametrize("builtin", ["eval", "exec", "compile", "__import__"])
def test_no_text_becomes_code(builtin):
    assert_none(
        [place(p, call) for p in SOURCES for call, name in calls(p) if name in (builtin, f"builtins.{builtin}")]
    )


def test_yaml_is_read_safely_or_not_at_all():
    unsafe = ("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader")
    assert_none([place(p, call) for p in SOURCES for call, name in calls(p) if name in unsafe])
    assert_none(
        [
            place(path, node)
            for path in SOURCES
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom)
            and node.module == "yaml"
            and any(a.name != "safe_load" for a in node.names)
        ]
    )


def test_archives_are_read_in_place_never_unpacked():
    assert_none(
        [
            place(p, call)
            for p in SOURCES
            for call, name in calls(p)
            if name.rpartition(".")[2] in ("extractall", "unpack_archive")
        ]
    )


def test_no_command_goes_through_a_shell():
    assert_none([place(p, call) for p in SOURCES for call, name in calls(p) if name in ("os.system", "os.popen")])
    assert_none([place(p, call) for p in SOURCES for call, _ in calls(p) if keyword(call, "shell")])


def test_no_remote_code_and_no_unchecked_certificate():
    assert_none([place(p, call) for p in SOURCES for call, _ in calls(p) if keyword(call, "trust_remote_code")])
    assert_none([place(p, call) for p in SOURCES for call, _ in calls(p) if keyword(call, "verify") is False])
    assert_none([place(p, c) for p in SOURCES for c, name in calls(p) if name.endswith("_create_unverified_context")])


# -- errors and output ------------------------------------------------------------------------------------------------


def test_no_bare_except():
    handlers = [(p, n) for p in SOURCES for n in ast.walk(tree_of(p)) if isinstance(n, ast.ExceptHandler)]
    assert_none([place(path, node) for path, node in handlers if node.type is None])


def test_whoever_catches_everything_raises_it_again():
    """BaseException holds Ctrl-C and exits: catching it is for cleaning up."""
    caught = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "BaseException" in ast.unparse(node.type)
    ]
    assert_none([place(p, node) for p, node in caught if not any(isinstance(n, ast.Raise) for n in ast.walk(node))])


def test_a_site_prints_nothing():
    """What a site prints reaches Flower's log in simulation; only commands that a person types print."""
    found = []
    for path in files_of("client_app", "strategies", "models", "federation"):
        commands = [n for n in tree_of(path).body if isinstance(n, ast.FunctionDef) and n.name == "main"]
        typed = {id(node) for command in commands for node in ast.walk(command)}
        found += [
            place(path, call) for call, name in calls(path) if name in ("print", "pprint") and id(call) not in typed
        ]
    assert_none(found)


def test_a_site_logs_through_its_own_logger_only():
    """Flower's log, which the server can read, is never written to from the site's half."""
    loggers = {"flwr.supercore": {"log"}, "flwr.common": {"log"}, "flwr.common.logger": {"log", "logger"}}
    assert_none(
        [
            place(path, node)
            for path in files_of("client_app", "datasets", "models")
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom)
            and any(alias.name in loggers.get(node.module or "", ()) for alias in node.names)
        ]
    )
    root = (
        "logging.info",
        "logging.warning",
        "logging.error",
        "logging.exception",
        "logging.debug",
        "logging.basicConfig",
    )
    assert_none(
        [place(p, c) for p in files_of("client_app", "datasets", "models") for c, name in calls(p) if name in root]
    )


# -- state ------------------------------------------------------------------------------------------------------------

MAY_WRITE = {
    "server_app/superlink.py": "the throw-away configuration of one launch",
    "server_app/launch_config.py": "the settings file of one launch, in its temporary folder",
}
"""Files that write without `federation.files`, and why a half-written file does no harm there."""


def writes(path: Path) -> list[str]:
    found = []
    for call, name in calls(path):
        method = name.rpartition(".")[2]
        mode = next((a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)), "")
        if method == "open" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            mode = str(call.args[1].value)
        mode = str(keyword(call, "mode") or mode)
        opens = method in ("open", "fdopen") and re.fullmatch(r"[rwxabt+]+", mode) and set(mode) & set("wx+")
        if method in ("write_text", "write_bytes") or opens:
            found.append(place(path, call))
    return found


def test_state_is_written_whole_or_not_at_all():
    found = {
        str(path.relative_to(ROOT)): where
        for path in files_of("server_app", "client_app", "strategies", "models")
        if (where := writes(path))
    }
    assert {name: where for name, where in found.items() if name not in MAY_WRITE} == {}
    savers = ("torch.save", "np.save", "np.savez", "save_file", "safetensors.torch.save_file")
    rooms = ("server_app", "client_app", "strategies", "models")
    assert_none([place(p, call) for p in files_of(*rooms) for call, name in calls(p) if name in savers])


def test_exceptions_from_that_rule_are_still_needed():
    assert_none([name for name in MAY_WRITE if not writes(ROOT / name)])


# -- chance and devices -----------------------------------------------------------------------------------------------


def test_no_draw_comes_from_global_state():
    """Every draw is a function of (seed, purpose, round, site); see `federation.seeding`."""
    found = []
    for path in files_of("federation", "models", "datasets", "strategies", "client_app", "server_app"):
        for call, name in calls(path):
            owner, _, function = name.rpartition(".")
            bad_numpy = owner in ("np.random", "numpy.random") and function not in ("default_rng", "Generator", "PCG64")
            bad_python = owner == "random" and function not in ("Random", "SystemRandom")
            bad_torch = name in ("torch.manual_seed", "torch.seed", "torch.cuda.manual_seed_all")
            if bad_numpy or bad_python or (bad_torch and path.name != "seeding.py"):
                found.append(f"{place(path, call)} {name}")
    assert_none(found)


def test_no_hidden_move_to_a_device():
    rooms = files_of("federation", "models", "datasets", "strategies", "client_app", "server_app")
    assert_none([place(p, call) for p in rooms for call, name in calls(p) if name.endswith(".cuda")])
    strings = [
        place(path, node)
        for path in rooms
        if path.name not in ("device.py", "settings.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func).endswith("device")
        and any(isinstance(a, ast.Constant) and str(a.value).startswith("cuda") for a in node.args)
    ]  # fmt: skip
    assert_none(strings)


# -- what every file of the repository may say ------------------------------------------------------------------------

MACHINE_PATHS = re.compile(r"(?<![\w.}/:])/(?:" + "|".join(("work", "home", "root", "Users")) + r")/[\w.-]+")
REGISTRIES = re.compile(
    "|".join(
        (
            "--(?:extra-)?index" + "-url",
            "trusted" + "-host",
            "files.python" + "hosted",
            "registry" + r"\.npmjs",
            "artifact" + "ory",
            r"\bhttps?://[\w.-]*(?:pypi|mirror|nexus|registry)[\w.-]*",
        )
    )
)
TEXT = {".py", ".toml", ".md", ".txt", ".yml", ".yaml", ".json", ".cfg", ".ini", ".sh", ".html", ".service", ""}


@pytest.mark.parametrize(
    ("what", "pattern"), [("a path of one machine", MACHINE_PATHS), ("a package registry", REGISTRIES)], ids=str
)
def test_no_file_names_what_exists_on_one_machine_only(what, pattern):
    found = []
    for path in repository_files():
        if path.suffix in TEXT:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [
                f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, m.start()) + 1} names {what}: {m[0]}"
                for m in pattern.finditer(text)
            ]
    assert_none(found)


def test_no_note_to_self_is_left():
    word = "TO" + "DO"
    assert_none(
        [
            f"{path.relative_to(ROOT)}:{number}"
            for path in repository_files()
            if path.suffix == ".py"
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if re.search(rf"\b(?:{word}|FIX" + r"ME)\b(?!\()", line)
        ]
    )
