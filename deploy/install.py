"""Install what pyproject.toml asks for, at the versions of constraints.txt, and never the app itself.

    python deploy/install.py [EXTRA ...]

The app is not a wheel on purpose: its top-level package `datasets` would overwrite Hugging Face's in the same
environment. A digest of the dependency lists is kept in the environment, so that a call with nothing to do returns at
once and a changed list or pin installs again. Needs Python 3.11 and pip, nothing else.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP_NAME = ".consilium-installed.json"


def requirements(project: dict, extras: list[str]) -> list[str]:
    """The dependency lines of `[project]` and of the named extras, in the order they are written."""
    optional = project.get("optional-dependencies", {})
    if unknown := sorted(set(extras) - set(optional)):
        raise SystemExit(f"install: no such extra: {', '.join(unknown)}; pyproject.toml has: {', '.join(optional)}")
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def digest(lines: list[str], constraints: str) -> str:
    """Changes when a dependency, a pin or the interpreter changes."""
    return hashlib.sha256(json.dumps([lines, constraints, sys.version]).encode()).hexdigest()


def already_installed(stamp: Path, extra: str, wanted: str) -> bool:
    """Whether this environment was filled for this extra from the very same lists."""
    return stamp.is_file() and json.loads(stamp.read_text()).get(extra) == wanted


def main(extras: list[str]) -> None:
    """Install the base dependencies and the extras that this environment does not have yet."""
    if sys.version_info < (3, 11):  # noqa: UP036, nothing has checked it before this line
        raise SystemExit(
            f"install: Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.12"
        )
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(f"install: {sys.executable} has no pip; on Debian and Ubuntu: apt install python3-venv")
    import tomllib  # after the version check, which older interpreters must reach

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    constraints_path = ROOT / "constraints.txt"
    constraints = constraints_path.read_text(encoding="utf-8")
    stamp = Path(sys.prefix) / STAMP_NAME
    wanted = {extra: digest(requirements(project, [extra] if extra else []), constraints) for extra in ("", *extras)}
    missing = [extra for extra, value in wanted.items() if not already_installed(stamp, extra, value)]
    if not missing:
        return
    lines = requirements(project, extras)
    print(f"install: {len(lines)} dependencies into {sys.prefix} (a few minutes the first time)", flush=True)
    # The constraints file goes to pip by path and is never merged into the lines: only what is needed gets installed.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        str(constraints_path),
        *lines,
    ]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("install: pip failed, see above; nothing was stamped, so the next call tries again")
    done = json.loads(stamp.read_text()) if stamp.is_file() else {}
    stamp.write_text(json.dumps({**done, **wanted}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
