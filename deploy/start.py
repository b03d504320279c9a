"""Starts what one machine of the federation runs, from its kit: encrypted, and with authenticated SuperNodes.

    python -m deploy.start site KITDIR      # a hospital: SuperNode, SuperExec, and the tunnel to the proxy
    python -m deploy.start server KITDIR    # the server: SuperLink and SuperExec
    python -m deploy.start proxy KITDIR     # the server's door to the hospitals: nginx with the kit's configuration

Runs in the foreground until it is stopped or an essential part ends; systemd and compose start it again. Before
anything is started the kit is checked, and what does not fit is said in one sentence with exit code 1.
``--insecure`` is for experiments on one machine: no encryption, no authentication, loopback only, and every line of
the log says so.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.doctor_kit import clock_finding
from deploy.flower import FlowerMissing, command, environment
from deploy.kit import CHECKOUT, Kit, KitError, check_kit, read_kit
from deploy.provision_plan import is_loopback
from deploy.services import Group, Service, run
from deploy.tunnel import Tunnel, dialling_context, listening_context

TURNED_AWAY = (
    "if it does so again, the server does not know this kit's key or certificate (any more), or this machine's clock "
    "is more than 5 s ahead or five minutes behind: python -m deploy.doctor says which; tell the operator"
)
INSECURE = "INSECURE (not encrypted, nobody authenticated) | "
DATABASE = "superlink.db"


def server_services(kit: Kit, *, insecure: bool = False) -> list[Service]:
    """SuperLink and SuperExec. Tasks are taken by the SuperExec alone, which knows the kit's secret."""
    state, port = kit.state_dir, kit.port("superlink")
    secret = ["--superexec-auth-secret-file", str(kit.path("superexec_secret"))]
    tls = ["--ssl-ca-certfile", str(kit.path("ca")), "--ssl-certfile", str(kit.path("certificate"))]
    tls += ["--ssl-keyfile", str(kit.path("key")), "--enable-supernode-auth"]
    superlink = [command("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    superlink += [*(["--insecure"] if insecure else tls), "--isolation", "process", *secret]
    superlink += ["--database", str(state / DATABASE), "--disable-runtime-dependency-installation"]
    executor = [command("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{port}", *secret]
    executor += ["--insecure"] if insecure else ["--root-certificates", str(kit.path("ca"))]
    quiet, empty = environment(state / "flower"), state / "empty"
    return [
        Service("superlink", superlink, quiet, empty),
        Service("superexec", executor, quiet, empty, essential=False),
    ]


def site_services(kit: Kit, *, insecure: bool = False) -> list[Service]:
    """SuperNode and SuperExec of a hospital; the node config is the kit's."""
    state, port = kit.state_dir, kit.port("runtime")
    secret = ["--superexec-auth-secret-file", str(kit.path("superexec_secret"))]
    authority = ["--root-certificates", str(kit.path("ca"))]
    tls = [*authority, "--auth-supernode-private-key", str(kit.path("private_key"))]
    tls += ["--ssl-ca-certfile", str(kit.path("ca")), "--ssl-certfile", str(kit.path("local_certificate"))]
    tls += ["--ssl-keyfile", str(kit.path("local_key"))]
    dials = str(kit.listed["server"] if insecure else kit.listed["superlink"])
    node = [command("flower-supernode"), "--superlink", dials, "--host", "127.0.0.1", "--port", str(port)]
    node += [*(["--insecure"] if insecure else tls), "--isolation", "process", *secret]
    node += ["--node-config", str(kit.path("node_config"))]
    executor = [command("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{port}", *secret]
    executor += ["--insecure"] if insecure else authority
    quiet, empty = environment(state / "flower"), state / "empty"
    return [
        Service("supernode", node, quiet, empty, hint=TURNED_AWAY),
        Service("superexec", executor, quiet, empty, essential=False),
    ]


def proxy_services(kit: Kit) -> list[Service]:
    """nginx, in the foreground, with the kit's configuration."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:" + environment(Path())["PATH"])
    if nginx is None:
        raise KitError("nginx is not installed; on Debian and Ubuntu: apt install nginx-light")
    if kit.listed["proxy"] != "nginx":
        raise KitError("this federation has no proxy (server.proxy: none)")
    folder = kit.state_dir / "proxy"
    config = kit.path("proxy_config")
    if str(folder) not in config.read_text(encoding="utf-8"):
        raise KitError(f"{config} was made for another state folder than {folder}; make the kit anew")
    arguments = [nginx, "-p", str(folder), "-c", str(config), "-g", "daemon off;"]
    return [Service("nginx", arguments, environment(folder), folder)]


def check_port(port: int, what: str, fix: str) -> None:
    """That nobody listens on a loopback port. Raises KitError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise KitError(f"port {port} for the {what} cannot be opened ({error.strerror}); {fix}") from None


def check_ports(kit: Kit, ports: Sequence[str]) -> None:
    """That the kit's ports are free. Raises KitError."""
    for what in ports:
        fix = "stop what listens there, or state another port in federation.yaml and have the kit renewed"
        check_port(kit.port(what), what, fix)


def check_state(kit: Kit) -> None:
    """That the state folder can be written to: the last check, since it makes the folder. Raises KitError."""
    try:
        kit.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        (kit.state_dir / ".writable").touch()
        (kit.state_dir / ".writable").unlink()
    except OSError as error:
        raise KitError(f"the state folder {kit.state_dir} cannot be written ({error.strerror}); make it, and give it "
                       "to the account of the services") from None  # fmt: skip


def check_data(kit: Kit) -> None:
    """That the hospital's manifest fits its kit, looked at by a process that ends: pandas would stay in memory."""
    looked = subprocess.run(
        [sys.executable, "-m", "deploy.start_data", str(kit.folder)], cwd=CHECKOUT, capture_output=True, text=True
    )
    if looked.returncode:
        raise KitError(looked.stderr.strip() or "the data could not be looked at")


def check_time(kit: Kit) -> None:
    """That the server, where it can be reached, would take what is signed with this clock. Raises KitError."""
    client = (kit.path("client_certificate"), kit.path("client_key"))
    found = clock_finding(str(kit.listed["server"]), kit.path("ca"), client)
    if found is not None and found.level == "error":
        raise KitError(f"{found.sentence}; {found.fix}")


def check_insecure(kit: Kit) -> None:
    """That nothing without encryption leaves this machine. Raises KitError."""
    host = str(kit.listed["server"]).rpartition(":")[0]
    if not is_loopback(host) or kit.listed["proxy"] != "none":
        raise KitError(
            f"--insecure is for loopback without a proxy, this kit is for the server {kit.listed['server']} behind "
            f"{kit.listed['proxy']}; leave it out"
        )


def site_group(kit: Kit, insecure: bool) -> Group:
    """A hospital's services, after every check. Raises KitError and FlowerMissing."""
    check_kit(kit, "site")
    check_ports(kit, ["runtime", "tunnel"] if has_tunnel(kit) else ["runtime"])
    if not insecure:
        check_time(kit)
    check_data(kit)
    check_state(kit)
    return Group(site_services(kit, insecure=insecure), kit.state_dir / "services.json")


def server_group(kit: Kit, insecure: bool) -> Group:
    """The server's services, after every check. Raises KitError and FlowerMissing."""
    check_kit(kit, "server")
    check_ports(kit, ["superlink"])
    check_state(kit)
    (kit.state_dir / "proxy").mkdir(exist_ok=True, mode=0o700)  # the proxy's container mounts it
    return Group(server_services(kit, insecure=insecure), kit.state_dir / "services.json")


def proxy_group(kit: Kit, insecure: bool) -> Group:
    """The proxy, after every check. Raises KitError."""
    if insecure:
        raise KitError("there is no proxy without encryption; leave --insecure out")
    check_kit(kit, "server")
    check_ports(kit, ["proxy"])
    services = proxy_services(kit)
    check_state(kit)
    return Group(services, kit.state_dir / "proxy.json")


async def open_tunnel(kit: Kit, group: Group) -> asyncio.Server:
    """The loopback door that the SuperNode dials."""
    host, _, port = str(kit.listed["server"]).rpartition(":")
    tunnel = Tunnel(
        (host, int(port)),
        listening_context(kit.path("local_certificate"), kit.path("local_key")),
        dialling_context(kit.path("ca"), kit.path("client_certificate"), kit.path("client_key")),
        lambda text: group.tell("tunnel", text),
    )
    return await tunnel.start(kit.port("tunnel"))


def has_tunnel(kit: Kit) -> bool:
    """Whether a hospital reaches the server through a proxy, which asks for a client certificate."""
    return kit.kind == "site" and kit.listed["proxy"] != "none"


GROUPS = {"site": site_group, "server": server_group, "proxy": proxy_group}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m deploy.start", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=sorted(GROUPS))
    parser.add_argument("kit", type=Path, help="folder of this machine's kit")
    parser.add_argument("--insecure", action="store_true", help="no encryption; loopback only")
    options = parser.parse_args(arguments)
    try:
        kit = read_kit(options.kit)
        if options.insecure:
            check_insecure(kit)
        group = GROUPS[options.what](kit, options.insecure)
    except (KitError, FlowerMissing) as error:
        print(f"start: {error}", file=sys.stderr)
        return 1
    group.mark = INSECURE if options.insecure else ""
    group.tell("start", f"{kit.name} of {kit.listed['federation']}: {', '.join(s.name for s in group.services)}")
    return run(group, (lambda group: open_tunnel(kit, group)) if has_tunnel(kit) else None)


if __name__ == "__main__":
    sys.exit(main())
