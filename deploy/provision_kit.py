"""Kits: everything that one machine of the federation needs, in one folder and as one archive."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deploy import provision_pki as pki
from deploy.flower import QUIET
from deploy.kit import FORMAT, KIT_LIST, file_sha256, versions
from deploy.provision_plan import SERVER, Federation, Machine, Site
from federation.files import write_atomic

HERE = Path(__file__).resolve().parent
LOOPBACK = ("localhost", "127.0.0.1")
EDITABLE = ("node.toml", "environment", "run.toml")
SECRET = (".key", ".secret")

SITE_PATHS = {
    "ca": "certificates/ca.crt",
    "client_certificate": "certificates/client.crt",
    "client_key": "certificates/client.key",
    "local_certificate": "certificates/local.crt",
    "local_key": "certificates/local.key",
    "private_key": "node.key",
    "public_key": "node.pub",
    "superexec_secret": "superexec.secret",
    "node_config": "node.toml",
}
SERVER_PATHS = {
    "ca": "certificates/ca.crt",
    "certificate": "certificates/server.crt",
    "key": "certificates/server.key",
    "superexec_secret": "superexec.secret",
    "proxy_config": "proxy/nginx.conf",
    "authorised": "authorised",
    "run_config": "run.toml",
}


@dataclass(frozen=True)
class Member:
    """A hospital as the server knows it: the serial of its client certificate and its SuperNode's public key."""

    name: str
    serial: str
    public_key: str

    @property
    def header(self) -> str:
        """What Flower sends as ``flwr-public-key`` with every request of this SuperNode."""
        return base64.b64encode(pki.spki_pem(self.public_key.encode())).decode()


Files = dict[str, bytes]


def new_site_files(plan: Federation, site: Site, authority: pki.Authority, now: datetime, key: Files | None) -> Files:
    """Certificates and keys of a hospital; ``key`` holds those of its SuperNode, where they are to stay."""
    client = pki.issue(authority, plan.name, site.name, purpose=pki.CLIENT, now=now)
    door = pki.issue(authority, plan.name, f"{site.name} (loopback)", purpose=pki.SERVER_AUTH, hosts=LOOPBACK, now=now)
    if key is None:
        private, public = pki.new_node_key(site.name)
        key = {"node.key": private, "node.pub": public}
    return {
        **key,
        SITE_PATHS["ca"]: authority.certificate_pem(),
        SITE_PATHS["client_certificate"]: client.certificate,
        SITE_PATHS["client_key"]: client.key,
        SITE_PATHS["local_certificate"]: door.certificate,
        SITE_PATHS["local_key"]: door.key,
        SITE_PATHS["superexec_secret"]: secrets.token_bytes(48),
    }


def new_server_files(plan: Federation, authority: pki.Authority, now: datetime) -> Files:
    """Certificate, key and SuperExec secret of the server."""
    hosts = tuple(dict.fromkeys((plan.server.host, *plan.server.also, *LOOPBACK)))
    leaf = pki.issue(authority, plan.name, plan.server.host, purpose=pki.SERVER_AUTH, hosts=hosts, now=now)
    return {
        SERVER_PATHS["ca"]: authority.certificate_pem(),
        SERVER_PATHS["certificate"]: leaf.certificate,
        SERVER_PATHS["key"]: leaf.key,
        SERVER_PATHS["superexec_secret"]: secrets.token_bytes(48),
    }


def site_kit(plan: Federation, site: Site, own: Files, now: datetime) -> tuple[Files, dict[str, Any]]:
    """All files of a hospital's kit, and its list of contents without digests."""
    dials = f"127.0.0.1:{site.tunnel_port}" if plan.server.proxy == "nginx" else address(plan)
    facts = {"plan": plan, "site": site, "machine": site, "address": address(plan), "quiet": QUIET}
    files = own | rendered("site", facts)
    listed = {
        **_shared(plan, site.name, site, "site", now),
        "role": site.role,
        "modalities": list(site.modalities),
        "superlink": dials,
        "ports": {"runtime": site.runtime_port, "tunnel": site.tunnel_port},
        "paths": SITE_PATHS,
        **plan.data.model_dump(),
        "weights": {weights.path: weights.sha256 for weights in plan.weights},
    }
    return files, listed


def server_kit(plan: Federation, members: Iterable[Member], own: Files, now: datetime) -> tuple[Files, dict[str, Any]]:
    """All files of the server's kit with the members' keys, and its list of contents without digests."""
    members = sorted(members, key=lambda member: member.name)
    port = plan.server.superlink_port if plan.server.proxy == "nginx" else plan.server.port
    facts = {"plan": plan, "members": members, "machine": plan.server, "superlink_port": port, "quiet": QUIET}
    files = own | rendered(SERVER, facts)
    files |= {f"authorised/{member.name}.pub": member.public_key.encode() for member in members}
    listed = {
        **_shared(plan, SERVER, plan.server, "server", now),
        "sites": [member.name for member in members],
        "ports": {"superlink": port, "proxy": plan.server.port},
        "paths": SERVER_PATHS,
    }
    return files, listed


def address(plan: Federation) -> str:
    """What hospitals dial."""
    return f"{plan.server.host}:{plan.server.port}"


def _shared(plan: Federation, name: str, machine: Machine, kind: str, now: datetime) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": kind,
        "federation": plan.name,
        "site": name,
        "server": address(plan),
        "proxy": plan.server.proxy,
        "labels": list(plan.labels),
        "state_dir": machine.state_dir,
        "versions": versions(),
        "made": now.astimezone(UTC).isoformat(timespec="seconds"),
        "plan_sha256": plan.digest(name),
    }


def rendered(kind: str, facts: Mapping[str, Any]) -> Files:
    """The text files of one kind of kit: ``templates/KIND`` and ``compose/KIND`` at its top, ``systemd/KIND`` below."""
    # No result is HTML, and every value was checked against a pattern without quotes or line breaks.
    environment = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    folders = {f"templates/{kind}/": "", f"compose/{kind}/": "", f"systemd/{kind}/": "systemd/"}
    return {
        top + name.removeprefix(folder).removesuffix(".j2"): environment.get_template(name).render(facts).encode()
        for folder, top in folders.items()
        for name in environment.list_templates(["j2"])
        if name.startswith(folder)
    }


def write_kit(kits: Path, name: str, files: Files, listed: dict[str, Any]) -> Path:
    """Writes a kit as a folder and as ``NAME.tar.gz``, each whole or not at all; an older one is replaced."""
    kits.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=kits))  # with mode 0700
    try:
        for path, data in files.items():
            mode = 0o600 if path.endswith(SECRET) else 0o755 if path.endswith(".sh") else 0o644
            write_atomic(folder / path, data, mode)
        digests = {path: file_sha256(folder / path) for path in sorted(files)}
        listed = {
            **listed,
            "secret": sorted(path for path in files if path.endswith(SECRET)),
            "files": {path: digest for path, digest in digests.items() if path not in EDITABLE},
            "editable": {path: digest for path, digest in digests.items() if path in EDITABLE},
        }
        write_atomic(folder / KIT_LIST, json.dumps(listed, indent=1).encode(), 0o644)
        archive = _archive(folder, f"{listed['federation']}-{name}")
        replace_folder(folder, kits / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_atomic(kits / f"{name}.tar.gz", archive)
    return kits / name


def replace_folder(new: Path, path: Path) -> None:
    """Moves a folder to ``path``; what was there goes away only when the new one is in place."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)


def _archive(folder: Path, top: str) -> bytes:
    """The folder as .tar.gz with owner root and no times of this machine."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            info = tar.gettarinfo(path, f"{top}/{path.relative_to(folder).as_posix()}")
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = "root"
            with path.open("rb") if path.is_file() else io.BytesIO() as content:
                tar.addfile(info, content if path.is_file() else None)
    return packed.getvalue()
