"""Whole runs with `privacy.dp`: the noise in the model has the declared size, and the run says what it is worth."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_app.private_update import protected
from client_app.training import Update
from federation import differential_privacy as privacy
from federation import wire
from federation.differential_privacy import PrivacyError, update_norm
from federation.settings import SettingsError
from strategies.fedavg import FedAvg

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting (extra dp) is not installed"
)
SITES, CLIP, NOISE = 5, 0.5, 0.2
ONE = {"federation__rounds": 1, "evaluation__every": 0, "model__norm": "group", "privacy__dp_clip": CLIP}
CENTRAL = {**ONE, "privacy__dp": "central", "federation__weighting": "equal"}
LOCAL = {**ONE, "privacy__dp": "local", "federation__weighting": "equal"}
SILENT = 1e-9
"""A noise that changes nothing: what is left is the clip."""


def floats(outcome):
    state = load_file(outcome.run_dir / "model.safetensors")
    return torch.cat([value.double().reshape(-1) for _, value in sorted(state.items()) if value.is_floating_point()])


def told(outcome):
    return json.loads((outcome.run_dir / "run.json").read_text())


@pytest.fixture(scope="module")
def done():
    """Finished runs by their config: several tests look at the same one."""
    return {}


@pytest.fixture
def run_dp(run_tiny, done):
    def run(base, noise=NOISE, *, again=False, faults=None, **changes):
        config = {**base, "privacy__dp_noise": noise, **changes}
        if again or faults:
            return run_tiny(**config, faults=faults)
        key = tuple(sorted(config.items()))
        if key not in done:
            done[key] = run_tiny(**config)
        return done[key]

    return run


# -- the noise that is in the model -----------------------------------------------------------------------------------


def test_the_servers_noise_is_on_the_mean_once_and_of_the_declared_size(run_dp):
    noise = (floats(run_dp(CENTRAL)) - floats(run_dp(CENTRAL, SILENT))).numpy()
    expected = NOISE * CLIP / SITES
    assert noise.std() == pytest.approx(expected, rel=5 / np.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 5 * expected / np.sqrt(noise.size)


def test_the_sites_noise_adds_up_to_its_root_mean(run_dp):
    noise = (floats(run_dp(LOCAL)) - floats(run_dp(LOCAL, SILENT))).numpy()
    assert noise.std() == pytest.approx(NOISE * CLIP / np.sqrt(SITES), rel=5 / np.sqrt(2 * noise.size))


def test_the_same_seed_gives_the_same_model_and_another_seed_other_noise(run_dp):
    first = run_dp(CENTRAL)
    assert run_dp(CENTRAL, again=True).model_sha256 == first.model_sha256
    assert run_dp(CENTRAL, seed=2).model_sha256 != first.model_sha256


@pytest.mark.parametrize("base", [LOCAL, CENTRAL], ids=["local", "central"])
def test_under_masks_the_model_is_the_same_up_to_the_fixed_point(run_dp, base):
    plain, masked = floats(run_dp(base)), floats(run_dp(base, privacy__secure_sum=True))
    assert float((plain - masked).abs().max()) < 1e-6


# -- the clip ---------------------------------------------------------------------------------------------------------


def watched(norms):
    """A fault that changes nothing and notes the norm of what leaves the site."""

    def look(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN:
            norms.append(update_norm(wire.modules_of(reply.content)))
        return reply

    return {"site-00": look, "site-03": look}


def test_no_update_leaves_a_site_longer_than_the_clip(run_dp):
    norms: list[float] = []
    run_dp(CENTRAL, privacy__dp_clip=0.01, faults=watched(norms))
    assert len(norms) == 2 and all(norm <= 0.01 for norm in norms) and min(norms) > 0.0099


def test_what_leaves_a_site_is_noised_where_sites_add_the_noise(run_dp):
    norms: list[float] = []
    outcome = run_dp(LOCAL, faults=watched(norms))
    spread = NOISE * CLIP * np.sqrt(floats(outcome).numel())
    assert all(norm == pytest.approx(np.hypot(spread, CLIP), rel=0.1) for norm in norms)


def test_a_site_that_does_not_clip_moves_the_mean_no_further_than_an_honest_one(run_dp):
    def greedy(message, answer):
        reply = answer()
        if message.metadata.message_type == wire.TRAIN:
            model = wire.modules_of(reply.content)["model"]
            longer = {n: v * -1000 if v.is_floating_point() else v for n, v in model.items()}
            reply.content["module.model"] = wire.encode(longer)
        return reply

    moved = floats(run_dp(CENTRAL, SILENT, faults={"site-02": greedy})) - floats(run_dp(CENTRAL, SILENT))
    assert float(moved.norm()) <= 2 * CLIP / SITES * (1 + 1e-5)


def test_a_hospitals_noise_never_comes_twice_and_a_simulated_sites_always(opened):
    site, job = opened(privacy__dp="local")
    update = Update({"model": {"w": torch.zeros(100), "steps": torch.tensor(7)}}, 9, 1.0, 1)
    assert site.consents is not None
    first, again = (protected(update, site, job).modules["model"] for _ in range(2))
    assert not torch.equal(first["w"], again["w"]) and int(first["steps"]) == 7
    simulated = replace(site, consents=None)
    first, again = (protected(update, simulated, job).modules["model"]["w"] for _ in range(2))
    assert torch.equal(first, again) and 0.5 < float(first.std()) < 1.5
    later = protected(update, simulated, replace(job, server_round=2)).modules["model"]["w"]
    assert not torch.equal(first, later)


def test_a_hospital_sends_nothing_to_a_server_whose_noise_the_seed_tells(opened):
    update = Update({"model": {"w": torch.zeros(3)}}, 9, 1.0, 1)
    central = {"privacy__dp": "central", "federation__weighting": "equal"}
    site, job = opened(**central)
    with pytest.raises(SettingsError, match="'beta_gamma' with privacy"):
        protected(update, site, job)
    site, job = opened(**central, data__partition="own")
    assert protected(update, site, job).modules["model"]["w"].tolist() == [0, 0, 0]


def test_without_the_switch_an_update_is_the_same_object(opened):
    site, job = opened()
    update = Update({"model": {"w": torch.full((3,), 1e3)}}, 9, 1.0, 1)
    assert protected(update, site, job) is update


# -- what the run says ------------------------------------------------------------------------------------------------


def test_epsilon_is_in_run_json_the_rounds_and_the_report(run_dp):
    outcome = run_dp(LOCAL, noise=2.0, federation__rounds=2)
    said = told(outcome)["differential_privacy"]
    assert said["mode"] == "local" and said["rounds"] == 2 and said["clip"] == CLIP
    assert said["epsilon"] == privacy.epsilon(1.0, 2, 1e-5)
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line["privacy"] for line in lines if line["kind"] == "round"]
    assert [entry["rounds"] for entry in rounds] == [1, 2]
    assert rounds[0]["epsilon"] == privacy.epsilon(1.0, 1, 1e-5)
    report = (outcome.run_dir / "report.html").read_text()
    assert "epsilon at most" in report and "score histograms are not covered" in report


def test_a_run_without_it_says_nothing_of_it(run_tiny):
    outcome = run_tiny(federation__rounds=1, evaluation__every=0)
    assert (
        "differential_privacy" not in told(outcome) and "epsilon" not in (outcome.run_dir / "report.html").read_text()
    )


def test_a_resumed_run_counts_the_round_that_may_have_been_under_way(run_dp, tiny):
    def killed(message, answer):
        if message.content[wire.CONFIG]["server_round"] == 2:
            raise KeyboardInterrupt
        return answer()

    base = {**LOCAL, "federation__rounds": 2}
    with pytest.raises(KeyboardInterrupt):
        run_dp(base, faults={"site-04": killed})
    (folder,) = (path for path in Path(tiny["reporting.runs_dir"]).iterdir() if (path / "checkpoints").is_dir())
    failed = json.loads((folder / "run.json").read_text())
    assert failed["status"] == "failed" and failed["differential_privacy"]["rounds"] == 2  # its noised updates are out
    outcome = run_dp(base, again=True, resume=str(folder))
    assert told(outcome)["differential_privacy"]["rounds"] == 3


def test_batch_norm_is_warned_of_and_its_variances_stay_variances(run_dp):
    outcome = run_dp(CENTRAL, noise=50.0, model__norm="batch", federation__rounds=1)
    state = load_file(outcome.run_dir / "model.safetensors")
    variances = torch.cat([value for name, value in state.items() if name.endswith("running_var")])
    assert float(variances.min()) == 0.0
    assert any("BatchNorm" in warning for warning in told(outcome)["warnings"])


def test_without_the_accountant_a_run_ends_before_it_begins(run_dp, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(PrivacyError, match="deploy/install"):
        run_dp(CENTRAL, again=True)


def test_a_method_that_weighs_sites_its_own_way_gets_no_noise_from_the_server(run_dp, monkeypatch):
    monkeypatch.setattr(FedAvg, "weigh", lambda self, reply, module: float(reply.num_examples))
    with pytest.raises(PrivacyError, match="sites that weigh 1 each"):
        run_dp(CENTRAL, again=True)
