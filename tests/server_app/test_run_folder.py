"""What a run leaves behind, and that a stopped one goes on to the same bits."""

from __future__ import annotations

import json
import math

import pytest
from safetensors import safe_open

from federation import wire
from federation.settings import Settings
from server_app import run_folder
from server_app.checkpoint import FOLDER, ResumeError
from server_app.run_folder import RunFolder
from strategies.discovery import QuorumError
from strategies.progress import Progress


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def only_run(tmp_path):
    (found,) = [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
    return found


# -- a finished run -----------------------------------------------------------------------------------------------


def test_a_finished_run_leaves_everything_a_reader_needs(run_tiny):
    outcome = run_tiny()
    names = {path.name for path in outcome.run_dir.iterdir()}
    assert {"run.json", "metrics.jsonl", "model.safetensors", "report.html", "partition.json", "sites"} <= names
    run = json.loads((outcome.run_dir / "run.json").read_text())
    assert run["status"] == "completed" and run["selected_round"] in (1, 2) and run["settings"]["run"]["seed"] == 1
    assert run["labels"] == [str(digit) for digit in range(10)] and len(run["sites"]) == 5
    assert run["versions"]["flwr"].startswith("1.42") and run["finished"] >= run["started"]
    assert run["final"]["test"]["summary"]["macro_auroc"] == outcome.metrics["macro_auroc"]


def test_metrics_have_one_line_for_every_round_and_every_evaluation_of_every_site(run_tiny):
    lines = lines_of(run_tiny().run_dir)
    assert [line["round"] for line in lines if line["kind"] == "round"] == [1, 2]
    evaluations = [(line["round"], line["split"], line["scope"]) for line in lines if line["kind"] == "evaluation"]
    sites = ["pooled", *(f"site-0{index}" for index in range(5))]
    assert [entry for entry in evaluations if entry[1] == "val"] == [(r, "val", s) for r in (1, 2) for s in sites]
    assert sum(split == "test" for _, split, _ in evaluations) == 6


def test_no_file_holds_a_number_that_json_does_not_know(run_tiny):
    outcome = run_tiny()

    def refuse(constant):
        raise AssertionError(f"{constant} in a result file")

    for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    json.loads((outcome.run_dir / "run.json").read_text(), parse_constant=refuse)
    assert math.isfinite(outcome.metrics["loss"])


def test_the_model_file_says_what_it_is(run_tiny):
    outcome = run_tiny()
    with safe_open(outcome.run_dir / "model.safetensors", framework="pt") as file:
        header = file.metadata()
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert header["sha256"] == outcome.model_sha256 == wire.state_sha256({"model": state})
    assert json.loads(header["labels"]) == [str(digit) for digit in range(10)]
    assert json.loads(header["model"])["image_size"] == 16 and len(json.loads(header["thresholds"])) == 10


def test_checkpoints_and_best_models_do_not_pile_up(run_tiny):
    names = sorted(path.name for path in (run_tiny(federation__rounds=5).run_dir / FOLDER).iterdir())
    assert [name for name in names if name.startswith("round-")] == [
        "round-000004.safetensors",
        "round-000005.safetensors",
    ]
    assert len([name for name in names if name.startswith("best-")]) <= 3


def test_two_runs_of_the_same_second_have_two_folders(tiny, monkeypatch):
    class Frozen(run_folder.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(run_folder, "datetime", Frozen)
    settings = Settings.from_run_config(tiny)
    names = [RunFolder.open(settings).path.name for _ in range(3)]
    assert names == ["20300102-030405-fedavg", "20300102-030405-fedavg-1", "20300102-030405-fedavg-2"]


# -- resume ---------------------------------------------------------------------------------------------------------


def dying(server_round):
    """A fault of every site: it is gone from this round on, which ends the run below its quorum."""

    def fault(message, answer):
        if message.metadata.message_type == wire.TRAIN and message.content["config"]["server_round"] >= server_round:
            raise SystemExit(1)
        return answer()

    return {f"site-0{index}": fault for index in range(5)}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
@pytest.mark.parametrize("stopped", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bits(run_tiny, tmp_path, method, stopped):
    whole = run_tiny(method=method, federation__rounds=3, reporting__runs_dir=str(tmp_path / "whole"))
    with pytest.raises(QuorumError, match=f"round {stopped}: 0 usable replies"):
        run_tiny(method=method, federation__rounds=3, faults=dying(stopped))
    run_dir = only_run(tmp_path)
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"
    resumed = run_tiny(method=method, federation__rounds=3, resume=str(run_dir))
    assert resumed.run_dir == run_dir and resumed.model_sha256 == whole.model_sha256
    assert resumed.metrics == whole.metrics
    told = json.loads((run_dir / "run.json").read_text())
    assert told["status"] == "completed" and told["resumed_after_round"] == stopped - 1
    shown = [{k: v for k, v in line.items() if k != "seconds"} for line in lines_of(run_dir)]
    assert shown == [{k: v for k, v in line.items() if k != "seconds"} for line in lines_of(whole.run_dir)]


def test_resuming_with_other_settings_is_refused_and_changes_no_file(run_tiny, tmp_path):
    with pytest.raises(QuorumError):
        run_tiny(faults=dying(2))
    run_dir = only_run(tmp_path)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError, match=r"training\.lr: the run has 0.05, asked for is 0.5"):
        run_tiny(resume=str(run_dir), training__lr=0.5)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_resuming_from_no_folder_or_from_elsewhere_is_refused_with_the_fix(run_tiny, tmp_path):
    with pytest.raises(ResumeError, match="is no folder; give the run folder that was printed at its start"):
        run_tiny(resume=str(tmp_path / "nothing"))
    elsewhere = tmp_path / "moved" / "run"
    elsewhere.mkdir(parents=True)
    with pytest.raises(ResumeError, match=f"is not in reporting.runs_dir.*set that to '{elsewhere.parent}'"):
        run_tiny(resume=str(elsewhere))
    empty = tmp_path / "runs" / "20300101-000000-fedavg"
    empty.mkdir(parents=True)
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        run_tiny(resume=str(empty))


# -- the end of a failed run ------------------------------------------------------------------------------------------


def test_a_run_that_fails_before_its_sites_are_known_still_says_so(tiny):
    settings = Settings.from_run_config(tiny)
    folder = RunFolder.open(settings)
    folder.fail("QuorumError: nobody came")
    run = json.loads((folder.path / "run.json").read_text())
    assert run["status"] == "failed" and run["warnings"] == ["QuorumError: nobody came"]
    assert run["settings"]["federation"]["rounds"] == 2
    assert (folder.path / "report.html").exists()


def test_nothing_is_tested_before_the_test(tiny):
    assert RunFolder.open(Settings.from_run_config(tiny)).test == {}


def test_a_best_model_is_read_back_as_it_was(tiny):
    import torch

    folder = RunFolder.open(Settings.from_run_config(tiny))
    modules = {"model": {"a.b": torch.arange(3.0)}, "control": {"a.b": torch.zeros(2), "n": torch.tensor(4)}}
    folder.keep_best(7, modules)
    assert wire.state_sha256(folder.load_best(7)) == wire.state_sha256(modules)
    assert Progress().best_round == 0
