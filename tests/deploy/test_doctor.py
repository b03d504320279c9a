"""The preflight of a site: every check finds its fault, and no report names a patient, an image or a report's text."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import shutil
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from deploy import doctor, doctor_data, doctor_finding, doctor_kit, doctor_machine
from deploy import provision_pki as pki
from deploy.kit import read_kit
from server_app.rehearsal import Rehearsal

NOW = datetime(2026, 6, 1, tzinfo=UTC)
PATIENT = "Doe-Jane-19530401"
GIB = 2**30


def levels(findings):
    return {finding.code: finding.level for finding in findings}


def one(findings, code):
    (found,) = [finding for finding in findings if finding.code == code and finding.level != "ok"]
    return found


# -- the machine ------------------------------------------------------------------------------------------------------


def test_an_old_python_is_an_error():
    assert doctor_machine.check_python((3, 10, 12)).level == "error"
    assert doctor_machine.check_python((3, 11, 0)).level == "ok"


PINS = {"flwr": "1.42.0", "torch": "2.14.1", "rich": "14.3.4", "triton": "3.8.0"}


def test_packages_at_the_tested_versions_are_fine():
    installed = {"flwr": "1.42.0", "torch": "2.14.1+cu130", "rich": "14.3.4", "other": "1"}
    assert levels(doctor_machine.check_packages(installed, PINS, ["flwr", "torch"])) == {"packages": "ok"}


def test_a_missing_package_and_other_versions_are_named():
    findings = doctor_machine.check_packages({"flwr": "1.41.0", "rich": "13.0"}, PINS, ["flwr", "torch"])
    assert [(finding.level, finding.code) for finding in findings] == [
        ("error", "packages-missing"),
        ("error", "packages-version"),
        ("warning", "packages-version"),
    ]
    assert "torch" in findings[0].sentence
    assert "flwr 1.41.0 (tested: 1.42.0)" in findings[1].sentence and "rich 13.0" in findings[2].sentence


def test_this_environment_is_read_as_pip_sees_it():
    pins = doctor_machine.pinned_versions((doctor_machine.ROOT / "constraints.txt").read_text())
    required = doctor_machine.required_packages((doctor_machine.ROOT / "pyproject.toml").read_text())
    assert {"flwr", "open-clip-torch", "pot"} <= set(required) and set(required) - {"ray"} <= set(pins) | {"ray"}
    assert "flwr" in doctor_machine.installed_packages()


@pytest.mark.parametrize(("free", "level"), [(1 * GIB, "error"), (5 * GIB, "warning"), (50 * GIB, "ok")])
def test_disk_and_memory_have_a_floor(free, level):
    assert doctor_machine.check_disk(free, "the state folder").level == level
    assert doctor_machine.check_memory(min(free, free // 2 + GIB)).level == level


def test_a_state_folder_that_cannot_be_made_is_an_error(tmp_path):
    assert doctor_machine.check_folder(tmp_path / "new" / "state", "the state folder").level == "ok"
    (tmp_path / "file").write_text("")
    assert doctor_machine.check_folder(tmp_path / "file" / "state", "the state folder").level == "error"


@pytest.mark.parametrize(
    ("names", "driver", "level"),
    [(["H200"], True, "ok"), ([], True, "warning"), ([], False, "ok"), (None, True, "warning")],
)
def test_a_gpu_that_torch_does_not_see_is_said(names, driver, level):
    assert doctor_machine.check_gpu(names, driver).level == level


@pytest.mark.parametrize(
    ("skew", "level"),
    [(0, "ok"), (-30, "ok"), (4, "warning"), (-90, "warning"), (600, "error"), (-600, "error"), (7, "error")],
)
def test_minutes_behind_and_seconds_ahead_are_an_error(skew, level):
    theirs = datetime(2026, 6, 1, 12, tzinfo=UTC)
    found = doctor_machine.check_clock(doctor_machine.skew_s(theirs + timedelta(seconds=skew), theirs))
    assert found.level == level
    assert level == "ok" or ("ahead" if skew > 0 else "behind") in found.sentence


# -- the data ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path):
    """``manifest(rows, header)``: a data root whose images are named after a patient; returns the folder."""
    header = "image,patient,site,split,report,label:cat,label:dog"

    def write(rows, header=header, encoding="utf-8"):
        root = tmp_path / "data"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for number in range(9):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"{PATIENT}-{number}.png")
        (root / "manifest.csv").write_bytes("\n".join([header, *rows]).encode(encoding))
        return root

    return write


def row(number, *, patient=None, site="north", split="train", report="clear lungs", cat="1", dog="0", image=None):
    image = f"{PATIENT}-{number}.png" if image is None else image
    return f"{image},{patient or f'{PATIENT}-{number}'},{site},{split},{report},{cat},{dog}"


SOUND = [row(0), row(1, cat="0", dog="1"), row(2, split="val"), row(3, split="test", cat="0")]


def examined(root, **arguments):
    findings = doctor_data.data_findings(str(root), site="north", **arguments)
    said = json.dumps([[finding.sentence, finding.fix] for finding in findings])
    assert PATIENT not in said and "Doe" not in said and "clear lungs" not in said and str(root) not in said
    return findings


def test_sound_data_have_nothing_to_mend(manifest):
    findings = examined(manifest(SOUND), labels=("dog", "cat"))
    assert set(levels(findings).values()) == {"ok"}
    assert any("2 train, 1 val, 1 test" in finding.sentence for finding in findings)


BROKEN = {
    "label values": ([*SOUND, row(4, cat="yes"), row(5, cat="2")], "data-label-values", "rows 6 and 7"),
    "splits": ([*SOUND, row(4, split="dev2")], "data-splits", "row 6"),
    "paths": ([*SOUND, row(4, image=f"../{PATIENT}.png")], "data-paths", "row 6"),
    "missing": ([*SOUND, row(4, image=f"{PATIENT}-x.png"), row(5, image="y.png")], "data-missing", "rows 6 and 7"),
    "duplicates": ([*SOUND, row(0, patient="q")], "data-duplicates", "rows 2 and 6"),
    "leakage": ([*SOUND, row(4, patient=f"{PATIENT}-0", split="test")], "data-leakage", "rows 2 and 6"),
    "a short row": ([*SOUND, f"{PATIENT}-4.png,p"], "data-table", "row 6"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_named_by_its_rows(manifest, name):
    lines, code, where = BROKEN[name]
    found = one(examined(manifest(lines)), code)
    assert found.level == "error" and where in found.sentence and found.fix


def test_a_table_that_is_not_utf8_is_named(manifest):
    root = manifest([*SOUND, row(4, report="Müller")], encoding="latin-1")
    found = one(examined(root), "data-encoding")
    assert found.level == "error" and "row 6" in found.sentence


def test_an_image_that_cannot_be_decoded_is_named_by_its_row(manifest):
    root = manifest(SOUND)
    (root / f"{PATIENT}-1.png").write_bytes(b"no image")
    (root / f"{PATIENT}-3.png").write_bytes((root / f"{PATIENT}-3.png").read_bytes()[:40])
    assert "rows 3 and 5" in one(examined(root), "data-images").sentence


def test_the_same_pixels_in_two_splits_are_said(manifest):
    root = manifest(SOUND)
    shutil.copy(root / f"{PATIENT}-0.png", root / f"{PATIENT}-3.png")
    found = one(examined(root), "data-copies")
    assert found.level == "warning" and "rows 2 and 5" in found.sentence


def test_modalities_are_compared_with_what_the_rows_have(manifest):
    root = manifest(SOUND)
    assert one(examined(root, modalities=["image"]), "data-modalities").level == "warning", "rows have reports too"
    assert levels(examined(root, modalities=["image", "report"]))["data-modalities"] == "ok"
    blank = manifest([line.replace("clear lungs", "") for line in SOUND])
    found = one(examined(blank, modalities=["image", "report"]), "data-modalities")
    assert found.level == "error" and found.sentence.endswith("no row has a report")


def test_a_site_of_reports_alone_is_not_one_of_images(manifest):
    found = one(examined(manifest([row(n, image="") for n in range(4)]), modalities=["image"]), "data-modalities")
    assert found.level == "error" and found.sentence.endswith("no row has an image")


def test_other_labels_than_the_federation_are_named(manifest):
    found = one(examined(manifest(SOUND), labels=("cat", "bird")), "data-labels")
    assert "missing bird" in found.sentence and "not asked for dog" in found.sentence


def test_counts_below_the_federations_minimum(manifest):
    findings = examined(manifest(SOUND), min_train=5, min_positives=2)
    assert (
        one(findings, "data-counts").level == "error" and "2 training samples" in one(findings, "data-counts").sentence
    )
    assert "cat, dog" in one(findings, "data-positives").sentence


def test_rows_of_another_site_and_missing_splits_and_patients_are_warned_of(manifest):
    header = "image,site,split,label:cat,label:dog"
    root = manifest([f"{PATIENT}-{n}.png,south,train,1,0" for n in range(3)], header)
    findings = examined(root)
    assert "3 rows name another site than north" in one(findings, "data-site").sentence
    assert {"data-leakage", "data-val", "data-test"} <= {f.code for f in findings if f.level == "warning"}


def test_a_data_root_that_is_not_there(tmp_path):
    assert levels(examined(tmp_path / PATIENT)) == {"data-root": "error"}


def test_an_empty_table_and_no_table(manifest, tmp_path):
    assert "error" in levels(examined(manifest([]))).values()
    (tmp_path / "empty").mkdir()
    assert levels(examined(tmp_path / "empty")) == {"data-table": "error"}


# -- the kit ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority():
    return pki.new_authority("chest", NOW)


def certificate(authority, **changes):
    leaf = pki.issue(authority, "chest", "north", purpose=pki.CLIENT, **{"now": NOW, **changes})
    return doctor_kit.x509.load_pem_x509_certificate(leaf.certificate)


@pytest.mark.parametrize(
    ("days", "level"), [(-1, "error"), (1, "ok"), (380, "warning"), (396, "warning"), (398, "error")]
)
def test_the_dates_of_a_certificate(authority, days, level):
    found = doctor_kit.check_certificate(
        "client", certificate(authority), authority.certificate, NOW + timedelta(days=days)
    )
    assert found.level == level


def test_a_certificate_of_another_authority(authority):
    other = certificate(pki.new_authority("chest", NOW))
    found = doctor_kit.check_certificate("client", other, authority.certificate, NOW)
    assert found.level == "error" and "authority" in found.sentence


def test_the_certificate_of_the_loopback_door_is_looked_at(kits):
    subject = doctor.Subject({"site": "north"}, kits.north)
    assert levels(doctor.kit_findings(subject))["certificate-loopback"] == "ok"
    own = pki.load_authority(*(path.read_bytes() for path in authority_files(kits)), None)
    past = datetime.now(UTC) - timedelta(days=20)
    leaf = pki.issue(own, "chest", "north (loopback)", purpose=pki.SERVER_AUTH, hosts=["localhost"], now=past, days=10)
    kits.north.path("local_certificate").write_bytes(leaf.certificate)
    found = one(doctor.kit_findings(subject), "certificate-loopback")
    assert found.level == "error" and "the loopback certificate expired" in found.sentence


def authority_files(kits):
    folder = kits.north.folder.parents[1] / "ca"
    return folder / "ca.crt", folder / "ca.key"


def test_the_key_belongs_to_the_public_one_and_is_the_owners_alone():
    private, public = pki.new_node_key("north")
    assert levels(doctor_kit.check_key(private, 0o100600, public)) == {"key": "ok"}
    assert levels(doctor_kit.check_key(private, 0o100640, public)) == {"key-mode": "error", "key": "ok"}
    assert levels(doctor_kit.check_key(private, 0o600, pki.new_node_key("north")[1])) == {"key": "error"}
    assert levels(doctor_kit.check_key(private, 0o600, pki.spki_pem(public))) == {"key": "ok"}
    assert levels(doctor_kit.check_key(b"nonsense", 0o600, public)) == {"key": "error"}


def test_weights_are_compared_by_their_digest(tmp_path):
    path = tmp_path / "weights.safetensors"
    assert doctor_kit.check_weights(path, "0" * 64).level == "error"
    path.write_bytes(b"weights")
    assert doctor_kit.check_weights(path, "0" * 64).level == "error"
    assert doctor_kit.check_weights(path, hashlib.sha256(b"weights").hexdigest().upper()).level == "ok"


def test_a_kit_of_another_site_is_named():
    found = doctor_kit.check_same_site({"the kit": "south", "the node config": "north", "the certificate": ""})
    assert found.level == "error" and "the kit: south; the node config: north" in found.sentence
    assert doctor_kit.check_same_site({"the kit": "north", "the node config": "north"}).level == "ok"


def test_changed_and_missing_files_of_a_kit(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "c")}
    found = doctor_kit.check_files(tmp_path, digest | {"b": "0" * 64})
    assert found.level == "error" and "missing c" in found.sentence and "changed b" in found.sentence
    assert doctor_kit.check_files(tmp_path, {"a": digest["a"]}).level == "ok"


def test_other_versions_than_the_kits():
    found = doctor_kit.check_versions(
        {"flwr": "1.42.0", "consilium": "0.2.0"}, {"flwr": "1.42.0", "consilium": "0.1.0"}
    )
    assert found.level == "error" and "consilium 0.1.0 (kit: 0.2.0)" in found.sentence


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(tmp_path):
    """``serve(date, context, status)``: a server on loopback that gives this Date; returns its address.

    ``status``: path and public key shown -> HTTP status.
    """
    servers = []

    def start(date=None, context=None, status=lambda path, key: 200):
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response_only(status(self.path, self.headers.get("flwr-public-key")))
                if date is not None:
                    self.send_header("Date", format_datetime(date, usegmt=True))
                self.end_headers()

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        server.handle_error = lambda *_: None  # a client that refuses the certificate is no fault of the test
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("minutes", "level"), [(0, "ok"), (2, "warning"), (10, "error"), (-10, "error")])
def test_the_clock_is_compared_with_the_servers(serve, minutes, level):
    found = levels(doctor_kit.server_findings(serve(datetime.now(UTC) + timedelta(minutes=minutes))))
    assert found == {"server-port": "ok", "clock": level}


def test_a_server_without_a_date_is_a_warning(serve):
    assert levels(doctor_kit.server_findings(serve()))["clock"] == "warning"


def proxy(path, key, *, member=True, known=(), registered=True, up=True):
    """What the kit's proxy answers, and a SuperLink behind it to who asks for a heartbeat every 0 s."""
    if not member or (path != "/health" and key not in known):
        return 401
    return 502 if not up else 200 if path == "/health" else 400 if registered else 412


def test_whether_the_server_knows_certificate_and_key_and_whether_it_is_up(serve):
    (mine, public), (other, _) = pki.new_node_key("north"), pki.new_node_key("north")
    header = base64.b64encode(pki.spki_pem(public)).decode()

    def asked(private, ahead=timedelta(), **arguments):
        address = serve(datetime.now(UTC) - ahead, status=functools.partial(proxy, known=(header,), **arguments))
        found = levels(doctor_kit.server_findings(address, private_key=private))
        assert found.pop("server-port") == "ok" and (found.pop("clock") == "ok") != bool(ahead)
        return found

    assert asked(mine) == {"server-key": "ok"}
    assert asked(other) == {"server-key": "error"}
    assert asked(mine, registered=False) == {"server-key": "error"}
    assert asked(mine, member=False) == {"server-member": "error"}
    assert asked(mine, up=False) == {"server-health": "error"}
    assert asked(mine, ahead=timedelta(minutes=10)) == {}, "the signature would be refused for the clock"
    assert asked(b"nonsense") == {"server-key": "warning"}
    assert asked(None) == {}


def test_a_certificate_that_nginx_refuses_is_not_passed_over(serve):
    address = serve(datetime.now(UTC), status=lambda path, key: 400)
    assert one(doctor_kit.server_findings(address), "server-member").level == "error"


def test_an_answer_that_does_not_decide_is_not_called_a_welcome(serve):
    address = serve(datetime.now(UTC), status=lambda path, key: 200 if path == "/health" else 404)
    private, _ = pki.new_node_key("north")
    found = one(doctor_kit.server_findings(address, private_key=private), "server-key")
    assert found.level == "warning" and "HTTP 404" in found.sentence


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert levels(doctor_kit.server_findings(address)) == {"server-port": "error"}
    assert levels(doctor_kit.server_findings("no-such-host.invalid:443")) == {"server-name": "error"}
    assert levels(doctor_kit.server_findings("fl.example.org")) == {"server-address": "error"}


@pytest.mark.slow
@pytest.mark.parametrize("has_proxy", [True, False])
def test_a_real_superlink_tells_a_registered_key_from_another(tmp_path, has_proxy):
    """The door of a new server kit knows the key before the SuperLink does; asking brings nobody online."""
    if has_proxy and shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin") is None:
        pytest.skip("nginx is not installed (apt install nginx-light)")
    with Rehearsal(tmp_path, sites=("north",), has_proxy=has_proxy) as server:
        server.prepare()
        server.start_server()
        kit = read_kit(server.kit("north"))

        def asked():
            findings = doctor._server(doctor.Subject({"site": "north"}, kit))
            return next((finding for finding in findings if finding.code == "server-key"), None)

        server.until(lambda: asked() is not None, "the server answers")
        assert asked().level == "error" and "not registered" in asked().sentence
        server.register()
        assert asked().level == "ok"
        said = server.command("supervise", str(server.kit("server")), "--once")
        assert said == "all is well; offline: north\n"
        kit.path("private_key").write_bytes(pki.new_node_key("north")[0])
        assert asked().level == "error"


def written(folder, authority, leaf):
    (folder / "ca.crt").write_bytes(authority.certificate_pem())
    (folder / "leaf.crt").write_bytes(leaf.certificate)
    (folder / "leaf.key").write_bytes(leaf.key)
    return folder


def test_a_server_of_this_federation_and_one_of_another(serve, tmp_path):
    now = datetime.now(UTC)
    ours, other = pki.new_authority("chest", now), pki.new_authority("chest", now)
    leaf = pki.issue(ours, "chest", "server", purpose=pki.SERVER_AUTH, hosts=["127.0.0.1"], now=now)
    here = written(tmp_path, ours, leaf)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(here / "leaf.crt", here / "leaf.key")
    address = serve(now, context)
    client = (here / "leaf.crt", here / "leaf.key")
    found = levels(doctor_kit.server_findings(address, authority=here / "ca.crt", client=client))
    assert found == {"server-port": "ok", "server-tls": "ok", "clock": "ok"}
    (tmp_path / "other.crt").write_bytes(other.certificate_pem())
    refused = doctor_kit.server_findings(address, authority=tmp_path / "other.crt")
    assert levels(refused) == {"server-port": "ok", "server-tls": "error"}
    plain = serve(now)
    assert levels(doctor_kit.server_findings(plain, authority=here / "ca.crt")) == {
        "server-port": "ok",
        "server-tls": "error",
    }


# -- the report -------------------------------------------------------------------------------------------------------


def node_config(root, state):
    return f'site="north" data-root="{root}" state-dir="{state}"'


@pytest.fixture
def quick(monkeypatch):
    """No process is started to look for a GPU, and this machine is as large as it has to be."""
    monkeypatch.setattr(doctor_machine, "_gpus", lambda: [])
    monkeypatch.setattr(doctor_machine, "available_memory", lambda: 64 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(64 * GIB, 0, 64 * GIB))


def test_the_command_says_0_for_a_site_that_can_join(manifest, tmp_path, quick, capsys, monkeypatch):
    monkeypatch.setattr(doctor_machine, "check_packages", lambda *_: [])
    path = tmp_path / "out.json"
    assert doctor.main(["--node-config", node_config(manifest(SOUND), tmp_path / "state"), "--json", str(path)]) == 0
    assert "preflight of north" in capsys.readouterr().out
    told = json.loads(path.read_text())
    assert told["site"] == "north" and told["counts"]["error"] == 0
    assert all(set(finding) == {"level", "code", "sentence", "fix"} for finding in told["findings"])


def test_the_command_says_1_for_broken_data_and_names_no_patient(manifest, tmp_path, quick, capsys):
    path = tmp_path / "out.json"
    root = manifest([*SOUND, row(4, cat=f"[bold]{PATIENT}"), row(4, image=f"{PATIENT}-none.png", report=PATIENT)])
    assert doctor.main(["--node-config", node_config(root, tmp_path / "state"), "--json", str(path)]) == 1
    printed = capsys.readouterr()
    assert PATIENT not in printed.out + printed.err + path.read_text()
    assert "row 6" in path.read_text()


def test_a_check_that_fails_itself_is_an_error_without_its_text(manifest, tmp_path, quick, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError(f"cannot read {PATIENT}")

    monkeypatch.setattr(doctor_data, "data_findings", broken)
    assert doctor.main(["--node-config", node_config(manifest(SOUND), tmp_path / "state")]) == 1
    printed = capsys.readouterr()
    assert PATIENT not in printed.out + printed.err and "ended with RuntimeError" in printed.out


def test_a_node_config_without_its_keys_and_one_that_cannot_be_read(capsys, tmp_path):
    assert doctor.main(["--node-config", 'site="north"']) == 1
    assert "lacks data-root, state-dir" in capsys.readouterr().out
    assert doctor.main(["--node-config", 'site="north']) == 2
    assert doctor.main(["--node-config", "site"]) == 2
    assert doctor.main([str(tmp_path)]) == 2
    assert "is no kit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main([])


def test_limits_are_read_as_the_site_will_read_them():
    assert doctor.check_limits({"site": "north"}).sentence == "no limits are set"
    found = doctor.check_limits({"allowed_hours": "18:00-06:00", "allowed_methods": "b,a", "max_upload_mb": "2.5"})
    assert found.level == "ok" and found.sentence.endswith("methods a, b; hours 18:00 to 06:00; 2.5 MB a round")
    assert doctor.check_limits({"allowed_hour": "18:00-06:00"}).level == "error"


def test_rows_are_few_and_sorted():
    assert doctor_finding.rows([5]) == "row 5"
    assert doctor_finding.rows([5, 3, 3]) == "rows 3 and 5"


def test_a_file_that_may_not_be_read_is_no_traceback(manifest, tmp_path):
    root = manifest(SOUND)
    os.rename(root / "manifest.csv", root / "other.csv")
    os.mkdir(root / "manifest.csv")
    assert "error" in levels(examined(root)).values()
