"""Flower's commands as a kit runs them: where they are, and the environment that keeps them quiet and private."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nothing is sent to anybody, and no other version than the tested one is installed at run time."""


class FlowerMissing(RuntimeError):
    """Flower is not installed in this environment."""


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a Flower process: private to ``home``, loopback never through a proxy of the hospital's."""
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY", os.environ.get("no_proxy")), "127.0.0.1,localhost")))
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    own = {"FLWR_HOME": str(home), "PATH": path, "NO_PROXY": direct, "no_proxy": direct, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, **QUIET, **(extra or {})}


def command(name: str) -> str:
    """The path of a command of this environment. Raises FlowerMissing."""
    path = shutil.which(name, path=environment(Path())["PATH"])
    if path is None:
        raise FlowerMissing(f"the command {name} is missing; install the dependencies: python deploy/install.py")
    return path
