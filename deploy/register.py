"""Brings the SuperLink's list of SuperNodes in line with the server's kit: members in, revoked ones out.

    python -m deploy.register KITDIR

Only a key that the SuperLink knows is let in. A key that was taken out is never taken in again (Flower refuses it), so
a hospital that comes back needs a new one: `deploy.provision renew NAME --new-key`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.flower import FlowerMissing, command, environment
from deploy.kit import Kit, KitError, check_kit, read_kit
from federation.files import write_atomic

LEDGER = "registered.json"
TIMEOUT_S = 60.0


class FlowerFailed(RuntimeError):
    """The SuperLink did not do what it was asked; the message has its words."""


def operator_home(kit: Kit) -> Path:
    """FLWR_HOME of the operator on the server, with the kit's connection in it."""
    home, wanted = kit.state_dir / "operator", (kit.folder / "operator" / "config.toml").read_bytes()
    config = home / "config.toml"
    if not config.exists() or config.read_bytes() != wanted:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(config, wanted)
    return home


def flwr(kit: Kit, *arguments: str) -> dict[str, Any]:
    """The answer of a ``flwr`` command with ``--format json``. Raises FlowerFailed."""
    home = operator_home(kit)
    try:
        done = subprocess.run(
            [command("flwr"), *arguments, "--format", "json"],
            cwd=home,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise FlowerFailed(f"flwr {' '.join(arguments)} did not answer within {TIMEOUT_S:.0f} s") from None
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    try:
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise FlowerFailed(f"flwr {' '.join(arguments)} said: {said[:500]}") from None
    if not answer.get("success", True):
        reason = " ".join(str(answer.get("error-message", said[:500])).split())
        raise FlowerFailed(f"flwr {' '.join(arguments)} failed: {reason}")
    return answer


def statuses(kit: Kit) -> dict[str, str]:
    """Node id -> ``online``, ``offline`` or another of Flower's words, for every SuperNode that is let in."""
    return {str(node["node-id"]): str(node["status"]) for node in flwr(kit, "supernode", "list")["nodes"]}


def registered(kit: Kit) -> dict[str, dict[str, str]]:
    """Site -> its node id and public key, as `register` wrote them down: Flower's list names neither."""
    path = kit.state_dir / LEDGER
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def register(kit: Kit) -> list[str]:
    """Registers and unregisters what differs from the kit; one sentence a site. Raises FlowerFailed."""
    members = {path.stem: path for path in sorted(kit.path("authorised").glob("*.pub"))}
    known, before, said = statuses(kit), registered(kit), []
    for name, entry in sorted(before.items()):
        stays = name in members and entry["public_key"] == members[name].read_text(encoding="utf-8")
        if entry["node_id"] in known and stays:
            said.append(f"{name}: registered, {known[entry['node_id']]}")
            continue
        if entry["node_id"] in known:
            flwr(kit, "supernode", "unregister", entry["node_id"])
            said.append(f"{name}: taken out")
        _write(kit, {other: value for other, value in registered(kit).items() if other != name})
    for name, path in members.items():
        if name in (ledger := registered(kit)):
            continue
        answer = flwr(kit, "supernode", "register", str(path), "--name", name)
        entry = {"node_id": str(answer["node-id"]), "public_key": path.read_text(encoding="utf-8")}
        _write(kit, {**ledger, name: entry})
        said.append(f"{name}: registered now")
    strangers = sorted(set(known) - {entry["node_id"] for entry in before.values()})
    return said + [f"node {node}: registered by somebody else; look who that is" for node in strangers]


def _write(kit: Kit, ledger: dict[str, dict[str, str]]) -> None:
    write_atomic(kit.state_dir / LEDGER, json.dumps(ledger, indent=1).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if len(words) != 1:
        print("register: expected the folder of the server's kit", file=sys.stderr)
        return 2
    try:
        kit = read_kit(Path(words[0]))
        check_kit(kit, "server")
        print("\n".join(register(kit)))
    except (KitError, FlowerMissing, FlowerFailed) as error:
        print(f"register: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
