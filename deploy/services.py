"""Runs a few long-lived processes as one: their lines with a name in front, restarts, and one way to stop them all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging.handlers
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from federation.files import write_atomic

GRACE_S = 10.0
RESTART_S = 5.0
LONGEST_LINE = 1 << 16
LOG_DIR = "CONSILIUM_LOG_DIR"
"""Names the folder in which the lines are kept as well: a container's own log goes away with the container."""
LOG_BYTES, LOG_FILES = 10_000_000, 5


def printer() -> Callable[[str], None]:
    """Prints lines, and keeps them in the log folder where there is one; a folder that takes none stops nothing."""
    logger = logging.Logger("start")
    folder = os.environ.get(LOG_DIR)
    if folder and not os.access(folder, os.W_OK):
        print(f"start | the log folder {folder} cannot be written; its lines are here only", flush=True)
    elif folder:
        path = Path(folder) / "start.log"
        kept = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
        kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(kept)

    def say(line: str) -> None:
        print(line, flush=True)
        logger.info("%s", line)

    return say


@dataclass(frozen=True)
class Service:
    """One process. ``essential``: when it ends, all end; the others are started again.

    ``hint``: what its end most often means, for whoever reads the log.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    essential: bool = True
    hint: str = ""


@dataclass
class Group:
    """Services of one machine. ``mark`` stands in front of every line of the log.

    ``state_file`` tells a supervisor who runs: service -> process id, number of starts, time of the last one.
    """

    services: Sequence[Service]
    state_file: Path
    mark: str = ""
    say: Callable[[str], None] = field(default_factory=printer)
    _running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _state: dict[str, dict[str, float]] = field(default_factory=dict)

    def tell(self, name: str, text: str) -> None:
        """One line of the log."""
        self.say(f"{self.mark}{name} | {text}")

    async def run(self) -> int:
        """Until an essential service ends, or SIGTERM or SIGINT comes; returns the exit code of the whole."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        keepers = [asyncio.create_task(self._keep(service)) for service in self.services]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                self.tell("start", "asked to stop")
                return 0
            return next(task.result() for task in done if task is not stopping) or 1
        finally:
            for task in (*keepers, stopping):
                task.cancel()
            await asyncio.gather(*keepers, stopping, return_exceptions=True)
            await self._stop_all()

    async def _keep(self, service: Service) -> int:
        while True:
            code = await self._once(service)
            hint = f"; {service.hint}" if service.hint else ""
            self.tell("start", f"{service.name} ended with exit code {code}{hint}")
            if service.essential:
                return code
            await asyncio.sleep(RESTART_S)

    async def _once(self, service: Service) -> int:
        service.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        process = await asyncio.create_subprocess_exec(
            *service.command,
            cwd=service.folder,
            env=dict(service.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._running[service.name] = process
        starts = int(self._state.get(service.name, {}).get("starts", 0)) + 1
        self._state[service.name] = {"pid": process.pid, "starts": starts, "started": time.time()}
        write_atomic(self.state_file, json.dumps(self._state, indent=1).encode())
        reading = asyncio.create_task(self._relay(service.name, process.stdout))
        code = await process.wait()
        # What it started may still hold the pipe: its last lines are waited for, not its children.
        await asyncio.wait([reading], timeout=1.0)
        reading.cancel()
        return code

    async def _relay(self, name: str, output: asyncio.StreamReader | None) -> None:
        assert output is not None
        rest = b""
        while data := await output.read(LONGEST_LINE):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if text := line.decode(errors="replace").rstrip():
                    self.tell(name, text)

    async def _stop_all(self) -> None:
        """Every service's whole session: Flower's helpers are started by the services and would outlive them."""
        alive = list(self._running.values())
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            waits = [asyncio.create_task(process.wait()) for process in alive]
            if waits:
                await asyncio.wait(waits, timeout=wait_s)
            if all(process.returncode is not None for process in alive):
                break
        self.state_file.unlink(missing_ok=True)


def run(group: Group, before: Callable[[Group], Awaitable[asyncio.Server]] | None = None) -> int:
    """Runs a group in an event loop of its own; ``before`` opens a door that is closed at the end."""

    async def whole() -> int:
        opened = await before(group) if before is not None else None
        try:
            return await group.run()
        finally:
            if opened is not None:
                opened.close()

    try:
        return asyncio.run(whole())
    except OSError as error:
        group.tell("start", str(error))
        return 1
