"""Stops the processes that one command led to, and nothing else on the machine.

Flower puts its helpers into sessions of their own (a SuperLink starts its SuperExec detached, which starts the
simulation, which starts Ray), so a process group is not enough. A session can only be inherited: whoever is in a
session that descends from our own process was started by it, also after its parent has died. For Linux and macOS.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


class ProcessFamily:
    """A started process and everything it has started since; call `look` now and then so that orphans stay known."""

    def __init__(self, leader: subprocess.Popen) -> None:
        """`leader` must have been started with `start_new_session=True`."""
        self.leader = leader
        self._sessions = {leader.pid}

    def look(self) -> list[int]:
        """The living members by process id; remembers the sessions they have opened."""
        parents = _living_processes()
        sessions = {pid: sid for pid in parents if (sid := _session_of(pid)) is not None}
        descendants = _descendants(self.leader.pid, parents)
        # A session without members is forgotten: its number may be given to a stranger later.
        known = (self._sessions | {sessions[pid] for pid in descendants if pid in sessions}) & set(sessions.values())
        self._sessions = known - {os.getsid(0)}
        return sorted(pid for pid, sid in sessions.items() if sid in self._sessions)

    def stop(self, grace_s: float = 8.0) -> list[int]:
        """Asks every member to end, kills those that have not after `grace_s`; returns whoever is still alive."""
        for sent, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + wait_s
            for pid in self.look():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sent)
            while self._alive() and time.monotonic() < deadline:
                time.sleep(0.1)
            if not self._alive():
                break
        return self._alive()

    def _alive(self) -> list[int]:
        self.leader.poll()  # reaps it, or it would count as a member for ever
        return self.look()


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _descendants(root: int, parents: dict[int, int]) -> set[int]:
    found, frontier = set(), {root}
    while frontier:
        found |= frontier
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
    return found


def _living_processes() -> dict[int, int]:
    """Parent by process id, without zombies. From /proc where there is one: small containers have no `ps`."""
    if Path("/proc/self/stat").exists():
        return dict(filter(None, map(_read_stat, Path("/proc").glob("[0-9]*/stat"))))
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    fields = [row.split() for row in rows.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in fields if not state.startswith("Z")}


def _read_stat(path: Path) -> tuple[int, int] | None:
    try:
        # The name may hold blanks and brackets: what counts stands behind the last one.
        state, parent = path.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else (int(path.parent.name), int(parent))
