"""The table of `fedmitr`: sites train once, every row works on their uploads, nothing is done twice, losers show."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from client_app.site import open_folder, open_site, site_names
from federation.settings import Settings
from models.fedmitr import normalised
from server_app import fedmitr_table, inprocess, run_folder
from server_app.compare_plan import PlanError, Row, read_plan
from strategies.fedmitr_job import rows
from tests.faults.drills import run_json

PLAN = """
title = "Tiny"
notes = "One epoch teaches nobody anything."
seeds = [1, 2]
metrics = ["accuracy", "balanced_accuracy", "worst_recall"]

[base]
method = "fedmitr"
federation.rounds = 1
evaluation.every = 0
evaluation.bins = 256
reporting.tensorboard = false
data.image_size = 16
data.num_sites = 2
training.epochs = 1
fedmitr.model = "vit"
fedmitr.patch = 8
fedmitr.width = 16
fedmitr.depth = 1
fedmitr.heads = 2
fedmitr.pool_size = 16
fedmitr.inv_batch = 8
fedmitr.inv_iters = 3
fedmitr.stops = "1"
fedmitr.ratios = "0.5"
fedmitr.kd_epochs = 1
fedmitr.kd_batch = 8
fedmitr.gen_steps = 1

[settings.digits.data]
root = "digits"
partition = "iid"

[settings.absent]
needs = "nowhere.zip"
"""
FEW = {name: rows()[name] for name in ("fedmitr", "kd", "ensemble", "average")}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """``table(*options)``: exit code of the command with four rows, in this process; and the page's path."""
    monkeypatch.setattr(run_folder, "BOOTSTRAP_DRAWS", 2)
    monkeypatch.setattr(fedmitr_table, "rows", lambda: FEW)
    (tmp_path / "plan.toml").write_text(PLAN)

    def run(*options):
        out = tmp_path / "page.md"
        return fedmitr_table.main(
            [
                str(tmp_path / "plan.toml"),
                "--runs-dir",
                str(tmp_path / "runs"),
                "--out",
                str(out),
                "--jobs",
                "1",
                *options,
            ]
        ), out

    return run


@pytest.fixture
def count_trainings(monkeypatch):
    """A list that gets the seed of every federation that is trained."""
    seeds, real = [], inprocess.run

    def counted(run_config, **arguments):
        seeds.append(run_config["seed"])
        return real(run_config, **arguments)

    monkeypatch.setattr(inprocess, "run", counted)
    return seeds


def row_files(folder):
    found = [
        run_json(path.parent) | {"folder": path.parent} for path in sorted(folder.glob("runs/fedmitr-*/row-*/run.json"))
    ]
    return {(run["row"], run["folder"].parent.name): run for run in found}


def test_sites_train_once_a_seed_and_every_row_is_on_the_page(table, tmp_path, count_trainings):
    code, out = table()
    assert code == 0 and sorted(count_trainings) == [1, 2]
    found = row_files(tmp_path)
    assert {name for name, _ in found} == set(FEW) and len(found) == 8
    page = out.read_text()
    for name in FEW:
        assert f"\n| {name} | " in page
    assert "Difference to `fedmitr`" in page and "the data is absent: nowhere.zip" in page and "± " in page
    assert all(run["final"]["test"]["summary"]["num_examples"] == 382 for run in found.values())
    # uploads and synthetic images are gone, since every row has its result
    assert not list(tmp_path.glob("runs/**/uploads/*")) and not list(tmp_path.glob("runs/**/pool-*"))


def test_the_same_command_again_runs_nothing(table, tmp_path, count_trainings):
    table()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/fedmitr-*/row-*/run.json")}
    code, out = table()
    assert code == 0 and len(count_trainings) == 2
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/fedmitr-*/row-*/run.json")}
    assert "8 with a completed run" in out.read_text()


def test_a_row_that_failed_is_run_again_on_the_uploads_that_are_there(table, tmp_path, monkeypatch, count_trainings):
    real = fedmitr_table.run_job

    def full_disk(folder, changes, **arguments):
        if changes["fedmitr.server"] == "kd":
            raise fedmitr_table.JobError("no space left")
        return real(folder, changes, **arguments)

    monkeypatch.setattr(fedmitr_table, "run_job", full_disk)
    code, out = table()
    assert code == 1 and "- kd, all seeds: failed: JobError: no space left" in out.read_text()
    assert list(tmp_path.glob("runs/**/uploads/*"))  # kept for the row that has no result
    monkeypatch.setattr(fedmitr_table, "run_job", real)
    code, out = table()
    assert code == 0 and len(count_trainings) == 2 and "failed:" not in out.read_text()
    assert not list(tmp_path.glob("runs/**/uploads/*"))


def test_figures_are_those_of_the_model_on_all_test_samples(table, tmp_path):
    """Accuracy, balanced accuracy and worst recall from a plain forward pass over the digits' test split."""
    table()
    for (name, _), run in row_files(tmp_path).items():
        if name not in ("kd", "average"):
            continue
        settings = Settings.from_run_config(
            {key: value for key, value in _flat(run["folder"]).items() if not key.startswith("resume")}
        )
        network = fedmitr_table.build(tuple("0123456789"), settings)
        result = fedmitr_table.run_job(_job(run["folder"]), FEW[name], name=run["folder"].name)
        network.load_state_dict(result.state)
        hits, truth = [], []
        for index in range(len(site_names(settings))):
            node = {"partition-id": index}
            split = open_site(settings, node, open_folder(settings, node, "plain")).data.splits["test"]
            pixels = torch.from_numpy(split.images.copy()).permute(0, 3, 1, 2).float() / 255
            with torch.no_grad():
                hits.append(network.eval()(normalised(pixels, (0.5,), (0.5,))).argmax(dim=1).numpy())
            truth.append(split.targets.argmax(axis=1))
        found, wanted = np.concatenate(hits), np.concatenate(truth)
        recalls = [float((found[wanted == label] == label).mean()) for label in range(10)]
        summary = run["final"]["test"]["summary"]
        assert summary["accuracy"] == pytest.approx(float((found == wanted).mean()))
        assert summary["balanced_accuracy"] == pytest.approx(np.mean(recalls))
        assert summary["worst_recall"] == pytest.approx(min(recalls))


def _job(row):
    (job,) = row.parent.glob("*-fedmitr/job")
    return job


def _flat(row):
    return json.loads((_job(row) / "job.json").read_text())["settings"]


def test_dry_run_writes_nothing(table, tmp_path):
    code, out = table("--dry-run")
    assert code == 0 and not out.exists() and not (tmp_path / "runs").exists()


def test_a_plan_with_rows_of_its_own_is_refused(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN + '\n[rows.mine]\nmethod = "fedmitr"\n')
    with pytest.raises(PlanError, match="this command brings its own"):
        read_plan(tmp_path / "plan.toml", [Row("fedmitr", {})])
