"""Flower's official commands as two small objects: a SuperLink of one's own, and the command line that talks to it.

What must be known to use the commands safely lives here: a private FLWR_HOME, nothing installed at run time, no
telemetry, an empty working folder (Ray puts it first on the workers' import path), and the status asked for instead of
the exit code of `flwr run`, which is 0 for failed runs too. Used by the simulation launcher and by deployment tests.
"""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from server_app.processes import ProcessFamily

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "consilium"


class FlowerError(RuntimeError):
    """A Flower command failed, or its SuperLink did."""


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for any Flower command: quiet, private to `home`, with the commands of this interpreter first."""
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY", os.environ.get("no_proxy")), "127.0.0.1,localhost")))
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    quiet = {"FLWR_HOME": str(home), "PATH": path, "NO_PROXY": direct, "no_proxy": direct, **QUIET}
    return {**os.environ, **quiet, **(extra or {})}


def command(name: str) -> str:
    """The path of one of Flower's commands, from the environment this interpreter runs in."""
    path = shutil.which(name, path=environment(Path())["PATH"])
    if path is None:
        raise FlowerError(f"the command {name} is missing; install the dependencies: python deploy/install.py")
    return path


@dataclass(frozen=True)
class RunStatus:
    """A run as the SuperLink sees it: `status` is pending, starting, running or finished:completed|failed|stopped."""

    status: str
    details: str
    elapsed_s: float

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to the run."""
        return self.status.startswith("finished")

    @property
    def is_completed(self) -> bool:
        """Whether the run reached its end without an error."""
        return self.status == "finished:completed"


class SuperLink:
    """A SuperLink of one's own on loopback, in an empty folder; as a context manager it stops all it started."""

    def __init__(
        self, folder: Path, *arguments: str, ca: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Everything it writes goes below `folder`; `arguments` go to flower-superlink.

        They are `--insecure`, or certificates (then `ca` is the file of their authority), and maybe `--simulation`.
        """
        self.folder, self.arguments, self.ca = folder, arguments, ca
        self.log_path = folder / "superlink.log"
        self._env = environment(folder / "superlink-home", env)
        self._family: ProcessFamily | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """Where the command line and the sites connect to."""
        return f"127.0.0.1:{self.port}"

    def start(self, timeout_s: float = 120.0, attempts: int = 3) -> Self:
        """Returns when it answers; a port that somebody else took in between is tried again with another one."""
        for attempt in range(attempts):
            self._launch()
            deadline = time.monotonic() + timeout_s
            while self.is_alive() and time.monotonic() < deadline:
                if self._answers():
                    return self
                time.sleep(0.1)
            taken = not self.is_alive() and "address already in use" in self.log_tail().lower()
            if not taken or attempt + 1 == attempts:
                break
        why = "did not answer in time" if self.is_alive() else "ended"
        raise FlowerError(f"the SuperLink {why} on {self.address}; the end of its log:\n{self.log_tail()}")

    def stop(self, grace_s: float = 8.0) -> list[int]:
        """Ends the SuperLink and whatever it started; returns the ids of processes that could not be ended."""
        return self._family.stop(grace_s) if self._family else []

    def is_alive(self) -> bool:
        """Whether the SuperLink process runs; also keeps track of the processes it started."""
        if self._family is None:
            return False
        self._family.look()
        return self._family.leader.poll() is None

    def processes(self) -> list[int]:
        """Ids of the living processes that belong to this SuperLink."""
        return self._family.look() if self._family else []

    def log_tail(self, lines: int = 25) -> str:
        """The end of the SuperLink's log, for an error message."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) or "(empty)"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self) -> None:
        self.port = free_port()
        empty, home = self.folder / "empty", self.folder / "superlink-home"
        empty.mkdir(parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log_path.open("ab") as log:
            self._family = ProcessFamily(
                subprocess.Popen(
                    [command("flower-superlink"), *address, *self.arguments],
                    cwd=empty,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _answers(self) -> bool:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.ca is not None:
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(self.ca))))
        url = f"{'https' if self.ca else 'http'}://{self.address}/health"
        with contextlib.suppress(OSError, urllib.error.URLError):
            return urllib.request.build_opener(*handlers).open(url, timeout=2).status == 200
        return False


class FlowerCli:
    """The `flwr` command against one SuperLink, with its own FLWR_HOME below `folder`."""

    def __init__(self, folder: Path, address: str, ca: Path | None = None) -> None:
        """`ca` is the certificate file of the SuperLink's authority; without it the connection is not encrypted."""
        self.folder = folder / "flwr-home"
        self.folder.mkdir(parents=True, exist_ok=True)
        security = f'root-certificates = "{ca.resolve()}"' if ca else "insecure = true"
        config = (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{security}\n'
        )
        (self.folder / "config.toml").write_text(config)
        self._env = environment(self.folder)

    def call(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """Standard output of `flwr ARGUMENTS`; a failure raises with everything the command said."""
        try:
            done = subprocess.run(
                [command("flwr"), *arguments],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                start_new_session=True,  # a Ctrl-C is ours to handle: the terminal must not reach it
            )
        except subprocess.TimeoutExpired:
            raise FlowerError(f"flwr {arguments[0]} did not answer within {timeout_s:.0f} s") from None
        if done.returncode:
            raise FlowerError(f"flwr {arguments[0]} failed:\n{_complaint(done.stdout)}{done.stderr}".rstrip())
        return done.stdout

    def submit(self, app: Path, run_config: Path | None = None, federation_config: str | None = None) -> str:
        """Bundles `app`, hands it to the SuperLink and returns the run id; `run_config` is a TOML file of overrides."""
        arguments = ["run", str(app.resolve()), "--format", "json"]
        if run_config is not None:
            arguments += ["--run-config", str(run_config)]
        if federation_config is not None:
            arguments += ["--federation-config", federation_config]
        answer = _json_of(self.call(*arguments))
        if not answer.get("success"):
            raise FlowerError(f"flwr run was refused: {answer.get('error-message', answer)}")
        return answer["run-id"]

    def status(self, run_id: str) -> RunStatus:
        """Where the run stands now."""
        answer = _json_of(self.call("ls", "--run-id", run_id, "--format", "json"))
        if not answer.get("runs"):
            raise FlowerError(f"flwr ls knows no run {run_id}: {answer.get('error-message', answer)}")
        run = answer["runs"][0]
        return RunStatus(run["status"], run.get("status-details", ""), float(run.get("elapsed", 0.0)))

    def stop(self, run_id: str) -> None:
        """Asks the SuperLink to stop the run."""
        self.call("stop", run_id)

    def follow_log(self, run_id: str) -> subprocess.Popen:
        """A process whose standard output is the log of the run as it is written; it ends with the run."""
        return subprocess.Popen(
            [command("flwr"), "log", run_id, "--stream"],
            cwd=self.folder,
            env={**self._env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _json_of(text: str) -> dict:
    # Warnings of the command may stand before the document.
    start = text.find("{")
    try:
        return json.loads(text[start:])
    except (json.JSONDecodeError, IndexError):
        raise FlowerError(f"flwr answered something that is not JSON: {text[:500]!r}") from None


def _complaint(stdout: str) -> str:
    with contextlib.suppress(FlowerError):
        return str(_json_of(stdout).get("error-message", stdout)) + "\n"
    return stdout
