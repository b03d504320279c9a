"""Kits: what is in them, who can read it, and that making them again changes nothing that was not asked for."""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import stat
import subprocess
import tarfile
import tomllib
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy import provision, provision_kit, provision_pki
from deploy.kit import KIT_LIST, KitError, check_kit, file_sha256, node_config, read_kit
from deploy.tunnel import dialling_context, listening_context


def contents(folder):
    """Path below a folder -> SHA-256."""
    return {str(p.relative_to(folder)): file_sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


# -- a first call -----------------------------------------------------------------------------------------------------


def test_every_machine_gets_a_kit_that_is_whole(provisioned):
    code, said = provisioned()
    assert code == 0, said
    for name, kind in (("north", "site"), ("south", "site"), ("server", "server")):
        kit = read_kit(provisioned.kits / name)
        check_kit(kit, kind)
        assert kit.name == name and kit.listed["federation"] == "chest-2026"
        assert all(kit.path(what).exists() for what in kit.listed["paths"])
        assert set(kit.listed["files"]) | set(kit.listed["editable"]) | {"manifest.json"} == set(contents(kit.folder))


def test_secrets_are_for_the_owner_only_and_no_kit_holds_anothers(provisioned):
    provisioned()
    secret = [path for path in provisioned.out.rglob("*") if path.suffix in (".key", ".secret", ".gz")]
    assert len(secret) == 1 + 4 * 2 + 2 + 3, "authority; four a hospital; two of the server; the archives"
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in provisioned.kits.iterdir() if path.is_dir()} == {0o700}
    private = {path: path.read_bytes() for path in secret if path.suffix != ".gz"}
    assert len(set(private.values())) == len(private), "every key and secret is one of its own"
    for path, text in private.items():
        others = [p for p in provisioned.out.rglob("*") if p.is_file() and p != path and text in p.read_bytes()]
        assert others == [], f"{path} is in another file too"
    assert b"PRIVATE" not in (provisioned.out / "registry.json").read_bytes()


def test_certificates_are_for_one_purpose_and_pass_openssls_strict_checks(provisioned):
    provisioned()
    kits, authority = provisioned.kits, provisioned.out / "ca" / "ca.crt"
    checked = sorted(path for path in kits.rglob("*.crt") if path.name != "ca.crt")
    for path in checked:
        done = subprocess.run(["openssl", "verify", "-x509_strict", "-CAfile", authority, path], capture_output=True)
        assert done.returncode == 0, done.stderr
    assert len(checked) == 5
    uses = {path: list(certificate(path).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
            for path in checked}  # fmt: skip
    for path, use in uses.items():
        assert use == [provision_pki.CLIENT if path.name == "client.crt" else provision_pki.SERVER_AUTH]
    names = certificate(kits / "server/certificates/server.crt").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert set(names.value.get_values_for_type(x509.DNSName)) == {"localhost"}
    assert [str(address) for address in names.value.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert certificate(authority).extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_python_takes_the_certificates_in_both_directions(provisioned):
    """A handshake in memory: the door of the tunnel and the way to the proxy."""
    provisioned()
    north, server = (read_kit(provisioned.kits / name) for name in ("north", "server"))
    dialling = dialling_context(north.path("ca"), north.path("client_certificate"), north.path("client_key"))
    accepting = listening_context(server.path("certificate"), server.path("key"))
    accepting.verify_mode = ssl.CERT_REQUIRED
    accepting.load_verify_locations(server.path("ca"))
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    client = dialling.wrap_bio(*ends[0], server_hostname="localhost")
    other = accepting.wrap_bio(*ends[1], server_side=True)
    for _ in range(4):
        for side in (client, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        ends[1][0].write(ends[0][1].read())
        ends[0][0].write(ends[1][1].read())
    subject = dict(pair[0] for pair in other.getpeercert()["subject"])
    assert subject == {"organizationName": "chest-2026", "commonName": "north"}


def test_node_keys_have_flowers_format(provisioned):
    """Flower reads OpenSSH files and sends the PEM of the public half, which the proxy compares with its own list."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    provisioned()
    kit = provisioned.kits / "north"
    private = serialization.load_ssh_private_key((kit / "node.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
    public = (kit / "node.pub").read_bytes()
    assert private.public_key() == serialization.load_ssh_public_key(public)
    assert provision_pki.spki_pem(public) == public_key_to_bytes(private.public_key())
    assert public.endswith(b" north\n")
    assert (provisioned.kits / "server/authorised/north.pub").read_bytes() == public


def test_the_archive_is_the_folder_under_a_name_that_tells_whose_it_is(provisioned):
    provisioned()
    folder = provisioned.kits / "south"
    with tarfile.open(provisioned.kits / "south.tar.gz") as archive:
        found = {m.name: (m.mode, m.uid, archive.extractfile(m).read()) for m in archive if m.isfile()}
    assert found == {
        f"chest-2026-south/{path.relative_to(folder).as_posix()}": (
            stat.S_IMODE(path.stat().st_mode),
            0,
            path.read_bytes(),
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_node_config_is_what_the_plan_says(provisioned, plan):
    plan["sites"][0] |= {
        "consents": ["label counts"],
        "limits": {"max_upload_mb": 200, "allowed_methods": ["fedavg", "scaffold"], "allowed_hours": "18:00-06:00"},
    }
    provisioned()
    assert node_config(read_kit(provisioned.kits / "north")) == {
        "site": "north",
        "data-root": plan["sites"][0]["data_root"],
        "state-dir": plan["sites"][0]["state_dir"],
        "consents": "label counts",
        "max_upload_mb": 200.0,
        "allowed_methods": "fedavg,scaffold",
        "allowed_hours": "18:00-06:00",
    }
    run = tomllib.loads((provisioned.kits / "server/run.toml").read_text())
    assert run["data.labels"] == "cat,dog" and run["federation.expected_sites"] == 2


def test_no_kit_knows_the_machine_it_was_made_on(provisioned, plan, tmp_path):
    for machine in (plan["server"], *plan["sites"]):
        del machine["kit_dir"], machine["state_dir"]
    for site in plan["sites"]:
        site["data_root"] = "/data/fl"
    provisioned()
    told = [p for p in provisioned.kits.rglob("*") if p.is_file() and str(tmp_path).encode() in p.read_bytes()]
    assert told == []


# -- where kits may lie ------------------------------------------------------------------------------------------------


def git_tree(folder, ignored=""):
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / ".gitignore").write_text(ignored)
    return folder


def test_keys_are_not_made_where_they_could_be_committed(provisioned, tmp_path):
    git_tree(tmp_path)
    code, said = provisioned()
    assert code == 1 and not provisioned.out.exists()
    assert f"--out {provisioned.out} lies inside the checkout {tmp_path}" in said and "give another --out" in said
    assert said.count("\n") == 1
    git_tree(tmp_path, ignored="/out/\n")
    assert provisioned()[0] == 0


def test_keys_are_not_made_in_our_own_source_tree(monkeypatch):
    with pytest.raises(provision.ProvisionError, match="inside the checkout"):
        provision.check_out(provision.CHECKOUT / "federation")
    provision.check_out(provision.CHECKOUT / "runs" / "rehearsal" / "made")
    monkeypatch.setenv("PATH", "")  # without git
    with pytest.raises(provision.ProvisionError, match="inside the checkout"):
        provision.check_out(provision.CHECKOUT / ".cache")
    provision.check_out(provision.CHECKOUT / "runs" / "rehearsal" / "made")


def test_git_leaves_the_folder_alone_wherever_it_is_moved_to(provisioned):
    provisioned()
    assert (provisioned.out / ".gitignore").read_text() == "*\n"


# -- calls after the first --------------------------------------------------------------------------------------------


def test_a_second_call_changes_no_file(provisioned):
    provisioned()
    before = contents(provisioned.out)
    code, said = provisioned()
    assert code == 0 and said.splitlines() == ["north: kept", "south: kept", "server: kept"]
    assert contents(provisioned.out) == before


def test_a_changed_plan_is_told_and_taken_over_when_asked(provisioned, plan):
    provisioned()
    before = contents(provisioned.kits / "north")
    plan["sites"][0]["consents"] = ["label counts"]
    _, said = provisioned()
    assert "north: kept, but federation.yaml says something else now; 'renew north' takes it over" in said
    assert contents(provisioned.kits / "north") == before
    code, said = provisioned("renew", "north")
    assert code == 0, said
    after = contents(provisioned.kits / "north")
    assert after["node.key"] == before["node.key"], "the SuperNode's key stays"
    assert after["certificates/client.crt"] != before["certificates/client.crt"]
    assert node_config(read_kit(provisioned.kits / "north"))["consents"] == "label counts"


def test_an_added_site_gets_a_kit_and_the_others_keep_theirs(provisioned, plan):
    provisioned()
    before = contents(provisioned.out)
    plan["sites"].append({**plan["sites"][0], "name": "west"})
    code, said = provisioned("add", "west")
    assert code == 0 and "west: new kit" in said and "server: members brought up to date" in said
    after = contents(provisioned.out)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {
        "registry.json",
        "kits/server.tar.gz",
        *(f"kits/server/{name}" for name in
          ("manifest.json", "README.md", "run.toml", "proxy/keys.conf", "proxy/serials.conf")),
    }  # fmt: skip
    assert {path.stem for path in (provisioned.kits / "server/authorised").iterdir()} == {"north", "south", "west"}


def test_a_revoked_site_is_in_none_of_the_servers_lists(provisioned):
    provisioned()
    serial = provision_pki.serial_of(certificate(provisioned.kits / "south/certificates/client.crt"))
    server = provisioned.kits / "server"
    assert serial in (server / "proxy/serials.conf").read_text()
    code, said = provisioned("revoke", "south")
    assert code == 0 and "deploy.register" in said
    told = [path for path in server.rglob("*") if path.is_file() and b"south" in path.read_bytes()]
    assert told == [] and serial not in (server / "proxy/keys.conf").read_text()
    assert not (provisioned.kits / "south").exists() and not (provisioned.kits / "south.tar.gz").exists()
    _, said = provisioned()
    assert "south: revoked" in said and not (provisioned.kits / "south").exists()
    code, said = provisioned("renew", "south")
    assert code == 1 and "add --new-key" in said
    code, said = provisioned("renew", "south", options=["--new-key"])
    assert code == 0 and (server / "authorised/south.pub").exists()


def test_a_handed_over_kit_stays_a_member_and_needs_a_new_key_to_be_renewed(provisioned):
    provisioned()
    for path in sorted((provisioned.kits / "north").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    _, said = provisioned()
    assert "north: kept" in said
    code, said = provisioned("renew", "north")
    assert code == 1 and "is not in" in said and "--new-key" in said
    before = (provisioned.kits / "server/authorised/north.pub").read_bytes()
    code, said = provisioned("renew", "north", options=["--new-key"])
    assert code == 0 and (provisioned.kits / "server/authorised/north.pub").read_bytes() != before


def test_a_handed_over_server_kit_is_not_made_again_by_itself(provisioned, plan):
    provisioned()
    shutil.rmtree(provisioned.kits / "server")
    assert provisioned()[1].splitlines() == ["north: kept", "south: kept", "server: kept"]
    assert not (provisioned.kits / "server").exists()
    plan["sites"].pop()
    _, said = provisioned()
    assert "south: a member that federation.yaml does not name; 'revoke south' ends that" in said


def test_a_call_that_broke_off_before_the_server_knew_is_caught_up(provisioned, monkeypatch):
    def broken(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(provision, "server_kit", broken)
    assert provisioned()[0] == 1
    monkeypatch.undo()
    code, said = provisioned()
    assert code == 0 and said.splitlines()[:2] == ["north: kept", "south: kept"] and "server: new keys" in said
    assert {path.stem for path in (provisioned.kits / "server/authorised").iterdir()} == {"north", "south"}


def test_the_servers_certificate_is_renewed_when_asked(provisioned):
    provisioned()
    before = contents(provisioned.kits / "server")
    code, said = provisioned("renew", "server")
    assert code == 0 and "new keys and certificate" in said
    after = contents(provisioned.kits / "server")
    assert after["certificates/server.crt"] != before["certificates/server.crt"]
    assert after["certificates/ca.crt"] == before["certificates/ca.crt"]


def test_a_kit_whose_writing_breaks_off_is_not_there(provisioned, monkeypatch):
    def broken(folder, top):
        raise OSError("No space left on device")

    monkeypatch.setattr(provision_kit, "_archive", broken)
    code, said = provisioned()
    assert code == 1 and "No space left" in said
    assert list(provisioned.kits.iterdir()) == [], "no half kit, no temporary folder"
    monkeypatch.undo()
    assert provisioned()[0] == 0


def test_the_authoritys_key_can_be_protected(provisioned, tmp_path):
    word = tmp_path / "passphrase"
    word.write_text("correct horse battery\n")
    assert provisioned(options=["--passphrase-file", str(word)])[0] == 0
    assert b"ENCRYPTED" in (provisioned.out / "ca/ca.key").read_bytes()
    before = contents(provisioned.out)
    code, said = provisioned("renew", "north")
    assert code == 1 and "--passphrase-file" in said
    word.write_text("another horse battery\n")
    code, said = provisioned("renew", "north", options=["--passphrase-file", str(word)])
    assert code == 1 and "cannot be opened" in said and contents(provisioned.out) == before
    word.write_text("short\n")
    code, said = provisioned("renew", "north", options=["--passphrase-file", str(word)])
    assert code == 1 and "fewer than 12 characters" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("add", "west"), "federation.yaml has no site 'west'; it has north, south"),
        (("renew", "west"), "west is no member; the registry has north, south"),
        (("revoke", "west"), "west is no member"),
        (("add",), "expected add federation.yaml NAME"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(provisioned, words, sentence):
    provisioned()
    before = contents(provisioned.out)
    code, said = provisioned(*words)
    assert code != 0 and sentence in said and contents(provisioned.out) == before


def test_a_folder_of_another_federation_is_left_alone(provisioned, plan):
    provisioned()
    before = contents(provisioned.out)
    plan["name"] = "retina"
    code, said = provisioned()
    assert code == 1 and "belongs to the federation 'chest-2026'" in said and contents(provisioned.out) == before


# -- a kit on its machine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda kit: (kit / "node.key").unlink(), "node.key of the kit are missing or not as they were made"),
        (lambda kit: (kit / "start.sh").write_text("#!/bin/sh"), "start.sh of the kit are missing or not as they"),
        (lambda kit: (kit / "node.key").chmod(0o644), "node.key can be read by other users; chmod 600"),
        (lambda kit: (kit / "manifest.json").unlink(), "is no kit: it has no manifest.json"),
        (lambda kit: (kit / "manifest.json").write_text("{"), "is damaged; unpack the kit again"),
        (lambda kit: rename_site(kit, "south"), "the kit is for the site 'north', its node.toml names 'south'"),
        (lambda kit: (kit / "node.toml").write_text("site = "), "cannot be read as TOML"),
        (lambda kit: age(kit, consilium="9.0.0"), "the federation chest-2026 runs 9.0.0; update the checkout"),
        (lambda kit: age(kit, flwr="1.99.0"), "the federation chest-2026 runs 1.99.0; update the checkout"),
    ],
)
def test_a_kit_that_is_not_right_is_refused_in_one_sentence(provisioned, harm, sentence):
    provisioned()
    harm(provisioned.kits / "north")
    with pytest.raises(KitError) as caught:
        check_kit(read_kit(provisioned.kits / "north"), "site")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def rename_site(kit, name):
    (kit / "node.toml").write_text((kit / "node.toml").read_text().replace('"north"', f'"{name}"'))


def age(kit, **versions):
    listed = json.loads((kit / "manifest.json").read_text())
    listed["versions"] |= versions
    (kit / "manifest.json").write_text(json.dumps(listed))


def test_what_belongs_to_the_administrator_may_be_changed(provisioned):
    provisioned()
    with (provisioned.kits / "north" / "node.toml").open("a") as file:
        file.write('allowed_hours = "20:00-05:00"\n')
    check_kit(read_kit(provisioned.kits / "north"), "site")


def test_certificates_are_valid_for_a_year_and_a_slow_clock(provisioned):
    provisioned()
    found, now = certificate(provisioned.kits / "north/certificates/client.crt"), datetime.now(UTC)
    assert (now - found.not_valid_before_utc).total_seconds() >= 600
    assert 390 < (found.not_valid_after_utc - now).days < 398


def test_a_kit_says_what_the_federation_asks_of_data_and_weights(provisioned, plan):
    plan["data"] = {"min_train": 40, "min_positives": 5}
    plan["weights"] = [{"path": "/data/clip.safetensors", "sha256": "ab" * 32}]
    provisioned()
    listed = json.loads((provisioned.kits / "north" / KIT_LIST).read_text())
    assert (listed["min_train"], listed["min_positives"]) == (40, 5)
    assert listed["weights"] == {"/data/clip.safetensors": "ab" * 32}
