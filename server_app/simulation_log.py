"""What a person sees of a run while it goes: the server's lines as they come, without Flower's and Ray's small talk."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*m")
RUN_FOLDER = re.compile(r"run folder: (?P<path>\S.*\S|\S)")
LEVEL = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*: {0,6}(?P<text>.*)$")
# Sites print through Ray with the worker's name in front; the rest is what Flower and Ray say in every run.
NOISE = re.compile(
    r"^\((?:\S+ )?(?:pid|ip)=[^)]*\)|^\(raylet|^\[\d{4}-\d\d-\d\d [^]]*\]"
    r"|Starting Flower Simulation|default simulated SuperNodes changed|simulated SuperNodes\)$"
    r"|To change federation size|flwr federation simulation-config"
    r"|^Successfully installed \S+ to |^Using SuperLink|logstream for run_id"
    r"|site-packages/ray/|^\s*warnings\.warn\($|^\d{4}-\d\d-\d\d [\d:,]+\s+(?:INFO|WARNING) \w+\.py:\d+ --"
)


def readable(lines: Iterable[str]) -> Iterator[str]:
    """The lines worth showing, without colours and without `INFO`; several empty ones become one."""
    empty = True
    for line in lines:
        plain = ANSI.sub("", line).rstrip()
        match = LEVEL.match(plain)
        text = match["text"] if match else plain
        if NOISE.search(text):
            continue
        if match and match["level"] != "INFO":
            text = f"{match['level']}: {text.lstrip()}"
        if text or not empty:
            yield text
        empty = not text


def run_folder_of(line: str) -> Path | None:
    """The folder that the server announces in a line `run folder: PATH`, else nothing."""
    match = RUN_FOLDER.search(line)
    return Path(match["path"]) if match else None


class LogFollower:
    """Reads a growing log in a thread: everything goes to a file, the readable part to `show`."""

    def __init__(self, process: subprocess.Popen, copy: Path, show: Callable[[str], None] | None = None) -> None:
        """`process` writes the log to its standard output; it is ended by `close`."""
        self.process, self.copy = process, copy
        self.run_folder: Path | None = None
        self._show = show or _print
        self._thread = threading.Thread(target=self._read, name="log-follower", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits at most so long; True when the log has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Lets the last lines come, then ends the reading process."""
        self.wait(timeout_s)
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.wait(5):
            self.process.stdout.close()

    def _read(self) -> None:
        with self.copy.open("a", encoding="utf-8", errors="replace") as copy:
            for line in readable(self._copied(copy)):
                self.run_folder = run_folder_of(line) or self.run_folder
                self._show(line)

    def _copied(self, copy) -> Iterator[str]:
        for raw in self.process.stdout:
            line = raw.decode("utf-8", errors="replace")
            copy.write(line)
            copy.flush()
            yield line


def _print(line: str) -> None:
    print(line, flush=True, file=sys.stdout)
