"""The whole federation on one machine, as hospitals run it: kits, TLS, node authentication, own data at each site.

    python -m server_app.rehearsal [--runs-dir runs]

Three SuperNodes with a third each of the embedded digits train for three rounds through the proxy, where nginx is
installed. The result must be, bit for bit, that of the same run in one process. Everything is done with the commands
that hospitals use; nothing is left running, and all files stay in one folder below the runs folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Self

from datasets.embedded_sites import write_digit_sites
from federation.files import write_atomic
from federation.settings import Settings
from server_app import runner
from server_app.inprocess import InProcessGrid
from server_app.launch_config import RunConfig, write_toml
from server_app.processes import ProcessFamily
from server_app.simulate import Interrupted, interruptible, uninterrupted
from server_app.superlink import FlowerCli, FlowerError, RunStatus, free_port

ROOT = Path(__file__).resolve().parents[1]
SITES = ("county", "st-mary", "university")
ROUNDS = 3
READY_S = 120.0
RUN_S = 900.0


class RehearsalError(RuntimeError):
    """Something did not work as it would have to in hospitals; the message has the end of the log."""


@dataclass
class Rehearsal:
    """A federation on loopback in one folder. As a context manager it stops whatever it started."""

    folder: Path
    sites: Sequence[str] = SITES
    has_proxy: bool = field(
        default_factory=lambda: shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin") is not None
    )
    families: dict[str, ProcessFamily] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    # -- what the operator does ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Data of every site, federation.yaml, and the kits."""
        write_digit_sites(self.folder / "data", self.sites)
        names = ["server", "superlink", *(f"{kind} {site}" for site in self.sites for kind in ("runtime", "tunnel"))]
        self.ports = {name: free_port() for name in names}
        self.write_plan()
        self.command("provision", str(self.plan_file), "--out", str(self.folder / "made"))

    def write_plan(self) -> None:
        """Writes federation.yaml; JSON is YAML too."""
        server = {"host": "127.0.0.1", "port": self.ports["server"], "superlink_port": self.ports["superlink"]}
        server |= {"proxy": "nginx" if self.has_proxy else "none", **self._machine("server")}
        sites = [
            {
                "name": site,
                "data_root": str(self.folder / "data" / site),
                "runtime_port": self.ports[f"runtime {site}"],
                "tunnel_port": self.ports[f"tunnel {site}"],
                **self._machine(site),
            }
            for site in self.sites
        ]
        plan = {"name": "rehearsal", "labels": list(map(str, range(10))), "server": server, "sites": sites}
        write_atomic(self.plan_file, json.dumps(plan, indent=1).encode())

    def _machine(self, name: str) -> dict[str, str]:
        return {"app_dir": str(ROOT), "kit_dir": str(self.kit(name)), "state_dir": str(self.state(name))}

    @property
    def plan_file(self) -> Path:
        return self.folder / "federation.yaml"

    def kit(self, name: str) -> Path:
        """The kit of a site, or of the ``server``."""
        return self.folder / "made" / "kits" / name

    def state(self, name: str) -> Path:
        """The state folder of a site, or of the ``server``."""
        return self.folder / "state" / name

    def log(self, name: str) -> Path:
        """What a started process said."""
        return self.folder / "logs" / f"{name}.log"

    def start_server(self) -> None:
        """SuperLink with SuperExec, the proxy, and the supervisor."""
        for name in ("server", *(["proxy"] if self.has_proxy else []), "supervise"):
            self.start(name, self.kit("server"), name)

    def start_site(self, site: str) -> None:
        """One hospital."""
        self.start(site, self.kit(site))

    def register(self) -> None:
        """Tells the SuperLink the keys of the members, as soon as it answers."""
        self.until(lambda: bool(self.command("register", str(self.kit("server")))), "the SuperLink knows the members")

    def cli(self) -> FlowerCli:
        """Flower's command line with a connection to the SuperLink, on the operator's machine."""
        port = self.ports["superlink" if self.has_proxy else "server"]
        return FlowerCli(self.folder, f"127.0.0.1:{port}", self.kit("server") / "certificates" / "ca.crt")

    def run_config(self, **changes: object) -> RunConfig:
        """The settings of the rehearsal's run; keys with ``__`` for the dot."""
        config: RunConfig = {
            "data.partition": "own",
            "data.labels": ",".join(map(str, range(10))),
            "data.image_size": 8,
            "model.width": 8,
            "federation.rounds": ROUNDS,
            "federation.expected_sites": len(self.sites),
            "federation.min_sites": 2,
            "federation.wait_s": 120.0,
            "federation.timeout_s": 300.0,
            "training.device": "cpu",
            "reporting.tensorboard": False,
            "reporting.runs_dir": str(self.state("server") / "runs"),
        }
        return config | {key.replace("__", "."): value for key, value in changes.items()}  # type: ignore[return-value]

    def submit(self, config: RunConfig) -> str:
        """Hands the app to the SuperLink; returns the run's id."""
        return self.cli().submit(ROOT, write_toml(self.folder / "run.toml", config))

    def wait(self, run_id: str, timeout_s: float = RUN_S) -> RunStatus:
        """The end of a run. Raises RehearsalError where it does not come."""
        deadline, cli = time.monotonic() + timeout_s, self.cli()
        while not (status := cli.status(run_id)).is_finished:
            if time.monotonic() > deadline:
                raise RehearsalError(f"the run is {status.status} after {timeout_s:.0f} s:\n{self.tail('server')}")
            self.look()
            time.sleep(2)
        return status

    def run_folder(self) -> Path:
        """The newest run folder."""
        return max((self.state("server") / "runs").glob("*-*"), key=lambda path: path.stat().st_mtime)

    # -- processes ----------------------------------------------------------------------------------------------------

    def command(self, name: str, *arguments: str) -> str:
        """What a command of `deploy` prints. Raises RehearsalError where it fails."""
        done = subprocess.run(
            [sys.executable, "-m", f"deploy.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise RehearsalError(f"deploy.{name} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def start(self, name: str, kit: Path, *arguments: str) -> None:
        """Starts a kit as its machine would, with its own script; ``name`` is what the process is called here."""
        self.log(name).parent.mkdir(exist_ok=True)
        with self.log(name).open("ab") as log:
            leader = subprocess.Popen(
                [str(kit / "start.sh"), *arguments],
                cwd=self.folder,
                env={**os.environ, "CONSILIUM_PYTHON": sys.executable},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.families[name] = ProcessFamily(leader)

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
        """Waits; a question that fails counts as not yet. Raises RehearsalError where the time is over."""
        deadline, last = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            try:
                if is_so():
                    return
            except (OSError, FlowerError, RehearsalError) as error:
                last = f"; {error}"
            self.look()
            time.sleep(0.5)
        raise RehearsalError(f"after {timeout_s:.0f} s still not so: {what}{last}")

    def look(self) -> None:
        """Keeps track of what the started processes have started."""
        for family in self.families.values():
            family.look()

    def is_alive(self, name: str) -> bool:
        """Whether a started command still runs."""
        return self.families[name].leader.poll() is None

    def stop(self, *names: str) -> list[int]:
        """Ends some of them, as systemd would; returns processes that could not be ended."""
        families = [self.families.pop(name) for name in names]
        for family in families:
            family.look()
            family.leader.terminate()
        for family in families:
            with contextlib.suppress(subprocess.TimeoutExpired):
                family.leader.wait(15)
        return [pid for family in families for pid in family.stop()]

    def tail(self, name: str, lines: int = 25) -> str:
        """The end of a log."""
        text = self.log(name).read_text(errors="replace") if self.log(name).exists() else ""
        return "\n".join(text.splitlines()[-lines:]) or "(empty)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            if left := self.stop(*self.families):
                print(f"rehearsal: could not end the processes {left}", file=sys.stderr)


def alone(rehearsal: Rehearsal, config: RunConfig) -> str:
    """The model's SHA-256 of the same run in one process, with the same data and other state folders."""
    nodes = [
        {
            "site": site,
            "data-root": str(rehearsal.folder / "data" / site),
            "state-dir": str(rehearsal.folder / "alone" / site),
        }
        for site in rehearsal.sites
    ]
    settings = Settings.from_run_config({**config, "reporting.runs_dir": str(rehearsal.folder / "alone" / "runs")})
    return runner.run(settings, InProcessGrid(nodes, settings.flat())).model_sha256


def rehearse(folder: Path) -> Path:
    """The whole rehearsal in a new folder; returns the report's path. Raises RehearsalError where anything differs."""
    rehearsal = Rehearsal(folder)
    way = (
        "through nginx with client certificates" if rehearsal.has_proxy else "without a proxy (nginx is not installed)"
    )
    print(f"rehearsal: {len(rehearsal.sites)} sites, {ROUNDS} rounds, TLS, node keys, {way}", flush=True)
    rehearsal.prepare()
    with rehearsal:
        rehearsal.start_server()
        rehearsal.register()
        for site in rehearsal.sites:
            rehearsal.start_site(site)
        config = rehearsal.run_config()
        status = rehearsal.wait(rehearsal.submit(config))
        if not status.is_completed:
            raise RehearsalError(f"the run is {status.status}: {status.details}\n{rehearsal.tail('server')}")
    run = json.loads((rehearsal.run_folder() / "run.json").read_text(encoding="utf-8"))
    deployed, in_process = run["model_sha256"], alone(rehearsal, config)
    if deployed != in_process:
        raise RehearsalError(f"the deployed model is {deployed}, that of one process is {in_process}")
    print(f"rehearsal: deployed and in-process model are the same: {deployed}", flush=True)
    return rehearsal.run_folder() / "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m server_app.rehearsal", description=__doc__.split("\n")[0])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where the rehearsal's folder goes")
    options = parser.parse_args(arguments)
    folder = options.runs_dir.absolute() / f"rehearsal-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        with interruptible():
            folder.mkdir(parents=True)
            began = time.monotonic()
            report = rehearse(folder)
            print(f"rehearsal: done in {time.monotonic() - began:.0f} s; report: {report}", flush=True)
    except (RehearsalError, FlowerError, OSError) as error:
        print(f"rehearsal: {error}\nrehearsal: everything is in {folder}", file=sys.stderr)
        return 1
    except Interrupted as interruption:
        print(f"rehearsal: ended by {interruption}; its processes are stopped", file=sys.stderr)
        return interruption.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
