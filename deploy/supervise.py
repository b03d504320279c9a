"""Watches the server of a federation and mends what can be mended.

    python -m deploy.supervise KITDIR           # for ever, one line whenever something changes
    python -m deploy.supervise KITDIR --once    # one look, one line; exit code 0: all is well, 1: it is not

Three things break without a sound: the SuperLink answers no more; the SuperExec has died (the SuperLink does not start
it again, and says that it is healthy); a run stays ``pending`` though no other one is running, since nobody takes its
task. A dead SuperExec is started again by `deploy.start`; one that lives and takes no task is ended here, so that it is
started again too. Every look is written to ``status.json`` in the state folder, for any monitoring there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.flower import FlowerMissing
from deploy.kit import Kit, KitError, check_kit, read_kit
from deploy.register import FlowerFailed, flwr, registered, statuses
from federation.files import write_atomic

EVERY_S = 30.0
PENDING_LIMIT_S = 60.0
STATUS = "status.json"


@dataclass(frozen=True)
class Look:
    """What one look at the server found. ``pending``: run -> seconds that this supervisor has seen it wait."""

    superlink: bool
    superexec: bool
    pending: Mapping[str, float] = field(default_factory=dict)
    offline: tuple[str, ...] = ()
    unknown: str = ""

    def problems(self, limit_s: float = PENDING_LIMIT_S) -> list[str]:
        """Sentences for what is wrong; empty where nothing is. A hospital that is offline is no fault of the server."""
        found = []
        if not self.superlink:
            found.append("the SuperLink does not answer")
        if not self.superexec:
            found.append("the SuperExec has died: no run can start")
        stuck = {run: waited for run, waited in self.pending.items() if waited > limit_s}
        found += [f"run {run} is pending for {waited:.0f} s: nobody takes it" for run, waited in sorted(stuck.items())]
        return found + ([f"the SuperLink cannot be asked: {self.unknown}"] if self.unknown else [])

    def sentence(self) -> str:
        """The look as one line."""
        offline = f"; offline: {', '.join(self.offline)}" if self.offline else ""
        return ("; ".join(self.problems()) or "all is well") + offline


def look(kit: Kit, since: dict[str, float], now: float) -> Look:
    """Looks at the server. ``since`` remembers when each pending run was first seen; it is brought up to date."""
    alive = _answers(kit)
    executor = superexec_pid(kit)
    if not alive:
        return Look(False, executor is not None)
    try:
        runs = flwr(kit, "ls")["runs"]
        online, ledger = statuses(kit), registered(kit)
        offline = tuple(name for name, entry in sorted(ledger.items()) if online.get(entry["node_id"]) != "online")
    except (FlowerFailed, KeyError) as error:
        return Look(True, executor is not None, unknown=str(error))
    # A run may wait behind another one; ending the SuperExec would end that one too.
    busy = any(run["status"] in ("starting", "running") for run in runs)
    pending = {str(run["run-id"]) for run in runs if run["status"] == "pending" and not busy}
    for run in set(since) - pending:
        del since[run]
    waited = {run: now - since.setdefault(run, now) for run in pending}
    return Look(True, executor is not None, waited, offline)


def superexec_pid(kit: Kit) -> int | None:
    """The process id of the server's SuperExec, None where it does not live."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        services: dict[str, Any] = json.loads((kit.state_dir / "services.json").read_text(encoding="utf-8"))
        pid = int(services["superexec"]["pid"])
        os.kill(pid, 0)
        if b"superexec" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def mend(kit: Kit, found: Look, since: dict[str, float], limit_s: float = PENDING_LIMIT_S) -> str:
    """Ends a SuperExec that takes no task, which makes `deploy.start` start another one; what it did, or nothing."""
    stuck = [run for run, waited in found.pending.items() if waited > limit_s]
    pid = superexec_pid(kit)
    if not stuck or pid is None:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    since.clear()  # the new one has the whole time
    return f"the SuperExec was restarted, since run {', '.join(sorted(stuck))} was not taken"


def write_status(kit: Kit, found: Look, done: str) -> None:
    """The look as a file, for a monitoring system."""
    content = {"time": time.time(), "well": not found.problems(), "problems": found.problems(), "mended": done}
    write_atomic(kit.state_dir / STATUS, json.dumps(content | {"look": asdict(found)}, indent=1).encode(), 0o644)


def watch(kit: Kit) -> None:
    """Looks every few seconds, for ever."""
    since: dict[str, float] = {}
    said = ""
    while True:
        found = look(kit, since, time.monotonic())
        done = mend(kit, found, since)
        write_status(kit, found, done)
        for line in (found.sentence() if found.sentence() != said else "", done):
            if line:
                print(f"supervise | {line}", flush=True)
        said = found.sentence()
        time.sleep(EVERY_S)


def _answers(kit: Kit) -> bool:
    context = ssl.create_default_context(cafile=str(kit.path("ca")))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with contextlib.suppress(OSError, urllib.error.URLError):
        return opener.open(f"https://127.0.0.1:{kit.port('superlink')}/health", timeout=5).status == 200
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m deploy.supervise", description=__doc__.split("\n")[0])
    parser.add_argument("kit", type=Path, help="folder of the server's kit")
    parser.add_argument("--once", action="store_true", help="one look instead of watching")
    options = parser.parse_args(arguments)
    try:
        kit = read_kit(options.kit)
        check_kit(kit, "server")
        if not options.once:
            watch(kit)
        found = look(kit, _pending_since(kit), time.monotonic())
    except (KitError, FlowerMissing) as error:
        print(f"supervise: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    print(found.sentence())
    return int(bool(found.problems()))


def _pending_since(kit: Kit) -> dict[str, float]:
    """When the watching supervisor first saw each pending run, on this look's clock."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        status = json.loads((kit.state_dir / STATUS).read_text(encoding="utf-8"))
        age = time.time() - float(status["time"])
        return {run: time.monotonic() - waited - age for run, waited in status["look"]["pending"].items()}
    return {}


if __name__ == "__main__":
    sys.exit(main())
