"""Runs the app in simulation on this machine and tells the truth about how it ended.

    python -m server_app.simulate [--preset presets/x.toml] [--data PATH] [-c 'key=value ...']

This is `flwr run .` with what it needs around it: a SuperLink of its own on a free loopback port, in an empty folder,
with a private FLWR_HOME, so that neither another checkout nor another user of the machine can get in between. The exit
code follows the status of the run: 0 completed, 1 failed, stopped or never started, 2 timed out, 128 + signal when
interrupted.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from server_app.launch_config import (
    RUNS_DIR,
    LaunchError,
    RunConfig,
    app_defaults,
    check_keys,
    resolve_run_config,
    write_toml,
)
from server_app.result_table import newest_run_folder, print_results
from server_app.simulation_log import LogFollower
from server_app.superlink import FlowerCli, FlowerError, RunStatus, SuperLink

ROOT = Path(__file__).resolve().parents[1]
COMPLETED, FAILED, TIMED_OUT = 0, 1, 2
PENDING_LIMIT_S = 180.0  # a SuperLink that lost its executor leaves runs pending for ever
# A socket path has room for 107 bytes and Ray needs up to 68 of them below its temporary folder.
LONGEST_RAY_FOLDER = 107 - 70


class Interrupted(BaseException):
    """A signal asked the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Simulation:
    """One run to be made: what, on how many sites, with which share of the machine."""

    app: Path
    run_config: RunConfig
    sites: int
    cpus_per_site: int = 1
    gpus_per_site: float = 0.0
    timeout_s: float | None = None
    keep_logs: bool = False

    def federation_config(self) -> str:
        """The options Flower forgets when they are not given with every run."""
        options = {
            "num-supernodes": self.sites,
            "client-resources-num-cpus": self.cpus_per_site,
            "client-resources-num-gpus": float(self.gpus_per_site),
        }
        # Ray starts a worker for every share of a CPU; more of them than sites would only cost memory. A Ray that runs
        # already (RAY_ADDRESS) has its own number and refuses to be told.
        if "RAY_ADDRESS" not in os.environ:
            options["init-args-num-cpus"] = min(available_cpus(), self.sites * self.cpus_per_site)
        return " ".join(f"{name}={value}" for name, value in options.items())


def count_sites(run_config: Mapping[str, object], wanted: int | None) -> int:
    """How many sites the settings of our own app lead to; refuses bad settings and data before anything is started."""
    from client_app.site import site_names
    from datasets.records import DataError
    from federation.registry import UnknownMethod
    from federation.settings import Settings, SettingsError

    try:
        settings = Settings.from_run_config(run_config)
        return wanted or len(site_names(settings))
    except (SettingsError, DataError, UnknownMethod) as error:
        raise LaunchError(str(error)) from None


def make_local_files(simulation: Simulation) -> None:
    """What the method of our own app needs on this machine before any site starts; see `registry.Method`."""
    from federation import registry
    from federation.settings import Settings

    if simulation.app == ROOT:
        settings = Settings.from_run_config({**app_defaults(simulation.app), **simulation.run_config})
        registry.prepare_simulation(settings.method, settings)


def available_cpus() -> int:
    """The cores this process may use, which in a container can be fewer than the machine has."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(simulation: Simulation, console: Console) -> tuple[int, Path | None]:
    """Starts, follows and ends one simulation; returns the exit code and the run folder the server announced."""
    with workspace(simulation.keep_logs, console) as folder:
        # Ray's logs and sockets go with the folder, and no other Ray on this machine is found and joined by accident.
        fits = len(str(folder)) <= LONGEST_RAY_FOLDER and "RAY_TMPDIR" not in os.environ
        link = SuperLink(folder, "--insecure", "--simulation", env={"RAY_TMPDIR": str(folder)} if fits else None)
        follower: LogFollower | None = None
        try:
            link.start()
            cli = FlowerCli(folder, link.address)
            run_id = cli.submit(
                simulation.app, write_toml(folder / "run.toml", simulation.run_config), simulation.federation_config()
            )
            share = f"{simulation.cpus_per_site} CPU and {simulation.gpus_per_site:g} GPU each"
            _say(console, f"run {run_id}: {simulation.sites} sites, {share}")
            follower = LogFollower(cli.follow_log(run_id), folder / "run.log")
            status = await_end(cli, link, follower, run_id, simulation.timeout_s)
            if status is None:
                _say(console, f"timed out after {simulation.timeout_s:.0f} s; the run is being stopped")
                with contextlib.suppress(FlowerError):
                    cli.stop(run_id)
                return TIMED_OUT, follower.run_folder
            follower.close()
            _say(
                console,
                f"{status.status} after {status.elapsed_s:.0f} s"
                + ("" if status.is_completed else f": {status.details}"),
            )
            return (COMPLETED if status.is_completed else FAILED), follower.run_folder
        finally:
            with uninterrupted():
                if left := link.stop():
                    _say(console, f"could not end the processes {left}")
                if follower is not None:
                    follower.close(timeout_s=0.5)


def await_end(
    cli: FlowerCli, link: SuperLink, follower: LogFollower, run_id: str, timeout_s: float | None
) -> RunStatus | None:
    """The final status, or nothing when the time is over; raises when Flower itself has broken down.

    The end of the log is the first sign of the end of the run, so the status is asked for seldom (each question starts
    a process that costs the sites a second of a core) and at once when the log ends.
    """
    began, failures, pause_s, log_ended = time.monotonic(), 0, 1.0, False
    while True:
        left_s = math.inf if timeout_s is None else max(began + timeout_s - time.monotonic(), 0.0)
        if follower.wait(min(pause_s, left_s)):
            time.sleep(min(pause_s, left_s) if log_ended else 0.5)
            log_ended = True
        try:
            status, failures = cli.status(run_id), 0
        except FlowerError:
            if not link.is_alive():
                raise FlowerError(
                    f"the SuperLink ended during the run; the end of its log:\n{link.log_tail()}"
                ) from None
            failures += 1
            if failures == 5:
                raise
            continue
        if status.is_finished:
            return status
        waited_s = time.monotonic() - began
        if status.status == "pending" and waited_s > PENDING_LIMIT_S:
            raise FlowerError(
                f"the run is still pending after {waited_s:.0f} s; the end of the SuperLink's log:\n{link.log_tail()}"
            )
        if timeout_s is not None and waited_s >= timeout_s:
            return None
        link.is_alive()
        pause_s = min(pause_s * 1.5, 10.0)


@contextlib.contextmanager
def workspace(keep: bool, console: Console) -> Iterator[Path]:
    """A private temporary folder, removed at the end unless its logs are wanted."""
    base = tempfile.gettempdir()
    if len(base) + len("/consilium-xxxxxxxx") > LONGEST_RAY_FOLDER and os.access("/tmp", os.W_OK | os.X_OK):
        base = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="consilium-", dir=base))
    try:
        yield folder
    finally:
        with uninterrupted():
            if keep:
                _say(console, f"logs: {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, a closed terminal and a polite kill all end the block through its `finally` clauses."""

    def leave(number: int, _frame: object) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not cut the cleaning up short, or processes would be left behind."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(console: Console, text: str) -> None:
    console.print(f"simulate: {text}", markup=False, highlight=False, soft_wrap=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        # argparse's own code, 2, means "timed out" here.
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"simulate: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = _Parser(
        prog="python -m server_app.simulate", description="Train the federation in simulation on this machine."
    )
    options.add_argument("--preset", type=Path, help="TOML file of settings that differ from the app's defaults")
    options.add_argument("--data", help="folder or zip with images and metadata (sets data.root)")
    options.add_argument(
        "-c",
        "--run-config",
        action="append",
        default=[],
        metavar="'KEY=VALUE ...'",
        help="settings that win over the preset",
    )
    options.add_argument(
        "--sites", type=_positive(int), help="number of simulated sites (default: as the settings say)"
    )
    options.add_argument(
        "--cpus-per-site", type=_positive(int), default=1, help="CPUs a training site holds (default: 1)"
    )
    options.add_argument(
        "--gpus-per-site", type=float, default=0.0, help="share of a GPU a training site holds, e.g. 0.5 (default: 0)"
    )
    options.add_argument(
        "--timeout", type=_positive(float), metavar="SECONDS", help="stop the run after so long (default: never)"
    )
    options.add_argument("--runs-dir", type=Path, help="where run folders go (sets reporting.runs_dir; default: runs)")
    options.add_argument("--keep-logs", action="store_true", help="keep the folder with the logs of Flower and Ray")
    options.add_argument("--app", type=Path, default=ROOT, help="folder of the Flower app (default: this one)")
    return options


def _positive(kind: type) -> type:
    def convert(text: str) -> float:
        if not (value := kind(text)) > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    convert.__name__ = kind.__name__
    return convert  # type: ignore[return-value]


def prepare(options: argparse.Namespace) -> Simulation:
    """The simulation the options ask for, after every check that needs no process."""
    app = options.app.resolve()
    defaults = app_defaults(app)
    run_config = resolve_run_config(options, defaults)
    if app == ROOT:
        sites = count_sites({**defaults, **run_config}, options.sites)
    elif not (sites := options.sites):
        raise LaunchError("--sites is needed for another app than this one")
    check_keys(run_config, defaults)
    if options.cpus_per_site > available_cpus():
        raise LaunchError(
            f"--cpus-per-site {options.cpus_per_site}: this machine has {available_cpus()}, so no site could ever start"
        )
    return Simulation(
        app, run_config, sites, options.cpus_per_site, options.gpus_per_site, options.timeout, options.keep_logs
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    options = parser().parse_args(arguments)
    try:
        with interruptible():
            simulation = prepare(options)
            make_local_files(simulation)
            began = time.time()
            exit_code, run_folder = run(simulation, console)
            if exit_code == COMPLETED and (runs_dir := simulation.run_config.get(RUNS_DIR)):
                run_folder = run_folder or newest_run_folder(Path(str(runs_dir)), since=began)
                if run_folder is None or not (run_folder / "run.json").is_file():
                    _say(console, f"the run completed but left no run.json below {runs_dir}")
                    return FAILED
                print_results(run_folder, console)
            return exit_code
    except (LaunchError, FlowerError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return FAILED
    except Interrupted as interruption:
        print(f"simulate: ended by {interruption}; its processes are stopped", file=sys.stderr)
        return interruption.exit_code


if __name__ == "__main__":
    sys.exit(main())
