"""A deployed federation, TLS and keys and all, while things go wrong: who gets in, and what a run does about it.

One server and three hospitals as real processes, kept up for the whole module. What a run must end in is known from
the same run in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from deploy import provision_pki as pki
from deploy.flower import command, environment
from deploy.kit import file_sha256
from server_app.processes import ProcessFamily
from server_app.rehearsal import Rehearsal, alone
from server_app.superlink import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin") is None,
        reason="nginx is not installed (apt install nginx-light)",
    ),
]

SITES = ("east", "north", "south")
ROUNDS = 2
LIMIT_S = 900.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Server and hospitals, all online."""
    with Rehearsal(tmp_path_factory.mktemp("drills"), sites=SITES) as rehearsal:
        rehearsal.prepare()
        rehearsal.start_server()
        rehearsal.register()
        for site in SITES:
            rehearsal.start_site(site)
        all_online(rehearsal)
        yield rehearsal


@pytest.fixture(scope="module")
def expected(federation):
    """The model's SHA-256 of an undisturbed run, in one process."""
    return alone(federation, config(federation))


def config(federation, **changes):
    return federation.run_config(**{"federation__rounds": ROUNDS, "model__width": 4, **changes})


def all_online(federation):
    """Every hospital is there, as the operator sees it."""

    def is_so():
        return federation.command("supervise", str(federation.kit("server")), "--once") == "all is well\n"

    federation.until(is_so, "all hospitals are online", LIMIT_S)


def result(federation, run_id):
    """``run.json`` of a finished run, and the rounds of its ``metrics.jsonl``."""
    status = federation.wait(run_id, LIMIT_S)
    folder = federation.run_folder()
    run = json.loads((folder / "run.json").read_text())
    assert status.is_completed, f"{status.details}\n{run.get('warnings')}\n{federation.tail('server')}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return run, [line for line in lines if line["kind"] == "round"]


def told(federation, name, text, since=0):
    """Whether a log has said something after so many of its characters."""
    return text in federation.log(name).read_text(errors="replace")[since:]


def said_so_far(federation, name):
    return len(federation.log(name).read_text(errors="replace"))


# -- who gets in ------------------------------------------------------------------------------------------------------


def altered_kit(federation, folder, site="east", **files):
    """A copy of a site's kit with other files in it, and its list made to fit them: the list stops accidents only."""
    kit = folder / "kit"
    shutil.copytree(federation.kit(site), kit)
    listed = json.loads((kit / "manifest.json").read_text())
    for path, content in files.items():
        target = kit / listed["paths"][path]
        target.write_bytes(content)
        listed["files"][listed["paths"][path]] = file_sha256(target)
    listed |= {"state_dir": str(folder / "state"), "ports": {"runtime": free_port(), "tunnel": free_port()}}
    listed["superlink"] = f"127.0.0.1:{listed['ports']['tunnel']}"
    (kit / "manifest.json").write_text(json.dumps(listed))
    return kit


def turned_away(federation, kit):
    """A hospital's start from this kit ends by itself, with a hint for its administrator, and was never let in.

    The proxy has a line about it, with the name that its certificate shows.
    """
    name, before = f"intruder-{kit.parent.name}", len(access_log(federation))
    federation.start(name, kit)
    try:
        federation.until(lambda: not federation.is_alive(name), f"{name} is turned away", 240)
    finally:
        assert federation.stop(name) == []
    text = federation.log(name).read_text()
    assert "SuperNode ID" not in text
    assert "the server does not know this kit's key or certificate" in text
    site = json.loads((kit / "manifest.json").read_text())["site"]
    refused = rf'"CN={site},O=rehearsal" POST /v1/fleet/activate-node 40[01] '
    assert re.search(refused, access_log(federation)[before:])


def access_log(federation):
    return (federation.state("server") / "proxy/access.log").read_text()


def authority(federation):
    parts = [(federation.folder / "made/ca" / name).read_bytes() for name in ("ca.crt", "ca.key")]
    return pki.load_authority(*parts, None)


def test_a_key_that_is_not_the_hospitals_own_is_turned_away(federation, tmp_path):
    private, public = pki.new_node_key("east")
    kit = altered_kit(federation, tmp_path, private_key=private, public_key=public)
    turned_away(federation, kit)


def test_the_key_of_another_hospital_is_turned_away(federation, tmp_path):
    private = (federation.kit("north") / "node.key").read_bytes()
    kit = altered_kit(federation, tmp_path, private_key=private)
    turned_away(federation, kit)


def test_an_expired_certificate_is_turned_away(federation, tmp_path):
    past = datetime.now(UTC) - timedelta(days=20)
    leaf = pki.issue(authority(federation), "rehearsal", "east", purpose=pki.CLIENT, now=past, days=10)
    kit = altered_kit(federation, tmp_path, client_certificate=leaf.certificate, client_key=leaf.key)
    turned_away(federation, kit)


@pytest.mark.parametrize("port", ["server", "superlink"])
@pytest.mark.parametrize("way", ["no key", "plain HTTP"])
def test_a_supernode_without_key_or_encryption_is_turned_away(federation, tmp_path, way, port):
    """At the proxy, and even on the server's loopback, where the operator's commands come in."""
    before, said = len(access_log(federation)), said_so_far(federation, "server")
    arguments = ["--superlink", f"127.0.0.1:{federation.ports[port]}", "--port", str(free_port()), "--max-retries", "1"]
    ca = str(federation.kit("server") / "certificates/ca.crt")
    arguments += ["--insecure"] if way == "plain HTTP" else ["--root-certificates", ca]
    with (tmp_path / "log").open("wb") as log:
        family = ProcessFamily(
            subprocess.Popen(
                [command("flower-supernode"), *arguments, "--isolation", "process"],
                cwd=tmp_path,
                env=environment(tmp_path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
    try:
        assert family.leader.wait(240) != 0
        assert "SuperNode ID" not in (tmp_path / "log").read_text()
        assert port == "superlink" or re.search(r'"-" POST \S+ 400 ', access_log(federation)[before:])
        # Plain HTTP at the SuperLink's own port ends before there is a request: it logs nothing, nor does it answer.
        if (way, port) == ("no key", "superlink"):
            refused = re.compile(r'"POST /v1/fleet/register-node HTTP/1.1" 412')
            federation.until(lambda: refused.search(federation.log("server").read_text()[said:]), "it is logged")
    finally:
        assert family.stop() == []


# -- what a run does --------------------------------------------------------------------------------------------------


def test_an_undisturbed_run_is_that_of_one_process(federation, expected):
    run, rounds = result(federation, federation.submit(config(federation)))
    assert run["model_sha256"] == expected and run["outstanding"] == []
    assert [sorted(line["train_loss"]) for line in rounds] == [list(SITES)] * ROUNDS
    assert " 503 " not in access_log(federation), "no hospital is slowed down at the door"


def test_a_hospital_killed_in_a_round_is_left_out_and_comes_back(federation):
    before = said_so_far(federation, "south")
    run_id = federation.submit(config(federation, federation__rounds=3))
    federation.until(lambda: told(federation, "south", "Receiving: train message", before), "training", LIMIT_S)
    kill(federation, "south")
    federation.until(lambda: restarted(federation, "south", said_so_far(federation, "south")), "south is back", LIMIT_S)
    run, rounds = result(federation, run_id)
    assert set(rounds[0]["train_loss"]) == {"east", "north"}, "the round went on without it"
    assert rounds[0]["missing"] == [{"site": "south", "reason": "the site's node went away"}]
    assert set(rounds[-1]["train_loss"]) == set(SITES), "it came back by itself"
    assert run["status"] == "completed"


def restarted(federation, site, since):
    """Starts a hospital as systemd does, again and again: the SuperLink lets nobody in twice, and it takes a minute to
    miss whoever had no time to say goodbye.
    """
    federation.start_site(site)
    federation.until(lambda: told(federation, site, "SuperNode ID", since) or not federation.is_alive(site), site, 240)
    if federation.is_alive(site):
        return True
    assert federation.stop(site) == []
    return False


def kill(federation, name):
    """Ends a started command and all that it started as a power cut does."""
    family = federation.families.pop(name)
    for pid in family.look():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    family.leader.wait(30)
    assert family.stop() == []


def test_a_killed_superlink_comes_back_and_the_run_is_resumed_to_the_same_bits(federation, expected):
    before = said_so_far(federation, "south")
    run_id = federation.submit(config(federation))
    federation.until(lambda: told(federation, "south", "ROUND 2", before), "the second round", LIMIT_S)
    folder = federation.run_folder()
    kill(federation, "server")
    federation.start("server", federation.kit("server"), "server")
    federation.until(lambda: federation.cli().status(run_id).is_finished, "the old run is given up", LIMIT_S)
    assert not federation.cli().status(run_id).is_completed
    all_online(federation)
    run, rounds = result(federation, federation.submit(config(federation, resume=str(folder))))
    assert run["resumed_after_round"] in (0, 1) and federation.run_folder() == folder
    assert run["model_sha256"] == expected and [line["round"] for line in rounds] == [1, 2]


def test_a_hospital_that_hangs_is_waited_for_no_longer_than_agreed(federation):
    before = said_so_far(federation, "north")
    run_id = federation.submit(config(federation, federation__timeout_s=150.0))
    federation.until(lambda: told(federation, "north", "Receiving: train message", before), "training", LIMIT_S)
    stopped = federation.families["north"].look()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        _, rounds = result(federation, run_id)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert set(rounds[-1]["train_loss"]) == {"east", "south"}
    all_online(federation)


def test_a_network_that_is_cut_in_a_round_and_mended_costs_nothing(federation, expected):
    """The way of one hospital goes through a relay that drops every connection and takes no new ones for a while."""
    assert federation.stop("east") == []
    with Relay(federation.ports["server"]) as relay:
        listed = federation.kit("east") / "manifest.json"
        original = listed.read_text()
        listed.write_text(json.dumps(json.loads(original) | {"server": f"127.0.0.1:{relay.port}"}))
        try:
            federation.start_site("east")
            all_online(federation)
            before = said_so_far(federation, "east")
            run_id = federation.submit(config(federation))
            federation.until(lambda: told(federation, "east", "Receiving: train", before), "training", LIMIT_S)
            relay.cut()
            time.sleep(15)
            relay.mend()
            run, rounds = result(federation, run_id)
        finally:
            federation.stop("east")
            listed.write_text(original)
    federation.start_site("east")
    assert relay.passed > 0 and told(federation, "east", "cannot be reached", before)
    assert run["model_sha256"] == expected
    assert [sorted(line["train_loss"]) for line in rounds] == [list(SITES)] * ROUNDS
    all_online(federation)


class Relay:
    """Passes TCP connections on to a loopback port, until it is cut."""

    def __init__(self, target):
        self.target, self.passed, self._open = target, 0, []
        self.port = free_port()

    def __enter__(self):
        self.mend()
        return self

    def __exit__(self, *_):
        self.cut()

    def mend(self):
        self._door = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._door,), daemon=True).start()

    def cut(self):
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        while self._open:
            end = self._open.pop()
            for act in (lambda end=end: end.shutdown(socket.SHUT_RDWR), end.close):
                try:
                    act()
                except OSError:
                    continue

    def _accept(self, door):
        while True:
            try:
                near, _ = door.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self._open += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
                self.passed += len(data)
        except OSError:
            return


def test_a_hospital_whose_disk_is_full_is_left_out_by_a_code(federation):
    """No file beyond a few kilobytes can be written there, as on a full disk: the run goes on without it."""
    assert federation.stop("east") == []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        federation.start_site("east")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        run, rounds = result(federation, federation.submit(config(federation, federation__wait_s=30.0)))
    finally:
        federation.stop("east")
    assert all(set(line["train_loss"]) == {"north", "south"} for line in rounds)
    assert run["status"] == "completed"
    federation.start_site("east")
    all_online(federation)


# -- a hospital that leaves for good; nothing of it works afterwards, so this is the last drill -----------------------


def test_a_revoked_hospital_is_put_out_while_it_is_online_and_never_let_in_again(federation, tmp_path):
    kit, before = altered_kit(federation, tmp_path, site="south"), said_so_far(federation, "south")
    made = str(federation.folder / "made")
    federation.command("provision", "revoke", str(federation.plan_file), "south", "--out", made)
    assert federation.stop("proxy") == []
    federation.start("proxy", federation.kit("server"), "proxy")
    assert "south: taken out" in federation.command("register", str(federation.kit("server")))
    federation.until(lambda: not federation.is_alive("south"), "south is put out", 240)
    assert federation.stop("south") == []
    assert told(federation, "south", "the server does not know this kit's key or certificate", before)
    turned_away(federation, kit)
    all_online(federation)
