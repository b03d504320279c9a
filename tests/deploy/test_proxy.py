"""The server's door for real: nginx with the kit's configuration in front of a SuperLink, and who gets through it."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import ssl
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import serialization
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import sign_message

from deploy import provision_pki as pki
from deploy.provision_kit import Member
from server_app.rehearsal import Rehearsal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin") is None,
        reason="nginx is not installed (apt install nginx-light)",
    ),
]

PROTOBUF = "application/protobuf"
PULL = "/v1/fleet/pull-messages"
BLOCKED = (
    "/v1/control/list-runs",
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "//v1/control/list-runs",
    "/v1//control/list-runs",
    "/V1/CONTROL/list-runs",
    "/docs",
    "/openapi.json",
    "/",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of two hospitals that nobody has started."""
    with Rehearsal(tmp_path_factory.mktemp("proxy"), sites=("north", "south")) as rehearsal:
        rehearsal.prepare()
        rehearsal.start_server()
        rehearsal.register()
        rehearsal.until(lambda: ask(rehearsal, context(rehearsal, "north")) == 200, "the proxy answers")
        yield rehearsal


def context(server, site=None, *, files=None):
    """A TLS client that believes the federation's authority and shows a site's certificate, or none."""
    made = ssl.create_default_context(cafile=str(server.kit("server") / "certificates/ca.crt"))
    if site:
        folder = server.kit(site) / "certificates"
        files = (folder / "client.crt", folder / "client.key")
    if files:
        made.load_cert_chain(*map(str, files))
    return made


def ask(server, tls, path="/health", *, method="GET", body=None, headers=(), port=None):
    """The status of one request to the proxy, or to another port."""
    connection = http.client.HTTPSConnection("127.0.0.1", port or server.ports["server"], context=tls, timeout=20)
    try:
        connection.request(method, path, body=body, headers=dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def key_header(server, site):
    public = (server.kit("server") / "authorised" / f"{site}.pub").read_text()
    return {"flwr-public-key": Member(site, "", public).header}


def signed(server, site, at=None):
    """A poll for messages as the SuperNode of a site sends it at some time: the arguments for `ask`."""
    key = serialization.load_ssh_private_key((server.kit(site) / "node.key").read_bytes(), None)
    node = json.loads((server.state("server") / "registered.json").read_text())[site]["node_id"]
    said = (at or datetime.now(UTC)).isoformat()
    headers = key_header(server, site) | {
        TIMESTAMP_HEADER: said,
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, said.encode())).decode(),
        "content-type": PROTOBUF,
        "accept": PROTOBUF,
    }
    body = PullMessagesRequest(node=Node(node_id=int(node))).SerializeToString()
    return {"path": PULL, "method": "POST", "body": body, "headers": headers}


def reached_superlink(server, path):
    return path in server.log("server").read_text()


def test_a_member_reaches_health(server):
    assert ask(server, context(server, "north")) == 200


def test_nobody_gets_in_without_the_certificate_of_a_member(server, tmp_path):
    assert ask(server, context(server)) == 400
    now = datetime.now(UTC)
    stranger = pki.new_authority("rehearsal", now)
    own = pki.load_authority(
        *((server.folder / "made/ca" / f"ca.{kind}").read_bytes() for kind in ("crt", "key")), None
    )
    cases = {
        "another authority": (pki.issue(stranger, "rehearsal", "north", purpose=pki.CLIENT, now=now), 400),
        "expired": (
            pki.issue(own, "rehearsal", "north", purpose=pki.CLIENT, now=now - timedelta(days=9), days=8),
            400,
        ),
        "for servers only": (pki.issue(own, "rehearsal", "north", purpose=pki.SERVER_AUTH, now=now), 400),
        "made by the authority, in no list": (
            pki.issue(own, "rehearsal", "north", purpose=pki.CLIENT, now=now),
            401,
        ),
    }
    for name, (leaf, status) in cases.items():
        files = tmp_path / f"{name}.crt", tmp_path / f"{name}.key"
        files[0].write_bytes(leaf.certificate)
        files[1].write_bytes(leaf.key)
        assert ask(server, context(server, files=files)) == status, name


def test_control_and_runtime_paths_are_not_there_for_members(server):
    for path in BLOCKED:
        assert ask(server, context(server, "north"), path, method="POST", headers=key_header(server, "north")) == 404
    assert not reached_superlink(server, "acquire-task") and not reached_superlink(server, "openapi")


def test_a_certificate_and_a_key_must_belong_together(server):
    fleet, north = "/v1/fleet/activate-node", context(server, "north")
    assert ask(server, north, fleet, method="POST") == 401, "no key"
    assert ask(server, north, fleet, method="POST", headers=key_header(server, "south")) == 401
    assert not reached_superlink(server, fleet), "the proxy says so, the SuperLink never hears of it"
    status = ask(server, north, fleet, method="POST", headers=key_header(server, "north"))
    assert status in (401, 403, 415, 422), "the SuperLink wants a signature"
    assert reached_superlink(server, fleet)


def test_plain_http_is_refused(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["server"], timeout=20)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 400
    connection.close()


def test_a_body_beyond_the_limit_is_refused_by_its_length(server):
    headers = key_header(server, "north") | {"Content-Length": str(17 * 2**20)}
    status = ask(server, context(server, "north"), "/v1/fleet/push-object", method="POST", headers=headers)
    assert status == 413


def test_one_member_cannot_take_all_connections(server):
    """Requests that never send their body: beyond 32 at a time the door says 503, which Flower tries again."""
    head = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
    head += f"content-type: {PROTOBUF}\r\n"
    head += f"flwr-public-key: {key_header(server, 'north')['flwr-public-key']}\r\n\r\n"
    tls, held, answers = context(server, "north"), [], []
    try:
        for _ in range(33):
            plain = socket.create_connection(("127.0.0.1", server.ports["server"]), timeout=20)
            held.append(tls.wrap_socket(plain, server_hostname="127.0.0.1"))
            held[-1].sendall(head.encode())
            held[-1].settimeout(0.2 if len(held) < 33 else 20)
            try:
                answers.append(held[-1].recv(12))
            except TimeoutError:
                answers.append(b"")
    finally:
        for connection in held:
            connection.close()
    assert answers[:32] == [b""] * 32 and answers[32] == b"HTTP/1.1 503"


def test_a_member_that_floods_is_refused_and_another_one_is_served_meanwhile(server):
    """North asks as fast as it can over sixteen connections; once its burst is spent, the door says 503 to it alone.

    It asks for what is not there, which the door answers itself: then the SuperLink's speed does not matter here.
    """
    statuses, refused, stop = Counter(), threading.Event(), threading.Event()

    def flood():
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.ports["server"], context=context(server, "north"), timeout=60
        )
        while not stop.is_set():
            connection.request("GET", "/docs")
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] += 1
            if answer.status == 503:
                refused.set()
        connection.close()

    threads = [threading.Thread(target=flood) for _ in range(16)]
    for thread in threads:
        thread.start()
    try:
        assert refused.wait(120), f"never refused: {statuses}"
        served = [ask(server, context(server, "south"), **signed(server, "south")) for _ in range(20)]
        polls = {ask(server, context(server, "north"), **signed(server, "north")) for _ in range(5)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert served == [200] * 20 and 503 in polls
    assert set(statuses) == {404, 503} and statuses[404] >= 3000
    folder = server.state("server") / "proxy"
    assert "limiting requests" in (folder / "error.log").read_text()
    refused_to = {
        line.split('"')[1] for line in (folder / "access.log").read_text().splitlines() if f"{PULL} 503" in line
    }
    assert refused_to == {"CN=north,O=rehearsal"}
    server.until(lambda: ask(server, context(server, "north")) == 200, "north is served again")


# -- recorded requests, wrong clocks ----------------------------------------------------------------------------------


def test_a_recorded_request_is_of_no_use_without_its_members_certificate(server):
    """Flower signs the time alone and takes the same request again for five minutes: the door is what stops a thief."""
    record = signed(server, "north")
    assert ask(server, context(server, "north"), **record) == 200
    assert ask(server, context(server, "north"), **record) == 200
    assert ask(server, context(server, "south"), **record) == 401
    assert ask(server, context(server), **record) == 400
    lines = (server.state("server") / "proxy/access.log").read_text().splitlines()
    assert any(f'"CN=south,O=rehearsal" POST {PULL} 401' in line for line in lines)
    assert any(f'"-" POST {PULL} 400' in line for line in lines)


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_request_that_was_signed_ten_minutes_off_is_refused(server, minutes):
    """An old record, or a hospital whose clock is wrong: the SuperLink says no, and says so in its log."""
    before = len(server.log("server").read_text())
    record = signed(server, "north", datetime.now(UTC) + timedelta(minutes=minutes))
    assert ask(server, context(server, "north"), **record) == 401
    server.until(lambda: refused_by_superlink(server, PULL, before), "it is logged")


def refused_by_superlink(server, path, since):
    lines = server.log("server").read_text()[since:].splitlines()
    return any(f"POST {path}" in line and " 401" in line for line in lines)


def test_only_loopback_reaches_the_superlink_and_tasks_need_the_secret(server):
    """The operator's commands go there directly; whoever is on the machine without the secret gets no task."""
    tls, port = context(server), server.ports["superlink"]
    assert ask(server, tls, port=port) == 200
    headers = {"content-type": PROTOBUF, "accept": PROTOBUF}
    status = ask(server, tls, "/v1/runtime/acquire-task", method="POST", body=b"", headers=headers, port=port)
    assert status == 401
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, port), timeout=2)


def test_every_request_is_one_line_with_the_members_name(server):
    lines = (server.state("server") / "proxy/access.log").read_text().splitlines()
    assert any('"CN=north,O=rehearsal" GET /health 200' in line for line in lines)
    assert any("/v1/control/list-runs 404" in line for line in lines)


def test_a_revoked_member_is_out_when_the_proxy_has_the_new_list(server):
    record, port = signed(server, "south"), server.ports["superlink"]
    assert ask(server, context(server, "south")) == ask(server, context(server), **record, port=port) == 200
    files = [server.folder / "south.crt", server.folder / "south.key"]
    for path in files:
        path.write_bytes((server.kit("south") / "certificates" / path.name.replace("south", "client")).read_bytes())
    server.command("provision", "revoke", str(server.plan_file), "south", "--out", str(server.folder / "made"))
    server.stop("proxy")
    server.start("proxy", server.kit("server"), "proxy")
    said = server.command("register", str(server.kit("server")))
    assert "south: taken out" in said
    server.until(lambda: ask(server, context(server, "north")) == 200, "the proxy answers")
    assert ask(server, context(server, files=files)) == ask(server, context(server, files=files), **record) == 401
    assert '"CN=south,O=rehearsal" GET /health 401' in (server.state("server") / "proxy/access.log").read_text()
    before = len(server.log("server").read_text())
    assert ask(server, context(server), **record, port=port) == 401, "nor does the SuperLink know its key"
    server.until(lambda: refused_by_superlink(server, PULL, before), "it is logged")
    said = server.command("supervise", str(server.kit("server")), "--once")
    assert said == "all is well; offline: north\n"
