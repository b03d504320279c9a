"""`fedmpt` from a config to a result: every switch, partial labels, secure sums, a resumed run, a page, and Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from federation import wire
from federation.settings import Settings
from models.clip import clip_sha256
from server_app import explain
from server_app.launch_config import read_toml
from strategies.discovery import QuorumError
from tests.faults.drills import BAD, LABELS, lines_of, run, run_json, state_sha256
from tests.faults.ray_drills import copy_app, simulated
from tests.strategies.fedmpt_data import run_config, write_clip

PRESETS = Path(__file__).parents[2] / "presets"


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def first_round(folder):
    return next(line for line in lines_of(folder) if line["kind"] == "round")


@pytest.mark.parametrize(
    "changes",
    [
        {"participation": 0.5},
        {"aggregate": "num_examples", "upload_dtype": "float16"},
        {"data__partition": "label_clusters", "federation__min_sites": 2},
        {"data__lost_labels": 0.5, "data__lost_mode": "unknown_entries"},
        {"data__lost_labels": 0.9, "data__lost_mode": "drop_positive"},
        {"training__optimizer": "adamw"},
        {"variant": "official_v1"},
        {"conditions": "chest-xray"},
        {"alone": True},
        {"privacy__dp": "local", "privacy__dp_noise": 0.01},
    ],
    ids=lambda changes: ", ".join(f"{key}={value}" for key, value in changes.items()),
)
def test_every_way_runs_to_a_result(tmp_path, clip, changes):
    folder = run(run_config(tmp_path, clip, **changes)).run_dir
    summary = run_json(folder)["final"]["test"]["summary"]
    assert {"macro_auroc", "map", "cf1", "of1", "official_map"} <= set(summary)
    record = first_round(folder)
    assert len(record["accepted"]) == (2 if "participation" in changes else 4) and not record["refused"]


def test_the_report_tells_every_sites_mean_gate_weights(tmp_path, clip):
    folder = run(run_config(tmp_path, clip, conditions="light, dark")).run_dir
    for site in run_json(folder)["final"]["test"]["per_site"]:
        told = [site["summary"][f"gate of {name}"] for name in ("light", "dark")]
        assert sum(told) == pytest.approx(1)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "gate of light" in page and "gate of dark" in page


def test_half_precision_halves_the_upload_and_hardly_changes_the_model(tmp_path, clip):
    folders = [
        run(run_config(tmp_path, clip, upload_dtype=dtype, federation__rounds=1)).run_dir
        for dtype in ("float32", "float16")
    ]
    whole, half = (first_round(folder)["bytes_up"] for folder in folders)
    headers = 4 * 8 * 128
    assert half - headers == (whole - headers) / 2
    assert run_json(folders[0])["model_sha256"] != run_json(folders[1])["model_sha256"]
    one, other = (run_json(folder)["final"]["test"]["summary"]["loss"] for folder in folders)
    assert one == pytest.approx(other, rel=1e-3)


def test_a_secure_sum_gives_the_plain_mean_up_to_its_fixed_point(tmp_path, clip):
    plain = run(run_config(tmp_path, clip, federation__rounds=1)).run_dir
    masked = run(run_config(tmp_path, clip, federation__rounds=1, privacy__secure_sum=True)).run_dir
    one, other = (load_file(folder / "model.safetensors") for folder in (plain, masked))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5)


def test_a_site_with_another_clip_is_refused_and_the_others_go_on(tmp_path, clip):
    """A site cannot start where its CLIP is not the agreed one; its log says both hashes, the server's a code."""
    other = write_clip(tmp_path / "other", seed=2)
    agreed = clip_sha256(clip)
    with pytest.raises(QuorumError, match="E-DATA"):
        run(run_config(tmp_path, other, clip_sha256=agreed))
    (log, *_) = sorted(tmp_path.glob("runs/*/sites/*/site.log"))
    assert agreed in log.read_text() and clip_sha256(other) in log.read_text()


def test_a_site_that_sends_nan_is_left_out(tmp_path, clip):
    def poisoned(message, answer):
        reply = answer()
        name = wire.MODULE + "model"
        if name in reply.content:
            arrays = {key: value.copy() for key, value in wire.decode(reply.content[name]).items()}
            arrays["prompt.cls"][0, 0] = np.nan
            reply.content[name] = wire.encode(arrays)
        return reply

    folder = run(run_config(tmp_path, clip), {BAD: poisoned}).run_dir
    (refused,) = first_round(folder)["refused"]
    assert refused["site"] == BAD and "prompt.cls" in refused["reason"]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, clip):
    config = run_config(tmp_path, clip, federation__min_sites=4)
    whole = run(config).run_dir

    def dies_in_round_two(message, answer):
        if message.content[wire.CONFIG]["server_round"] == 2:
            raise SystemExit
        return answer()

    with pytest.raises(QuorumError):
        run(config, {BAD: dies_in_round_two})
    (stopped,) = set((tmp_path / "runs").glob("*-fedmpt*")) - {whole}
    resumed = run({**config, "resume": str(stopped)}).run_dir
    assert resumed == stopped and state_sha256(stopped) == state_sha256(whole)


def test_the_page_of_a_run_shows_transport_and_gate(tmp_path, clip):
    folder = run(run_config(tmp_path, clip)).run_dir
    page = explain.write_page(folder, images=1).read_text(encoding="utf-8")
    for label in LABELS:
        assert f'alt="{label}: transport"' in page and f'alt="{label}: gate"' in page


@pytest.mark.parametrize("name", ["fedmpt-demo", "fedmpt-coco", "fedmpt-cxr"])
def test_the_presets_are_valid(name):
    settings = Settings.from_run_config({"data.root": "folder", **read_toml(PRESETS / f"{name}.toml")})
    assert settings.method == "fedmpt" and settings.options.condition_names()


@pytest.mark.slow
def test_same_seed_same_bits_in_process_and_on_ray(tmp_path, clip):
    config = run_config(tmp_path, clip, federation__timeout_s=120.0)
    folder = run(config, as_it_is=True).run_dir
    done = simulated(copy_app(tmp_path / "app"), config, sites=4)
    assert done.exit_code == 0, done.logs[-5000:]
    assert run_json(done.run_dir)["model_sha256"] == run_json(folder)["model_sha256"]
    assert lines_of(done.run_dir) == lines_of(folder)
