"""What keeps a federation in order: the supervisor, the list of keys at the SuperLink, and cleaning up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from deploy import clean, register, supervise
from deploy.kit import read_kit

# -- supervisor -------------------------------------------------------------------------------------------------------


@pytest.fixture
def superlink(kits, monkeypatch):
    """What the supervisor believes the SuperLink says."""
    said = SimpleNamespace(alive=True, runs=[], nodes={"1": "online"})
    answers = {"ls": lambda: {"runs": said.runs}, "supernode": lambda: {"nodes": []}}
    monkeypatch.setattr(supervise, "_answers", lambda kit: said.alive)
    monkeypatch.setattr(supervise, "flwr", lambda kit, *words: answers[words[0]]())
    monkeypatch.setattr(supervise, "statuses", lambda kit: said.nodes)
    monkeypatch.setattr(supervise, "registered", lambda kit: {"north": {"node_id": "1", "public_key": ""}})
    kits.server.state_dir.mkdir(parents=True)
    return said


def executor_process(kit, tmp_path):
    """A process that looks like the server's SuperExec."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "superexec"])
    (kit.state_dir / "services.json").write_text(json.dumps({"superexec": {"pid": process.pid}}))
    while supervise.superexec_pid(kit) is None:  # its command line shows a moment after its start
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_a_dead_superexec_and_a_silent_superlink_are_named(kits, superlink):
    found = supervise.look(kits.server, {}, 0.0)
    assert found.problems() == ["the SuperExec has died: no run can start"]
    superlink.alive = False
    assert "the SuperLink does not answer" in supervise.look(kits.server, {}, 0.0).sentence()


def test_a_run_that_nobody_takes_is_named_and_the_superexec_is_ended(kits, superlink, tmp_path):
    process = executor_process(kits.server, tmp_path)
    try:
        superlink.runs = [{"run-id": "7", "status": "pending"}, {"run-id": "6", "status": "finished:completed"}]
        since = {}
        superlink.runs.append({"run-id": "5", "status": "running"})
        assert supervise.look(kits.server, since, 0.0).pending == {}, "it waits behind another one"
        superlink.runs.pop()
        assert supervise.look(kits.server, since, 100.0).problems() == []
        assert supervise.mend(kits.server, supervise.look(kits.server, since, 130.0), since) == ""
        found = supervise.look(kits.server, since, 161.0)
        assert found.problems() == ["run 7 is pending for 61 s: nobody takes it"]
        assert "SuperExec was restarted, since run 7" in supervise.mend(kits.server, found, since)
        assert process.wait(10) == -signal.SIGTERM and since == {}
    finally:
        process.kill()
        process.wait()


def test_a_look_is_one_line_an_exit_code_and_a_file(kits, superlink, tmp_path, capsys):
    process = executor_process(kits.server, tmp_path)
    try:
        superlink.nodes = {"1": "offline"}
        assert supervise.main([str(kits.server.folder), "--once"]) == 0
        assert capsys.readouterr().out == "all is well; offline: north\n"
        supervise.write_status(kits.server, supervise.look(kits.server, {}, 0.0), "")
        status = json.loads((kits.server.state_dir / "status.json").read_text())
        assert status["well"] is True and status["look"]["offline"] == ["north"]
    finally:
        process.kill()
        process.wait()
    assert supervise.main([str(kits.server.folder), "--once"]) == 1
    assert "SuperExec has died" in capsys.readouterr().out


# -- registration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def flower(kits, monkeypatch):
    """A SuperLink's list of SuperNodes, and the commands that it was given."""
    state = SimpleNamespace(nodes={}, asked=[])

    def flwr(kit, *words):
        state.asked.append(words[1])
        if words[1] == "list":
            return {"nodes": [{"node-id": node, "status": "online"} for node in state.nodes]}
        if words[1] == "unregister":
            del state.nodes[words[2]]
            return {}
        node = str(100 + len(state.asked))
        state.nodes[node] = words[words.index("--name") + 1]
        return {"node-id": node}

    monkeypatch.setattr(register, "flwr", flwr)
    kits.server.state_dir.mkdir(parents=True, exist_ok=True)
    return state


def test_registration_brings_members_in_once(kits, flower):
    assert register.register(kits.server) == ["north: registered now", "south: registered now"]
    flower.asked.clear()
    assert register.register(kits.server) == ["north: registered, online", "south: registered, online"]
    assert flower.asked == ["list"] and sorted(flower.nodes.values()) == ["north", "south"]


def test_a_revoked_site_and_an_old_key_are_taken_out(kits, flower, provisioned):
    register.register(kits.server)
    old = {name: node for node, name in flower.nodes.items()}
    provisioned("revoke", "south")
    provisioned("renew", "north", options=["--new-key"])
    said = register.register(read_kit(kits.server.folder))
    assert said == ["north: taken out", "south: taken out", "north: registered now"]
    assert list(flower.nodes.values()) == ["north"] and old["north"] not in flower.nodes


def test_a_superlink_that_lost_its_database_learns_all_again(kits, flower):
    register.register(kits.server)
    flower.nodes.clear()
    assert register.register(kits.server) == ["north: registered now", "south: registered now"]


def test_a_node_that_nobody_of_the_kit_registered_is_named(kits, flower):
    flower.nodes["666"] = "who"
    assert register.register(kits.server)[-1].startswith("node 666: registered by somebody else")


# -- cleaning ---------------------------------------------------------------------------------------------------------


def test_old_code_and_decoded_images_go_and_everything_else_stays(kits, capsys):
    state = kits.north.state_dir
    now, old = time.time(), time.time() - 10 * clean.DAY_S
    files = {
        "flower/apps/a.1/x.py": old,
        "flower/apps/b.2/x.py": old + 60,
        "cache/images.npy": old,
        "cache/images.npy.lock": old,
        "cache/fresh.npy": now,
        "run-1/egress.jsonl": old,
        "run-1/state/local-000001.safetensors": old,
    }
    for name, when in files.items():
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        for part in (path, *path.parents[: len(path.relative_to(state).parts) - 1]):
            os.utime(part, (when, when))
    there = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert clean.main([str(kits.north.folder), "--dry-run"]) == 0
    assert {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()} == there
    assert clean.main([str(kits.north.folder)]) == 0
    left = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert there - left == {"flower/apps/a.1/x.py", "cache/images.npy"}, "the newest code stays"
    assert "freed" in capsys.readouterr().out
    assert clean.main([str(kits.north.folder), "--keep-days", "0"]) == 0  # the hospital leaves
    kept = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert left - kept == {"flower/apps/b.2/x.py", "cache/fresh.npy"}, "the newest code goes too"
