"""A small federation to make kits of."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from deploy import provision
from deploy.kit import read_kit


@pytest.fixture
def plan(tmp_path):
    """The content of a federation.yaml of two hospitals on this machine, for tests to change."""

    def machine(name):
        return {"kit_dir": str(tmp_path / "out" / "kits" / name), "state_dir": str(tmp_path / "state" / name)}

    return {
        "name": "chest-2026",
        "labels": ["cat", "dog"],
        "server": {"host": "localhost", "port": 18443, "superlink_port": 18000, **machine("server")},
        "sites": [
            {"name": name, "data_root": str(tmp_path / "data" / name), "runtime_port": port, **machine(name)}
            for name, port in (("north", 19094), ("south", 19095))
        ],
    }


@pytest.fixture
def provisioned(tmp_path, plan, capsys, monkeypatch):
    """``provisioned(*words, **options)``: runs the command on the plan; returns its exit code and what it said."""
    monkeypatch.setattr("federation.files._flush", lambda path: None)  # a power cut is not what is tested here
    file, out = tmp_path / "federation.yaml", tmp_path / "out"

    def run(*words, options=()):
        file.write_text(json.dumps(plan))  # JSON is YAML
        action, names = words[:1], words[1:]
        code = provision.main([*action, str(file), *names, "--out", str(out), *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    run.out, run.kits, run.file = out, out / "kits", file
    return run


@pytest.fixture
def kits(provisioned, tmp_path, write_hospital, ward):
    """Kits of two hospitals with data, and of their server."""
    for site in ("north", "south"):
        write_hospital(tmp_path / "data" / site, ward(site))
    provisioned()
    return SimpleNamespace(**{name: read_kit(provisioned.kits / name) for name in ("north", "south", "server")})
