"""A kit as it lies on a machine: what it is for, where its files are, and whether it is whole.

Every kit, a hospital's and the server's, has a list of its contents, ``manifest.json``. Files under ``files`` must be
as they were made; those under ``editable`` belong to the administrator, who may change them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIT_LIST = "manifest.json"
FORMAT = 1
CHECKOUT = Path(__file__).resolve().parents[1]


class KitError(RuntimeError):
    """A kit that cannot be used here; the message says what was found and what to do."""


@dataclass(frozen=True)
class Kit:
    """One kit. ``listed`` is the content of its list."""

    folder: Path
    listed: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The site's name, or ``server``."""
        return str(self.listed["site"])

    @property
    def kind(self) -> str:
        """``site`` or ``server``."""
        return str(self.listed["kind"])

    @property
    def state_dir(self) -> Path:
        """Where the services of this machine keep what they write."""
        return Path(self.listed["state_dir"])

    def port(self, what: str) -> int:
        """A port of this machine by what listens there."""
        return int(self.listed["ports"][what])

    def path(self, what: str) -> Path:
        """A file of the kit by what it is."""
        return self.folder / self.listed["paths"][what]


def versions() -> dict[str, str]:
    """Versions of this checkout and of Flower here. Raises KitError where there is none."""
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    try:
        flower = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise KitError("Flower is not installed; install the dependencies: python deploy/install.py") from None
    return {"consilium": str(tomllib.loads(text)["project"]["version"]), "flwr": flower}


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_kit(folder: Path) -> Kit:
    """The kit in a folder, its contents not yet checked. Raises KitError."""
    try:
        listed = json.loads((folder / KIT_LIST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KitError(
            f"{folder} is no kit: it has no {KIT_LIST}; give the folder that the archive unpacks to"
        ) from None
    except PermissionError:
        raise KitError(f"{folder / KIT_LIST} may not be read by this user; start with the account of the kit") from None
    except ValueError:
        raise KitError(f"{folder / KIT_LIST} is damaged; unpack the kit again") from None
    if listed.get("format") != FORMAT:
        raise KitError(f"the kit has format {listed.get('format')}, this version reads {FORMAT}; update the checkout")
    return Kit(folder.resolve(), listed)


def check_kit(kit: Kit, kind: str) -> None:
    """That a kit is whole, for this kind of machine and for this version. Raises KitError, changes nothing."""
    if kit.kind != kind:
        raise KitError(f"this is the kit of {kit.name!r}, a {kit.kind}; a {kind} was to be started")
    wrong = [name for name, digest in kit.listed["files"].items() if not _is(kit.folder / name, digest)]
    if wrong:
        raise KitError(f"{', '.join(sorted(wrong))} of the kit are missing or not as they were made; unpack it again")
    if bad := [name for name in kit.listed["secret"] if stat.S_IMODE((kit.folder / name).stat().st_mode) & 0o077]:
        raise KitError(f"{', '.join(bad)} can be read by other users; chmod 600")
    here, wanted = versions(), kit.listed["versions"]
    for what, called in (("consilium", "Consilium"), ("flwr", "Flower")):
        if here[what] != wanted[what]:
            raise KitError(
                f"this machine has {called} {here[what]}, the federation {kit.listed['federation']} runs "
                f"{wanted[what]}; update the checkout and its dependencies, or ask the operator for a newer kit"
            )
    if kind == "site":
        named = str(node_config(kit).get("site", ""))
        if named != kit.name:
            raise KitError(
                f"the kit is for the site {kit.name!r}, its node.toml names {named!r}; set site = {kit.name!r}"
            )


def node_config(kit: Kit) -> dict[str, Any]:
    """The node config of a hospital's kit. Raises KitError where it is not TOML."""
    path = kit.path("node_config")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise KitError(f"{path} cannot be read as TOML: {error}") from None


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and file_sha256(path) == digest
