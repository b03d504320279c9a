"""What a federation is made of: ``federation.yaml``, read once and checked as a whole.

    name: chest-2026
    labels: [Effusion, Mass]             # the order that every site keeps to
    server: {host: fl.example.org}       # the name that hospitals dial
    sites:
      - {name: st-mary, data_root: /data/fl}
      - {name: county, data_root: /data/fl, role: evaluate, consents: [label counts]}

Nothing in it is secret. `Federation` documents every field.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

Port = Annotated[int, Field(ge=1, le=65_535)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Folder = Annotated[str, StringConstraints(pattern=r"^/[^\s\"'$\\]*$", max_length=200)]
"""An absolute path without blanks or quotes: it goes into units, scripts and TOML as it is."""
Text = Annotated[str, StringConstraints(pattern=r"^[^\"\\\n\r,]{1,200}$")]
Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?$")]

SERVER = "server"
"""Name of the server's own kit; no site may be called so."""


class PlanError(ValueError):
    """A federation.yaml that cannot be used; the message lists every problem."""


class Part(BaseModel):
    """One section of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Part):
    """What a site allows, enforced by its own client; see the README of its kit."""

    max_upload_mb: float = Field(0.0, ge=0, description="megabytes a round; 0: no limit")
    allowed_methods: tuple[Text, ...] = Field((), description="methods the site takes part in; empty: all")
    allowed_hours: str = Field("", pattern=r"^(\d\d:\d\d-\d\d:\d\d)?$", description='e.g. "18:00-06:00"; empty: always')


class Machine(Part):
    """Where things lie on one machine."""

    app_dir: Folder = Field("/opt/consilium", description="checkout of Consilium, with its environment in .venv")
    kit_dir: Folder = Field("/etc/consilium/kit", description="where the kit is unpacked")
    state_dir: Folder = Field("/var/lib/consilium", description="database, caches, ledgers, logs; grows")
    user: Name = Field("consilium", description="account that the services run under")
    gpus: int = Field(1, ge=1, description="GPUs that its container reserves, where gpu.yaml of the kit is used")


class Server(Machine):
    """The machine that coordinates. Its folders are its own, since one hospital's machine may be the server too."""

    kit_dir: Folder = Field("/etc/consilium/server", description="where the kit is unpacked")
    state_dir: Folder = Field("/var/lib/consilium-server", description="database, runs, logs; grows")
    host: Host = Field(description="name or address that hospitals dial")
    port: Port = Field(8443, description="port that hospitals dial: the proxy's")
    also: tuple[Host, ...] = Field((), description="further names or addresses of the server in its certificate")
    superlink_port: Port = Field(8000, description="port of the SuperLink behind the proxy, loopback only")
    proxy: Literal["nginx", "none"] = Field("nginx", description="'none' only for a rehearsal on loopback")


class Site(Machine):
    """One hospital."""

    name: Name = Field(description="names the site in every report, its key and its certificate")
    role: Literal["train", "evaluate"] = Field("train", description="'evaluate': its manifest has no training rows")
    data_root: Folder = Field(description="folder, zip or table on the hospital's machine; read only")
    modalities: tuple[Literal["image", "report"], ...] = ("image",)
    consents: tuple[Text, ...] = Field((), description="what may travel that is kept back by default")
    limits: Limits = Limits()
    runtime_port: Port = Field(9094, description="loopback port of the SuperNode")
    tunnel_port: Port = Field(9443, description="loopback port of the tunnel that adds the client certificate")


class Data(Part):
    """What the federation asks of a hospital's data; the preflight compares."""

    min_train: int = Field(1, ge=1, description="labelled training samples of a hospital")
    min_positives: int = Field(1, ge=1, description="training positives of a label; fewer are a warning")


class Weights(Part):
    """A file that every hospital holds, the same everywhere: frozen or initial weights."""

    path: Folder = Field(description="where it lies on the hospitals' machines")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Federation(Part):
    """A whole federation.yaml."""

    name: Name
    labels: tuple[Text, ...] = Field(min_length=1, description="the label list, in the order of the model's outputs")
    server: Server
    sites: tuple[Site, ...] = Field(min_length=1)
    data: Data = Data()
    weights: tuple[Weights, ...] = ()

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        return _all_differ(labels, "label")

    @model_validator(mode="after")
    def _fits_together(self) -> Federation:
        _all_differ([site.name.lower() for site in self.sites], "site name")
        if any(site.name.lower() == SERVER for site in self.sites):
            raise ValueError(f"a site is called {SERVER!r}, which names the server's kit; call it otherwise")
        if self.server.proxy == "none" and not is_loopback(self.server.host):
            raise ValueError(
                f"server.proxy = 'none' with server.host = {self.server.host!r}: whoever reaches the port could submit "
                "code; use 'nginx', or a loopback host for a rehearsal"
            )
        if self.server.proxy == "nginx" and self.server.port == self.server.superlink_port:
            raise ValueError("server.port and server.superlink_port are one port; give the proxy another one")
        for site in self.sites:
            if site.runtime_port == site.tunnel_port:
                raise ValueError(f"{site.name}: runtime_port and tunnel_port are one port; change one of them")
        return self

    def site(self, name: str) -> Site:
        """The site of this name. Raises PlanError."""
        for site in self.sites:
            if site.name == name:
                return site
        raise PlanError(f"federation.yaml has no site {name!r}; it has {', '.join(site.name for site in self.sites)}")

    def digest(self, name: str) -> str:
        """SHA-256 of everything that shapes the kit of this site, or of the server: two that differ need a new kit."""
        own = self.server if name == SERVER else self.site(name)
        shared = [self.name, list(self.labels), self.server.host, self.server.port, self.server.proxy]
        if name != SERVER:
            shared += [self.data.model_dump_json(), *(weights.model_dump_json() for weights in self.weights)]
        return hashlib.sha256(f"{shared}{own.model_dump_json()}".encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether nothing beyond this machine can be reached under the name.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("fl.example.org")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_plan(path: Path) -> Federation:
    """The federation that a YAML file describes. Raises PlanError with every problem: field, value, what is allowed."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"there is no file {path}; deploy/README.md shows one") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path} holds {type(content).__name__}, expected name, labels, server and sites")
    try:
        return Federation.model_validate(content)
    except ValidationError as error:
        problems = [_sentence(problem) for problem in error.errors(include_url=False)]
        raise PlanError("\n".join([f"{path}: {len(problems)} problem(s):", *problems])) from None


def _sentence(problem: dict) -> str:  # type: ignore[type-arg]
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    seen = problem["input"]
    value = f" = {seen!r}" if isinstance(seen, str | int | float) else ""
    return f"{place}{value}: {problem['msg'].removeprefix('Value error, ')}"


def _all_differ(names: tuple[str, ...] | list[str], what: str) -> tuple[str, ...]:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{what} {twice[0]!r} is there twice; every {what} is one of its own")
    return tuple(names)
