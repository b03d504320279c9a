"""Starting from a kit: what is started and how, what is refused before anything is, and what watches it."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy import services, start, start_data
from deploy.kit import read_kit
from deploy.services import Group, Service
from deploy.tunnel import Tunnel, dialling_context, listening_context

MISSING_COLUMNS = {"image": "fill the column 'image'", "label:dog": "missing dog; add a blank column"}


def after(command, option):
    """The value of an option in a command line."""
    return command[list(command).index(option) + 1]


# -- what is started --------------------------------------------------------------------------------------------------


def test_a_hospital_starts_encrypted_and_authenticated_through_its_tunnel(kits):
    node, executor = start.site_services(kits.north)
    assert "--insecure" not in node.command and "--insecure" not in executor.command
    assert after(node.command, "--superlink") == "127.0.0.1:9443"
    assert after(node.command, "--auth-supernode-private-key") == str(kits.north.folder / "node.key")
    assert after(node.command, "--isolation") == "process"
    secrets = {after(service.command, "--superexec-auth-secret-file") for service in (node, executor)}
    assert secrets == {str(kits.north.folder / "superexec.secret")}
    assert node.environment["FLWR_HOME"] == str(kits.north.state_dir / "flower")
    assert node.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"


def test_the_server_asks_every_supernode_for_its_key_and_listens_on_loopback(kits):
    superlink, executor = start.server_services(kits.server)
    assert "--enable-supernode-auth" in superlink.command and "--insecure" not in superlink.command
    assert after(superlink.command, "--host") == "127.0.0.1"
    assert after(superlink.command, "--database") == str(kits.server.state_dir / "superlink.db")
    assert superlink.essential and not executor.essential, "a SuperExec that dies is started again"


def test_insecure_is_for_loopback_without_a_proxy(kits, capsys):
    for what, kit in (("site", kits.north), ("server", kits.server)):
        assert refused(capsys, what, kit, "--insecure").startswith(
            "start: --insecure is for loopback without a proxy, this kit is for the server localhost:18443 behind nginx"
        )


def test_insecure_has_no_keys_and_is_said_in_every_line(kits, provisioned, plan, capsys, monkeypatch):
    plan["server"]["proxy"] = "none"
    provisioned("renew", "north")
    kit = read_kit(provisioned.kits / "north")
    (node, executor) = start.site_services(kit, insecure=True)
    assert "--insecure" in node.command and "--insecure" in executor.command
    assert not any(option in node.command for option in ("--auth-supernode-private-key", "--root-certificates"))
    assert after(node.command, "--superlink") == "localhost:18443"
    program, state = "import sys; print('one', flush=True); print('two', file=sys.stderr)", kit.state_dir
    group = Group([service(state / "empty", "supernode", program)], state / "services.json")
    monkeypatch.setitem(start.GROUPS, "site", lambda kit, insecure: group)
    start.main(["site", str(kit.folder), "--insecure"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(" | ")[2] for line in lines} >= {"supernode | one", "supernode | two"}
    assert all(line.startswith("INSECURE (not encrypted, nobody authenticated) | ") for line in lines)


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(capsys, what, kit, *options):
    """The one sentence of a start that is refused; kit, data and state folder stay as they were."""
    everything = kit.folder.parents[2]
    before = on_disk(everything)
    assert start.main([what, str(kit.folder), *options]) == 1
    assert on_disk(everything) == before
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def on_disk(folder):
    """Path below a folder -> when it was last written."""
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_server_that_is_started_from_a_hospitals_kit_is_refused(kits, capsys):
    assert refused(capsys, "server", kits.north) == (
        "start: this is the kit of 'north', a site; a server was to be started"
    )


def test_a_port_that_somebody_has_is_named(kits, plan, provisioned, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = plan["server"]["superlink_port"] = taken.getsockname()[1]
        provisioned("renew", "server")
        said = refused(capsys, "server", read_kit(kits.server.folder))
    assert said.startswith(
        f"start: port {port} for the superlink cannot be opened (Address already in use); stop what listens there"
    )


@pytest.mark.parametrize("what", ["runtime", "tunnel"])
def test_a_port_that_somebody_has_at_a_hospital_is_named(kits, plan, provisioned, capsys, what):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = plan["sites"][0][f"{what}_port"] = taken.getsockname()[1]
        provisioned("renew", "north")
        said = refused(capsys, "site", read_kit(kits.north.folder))
    assert said.startswith(f"start: port {port} for the {what} cannot be opened (Address already in use); stop what")


def test_the_kit_of_another_hospital_is_refused(kits, tmp_path, write_hospital, ward, capsys):
    write_hospital(tmp_path / "data" / "north", ward("elsewhere"))
    assert refused(capsys, "site", kits.north).startswith("start: the kit is for 'north', but every row that names a")


@pytest.mark.parametrize(("column", "sentence"), MISSING_COLUMNS.items())
def test_a_manifest_with_a_missing_column_is_refused(kits, tmp_path, capsys, column, sentence):
    drop_column(tmp_path / "data" / "north" / "manifest.csv", column)
    assert sentence in refused(capsys, "site", kits.north)


def drop_column(path, column):
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name != column], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(("minutes", "said"), [(10, "behind"), (-10, "ahead of")])
def test_a_clock_ten_minutes_off_is_one_sentence(kits, capsys, monkeypatch, minutes, said):
    with answering(kits, timedelta(minutes=minutes)) as address:
        monkeypatch.setitem(kits.north.listed, "server", address)
        monkeypatch.setattr(start, "read_kit", lambda folder: kits.north)
        sentence = refused(capsys, "site", kits.north)
    assert sentence.startswith("start: the clock is ") and f" s {said} the server's; from" in sentence
    assert "the site is not let in; set the clock by NTP" in sentence


def test_the_clock_is_not_asked_for_where_it_cannot_be(kits, monkeypatch):
    start.check_time(kits.north)
    with answering(kits, timedelta()) as address:
        monkeypatch.setitem(kits.north.listed, "server", address)
        start.check_time(kits.north)


@contextlib.contextmanager
def answering(kits, ahead):
    """A server with the certificate of the kit whose clock is this far ahead; gives its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(200)
            self.send_header("Date", format_datetime(datetime.now(UTC) + ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        context = listening_context(kits.server.path("certificate"), kits.server.path("key"))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"localhost:{server.server_address[1]}"
        finally:
            server.shutdown()


def test_a_kit_of_an_older_or_newer_version_is_refused(kits, capsys, monkeypatch):
    monkeypatch.setattr("deploy.kit.versions", lambda: {"consilium": "0.0.9", "flwr": "1.42.0"})
    said = refused(capsys, "site", kits.north)
    assert "this machine has Consilium 0.0.9, the federation chest-2026 runs" in said and "update the checkout" in said


def test_a_kit_of_another_hospital_is_told_by_its_data(kits, tmp_path, write_hospital, ward):
    write_hospital(tmp_path / "data" / "north", ward("elsewhere"))
    (line,) = start_data.problems(kits.north)
    assert line.startswith("the kit is for 'north', but every row that names a site names another one; is it another")


def test_other_labels_are_refused_and_another_order_is_not(kits, tmp_path, write_hospital, ward):
    assert start_data.problems(kits.north) == []
    root = tmp_path / "data" / "north"
    write_hospital(root, ward("north"), ("dog", "cat"))
    assert start_data.problems(kits.north) == [], "the federation's order is taken, by name"
    write_hospital(root, ward("north"), ("cat", "bird"))
    (line,) = start_data.problems(kits.north)
    assert "other labels than the federation" in line and "bird" in line


def test_the_role_is_that_of_the_data(kits, tmp_path, write_hospital, ward):
    write_hospital(tmp_path / "data" / "north", ward("north", train=0))
    (line,) = start_data.problems(kits.north)
    assert "no training row" in line
    (tmp_path / "data" / "north" / "manifest.csv").unlink()
    (tmp_path / "data" / "north").rename(tmp_path / "gone")
    (line,) = start_data.problems(kits.north)
    assert "does not exist; set data-root" in line


# -- services ---------------------------------------------------------------------------------------------------------


def service(folder, name, program, essential=True):
    return Service(name, [sys.executable, "-c", program], dict(os.environ), folder, essential)


def test_an_essential_service_ends_all_and_the_others_are_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "RESTART_S", 0.05)
    lines, state = [], tmp_path / "services.json"
    seen = []

    def say(line):
        lines.append(line)
        seen.append(json.loads(state.read_text()))

    brief = service(tmp_path, "brief", "print('again')", essential=False)
    main = service(tmp_path, "main", "import time; time.sleep(2); raise SystemExit(3)")
    assert services.run(Group([brief, main], state, say=say)) == 3
    assert sum(line == "brief | again" for line in lines) >= 2
    assert any("brief ended with exit code 0" in line for line in lines)
    assert "start | main ended with exit code 3" in lines
    assert seen[-1]["brief"]["starts"] >= 2 and not state.exists()


def test_lines_are_kept_where_a_log_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(services.LOG_DIR, str(tmp_path))
    Group([], tmp_path / "state.json").tell("start", "north of chest-2026")
    assert capsys.readouterr().out == "start | north of chest-2026\n"
    (line,) = (tmp_path / "start.log").read_text().splitlines()
    assert line.endswith(" start | north of chest-2026") and line[:2] == "20"
    monkeypatch.setenv(services.LOG_DIR, str(tmp_path / "none"))
    Group([], tmp_path / "state.json").tell("start", "goes on")
    said = capsys.readouterr().out.splitlines()
    assert "cannot be written" in said[0] and said[1] == "start | goes on"


def test_what_cannot_be_started_is_told_with_the_groups_mark(tmp_path):
    lines, nothing = [], Service("node", [str(tmp_path / "nothing")], {}, tmp_path)
    assert services.run(Group([nothing], tmp_path / "s.json", mark="INSECURE | ", say=lines.append)) == 1
    assert lines and all(line.startswith("INSECURE | start | ") for line in lines) and "No such file" in lines[-1]


def test_a_stop_reaches_what_the_services_have_started(tmp_path):
    program = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        " print(p.pid, flush=True); time.sleep(60)"
    )
    lines = []

    def say(line):
        lines.append(line)
        if line.startswith("parent | "):
            os.kill(os.getpid(), signal.SIGTERM)

    assert services.run(Group([service(tmp_path, "parent", program)], tmp_path / "s.json", say=say)) == 0
    child = int(next(line for line in lines if line.startswith("parent | ")).split()[-1])
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- tunnel -----------------------------------------------------------------------------------------------------------


def test_the_tunnel_shows_the_client_certificate_and_passes_bytes_on(kits):
    """A megabyte there and back; the far end sees the hospital's name, which the near end never showed."""
    north, server = kits.north, kits.server
    accepting = listening_context(server.path("certificate"), server.path("key"))
    accepting.load_verify_locations(server.path("ca"))
    accepting.verify_mode = ssl.CERT_REQUIRED
    seen, told = [], []

    async def echo(reader, writer):
        seen.append(dict(pair[0] for pair in writer.get_extra_info("peercert")["subject"])["commonName"])
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def whole():
        far = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=accepting)
        port = far.sockets[0].getsockname()[1]
        dialling = dialling_context(north.path("ca"), north.path("client_certificate"), north.path("client_key"))
        door = listening_context(north.path("local_certificate"), north.path("local_key"))
        tunnel = Tunnel(("localhost", port), door, dialling, told.append)
        near = await tunnel.start(0)
        plain = ssl.create_default_context(cafile=str(north.path("ca")))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", near.sockets[0].getsockname()[1], ssl=plain, server_hostname="localhost"
        )
        sent = os.urandom(1 << 20)
        writer.write(sent)
        got = await asyncio.wait_for(reader.readexactly(len(sent)), 20)
        writer.close()
        far.close()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", near.sockets[0].getsockname()[1], ssl=plain, server_hostname="localhost"
        )
        end = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        near.close()
        return sent == got, end

    assert asyncio.run(whole()) == (True, b"")
    assert seen == ["north"]
    assert told[0].startswith("connected with localhost:") and "cannot be reached" in told[1]
