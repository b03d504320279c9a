"""The settings of one launch: which of the app's run config they override, from a preset file and the command line.

Flower's run config is flat, holds only numbers, true/false and text, and knows only the keys of the app's
pyproject.toml. Whatever does not fit is refused here, by name, before a process is started.
"""

import argparse
import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from federation.settings import flatten

RUNS_DIR, DATA_ROOT = "reporting.runs_dir", "data.root"
PATHS = (DATA_ROOT, "data.cache_dir", "model.weights", "resume", RUNS_DIR)
PATH_ENDINGS = ("_dir", "_root", "_weights")
"""Settings of a method whose names end so are paths too."""

Value = int | float | bool | str
RunConfig = dict[str, Value]


class LaunchError(RuntimeError):
    """The run cannot be started as asked; the message says what to change."""


def read_toml(path: Path) -> dict[str, object]:
    """A TOML file with dotted keys; a missing or broken one is named."""
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        there = ", ".join(sorted(str(other) for other in path.parent.glob("*.toml"))) or "no TOML file"
        raise LaunchError(f"there is no file {path}; its folder has {there}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} is not valid TOML: {error}") from None


def parse_overrides(text: str) -> dict[str, object]:
    """`'a.b=1 name="x y" method.name=fedavg'` as a mapping; a bare word is a string, as people type it.

    >>> parse_overrides('a.b=1 flag=true name="x y" method.name=fedavg')
    {'a.b': 1, 'flag': True, 'name': 'x y', 'method.name': 'fedavg'}
    """
    found: dict[str, object] = {}
    rest = text
    pair = re.compile(r"""\s*([\w.-]+)=("(?:[^"\\]|\\.)*"|'[^']*'|\S+)(?=\s|$)\s*""")
    while rest.strip():
        match = pair.match(rest)
        if not match:
            raise LaunchError(
                f"--run-config: cannot read {rest.strip()!r}; it wants key=value pairs with blanks between"
            )
        found[match[1]] = _toml_value(match[2])
        rest = rest[match.end() :]
    return found


def _toml_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def app_defaults(app: Path) -> dict[str, object]:
    """The run config of the app's pyproject.toml: the only keys that Flower lets anybody override."""
    path = app / "pyproject.toml"
    if not path.is_file():
        raise LaunchError(f"{app} is not a Flower app: it has no pyproject.toml")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return flatten(tables.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))


def resolve_run_config(options: argparse.Namespace, defaults: Mapping[str, object]) -> RunConfig:
    """All that is to differ from the app's defaults: preset, then `-c`, then the paths, which become absolute."""
    from datasets.catalogue import EMBEDDED  # here, since it brings pandas along and `--help` should be quick

    chosen: dict[str, object] = read_toml(options.preset) if options.preset else {}
    for text in options.run_config:
        chosen |= parse_overrides(text)
    if options.data is not None:
        if options.data not in EMBEDDED and not Path(options.data).expanduser().exists():
            raise LaunchError(f"--data: there is no file or folder {options.data}")
        chosen[DATA_ROOT] = options.data
    if options.runs_dir is not None:
        chosen[RUNS_DIR] = str(options.runs_dir)
    if wrong := {key: value for key, value in chosen.items() if not isinstance(value, Value)}:
        raise LaunchError(f"a run config holds numbers, true/false and text only; not so: {wrong}")
    for key in (*PATHS, *(key for key in defaults if key.endswith(PATH_ENDINGS) and key not in PATHS)):
        # The server runs in an empty folder of its own: a relative path would mean something else there.
        path = str(chosen.get(key, defaults.get(key, "")))
        if path and path not in EMBEDDED:
            chosen[key] = os.path.abspath(os.path.expanduser(path))
    return chosen  # type: ignore[return-value]  # checked above


def check_keys(run_config: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Refuses keys the app does not have, by name: Flower would only say that the run config is invalid."""
    unknown = sorted(set(run_config) - set(defaults))
    nearest = (difflib.get_close_matches(key, defaults, n=1) for key in unknown)
    if named := [
        f"{key} (did you mean {near[0]}?)" if near else key for key, near in zip(unknown, nearest, strict=True)
    ]:
        raise LaunchError(f"the app has no such setting: {', '.join(named)}")


def write_toml(path: Path, run_config: RunConfig) -> Path:
    """Writes the overrides as the file that `flwr run --run-config` takes, and returns its path."""
    # JSON's strings, numbers and booleans are TOML's too, and quoted dotted keys come out of Flower as they went in.
    lines = (f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in run_config.items())
    path.write_text("".join(lines), encoding="utf-8")
    return path
