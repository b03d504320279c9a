"""FedMITR from a config to a result: both halves, its switches, what a hospital keeps back, the presets, Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from datasets.catalogue import EMBEDDED
from federation.settings import Settings
from models.fedmitr_exchange import NO_GUARANTEE
from server_app.launch_config import app_defaults, check_keys, read_toml
from strategies.discovery import QuorumError
from tests.faults.drills import lines_of, run_json
from tests.faults.ray_drills import copy_app, simulated

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "method": "fedmitr",
    "federation.rounds": 1,
    "data.root": "digits",
    "data.partition": "dirichlet_class",
    "data.alpha": 0.5,
    "data.num_sites": 3,
    "data.min_samples": 10,
    "data.image_size": 16,
    "training.epochs": 1,
    "fedmitr.model": "vit",
    "fedmitr.patch": 4,
    "fedmitr.width": 16,
    "fedmitr.depth": 2,
    "fedmitr.heads": 2,
    "fedmitr.pool_size": 24,
    "fedmitr.inv_batch": 8,
    "fedmitr.inv_iters": 8,
    "fedmitr.stops": "2,4",
    "fedmitr.ratios": "0.3,0.3",
    "fedmitr.kd_epochs": 2,
    "fedmitr.kd_batch": 8,
}


@pytest.fixture
def federate(run_tiny, tiny):
    """``federate(**changes)``: run folder of a federation of three sites, and its ``run.json``."""
    tiny.update(TINY)
    tiny.pop("model.width")

    def run(**changes):
        outcome = run_tiny(**changes)
        return outcome.run_dir, run_json(outcome.run_dir), outcome

    return run


def round_of(folder):
    (record,) = [line for line in lines_of(folder) if line["kind"] == "round"]
    return record


def test_one_exchange_gives_a_model_of_the_global_network(federate):
    folder, run, outcome = federate()
    record = round_of(folder)
    assert record["accepted"] == ["site-00", "site-01", "site-02"] and run["status"] == "completed"
    state = load_file(folder / "model.safetensors")
    assert state["head.weight"].shape == (10, 16) and all(bool(value.isfinite().all()) for value in state.values())
    assert outcome.metrics["num_examples"] == 382
    # up: half the bytes of what went down, and .npy headers
    assert record["bytes_up"] < 0.6 * record["bytes_down"]
    assert {extra["epsilon"] for extra in record["extra"].values()} == {NO_GUARANTEE}
    # what could show a patient is gone
    job = folder / "job"
    assert (
        not list(job.glob("uploads/*")) and not list(job.glob("pool-*")) and not (job / "initial.safetensors").exists()
    )


def test_the_same_seed_gives_the_same_bits(federate):
    (_, first, _), (_, second, _) = federate(), federate()
    assert first["model_sha256"] == second["model_sha256"]
    assert federate(seed=2)[1]["model_sha256"] != first["model_sha256"]


def test_private_training_and_the_audit_leave_their_trace(federate):
    pytest.importorskip("opacus")
    folder, _, _ = federate(fedmitr__dp_noise=1.0, fedmitr__audit=True, fedmitr__server="average")
    assert all(extra["epsilon"] > 0 for extra in round_of(folder)["extra"].values())
    assert "by each site&#39;s own account: epsilon site-00 " in (folder / "report.html").read_text(encoding="utf-8")
    for log in folder.glob("sites/site-*/site.log"):
        assert "audit: nearer to training in" in log.read_text(encoding="utf-8")
    told = (folder / "run.json").read_text() + (folder / "metrics.jsonl").read_text()
    assert "nearer to training" not in told


def test_a_refused_upload_is_a_neutral_code_and_the_round_goes_on(federate, monkeypatch):
    from client_app import fedmitr_check

    real = fedmitr_check.has_memorised
    asked = []

    def first_site_fails(audit, **arguments):
        asked.append(real(audit, **arguments))
        return len(asked) == 1

    monkeypatch.setattr(fedmitr_check, "has_memorised", first_site_fails)
    monkeypatch.setattr(fedmitr_check, "ITERATIONS", 5)
    folder, _, _ = federate(fedmitr__audit=True, fedmitr__server="average")
    record = round_of(folder)
    assert record["accepted"] == ["site-01", "site-02"]
    assert record["refused"] == [
        {"site": "site-00", "reason": "E-WITHHELD: a check of the site's own keeps its update back"}
    ]
    assert "Withheld" in (folder / "sites/site-00/site.log").read_text(encoding="utf-8")


def test_below_the_quorum_nothing_is_made_of_the_uploads(federate, monkeypatch):
    from client_app import fedmitr_check

    monkeypatch.setattr(fedmitr_check, "has_memorised", lambda audit, **_: True)
    monkeypatch.setattr(fedmitr_check, "ITERATIONS", 2)
    with pytest.raises(QuorumError, match="E-WITHHELD"):
        federate(fedmitr__audit=True)


def test_token_mode_trains_sites_and_server_on_tokens(federate):
    _, run, _ = federate(fedmitr__relabel_mode="token")
    assert run["status"] == "completed"
    assert run["model_sha256"] != federate()[1]["model_sha256"]


def test_mosaics_with_several_labels_go_the_same_way(federate):
    _, run, outcome = federate(
        data__root="digits-mosaic", data__partition="beta_gamma", evaluation__selection_metric="macro_auroc"
    )
    assert run["task"] == "multilabel" and outcome.metrics["macro_auroc"] is not None


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "presets").glob("fedmitr-*.toml")), ids=lambda path: path.stem)
def test_presets_are_settings_of_the_app_that_contradict_nothing(path):
    chosen = read_toml(path)
    check_keys(chosen, app_defaults(ROOT))
    settings = Settings.from_run_config(chosen)
    assert settings.method == "fedmitr" and settings.federation.rounds == 1
    assert settings.data.root in EMBEDDED or settings.options.init_weights


@pytest.mark.slow
def test_the_demo_runs_as_a_newcomer_starts_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "server_app.simulate", "--preset", "presets/fedmitr-demo.toml", "--runs-dir",
         str(tmp_path), "-c", "training.epochs=1 fedmitr.inv_iters=24 fedmitr.kd_epochs=1 fedmitr.pool_size=60"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = tmp_path.glob("*-fedmitr")
    assert json.loads((folder / "run.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_ray_gives_the_bits_of_the_process(federate, tmp_path, tiny):
    _, run, _ = federate()
    done = simulated(copy_app(tmp_path / "app"), dict(tiny), sites=3)
    assert done.exit_code == 0, done.logs[-5000:]
    assert run_json(done.run_dir)["model_sha256"] == run["model_sha256"]
