"""Makes the kits of a federation: certificates, keys, units and configuration, one folder and archive a machine.

    python -m deploy.provision federation.yaml --out DIR   # what is missing; nothing is overwritten or re-keyed
    python -m deploy.provision add federation.yaml NAME --out DIR      # one more site of the file
    python -m deploy.provision renew federation.yaml NAME --out DIR    # new certificates; NAME may be server
    python -m deploy.provision revoke federation.yaml NAME --out DIR   # key and certificate are let in no more

DIR lies outside every checkout: what lands in one can be committed, or copied into the image. It holds ``ca/`` (whoever
has its key makes members: keep it offline, or give ``--passphrase-file``), ``registry.json`` (who is a member, no
secrets) and ``kits/``. A hospital's kit may be deleted from here once it is handed over. Every change of the members
makes the server's kit anew, with its own keys kept; unpack it on the server, then `deploy.register`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy import provision_pki as pki
from deploy.kit import CHECKOUT, KitError
from deploy.provision_kit import (
    SERVER_PATHS,
    SITE_PATHS,
    Files,
    Member,
    new_server_files,
    new_site_files,
    server_kit,
    site_kit,
    write_kit,
)
from deploy.provision_plan import SERVER, Federation, PlanError, read_plan
from federation.files import write_atomic

COMMANDS = ("add", "renew", "revoke")
REGISTRY = "registry.json"
MIN_PASSPHRASE = 12


class ProvisionError(RuntimeError):
    """Something that would not fit what is there; nothing was changed."""


@dataclass
class Workshop:
    """The folder that kits are made in.

    ``members``: site -> what the registry knows of it. ``server``: of what the server's last kit was made, {} for none.
    """

    folder: Path
    plan: Federation
    authority: pki.Authority
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def kits(self) -> Path:
        return self.folder / "kits"

    # -- what can be done ---------------------------------------------------------------------------------------------

    def make(self, names: Sequence[str]) -> list[str]:
        """Kits of the sites that have none; the others stay as they are. Returns one sentence a site."""
        said = []
        for name in names:
            known = self.members.get(name)
            if known is None:
                self._new_kit(name, key=None)
                said.append(f"{name}: new kit {self.kits / name}.tar.gz")
            elif known["status"] == "revoked":
                said.append(f"{name}: revoked; 'renew {name} --new-key' makes it a member again")
            else:
                said.append(self._kept(name, known["plan_sha256"]))
        planned = {site.name for site in self.plan.sites}
        for name in sorted(set(self._serials()) - planned):
            said.append(f"{name}: a member that federation.yaml does not name; 'revoke {name}' ends that")
        if self.server.get("serials") != self._serials():
            said.append(self._server())
        else:
            said.append(self._kept(SERVER, self.server["plan_sha256"]))
        return said

    def _kept(self, name: str, plan_sha256: str) -> str:
        if plan_sha256 == self.plan.digest(name):
            return f"{name}: kept"
        return f"{name}: kept, but federation.yaml says something else now; 'renew {name}' takes it over"

    def _serials(self) -> dict[str, str]:
        return {name: known["serial"] for name, known in self.members.items() if known["status"] == "member"}

    def renew(self, name: str, *, new_key: bool) -> list[str]:
        """New certificates and files for a site or the server, and a new SuperNode key where that is asked for."""
        if name == SERVER:
            return [self._server(anew=True)]
        known = self._known(name)
        if known["status"] == "revoked" and not new_key:
            raise ProvisionError(
                f"{name} was revoked, and the SuperLink takes a revoked key never again; add --new-key"
            )
        key = None if new_key else self._kept_key(name, known)
        self._new_kit(name, key=key)
        rest = "; the old key is dead once the server's kit is in place and deploy.register was run" if new_key else ""
        return [f"{name}: renewed, {self.kits / name}.tar.gz{rest}", self._server()]

    def revoke(self, name: str) -> list[str]:
        """The site is let in no more once the server has its new kit; its kit here is deleted."""
        self.members[name] = {**self._known(name), "status": "revoked"}
        self.write_registry()
        shutil.rmtree(self.kits / name, ignore_errors=True)
        (self.kits / f"{name}.tar.gz").unlink(missing_ok=True)
        return [
            f"{name}: revoked",
            self._server(),
            "on the server: unpack the new kit, reload the proxy (systemctl restart consilium-proxy), and run "
            "'python -m deploy.register KITDIR': that takes the key out of the SuperLink, for ever",
        ]

    # -- how ----------------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> dict[str, Any]:
        if name not in self.members:
            there = ", ".join(sorted(self.members)) or "none"
            raise ProvisionError(f"{name} is no member; the registry has {there}. 'add' makes a new one")
        return self.members[name]

    def _new_kit(self, name: str, key: Files | None) -> None:
        site = self.plan.site(name)
        own = new_site_files(self.plan, site, self.authority, self.now, key)
        files, listed = site_kit(self.plan, site, own, self.now)
        certificate = pki.x509.load_pem_x509_certificate(own[SITE_PATHS["client_certificate"]])
        write_kit(self.kits, name, files, listed)
        self.members[name] = {
            "status": "member",
            "serial": pki.serial_of(certificate),
            "public_key": own["node.pub"].decode(),
            "expires": certificate.not_valid_after_utc.isoformat(timespec="seconds"),
            "plan_sha256": self.plan.digest(name),
        }
        self.write_registry()

    def _kept_key(self, name: str, known: dict[str, Any]) -> Files:
        folder = self.kits / name
        try:
            key = {"node.key": (folder / "node.key").read_bytes(), "node.pub": (folder / "node.pub").read_bytes()}
        except FileNotFoundError:
            raise ProvisionError(
                f"the kit of {name} is not in {self.kits} any more, so its key cannot be kept; add --new-key"
            ) from None
        if key["node.pub"].decode() != known["public_key"]:
            raise ProvisionError(f"{folder / 'node.pub'} is not the key of the registry; add --new-key")
        return key

    def _server(self, *, anew: bool = False) -> str:
        """The server's kit with the members of now; its own keys stay unless asked."""
        folder = self.kits / SERVER
        names = [SERVER_PATHS[what] for what in ("ca", "certificate", "key", "superexec_secret")]
        if not anew and all((folder / name).exists() for name in names):
            own, what = {name: (folder / name).read_bytes() for name in names}, "members brought up to date"
        else:
            own, what = new_server_files(self.plan, self.authority, self.now), "new keys and certificate"
        members = [Member(name, serial, self.members[name]["public_key"]) for name, serial in self._serials().items()]
        files, listed = server_kit(self.plan, members, own, self.now)
        write_kit(self.kits, SERVER, files, listed)
        self.server = {"plan_sha256": self.plan.digest(SERVER), "serials": self._serials()}
        self.write_registry()
        return f"{SERVER}: {what}, {folder}.tar.gz"

    def write_registry(self) -> None:
        """Writes down who is a member."""
        content = {"format": 1, "federation": self.plan.name, "members": self.members, "server": self.server}
        write_atomic(self.folder / REGISTRY, json.dumps(content, indent=1).encode())


def open_workshop(folder: Path, plan: Federation, passphrase: bytes | None) -> Workshop:
    """The folder with its authority, made at the first call. Raises ProvisionError and KeyFileError."""
    registry = folder / REGISTRY
    certificate, key = folder / "ca" / "ca.crt", folder / "ca" / "ca.key"
    if registry.exists():
        known = json.loads(registry.read_text(encoding="utf-8"))
        if known["federation"] != plan.name:
            raise ProvisionError(
                f"{folder} belongs to the federation {known['federation']!r}, federation.yaml is of {plan.name!r}; "
                "give another --out"
            )
        for path in (certificate, key):
            if not path.exists():
                raise ProvisionError(f"{path} is missing; bring the folder ca/ back from where it is kept")
        authority = pki.load_authority(certificate.read_bytes(), key.read_bytes(), passphrase)
        return Workshop(folder, plan, authority, known["members"], known["server"])
    if (folder / "kits").exists():
        raise ProvisionError(f"{folder} has kits but no {REGISTRY}; bring it back, or give another --out")
    authority = pki.new_authority(plan.name, datetime.now(UTC))
    write_atomic(certificate, authority.certificate_pem(), 0o644)
    write_atomic(key, authority.key_pem(passphrase))
    write_atomic(folder / ".gitignore", b"*\n", 0o644)
    workshop = Workshop(folder, plan, authority)
    workshop.write_registry()
    return workshop


def check_out(folder: Path) -> None:
    """That no key comes to lie where files are committed or copied into the image. Raises ProvisionError."""
    folder = folder.resolve()
    tree = next((path for path in (folder, *folder.parents) if path == CHECKOUT or (path / ".git").exists()), None)
    # Rehearsals are made in runs/, which git and the image leave out, in a checkout without git too.
    if tree is None or folder.is_relative_to(CHECKOUT / "runs") or git_ignores(tree, folder):
        return
    raise ProvisionError(
        f"--out {folder} lies inside the checkout {tree}, where keys could be committed or copied into the image; "
        "expected a folder outside of every checkout: give another --out, and move there what was made here before"
    )


def git_ignores(tree: Path, folder: Path) -> bool:
    """Whether git leaves a folder of its work tree alone; without git: no."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(tree), "check-ignore", "--quiet", f"{folder}/"]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, env=own, capture_output=True).returncode == 0
    return False


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One provisioning at a time in a folder. Raises ProvisionError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ProvisionError(
                f"somebody else is provisioning in {folder} now; try again when that has ended"
            ) from None
        yield


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(prog="python -m deploy.provision", description=__doc__.split("\n")[0])
    options.add_argument("words", nargs="+", metavar="[add|renew|revoke] federation.yaml [NAME]")
    options.add_argument("--out", type=Path, required=True, help="folder of the authority, the registry and the kits")
    options.add_argument("--passphrase-file", type=Path, help="file whose first line protects the authority's key")
    options.add_argument("--new-key", action="store_true", help="with renew: a new SuperNode key as well")
    return options


def read_passphrase(path: Path | None) -> bytes | None:
    """The first line of a file. Raises ProvisionError for a short one."""
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or len(lines[0]) < MIN_PASSPHRASE:
        raise ProvisionError(f"the first line of {path} has fewer than {MIN_PASSPHRASE} characters")
    return lines[0].encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    options = parser().parse_args(arguments)
    words = list(options.words)
    action = words.pop(0) if words[0] in COMMANDS else "make"
    if len(words) != (1 if action == "make" else 2):
        wanted = "federation.yaml" if action == "make" else f"{action} federation.yaml NAME"
        print(f"provision: expected {wanted}, got {' '.join(options.words)}", file=sys.stderr)
        return 2
    try:
        plan = read_plan(Path(words[0]))
        passphrase = read_passphrase(options.passphrase_file)
        if action == "add":
            plan.site(words[1])
        check_out(options.out)
        with alone(options.out):
            workshop = open_workshop(options.out, plan, passphrase)
            if action == "renew":
                said = workshop.renew(words[1], new_key=options.new_key)
            elif action == "revoke":
                said = workshop.revoke(words[1])
            else:
                said = workshop.make([words[1]] if action == "add" else [site.name for site in plan.sites])
    except (PlanError, ProvisionError, KitError, pki.KeyFileError, OSError) as error:
        print(f"provision: {error}", file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
