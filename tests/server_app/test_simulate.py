"""The launcher against real throw-away apps: its exit code, what it prints, and that it leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from server_app import launch_config, simulate
from server_app.processes import ProcessFamily
from server_app.result_table import cell, figure, newest_run_folder, print_results
from server_app.simulation_log import readable, run_folder_of
from tests.server_app.tiny_app import write_app

ROOT = Path(__file__).resolve().parents[2]


def launch(app: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    """The launcher as a user starts it, in a session of its own so that everything it started can be found."""
    return subprocess.Popen(
        [sys.executable, "-m", "server_app.simulate", "--app", str(app), "--sites", "2", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Watch:
    """Collects the ids of all processes below a launcher while it runs."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.family, self.seen = ProcessFamily(process), set()

    def until(self, done, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline, f"waited {limit_s} s in vain; processes: {self.family.look()}"
            self.seen |= set(self.family.look())
            time.sleep(0.2)

    def left_over(self) -> list[int]:
        time.sleep(0.5)
        return self.family.look()


def finish(process: subprocess.Popen, limit_s: float = 240) -> tuple[int, str, Watch]:
    """Exit code and output of a launcher that ends by itself; fails if a process of it is still there."""
    watch = Watch(process)
    watch.until(lambda: process.poll() is not None, limit_s)
    output = process.stdout.read()
    assert watch.left_over() == [], output
    return process.returncode, output, watch


WRITES_RESULTS = """
folder = Path(str(config["reporting.runs_dir"])) / "run-1"
folder.mkdir(parents=True)
summary = {"macro_auroc": 0.875, "macro_f1": None}
site = {"site": "st-mary", "summary": summary, "num_examples": 41}
test = {"summary": summary, "per_class": [{"label": "effusion", "auroc": 0.9, "support": 12}], "per_site": [site]}
(folder / "run.json").write_text(json.dumps({"final": {"test": test}, "seen": dict(config), "answers": answers}))
(folder / "report.html").write_text("<html></html>")
print(f"run folder: {folder}", flush=True)
"""
RESULT_KEYS = {"reporting.runs_dir": '"runs"', "data.root": '""', "method": '"fedavg"'}


@pytest.mark.slow
def test_completed_run_exits_0_prints_its_table_and_leaves_nothing(tmp_path):
    app = write_app(tmp_path / "app", server=WRITES_RESULTS, config=RESULT_KEYS)
    data = tmp_path / "data set"
    data.mkdir()
    preset = tmp_path / "preset.toml"
    preset.write_text('method = "from preset"\nsites = 2\n')
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: Ray's socket paths must fit below it
    arguments = [
        "--preset",
        str(preset),
        "--data",
        str(data),
        "--runs-dir",
        str(tmp_path / "out"),
        "-c",
        "method=from-line",
    ]
    exit_code, output, watch = finish(launch(app, *arguments, env={"TMPDIR": str(temporary)}))
    assert exit_code == 0, output
    assert "asked 2 sites, 2 answered" in output
    assert "st-mary" in output and "0.875" in output and "effusion" in output
    assert f"report: {tmp_path / 'out' / 'run-1' / 'report.html'}" in output
    assert "a site speaks" not in output, "lines of the sites' workers belong into the log file only"
    assert "simulated SuperNodes" not in output
    run = json.loads((tmp_path / "out" / "run-1" / "run.json").read_text())
    # The command line wins over the preset, and every path has become absolute.
    assert run["seen"] == {
        "sites": 2,
        "method": "from-line",
        "data.root": str(data),
        "reporting.runs_dir": str(tmp_path / "out"),
    }
    assert [answer["site"] for answer in run["answers"]] == [0, 1]
    assert len(watch.seen) > 3, "the watch must have seen the processes whose end it reports"
    temporary.rmdir()  # fails unless everything Flower and Ray wrote there is gone again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statements", "said"),
    [("raise ValueError('no such label')", "no such label"), ("sys.exit(3)", "left no run.json")],
    ids=["exception", "sys.exit, which Flower calls completed"],
)
def test_failing_server_exits_1_and_says_why(tmp_path, statements, said):
    app = write_app(tmp_path / "app", server=statements, config=RESULT_KEYS)
    exit_code, output, _ = finish(launch(app, "--runs-dir", str(tmp_path / "out")))
    assert exit_code == 1, output
    assert said in output


@pytest.mark.slow
def test_hanging_run_exits_2_in_time(tmp_path):
    app = write_app(tmp_path / "app", server="time.sleep(600)")
    began = time.monotonic()
    exit_code, output, _ = finish(launch(app, "--timeout", "12"))
    assert exit_code == 2, output
    assert "timed out after 12 s" in output
    assert time.monotonic() - began < 90


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_launcher_stops_its_own_processes_and_no_others(tmp_path, number):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    started = tmp_path / "started"
    app = write_app(tmp_path / "app", server=f"Path({str(started)!r}).touch()\ntime.sleep(600)")
    process = launch(app)
    watch = Watch(process)
    try:
        watch.until(started.exists, 120)
        assert len(watch.seen) > 3
        process.send_signal(number)
        watch.until(lambda: process.poll() is not None, 60)
        output = process.stdout.read()
        assert process.returncode == 128 + number, output
        assert watch.left_over() == [], output
        assert stranger.poll() is None
    finally:
        watch.family.stop(grace_s=1)
        stranger.kill()
        stranger.wait()


def test_key_the_app_does_not_have_is_refused_with_the_nearest_one(tmp_path, capsys):
    app = write_app(tmp_path / "app", config={"learning-rate": "0.1"})
    assert simulate.main(["--app", str(app), "--sites", "2", "-c", "learning-rte=0.2 xyz=1"]) == 1
    assert "learning-rte (did you mean learning-rate?), xyz" in capsys.readouterr().err


def test_another_app_needs_its_number_of_sites(tmp_path, capsys):
    assert simulate.main(["--app", str(write_app(tmp_path / "app"))]) == 1
    assert "--sites is needed" in capsys.readouterr().err


@pytest.mark.slow
def test_superlink_that_cannot_start_says_so(tmp_path):
    from server_app.superlink import FlowerError, SuperLink

    link = SuperLink(tmp_path, "--simulation")  # neither --insecure nor certificates: it refuses
    try:
        with pytest.raises(FlowerError, match=r"the end of its log:\n(?s:.)*certificate"):
            link.start(timeout_s=60)
    finally:
        assert link.stop() == []


def test_data_that_does_not_exist_is_refused_before_anything_starts(tmp_path, capsys):
    app = write_app(tmp_path / "app", config=RESULT_KEYS)
    assert simulate.main(["--app", str(app), "--sites", "2", "--data", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_missing_preset_names_those_that_exist(tmp_path, capsys):
    app = write_app(tmp_path / "app")
    (tmp_path / "small.toml").write_text("")
    assert simulate.main(["--app", str(app), "--sites", "2", "--preset", str(tmp_path / "smal.toml")]) == 1
    assert "small.toml" in capsys.readouterr().err


def test_wrong_usage_does_not_look_like_a_timeout(capsys):
    with pytest.raises(SystemExit) as stop:
        simulate.main(["--sites", "0"])
    assert stop.value.code == 1
    assert "must be above 0" in capsys.readouterr().err


def test_more_cpus_than_the_machine_has_are_refused(tmp_path, capsys):
    app = write_app(tmp_path / "app")
    assert simulate.main(["--app", str(app), "--sites", "2", "--cpus-per-site", "4096"]) == 1
    assert "no site could ever start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", {"a.b": 1}),
        ("""lr=1e-3 flag=false name="x y" path='/a b' method.name=fedavg""", None),
        ("", {}),
    ],
)
def test_overrides_read_as_toml_with_bare_words_as_strings(text, expected):
    named = {"lr": 1e-3, "flag": False, "name": "x y", "path": "/a b", "method.name": "fedavg"}
    assert launch_config.parse_overrides(text) == (named if expected is None else expected)


@pytest.mark.parametrize("text", ["rounds", "a=1 rounds", "a= 1", '="x"'])
def test_overrides_that_cannot_be_read_are_refused_not_dropped(text):
    with pytest.raises(launch_config.LaunchError, match="cannot read"):
        launch_config.parse_overrides(text)


def test_run_config_survives_the_way_through_the_toml_file(tmp_path):
    config = {"a.b": 1, "path": '/x "y" ä🩻\\z', "rate": 1e-05, "flag": True}
    assert launch_config.read_toml(launch_config.write_toml(tmp_path / "run.toml", config)) == config


def test_lists_are_refused_because_flower_has_none(tmp_path, capsys):
    app = write_app(tmp_path / "app")
    preset = tmp_path / "list.toml"
    preset.write_text("[data]\nlabels = ['a', 'b']\n")
    # Before the question whether the app knows the key: the form is wrong for every app.
    assert simulate.main(["--app", str(app), "--sites", "2", "--preset", str(preset)]) == 1
    assert "data.labels" in capsys.readouterr().err


def test_every_path_becomes_absolute_and_names_of_embedded_data_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # the embedded name wins over a folder of that name, as in the catalogue
    defaults = {"data.root": "digits-mosaic", "reporting.runs_dir": "runs", "resume": "", "data.cache_dir": ""}

    def resolved(*arguments: str) -> dict:
        return launch_config.resolve_run_config(simulate.parser().parse_args(arguments), defaults)

    assert resolved() == {"reporting.runs_dir": str(tmp_path / "runs")}
    assert resolved("-c", "resume=runs/x data.cache_dir=c") == {
        "resume": str(tmp_path / "runs" / "x"),
        "data.cache_dir": str(tmp_path / "c"),
        "reporting.runs_dir": str(tmp_path / "runs"),
    }
    assert resolved("--data", "digits")["data.root"] == "digits"
    assert resolved("--data", "./digits")["data.root"] == str(tmp_path / "digits")


def test_workers_are_no_more_than_sites_or_cores(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(simulate, "available_cpus", lambda: 64)
    config = simulate.Simulation(Path(), {}, sites=5, cpus_per_site=2, gpus_per_site=0.5).federation_config()
    assert config == (
        "num-supernodes=5 client-resources-num-cpus=2 client-resources-num-gpus=0.5 init-args-num-cpus=10"
    )
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert "init-args" not in simulate.Simulation(Path(), {}, sites=5).federation_config()


def test_log_keeps_the_servers_lines_and_drops_the_small_talk():
    log = [
        "\x1b[92mINFO \x1b[0m:      Starting Flower Simulation",
        "\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.",
        "\x1b[92mINFO \x1b[0m:      Federation `@none/default` (6 simulated SuperNodes)",
        "Successfully installed tiny-app to /somewhere",
        "/x/site-packages/ray/_private/worker.py:2051: FutureWarning: Tip",
        "  warnings.warn(",
        "\x1b[36m(ClientAppActor pid=12)\x1b[0m a site speaks",
        "2026-11-29 16:00:00,000\tINFO worker.py:1918 -- Started a local Ray instance.",
        "\x1b[92mINFO \x1b[0m:      ",
        "\x1b[92mINFO \x1b[0m:      round 1/3",
        "\x1b[92mINFO \x1b[0m:      ",
        "\x1b[92mINFO \x1b[0m:      ",
        "\x1b[92mINFO \x1b[0m:          sites=5 loss=0.3",
        "\x1b[93mWARNING \x1b[0m:   site st-mary did not answer",
        "plain print",
    ]
    assert list(readable(log)) == [
        "round 1/3",
        "",
        "    sites=5 loss=0.3",
        "WARNING: site st-mary did not answer",
        "plain print",
    ]


def test_run_folder_is_read_from_the_servers_line():
    assert run_folder_of("run folder: /a b/runs/x ") == Path("/a b/runs/x")
    assert run_folder_of("the folder of the run") is None


def test_newest_run_folder_ignores_runs_of_before(tmp_path):
    for name, when in (("old", 100), ("new", 300), ("newer", 400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        os.utime(tmp_path / name / "run.json", (when, when))
    assert newest_run_folder(tmp_path, since=200) == tmp_path / "newer"
    assert newest_run_folder(tmp_path, since=500) is None


def test_undefined_figures_are_shown_as_undefined():
    assert [cell(value) for value in (None, 0.5, 12, "x", ["a", "b"], [])] == ["—", "0.500", "12", "x", "a, b", "none"]
    row = {"auroc": 0.5, "auroc_low": 0.4, "auroc_high": 0.6, "ap": None, "ap_low": None, "ap_high": None}
    assert [figure(row, name) for name in ("auroc", "ap")] == ["0.500 (0.400–0.600)", "—"]


def test_run_without_final_figures_still_names_its_folder(tmp_path):
    (tmp_path / "run.json").write_text('{"final": null}')
    console = Console(record=True, width=200)
    print_results(tmp_path, console)
    assert str(tmp_path) in console.export_text()
